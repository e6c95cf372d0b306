"""LLaMA inference for small batches.

    from onewave import LLM, SamplingParams

    llm = LLM("smollm2-135m-instruct")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Names are loaded when they are first used, so that importing the package costs little and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onewave.base.errors import (
        BusyError,
        CapacityError,
        ConfigError,
        DownloadError,
        InvalidArgumentError,
        ModelError,
        ModelNotFoundError,
        OnewaveError,
        OutOfReachError,
        ShapeError,
        StoppingError,
        TokenizerError,
        UnsupportedError,
        WaveStalled,
        WeightsError,
    )
    from onewave.engine.aio import AsyncLLM
    from onewave.engine.grammar.params import StructuredOutputsParams
    from onewave.engine.llm import LLM
    from onewave.engine.output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from onewave.engine.params import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "BusyError",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "InvalidArgumentError",
    "Logprob",
    "ModelError",
    "ModelNotFoundError",
    "OnewaveError",
    "OutOfReachError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ShapeError",
    "StoppingError",
    "StructuredOutputsParams",
    "TokenizerError",
    "UnsupportedError",
    "WaveStalled",
    "WeightsError",
    "__version__",
]

_HOMES = {
    "LLM": "onewave.engine.llm",
    "AsyncLLM": "onewave.engine.aio",
    "SamplingParams": "onewave.engine.params",
    "StructuredOutputsParams": "onewave.engine.grammar.params",
    "CompletionOutput": "onewave.engine.output",
    "Logprob": "onewave.engine.output",
    "RequestMetrics": "onewave.engine.output",
    "RequestOutput": "onewave.engine.output",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: object = version("onewave")
        except PackageNotFoundError:  # run from a source tree that was never installed
            value = "0+unknown"
    elif name in __all__:
        value = getattr(import_module(_HOMES.get(name, "onewave.base.errors")), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
