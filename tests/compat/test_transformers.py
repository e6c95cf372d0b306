"""attn_implementation="onewave" in transformers against its eager attention, on tiny models."""

import copy
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from onewave.base.errors import UnsupportedError
from onewave.compat import transformers as compat

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with a head_dim that is no multiple of 8": ("Llama", {"head_dim": 20}),
    "mistral, every layer sliding": ("Mistral", {"sliding_window": 5}),
    "qwen2, one layer sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma2, softcap": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "gpt-oss, sinks": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
PADDINGS = {
    "none": [],
    "left": [(0, slice(0, 4))],
    "right": [(0, slice(8, 12))],
    "both": [(0, slice(0, 3)), (1, slice(10, 12))],
}


def build(family: str, options: dict[str, Any], implementation: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(
            config, attn_implementation=implementation, experts_implementation="eager"
        )
        # Initial weights are so small that attention would hardly matter.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model.eval()


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same model with eager attention and with ours."""
    return build(*request.param, "eager"), build(*request.param, "onewave")


def token_ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS.keys())
def test_logits_equal_eagers_to_the_error_rule(pair, padding):
    eager, ours = pair
    ids, mask = token_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    for row, hidden in padding:
        mask[row, hidden] = 0
    seen = mask.bool()
    # Each sequence alone: eager's softmax is in float32, where the least double would be minus infinity.
    wide = copy.deepcopy(eager).double()
    exact = torch.cat([logits(wide, ids[row, seen[row]][None], None)[0] for row in (0, 1)])
    baseline, out = (logits(model, ids, mask)[seen].double() for model in (eager, ours))
    assert (out - exact).abs().max() <= 2 * (baseline - exact).abs().max() + 1e-5


@pytest.mark.parametrize("side", ["none", "left"])
def test_generate_gives_eagers_tokens_past_the_window(pair, side):
    eager, ours = pair
    ids, mask = token_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    if side == "left":
        mask[0, :3], ids[0, :3] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


def test_the_kernels_run_and_no_mask_is_built_without_padding(monkeypatch):
    seen: list[tuple[str, Any]] = []

    def spy(name, call, *tensors, **options):
        seen.append((name, (options.get("bias") is None, options["window"])))
        return call(*tensors, **options)

    for name in ("attention", "decode_attention"):
        monkeypatch.setattr(compat, name, partial(spy, name, getattr(compat, name)))
    ours = build("Mistral", {"sliding_window": 5}, "onewave")
    ours.generate(token_ids(1, 9), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    # A sliding layer's cache keeps no more keys than the window reaches, so that decoding needs no window.
    assert seen == [("attention", (True, 5))] * 2 + [("decode_attention", (True, None))] * 4


def test_a_static_cache_gives_eagers_tokens():
    tokens = [
        build("Llama", {}, name).generate(
            token_ids(2, 7), max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation="static",
            disable_compile=True,
        )
        for name in ("eager", "onewave")
    ]  # fmt: skip
    assert torch.equal(*tokens)


def test_a_chunk_of_a_prompt_sees_the_cache_before_it():
    eager, ours = build("Llama", {}, "eager"), build("Llama", {}, "onewave")
    ids = token_ids(2, 12)
    with torch.no_grad():
        past = ours(ids[:, :7], use_cache=True).past_key_values
        rest = ours(ids[:, 7:], past_key_values=past).logits
    torch.testing.assert_close(rest, logits(eager, ids, None)[:, 7:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_the_callers_own_is_obeyed(additive):
    eager, ours = build("Llama", {}, "eager"), build("Llama", {}, "onewave")
    visible = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12).clone()
    visible[:, :, 6:, :3] = False
    mask = torch.zeros(2, 1, 12, 12).masked_fill(~visible, torch.finfo(torch.float32).min)
    out = logits(ours, token_ids(2, 12), mask if additive else visible)
    torch.testing.assert_close(out, logits(eager, token_ids(2, 12), mask), rtol=1e-4, atol=1e-4)


def test_packed_sequences_do_not_see_each_other():
    ours = build("Llama", {}, "onewave")
    ids = token_ids(1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        packed = ours(ids, position_ids=positions, use_cache=False).logits
        alone = ours(ids[:, 5:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 5:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (sliding_window_causal_mask_function(7), 7),
        (causal_mask_function, None),
        (chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int)), None),
        (and_masks(sliding_window_causal_mask_function(7), causal_mask_function), None),
        (and_masks(causal_mask_function, causal_mask_function), None),
    ],
)
def test_only_the_plain_sliding_window_is_recognised(function, window):
    assert compat._sliding_window(function) == window


@pytest.mark.parametrize("function", [causal_mask_function, sliding_window_causal_mask_function(4)])
@pytest.mark.parametrize(("q_length", "q_offset", "kv_length"), [(6, 0, 6), (1, 9, 10), (3, 7, 10), (6, 0, 10)])
def test_what_stands_for_a_mask_says_the_same_as_the_mask(function, q_length, q_offset, kv_length):
    sizes = {"batch_size": 1, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    whole = sdpa_mask(**sizes, mask_function=function, allow_is_causal_skip=False)
    given = compat.attention_mask(**sizes, mask_function=function)
    if given is None or given.shape[0] == 0:
        place = torch.arange(kv_length - q_length, kv_length)[:, None]
        key = torch.arange(kv_length)
        meant = (key <= place) if given is None else (key <= place) & (key > place - given.shape[1])
        assert torch.equal(meant[None, None], whole)
    else:
        assert torch.equal(given, whole)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"dropout": 0.1}, "dropout"), ({"output_attentions": True}, "eager"), ({"cache": 1}, "paged")],
)
def test_what_is_not_supported_is_refused_clearly(options, says):
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(UnsupportedError, match=says):
        compat.attention_forward(torch.nn.Module(), q, q, q, None, **options)


def test_a_static_cache_with_one_sliding_window() -> None:
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        sliding_window=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.randint(2, 64, (3, 12))
    found = []
    for implementation in ("eager", "onewave"):
        model.set_attn_implementation(implementation)
        given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
        found.append(model.generate(prompt, **given))
    assert torch.equal(*found)


@pytest.mark.parametrize("window", [None, 5])
def test_a_model_compiles_as_one_graph(window: int | None) -> None:
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="onewave").eval()
    prompt = torch.randint(2, 64, (2, 9))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(prompt, use_cache=False).logits
        torch.testing.assert_close(compiled, model(prompt, use_cache=False).logits)


def test_a_model_that_computes_its_attention_by_itself_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="onewave").eval()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedError, match="BloomConfig, which computes"),
    ):
        model(torch.tensor([[5, 6, 7]]))


def test_without_transformers_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None\nimport onewave.compat.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: onewave.compat.transformers needs transformers 5.0 or newer")
    assert last.endswith("Run `pip install 'transformers>=5'`.")
