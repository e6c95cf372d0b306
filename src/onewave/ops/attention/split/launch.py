"""Launch attention of few queries over many keys: P of all key tiles side by side, then its sums."""

from torch import Tensor

from onewave.gpu.descriptors import describe, describe_pages
from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import held, scratch
from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.plan import AttentionChoice
from onewave.ops.attention.split.kernel import combine_kernel, weigh_kernel
from onewave.ops.attention.split.plan import COLUMNS, COMBINE_STAGES, HEADROOM, KEYS, ROWS, WEIGH_STAGES, tiles_of

_SUMS = 4


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Write and return the output."""
    packed, q, k, v = call.packed, call.q, call.k, call.v
    assert packed is not None
    assert packed.block_table is not None
    out = call.output()
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    row_tiles, key_tiles = tiles_of(num_tokens, group, packed.max_seqlen_k)
    boxes = num_kv_heads * row_tiles * key_tiles
    floats_of_weights = boxes * ROWS * KEYS * q.element_size() // 4
    with held(q.device):  # the second launch reads what the first one leaves
        room = scratch(q.device, floats_of_weights + boxes * ROWS * _SUMS, "weights of keys")
        rows = room[:floats_of_weights].view(q.dtype).view(1, 1, -1, KEYS)
        weights, sums = describe(rows, ROWS, KEYS), room[floats_of_weights:]
        constants = {"D": head_dim, "BN": KEYS, "PAGE": k.shape[1], "HEADROOM": HEADROOM}
        options = {"num_warps": 4, "launch_pdl": True}
        of_k, of_v = (t.stride(0) // t.stride(1) for t in (k, v))
        keys, scale_log2 = describe_pages(k, KEYS), call.options.factors[0]
        launch_kernel(
            weigh_kernel, (row_tiles, num_kv_heads, choice.splits),
            q, keys, weights, sums, *call.starts, packed.block_table, of_k, *q.stride()[:2], group, key_tiles,
            scale_log2, STAGES=WEIGH_STAGES, **constants, **options,
        )  # fmt: skip
        launch_kernel(
            combine_kernel, (row_tiles, num_kv_heads, head_dim // COLUMNS),
            q, keys, describe_pages(v, KEYS, min(64, COLUMNS)), out, weights, sums, *call.starts, packed.block_table,
            of_k, of_v, *q.stride()[:2], *out.stride()[:2], group, key_tiles, scale_log2,
            COLUMNS=COLUMNS, STAGES=COMBINE_STAGES, **constants, **options,
        )  # fmt: skip
    return out
