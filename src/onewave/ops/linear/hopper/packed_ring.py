"""Fill the ring of packed_kernel.py with x's slices and W's words, and read the words back in a warpgroup.

A stage is a unit of 64 columns. Its words are planes, 16 bytes of each lane, and words beside them, a lane's one each:

tiles        planes                                           beside them
compact      3; with R = 8 the first of two units brings 2    1; with R = 8 the second of two units brings it
one byte     2                                                none
four bits    2, of 128 columns; the second half brings none   scales of both rows, of each group of columns
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from onewave.gpu.dependent_launch import after_last
from onewave.ops.linear.hopper.narrow_values import (
    brings_words,
    scale_lines,
    scale_word,
    share_of_words,
    unit_at,
    words_of_image,
)
from onewave.ops.linear.hopper.packed_values import blocks_of, is_second, thread_of, words_layout
from onewave.wave.kernel.words import tile_bytes


@gluon.constexpr_function
def copies_layout():
    """Layout of the same words of all rows, for the two warps that copy them."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [2, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def units_of(R, IMAGES):
    """Units of 64 columns in a tile of the stream."""
    return 128 // R * IMAGES


@gluon.constexpr_function
def offset_of(unit, R):
    """thread_of the first four units of a tile."""
    if R == 8:
        return unit % 2 * 128
    if R == 64:
        return unit * 128
    return unit % 2 * 128 + unit // 2 * (R // 16) * 32


@gluon.constexpr_function
def planes_of(FORMAT):
    """Words of 16 bytes that a lane has of a unit, or of more with R = 8 or in four bits."""
    return 3 if FORMAT == 3 else 2


@gluon.constexpr_function
def brings_plane(plane, place, FORMAT, R):
    """Whether a unit needs words that the unit before has not brought. Of compact tiles with R = 8 the first of two
    units needs two planes."""
    if FORMAT == 3:
        return R > 8 or plane != 1 or is_second(place, R)
    return brings_words(place, FORMAT, R)


@gluon.constexpr_function
def lines_of(place, FORMAT, R):
    """Words that a unit brings for a lane beside the planes."""
    if FORMAT == 3:
        return int(R > 8 or is_second(place, R))
    return scale_lines(place, FORMAT, R)


@gluon.constexpr_function
def lines_in_stage(FORMAT, R):
    """Words beside the planes that a stage has room for."""
    return 1 if FORMAT == 3 else scale_lines(0, FORMAT, R)


@gluon.constexpr_function
def along_of(place, FORMAT, R):
    """How far a unit's words are from those of the first of four."""
    thread = offset_of(unit_at(place, FORMAT, R), R)
    if FORMAT == 3:
        return thread * 4
    return thread // (128 if FORMAT < 3 else 256) * 1024 + thread % 128 * 4


@gluon.constexpr_function
def line_of(place, line, FORMAT, R, IMAGES):
    """How far a line of a unit is from the first one."""
    thread = offset_of(place, R)
    if FORMAT == 3:
        return thread
    return thread // 256 * words_of_image(FORMAT) + scale_word(line, place, FORMAT, IMAGES) + thread % 128 // 4


@gluon.jit
def next_words(at_words, place: gl.constexpr, c):
    """Return the place of the words that the unit behind that of `place` reads."""
    if brings_words(place + 1, c.FORMAT, c.R):
        at_words += 1
        if at_words == c.WORDS:
            at_words = 0
    return at_words


@gluon.jit
def tile_place(tile, sizes, c):
    """(token block, row block) of a tile."""
    BAND: gl.constexpr = c.BAND
    band = tile // (BAND * sizes.token_blocks)
    height = gl.minimum(sizes.row_blocks - band * BAND, BAND)
    within = tile - band * (BAND * sizes.token_blocks)
    return within // height, band * BAND + within % height


