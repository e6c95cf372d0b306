"""What explain is asked and answers, and what the explainers of all operators share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.attention.masks import is_whole

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
SMS_OF_AN_H200 = 132
# Options that count something, and the least of each.
_LEAST = {
    "max_seqlen_q": 0, "max_seqlen_k": 0, "page_size": 1, "seq_len": 0, "sequences": 0, "split_size": 1,
    "steps_per_block": 1, "workers": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """One operator's choice. kernel: where it is and what it is called; tile, split: None where it has none.

    why: sentences. programs: thread blocks of the launch, where there is one.
    """

    operator: str
    question: str
    backend: str
    kernel: str
    why: tuple[str, ...]
    tile: str | None = None
    split: str | None = None
    programs: str | None = None

    def __str__(self) -> str:
        rows = [("backend", self.backend), ("kernel", self.kernel), ("tile", self.tile), ("split", self.split)]
        lines = [f"{self.operator} {self.question}"]
        lines += [f"  {name:<9} {value}" for name, value in (*rows, ("programs", self.programs)) if value]
        lines += [f"  {'because' if i == 0 else '':<9} {reason}" for i, reason in enumerate(self.why)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Question:
    """What was asked. sm: the card's compute capability, 90 for sm_90; None on a CPU or where nothing says.

    card: its name, if it is there; None for any of its kind.
    """

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    cuda: bool
    sm: int | None
    card: str | None
    dtype: torch.dtype
    options: dict[str, Any]

    def text(self) -> str:
        """In one line."""
        where = "cpu" if not self.cuda else f"cuda sm_{self.sm}" if self.sm else "cuda"
        shapes = ", ".join(str(list(shape)) for shape in self.shapes)
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{shapes}, {str(self.dtype).removeprefix('torch.')} on {where}{options}"

    def take(self, *ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes, one for each given set of allowed ranks."""
        if len(self.shapes) != len(ranks) or any(len(s) not in r for s, r in zip(self.shapes, ranks, strict=True)):
            allowed = ", ".join(" or ".join(f"{rank} axes" for rank in each) for each in ranks)
            raise ShapeError(f"explain {self.operator}: shapes", got=self.text(), allowed=f"shapes of {allowed}")
        return self.shapes


def check_numbers(operator: str, options: dict[str, Any]) -> None:
    """Counts are whole numbers. Raises InvalidArgumentError."""
    for name, least in _LEAST.items():
        value = options.get(name)
        if value is not None and not (is_whole(value) and value >= least):
            allowed = f"a whole number from {least}"
            raise InvalidArgumentError(f"explain {operator}: {name}", got=shown(value), allowed=allowed)


def dtype_of(question: Question, option: str, default: torch.dtype) -> torch.dtype:
    """The dtype that an option names. Raises UnsupportedError."""
    given = question.options.get(option)
    kind = default if given is None else DTYPES.get(given) if isinstance(given, str) else given
    if not isinstance(kind, torch.dtype):
        raise UnsupportedError(f"explain {question.operator}: {option}", got=shown(given), allowed=", ".join(DTYPES))
    return kind


def backend_of(question: Question, known: tuple[str, ...]) -> str:
    """The call's; ours only on a card."""
    backend = question.options.get("backend", "auto")
    if backend not in known:
        raise InvalidArgumentError(f"{question.operator}: backend", got=shown(backend), allowed=", ".join(known))
    if backend in ("gluon", "triton") and not question.cuda:
        raise UnsupportedError(f"{question.operator} (backend={backend})", got="a CPU", next='Use backend="auto".')
    return backend


def elsewhere(question: Question, backend: str, suits: str | None) -> Explanation:
    """The compiled loops of a CPU, or the reference. suits: what the compiled loops take, None where there are none."""
    if backend == "cpu":
        kernel, why = f"{question.operator}/numba_impl.py", f"compiled loops take it: {suits}"
    else:
        kernel = f"{question.operator}/reference.py"
        why = "no other implementation for a CPU" if suits is None else f"compiled loops take only {suits}"
        if question.cuda or question.options.get("backend") == "reference":
            why = "asked for"
    return Explanation(question.operator, question.text(), backend, kernel, (why,))
