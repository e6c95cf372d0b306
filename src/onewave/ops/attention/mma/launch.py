"""Launch the m16n8k16 kernel, the one of few registers."""

from torch import Tensor

from onewave.gpu.launch import launch_kernel
from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.mma.kernel import mma_kernel
from onewave.ops.attention.plan import AttentionChoice

_PIECE, _PIECE_BYTES = 8, 16
_ALL_REGISTERS = 255


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Write and return the output, and call.lse."""
    result = call.output()
    out, lse, q, k, v = call.rows(result)
    if q.numel() == 0:
        return result
    num_heads, num_queries, head_dim = q.shape[1:]
    wanted, packed = call.options, call.packed
    unit = _PIECE if all(_in_pieces(tensor) for tensor in (q, k, v, out)) else 1
    launch_kernel(
        mma_kernel, (choice.num_programs,),
        q, k, v, out, *(q if each is None else each for each in (lse, call.dense_sinks, *call.starts)),
        *(step for tensor in (q, k, v, out) for step in _steps(tensor, unit)),
        *((0, 0, 0) if lse is None else lse.stride()),
        num_heads, num_heads // k.shape[1], num_queries if packed is None else packed.max_seqlen_q, k.shape[2],
        choice.tiles, wanted.shift(num_queries, k.shape[2]) if packed is None else 0, *wanted.sides, *wanted.factors,
        PACK=choice.packed_heads, HEAD_DIM=head_dim, WIDTH=choice.width, QUERIES=choice.block_m, KEYS=choice.block_n,
        WARPS=choice.num_warps, UNIT=unit,
        # Folding scale into the exponent takes the max before scaling: only a positive scale keeps its place.
        FOLD=wanted.scale > 0 and wanted.softcap is None,
        # Copies element by element, through registers, would spill below.
        maxnreg=choice.max_registers if unit == _PIECE else _ALL_REGISTERS, num_warps=choice.num_warps, **call.flags,
    )  # fmt: skip
    return result


def _in_pieces(tensor: Tensor) -> bool:
    """Whether every row lies at a multiple of 16 bytes."""
    axes = zip(tensor.shape[:-1], tensor.stride(), strict=False)
    return tensor.data_ptr() % _PIECE_BYTES == 0 and all(n == 1 or step % _PIECE == 0 for n, step in axes)


def _steps(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """Strides of (batch, head, row) in units; 0 for axes of one element, which may have any."""
    return tuple(0 if n == 1 else step // unit for n, step in zip(tensor.shape, tensor.stride(), strict=True))[:3]
