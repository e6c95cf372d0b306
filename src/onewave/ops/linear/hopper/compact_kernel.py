"""x W^T of several tokens, W in the compact tiles of a wave's stream: thirteen bits a weight, without loss.

The product, its rings and its epilogue are those of kernel.py, and so are its sums. What differs is how W comes: a
warpgroup widens it on the way into shared memory. A tile of the stream holds R rows of W in the order of the wave's
threads (wave/weights/compact.py): a warp's part of half an image is 16 rows of 64 columns, or, with R = 8, 8 rows of 64
columns twice, 128 columns apart. These parts are what is loaded, 13 words a thread, LOOK_AHEAD stages ahead into
registers; masks and shifts make bfloat16 numbers of them, one product by the row's power of two makes weights, and
they go to the places that TMA would give them.

Partitions, one thread block an SM:

multiply  as in kernel.py; the columns of a gated product take turns, a gate, then what it gates, in one tile.
widen     two warpgroups, each every other stage, or one beside two that multiply: for each stage the copies of x by
          TMA, then its part of W, as above. It arrives at the stage's mbarrier when its words are written; TMA's bytes
          arrive there too.

Sums run over K in the order of kernel.py, on the same weights: a row's bits are those of the plain product.

Weights of a tile's list, which thirteen bits do not reach, are written over by their own 16 bits in registers; a matrix
without any (nearly all) skips that.

constexpr    meaning                                          allowed
R, IMAGES    of the stream's tiles (wave/plan/layout.py)      8, 16, 32; 1, 2
GATED        columns of W take turns, gate and gated          True, False
LOOK_AHEAD   a warpgroup's stages whose words are in          1 to 3
             registers or coming
REGISTERS    of a thread that widens                          what fits 504 with those that multiply
others       as in kernel.py; EXTRA is 0                      SLICES 4 with R = 8
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from onewave.gpu.dependent_launch import after_last
from onewave.ops.linear.hopper.kernel import Constants, Sizes, allocate_ring, multiply_partition, tile_place

_LIST_WORDS = gl.constexpr(32)
_MASK, _GAP = gl.constexpr(0x8FFF8FFF - (1 << 32)), gl.constexpr(0x00070007)
_SIGNS = gl.constexpr(0x80008000 - (1 << 32))


class Packed(NamedTuple):
    """A matrix in a stream. words: of all tiles. lists: LIST_WORDS a tile. places: of its tiles, row block by row
    block. scales: of its rows. tiles: a row block. blocks: row blocks. listed: whether any tile lists a weight."""

    words: Any
    lists: Any
    places: Any
    scales: Any
    tiles: Any
    blocks: Any
    listed: Any


class Tiling(NamedTuple):
    """R, IMAGES: of the stream's tiles. LOOK_AHEAD: see the module. WIDENERS: warpgroups that widen."""

    R: Any
    IMAGES: Any
    LOOK_AHEAD: Any
    WIDENERS: Any


