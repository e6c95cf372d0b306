"""Which reductions Triton 3.6 does wrongly: those over bits of a lane's number that are no neighbours."""

from __future__ import annotations

import ast
import re


def torn_reductions(text: str) -> list[str]:
    """Return the types that are reduced over such bits."""
    layouts = {
        name: ast.literal_eval(lanes)
        for name, lanes in re.findall(
            r"^(#linear\d*) = #ttg.linear<\{register = .*?, lane = (\[.*?\]), warp = ", text, re.M
        )
    }
    found: list[str] = []
    for axis, operand in re.findall(r'"tt.reduce".*?axis = (\d+) : i32.*?\}\) : \((tensor<.*?>)\) -> ', text, re.S):
        name = re.search(r"#linear\d*", operand)
        if name is None:
            continue  # of a blocked layout and a product's they always are
        axes = list(range(len(layouts[name[0]][0])))
        for gone in reversed(re.findall(r"dim = (\d+)", operand)):
            del axes[int(gone)]
        bits = [at for at, base in enumerate(layouts[name[0]]) if base[axes[int(axis)]]]
        if bits and bits[-1] - bits[0] >= len(bits):
            found.append(operand)
    return found
