"""Source that Triton's compiler takes for something else than it looks like, looked for in the kernels' own."""

from __future__ import annotations

import ast

from kit.paths import ROOT

SOURCES = sorted(
    path
    for path in (ROOT / "src").rglob("*.py")
    if "import triton" in path.read_text() or "from triton" in path.read_text()
)


def is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def names_read(node: ast.AST) -> set[str]:
    loops = [loop for loop in ast.walk(node) if isinstance(loop, ast.For)]
    counted = {n.id for loop in loops for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - counted


def lost_in_loops(source: str) -> list[str]:
    """Names that a turn of a kernel's loop reads and then sets to a number: Triton 3.6 takes that for a new name, and
    the next turn reads the old value."""
    found: list[str] = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or "jit" not in " ".join(
            map(ast.unparse, function.decorator_list)
        ):
            continue
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)):
            read: set[str] = names_read(loop.test) if isinstance(loop, ast.While) else set()
            made: set[str] = set()
            last: dict[str, ast.expr] = {}
            for statement in loop.body:
                read |= names_read(statement) - made
                if isinstance(statement, ast.Assign):
                    for target in statement.targets:
                        names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
                        made |= set(names)
                        last |= dict.fromkeys(names, statement.value)
                elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                    last[statement.target.id] = statement.value
                    if is_number(statement.value):  # adds a number, and stays a value of the kernel
                        del last[statement.target.id]
            found += [f"{function.name}: {name}" for name in sorted(read) if name in last and is_number(last[name])]
    return found


def test_no_loop_sets_what_it_carries_to_a_number() -> None:
    assert [f"{path.name}: {lost}" for path in SOURCES for lost in lost_in_loops(path.read_text())] == []


def test_such_a_loop_is_found() -> None:
    kernel = """
@gluon.jit
def kernel(n):
    done = 3
    total = 0
    for i in range(n):
        start = 0
        total += done + start
        start += 1
        {last}
"""
    assert lost_in_loops(kernel.format(last="done = 0")) == ["kernel: done"]
    assert lost_in_loops(kernel.format(last="done = done * 0")) == []
