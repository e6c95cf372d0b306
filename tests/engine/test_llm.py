"""LLM on a tiny random checkpoint, against transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onewave
from kit.models.tiny_tokenizers import WORDS, byte_level_directory, bytes_directory
from kit.processes import python
from onewave import LLM, InvalidArgumentError, OnewaveError, SamplingParams, TokenizerError, UnsupportedError
from onewave.engine.load.choices import check_dtype_on
from onewave.engine.text.chat_template import ChatTemplate
from onewave.ops.sampling import reference

transformers: Any = pytest.importorskip("transformers")

VOCAB, EOS, MAX_POSITION = 317, 257, 96
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Hello", "a much longer prompt, with commas", "ü", "x y z", "12345 67890", "The end."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with four special tokens and a Llama of three layers."""
    path = bytes_directory(tmp_path_factory.mktemp("tiny"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=MAX_POSITION,
        bos_token_id=None,
        eos_token_id=EOS,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", max_num_seqs=4) as model:
        yield model


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def oracle_greedy(oracle: Any, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        output = oracle.generate(
            torch.tensor([ids]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return output[0, len(ids) :].tolist()


def token_ids(outputs: list[onewave.RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_greedy_tokens_of_a_ragged_batch_equal_transformers(llm: LLM, oracle: Any) -> None:
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert output.outputs[0].token_ids == oracle_greedy(oracle, output.prompt_token_ids, 24)
        # The model's vocabulary is larger than the tokenizer's: ids without a token are no text.
        assert output.outputs[0].text == llm.tokenizer.decode_lenient(output.outputs[0].token_ids, True)
        assert output.outputs[0].finish_reason == "length"
        assert output.finished


SEEDED = SamplingParams(seed=11, max_tokens=20, ignore_eos=True, top_p=0.95)
IN_A_NEW_PROCESS = """
import json, sys
from onewave import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu")
outputs = llm.generate(["x y z"], SamplingParams(seed=11, max_tokens=20, ignore_eos=True, top_p=0.95, n=2))
outputs += llm.generate(["x y z"], SamplingParams(max_tokens=20, ignore_eos=True))
print(json.dumps([sample.token_ids for output in outputs for sample in output.outputs]))
"""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_seed_gives_the_same_numbers_alone_and_in_a_batch_in_every_dtype(dtype: str, checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=24, seed=7, temperature=0.8, logprobs=0, ignore_eos=True)
    # On a CPU a prompt whose beginning is cached has the same tokens, yet not every last bit.
    with LLM(checkpoint, dtype=dtype, device="cpu", enable_prefix_caching=False) as llm:
        # Activations leave float16's range: a CPU computes in float32 then.
        assert llm.dtype is (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in PROMPTS]
        for one, other in zip(alone, llm.generate(PROMPTS, params), strict=True):
            assert other.outputs[0].token_ids == one.token_ids
            assert other.outputs[0].logprobs == one.logprobs


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_in_a_new_process(llm: LLM, checkpoint: Path) -> None:
    alone = token_ids(llm.generate("x y z", SEEDED))[0]
    batch = llm.generate(PROMPTS, [SamplingParams(max_tokens=5 + i, seed=i) if i != 3 else SEEDED for i in range(6)])
    assert batch[3].outputs[0].token_ids == alone
    elsewhere = json.loads(python("-c", IN_A_NEW_PROCESS, str(checkpoint)))
    assert elsewhere[0] == alone
    assert elsewhere[1] != alone
    # Requests without a seed repeat too: they depend on LLM(seed=0) and on the request's number, 1 here.
    with LLM(checkpoint, device="cpu") as fresh:
        fresh.generate("Hello", SamplingParams(max_tokens=1))
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert token_ids(fresh.generate("x y z", params))[0] == elsewhere[2]
        assert token_ids(fresh.generate("x y z", params))[0] != elsewhere[2]


def test_logprobs_of_prompt_and_output_sum_to_transformers(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(seed=2, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1, temperature=0.7)
    output = llm.generate("a much longer prompt", params)[0]
    sample = output.outputs[0]
    ids = output.prompt_token_ids + sample.token_ids
    with torch.no_grad():
        logits = oracle(torch.tensor([ids])).logits[0].double().numpy()
    expected = [reference.logprobs(row)[token] for row, token in zip(logits[:-1], ids[1:], strict=True)]
    assert output.prompt_logprobs[0] is None
    prompt = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=False) if entry]
    generated = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    np.testing.assert_allclose(prompt + generated, expected, rtol=1e-3, atol=1e-4)
    assert sample.cumulative_logprob == pytest.approx(sum(expected[-12:]), rel=1e-3)


def test_streaming_shows_the_same_text_piece_by_piece(llm: LLM) -> None:
    whole = llm.generate("Hello", SEEDED)[0].outputs[0]
    pieces = list(llm.stream("Hello", SEEDED))
    assert "".join(piece.outputs[0].delta for piece in pieces) == pieces[-1].outputs[0].text == whole.text
    assert [len(piece.outputs[0].token_ids) for piece in pieces] == list(range(1, 21))
    assert [piece.finished for piece in pieces] == [False] * 19 + [True]


def test_a_stop_string_that_straddles_tokens_ends_the_text(llm: LLM) -> None:
    whole = llm.generate("Hello", SEEDED)[0].outputs[0]
    stop = whole.text[5:8]
    params = SamplingParams.from_dict({"seed": 11, "max_tokens": 20, "ignore_eos": True, "top_p": 0.95, "stop": stop})
    output = llm.generate("Hello", params)[0].outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert list(llm.stream("Hello", params))[-1].outputs[0].text == output.text


@pytest.mark.parametrize("name", ["use_tqdm", "add_generation_prompt", "continue_final_message"])
def test_switches_are_true_or_false(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}: 'no'; allowed: True or False"):
        llm.chat([{"role": "user", "content": "hi"}], **{name: "no"})


class InBytes:
    def __fspath__(self) -> bytes:
        return b"/tmp"


@pytest.mark.parametrize(
    ("argument", "value"),
    [("model", InBytes()), ("tokenizer", InBytes()), ("decode", np.array(["auto", "eager"])), ("dtype", ["auto"]),
     ("load_format", np.array(["auto", "dummy"])), ("tokenizer", "a" * 300)],
)  # fmt: skip
def test_what_is_no_name_or_far_too_long_is_one_error(argument: str, value: Any) -> None:
    given: dict[str, Any] = {"model": "smollm2-135m-instruct", "load_format": "dummy", "device": "cpu", argument: value}
    with pytest.raises(OnewaveError, match=argument if len(str(value)) < 300 else "no such model"):
        LLM(given.pop("model"), **given)


def test_chat_lays_the_conversation_out_and_keeps_control_tokens_out_of_it(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi <|eos|>"}]
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == "<|user|>hi <|eos|><|bot|>"
    assert output.prompt_token_ids[0] == EOS + 1
    assert output.prompt_token_ids[-1] == EOS + 2
    assert EOS not in output.prompt_token_ids
    both = llm.chat([messages, [{"role": "user", "content": "you"}]], [GREEDY, GREEDY])
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert list(llm.chat_stream(messages, GREEDY))[-1].outputs[0].token_ids == output.outputs[0].token_ids


def test_chat_takes_vllms_arguments(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    output = llm.chat(talk, GREEDY, **going_on)[0]
    assert output.prompt == "<|user|>hi<|user|>Well"
    assert list(llm.chat_stream(talk, GREEDY, **going_on))[-1].outputs[0].text == output.outputs[0].text
    tools = [{"type": "function", "function": {"name": "weather"}}]
    written = "{{ tools[0].function.name }}{{ messages[0].content }}"
    assert llm.chat(talk, GREEDY, tools=tools, chat_template=written)[0].prompt == "weatherhi"
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.get_tokenizer().eos_token_id == EOS
    with pytest.raises(UnsupportedError, match="apply_chat_template: return_tensors="):
        llm.get_tokenizer().apply_chat_template(talk, return_tensors="pt")
    assert llm.get_tokenizer().apply_chat_template(talk, add_generation_prompt=True, tokenize=False).endswith("<|bot|>")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"continue_final_message": True}, "continue_final_message: True with add_generation_prompt; allowed: one of"),
        ({"tools": {"name": "f"}}, r"tools: \{'name': 'f'\}; allowed: a list of"),
        ({"tools": ["f"]}, "tools: a list with 'f'; allowed: a list of"),
        ({"tools": [{"type": "function"}]}, "tools: a chat template that reads none. Pass chat_template="),
        ({"tools": [], "chat_template_kwargs": {"tools": []}}, "tools: given twice"),
        ({"chat_template": "tool_use"}, r"chat_template: 'tool_use'; allowed: Jinja source, .* \(default\)"),
    ],
)
def test_arguments_of_chat_that_cannot_be_are_refused(llm: LLM, given: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, **given)


def test_a_conversation_is_rendered_once(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    real, rendered = ChatTemplate.render, list[Any]()

    def render(template: ChatTemplate, *args: Any) -> Any:
        rendered.append(real(template, *args))
        return rendered[-1]

    monkeypatch.setattr(ChatTemplate, "render", render)
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0]
    assert [each.text for each in rendered] == [output.prompt]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_asking_about_the_prompt_does_not_change_what_comes_of_it(dtype: str, checkpoint: Path) -> None:
    def logprobs(**asked: Any) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, n=2, **asked)
        return [output.logprobs for output in llm.generate([[7 * i % 250 for i in range(23)]], params)[0].outputs]

    with LLM(checkpoint, device="cpu", dtype=dtype) as llm:
        first, second = logprobs(prompt_logprobs=0)
        assert first == second == logprobs()[0]


def test_max_model_len_ends_the_text_and_bounds_the_prompt(checkpoint: Path) -> None:
    with LLM(checkpoint, device="cpu", max_model_len=10) as llm:
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (7, "length")
        assert len(llm.generate([1] * 9, SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 1
        with pytest.raises(InvalidArgumentError, match=r"prompt: 10 tokens; allowed: up to 9.*max_model_len=10"):
            llm.generate([1] * 10)
    for wrong in (MAX_POSITION + 1, 1, 0, -1, 10.0, True):
        with pytest.raises(InvalidArgumentError, match="max_model_len"):
            LLM(checkpoint, device="cpu", max_model_len=wrong)


@pytest.mark.parametrize("prompt", ["", [], [[]], [0, VOCAB], [-1], [["a"]], None, {"prompt": ""}, ["ok", ""]])
def test_a_bad_prompt_is_refused_in_one_line_before_anything_runs(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt") as caught:
        llm.generate(prompt)
    assert "\n" not in str(caught.value)
    assert not llm._open_engine().has_work
    with pytest.raises(InvalidArgumentError, match="prompt"):
        llm.stream(prompt)


def test_a_tokenizer_that_is_larger_than_the_model_is_named_as_such(checkpoint: Path, tmp_path: Path) -> None:
    larger = byte_level_directory(tmp_path, WORDS)
    with LLM(checkpoint, device="cpu", tokenizer=larger) as other:
        says = r"prompt token id: 9\d\d; allowed: 0\.\..* The tokenizer \(9\d\d tokens\) is larger than the model"
        with pytest.raises(InvalidArgumentError, match=says):
            other.generate("<think>")
        with pytest.raises(InvalidArgumentError, match=r"prompt token id: 1000; allowed: [^ ]*$"):
            other.generate([1000])


def test_bad_arguments_are_refused_in_one_line(llm: LLM, checkpoint: Path) -> None:
    for messages, got in (([], "an empty list; "), ([[], 3], r"a list with \[\]"), ([3, "x" * 500], "a list with 3")):
        with pytest.raises(InvalidArgumentError, match=f"messages: {got}"):
            llm.chat(messages)
    with pytest.raises(InvalidArgumentError, match=r"messages: a list with 'x{199}\.\.\.; "):
        llm.chat(["x" * 500])
    with pytest.raises(InvalidArgumentError, match=r"messages\[1\]: int; "):
        llm.chat([{"role": "user", "content": "x"}, 5])
    for name, value in (("device", "tpu"), ("device", "cpu:0"), ("device", "cuda:x"), ("dtype", "int8")):
        with pytest.raises(UnsupportedError, match=f"{name}: '{value}'"):
            LLM(checkpoint, **{name: value})
    huge = 10**5000  # which Python does not turn into text
    for name, value in (
        ("max_num_seqs", 0), ("max_num_seqs", 2**70), ("seed", -1), ("seed", 2**64), ("seed", huge),
        ("max_model_len", huge), ("device", huge), ("decode", huge), ("quantization", huge),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=name):
            LLM(checkpoint, **{"device": "cpu"} | {name: value})
    with pytest.raises(InvalidArgumentError, match="prompt token id"):
        llm.generate([huge])
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="'cuda', but PyTorch finds no CUDA GPU"):
            LLM(checkpoint, device="cuda")
    gpu = torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match="float32 on cuda:0"):
        check_dtype_on("float32", gpu)
    for name, where in (("auto", gpu), ("bfloat16", gpu), ("float32", torch.device("cpu"))):
        check_dtype_on(name, where)


def test_a_model_without_a_tokenizer_works_on_token_ids(checkpoint: Path, llm: LLM, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(checkpoint / file)
    with LLM(tmp_path, device="cpu") as bare:
        output = bare.generate([1, 2, 3], GREEDY)[0]
        assert output.outputs[0].text == ""
        assert output.outputs[0].token_ids == token_ids(llm.generate([1, 2, 3], GREEDY))[0]
        for attempt in (lambda: bare.generate("Hello"), lambda: bare.chat([{"role": "user", "content": "hi"}])):
            with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
                attempt()
        with pytest.raises(InvalidArgumentError, match="stop"):
            bare.generate([1], SamplingParams(stop="a"))
    with LLM(tmp_path, device="cpu", tokenizer=checkpoint) as borrowed:
        assert token_ids(borrowed.generate("Hello", GREEDY)) == token_ids(llm.generate("Hello", GREEDY))


def test_a_closed_model_says_so(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu")
    stream = llm.stream("Hello", GREEDY)
    real, inbox = llm.runner.decode, llm._thread._mailbox.inbox

    def decode(*args: Any) -> Any:
        while inbox.empty():  # until close has come
            pass
        return real(*args)

    llm.runner.decode = decode
    next(stream)
    llm.close()
    llm.close()
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidArgumentError, match="LLM: closed"):
            call("Hello")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"add_generation_prompt": False}, "add_generation_prompt; allowed: names other than"),
        ({"messages": []}, "messages; allowed: names other than"),
        ({"self": 1}, "self; allowed: names other than"),
        (["x"], r"\['x'\]; allowed: a mapping"),
        ({1: 2}, "a name 1; allowed: a mapping from names"),
    ],
)
def test_template_variables_that_cannot_be_are_refused(llm: LLM, variables: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"chat_template_kwargs: {says}"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, chat_template_kwargs=variables)


def test_dummy_weights_need_only_a_configuration_and_depend_on_the_seed(checkpoint: Path) -> None:
    def tokens(seed: int) -> list[list[int]]:
        with LLM(checkpoint, device="cpu", load_format="dummy", seed=seed) as llm:
            return token_ids(llm.generate([[1, 2, 3], [4]], GREEDY))

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)


def test_the_package_shows_its_names_without_loading_torch() -> None:
    code = "import sys, onewave as o; o.SamplingParams; o.OnewaveError; dir(o); sys.exit('torch' in sys.modules)"
    python("-c", code)
    assert all(getattr(onewave, name) is not None for name in onewave.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = onewave.nonsense
