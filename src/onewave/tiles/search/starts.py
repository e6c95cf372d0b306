"""Orders that are good to begin with: block snakes, and every grid order, all starting at tile (0, 0).

A block snake holds a row panels and b column panels, a + b = capacity: strips of a rows, each walked block by block of
b columns, back and forth, so that a strip begins with the block of columns that the last one ended with. With b = 1
it is the strip snake.
"""

from collections.abc import Callable, Iterator

from onewave.tiles.order.orders import GRID_ORDERS, grid_order

Path = list[tuple[int, int]]

MAX_SHAPES = 24
SMALL = 4096


def block_snake(rows: int, cols: int, height: int, width: int, across: bool = False) -> Path:
    """Strips of `height` rows, walked in blocks of `width` columns, back and forth.

    across: a block's tiles row by row instead of column by column; either way back and forth.
    """
    path: Path = []
    widths = _widths(cols, width)
    starts = [sum(widths[:place]) for place in range(len(widths))]
    blocks = [range(start, start + size) for start, size in zip(starts, widths, strict=True)]
    for place, top in enumerate(range(0, rows, height)):
        down = range(top, min(top + height, rows))
        for block in blocks if place % 2 == 0 else reversed(blocks):
            along = block[::-1] if place % 2 else block
            outer, inner = (down, along) if across else (along, down)
            for step, first in enumerate(outer):
                for second in inner if step % 2 == 0 else reversed(inner):
                    path.append((first, second) if across else (second, first))
    return path


def block_snake_loads(rows: int, cols: int, height: int, width: int) -> int:
    """Loads of a block snake with room for height + width panels: m + ceil(m/a) n - (ceil(m/a) - 1) b.

    Each row panel once; each column panel once a strip, less those that the next strip finds still resident: the block
    that it begins with. b is less where the block at that end is narrower.
    """
    turns = -(-rows // height) - 1
    widths = _widths(cols, width)
    return rows + (turns + 1) * cols - (turns + 1) // 2 * widths[-1] - turns // 2 * widths[0]


def starting_orders(rows: int, cols: int, capacity: int) -> Iterator[Callable[[], Path]]:
    """Ways to make orders that begin at (0, 0), the ones with the least predicted loads first."""
    shapes: list[tuple[int, int, int, bool]] = []
    for turned in (False, True):
        m, n = (cols, rows) if turned else (rows, cols)
        for height in range(1, min(capacity - 1, m) + 1):
            width = min(capacity - height, n)
            shapes.append((block_snake_loads(m, n, height, width), height, width, turned))
    for _, height, width, turned in sorted(shapes)[:MAX_SHAPES]:
        for across in (False, True):
            yield lambda h=height, w=width, t=turned, a=across: _turned(rows, cols, h, w, t, a)
    if rows * cols <= SMALL:
        for _, height, width, turned in sorted(shapes)[:MAX_SHAPES]:
            # LRU needs a slot for the panel that comes and one for the panel that goes.
            for less in (1, 2):
                if width > less:
                    yield lambda h=height, w=width - less, t=turned: _turned(rows, cols, h, w, t, False)
        for name in GRID_ORDERS:
            yield lambda n=name: renamed(grid_order(n, rows, cols, workers=max(rows, cols)).to_list(), rows, cols)


def renamed(path: Path, rows: int, cols: int, start: tuple[int, int] = (0, 0)) -> Path:
    """Rename rows and columns so that the path begins at `start`. Loads stay as they are.

    The axis is mirrored where that does it, else turned round.
    """
    names: list[list[int]] = []
    for size, first, wanted in ((rows, path[0][0], start[0]), (cols, path[0][1], start[1])):
        mirror = first + wanted == size - 1 and first != wanted
        names.append([size - 1 - i if mirror else (i - first + wanted) % size for i in range(size)])
    return [(names[0][row], names[1][col]) for row, col in path]


def _widths(cols: int, width: int) -> list[int]:
    """Blocks of `width` columns, and a narrower one where the strips do not turn, if there is such a place."""
    full, narrow = divmod(cols, width)
    widths = [width] * full
    if narrow:
        widths.insert(min(1, full - 1) if full else 0, narrow)
    return widths


def _turned(rows: int, cols: int, height: int, width: int, turned: bool, across: bool) -> Path:
    if not turned:
        return block_snake(rows, cols, height, width, across)
    return [(row, col) for col, row in block_snake(cols, rows, height, width, across)]
