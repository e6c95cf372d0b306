"""Launches of the wave: decode steps of models' shapes, and feed-forward blocks."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from kit.calls.call import Call, empty
from onewave.base.weight_formats import COMPACT, NESTED, NIBBLES, ROUNDINGS, SIX_BITS, mixed
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.sketches import blank_stream, compile_packing, one_layer, sketch
from onewave.engine.load.streamed import layer_matrices
from onewave.memory.kv_cache import KVCache
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama_plan import DecodeStep, plan_program
from onewave.ops.ffn.op import pack_ffn
from onewave.ops.ffn.wave.launch import PackedFFN, Packing
from onewave.ops.linear import linear, linear_swiglu
from onewave.wave.launch.launch import co_resident
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.formats.tile_format import UnpackedRows
from onewave.wave.weights.pack import StreamMatrix, WeightStream

FORMATS = {
    "": None, **ROUNDINGS, "compact": COMPACT, "int4 g32 minima": NIBBLES[32, True],
    "int4 mixed": mixed(NIBBLES[32, True], {"head": 2, "down0": 4}),
    "q4_k_m": mixed(NESTED, {"qkv0": 2, "down0": SIX_BITS, "head": SIX_BITS}),
}  # fmt: skip
_DEVICE = torch.device("cuda", 0)
_CAPACITY = 512
# No constant depends on how many there are, and fewer are planned for sooner.
_SMS = 16
_PACKERS = (
    "_bases_kernel", "_pack_kernel", "_unpack_kernel", "_unpack_bytes_kernel", "_unpack_groups_kernel",
    "_unpack_sixes_kernel", "_search_kernel", "_nibbles_kernel", "_scales_kernel", "_bytes_kernel",
)  # fmt: skip


def _config(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **others: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "family": "llama", "vocab_size": 64, "hidden_size": hidden, "intermediate_size": inner, "num_layers": 1,
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "rms_norm_eps": 1e-5,
        "max_position": _CAPACITY, "rope": RopeConfig("default", 500_000.0, head_dim), "tie_word_embeddings": False,
        "qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False, "layer_windows": (None,),
        "dtype": "bfloat16", "bos_token_id": 1, "eos_token_ids": (2,),
    }  # fmt: skip
    return ModelConfig(**given | others)


_1B = _config(2048, 8192, 32, 8, 64)
_8B = _config(4096, 14336, 32, 8, 128)
_SMALL = _config(960, 2560, 15, 5, 64)
MODELS = {
    "1B": _1B,  # Llama 3.2
    "8B": _8B,  # Llama 3.1
    "3B": _config(3072, 8192, 24, 8, 128),  # Llama 3.2, whose sums over K are cut in slices
    "1B of 3072": replace(_1B, intermediate_size=3072),  # whose rows fill one image of 4-bit weights, and not two
    "1B norms": replace(_1B, qk_norm=True),
    "1B groups of 8": replace(_1B, num_kv_heads=4),
    "1B groups of 1": replace(_1B, num_kv_heads=32),
    "D32": _config(1024, 2816, 32, 16, 32),
    "360M": _SMALL,  # SmolLM2, whose rows fill one image of one-byte and compact weights, and not two
    "360M D128": replace(_SMALL, num_heads=8, num_kv_heads=2, head_dim=128, rope=RopeConfig("default", 5e5, 128)),
}


def _stream(config: ModelConfig, options: LoadOptions) -> WeightStream:
    return blank_stream(config, options, _program(options.step(config), co_resident(_DEVICE)))


@cache
def _program(step: DecodeStep, workers: int) -> WaveProgram:
    """The plan of a step, which many kernels share."""
    return plan_program(step, workers=workers)


def step(
    model: str, batch: int, *, weights: str = "", page: int = 0, dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None, traced: bool = False,
) -> None:  # fmt: skip
    """A decode step of one layer of a model. page: keys of a page. kv_dtype: of a cache in 8 bits."""
    config = one_layer(MODELS[model])
    options = LoadOptions(dtype, _DEVICE, max_num_seqs=batch, weight_format=FORMATS[weights])
    stream = _stream(config, options)
    blank = sketch(config, stream)
    made = DecodeWave(blank, batch=batch, stream=stream)
    cache = blank.new_cache(num_slots=batch, capacity=_CAPACITY)
    if page:
        pages = _CAPACITY // page
        shape = (1, batch * pages, config.num_kv_heads, page, config.head_dim)
        k, v = (empty(*shape, dtype=kv_dtype or dtype) for _ in range(2))
        table = torch.arange(batch * pages, dtype=torch.int32, device=_DEVICE).view(batch, pages)
        scales = (None if kv_dtype is None else empty(1, shape[2], dtype=torch.float32) for _ in range(2))
        made.bind_cache(KVCache(k, v, table, *scales))
    else:
        made.bind_cache(cache)
    numbers = torch.zeros(batch, dtype=torch.int64, device=_DEVICE)
    slots = torch.arange(batch, device=_DEVICE)
    if traced:
        made.wave.trace_decode(numbers, numbers, slots, empty(batch, config.vocab_size, dtype=torch.float32))
    else:
        made(numbers, numbers, slots)


def packing(model: str, weights: str) -> None:
    """Pack a model's matrices into a stream, and unpack them."""
    options = LoadOptions(torch.bfloat16, _DEVICE, weight_format=FORMATS[weights])
    compile_packing(_stream(one_layer(MODELS[model]), options))


