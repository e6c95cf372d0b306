"""Settles LLM's arguments for a given model and machine."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onewave.base.device import current_device
from onewave.base.errors import InvalidArgumentError, TokenizerError, UnsupportedError, shown
from onewave.base.settings import Settings
from onewave.base.weight_formats import COMPACT, WeightFormat, find_quantization, name_of
from onewave.engine.arguments import DTYPES, EngineOptions, check_decode, check_device, whole
from onewave.engine.load.options import NAMES_8_BITS, LoadOptions
from onewave.weights.fetch.sources import ModelLocation, resolve

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer
    from onewave.models.config.model_config import ModelConfig

_WAVE_PATHS = ("auto", "wave")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def resolve_load(
    asked: EngineOptions, config: ModelConfig, *, device: torch.device, decode: str, settings: Settings
) -> LoadOptions:
    """Resolve the options for a model on a device. decode: of choose_decode.

    Raises InvalidArgumentError, UnsupportedError.
    """
    dtype = choose_dtype(asked.dtype, config, device)
    weight_format = choose_weight_format(asked.quantization, asked.compact, dtype=dtype, decode=decode)
    rows, launches = asked.max_num_seqs, 1
    if device.type == "cuda" and decode in _WAVE_PATHS:
        from onewave.models.llama_plan import MAX_BATCH

        rows, launches = min(rows, MAX_BATCH), -(-rows // MAX_BATCH)
    plan = None
    if asked.plan is not None:
        from onewave.models.step_plan import check_plan_fits, open_plan

        plan = open_plan(asked.plan)
        check_plan_fits(plan, batch=rows, weights=name_of(weight_format))
    return LoadOptions(
        dtype=dtype,
        device=device,
        max_num_seqs=rows,
        launches=launches,
        max_model_len=choose_max_model_len(asked.max_model_len, config),
        cache_dir=settings.cache_dir,
        load_format=asked.load_format,
        seed=asked.seed,
        weight_format=weight_format,
        insists=asked.compact is True or plan is not None,
        keeps=decode in _WAVE_PATHS and asked.quantization is None and asked.compact is None and plan is None,
        plan=plan,
        progress=asked.progress,
        kv_dtype=choose_kv_dtype(asked.kv_cache_dtype, device),
    )


def choose_decode(decode: str, *, enforce_eager: bool, device: torch.device, planned: bool = False) -> str:
    """auto | wave | graph | eager from what was asked for; only auto depends on the device.

    auto stays auto on a GPU, where the model decides between wave and graph, and is eager on a CPU. planned: a plan was
    named, which only the wave runs. Raises InvalidArgumentError, UnsupportedError.
    """
    check_decode(decode, enforce_eager=enforce_eager)
    if planned:
        if enforce_eager or decode not in _WAVE_PATHS:
            got = f"with {'enforce_eager' if enforce_eager else f'decode={decode!r}'}"
            raise InvalidArgumentError("plan", got=got, allowed='decode="wave"')
        if device.type != "cuda":
            raise UnsupportedError("plan", got=str(device), allowed="a CUDA GPU", next="Leave it out.")
        decode = "wave"
    if decode == "auto":
        return "eager" if enforce_eager or device.type != "cuda" else "auto"
    if decode != "eager" and device.type != "cuda":
        raise UnsupportedError(f"decode {decode}", got=str(device), allowed="a CUDA GPU", next='Use decode="eager".')
    return decode


def choose_device(name: str) -> torch.device:
    """auto | cpu | cuda | cuda:N. Raises UnsupportedError for anything else and for a GPU that is not there, or that a
    forked child can't use."""
    check_device(name)
    kind, _, index = name.partition(":")
    if kind != "cpu" and torch.cuda._is_in_bad_fork():  # pyright: ignore[reportPrivateUsage] (nothing public tells)
        got = f"{name!r} in a process forked from one that uses CUDA"
        raise UnsupportedError("device", got=got, allowed="cpu", next='Start it by multiprocessing\'s "spawn".')
    if name == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedError("device", got=f"{name!r}, but PyTorch finds no CUDA GPU", next='Use device="cpu".')
    number = int(index) if index else current_device()
    if number >= torch.cuda.device_count():
        raise UnsupportedError("device", got=shown(name), allowed=f"cuda:0..cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", number)


