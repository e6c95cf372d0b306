"""All that the partitions of stream_impl share of a call."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false, reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false
# (Triton ships no type information.)

# No deferred annotations: an aggregate reads the types of its fields.

from typing import Any, NamedTuple

__all__ = ["Call"]


class Call(NamedTuple):
    """Arguments by the kernel's names for them, its shared memory, and its constants, in the order of __init__.

    k_tiles, v_tiles: descriptors of boxes of BLOCK_N keys. k_ring, v_ring: [STAGES, BLOCK_N, BLOCK_D]. k_full, v_full:
    a mbarrier a place, and one more (see stream_kernel); empty: a mbarrier a place. tops: float32 [4, BLOCK_M], the
    warps' maxima. weights: [BLOCK_N, BLOCK_M], a tile's.
    """

    k_tiles: Any
    v_tiles: Any
    k_ring: Any
    v_ring: Any
    k_full: Any
    v_full: Any
    empty: Any
    tops: Any
    weights: Any
    lengths: Any
    finished: Any
    table: Any
    sinks: Any
    mask: Any
    q: Any
    k: Any
    v: Any
    qkv: Any
    bias: Any
    qkv_scale: Any
    rotary: Any
    shift: Any
    smooth: Any
    out: Any
    lse: Any
    part: Any
    stats: Any
    counters: Any
    num_queries: Any
    num_heads: Any
    num_kv_heads: Any
    head_dim: Any
    capacity: Any
    block_size: Any
    max_splits: Any
    window: Any
    target: Any
    half: Any
    scale_log2: Any
    softcap: Any
    out_scale: Any
    max_bound: Any
    min_bound: Any
    stride_q_row: Any
    stride_q_head: Any
    stride_q_query: Any
    stride_out_row: Any
    stride_out_head: Any
    stride_out_query: Any
    stride_k_block: Any
    stride_k_head: Any
    stride_k_key: Any
    stride_v_block: Any
    stride_v_head: Any
    stride_v_key: Any
    stride_mask_row: Any
    stride_mask_head: Any
    stride_table: Any
    GROUP: Any
    TILES: Any
    SPLIT: Any
    LOG_SMALLEST: Any
    DOUBLINGS: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_H: Any
    STAGES: Any
    FLIGHT: Any
    PAGING: Any
    PAGE: Any
    ONE_QUERY: Any
    HAS_SOFTCAP: Any
    HAS_SINKS: Any
    HAS_MASK: Any
    HAS_LSE: Any
    FUSED: Any
    HAS_FINISHED: Any
    HAS_BIAS: Any
    HAS_QKV_SCALE: Any
    INTERLEAVED: Any
    HAS_SHIFT: Any
    HAS_SMOOTH: Any
    QUANTISED: Any
    HALF_AWAY: Any
    ROWS: Any
    UNROLL: Any