def tile_product(name: str, rows: int, sequences: int, weights: str) -> None:
    """A product of several rows by tiles of a stream, made for so many sequences."""
    config = one_layer(MODELS["8B"])
    options = LoadOptions(torch.bfloat16, _DEVICE, sequences, weight_format=FORMATS[weights])
    stream = _stream(config, options)
    matrix = StreamMatrix(stream, f"{name}0", *layer_matrices(config)[name])
    x = empty(rows, matrix.cols)
    linear_swiglu(x, matrix) if matrix.count > 1 else linear(x, matrix)


def six_bits() -> None:
    """Unpack a tile of six bits a weight."""
    options = LoadOptions(torch.bfloat16, _DEVICE, weight_format=FORMATS["q4_k_m"])
    stream = _stream(one_layer(MODELS["1B"]), options)
    shape = stream.shape.of_width(SIX_BITS)
    rows = UnpackedRows(empty(1, shape.rows, shape.cols), 1, first_row=0, first_block=0, blocks=1)
    stream.format_of("down0").unpack(stream.all_tiles(), torch.zeros(1, dtype=torch.int32, device=_DEVICE), rows)


def block(
    rows: int, *, sizes: tuple[int, int] = (1024, 4096), gated: bool = True, activation: str = "silu",
    dtype: torch.dtype = torch.float16, order: str = "row", policy: str = "data", test: bool = False,
) -> None:  # fmt: skip
    """A packed feed-forward block [hidden, intermediate]; bfloat16 ones are compact. test: the build with delays,
    traced."""
    up, down = (empty(*shape, dtype=dtype) for shape in (sizes[::-1], sizes))
    gate = up if gated else None
    choice: dict[str, Any] = {"batch": rows, "activation": activation, "order": order, "policy": policy}
    x = empty(rows, sizes[0], dtype=dtype)
    if test:
        [wave] = PackedFFN(up, down, gate, Packing(**choice), delays=True).waves
        wave.trace(x, empty(rows, sizes[0], dtype=dtype))
    else:
        pack_ffn(up, down, w_gate=gate, **choice)(x)


def _step(model: str, batch: int, **options: Any) -> Call:
    return Call(partial(step, model, batch, **options), sms=_SMS)


def _block(rows: int, **options: Any) -> Call:
    return Call(partial(block, rows, **options), sms=_SMS, kernels=("wave_kernel",))


