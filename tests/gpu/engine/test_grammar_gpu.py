"""On a GPU: grammars are obeyed while steps run ahead, and change no token of batch-mates."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kit.models.dummy import ON_GPU, write_config
from kit.models.tiny_tokenizers import bytes_directory
from onewave import LLM, SamplingParams

pytest.importorskip("llguidance")
pytestmark = pytest.mark.gpu

CHANGES = ON_GPU | {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257}
SCHEMA = {"properties": {"a": {"enum": [1, "b"]}}, "required": ["a"], "additionalProperties": False}
FORMS: list[dict[str, Any] | None] = [
    None,
    {"regex": "[a-f]{4,30}x"},
    {"json": {"type": "object", **SCHEMA}},
    None,
    {"choice": ["yes", "no", "perhaps"]},
]


@pytest.fixture(scope="module", params=["graph", "eager"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_config(bytes_directory(tmp_path_factory.mktemp("tiny")), **CHANGES)
    with LLM(path, device="cuda", load_format="dummy", max_num_seqs=5, decode=request.param) as model:
        yield model


def test_forms_are_obeyed_and_batch_mates_keep_their_tokens(llm: LLM) -> None:
    assert llm.runner.run_ahead == 1
    prompts = [[i + 1, i + 2, i + 3] for i in range(20)]
    params = [
        SamplingParams(seed=i, max_tokens=60, top_k=[0, 7][i % 2], structured_outputs=FORMS[i % 5]) for i in range(20)
    ]
    together = [each.outputs[0] for each in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], each)[0].outputs[0] for prompt, each in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    for i, output in enumerate(together):
        if i % 5 == 1:
            assert re.fullmatch("[a-f]{4,30}x", output.text)
        elif i % 5 == 2:
            assert json.loads(output.text)["a"] in (1, "b")
        elif i % 5 == 4:
            assert output.text in ("yes", "no", "perhaps")
    llm.runner.run_ahead = 0
    try:
        waiting = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    finally:
        llm.runner.run_ahead = 1
    assert waiting == [output.token_ids for output in together]
