"""How a model is loaded: what travels from LLM through every loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onewave.base.settings import Settings
from onewave.base.weight_formats import MixedFormat, Rounding, ScaledFormat, WeightFormat
from onewave.engine.load.stopwatch import Stopwatch
from onewave.models.config.model_config import ModelConfig

if TYPE_CHECKING:
    from onewave.base.errors import TokenizerError
    from onewave.engine.text.tokenizer import Tokenizer
    from onewave.models.llama_plan import DecodeStep
    from onewave.models.step_plan import StepPlan

NAMES_8_BITS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""Dtypes of keys and values in 8 bits, by the name that LLM's kv_cache_dtype has."""


@dataclass(frozen=True)
class KeptBits:
    """The matrices of a checkpoint that the wave keeps in their own bits. form: how they lie in the stream; None where
    there are none. rows: of a launch. lost: quantised types of matrices that become 16 bits beside those."""

    form: MixedFormat | None = None
    rows: int = 1
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    dtype: bf16|fp16|fp32 of weights and activations. max_num_seqs: rows of a decode step, on the wave's path of each of
    its `launches`. max_model_len: positions with rotary angles; None: the model's own. cache_dir: of finished programs.
    seed: of dummy weights. weight_format: of the matrices; None: as they are. insists: on that format; otherwise
    weights that it can't hold stay as they are. keeps: the wave holds a quantised checkpoint's matrices in their own
    bits, where it has a format for them. plan: of the decode step; None: the wave's own. progress: draw a bar on
    stderr. compilers: the processes that `warm_up` has begun.
    times: is told how long each phase takes. sample: gives token ids of a small text, on which the cost of rounding is
    measured; none: it is not. kv_dtype: of keys and values in 8 bits; None: the model's. kept: what `warm_up` found in
    the checkpoint; None: it was not looked at yet.
    """

    dtype: torch.dtype
    device: torch.device
    max_num_seqs: int = 1
    launches: int = 1
    max_model_len: int | None = None
    cache_dir: Path = field(default_factory=lambda: Settings.from_env().cache_dir)
    load_format: str = "auto"
    seed: int = 0
    weight_format: WeightFormat | None = None
    insists: bool = False
    keeps: bool = False
    plan: StepPlan | None = None
    progress: bool = False
    compilers: ProcessPoolExecutor | None = None
    sample: Callable[[], Sequence[int]] | None = None
    kv_dtype: torch.dtype | None = None
    kept: KeptBits | None = None
    times: Stopwatch = field(default_factory=Stopwatch, compare=False)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight in the stream."""
        return self.dtype.itemsize if self.weight_format is None else self.weight_format.weight_bytes

    @property
    def launches_pay(self) -> bool:
        """Whether a step's launches together are faster than graphs, which read 16-bit weights once for all rows: two
        of four bits are. On an H200 32 sequences of an 8B take 5.98 ms in two launches of int8 (observed)."""
        return self.launches <= (2 if self.weight_bytes < 1 else 1)

    def in_bits(self, kept: KeptBits) -> LoadOptions:
        """These options for what is kept, where anything is: its format, and its rows in more launches."""
        if kept.form is None:
            return self
        launches = self.launches * -(-self.max_num_seqs // kept.rows)
        return replace(self, weight_format=kept.form, max_num_seqs=kept.rows, launches=launches)

    def step(self, config: ModelConfig) -> DecodeStep:
        """The step that one wave runs."""
        from onewave.models.llama_plan import DecodeStep

        return DecodeStep(config, self.max_num_seqs, self.weight_format)

    @property
    def rounding(self) -> Rounding | None:
        """The weight format, if it rounds."""
        return self.weight_format if isinstance(self.weight_format, Rounding) else None

    @property
    def scaled(self) -> ScaledFormat | None:
        """The weight format, if products with it round activations."""
        return self.weight_format if isinstance(self.weight_format, ScaledFormat) else None

    def with_sample(self, tokenizer: Future[tuple[Tokenizer | None, TokenizerError | None]]) -> LoadOptions:
        """These options with a sample by a tokenizer that loads meanwhile, where weights or the cache are rounded."""
        if self.rounding is None and self.scaled is None and self.kv_dtype is None:
            return self

        def sample() -> Sequence[int]:
            from onewave.engine.load.rounding_cost import TEXT

            found = tokenizer.result()[0]
            return [] if found is None else found.encode(TEXT)[: self.max_model_len]

        return replace(self, sample=sample)

    @property
    def kv_name(self) -> str:
        """The type of cached keys and values: a name that LLM's kv_cache_dtype has, or the model's dtype."""
        return str(self.dtype).removeprefix("torch.") if self.kv_dtype is None else NAMES_8_BITS[self.kv_dtype]

    def positions(self, config: ModelConfig) -> int:
        """Positions with rotary angles."""
        return config.max_position if self.max_model_len is None else self.max_model_len