@gluon.constexpr_function
def words_layout():
    """Layout of parts' words [parts, 32 lanes, 4]: a part is a warp's, a lane's four words are 16 bytes."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def rows_of_part(R):
    """Rows of W in a part."""
    return 16 if R > 8 else 8


@gluon.constexpr_function
def parts_of_stage(COLUMNS, SLICES, R):
    """Parts of a stage."""
    return COLUMNS * SLICES * 64 // 1024


@gluon.jit
def part_places(packed, column, k, c, t):
    """Where the parts of a stage lie: (place among a row block's tiles, its word, row block, first row of W) of each.

    k: the stage's first unit of 64 columns; with R = 8 units of two, 128 columns apart.
    """
    R: gl.constexpr = t.R
    ROWS: gl.constexpr = rows_of_part(R)
    PARTS: gl.constexpr = parts_of_stage(c.COLUMNS, c.SLICES, R)
    ACROSS: gl.constexpr = c.COLUMNS // ROWS  # parts of a slice, or of two
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, words_layout())))
    row = column * c.COLUMNS + part % ACROSS * ROWS
    unit = k + part // ACROSS
    UNITS: gl.constexpr = (8 if R <= 16 else 4) * t.IMAGES  # of a tile
    within = unit % UNITS
    half = within % 2
    if R == 32:
        image = within // 4
        warp = within // 2 % 2 * 2 + row // 16 % 2
    else:
        image = within // 8
        warp = within // 2 % 4
    word = (image * 2 + half) * 128 + warp * 32
    return unit // UNITS, word, gl.minimum(row // R, packed.blocks - 1), row


@gluon.jit
def load_places(packed, column, k, c, t):
    """Load where the tiles lie that hold a stage's parts: [parts]."""
    tile, _, block, _ = part_places(packed, column, k, c, t)
    return gl.load(packed.places + block * packed.tiles + gl.minimum(tile, packed.tiles - 1))


@gluon.jit
def load_parts(packed, place, column, k, c, t):
    """Load a stage's words: three planes [parts, 32, 4], the words beside them [parts, 32], and the tiles' places."""
    L: gl.constexpr = words_layout()
    _, word, _, _ = part_places(packed, column, k, c, t)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    begin = (place.to(gl.int64) * (3328 * t.IMAGES))[:, None]
    thread = word[:, None] + lane[None, :]
    at = packed.words + ((begin + thread * 4)[:, :, None] + four[None, None, :])
    first = gl.load(at)
    second = gl.load(at + 1024 * t.IMAGES)
    third = gl.load(at + 2048 * t.IMAGES)
    beside = gl.load(packed.words + (begin + (3072 * t.IMAGES + thread)))
    return first, second, third, beside, place


@gluon.jit
def fourths(words):
    """Take the four words of each lane apart, along the last axis."""
    even, odd = gl.split(gl.reshape(words, [words.shape[0], 32, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def fourth_pairs(first, second, third, beside):
    """Put together the pairs that lie in the gaps of the others' words, [parts, 32, 4], with the rest of their words'
    bits still to be masked (compact_values.py)."""
    spread = ((first >> 3) & 0x0E000E00) | ((second >> 6) & 0x01C001C0) | ((third >> 9) & 0x00380038)
    pair0, pair1, pair2, _ = fourths(spread)
    beside = gl.convert_layout(beside, pair0.type.layout, assert_trivial=True)
    _, _, _, last0 = fourths(first)
    _, _, _, last1 = fourths(second)
    _, _, _, last2 = fourths(third)
    pair0 |= ((last0 >> 12) & _GAP) | ((beside << 3) & _SIGNS)
    pair1 |= ((last1 >> 12) & _GAP) | ((beside << 2) & _SIGNS)
    pair2 |= ((last2 >> 12) & _GAP) | ((beside << 1) & _SIGNS)
    joined = gl.join(gl.join(pair0, pair2), gl.join(pair1, beside))
    return gl.convert_layout(gl.reshape(joined, [first.shape[0], 32, 4]), first.type.layout, assert_trivial=True)


@gluon.jit
def times(pairs, factors):
    """Multiply both bfloat16 numbers of each word by those of another."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, factors], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def row_factors(scales, row):
    """Load the power of two that makes weights of a row's numbers, twice in a word, for each lane: [parts, 32]."""
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, words_layout())))
    bits = gl.load(scales + (row[:, None] + lane[None, :] // 4)).to(gl.int32, bitcast=True)
    # A scale is 2^(base - 64), its factor 2^base: 64 more in the exponent's place, of float32 as of bfloat16.
    factor = (bits >> 16) + (64 << 7)
    return factor | (factor << 16)


@gluon.jit
def factors_of(packed, column, c, t):
    """(of the upper rows, of the lower ones) of a tile's parts."""
    _, _, _, row = part_places(packed, column, 0, c, t)
    # Rows beyond the last block are no part of the result; they read the last block's.
    row = gl.minimum(row, packed.blocks * t.R - rows_of_part(t.R))
    upper = row_factors(packed.scales, row)
    lower = upper
    if t.R > 8:
        lower = row_factors(packed.scales, row + 8)
    return upper, lower


@gluon.jit
def with_listed(pairs, packed, place, word, row, c, t):
    """Write the weights of tiles' lists over what stands for them in a stage's pairs, four tensors [parts, 32, 4]."""
    L: gl.constexpr = words_layout()
    count = gl.load(packed.lists + place.to(gl.int64) * _LIST_WORDS)
    most = gl.max(count, axis=0)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    pair00, pair01, pair10, pair11 = pairs
    for number in range(1, most + 1):
        listed = gl.load(packed.lists + place.to(gl.int64) * _LIST_WORDS + number)
        # Half and warp, lane, 16 columns, half of them, half of 16 rows, column of a pair: as of the word's lower bits.
        mine = (number <= count) & ((listed >> 10 & 15) == word // 32)
        here = mine[:, None] & ((listed >> 5 & 31)[:, None] == lane[None, :])
        here = here[:, :, None] & ((listed >> 3 & 3)[:, None, None] == four[None, None, :])
        own = gl.minimum(row, packed.blocks * t.R - rows_of_part(t.R))[:, None] + (lane // 4)[None, :]
        if t.R > 8:
            own += ((listed >> 1 & 1) * 8)[:, None]
        scale = gl.load(packed.scales + own)
        upper = (listed & -0x10000).to(gl.float32, bitcast=True)[:, None] * scale
        bits = (upper.to(gl.int32, bitcast=True) >> 16) & 0xFFFF
        is_second = (listed & 1)[:, None] > 0
        keep = gl.where(is_second, 0xFFFF, -0x10000)[:, :, None] + gl.zeros_like(pair00)
        put = gl.where(is_second, bits << 16, bits)[:, :, None]
        which = (listed >> 1 & 3)[:, None, None]
        pair00 = gl.where(here & (which == 0), (pair00 & keep) | put, pair00)
        pair01 = gl.where(here & (which == 1), (pair01 & keep) | put, pair01)
        pair10 = gl.where(here & (which == 2), (pair10 & keep) | put, pair10)
        pair11 = gl.where(here & (which == 3), (pair11 & keep) | put, pair11)
    return pair00, pair01, pair10, pair11


@gluon.jit
def store_parts(stage, pairs, c, t):
    """Store a stage's weights, int32 pairs, in the places that TMA would give them, [SLICES * COLUMNS, 32]."""
    pair00, pair01, pair10, pair11 = pairs
    ROWS: gl.constexpr = rows_of_part(t.R)
    PARTS: gl.constexpr = pair00.shape[0]
    # [parts, row, pair in 8 columns, 16 columns, half of them, half of 16 rows]
    whole = gl.join(gl.join(pair00, pair10), gl.join(pair01, pair11))
    if ROWS == 16:
        whole = gl.permute(gl.reshape(whole, [PARTS, 8, 4, 4, 2, 2]), (0, 5, 1, 3, 4, 2))
    else:
        # [half of 128 columns, parts, row, ..., which 128 columns]: a slice is one half of one 128 columns.
        whole = gl.permute(gl.reshape(whole, [2, PARTS // 2, 8, 4, 4, 2, 2]), (6, 0, 1, 2, 4, 5, 3))
    stage.store(gl.reshape(whole, [c.SLICES * c.COLUMNS, 32]))


@gluon.jit
def widen_stage(loaded, factors, packed, column, k, stage, c, t):
    """Make weights of a stage's words, and store them."""
    first, second, third, beside, place = loaded
    fourth = fourth_pairs(first, second, third, beside)
    upper, lower = factors
    upper = upper[:, :, None] + gl.zeros_like(first)
    lower = lower[:, :, None] + gl.zeros_like(first)
    pairs = (
        times(first & _MASK, upper), times(second & _MASK, lower), times(third & _MASK, upper),
        times(fourth & _MASK, lower),
    )  # fmt: skip
    if packed.listed > 0:
        _, word, _, row = part_places(packed, column, k, c, t)
        pairs = with_listed(pairs, packed, place, word, row, c, t)
    store_parts(stage, pairs, c, t)


@gluon.jit
def copy_x(x, full, row, k, slot, ring, c, t):
    """Begin the copies of a stage's x. k: its first unit of columns, as in part_places."""
    for part in gl.static_range(c.SLICES):
        first = (k * (1 if t.R > 8 else 2) + part) * 64
        at = slot * c.SLICES + part
        for group in gl.static_range(c.WARPGROUPS):
            target = ring.x.index(at * c.WARPGROUPS + group).slice(0, c.BOX_ROWS)
            tma.async_copy_global_to_shared(x, [(row * c.WARPGROUPS + group) * 64, first], full, target)


@gluon.jit
def widen_partition(x, packed, sizes, ring, c, t, group: gl.constexpr):
    WIDENERS: gl.constexpr = t.WIDENERS
    UNITS: gl.constexpr = c.SLICES if t.R > 8 else c.SLICES // 2  # of a stage
    AHEAD: gl.constexpr = WIDENERS * UNITS  # from one stage of this warpgroup to its next
    ROW_BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    stages = ring.w._reinterpret(gl.int32, [c.STAGES, c.SLICES * c.COLUMNS, 32], ROW_BYTES)
    slot = group + 0
    phase = 1
    before = 0
    for tile in range(gl.program_id(0), sizes.row_blocks * sizes.column_blocks, gl.num_programs(0)):
        row, column = tile_place(tile, sizes, c)
        begin = (group + before) % WIDENERS
        k = begin * UNITS
        place = load_places(packed, column, k, c, t)
        factors = factors_of(packed, column, c, t)
        one = load_parts(packed, place, column, k, c, t)
        two = one
        three = one
        k += AHEAD
        place = load_places(packed, column, k, c, t)
        if t.LOOK_AHEAD > 1:
            two = load_parts(packed, place, column, k, c, t)
            k += AHEAD
            place = load_places(packed, column, k, c, t)
        if t.LOOK_AHEAD > 2:
            three = load_parts(packed, place, column, k, c, t)
            k += AHEAD
            place = load_places(packed, column, k, c, t)
        after_last(c.PDL)  # which has made x, and nothing of W
        for step in range(begin, sizes.steps, WIDENERS):
            later = load_parts(packed, place, column, k, c, t)
            k += AHEAD
            place = load_places(packed, column, k, c, t)
            full = ring.full.index(slot)
            mbarrier.wait(ring.free.index(slot), phase)
            mbarrier.expect(full, c.SLICES * c.WARPGROUPS * c.BOX_ROWS * 128)
            copy_x(x, full, row, step * UNITS, slot, ring, c, t)
            widen_stage(one, factors, packed, column, step * UNITS, stages.index(slot), c, t)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full, count=1)
            if t.LOOK_AHEAD > 2:
                one = two
                two = three
                three = later
            elif t.LOOK_AHEAD > 1:
                one = two
                two = later
            else:
                one = later
            slot += WIDENERS
            if slot >= c.STAGES:
                slot -= c.STAGES
                phase ^= 1
        before += sizes.steps


@gluon.jit(
    do_not_specialize=[
        "first_place", "first_scale", "rows", "columns", "row_blocks", "column_blocks", "steps", "tiles", "blocks",
        "listed",
    ]
)  # fmt: skip
def compact_gemm_kernel(
    x, words, lists, places, scales, first_place, first_scale, out, bias, rows, columns, row_blocks, column_blocks,
    steps, tiles, blocks, listed,
    DTYPE: gl.constexpr, BOX_ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    SLICES: gl.constexpr, BAND: gl.constexpr, GATED: gl.constexpr, TO_MAP: gl.constexpr, PDL: gl.constexpr,
    R: gl.constexpr, IMAGES: gl.constexpr, LOOK_AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Multiply all tiles.

    x: descriptor [rows, K] in boxes [BOX_ROWS, 64]. words, lists, tiles, blocks, listed: see Packed; places, scales: of
    the whole stream, W's from first_place and first_scale on.
    out: descriptor [rows, columns] in boxes [64, at most 64] with TO_MAP, else a pointer to dense rows. bias: a pointer
    to a number for each row of W, gates first, or None. The others: see kernel.Sizes, kernel.Constants.
    """
    c: gl.constexpr = Constants(
        DTYPE=DTYPE, BOX_ROWS=BOX_ROWS, COLUMNS=COLUMNS, EXTRA=0, WARPGROUPS=WARPGROUPS, STAGES=STAGES, SLICES=SLICES,
        BAND=BAND, GATED=False, TO_MAP=TO_MAP, PDL=PDL, TURNS=GATED,
    )  # fmt: skip
    t: gl.constexpr = Tiling(R=R, IMAGES=IMAGES, LOOK_AHEAD=LOOK_AHEAD, WIDENERS=3 - WARPGROUPS)
    sizes = Sizes(
        rows=rows, columns=columns, of_bias=columns * (2 if GATED else 1), row_blocks=row_blocks,
        column_blocks=column_blocks, steps=steps,
    )  # fmt: skip
    packed = Packed(
        words=words, lists=lists, places=places + first_place, scales=scales + first_scale, tiles=tiles, blocks=blocks,
        listed=listed,
    )  # fmt: skip
    ring, staging = allocate_ring(c, DTYPE, min(COLUMNS // 2 if GATED else COLUMNS, 64), 64, 2)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_partition, (out, bias, sizes, ring, staging, c, 0)),
                (widen_partition, (x, packed, sizes, ring, c, t, 0)),
                (widen_partition, (x, packed, sizes, ring, c, t, 1)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_partition, (out, bias, sizes, ring, staging, c, 0)),
                (widen_partition, (x, packed, sizes, ring, c, t, 0)),
                (multiply_partition, (out, bias, sizes, ring, staging, c, 1)),
            ],
            [4, 4],
            [REGISTERS, (504 - REGISTERS) // 16 * 8],
        )
