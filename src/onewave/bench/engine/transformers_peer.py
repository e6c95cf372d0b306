"""transformers on random weights of a model's shape, as a peer."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.bench.clock import summarize
from onewave.bench.engine.latency import Case, prompts_of
from onewave.bench.engine.prompt import PromptResult
from onewave.weights.fetch.sources import ModelLocation

_COMPILED_WARMUP = 3


def check_transformers(location: ModelLocation, *, asked: str) -> None:
    """Refuse, before anything is measured, what random_transformers can't make. asked: the command.

    Raises UnsupportedError without transformers, and for a GGUF file.
    """
    if find_spec("transformers") is None:
        raise UnsupportedError(asked, got="transformers is not installed", next="Run `pip install transformers`.")
    if location.kind == "gguf" or location.path is None:
        allowed = "a directory with config.json, or a built-in configuration"
        raise UnsupportedError(asked, got=location.name, allowed=allowed)


def random_transformers(location: ModelLocation, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' model of that shape, which check_transformers lets pass, with random weights."""
    import transformers

    assert location.path is not None, "checked"
    file = location.path if location.kind == "builtin" else location.path / "config.json"
    library: Any = transformers
    config = library.AutoConfig.for_model(**json.loads(file.read_text()))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # continuous batching measures what is free
    with torch.device(device):
        return library.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.inference_mode()
def measure_transformers_prompts(
    model: Any,
    sizes: Sequence[tuple[int, int]],
    *,
    reps: int,
    warmup: int,
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[PromptResult]:
    """Time first tokens of transformers' model with a static cache: as it is, then compiled by torch.compile.

    sizes: (batch, tokens). Logits are those of the last position alone. Compiling, a minute and more a size, is left
    out.
    """
    from transformers import StaticCache

    device = next(model.parameters()).device
    for name, run in (("transformers", model), ("transformers compiled", None)):
        run: Any = run or torch.compile(model, dynamic=False, mode="reduce-overhead")  # pyright: ignore
        # The first call compiles, the second one records.
        unmeasured = warmup if run is model else max(warmup, _COMPILED_WARMUP)
        for batch, tokens in sizes:
            cache: Any = StaticCache(config=model.config, max_cache_len=tokens + 1)
            samples: list[tuple[float, float, float]] = []
            for repetition in range(unmeasured + reps):
                show(f"{batch} x {tokens} tokens, {name}: {repetition + 1} of {unmeasured + reps}")
                prompts = prompts_of(Case(batch, tokens, 1, ""), model.config.vocab_size, repetition)
                cache.reset()
                samples.append(_first_tokens(run, prompts, cache, device))
            seconds, gpu, host = (list(column) for column in zip(*samples[unmeasured:], strict=True))
            yield PromptResult(name, batch, tokens, summarize(seconds), median(gpu), median(host), None)


def _first_tokens(run: Any, prompts: list[list[int]], cache: Any, device: torch.device) -> tuple[float, float, float]:
    """Seconds to the first tokens, the GPU's of the pass, the host's of the call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    ids = torch.tensor(prompts, device=device)
    begin.record()
    logits: Tensor = run(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    host = time.perf_counter() - began
    end.record()
    _ = logits[:, -1].argmax(-1).cpu()
    seconds = time.perf_counter() - began
    return seconds, begin.elapsed_time(end) * 1e-3, host