_BRAIN = torch.bfloat16
BLOCKS = {
    "1 row ungated": _block(1, gated=False),
    "1 row gelu": _block(1, activation="gelu"),
    "2 rows counters bf16": _block(2, policy="row", dtype=_BRAIN),
    "4 rows 2560x9728 ungated": _block(4, sizes=(2560, 9728), gated=False),
    "8 rows": _block(8),
    "8 rows 3072x8192": _block(8, sizes=(3072, 8192)),
    "8 rows 3072x8192 counters": _block(8, sizes=(3072, 8192), policy="row"),
    "16 rows 1536x8960": _block(16, sizes=(1536, 8960)),
    "32 rows 1024x2048 sm_local delays trace": _block(32, sizes=(1024, 2048), order="sm_local", test=True),
    "64 rows 512x14336 half_row": _block(64, sizes=(512, 14336), order="half_row"),
    "8 rows 4096x14336 half_row bf16": _block(8, sizes=(4096, 14336), order="half_row", dtype=_BRAIN),
    "1 row sm_local": _block(1, order="sm_local"),
    "8 rows compact": _block(8, dtype=_BRAIN),
    "16 rows 2048x8192 compact": _block(16, sizes=(2048, 8192), dtype=_BRAIN),
    "32 rows 2048x8192 compact": _block(32, sizes=(2048, 8192), dtype=_BRAIN),
    "32 rows 2048x8192 compact ungated": _block(32, sizes=(2048, 8192), dtype=_BRAIN, gated=False),
}
STEPS = {
    "1B 1 row": _step("1B", 1),
    "1B 1 row fp16": _step("1B", 1, dtype=torch.float16),
    "1B 2 rows": _step("1B", 2),
    "1B 4 rows": _step("1B", 4),
    "1B 8 rows": _step("1B", 8),
    "1B 16 rows": _step("1B", 16),
    "1B norms 16 rows": _step("1B norms", 16),
    "8B 1 row": _step("8B", 1),
    "8B 2 rows": _step("8B", 2),
    "8B 4 rows": _step("8B", 4),
    "8B 8 rows": _step("8B", 8),
    "3B 8 rows": _step("3B", 8),
    "8B 16 rows": _step("8B", 16),
    "D32 1 row": _step("D32", 1),
    "1B groups of 8 1 row": _step("1B groups of 8", 1),
    "1B groups of 1 2 rows traced": _step("1B groups of 1", 2, traced=True),
    "1B 1 row pages of 16": _step("1B", 1, page=16),
    "8B 1 row pages of 64": _step("8B", 1, page=64),
    "8B 1 row pages of 128": _step("8B", 1, page=128),
    "1B 8 rows compact pages of 128": _step("1B", 8, page=128, weights="compact"),
    "8B 8 rows pages of 16": _step("8B", 8, page=16),
    "3B 8 rows pages of 256": _step("3B", 8, page=256),
    "8B 1 row pages of 128 fp8 cache": _step("8B", 1, page=128, kv_dtype=torch.float8_e4m3fn),
    "8B 1 row compact pages of 128 int8 cache": _step("8B", 1, page=128, weights="compact", kv_dtype=torch.int8),
    "1B norms 16 rows pages of 128 fp8 cache": _step("1B norms", 16, page=128, kv_dtype=torch.float8_e4m3fn),
    "1B 1 row compact pages of 128 int8 cache": _step("1B", 1, page=128, weights="compact", kv_dtype=torch.int8),
    "8B 8 rows int4 pages of 16 fp8 cache": _step("8B", 8, weights="int4", page=16, kv_dtype=torch.float8_e4m3fn),
    "1B 1 row int8": _step("1B", 1, weights="int8"),
    "1B 2 rows int8": _step("1B", 2, weights="int8"),
    "3B 8 rows int8": _step("3B", 8, weights="int8"),
    "8B 4 rows int8 pages of 64": _step("8B", 4, weights="int8", page=64),
    "360M 1 row fp8 fp16": _step("360M", 1, weights="fp8", dtype=torch.float16),
    "8B 1 row fp8": _step("8B", 1, weights="fp8"),
    "1B norms 16 rows fp8": _step("1B norms", 16, weights="fp8"),
    "1B 1 row int4": _step("1B", 1, weights="int4"),
    "1B of 3072 1 row int4": _step("1B of 3072", 1, weights="int4"),  # a ring of 48 tiles
    "8B 1 row int4": _step("8B", 1, weights="int4"),
    "8B 2 rows int4 fp16": _step("8B", 2, weights="int4", dtype=torch.float16),
    "8B 8 rows int4 pages of 64": _step("8B", 8, weights="int4", page=64),
    "1B norms 16 rows int4": _step("1B norms", 16, weights="int4"),
    "8B 4 rows int4 g32 minima": _step("8B", 4, weights="int4 g32 minima"),
    "8B 8 rows int4 mixed": _step("8B", 8, weights="int4 mixed"),
    "8B 1 row q4_k_m": _step("8B", 1, weights="q4_k_m"),
    "8B 8 rows q4_k_m": _step("8B", 8, weights="q4_k_m"),
} | {
    f"{name} compact{end}": _step(model, batch, weights="compact", **options)
    for name, end, model, batch, options in (
        ("1B 1 row", "", "1B", 1, {}),
        ("8B 1 row", "", "8B", 1, {}),
        ("360M 1 row", "", "360M", 1, {}),
        ("360M D128 1 row", "", "360M D128", 1, {}),
        ("1B 2 rows", "", "1B", 2, {}),
        ("360M D128 2 rows", "", "360M D128", 2, {}),
        ("8B 4 rows", "", "8B", 4, {}),
        ("360M 8 rows", "", "360M", 8, {}),
        ("8B 8 rows", "", "8B", 8, {}),
        ("3B 8 rows", "", "3B", 8, {}),
        ("1B norms 16 rows", "", "1B norms", 16, {}),
        ("360M D128 16 rows", "", "360M D128", 16, {}),
        ("8B 1 row", " pages of 64", "8B", 1, {"page": 64}),
        ("1B 8 rows", " pages of 16", "1B", 8, {"page": 16}),
    )
}  # fmt: skip
PACKING = {
    f"wave packing {model}{weights and f' {weights}'}": Call(
        partial(packing, model, weights), sms=_SMS, kernels=_PACKERS
    )
    for model, weights in (
        ("1B", ""),
        ("1B", "int8"),
        ("1B", "fp8"),
        ("1B", "compact"),
        ("360M", "compact"),
        ("1B", "int4"),
        ("1B", "int4 g32 minima"),
    )
} | {
    f"linear {rows} rows of a stream for {sequences}{'' if weights == 'compact' else f' {weights}'}": Call(
        partial(tile_product, name, rows, sequences, weights), sms=_SMS, kernels=(kernel,)
    )
    for name, rows, sequences, weights, kernel in (
        ("o", 64, 1, "compact", "compact_gemm_kernel"),
        ("qkv", 8, 1, "compact", "packed_gemm_kernel"),
        ("gate_up", 64, 8, "compact", "packed_gemm_kernel"),
        ("gate_up", 256, 1, "compact", "packed_gemm_kernel"),
        ("qkv", 2048, 8, "compact", "packed_gemm_kernel"),
        ("gate_up", 300, 1, "int8", "packed_gemm_kernel"),
        ("qkv", 512, 8, "int8", "packed_gemm_kernel"),
        ("gate_up", 300, 8, "fp8", "packed_gemm_kernel"),
        ("qkv", 512, 1, "int4", "packed_gemm_kernel"),
        ("gate_up", 300, 8, "int4", "packed_gemm_kernel"),
    )
}
WAVE: dict[str, Call] = {
    **{f"wave step {name}": call for name, call in STEPS.items()},
    **{f"wave block {name}": call for name, call in BLOCKS.items()},
    **PACKING,
    "wave unpacking six bits": Call(six_bits, sms=_SMS, kernels=("_unpack_sixes_kernel",)),
}