@gluon.jit
def load_x(x, sizes, steps, ring, c):
    slot = 0
    phase = 1
    after_last(c.PDL)
    for tile in range(gl.program_id(0), sizes.token_blocks * sizes.row_blocks, gl.num_programs(0)):
        token, _ = tile_place(tile, sizes, c)
        for step in range(steps):
            full = ring.full.index(slot)
            mbarrier.wait(ring.free.index(slot), phase)
            mbarrier.expect(full, c.TOKENS * 128)
            unit = step
            if c.FORMAT < 3 and c.R == 8:
                unit = step // 4 * 4 + step % 2 * 2 + step % 4 // 2  # unit_at
            tma.async_copy_global_to_shared(x, [token * c.TOKENS, unit * 64], full, ring.x.index(slot))
            slot += 1
            if slot == c.STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def load_places(packed, tile, k, sizes, c):
    """Load where the tiles of the stream lie that each 16 rows of a tile of the result read: a tuple of [rows / 16]."""
    _, block = tile_place(tile, sizes, c)
    row = block * c.ROWS + gl.arange(0, c.ROWS // 16, gl.SliceLayout(1, gl.SliceLayout(2, copies_layout()))) * 16
    inside = (row >= 0) & (tile < sizes.token_blocks * sizes.row_blocks)
    places = ()
    for number in gl.static_range(blocks_of(c.R)):
        at = gl.minimum((row + number * 8) // c.R, packed.blocks - 1) * packed.tiles + k
        places = places + (gl.load(packed.places + at, mask=inside, other=0),)
    return places


@gluon.jit
def load_words(packed, sizes, ring, c):
    L: gl.constexpr = copies_layout()
    UNITS: gl.constexpr = units_of(c.R, c.IMAGES)
    TOGETHER: gl.constexpr = min(UNITS, 4)
    BLOCKS: gl.constexpr = blocks_of(c.R)
    LINES: gl.constexpr = lines_in_stage(c.FORMAT, c.R)
    PLANE: gl.constexpr = 1024 * c.IMAGES if c.FORMAT == 3 else 512
    VALUES: gl.constexpr = (3072 if c.FORMAT == 3 else 1024) * c.IMAGES
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    warp = gl.arange(0, c.ROWS // 16, gl.SliceLayout(1, gl.SliceLayout(2, L))) % max(c.R // 16, 1) * 32
    slot = 0
    at_words = 0
    phase = 1
    latest = load_places(packed, gl.program_id(0), 0, sizes, c)
    for tile in range(gl.program_id(0), sizes.token_blocks * sizes.row_blocks, gl.num_programs(0)):
        for k in range(packed.tiles):
            places = latest
            last = k + 1 == packed.tiles
            following = gl.where(last, tile + gl.num_programs(0), tile)
            latest = load_places(packed, following, gl.where(last, 0, k + 1), sizes, c)
            for first in range(0, UNITS, TOGETHER):
                # A unit's distance from the first one's place is constant, and so a part of its copies' instructions.
                thread = thread_of(first, c.R)
                if c.FORMAT == 3:
                    word = thread * 4
                    line = thread
                    of_row = lane
                    row = warp
                else:
                    word = thread // (128 if c.FORMAT < 3 else 256) * 1024 + thread % 128 * 4
                    line = thread // 256 * words_of_image(c.FORMAT) + thread % 128 // 4
                    of_row = lane // 4
                    row = warp // 4
                for place in gl.static_range(TOGETHER):
                    mbarrier.wait(ring.free.index(slot), phase)
                    for number in gl.static_range(BLOCKS):
                        begin = places[number].to(gl.int64) * (tile_bytes(c.FORMAT, c.IMAGES) // 4)
                        planes = (begin + warp * 4)[:, None] + (lane * 4 + word)[None, :]
                        planes = packed.words + (planes[:, :, None] + four[None, None, :])
                        beside = (begin + (row + VALUES))[:, None] + (of_row + line)[None, :]
                        beside = packed.words + beside
                        at = slot * BLOCKS + number
                        at_plane = at
                        if share_of_words(c.FORMAT, c.R) > 1:
                            at_plane = at_words * BLOCKS + number
                        for plane in gl.static_range(planes_of(c.FORMAT)):
                            if brings_plane(plane, place, c.FORMAT, c.R):
                                target = ring.planes[plane].index(at_plane)
                                async_copy.async_copy_global_to_shared(
                                    target, planes + (along_of(place, c.FORMAT, c.R) + PLANE * plane)
                                )
                        for own in gl.static_range(lines_of(place, c.FORMAT, c.R)):
                            target = ring.beside.index(at * LINES + own)
                            async_copy.async_copy_global_to_shared(
                                target, beside + line_of(place, own, c.FORMAT, c.R, c.IMAGES)
                            )
                    async_copy.mbarrier_arrive(ring.full.index(slot), increment_count=False)
                    if share_of_words(c.FORMAT, c.R) > 1:
                        at_words = next_words(at_words, place, c)
                    slot += 1
                    if slot == c.STAGES:
                        slot = 0
                        phase ^= 1


@gluon.jit
def read_words(ring, slot, at_words, group, place: gl.constexpr, before, c):
    """Load a warpgroup's words of a stage, for each of 16 rows' blocks: planes [4, 32, 4], and words beside them
    [4, 32]; what the unit does not bring is as before, or, of compact tiles, not needed. at_words: of planes that units
    share."""
    L: gl.constexpr = words_layout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BLOCKS: gl.constexpr = blocks_of(c.R)
    OF_BLOCK: gl.constexpr = lines_in_stage(c.FORMAT, c.R)
    COUNT: gl.constexpr = c.WORDS * BLOCKS * (c.ROWS // 64)
    OF_LINES: gl.constexpr = c.STAGES * BLOCKS * (c.ROWS // 64) * OF_BLOCK
    words = ()
    for number in gl.static_range(BLOCKS):
        at = (slot * BLOCKS + number) * (c.ROWS // 64) + group
        if share_of_words(c.FORMAT, c.R) > 1:
            at = (at_words * BLOCKS + number) * (c.ROWS // 64) + group
        own = ()
        for plane in gl.static_range(planes_of(c.FORMAT)):
            if brings_plane(plane, place, c.FORMAT, c.R):
                own = own + (ring.planes[plane]._reinterpret(gl.int32, [COUNT, 4, 32, 4], PLAIN).index(at).load(L),)
            elif c.FORMAT != 3:
                own = own + (before[number][plane],)
        for line in gl.static_range(OF_BLOCK):
            if lines_of(place, c.FORMAT, c.R) > 0:
                lines = ring.beside._reinterpret(gl.int32, [OF_LINES, 4, 32], LINES)
                at_line = ((slot * BLOCKS + number) * OF_BLOCK + line) * (c.ROWS // 64) + group
                own = own + (lines.index(at_line).load(gl.SliceLayout(2, L)),)
            elif c.FORMAT != 3:
                own = own + (before[number][2 + line],)
        words = words + (own,)
    return words
