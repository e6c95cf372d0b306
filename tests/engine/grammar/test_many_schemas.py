"""A thousand random JSON schemas on a random model, which writes anything that it may: all outputs are valid."""

import json
import random
import re
import time
from typing import Any

import numpy as np
import pytest
import torch

from kit.models.tiny_tokenizers import WORDS, byte_level_directory
from onewave import LLM, SamplingParams
from onewave.engine.grammar.compiler import GrammarState

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("llguidance")
jsonschema: Any = pytest.importorskip("jsonschema")

TREE = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/leaf"}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}


def schema_of(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of one value: nested objects and lists, references, enums, patterns, bounds, unions."""
    words = ["name", "größe", 'a "b"', "x\ny", "日本", "id", "\\", "e2"]
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
        {"type": "string", "maxLength": rng.randint(0, 9)},
        {"type": "string", "pattern": rng.choice(["^[a-c]{2,5}$", r"^\d{3}-\d{2}$", "^(é|ab)+z?$"]), "maxLength": 12},
        {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4"])},
        {"enum": rng.sample([*words, 1, 2.5, None, True], 3)},
        {"const": rng.choice(words)},
        {"$ref": f"#/$defs/{rng.choice(['leaf', 'tree'])}"},
    ]
    if not depth or rng.random() < 0.25:
        return rng.choice(leaves)
    if rng.random() < 0.25:
        return {"anyOf": [schema_of(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if rng.random() < 0.3:
        return {"type": "array", "items": schema_of(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    names = rng.sample(words, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema_of(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        # A free name would be as long as a random model pleases.
        "patternProperties": rng.choice([{}, {"^k[0-9]{1,2}$": {"type": "integer", "minimum": 0, "maximum": 5}}]),
        "additionalProperties": False,
    }


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = byte_level_directory(tmp_path_factory.mktemp("tiny"), WORDS)
    torch.manual_seed(0)
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary) + 16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return LLM(path, device="cpu", max_num_seqs=16)


@pytest.mark.slow
def test_a_thousand_json_schemas_at_temperature_1_are_all_obeyed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds: list[float] = []
    fill, accept = GrammarState.fill, GrammarState.accept

    def timed(work: Any) -> Any:
        def call(*args: Any) -> None:
            begin = time.perf_counter()
            work(*args)
            seconds.append(time.perf_counter() - begin)

        return call

    monkeypatch.setattr(GrammarState, "fill", timed(fill))
    monkeypatch.setattr(GrammarState, "accept", timed(accept))
    rng = random.Random(59)
    leaf = {"type": "string", "maxLength": 5}
    schemas = [{**schema_of(rng), "$defs": {"leaf": leaf, "tree": TREE}} for _ in range(1000)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=None, structured_outputs={"json": schema})
        for i, schema in enumerate(schemas)
    ]
    outputs = [each.outputs[0] for each in llm.generate(["{"] * len(schemas), params)]
    assert [output.text for output in outputs if output.finish_reason != "stop"] == []
    for schema, output in zip(schemas, outputs, strict=True):
        jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
        assert not re.search(r"\s{40}", output.text)
    tokens = sum(len(output.token_ids) for output in outputs)
    with capsys.disabled():
        cost = np.array(seconds) * 1e6
        print(
            f"\n{tokens} tokens of {llm.config.vocab_size}: {cost.sum() / tokens:.1f} us a token for masks, a call's ",
            end="",
        )
        print("p50 {:.1f}, p99 {:.1f}, highest {:.1f} us".format(*np.percentile(cost, [50, 99, 100])))
