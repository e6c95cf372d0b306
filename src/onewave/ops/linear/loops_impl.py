"""The loops of a product on the CPU, built for each format: see numba_impl.py for what they do and in which order."""

from collections.abc import Callable

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onewave.ops.cpu import LANES
from onewave.ops.cpu.math_impl import integers
from onewave.ops.cpu.team_impl import call, ordered_kernel
from onewave.ops.cpu.vectors_impl import FLOATS, I64
from onewave.ops.linear.packed import BLOCK, FORMATS
from onewave.ops.linear.unpack_impl import CHUNKS, BlockEmitter, Group

# Places of a group in a thread's room: 32 columns of 16 weights, two scales and the shift; in bytes.
_COLUMN = 4 * LANES
_SCALES, _SHIFT, _GROUP = BLOCK * _COLUMN, (BLOCK + 2) * _COLUMN, (BLOCK + 3) * _COLUMN
# Groups unpacked at a time: 17.5 KiB, which stays in L1 beside eight tokens' inputs.
_GROUPS = 8


def _named(name: str) -> Callable[[Callable], ordered_kernel]:
    """Make a kernel with a name of its own: machine code from several runs' caches is linked by names.

    Numba keeps on disk what closes over numbers and texts alone.
    """

    def decorate(function: Callable) -> ordered_kernel:
        function.__name__ = function.__qualname__ = name
        return ordered_kernel(function)

    return decorate


def _chain(column: int) -> int:
    """Which of four sums a column goes to: they hide the latency of the multiply-add."""
    return column % 2 + 2 * (column // 16)


def _finish(e: BlockEmitter, total, parts, group: Group, inputs):
    """Add a group to a token's total. parts: its four sums. inputs: where the sum of its inputs is."""
    for half in range(2):
        part = e.b.fadd(parts[2 * half], parts[2 * half + 1])
        total = e.b.fadd(part, total) if group.scales is None else e.fma(part, group.scales[half], total)
    return total if group.shift is None else e.fma(group.shift, e.broadcast(inputs, 0), total)


@intrinsic(prefer_literal=True)
def _multiply_tile(_context, kind, tile, x, sums, out, blocks):
    """Multiply one tile of a format with one token.

    Addresses of the tile, the token, the sums of its groups and its 16 outputs; number of blocks.
    """
    form, chunks = FORMATS[kind.literal_value], CHUNKS[kind.literal_value]

    def emit(context, builder, _signature, args):
        _, tile, x, sums, out, blocks = args
        e = BlockEmitter(builder)
        zero = e.numbers(0.0)

        def block(index, totals):
            (total,) = totals
            base = builder.add(tile, builder.mul(index, I64(form.block_bytes)))
            inputs = builder.add(x, builder.mul(index, I64(4 * form.columns)))
            group_sums = builder.add(sums, builder.mul(index, I64(4 * form.groups)))
            first = 0
            for groups, values in chunks(e, base):
                parts = [[zero] * 4 for _ in groups]
                for group, column, weight in values:
                    at, chain = e.broadcast(inputs, 4 * (32 * (first + group) + column)), _chain(column)
                    parts[group][chain] = e.fma(weight, at, parts[group][chain])
                for number, group in enumerate(groups, first):
                    at = builder.add(group_sums, I64(4 * number))
                    total = _finish(e, total, parts[number - first], group, at)
                first += len(groups)
            return [total]

        (total,) = e.loop(blocks, [zero], block)
        e.store(total, out, 0)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 5), emit


def direct(kind: str) -> ordered_kernel:
    """Build the kernel that multiplies tiles of a format with each token, straight from their bytes."""
    form = FORMATS[kind]
    form_bytes, x_bytes, sum_bytes = form.block_bytes, 4 * form.columns, 4 * form.groups

    @_named(f"direct_{kind}")
    def tiles(table_at, first, last):
        table = integers(table_at, 19)
        data, x, sums, out, blocks, tokens = table[1], table[2], table[3], table[4], table[5], table[6]
        for number in range(first, last):
            tile = data + number * blocks * form_bytes
            for t in range(tokens):
                to = out + 4 * (t * table[7] + 16 * number)
                _multiply_tile(kind, tile, x + t * blocks * x_bytes, sums + t * blocks * sum_bytes, to, blocks)

    return tiles


@intrinsic(prefer_literal=True)
def _unpack_blocks(_context, kind, tile, room, blocks):
    """Unpack blocks of a format's tile into a room. Addresses of both; number of blocks."""
    form, chunks = FORMATS[kind.literal_value], CHUNKS[kind.literal_value]

    def emit(context, builder, _signature, args):
        _, tile, room, blocks = args
        e = BlockEmitter(builder)

        def block(index, totals):
            base = builder.add(tile, builder.mul(index, I64(form.block_bytes)))
            to = builder.add(room, builder.mul(index, I64(_GROUP * form.groups)))
            first = 0
            for groups, values in chunks(e, base):
                for number, group in enumerate(groups, first):
                    for half, scale in enumerate(group.scales or [e.numbers(1.0)] * 2):
                        e.store(scale, to, number * _GROUP + _SCALES + half * _COLUMN, 64)
                    if group.shift is not None:
                        e.store(group.shift, to, number * _GROUP + _SHIFT, 64)
                for group, column, weight in values:
                    e.store(weight, to, (first + group) * _GROUP + column * _COLUMN, 64)
                first += len(groups)
            return totals

        e.loop(blocks, [], block)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), emit


