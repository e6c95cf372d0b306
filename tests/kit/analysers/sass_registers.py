"""Uniform registers and spilt ones that a kernel may read before it has written them, from its disassembly.

ptxas 12.8 once kept a product's descriptor in uniform registers that only one of two branches set, and read them after
both; and once in a place of the stack that it read before it had stored anything there. A forward analysis finds such
reads: a register, or a word of the stack, counts as written where every path to a place has written it. A plain move
of an unset one is no fault: it leaves its target unset. ptxas moves pairs of which one half is written next, and keeps
registers around code that needs more, whether they are set or not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(\S.*?);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_WRITERS = ("U", "R2UR", "S2UR", "VOTEU", "REDUX")
# They begin with U, and their first operand is read or is a predicate.
_NO_WRITERS = ("UTMA", "USETMAXREG", "UISETP", "UPLOP3", "UFSETP")
_ZERO = 63
# Words of the stack are numbered from here on.
_STACK = 1000
# And a thread's own registers, which count as written but for those that an unset one was moved to.
_VECTOR, _VECTORS = 2000, 256
_MOVE = re.compile(r"(?:UMOV UR(\d+)|MOV R(\d+)|R2UR UR(\d+)), (?:UR(\d+)|R(\d+))")
_OWN = re.compile(r"(?<!U)\bR(\d+)\b")
_WIDTHS = {"64": 2, "WIDE": 2, "128": 4}
_STORES = ("ST", "RED", "BRA", "BRX", "R2P")
_SPILT = re.compile(r"(STL|LDL)(\S*) .*\[R1(?:\+(0x[0-9a-f]+))?\]")
_WORDS = {"64": 2, "128": 4}


@dataclass
class _Instruction:
    text: str
    next: list[int]
    reads: set[int]
    writes: set[int]
    # (to, from) of a plain move, or of one to the stack.
    move: tuple[int, int] | None
    # Whether a thread may pass it by.
    perhaps: bool

    def after(self, known: set[int]) -> set[int]:
        """The registers that are written behind it, where `known` were before it."""
        if self.move is not None and self.move[1] not in known and self.move[1] != _ZERO:
            return known - {self.move[0]}
        # Only of what an unset one was moved to: elsewhere a write counts, whoever it is for.
        return known | {each for each in self.writes if not (self.perhaps and each >= _VECTOR)}


def reads_before_writes(code: str) -> list[str]:
    """Instructions of nvdisasm's listing that may read an unset uniform register or word of the stack."""
    instructions = _parse(code)
    before: list[set[int] | None] = [None] * len(instructions)
    before[0] = {_VECTOR + number for number in range(_VECTORS)}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        known = before[at]
        assert known is not None
        after = instructions[at].after(known)
        for to in instructions[at].next:
            found = before[to]
            both = after if found is None else found & after
            if both != found:
                before[to] = set(both)
                waiting.append(to)
    return [
        each.text
        for each, known in zip(instructions, before, strict=True)
        if known is not None and each.move is None and each.reads - known - {_ZERO}
    ]


def _parse(code: str) -> list[_Instruction]:
    texts: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(texts)
        elif found := _INSTRUCTION.search(line):
            texts.append(found[1].strip())
    return [
        _Instruction(text, _next(at, text, labels, len(texts)), *_registers(text), _moved(text), text.startswith("@"))
        for at, text in enumerate(texts)
    ]


def _moved(text: str) -> tuple[int, int] | None:
    body = re.sub(r"^@!?U?P\w+ ", "", text).strip()
    spilt, own = _SPILT.match(body), _OWN.findall(re.sub(r"\[.*?\]", "", body))
    if spilt and spilt[1] == "STL" and spilt[2].rpartition(".")[2] not in _WIDTHS and len(own) == 1:
        return _STACK + int(spilt[3] or "0", 16) // 4, _VECTOR + int(own[0])
    found = _MOVE.fullmatch(body)
    if found is None:
        return None
    to = int(found[1] or found[3] or 0) if found[2] is None else _VECTOR + int(found[2])
    return to, int(found[4]) if found[5] is None else _VECTOR + int(found[5])


def _next(at: int, text: str, labels: dict[str, int], count: int) -> list[int]:
    body = re.sub(r"^@!?U?P\w+ ", "", text)
    goes_on = [at + 1] if at + 1 < count else []
    if body.startswith("BRA"):
        target = re.search(r"`\((\.L_x_\d+)\)", body)
        assert target is not None, text
        conditional = body != text or re.match(r"BRA\S*\s+!?U?P\d", body)
        to = labels[target[1]]
        return [*([to] if to < count else []), *(goes_on if conditional else [])]
    if body.startswith(("EXIT", "RET")):
        return goes_on if body != text else []
    if body.startswith(("BRX", "JMX")):
        return [labels[target] for target in re.findall(r"\.L_x_\d+", body)]
    return goes_on


def _registers(text: str) -> tuple[set[int], set[int]]:
    """(read, written)."""
    body = re.sub(r"^@!?U?P\w+ ", "", text)
    if spilt := _SPILT.match(body):
        first = _STACK + int(spilt[3] or "0", 16) // 4
        words = set(range(first, first + _WORDS.get(spilt[2].rpartition(".")[2], 1)))
        own = {_VECTOR + int(n) for n in _OWN.findall(re.sub(r"\[.*?\]", "", body))}
        own = {number + step for number in own for step in range(len(words))}
        return (own, words) if spilt[1] == "STL" else (words, own)
    name, _, rest = body.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    writes: set[int] = set()
    if name.startswith(_WRITERS) and not name.startswith(_NO_WRITERS):
        # A carry or a vote's predicate may stand before the register.
        first = 1 if re.fullmatch(r"U?P\w+", operands[0]) else 0
        found = re.fullmatch(r"UR(\d+)", operands[first])
        if found is not None:
            wide = ".64" in name or "WIDE" in name
            writes = {int(found[1]) + step for step in range(2 if wide else 1)}
            operands = operands[first + 1 :]
    reads: set[int] = set()
    for at, operand in enumerate(operands):
        if descriptor := re.match(r"gdesc\[UR(\d+)\]", operand):
            # A pair for either operand; where the first one lies in registers, its pair is not looked at.
            number = int(descriptor[1])
            reads |= {number + step for step in range(0 if at == 1 else 2, 4)}
        else:
            reads |= {int(number) for number in re.findall(r"\bUR(\d+)", operand)}
    return reads | _own(name, rest, first=False), writes | _own(name, rest, first=True)


def _own(name: str, rest: str, *, first: bool) -> set[int]:
    """A thread's registers that an instruction writes (first), or those that it reads."""
    operands = rest.split(",")
    target = 1 if re.fullmatch(r"\s*P\w+\s*", operands[0]) and len(operands) > 1 else 0
    writes = re.fullmatch(r"\s*R\d+(?:\.\w+)*\s*", operands[target]) is not None and not name.startswith(_STORES)
    if first:
        chosen = [operands[target]] if writes else []
    else:
        chosen = [operand for at, operand in enumerate(operands) if not (writes and at == target)]
    numbers = {int(number) for operand in chosen for number in _OWN.findall(operand)}
    wide = max((size for word, size in _WIDTHS.items() if word in name or f".{word}" in "".join(chosen)), default=1)
    return {_VECTOR + number + step for number in numbers for step in range(wide) if number + step < _VECTORS}
