"""State that the partitions of hopper/kernel.py share: problem, order of its tiles, places in its tensors."""


# No deferred annotations: an aggregate reads the types of its fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

from onewave.gpu.ptx import per_thread_arrival as own_arrivals

_RAGGED_END = gl.constexpr(0x40000000)
# A tile's post: which word says what.
EXISTS, BATCH, HEAD, FIRST, START_Q, ROWS, START_K, NUM_KEYS, SHIFT, BEGIN, COUNT = map(gl.constexpr, range(11))
_WORDS = gl.constexpr(16)
# Where words are handed over, mbarriers count threads, and each arrives itself (gpu/ptx/per_thread_arrival.py).
WARP_THREADS, WARPGROUP_THREADS = gl.constexpr(own_arrivals.WARP_THREADS), gl.constexpr(own_arrivals.WARPGROUP_THREADS)


def _filled_in_order(cls: type) -> type:
    """The class with a constructor that takes all fields in their order."""

    def fill(self, *values):
        for name, value in zip(fields, values, strict=True):
            setattr(self, name, gl.constexpr(value) if fields[name] is gl.constexpr else value)

    fields = cls.__annotations__
    cls.__init__ = gluon.constexpr_function(fill)
    return cls


@aggregate
@_filled_in_order
class Problem:
    """Everything that the partitions share. bq, bk, bv: mbarriers, "full" ones first; bz: of values before zeros.

    ORDER, an int: how tiles are dealt; 0: in closed form, 1: order holds each program's positions, -1 where it has no
    more, 2: order holds the slots of packed sequences from the longest on, -1 for those without a tile; 3: the same,
    and then a counter, 0 at first, of places that programs have taken, each the next one when it needs a tile.
    PAGE: keys of a page of block_table, 0 where keys lie one after another. SHARED: all warpgroups run one copy of
    their code (gpu/ptx/shared_warpgroups.py).
    """

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    lse: gl.tensor
    sinks: gl.tensor
    starts_q: gl.tensor
    starts_k: gl.tensor
    order: gl.tensor
    block_table: gl.tensor
    sq: gl.shared_memory_descriptor
    sk: gl.shared_memory_descriptor
    sv: gl.shared_memory_descriptor
    bq: gl.shared_memory_descriptor
    bk: gl.shared_memory_descriptor
    bv: gl.shared_memory_descriptor
    bz: gl.shared_memory_descriptor
    bo: gl.shared_memory_descriptor
    posts: gl.shared_memory_descriptor
    pages_a_row: gl.tensor
    k_page_rows: gl.tensor
    v_page_rows: gl.tensor
    lse_batch: gl.tensor
    lse_head: gl.tensor
    num_heads: gl.tensor
    group: gl.tensor
    section: gl.tensor
    num_queries: gl.tensor
    num_keys: gl.tensor
    skipped: gl.tensor
    sequences: gl.tensor
    search_steps: gl.tensor
    slots: gl.tensor
    tiles: gl.tensor
    rounds: gl.tensor
    shift: gl.tensor
    left: gl.tensor
    right: gl.tensor
    phases: gl.tensor
    scale_log2: gl.tensor
    inner: gl.tensor
    outer: gl.tensor
    D: gl.constexpr
    BN: gl.constexpr
    WARPGROUPS: gl.constexpr
    K_STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    Q_STAGES: gl.constexpr
    PING_PONG: gl.constexpr
    SHARED: gl.constexpr
    Q_REGISTERS: gl.constexpr
    HALF_TILES: gl.constexpr
    HEADROOM: gl.constexpr
    ORDER: gl.constexpr
    PAGE: gl.constexpr
    RAGGED: gl.constexpr
    TOP_LEFT: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    SOFTCAP: gl.constexpr
    SINKS: gl.constexpr
    LSE: gl.constexpr


@gluon.jit
def allocate_posts(SLOTS: gl.constexpr):
    """Shared memory where the loading warp writes what a tile is, for all: a slot for each of Q's buffers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [SLOTS * _WORDS, 1], layout)


@gluon.jit
def post(posts, slot, word: gl.constexpr, value):
    """Written by the loading warp before it arrives at Q's barriers; free again with Q's buffer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    posts.index(slot * _WORDS + word).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def posted(posts, slot, word: gl.constexpr, WARPS: gl.constexpr):
    """Read the post in a slot, for a partition of WARPS warps that has waited for Q."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(posts.index(slot * _WORDS + word).load(layout), 0)


# One lane asks, for the warp: 32 would take 32 places.
_TAKE = gl.constexpr(
    "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.b32 $0, 0;"
    " @first atom.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff; }"
)


@gluon.jit
def take(counter):
    """The number at `counter`, a pointer to int32, before one is added: for a partition of one warp."""
    return gl.inline_asm_elementwise(_TAKE, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def position_of(problem, turn):
    """Place in the order of all tiles, perhaps beyond its end, of this program's round `turn`."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if problem.ORDER == 3:
        position = take(problem.order + problem.slots)
    elif problem.ORDER == 1:
        position = gl.load(problem.order + program * problem.rounds + turn)
    else:
        position = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    return position


