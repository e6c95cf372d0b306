"""All of a decoder layer that comes behind attention, in one launch where that pays."""

from dataclasses import replace

from torch import Tensor

from onewave.ops.backends import load
from onewave.ops.library import is_watched
from onewave.ops.post_attention.call import PostAttentionCall, PostAttentionWeights, check
from onewave.ops.quantize_rows import QuantizedRows


def post_attention(
    attended: Tensor,
    residual: Tensor,
    weights: PostAttentionWeights,
    eps: float,
    *,
    order: str = "auto",
    policy: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Project, add to the residual stream, RMSNorm, gate and up, SwiGLU, down, add, and the next layer's RMSNorm.

    attended: [rows, heads x head_dim] bf16|fp16 (fp32 too on a CPU). residual: [rows, hidden], float32 or attended's
    dtype. weights: see PostAttentionWeights; matrices as `linear` takes them. Returns (normed [rows, hidden] in the
    norms' dtype, residual stream [rows, hidden] in its own).
    Rounding, whatever the backend: each product once, to attended's dtype; gate and up before SwiGLU; SwiGLU; norms as
    in add_rms_norm. So "chain" and "separate" give the same bits of two rows and more on sm_90.
    backend: "separate": linear, add_rms_norm, linear_swiglu, linear, add_rms_norm. "chain": one persistent launch, from
    the weights as they are, on these GPUs: 16-bit types, a float32 residual, plain matrices of multiples of 64, more
    than 512 and up to 4096 hidden columns, no bias. "reference": PyTorch. "auto": "chain" where measured.py has seen it
    ahead of all separate launches, and, in a CUDA graph's recording, where it has run before; else "separate".
    order, policy (chain): "auto", or as in `ffn`'s chain. Raises InvalidArgumentError, ShapeError, UnsupportedError;
    WaveStalled when an earlier launch has stalled.
    """
    if weights.next_matrix is not None:
        weights = replace(weights, next_matrix=None)
    call = PostAttentionCall.of(
        attended=attended, residual=residual, weights=weights, eps=eps, order=order, policy=policy, backend=backend
    )
    normed, total = _run(call)
    assert isinstance(normed, Tensor)
    return normed, total


def post_attention_rows(
    attended: Tensor, residual: Tensor, weights: PostAttentionWeights, eps: float
) -> tuple[Tensor | QuantizedRows, Tensor]:
    """post_attention, the normed rows quantised where weights.next_matrix would do so (ScaledMatrix.row_codes), for
    `linear_of_rows`. Raises as post_attention."""
    return _run(PostAttentionCall.of(attended=attended, residual=residual, weights=weights, eps=eps))


def _run(call: PostAttentionCall) -> tuple[Tensor | QuantizedRows, Tensor]:
    attended, weights, backend = call.attended, call.weights, call.backend
    if backend == "auto" and (not attended.is_cuda or is_watched(attended, call.residual, weights.post_norm)):
        return load("post_attention", "separate").run(call)  # each operator checks, and is seen, for itself
    if backend in ("auto", "chain"):
        call = replace(call, weights=weights.unpacked())
    check(call)
    from onewave.ops.post_attention.choose import choose, settled  # late: `import onewave.ops` loads no tiles

    choice = settled(call, choose(call))
    return load("post_attention", choice.module).run(call, choice)
