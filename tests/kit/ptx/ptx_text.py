"""Runs a few lines of inline PTX in NumPy: words of 32 bits, their halves, and predicates."""

import re

import ml_dtypes
import numpy as np


def executed(text: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a text without branches. inputs: uint32 registers of one shape. Returns all registers as they are left."""
    registers = dict(inputs)
    like = next(iter(inputs.values()))

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(like, int(re.sub("^0f", "0x", name), 0))

    for line in text.splitlines():
        if line in ("{", "}") or line.startswith(".reg "):
            continue
        found = re.fullmatch(r"(?:@(\w+) )?([\w.]+) (.*);", line)
        assert found, line
        guard, op, rest = found.groups()
        target, *sources = re.findall(r"\{[^}]*\}|[\w$]+", rest)
        if op == "mov.b32" and target.startswith("{"):
            parts = np.ascontiguousarray(value(sources[0])).view(np.uint16).reshape(-1, 2)
            registers |= {name: parts[:, half] for half, name in enumerate(re.findall(r"[\w$]+", target))}
            continue
        made = _made(op, [value(name) for name in sources])
        registers[target] = made if guard is None else np.where(registers[guard], made, registers[target])
    return registers


def _made(op: str, sources: list[np.ndarray]) -> np.ndarray:
    """Compute an instruction's result."""
    if op == "mov.b32":
        return sources[0]
    if op == "cvt.rn.f16x2.e4m3x2":
        pairs = np.ascontiguousarray(sources[0]).view(ml_dtypes.float8_e4m3fn).reshape(-1, 2)
        return pairs.astype(np.float16).view(np.uint32)[:, 0]
    if op == "cvt.f32.f16":
        return sources[0].view(np.float16).astype(np.float32).view(np.uint32)
    a, b = sources[:2]
    if op == "cvt.rn.bf16x2.f32":
        pairs = np.stack((b, a), -1).view(np.float32)
        return np.ascontiguousarray(pairs.astype(ml_dtypes.bfloat16)).view(np.uint32)[:, 0]
    if op == "xor.b32":
        return a ^ b
    if op == "shr.u32":
        return a >> b
    if op == "shl.b32":
        return a << b
    if op == "and.b32":
        return a & b
    if op == "setp.eq.u32":
        return a == b
    if op == "selp.b32":
        return np.where(sources[2], a, b)
    if op in ("add.rn.bf16x2", "add.rn.f16x2", "sub.rn.bf16x2", "sub.rn.f16x2"):
        kind = ml_dtypes.bfloat16 if op.endswith("bf16x2") else np.float16
        first, second = (np.ascontiguousarray(x).view(kind).astype(np.float64) for x in (a, b))
        return (first - second if op.startswith("sub") else first + second).astype(kind).view(np.uint32)
    if op == "add.rn.f32":
        return (np.ascontiguousarray(a).view(np.float32) + np.ascontiguousarray(b).view(np.float32)).view(np.uint32)
    if op == "lop3.b32":
        table = int(sources[3].flat[0])
        assert table in (0xEA, 0x6A), hex(table)  # (a and b) or c; (a and b) xor c
        return a & b | sources[2] if table == 0xEA else a & b ^ sources[2]
    assert op == "prmt.b32", op
    selector = int(sources[2].flat[0])
    found = np.ascontiguousarray(np.stack((a, b), -1)).view(np.uint8)
    nibbles = [selector >> 4 * at & 15 for at in range(4)]
    picked = found[:, [nibble & 7 for nibble in nibbles]]
    signs = np.array([nibble > 7 for nibble in nibbles])  # of which there is nothing but the sign
    made = np.where(signs, picked.view(np.int8) >> 7, picked.view(np.int8))
    return np.ascontiguousarray(made, np.int8).view(np.uint32)[:, 0]
