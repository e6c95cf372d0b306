"""State of a call that the partitions of the kernel share."""

# No deferred annotations: an aggregate reads the types of its fields.

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.ops.decode_attention.triton.shares import (
    listed_keys,
    part_of_list,
    part_of_row,
    row_lengths,
    row_starts,
    rows_of_share,
    start_of_row,
)
from onewave.wave.kernel.spin import prefetch_bytes


class Call(namedtuple("Call", (
    "k_tiles v_tiles k_ring v_ring k_full v_full empty sure tops totals folds weights num_rows lengths finished table "
    "sinks mask q k v k_scale v_scale qkv bias qkv_scale rotary shift smooth out lse part stats counters num_queries "
    "num_heads num_kv_heads head_dim capacity block_size max_splits window half scale_log2 softcap out_scale max_bound "
    "min_bound stride_q_row stride_q_head stride_q_query stride_out_row stride_out_head stride_out_query "
    "stride_k_block stride_k_head stride_k_key stride_v_block stride_v_head stride_v_key stride_mask_row "
    "stride_mask_head stride_table GROUP TILES SPLIT LOG_SMALLEST LIMITS BLOCK_M BLOCK_N BLOCK_D BLOCK_H STAGES FLIGHT "
    "PAGING PAGE ONE_QUERY HAS_SOFTCAP HAS_SINKS HAS_MASK HAS_LSE FUSED HAS_FINISHED HAS_BIAS HAS_QKV_SCALE "
    "INTERLEAVED IN_EIGHTS HAS_SHIFT HAS_SMOOTH QUANTISED HALF_AWAY ROWS UNROLL WIDE KV KV_SCALES GUESSES"
))):  # fmt: skip
    """Arguments by the kernel's names for them, its shared memory, and its constants.

    k_tiles, v_tiles: descriptors of boxes of BLOCK_N keys. k_ring, v_ring: [STAGES, BLOCK_N, BLOCK_D]. k_full, v_full,
    empty: a mbarrier a place. sure: [1], a mbarrier: whether what was guessed is right is known; if GUESSES.
    tops, totals: float32 [4, BLOCK_M], the warps' maxima and sums. folds: float32 [UNROLL, BLOCK_H, 4], of a partial
    result: what is kept of those before, what it adds to their sum, and twice what its output weighs. weights:
    [BLOCK_N, BLOCK_M], a tile's.
    """


@gluon.constexpr_function
def bytes_of_number(kv) -> int:
    """Bytes of a cached number. kv: the kernel's KV."""
    return 1 if kv else 2


@gluon.constexpr_function
def columns_across(kv, block_d) -> int:
    """Columns of a key's bytes in which swizzled shared memory repeats: of 128, or of a whole narrower key."""
    return min(128 // (1 if kv else 2), block_d)


class Part(namedtuple("Part", "first_key size first_split last_split split last_here begin end")):
    """A program's share of a row, as shares.part_of_row says: keys from `begin` on, but none from `end` on, which
    is `begin` if it has none in the cache."""


@gluon.jit
def own_share(c, EARLY: gl.constexpr = False):
    """A program's share of several rows: (first row, last row, where the first one begins in the list of all keys,
    begin and end of the program's piece of the list).

    Each partition finds out by itself: handing it over would take longer. EARLY: whether lengths may be those of
    before the wait, which then stay out of L1.
    """
    # Every warp has all rows: no sum over them crosses warps.
    LIST: gl.constexpr = gl.BlockedLayout([max(1, c.ROWS // 32)], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, c.ROWS, layout=LIST)
    starts, ends = row_starts(rows, c, EARLY)
    first_row, last_row, share_begin, share_end = rows_of_share(gl.program_id(0), gl.num_programs(0), starts, ends)
    return first_row, last_row, start_of_row(first_row, rows, starts), share_begin, share_end


@gluon.jit
def part_here(c, row_at, length, share_begin, share_end):
    """The program's Part of a row of `length` keys, from row_at on in the list."""
    extra: gl.constexpr = 1 if c.FUSED else 0
    first_key, size, first_split, last_split, split, last_here, begin = part_of_row(
        row_at, length, share_begin, share_end, c, False
    )  # fmt: skip
    end = gl.where(split <= last_here, gl.minimum((last_here + 1) * size, length - extra), begin)
    return Part(first_key, size, first_split, last_split, split, last_here, begin, end)


@gluon.jit
def part_of_only_row(c, length):
    """The program's Part of a call's only row: everything follows from its length."""
    keys = listed_keys(length, c)
    share_begin, share_end = part_of_list(gl.program_id(0), gl.num_programs(0), keys)
    return part_here(c, 0, length, share_begin, share_end)


@gluon.jit
def early_part(c):
    """(row, its length, Part) of the program's first row, if lengths stay as they are before the wait for the launch
    before. Nothing to read if the row's last split began before, or if there is no row."""
    if c.ROWS == 1:
        row = gl.to_tensor(0)
        length = row_lengths(row, True, c, True)
        return row, length, part_of_only_row(c, length)
    else:
        row, last_row, row_at, share_begin, share_end = own_share(c, EARLY=True)
        length = row_lengths(row, row <= last_row, c, True)
        return row, length, part_here(c, row_at, length, share_begin, share_end)


@gluon.jit
def bring_nearer(c, row, begin, end):
    """Have the first tile of a row's keys and values from `begin` on, but none from `end` on, brought into the
    L2 while the launch before ends: their columns in whole pieces of 128 bytes, or of a narrower key's.

    Lengths may yet change, and so may keys and values: L2 is where all SMs agree, and
    nothing is read before the wait but to know what to ask for.
    """
    kv_head = (gl.program_id(1) // c.TILES).to(gl.int64)
    keys = c.k + (row.to(gl.int64) * c.stride_k_block + kv_head * c.stride_k_head)
    values = c.v + (row.to(gl.int64) * c.stride_v_block + kv_head * c.stride_v_head)
    # A piece a thread, of a key and of a value.
    COLUMNS: gl.constexpr = columns_across(c.KV, c.BLOCK_D)
    BYTES: gl.constexpr = COLUMNS * bytes_of_number(c.KV)
    PIECES: gl.constexpr = c.BLOCK_D // COLUMNS
    THREADS: gl.constexpr = gl.num_warps() * 32
    thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    piece = thread % PIECES
    for at in gl.static_range(0, c.BLOCK_N * PIECES, THREADS):
        key = begin + (at + thread) // PIECES
        wanted = (key < end) & (piece * COLUMNS + COLUMNS <= c.head_dim)
        prefetch_bytes((keys + (key.to(gl.int64) * c.stride_k_key + piece * COLUMNS)).to(gl.int64), wanted, BYTES)
        prefetch_bytes((values + (key.to(gl.int64) * c.stride_v_key + piece * COLUMNS)).to(gl.int64), wanted, BYTES)
