"""No function of the host takes more than eight parameters: more is a missing type (a frozen dataclass).

Not counted: kernels (Triton, Gluon and Numba functions, whose parameters are the launch's), self and cls. Public
functions keep the signatures that their users know; they are listed with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "onewave"
MAX_PARAMETERS = 8
KERNEL_DECORATORS = ("jit", "njit", "aggregate", "vectorize", "intrinsic")

# File or folder of public functions -> why their signatures are long.
PUBLIC_FILES = {
    "cli": "a command's parameters are its options, which typer reads from the signature",
    "compat": "flash-attn's and transformers' own signatures",
}
# "file: function" -> why.
EXCEPTIONS = {
    "engine/llm.py: __init__": "LLM: the arguments of vLLM's LLM, by name",
    "ops/append_kv/op.py: append_kv": "public operator",
    "ops/attention/op.py: attention": "public operator",
    "ops/attention/op.py: attention_varlen": "public operator",
    "ops/attention/fp8/op.py: attention_fp8": "public operator",
    "ops/decode_attention/op.py: decode_attention": "public operator",
    "ops/masked_multihead_attention/op.py: masked_multihead_attention": "public operator",
    "ops/scaled_linear/op.py: linear_fp8": "public operator",
    "ops/scaled_linear/op.py: linear_int8": "public operator",
    "tiles/graph/builders_attention.py: attention": "public builder: sizes as numbers, as a notebook writes them",
    "tiles/graph/builders_attention.py: attention_block": "public builder: sizes as numbers, as a notebook writes them",
    "tiles/order/policies.py: plan": "public: the one way from an order to a schedule, all but three optional",
}


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = " ".join(ast.unparse(each) for each in function.decorator_list)
    return any(word in decorators for word in KERNEL_DECORATORS)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def too_many(source: str, where: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            count = num_parameters(node)
            if count > MAX_PARAMETERS:
                yield f"{where}: {node.name}"


def found() -> set[str]:
    return {
        line
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.relative_to(PACKAGE).parts[0] not in PUBLIC_FILES
        for line in too_many(file.read_text(), str(file.relative_to(PACKAGE)))
    }


def test_functions_take_at_most_eight_parameters() -> None:
    many = found()
    assert sorted(many - EXCEPTIONS.keys()) == []
    assert sorted(EXCEPTIONS.keys() - many) == [], "exceptions that are no longer one"


def test_a_function_of_nine_parameters_is_found_and_a_kernel_is_not() -> None:
    nine = ", ".join("abcdefghi")
    assert [*too_many(f"def many({nine}): ...", "x.py")] == ["x.py: many"]
    assert [*too_many(f"class A:\n    async def many(self, *, {nine}): ...", "x.py")] == ["x.py: many"]
    assert [*too_many(f"@gluon.jit\ndef kernel({nine}): ...", "x.py")] == []
    assert [*too_many("def eight(self, a, b, c, d, e, f, g, h): ...", "x.py")] == []
