"""Our logits against transformers' on tiny random checkpoints of every family and RoPE kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.models.tiny_models import (
    ROPES,
    config_of,
    oracle,
    oracle_logits,
    our_logits,
    ours,
    relative_error,
    save_checkpoint,
    tokens,
)
from onewave.base.errors import WeightsError
from onewave.models.batch import Batch

# The largest difference of all logits, over the largest logit. A GPU computes in 16 bits alone, and transformers' own
# bfloat16 logits of these checkpoints are up to 0.017 away from its float32 ones.
TOLERANCE = {"cpu": 1e-4, "cuda": 0.03}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTH = 29
# How a sequence may reach the model: at once, token by token, and in chunks that straddle window and context ends.
SCHEDULES = {
    "one prefill": [LENGTH],
    "token by token": [1] * LENGTH,
    "prefill then decode": [11] + [1] * (LENGTH - 11),
    "chunked prefill": [4, 9, 2, 7, 6, 1],
}
WINDOWED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 2.0, "original_max_position_embeddings": 8}
EVERY_OPTION = YARN | {"beta_fast": 6.0, "beta_slow": 1.5, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tied head": ("llama", "default", {"tie_word_embeddings": True}),
    "attention and mlp biases": ("llama", "llama3", {"attention_bias": True, "mlp_bias": True}),
    "one query head per kv head": ("llama", "default", {"num_key_value_heads": 9}),
    "one kv head": ("llama", "default", {"num_key_value_heads": 1}),
    "derived head_dim": ("llama", "default", {"head_dim": None, "hidden_size": 144}),
    "mistral without window": ("mistral", "default", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2 tied": ("qwen2", "default", {"tie_word_embeddings": True}),
    "qwen2 layer types": (
        "qwen2", "default", {"use_sliding_window": True, "sliding_window": 4, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen3 attention bias, tied": ("qwen3", "yarn", {"attention_bias": True, "tie_word_embeddings": True}),
    "yarn with every option": ("llama", "default", {"rope_parameters": EVERY_OPTION}),
    "yarn with attention_factor": ("qwen2", "default", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
}  # fmt: skip


def check_every_schedule(directory: Path, *, packed: bool = False, device: str = "cpu") -> None:
    """Compare all ways a sequence may arrive, alone and in a ragged batch; transformers stays on the CPU."""
    reference = oracle(directory)
    model = ours(directory, DTYPE[device], packed=packed, device=torch.device(device))
    tolerance = TOLERANCE[device]
    ids = tokens(LENGTH)
    for name, chunks in SCHEDULES.items():
        error = relative_error(our_logits(model, ids, chunks), oracle_logits(reference, ids, chunks))
        assert error <= tolerance, (name, error)
    # Three sequences of different lengths prefilled in one batch, then decoded together in another order of slots.
    lengths, steps = [19, 3, 8], 6
    sequences = [tokens(length + steps, seed=length) for length in lengths]
    expected = [
        oracle_logits(reference, ids, [length] + [1] * steps) for ids, length in zip(sequences, lengths, strict=True)
    ]
    kv = model.new_cache(num_slots=4, capacity=32)
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    slots = [2, 0, 3]
    prompts = [(slot, ids[:length], 0) for slot, ids, length in zip(slots, sequences, lengths, strict=True)]
    logits = model.forward(Batch.prefill(prompts, model.device), kv).cpu()
    for row, length in enumerate(lengths):
        error = relative_error(logits[row], expected[row][length - 1])
        assert error <= tolerance, ("ragged prefill", row, error)
    for step in range(steps):
        fed = [ids[length + step] for ids, length in zip(sequences, lengths, strict=True)]
        positions = [length + step for length in lengths]
        batch = Batch.decode(*torch.tensor([fed, positions, slots], device=model.device))
        logits = model.forward(batch, kv).cpu()
        for row, length in enumerate(lengths):
            error = relative_error(logits[row], expected[row][length + step])
            assert error <= tolerance, ("ragged decode", row, step, error)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", WINDOWED)
def test_logits_agree_with_transformers(family: str, rope: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of(family, rope, **WINDOWED[family]))
    check_every_schedule(tmp_path)


@pytest.mark.gpu
@pytest.mark.values
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", WINDOWED)
def test_a_gpus_logits_agree_with_transformers(family: str, rope: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of(family, rope, **WINDOWED[family]), dtype=torch.bfloat16)
    check_every_schedule(tmp_path, device="cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_for_every_option(variant: str, device: str, tmp_path: Path) -> None:
    family, rope, options = VARIANTS[variant]
    save_checkpoint(tmp_path, config_of(family, rope, **options), dtype=DTYPE[device])
    check_every_schedule(tmp_path, device=device)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("family", "head_dim"), [("llama", 2), ("qwen3", 4), ("mistral", 20)])
def test_logits_agree_for_small_and_odd_head_dims(family: str, head_dim: int, packed: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of(family, "default", **WINDOWED[family], head_dim=head_dim))
    check_every_schedule(tmp_path, packed=packed)


@pytest.mark.parametrize(
    ("body", "head", "tied"),
    [
        ("", None, True),
        ("", "lm_head.weight", False),
        ("language_model.model.", "language_model.lm_head.weight", False),
        ("model.language_model.", "lm_head.weight", False),
        ("_orig_mod.model.", "_orig_mod.lm_head.weight", False),
        ("base_model.model.model.", "base_model.model.lm_head.weight", True),
        ("transformer.{0}.", None, True),
    ],
)
def test_tensors_are_found_behind_any_prefix(body: str, head: str | None, tied: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("qwen3", tie_word_embeddings=tied))
    file = tmp_path / "model.safetensors"
    ids = tokens(5)
    expected = our_logits(ours(tmp_path), ids, [5])
    saved = load_file(file)
    renamed = {f"{body}{name.removeprefix('model.')}": saved[name] for name in saved if name.startswith("model.")}
    if head is not None:
        renamed[head] = saved.get("lm_head.weight", saved["model.embed_tokens.weight"]).clone()
    save_file(renamed | {f"{body}layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    assert torch.equal(our_logits(ours(tmp_path), ids, [5]), expected)


def test_two_bodies_in_a_checkpoint_are_not_guessed_at(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama"))
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    save_file({f"{part}.{name}": tensor.clone() for name, tensor in saved.items() for part in ("a", "b")}, file)
    with pytest.raises(WeightsError, match=r"has no tensor 'model\.embed_tokens\.weight'"):
        ours(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_logits(dtype: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("qwen2", tie_word_embeddings=True), dtype=dtype)
    check_every_schedule(tmp_path, packed=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", WINDOWED)
def test_bf16_is_as_close_to_fp32_as_transformers_bf16(family: str, device: str, tmp_path: Path) -> None:
    our_squares, their_squares, our_peaks, their_peaks = [], [], [], []
    for seed in range(6):
        directory = tmp_path / str(seed)
        save_checkpoint(directory, config_of(family, **WINDOWED[family]), seed=seed, dtype=torch.bfloat16)
        exact, rounded = oracle(directory), oracle(directory, torch.bfloat16, attention="sdpa")
        model = ours(directory, torch.bfloat16, device=torch.device(device))
        ids = tokens(LENGTH, seed)
        for chunks in (SCHEDULES["one prefill"], SCHEDULES["prefill then decode"]):
            truth = oracle_logits(exact, ids, chunks)
            our_error = our_logits(model, ids, chunks) - truth
            their_error = oracle_logits(rounded, ids, chunks) - truth
            our_squares.append(our_error.square().mean())
            their_squares.append(their_error.square().mean())
            our_peaks.append(our_error.abs().max())
            their_peaks.append(their_error.abs().max())
    rms = torch.stack(our_squares).mean().sqrt(), torch.stack(their_squares).mean().sqrt()
    # A single worst logit is a draw of luck for either side; the mean over runs of the worst is not.
    peak = torch.stack(our_peaks).mean(), torch.stack(their_peaks).mean()
    assert rms[0] <= 1.1 * rms[1], rms
    assert peak[0] <= 1.1 * peak[1], peak