@gluon.jit
def tile_of(problem, turn):
    """tile_at of this program's round `turn`."""
    return tile_at(problem, position_of(problem, turn))


@gluon.jit
def tile_at(problem, position):
    """The tile at a place of the order.

    Returns (batch, head, first row, first row and length of the sequence's queries, the same of its keys, place of its
    first query, first key tile, number of key tiles at least 1, whether there is such a tile).
    """
    BM: gl.constexpr = 64 * problem.WARPGROUPS
    exists = (position >= 0) & (position < problem.tiles)
    position = gl.maximum(gl.minimum(position, problem.tiles - 1), 0)
    across = problem.section * problem.slots
    rest = position % across
    if problem.ORDER >= 2:
        slot = gl.load(problem.order + rest // problem.section)
        exists = exists & (slot >= 0)
        slot = gl.maximum(slot, 0)
    else:
        slot = problem.slots - 1 - rest // problem.section
    head = position // across * problem.section + rest % problem.section
    batch, start_q, start_k = head * 0, head * 0, head * 0
    num_queries, num_keys, shift, rows = problem.num_queries, problem.num_keys, problem.shift, problem.num_queries
    if problem.RAGGED:
        # Sequence b's tiles lie in the slots from starts_q[b] // BM + b on: enough for it, whatever the lengths.
        low = slot * 0
        high = problem.sequences
        for _ in range(problem.search_steps):
            middle = (low + high) // 2
            below = gl.load(problem.starts_q + middle) // BM + middle <= slot
            low = gl.where(below & (middle < high), middle, low)
            high = gl.where(below, high, middle)
        batch = low
        start_q, start_k = gl.load(problem.starts_q + batch), gl.load(problem.starts_k + batch)
        slot = slot - (start_q // BM + batch)
        num_queries = gl.load(problem.starts_q + batch + 1) - start_q
        num_keys = gl.load(problem.starts_k + batch + 1) - start_k
        rows = gl.minimum(num_queries, problem.num_queries)
        if problem.TOP_LEFT:
            shift = head * 0
        else:
            shift = num_keys - num_queries
        if problem.RIGHT:
            # Keys that no query sees may hold NaN: the descriptor shall read zeros for them.
            num_keys = gl.maximum(gl.minimum(num_keys, num_queries + shift + problem.right), 0)
        exists = exists & (slot * BM < rows)
    else:
        batch = head // problem.num_heads
        head = head % problem.num_heads
    first = slot * BM
    end, begin = num_keys, head * 0
    if problem.RIGHT:
        end = gl.minimum(end, gl.minimum(first + BM, num_queries) + shift + problem.right)
    if problem.LEFT:
        begin = gl.maximum(first + shift - problem.left, 0) // problem.BN
    count = gl.maximum((gl.maximum(end, 0) + problem.BN - 1) // problem.BN - begin, 1)
    return batch, head, first, start_q, rows, start_k, num_keys, shift, begin, count, exists


@gluon.jit
def place(problem, batch, head, start, length, row, column=0):
    """Coordinates of a row, from a column on, for the descriptors."""
    if problem.RAGGED:
        at = [_RAGGED_END, start + length, head, _RAGGED_END - length + row, column]
    else:
        at = [batch, head, row, column]
    return at


@gluon.jit
def place_of_keys(problem, batch, head, start, length, tile, column=0):
    # Keys before the first that any query sees are not the descriptor's: coordinates below 0 read zeros.
    return place(problem, batch, head, start, length, tile * problem.BN - problem.skipped, column)


@gluon.jit
def first_seen(problem, shift, num_keys):
    """The first key that any query of a packed sequence sees, at most num_keys."""
    first = shift * 0
    if problem.LEFT:
        first = gl.minimum(gl.maximum(shift - problem.left, 0), num_keys)
    return first


@gluon.jit
def place_in_page(page, page_rows, kv_head, used, row, column):
    """The same in a page whose first `used` rows are keys; beyond them the descriptor reads zeros."""
    return [_RAGGED_END, page * page_rows + used, kv_head, _RAGGED_END - used + row, column]


@gluon.jit
def boxed(buffer, descriptor):
    """A buffer [rows, D] as the descriptor's box, whose outer axes are 1."""
    return buffer._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
