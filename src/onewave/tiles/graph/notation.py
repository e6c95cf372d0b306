"""Fusion trees as text: which loops several operators share, and so which tiles of their intermediates live how long.

    dim M=512 N=512 D=64            # every dimension's size
    dtype bf16                      # of all tensors; "tensor S fp32" for one of them
    op qk   S[M,N] += Q[M,D] * K[N,D]
    op soft P[M,N]  = S[M,N]
    op pv   O[M,D] += P[M,N] * V[N,D]
    level smem 228KiB private       # optional, from the workers outwards: caches to count bytes at
    level L2 50MB belady
    tree for M:128 { for N:128 { qk soft pv } }

`for DIM:TILE { ... }` walks a dimension in steps; what stands in braces runs in the order written; `par { ... }` claims
that its children don't depend on each other, and is refused where they do. An operator inside runs once per step of all
loops around it, on those steps' parts; dimensions that no loop cuts are taken whole. `+=` sums over the dimensions that
the result lacks; steps after the first of those read the result back; `=` needs those dimensions whole. An operator
inside a loop over a dimension that it lacks is computed again at each step. A tree that would compute something else
than its operators say is refused: a reader before its maker, or of a sum that has not ended; a loop that adds a part
again. The idea is TileFlow's (Zheng et al. 2023, MICRO, doi 10.1145/3613424.3623792).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import DTYPES, Builder, check_sizes, cuts
from onewave.tiles.graph.graph import Tile, TileGraph
from onewave.tiles.graph.programs import parse_bytes
from onewave.tiles.sim.caches import CACHES
from onewave.tiles.sim.machine import CacheLevel

MAX_CHARACTERS = 100_000
MAX_DEPTH = 32
NAME = r"[A-Za-z_][A-Za-z0-9_]{0,39}"
Range = tuple[int, int]


@dataclass(frozen=True)
class Notation:
    """A text's graph and caches. levels: its caches, from the workers outwards; empty where it names none."""

    graph: TileGraph
    levels: tuple[CacheLevel, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor as an operator writes it: its name and its dimensions."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Operator:
    """One `op` line."""

    name: str
    out: Operand
    inputs: tuple[Operand, ...]
    sums: bool

    @property
    def dims(self) -> tuple[str, ...]:
        """All dimensions, the result's first."""
        return tuple(dict.fromkeys((*self.out.dims, *(dim for operand in self.inputs for dim in operand.dims))))


@dataclass
class Node:
    """A node of the tree: a loop (dim, tile), a `par` group, the root (neither), or a leaf naming an operator."""

    line: int
    dim: str = ""
    tile: int = 0
    parallel: bool = False
    operator: str = ""
    children: "list[Node]" = field(default_factory=list["Node"])


@dataclass
class Text:
    """The part of a notation read so far."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    operators: dict[str, Operator] = field(default_factory=dict[str, Operator])
    operands: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    dtype: str = "bf16"
    dtypes: dict[str, str] = field(default_factory=dict[str, str])
    dtype_lines: dict[str, int] = field(default_factory=dict[str, int])
    levels: list[CacheLevel] = field(default_factory=list[CacheLevel])
    tree: Node | None = None


def parse_notation(text: str) -> Notation:
    """Read a fusion tree. Raises InvalidArgumentError, naming the line if one of them is wrong."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidArgumentError("notation", got=f"{len(text):,} characters", allowed=f"up to {MAX_CHARACTERS:,}")
    read = Text()
    lines = [line.split("#", 1)[0].strip() for line in text.removeprefix("\ufeff").splitlines()]
    for number, line in enumerate(lines, start=1):
        word, *rest = line.split(maxsplit=1) or [""]
        if word == "tree":
            read.tree = _tree("\n".join((*rest, *lines[number:])), read, number)
            break
        if word:
            _statement(read, word, "".join(rest), number)
    if read.tree is None:
        raise InvalidArgumentError("notation", got="no tree", allowed="a last statement `tree ...`")
    _check_dimensions(read, read.tree)
    return Notation(_build(read, read.tree), tuple(read.levels))


def _wrong(number: int, got: str, allowed: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"notation, line {number}", got=got[:60], allowed=allowed)


def _statement(read: Text, word: str, rest: str, number: int) -> None:
    if word == "dim":
        for item in rest.split():
            found = re.fullmatch(rf"({NAME})=([0-9]{{1,12}})", item)
            if found is None or int(found[2]) < 1:
                raise _wrong(number, item, "NAME=SIZE")
            if found[1] in read.sizes:
                raise _wrong(number, f"{found[1]} again", "each dimension once")
            read.sizes[found[1]] = int(found[2])
    elif word == "dtype":
        read.dtype = _dtype(rest, number)
    elif word == "tensor":
        name, _, dtype = rest.partition(" ")
        read.dtypes[name], read.dtype_lines[name] = _dtype(dtype.strip(), number), number
    elif word == "level":
        read.levels.append(_level(read, rest.split(), number))
    elif word == "op":
        _operator(read, rest, number)
    else:
        raise _wrong(number, word, "dim, dtype, tensor, level, op or tree")


def _dtype(name: str, number: int) -> str:
    if name not in DTYPES:
        raise _wrong(number, name or "nothing", ", ".join(DTYPES))
    return name


def _level(read: Text, words: list[str], number: int) -> CacheLevel:
    if len(words) < 2:
        raise _wrong(number, " ".join(words), "level NAME SIZE [POLICY] [private]")
    if words[0] in ("memory", *(level.name for level in read.levels)):
        raise _wrong(number, words[0], "a new name; the memory lies behind the last level")
    policies = [word for word in words[2:] if word != "private"] or ["lru"]
    if len(policies) > 1:
        raise _wrong(number, " ".join(policies), "one policy")
    if policies[0] not in CACHES:
        raise _wrong(number, policies[0], ", ".join(CACHES))
    try:
        return CacheLevel(words[0], parse_bytes(words[1]), policy=policies[0], private="private" in words[2:])
    except InvalidArgumentError as error:
        raise _wrong(number, words[1], error.allowed or "a size") from None


def _operator(read: Text, rest: str, number: int) -> None:
    operand = rf"{NAME}\s*\[[^\]]*\]"
    found = re.fullmatch(rf"({NAME})\s+({operand})\s*(\+?=)\s*({operand}(?:\s*[*+]\s*{operand})*)", rest)
    if found is None:
        raise _wrong(number, rest, "op NAME RESULT[dims] = or += INPUT[dims] * INPUT[dims] ...")
    if found[1] in read.operators or found[1] in ("for", "par", "tree"):
        raise _wrong(number, found[1], "a new name")
    operands = [_operand(read, text, number) for text in re.findall(operand, f"{found[2]} {found[4]}")]
    made = Operator(found[1], operands[0], tuple(operands[1:]), found[3] == "+=")
    missing = [dim for dim in made.dims if dim not in read.sizes]
    if missing:
        raise _wrong(number, f"dimension {missing[0]}", "dimensions that a dim line sizes")
    if made.out in made.inputs:
        raise _wrong(number, made.out.name, "+= to add to the result")
    if any(made.out.name == other.out.name for other in read.operators.values()):
        raise _wrong(number, f"{made.out.name} again", "one operator for each result")
    read.operators[made.name] = made


def _operand(read: Text, text: str, number: int) -> Operand:
    name, _, inside = text.partition("[")
    dims = tuple(dim.strip() for dim in inside.rstrip("]").split(","))
    name = name.strip()
    if read.operands.setdefault(name, dims) != dims or len(set(dims)) != len(dims):
        raise _wrong(number, text, f"{name}[{','.join(read.operands[name])}] everywhere, each dimension once")
    return Operand(name, dims)


def _tree(text: str, read: Text, first: int) -> Node:
    """Read the tree. first: the line on which the text begins."""
    root = Node(first)
    stack, last = [root], 0
    for found in re.finditer(rf"\s+|for\s+({NAME})\s*:\s*([0-9]{{1,9}})\s*\{{|(par)\s*\{{|(\}})|({NAME})", text):
        if found.start() != last:
            break
        number, last = first + text.count("\n", 0, last), found.end()
        dim, tile, parallel, closing, operator = found.groups()
        if closing:
            closed = stack.pop()
            if not stack:
                raise _wrong(number, "}", "a { for every }")
            if not closed.children:
                raise _wrong(number, "{ }", "an operator inside")
        elif operator:
            if operator not in read.operators:
                raise _wrong(number, operator, f"operators: {', '.join(read.operators) or 'none yet'}")
            stack[-1].children.append(Node(number, operator=operator))
        elif dim or parallel:
            if dim and (dim not in read.sizes or int(tile) < 1):
                raise _wrong(number, f"for {dim}:{tile}", f"a tile of 1 or more of {', '.join(read.sizes)}")
            node = Node(number, dim=dim or "", tile=int(tile or 0), parallel=bool(parallel))
            stack[-1].children.append(node)
            stack.append(node)
            if len(stack) > MAX_DEPTH:
                raise _wrong(number, f"{len(stack)} levels", f"up to {MAX_DEPTH}")
    if last != len(text) or len(stack) != 1 or not root.children:
        number = first + text.count("\n", 0, last)
        raise _wrong(number, text[last : last + 20] or "the end", "for DIM:TILE {, par {, } or an operator")
    return root


def _leaves(node: Node, loops: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Every leaf, in the order written, with the loops around it."""
    if node.operator:
        yield node, loops
    for child in node.children:
        yield from _leaves(child, (*loops, node) if node.dim else loops)


def _tiles(read: Text, tree: Node) -> dict[str, dict[str, int]]:
    """The tile of every tensor's every dimension: the smallest step of any loop around an operator that uses it."""
    tiles = {name: {dim: read.sizes[dim] for dim in dims} for name, dims in read.operands.items()}
    for leaf, loops in _leaves(tree):
        operator = read.operators[leaf.operator]
        for operand in (operator.out, *operator.inputs):
            for loop in loops:
                if loop.dim in operand.dims:
                    tiles[operand.name][loop.dim] = min(tiles[operand.name][loop.dim], loop.tile)
    return tiles


def _wrong_tree(node: Node, what: str, got: str, allowed: str) -> InvalidArgumentError:
    """As _wrong, of a node, with all of what was got."""
    return InvalidArgumentError(f"notation, line {node.line}: {what}", got=got, allowed=allowed)


def _check_dimensions(read: Text, tree: Node) -> None:
    steps: dict[str, dict[int, Node]] = {}
    used: set[str] = set()
    for leaf, loops in _leaves(tree):
        used.add(leaf.operator)
        inner: dict[str, int] = {}
        for loop in loops:
            steps.setdefault(loop.dim, {}).setdefault(loop.tile, loop)
            most = inner.get(loop.dim, read.sizes[loop.dim])
            if loop.tile > most:
                raise _wrong_tree(loop, f"for {loop.dim}", str(loop.tile), f"up to {most}")
            inner[loop.dim] = loop.tile
    for dim, tiles in steps.items():
        ordered = sorted(tiles)
        for small, large in pairwise(ordered):
            if large % small:
                got = ", ".join(map(str, ordered))
                raise _wrong_tree(tiles[large], f"tiles of {dim}", got, "each a multiple of the smaller")
    if used != set(read.operators):
        missing = ", ".join(sorted(set(read.operators) - used))
        raise _wrong_tree(tree, "tree", f"without {missing}", "every operator")
    _check_sums(read, tree)
    _check_work(read, tree)


def _check_sums(read: Text, tree: Node) -> None:
    """Refuse a sum that its tree would add to more than once, and parts of what an `=` needs whole."""
    added: set[tuple[str, int]] = set()
    inside: dict[int, tuple[Node, list[Node]]] = {}
    for leaf, loops in _leaves(tree):
        name, operator = leaf.operator, read.operators[leaf.operator]
        outside: Node | None = None
        whole = dict(read.sizes)
        for loop in loops:
            several = loop.tile < whole[loop.dim]
            whole[loop.dim] = loop.tile
            if several:
                inside.setdefault(id(loop), (loop, []))[1].append(leaf)
            if not several or loop.dim in operator.out.dims:
                continue
            if loop.dim in operator.dims and not operator.sums:
                got = f"around {name}, whose result lacks {loop.dim}"
                raise _wrong_tree(loop, f"for {loop.dim}", got, f"all of {loop.dim} at once, or += to sum over it")
            if loop.dim in operator.dims:
                outside = loop
                if (name, id(loop)) in added:
                    got = f"{name} twice in the loop over {loop.dim}"
                    raise _wrong_tree(leaf, "tree", got, "once in a loop that it sums over")
                added.add((name, id(loop)))
            elif outside is not None:
                got = f"inside for {outside.dim}, over which {name} sums: it would add each part again"
                raise _wrong_tree(loop, f"for {loop.dim}", got, f"for {loop.dim} outside, or without {name}")
    for loop, leaves in inside.values():
        _check_halves(read.operators, loop, leaves)


def _check_halves(operators: dict[str, Operator], loop: Node, leaves: list[Node]) -> None:
    """Refuse a result that is left as made from a half sum. leaves: in the loop, in order.

    A step reads what the steps so far have summed; the last one reads all of it, if the sum comes before its reader and
    the reader makes its whole result again.
    """
    last = {leaf.operator: place for place, leaf in enumerate(leaves)}
    makers = {operators[name].out.name: name for name in last}
    readers: dict[str, list[str]] = {}
    for name in last:
        for operand in operators[name].inputs:
            readers.setdefault(operand.name, []).append(name)
    halves: set[str] = set()
    left = [name for name in last if loop.dim in _summed(operators[name])]
    while left:
        half = operators[left.pop()].out.name
        if half not in halves:
            halves.add(half)
            left += readers.get(half, [])  # what reads a half sum is one, too
    for place, leaf in enumerate(leaves):
        operator = operators[leaf.operator]
        for half in (operand.name for operand in operator.inputs if operand.name in halves):
            maker = makers[half]
            if loop.dim in operator.dims or (place == last[operator.name] and place < last[maker]):
                got = f"around {operator.name}, which reads {half} before its sum over {loop.dim} has ended"
                raise _wrong_tree(leaf, f"for {loop.dim}", got, f"{operator.name} after that loop")


def _summed(operator: Operator) -> list[str]:
    return [dim for dim in operator.dims if dim not in operator.out.dims]


def _check_work(read: Text, tree: Node) -> None:
    """Refuse more tasks or accesses than a graph holds before any is made."""
    tiles = _tiles(read, tree)
    tasks = accesses = 0
    for leaf, loops in _leaves(tree):
        operator = read.operators[leaf.operator]
        part = read.sizes | {loop.dim: loop.tile for loop in loops}
        times = prod(cuts(read.sizes[dim], part[dim]) for dim in {loop.dim for loop in loops})
        tasks += times
        accesses += times * sum(
            prod(cuts(part[dim], tiles[operand.name][dim]) for dim in operand.dims)
            for operand in (operator.out, *operator.inputs)
        )
    check_sizes({}, tasks=tasks, accesses=accesses)


def _build(read: Text, tree: Node) -> TileGraph:
    build = Builder(read.dtype)
    tiles = _tiles(read, tree)
    for name, dims in read.operands.items():
        itemsize = DTYPES[read.dtypes.get(name, read.dtype)]
        build.tensor(name, tuple(read.sizes[d] for d in dims), tuple(tiles[name][d] for d in dims), itemsize)
    for name, number in read.dtype_lines.items():
        if name not in read.operands:
            raise _wrong(number, f"tensor {name}", ", ".join(read.operands))
    made = Made()
    _walk(read, build, tree, {dim: (0, size) for dim, size in read.sizes.items()}, made)
    graph = build.graph()
    _check_made(read, graph, made.leaves)
    _check_parallel(graph, made.groups)
    return graph


@dataclass
class Made:
    """The results of a walk. leaves: of every task. groups: each turn of each `par`, with its children's task ids."""

    leaves: list[Node] = field(default_factory=list[Node])
    groups: list[tuple[Node, list[Range]]] = field(default_factory=list[tuple[Node, list[Range]]])


def _walk(read: Text, build: Builder, node: Node, part: dict[str, Range], made: Made) -> None:
    """Run a node on a part of every dimension."""
    if node.operator:
        _run(read.operators[node.operator], build, part, read.sizes)
        made.leaves.append(node)
        return
    begin, end = part[node.dim] if node.dim else (0, 1)
    for start in range(begin, end, node.tile or 1):
        inside = part | {node.dim: (start, min(end, start + node.tile))} if node.dim else part
        ranges: list[Range] = []
        for child in node.children:
            before = len(build.tasks)
            _walk(read, build, child, inside, made)
            ranges.append((before, len(build.tasks)))
        if node.parallel:
            made.groups.append((node, ranges))


def _run(operator: Operator, build: Builder, part: dict[str, Range], sizes: dict[str, int]) -> None:
    def tiles(operand: Operand) -> tuple[Tile, ...]:
        steps = build.tensors[operand.name].tile
        spans = [
            range(part[dim][0] // step, cuts(part[dim][1], step)) for dim, step in zip(operand.dims, steps, strict=True)
        ]
        return tuple((operand.name, index) for index in product(*spans))

    out, dims = operator.out, operator.dims
    summed = _summed(operator)
    target = tiles(out)
    again = operator.sums and any(part[dim][0] > 0 for dim in summed)
    reads = (*(tile for operand in operator.inputs for tile in tiles(operand)), *(target if again else ()))
    size = prod(part[dim][1] - part[dim][0] for dim in dims)
    split = 0
    for dim in summed:
        width = max(1, part[dim][1] - part[dim][0])
        split = split * cuts(sizes[dim], width) + part[dim][0] // width
    index = ((*target[0][1], 0, 0)[:2], split)
    flops = (2 if operator.sums else max(1, len(operator.inputs))) * size
    build.task(operator.name, reads, target, flops, index=(*index[0], index[1]))


def _check_made(read: Text, graph: TileGraph, leaves: list[Node]) -> None:
    """Refuse a read of an operator's result that comes before any write of it."""
    tile, is_write = graph.accesses.tile, graph.accesses.is_write
    place = np.arange(len(tile), dtype=np.int64)
    written = np.full(graph.num_tiles, len(tile), dtype=np.int64)
    np.minimum.at(written, tile[is_write], place[is_write])
    maker = {operator.out.name: operator.name for operator in read.operators.values()}
    made = np.array([name in maker for name in graph.tensors], dtype=np.bool_)
    early = np.flatnonzero(~is_write & (place < written[tile]) & made[graph.tensor_of(tile)])
    if len(early):
        tensor, index = graph.tile_at(int(tile[early[0]]))
        leaf = leaves[int(graph.access_tasks[early[0]])]
        got = f"{leaf.operator} reads tile {tensor}[{','.join(map(str, index))}] before {maker[tensor]} has made it"
        raise _wrong_tree(leaf, "tree", got, "operators after what they read")


def _check_parallel(graph: TileGraph, groups: list[tuple[Node, list[Range]]]) -> None:
    """Refuse a `par` whose children depend on each other."""
    edges = graph.edges  # ordered by consumer, so that each child has a run of them
    later = [(node, ranges[0][0], *child) for node, ranges in groups for child in ranges[1:]]
    bounds = np.array([child[2:] for child in later], dtype=np.int64).reshape(-1, 2)
    runs = np.searchsorted(edges.consumer, bounds).tolist()
    for (node, begin, first, _), (low, high) in zip(later, runs, strict=True):
        producers = edges.producer[low:high]
        crossing = (producers >= begin) & (producers < first)
        if crossing.any():
            at = low + int(crossing.argmax())
            producer, consumer = graph.tasks[int(edges.producer[at])], graph.tasks[int(edges.consumer[at])]
            got = f"{consumer.name} needs {graph.tile_at(int(edges.tile[at]))} of {producer.name}"
            raise _wrong_tree(node, "par", got, "children that do not depend on each other")