def check_dtype_on(name: str, device: torch.device) -> None:
    """Raises UnsupportedError for float32 on a GPU, where operators compute from 16 bits."""
    if name == "float32" and device.type != "cpu":
        raise UnsupportedError("dtype", got=f"float32 on {device}", allowed="bfloat16 or float16; float32 on a CPU")


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in, of a checked name; auto depends on the checkpoint and on the device. A CPU computes in
    float32 where float16 is asked for, whose range activations leave."""
    if device.type == "cpu" and name in ("auto", "float16"):
        return torch.float32
    if name != "auto":
        return _DTYPES[name]
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def check_compact(compact: bool | None, quantization: str | None, *, decode: str, dtype: torch.dtype | None) -> None:
    """Raises UnsupportedError where compact weights were asked for and can't be. decode: of choose_decode; dtype: None
    where only the model can tell."""
    if compact and (quantization is not None or decode not in _WAVE_PATHS or dtype not in (None, torch.bfloat16)):
        weights = "" if dtype is None else f"{str(dtype).removeprefix('torch.')} weights, "
        rounded = "" if quantization is None else f", quantization={quantization!r}"
        raise UnsupportedError(
            "compact",
            got=f"{weights}decode={decode!r}{rounded}",
            allowed="bfloat16 ones that the wave decodes with, not quantized",
            next="Leave it out.",
        )


def choose_weight_format(
    quantization: str | None, compact: bool | None, *, dtype: torch.dtype, decode: str
) -> WeightFormat | None:
    """Choose the format of the wave's weights: rounded if that was asked for, else compact where they are bfloat16,
    unless that was not wanted; None: as they are. decode: of choose_decode.

    Raises InvalidArgumentError, UnsupportedError.
    """
    check_compact(compact, quantization, decode=decode, dtype=dtype)
    rounding = find_quantization(quantization)
    may_be = dtype is torch.bfloat16 and decode in _WAVE_PATHS and rounding is None
    return COMPACT if may_be and compact is not False else rounding


def choose_kv_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of keys and values in 8 bits, of a checked name; None for auto. Raises UnsupportedError."""
    if name == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UnsupportedError("kv_cache_dtype", got=f"'fp8' on {device}", allowed="sm_89 or newer", next="Use int8.")
    return {name: dtype for dtype, name in NAMES_8_BITS.items()}.get(name)


def choose_operand_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype in which operators are called on their own; auto is bfloat16 on a GPU and float32 on a CPU.

    Raises UnsupportedError for float32 on a GPU.
    """
    check_dtype_on(name, device)
    if name != "auto":
        return _DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def choose_max_model_len(given: int | None, config: ModelConfig) -> int:
    """Return the length asked for, if the positions reach it; a rope scaling factor reaches further than max_position.

    Raises InvalidArgumentError.
    """
    if given is None:
        return config.max_position
    whole("max_model_len", given, 2)
    rope, reach = config.rope, config.max_position
    if rope.kind in ("linear", "dynamic"):
        reach = int(reach * rope.factor)
    elif rope.kind == "yarn" and rope.original_max_position is not None:
        reach = max(reach, int(rope.original_max_position * rope.factor))
    if given > reach:
        raise InvalidArgumentError(
            "max_model_len",
            got=shown(given),
            allowed=f"up to {reach}, the positions the model's rope ({rope.kind}) reaches",
        )
    return given


def find_tokenizer(
    named: str | PathLike[str] | None, location: ModelLocation, settings: Settings
) -> tuple[Tokenizer | None, TokenizerError | None]:
    """The tokenizer, or None and why: a model without one still works on token ids; a broken one is an error, and so is
    a named one that is not there."""
    from onewave.engine.text.tokenizer import load_tokenizer

    if named is not None:
        path = Path(os.path.expanduser(named))  # leaves an unknown user's ~name as it is
        if os.path.isdir(path):
            return load_tokenizer(ModelLocation("hf", path, path.name)), None
        location = resolve(named, settings, load_format="dummy", progress=False)
    none = "none in a built-in configuration"
    try:
        if location.kind == "builtin":
            raise TokenizerError(f"tokenizer of {location.name}", got=none, next="Pass tokenizer= or token ids.")
        return load_tokenizer(location), None
    except TokenizerError as error:
        if named is not None or error.got not in ("missing", none):
            raise
        return None, error
