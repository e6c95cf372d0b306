"""From a command's options to a loaded LLM, and a line about how fast it was."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onewave.base.settings import Settings
from onewave.engine.arguments import KV_CACHE_DTYPES, EngineOptions
from onewave.engine.load.stopwatch import in_words
from onewave.weights.fetch import sources

if TYPE_CHECKING:
    from onewave.engine.llm import LLM
    from onewave.engine.output import RequestOutput

STARTED = time.perf_counter()
"""When the command began, on this clock."""


@dataclass(frozen=True)
class Opened:
    """A loaded model. load_seconds: from the start of loading, torch's import included, until it could answer."""

    llm: LLM
    load_seconds: float


def open_llm(model: str, *, load_format: str = "auto", revision: str | None = None, **options: Any) -> Opened:
    """Load a model with a progress bar where stderr is a terminal, and say there how a GPU decodes.

    Raises what LLM raises. A bad argument is refused before anything is fetched, and like a model that isn't there
    before torch is imported; but whether there is a GPU only torch knows, so arguments that need one go to LLM first.
    """
    began = time.perf_counter()
    progress = sys.stderr.isatty()
    asked = EngineOptions(load_format=load_format, revision=revision, **options)
    if not asked.needs_gpu:
        _find(model, options.get("tokenizer"), load_format=load_format, revision=revision, progress=progress)
    importing = time.perf_counter()
    from onewave.engine.llm import LLM

    imported = time.perf_counter() - importing
    llm = LLM(model, load_format=load_format, revision=revision, progress=progress, **options)
    if llm.decode_path != "eager":
        parts = {**llm.load_seconds, "imports": imported + llm.load_seconds.get("imports", 0.0)}
        ready = in_words(time.perf_counter() - began, parts)
        print(f"ready after {ready}, {_how(llm)}", file=sys.stderr, flush=True)
    return Opened(llm, time.perf_counter() - began)


def _find(model: str, tokenizer: str | None, *, load_format: str, revision: str | None, progress: bool) -> None:
    """Find the model and where its tokenizer comes from, unless LLM is to ask the network; fetch aliases."""
    settings = Settings.from_env()
    if tokenizer is not None and not os.path.isdir(os.path.expanduser(tokenizer)) and not _may_be_hub_id(tokenizer):
        sources.resolve(tokenizer, settings, load_format="dummy", progress=progress)
    if not _may_be_hub_id(model):
        sources.resolve(model, settings, revision=revision, load_format=load_format, progress=progress)


def _may_be_hub_id(model: str) -> bool:
    """Whether finding the model may ask the network, which is then done once only, by LLM itself."""
    return model.count("/") == 1 and model[0] not in "./~" and not os.path.exists(model)


def _how(llm: LLM) -> str:
    """How it decodes, and from what where keys and values are kept in 8 bits."""
    cache = f", KV cache: {llm.kv_cache_dtype}" if llm.kv_cache_dtype in KV_CACHE_DTYPES else ""
    return f"decoding: {llm.decode_path}{cache}"


def stats_line(opened: Opened, outputs: Sequence[RequestOutput]) -> str:
    """Load time, time to first token and decode rate of the requests, which ran as one batch."""
    metrics = [output.metrics for output in outputs]
    firsts = [m.first_token_time for m in metrics if m.first_token_time is not None]
    waits = [m.time_to_first_token for m in metrics if m.time_to_first_token is not None]
    ends = [m.finished_time for m in metrics if m.finished_time is not None]
    tokens = sum(m.num_generation_tokens for m in metrics)
    parts = [f"load {opened.load_seconds:.2f} s"]
    if waits:
        parts.append(f"first token after {min(waits):.3f} s")
    decoded = tokens - sum(len(output.outputs) for output in outputs)
    if firsts and ends and decoded > 0:
        seconds = max(ends) - min(firsts)
        parts.append(f"{decoded / max(seconds, 1e-9):.1f} tokens/s")
    prompt_tokens = sum(m.num_prompt_tokens for m in metrics)
    parts.append(f"{prompt_tokens} prompt and {tokens} generated tokens")
    parts.append(_how(opened.llm))
    parts.append(f"{time.perf_counter() - STARTED:.2f} s in all")
    return ", ".join(parts)
