"""Arguments of LLM and AsyncLLM, checked without torch or a model, so that wrong ones are refused at once."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, UnsupportedError, check_one_of, shown
from onewave.base.weight_formats import find_quantization

DECODE_PATHS = ("auto", "wave", "graph", "eager")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
_MAX_SEQUENCES = 65_536
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of LLM beside the model, checked as far as that needs neither torch nor the model.

    LLM's docstring says what each means. Raises InvalidArgumentError, UnsupportedError for what no model and no machine
    could make right.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    seed: int = 0
    load_format: str = "auto"
    tokenizer: str | os.PathLike[str] | None = None
    revision: str | None = None
    enforce_eager: bool = False
    decode: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    compact: bool | None = None
    plan: str | os.PathLike[str] | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        find_quantization(self.quantization)
        if self.compact is not None:
            flag("compact", self.compact, "True, False or None")
        whole("max_num_seqs", self.max_num_seqs, 1, _MAX_SEQUENCES)
        whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        whole("seed", self.seed, 0, 2**64 - 1)
        if self.max_model_len is not None:
            whole("max_model_len", self.max_model_len, 2)
        if self.kv_cache_memory_bytes is not None:
            whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        flag("enable_prefix_caching", self.enable_prefix_caching)
        flag("enforce_eager", self.enforce_eager)
        flag("progress", self.progress)
        if self.tokenizer is not None:
            check_place("tokenizer", self.tokenizer)
        if self.plan is not None:
            check_place("plan", self.plan, "the file of a decode step's plan")
        check_device(self.device)
        check_decode(self.decode, enforce_eager=self.enforce_eager)
        check_dtype(self.dtype)
        check_kv_cache_dtype(self.kv_cache_dtype)

    @property
    def needs_gpu(self) -> bool:
        """Whether they name what runs on a GPU alone, so that without one they are refused."""
        return (
            self.device.startswith("cuda")
            or self.decode in ("wave", "graph")
            or self.compact is True
            or self.plan is not None
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """An AsyncLLM's limits: the requests it refuses, and the steps its watchdog reports.

    max_requests: requests that wait or run at once; one more is refused with BusyError. step_seconds: a step that takes
    longer is reported on the log. Raises InvalidArgumentError.
    """

    max_requests: int = 512
    step_seconds: float = 60.0

    def __post_init__(self) -> None:
        whole("max_requests", self.max_requests, 1)
        seconds("step_seconds", self.step_seconds)


def check_place(
    name: str,
    place: str | os.PathLike[str],
    allowed: str = "a directory, a GGUF file, an alias, or a Hugging Face id",
) -> None:
    """Raises InvalidArgumentError unless it can be where a model, a tokenizer or a file is."""
    named = isinstance(place, (str, os.PathLike))  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    text = os.fspath(place) if named else None
    if not isinstance(text, str) or not text.strip():
        raise InvalidArgumentError(name, got=shown(place), allowed=allowed)


def check_decode(decode: str, *, enforce_eager: bool) -> None:
    """Raises InvalidArgumentError unless it is a way of decoding, and one that enforce_eager allows."""
    check_one_of("decode", decode, DECODE_PATHS)
    if enforce_eager and decode not in ("auto", "eager"):
        raise InvalidArgumentError("decode", got=f"{decode!r} with enforce_eager", allowed="one of the two")


def check_device(name: str) -> None:
    """Raises UnsupportedError unless it is auto, cpu, cuda or cuda:N; only torch knows whether there is such a GPU."""
    kind, colon, index = name.partition(":") if isinstance(name, str) else ("", "", "")  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    numbered = kind == "cuda" and index.isascii() and index.isdecimal() and len(index) < 5
    if kind not in ("auto", "cpu", "cuda") or (colon and not numbered):
        raise UnsupportedError("device", got=shown(name), allowed="auto, cpu, cuda, cuda:N")


def check_dtype(name: str) -> None:
    """Raises UnsupportedError unless it is auto or one of DTYPES."""
    check_one_of("dtype", name, ("auto", *DTYPES), UnsupportedError)


def check_kv_cache_dtype(name: str) -> None:
    """Raises UnsupportedError unless it is one of KV_CACHE_DTYPES."""
    check_one_of("kv_cache_dtype", name, KV_CACHE_DTYPES, UnsupportedError)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, of any library, and no truth value."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def whole(name: str, value: object, low: int, high: int | None = None, *, extra: str = "") -> int:
    """Pass on a whole number within bounds as an int. extra: what else is allowed. Raises InvalidArgumentError."""
    if is_whole(value):
        number = int(cast("int", value))
        if number >= low and (high is None or number <= high):
            return number
    span = f"from {low}" if high is None else f"from {low} to {high}"
    raise InvalidArgumentError(name, got=shown(value), allowed=f"a whole number {span}{extra}")


def number(name: str, value: object, low: float, high: float, allowed: str) -> float:
    """Pass on a finite number within bounds. allowed: for the error. Raises InvalidArgumentError."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            found = float(value)
        except OverflowError:  # a whole number beyond float64
            found = math.inf
        if math.isfinite(found) and low <= found <= high:
            return found
    raise InvalidArgumentError(name, got=shown(value), allowed=allowed)


def seconds(name: str, value: object) -> float:
    """Pass on a time above 0. Raises InvalidArgumentError."""
    return number(name, value, math.ulp(0.0), math.inf, "a finite number above 0")


def items(name: str, value: object, allowed: str) -> list[object]:
    """The items of a list, an array or a tensor. Raises InvalidArgumentError for text, mappings and what has none."""
    if hasattr(value, "tolist"):  # of an array or a tensor; one without axes is a number then
        try:
            value = cast("Any", value).tolist()
        except Exception as error:  # any library's tensor: sparse, nested, without data
            raise InvalidArgumentError(name, got=type(value).__name__, allowed=allowed) from error
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise InvalidArgumentError(name, got=shown(cast("object", value)), allowed=allowed)
    return list(cast("Iterable[object]", value))


def flag(name: str, value: object, allowed: str = "True or False") -> bool:
    """Pass on True or False. allowed: for the error. Raises InvalidArgumentError."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(name, got=shown(value), allowed=allowed)
    return value
