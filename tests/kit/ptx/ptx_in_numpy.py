"""Runs a compiled kernel's PTX in NumPy, all threads of a block in step: what a GPU would compute, without one.

Registers are arrays of one number a thread. Instructions are those that LLVM makes of this project's mma kernels: whole
numbers, floats, 16-bit pairs, ldmatrix, stmatrix, movmatrix, mma.sync m16n8k16, cp.async, shuffles and barriers.
Branches must go one way for all threads, but for one over a few plain instructions (`plain`). Found on the way are:
- reads and writes outside the tensors (`Global`);
- races in shared memory: what another thread wrote or read since the last barrier, and copies still in flight;
- the addresses of every access of shared memory (`Block.accesses`), for the banks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kit.ptx.ptx_memories import Global, Shared
from kit.ptx.ptx_numbers import KINDS, fused, ones, rounded, widened

Values = Any
LANE = np.arange(32)
# Row, and first of two columns, of what a lane holds of an 8 x 8 block.
ROW, PAIR = LANE // 4, LANE % 4 * 2


@dataclass(frozen=True)
class Access:
    """One access of shared memory. addresses: of all threads; width: bytes a thread (16 for a matrix's row)."""

    op: str
    line: int
    addresses: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Instruction:
    line: int
    op: str
    args: tuple[str, ...]
    guard: str | None
    guard_holds: bool


class Program:
    """A parsed kernel: instructions, labels, parameters in order, threads of a block."""

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.parameters = re.findall(r"^\s*\.param \.(\w+).*?(\w+_param_\d+),?$", text, re.M)
        self.threads = int(re.search(r"\.reqntid (\d+)", text)[1])  # type: ignore[index] # Triton writes it always.
        body = re.sub(r"//[^\n]*", lambda _: "", text[text.index("{\n") :])
        for number, line in enumerate(body.splitlines()):
            line = line.strip()
            if found := re.fullmatch(r"(\$?\w+):", line):
                self.labels[found[1]] = len(self.instructions)
            elif line and not line.startswith((".", "{", "}")):
                self._add(number, line)
            if line == "}":
                break

    def _add(self, number: int, line: str) -> None:
        found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*?);", line)
        assert found is not None, line
        args = tuple(part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{\[][^,]*", found[4]))
        self.instructions.append(Instruction(number, found[3], args, found[2], found[1] != "!"))


def _one_word(found: re.Match[str]) -> str:
    return found[1] + found[2].replace("tmp", "%tmp") + found[3]


def plain(text: str) -> str:
    """PTX without what this parser does not know: inline assembly's braces and declarations, and branches over a few
    instructions, which become guards."""
    lines: list[str] = []
    inside = False
    # One of the two words of a 64-bit register.
    text = re.sub(r"\{ \.reg \.b32 tmp; (mov\.b64 \{)(tmp, %\w+|%\w+, tmp)(\}, %\w+;) \}", _one_word, text)
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith(("// begin inline", "// end inline")):
            inside = bare.startswith("// begin")
        elif not inside:
            lines += [] if bare.startswith((".loc", "//", "$L__tmp")) else [line]
        else:
            parts = re.sub(r"\.reg[^;]*;|[{}](?=\s*$)|^\{\s", "", bare).split(";")
            lines += [
                re.sub(r"(?<![%\w])([pqz]\d*)\b(?=\s|,|\])", r"%in_\1", part.strip()) + ";"
                for part in parts
                if part.strip()
            ]

    def guarded(found: re.Match[str]) -> str:
        body = [line.strip() for line in found[3].splitlines()]
        return "\n".join(line if line.startswith("mov") else f"@!{found[1]} {line}" for line in body) + f"\n{found[2]}:"

    skipped = r"@(%p\d+) bra\s+(\$\w+);\n((?:\s+(?:mov|fma)[^\n]*\n){1,4})\2:"
    return re.sub(skipped, guarded, "\n".join(lines))


class Block:
    """One block: runs the program to its end."""

    def __init__(self, program: Program, memory: Global, arguments: dict[str, Any], block: int, shared: int) -> None:
        self.program, self.memory, self.arguments = program, memory, arguments
        self.threads, self.block, self.blocks = program.threads, block, 1
        self.registers: dict[str, np.ndarray] = {}
        self.shared = Shared(shared, self.threads)
        self.accesses: set[Access] = set()
        self.all = np.arange(self.threads)
        self.await_words: Callable[[np.ndarray], None] | None = None  # for blocks that run side by side

    def run(self) -> Block:
        at, instructions = 0, self.program.instructions
        with np.errstate(all="ignore"):
            while at < len(instructions):
                one = instructions[at]
                at += 1
                active = None if one.guard is None else self.registers[one.guard] == one.guard_holds
                head = one.op.split(".")[0]
                try:
                    if head == "ret":
                        return self
                    if head == "bra":
                        assert active is None or active.all() or not active.any(), "threads part at a branch"
                        if active is None or active.all():
                            at = self.program.labels[one.args[0]]
                        continue
                    OPERATIONS[head](self, one, active)
                except Exception as error:
                    raise RuntimeError(f"line {one.line}: {one.op} {one.args}: {error}") from error
        return self

    def value(self, name: str, kind: str) -> np.ndarray:
        """An operand as an array of its kind, one number a thread."""
        dtype = KINDS[kind]
        if name.startswith("%"):
            special = {"%tid.x": self.all, "%ctaid.x": self.block, "%nctaid.x": self.blocks, "%ctaid.y": 0}
            if name in special:
                return np.broadcast_to(np.asarray(special[name], dtype=dtype), self.threads)
            raw = self.registers[name]
            if raw.dtype == dtype:
                return raw
            return raw.view(dtype) if raw.dtype.itemsize == np.dtype(dtype).itemsize else raw.astype(dtype)
        if name == "global_smem":
            number: Any = 0
        elif name.startswith("0f"):
            number = np.uint32(int(name[2:], 16)).view(np.float32)
            return np.full(self.threads, number, np.float32).view(dtype)
        elif name.startswith("0d"):
            return np.full(self.threads, np.uint64(int(name[2:], 16))).view(dtype)
        else:
            number = int(name, 0)
        bits = np.dtype(dtype).itemsize * 8
        return np.full(self.threads, number & ((1 << bits) - 1), f"u{bits // 8}").view(dtype)

    def set(self, name: str, values: np.ndarray, active: np.ndarray | None = None) -> None:
        values = np.broadcast_to(values, self.threads)
        if active is not None and name in self.registers:
            values = np.where(active, values, self.registers[name].view(values.dtype))
        self.registers[name] = np.array(values)

    def address(self, text: str, kind: str) -> np.ndarray:
        inner = text.strip("[] ")
        base, _, offset = inner.partition("+")
        return self.value(base.strip(), kind).astype(np.int64) + int(offset or 0)

    def matrix_rows(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """[warps, count, 8] row addresses of ldmatrix and stmatrix."""
        return addresses.reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8)

    def note(self, one: Instruction, addresses: np.ndarray, width: int) -> None:
        self.accesses.add(Access(one.op, one.line, tuple(int(a) for a in addresses), width))


def vector(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]


def kind_of(one: Instruction) -> str:
    return one.op.split(".")[-1]


def whole(function: Callable[..., Values]) -> Callable[[Block, Instruction, Any], None]:
    """An operation on operands of one kind."""

    def run(block: Block, one: Instruction, active: Any) -> None:
        kind = kind_of(one)
        block.set(one.args[0], function(*(block.value(arg, kind) for arg in one.args[1:])), active)

    return run


def shift(block: Block, one: Instruction, active: Any) -> None:
    kind = kind_of(one)
    by = block.value(one.args[2], "u32").astype(KINDS[kind])
    x = block.value(one.args[1], kind)
    block.set(one.args[0], x << by if one.op.startswith("shl") else x >> by, active)


def multiply(block: Block, one: Instruction, active: Any) -> None:
    """mul and mad: .lo, .hi, .wide, of floats."""
    kind = kind_of(one)
    a, b = (block.value(arg, kind) for arg in one.args[1:3])
    if ".wide." in one.op or ".hi." in one.op:
        wide = kind[0] + str(2 * int(kind[1:]))  # of 16 or 32 bits
        a, b = a.astype(KINDS[wide]), b.astype(KINDS[wide])
    result = a * b
    if ".hi." in one.op:
        result = (result >> KINDS[wide](int(kind[1:]))).astype(KINDS[kind])
    elif ".wide." in one.op:
        kind = wide
    if one.op.startswith("mad"):
        result = result + block.value(one.args[3], kind)
    block.set(one.args[0], result, active)


def reduced(block: Block, one: Instruction, active: Any) -> None:
    """redux.sync: a warp's sum, least or greatest."""
    kind = kind_of(one)
    x = block.value(one.args[1], kind).reshape(-1, 32)
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}
    found = functions[one.op.split(".")[2]].reduce(x, axis=1, dtype=x.dtype)
    block.set(one.args[0], np.repeat(found, 32), active)


def divide(block: Block, one: Instruction, active: Any) -> None:
    kind = kind_of(one)
    a, b = (block.value(arg, kind) for arg in one.args[1:3])
    if kind in ("f32", "f64"):
        block.set(one.args[0], a / b, active)
    else:
        # Towards zero, and exactly where 64 bits are more than a float64 holds.
        block.set(one.args[0], (np.abs(a) // np.abs(b)) * np.sign(a) * np.sign(b), active)


def convert(block: Block, one: Instruction, active: Any) -> None:
    to, source = one.op.split(".")[-2:]
    if to in ("bf16x2", "f16x2"):
        high, low = (rounded(to[:-2], block.value(arg, "f32")) for arg in one.args[1:3])
        block.set(one.args[0], high.astype(np.uint32) << 16 | low, active)
        return
    if "f16" in (to, source):
        x = block.value(one.args[1], "b16" if source == "f16" else source)
        x = x.view(np.float16).astype(KINDS[to]) if source == "f16" else x.astype(np.float16).view(np.uint16)
        block.set(one.args[0], x, active)
        return
    x = block.value(one.args[1], source)
    block.set(one.args[0], x.astype(KINDS[to]), active)


def move(block: Block, one: Instruction, active: Any) -> None:
    kind, (to, source) = kind_of(one), one.args
    if kind == "b64" and "{" in to + source:
        words = to if to.startswith("{") else source
        if words is source:
            low, high = (block.value(part, "u32").astype(np.uint64) for part in vector(source))
            block.set(to, high << np.uint64(32) | low, active)
        else:
            x = block.value(source, "u64")
            for part, bits in zip(vector(to), (x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)), strict=True):
                block.set(part, bits.astype(np.uint32), active)
    elif source.startswith("{"):
        low, high = (block.value(part, "u16").astype(np.uint32) for part in vector(source))
        block.set(to, high << 16 | low, active)
    elif to.startswith("{"):
        x = block.value(source, "u32")
        for part, bits in zip(vector(to), (x & 0xFFFF, x >> 16), strict=True):
            block.set(part, bits.astype(np.uint16), active)
    else:
        block.set(to, block.value(source, kind), active)


def compare(block: Block, one: Instruction, active: Any) -> None:
    relation, kind = one.op.split(".")[1], kind_of(one)
    a, b = (block.value(arg, kind) for arg in one.args[1:3])
    functions = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
    functions |= {"ge": np.greater_equal, "neu": np.not_equal}
    # Also of what is no number.
    functions |= {"geu": lambda a, b: ~np.less(a, b), "ltu": lambda a, b: ~np.greater_equal(a, b)}
    functions |= {"gtu": lambda a, b: ~np.less_equal(a, b), "leu": lambda a, b: ~np.greater(a, b)}
    block.set(one.args[0], functions[relation](a, b), active)


def select(block: Block, one: Instruction, active: Any) -> None:
    kind = kind_of(one)
    chosen = np.where(block.value(one.args[3], "pred"), *(block.value(arg, kind) for arg in one.args[1:3]))
    block.set(one.args[0], chosen, active)


def lowest(block: Block, one: Instruction, active: Any) -> None:
    kind = kind_of(one)
    found = np.minimum(*(block.value(arg, kind) for arg in one.args[1:3]))
    block.set(one.args[0], np.maximum(found, 0).astype(KINDS[kind]) if ".relu" in one.op else found, active)


def field(block: Block, one: Instruction, active: Any) -> None:
    kind = kind_of(one)
    x, start, length = (block.value(one.args[1], kind), *(int(arg, 0) for arg in one.args[2:4]))
    wide = KINDS[kind](32 - length)
    block.set(one.args[0], (x << KINDS[kind](32 - length - start)) >> wide, active)


def shuffle(block: Block, one: Instruction, active: Any) -> None:
    assert any(kind in one.op for kind in (".bfly.", ".idx.", ".up."))
    x = block.value(one.args[1], "b32").reshape(-1, 32)
    lanes = block.value(one.args[2], "u32").reshape(-1, 32).astype(np.int64)
    if ".up." in one.op:
        lanes = np.where(lanes <= LANE, LANE - lanes, LANE)
    else:
        lanes = LANE ^ lanes if ".bfly." in one.op else lanes & 31
    block.set(one.args[0], np.take_along_axis(x, lanes, 1).reshape(-1), active)


def permute(block: Block, one: Instruction, active: Any) -> None:
    """prmt: four of the eight bytes of two words."""
    low, high = (block.value(arg, "u32").astype(np.uint64) for arg in one.args[1:3])
    chosen, both = int(one.args[3].rstrip("U"), 0), low | high << np.uint64(32)
    total = np.zeros(block.threads, np.uint64)
    for place in range(4):
        byte = chosen >> 4 * place & 15
        assert byte < 8, "copies a sign"
        total |= (both >> np.uint64(8 * byte) & np.uint64(255)) << np.uint64(8 * place)
    block.set(one.args[0], total.astype(np.uint32), active)


def load(block: Block, one: Instruction, active: Any) -> None:
    kind = kind_of(one)
    if ".param." in one.op:
        given = block.arguments[one.args[1].strip("[] ")]
        bits = np.float32(given).view(np.uint32) if isinstance(given, float) else given
        block.set(one.args[0], np.full(block.threads, bits).astype(KINDS[kind]))
        return
    targets, size = vector(one.args[0]), np.dtype(KINDS[kind]).itemsize
    width, mask = size * len(targets), block.all >= 0 if active is None else active
    if ".shared" in one.op:
        at = block.address(one.args[1], "u32")
        block.shared.check(at[mask], width, block.all[mask], store=False)
        block.note(one, at, width)
        spans, bytes_ = block.shared.spans(np.where(mask, at, 0), width), block.shared.bytes
    else:
        at = block.address(one.args[1], "u64")
        spans, bytes_ = np.where(mask, at, 0)[:, None] + np.arange(width), block.memory.bytes
        assert (at[mask] % width == 0).all(), "misaligned"
        assert block.memory.readable[spans[mask]].all(), "reads what is no input"
        if block.await_words is not None and ".relaxed." in one.op:
            block.await_words(spans[mask])
    for i, target in enumerate(targets):
        found = np.ascontiguousarray(bytes_[spans[:, i * size : (i + 1) * size]]).view(KINDS[kind])[:, 0]
        block.set(target, found, mask)


def store(block: Block, one: Instruction, active: Any) -> None:
    kind = kind_of(one)
    mask = block.all >= 0 if active is None else active
    parts = [block.value(part, kind) for part in vector(one.args[1])]
    data = np.stack(parts, 1)[mask].copy().view(np.uint8)
    width = data.shape[1]
    if ".shared" in one.op:
        at = block.address(one.args[0], "u32")
        block.shared.check(at[mask], width, block.all[mask], store=True)
        block.note(one, at, width)
        block.shared.bytes[block.shared.spans(at[mask], width)] = data
        return
    at = block.address(one.args[0], "u64")[mask]
    assert (at % width == 0).all(), "misaligned"
    spans = at[:, None] + np.arange(width)
    assert block.memory.writable[spans].all(), "writes what is no output"
    block.memory.bytes[spans] = data


def copy(block: Block, one: Instruction, active: Any) -> None:
    """cp.async and its groups."""
    assert active is None
    shared = block.shared
    if "commit_group" in one.op:
        shared.groups.append([])
        return
    if "wait_group" in one.op:
        shared.wait(int(one.args[0]))
        return
    width = int(one.args[2], 0)
    to, source = block.address(one.args[0], "u32"), block.address(one.args[1], "u64")
    size = block.value(one.args[3], "u32") if len(one.args) > 3 else np.full(block.threads, width)
    assert np.isin(size, (0, width)).all()
    full = size > 0
    shared.check(to, width, block.all, store=True)
    block.note(one, to, width)
    spans = np.where(full, source, 0)[:, None] + np.arange(width)
    assert (source[full] % width == 0).all(), "misaligned"
    assert block.memory.readable[spans[full]].all(), "copies what is no input"
    data = np.where(full[:, None], block.memory.bytes[spans], 0).astype(np.uint8)
    target = shared.spans(to, width)
    shared.bytes[target] = 0xFF
    shared.in_flight[target[:, ::4] // 4] = True
    shared.groups[-1].append((target, data, block.all.copy()))


def barrier(block: Block, one: Instruction, active: Any) -> None:
    assert active is None
    assert one.op.startswith("bar.sync") or one.op.startswith("bar.warp")
    if one.op.startswith("bar.sync"):
        block.shared.epoch += 1


def matrices(block: Block, one: Instruction, active: Any) -> None:
    """ldmatrix and stmatrix: 8 x 8 blocks of 16 bits, one a register."""
    loads = one.op.startswith("ldmatrix")
    names = vector(one.args[0] if loads else one.args[1])
    at = block.address(one.args[1] if loads else one.args[0], "u32")
    rows = block.matrix_rows(at, len(names))
    naming = block.all.reshape(-1, 32)[:, : 8 * len(names)].reshape(-1)
    block.note(one, at.reshape(-1, 32)[:, : 8 * len(names)].reshape(-1), 16)
    if loads:
        # Any lane of the warp may receive a row: the warp's first lane stands for it.
        block.shared.check(rows.reshape(-1), 16, naming, store=False)
        for i, name in enumerate(names):
            cells = block.shared.bytes[rows[:, i, :, None] + np.arange(16)].view(np.uint16)
            cells = cells.transpose(0, 2, 1) if ".trans" in one.op else cells
            low, high = cells[:, ROW, PAIR].astype(np.uint32), cells[:, ROW, PAIR + 1].astype(np.uint32)
            block.set(name, (high << 16 | low).reshape(-1))
        return
    assert ".trans" not in one.op
    block.shared.check(rows.reshape(-1), 16, naming, store=True)
    for i, name in enumerate(names):
        cells = unpacked(block.value(name, "u32"))
        block.shared.bytes[rows[:, i, :, None] + np.arange(16)] = cells.view(np.uint8)


def unpacked(pairs: np.ndarray) -> np.ndarray:
    """[warps, 8, 8] of 16 bits from one register a lane."""
    pairs = pairs.reshape(-1, 32)
    cells = np.zeros((len(pairs), 8, 8), np.uint16)
    cells[:, ROW, PAIR], cells[:, ROW, PAIR + 1] = pairs & 0xFFFF, pairs >> 16
    return cells


def turn(block: Block, one: Instruction, active: Any) -> None:
    assert ".trans." in one.op
    cells = unpacked(block.value(one.args[1], "u32")).transpose(0, 2, 1)
    low, high = cells[:, ROW, PAIR].astype(np.uint32), cells[:, ROW, PAIR + 1].astype(np.uint32)
    block.set(one.args[0], (high << 16 | low).reshape(-1))


def product(block: Block, one: Instruction, active: Any) -> None:
    assert ".m16n8k16.row.col.f32." in one.op
    kind = kind_of_operands(one)
    to, a, b, c = (vector(arg) for arg in one.args)
    tall = np.zeros((block.threads // 32, 16, 16), np.float32)
    for i, name in enumerate(a):
        tall[:, i % 2 * 8 :, i // 2 * 8 :][:, :8, :8] = widened(kind, unpacked(block.value(name, "u32")))
    wide = np.zeros((block.threads // 32, 16, 8), np.float32)
    for i, name in enumerate(b):
        wide[:, i * 8 : i * 8 + 8] = widened(kind, unpacked(block.value(name, "u32"))).transpose(0, 2, 1)
    result = np.matmul(tall, wide)
    for i, name in enumerate(to):
        held = result[:, ROW + i // 2 * 8, PAIR + i % 2]
        block.set(name, held.reshape(-1) + block.value(c[i], "f32"))


def kind_of_operands(one: Instruction) -> str:
    return "bf16" if ".bf16.bf16." in one.op else "f16"


def trap(block: Block, one: Instruction, active: Any) -> None:
    raise AssertionError("the kernel traps")


OPERATIONS: dict[str, Callable[[Block, Instruction, Any], None]] = {
    "add": whole(np.add), "sub": whole(np.subtract), "max": whole(np.fmax), "neg": whole(np.negative),
    "and": whole(np.bitwise_and), "or": whole(np.bitwise_or), "xor": whole(np.bitwise_xor), "not": whole(np.invert),
    "ex2": whole(np.exp2), "lg2": whole(np.log2), "fma": whole(fused), "rem": whole(np.fmod), "min": lowest,
    "abs": whole(np.abs), "rcp": whole(np.reciprocal), "shl": shift, "shr": shift, "mul": multiply, "mad": multiply,
    "popc": whole(ones), "redux": reduced,
    "div": divide, "cvt": convert, "mov": move, "setp": compare, "selp": select, "bfe": field, "shfl": shuffle,
    "ld": load, "st": store, "cp": copy, "bar": barrier, "barrier": barrier, "ldmatrix": matrices,
    "prmt": permute, "sqrt": whole(np.sqrt), "prefetch": lambda block, one, active: None,
    "fence": lambda block, one, active: None,
    "stmatrix": matrices, "movmatrix": turn, "mma": product, "trap": trap, "cvta": move,
}  # fmt: skip