def unpack(kind: str) -> ordered_kernel:
    """Build the kernel that unpacks blocks of a format's tile into a room."""

    @_named(f"unpack_{kind}")
    def blocks(tile, room, count):
        _unpack_blocks(kind, tile, room, count)

    return blocks


@intrinsic(prefer_literal=True)
def _multiply_room(_context, tokens, shifted, room, x, sums, out, groups, later, x_stride, sums_stride, out_stride):
    """Multiply unpacked groups with `tokens` tokens and add that to their outputs.

    Addresses of the room, the first token, the sums of its groups and its 16 outputs; number of groups; whether the
    outputs hold sums of groups before; strides in bytes from a token to the next. tokens and shifted: literals.
    """
    count, has_shift = tokens.literal_value, shifted.literal_value

    def emit(context, builder, _signature, args):
        room, x, sums, out, groups, later, x_stride, sums_stride, out_stride = args[2:]
        e = BlockEmitter(builder)
        zero = e.numbers(0.0)
        is_later = builder.icmp_signed("!=", later, I64(0))

        outs = [e.step(out, out_stride, token) for token in range(count)]
        totals = [builder.select(is_later, e.load(at, 0, FLOATS, 4), zero) for at in outs]

        def step(index, totals):
            base = builder.add(room, builder.mul(index, I64(_GROUP)))
            at = builder.add(x, builder.mul(index, I64(4 * BLOCK)))
            inputs = [e.step(at, x_stride, token) for token in range(count)]
            scales = [e.load(base, _SCALES + half * _COLUMN, FLOATS, 64) for half in range(2)]
            shift = e.load(base, _SHIFT, FLOATS, 64) if has_shift else None
            parts = [[zero] * 4 for _ in range(count)]
            for column in range(BLOCK):
                weight = e.load(base, column * _COLUMN, FLOATS, 64)
                for token in range(count):
                    chain = _chain(column)
                    parts[token][chain] = e.fma(weight, e.broadcast(inputs[token], 4 * column), parts[token][chain])
            at = builder.add(sums, builder.mul(index, I64(4)))
            group = Group((scales[0], scales[1]), shift)
            return [
                _finish(e, total, parts[token], group, e.step(at, sums_stride, token))
                for token, total in enumerate(totals)
            ]

        for at, total in zip(outs, e.loop(groups, totals, step), strict=True):
            e.store(total, at, 0)
        return context.get_dummy_value()

    return types.void(tokens, shifted, *[types.int64] * 9), emit


@intrinsic
def _room(_context):
    """The address of a room for _GROUPS groups on the caller's stack."""

    def emit(_ctx, builder, _signature, _args):
        room = cgutils.alloca_once(builder, FLOATS, size=_GROUPS * _GROUP // _COLUMN)
        room.align = 64
        return builder.ptrtoint(room, I64)

    return types.int64(), emit


def over_rooms(*, shifted: bool) -> ordered_kernel:
    """Build the kernel of tiles of any format for several tokens: eight at a time, then four, then one by one."""

    @_named(f"rooms_{shifted}")
    def tiles(table_at, first, last):
        table = integers(table_at, 19)
        data, x, sums, out, blocks, tokens = table[1], table[2], table[3], table[4], table[5], table[6]
        unpack, block_bytes, per_block = table[8], table[9], table[10]
        x_stride, sums_stride, out_stride = blocks * per_block * 128, blocks * per_block * 4, table[7] * 4
        room, at_a_time = _room(), _GROUPS // per_block
        for number in range(first, last):
            for block in range(0, blocks, at_a_time):
                count = min(at_a_time, blocks - block)
                call(unpack, data + (number * blocks + block) * block_bytes, room, count)
                x_at, sums_at, to, n = x + block * per_block * 128, sums + block * per_block * 4, out + number * 64, 0
                groups = count * per_block
                while n < tokens:
                    a, b, c = x_at + n * x_stride, sums_at + n * sums_stride, to + n * out_stride
                    if tokens - n >= 8:
                        _multiply_room(8, shifted, room, a, b, c, groups, block, x_stride, sums_stride, out_stride)
                        n += 8
                    elif tokens - n >= 4:
                        _multiply_room(4, shifted, room, a, b, c, groups, block, x_stride, sums_stride, out_stride)
                        n += 4
                    else:
                        _multiply_room(1, shifted, room, a, b, c, groups, block, x_stride, sums_stride, out_stride)
                        n += 1

    return tiles
