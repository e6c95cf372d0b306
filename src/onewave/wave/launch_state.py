"""What launches of one wave on one stream share."""
# pyright: reportUnknownMemberType=false
# (torch.from_numpy is only partly annotated.)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.wave.layout import several_words
from onewave.wave.program import WaveProgram
from onewave.wave.watch import watch_words

__all__ = ["LaunchState"]


@dataclass
class LaunchState:
    """Buffers that nobody else may touch meanwhile.

    exchange, epochs, counters: see kernel.py; watch: spin.py; several: choose.py. host: int32 [2] of the host's memory:
    launches write to the first that one has stalled, and read from the second whether to end early.
    """

    exchange: Tensor
    epochs: Tensor
    counters: Tensor
    watch: Tensor
    several: Tensor
    host: Tensor

    @classmethod
    def made(cls, program: WaveProgram, tokens: int, budget: int, device: torch.device) -> LaunchState:
        """Buffers for launches of a program that make up to `tokens` tokens each."""
        kept = several_words(tokens, program.shape.batch, program.workers)[1] if tokens > 1 else 1

        def words(count: int) -> Tensor:
            return torch.empty(max(1, count), dtype=torch.int32, device=device)

        state = cls(
            exchange=words(2 * program.set_words),
            epochs=words(program.workers),
            counters=words(len(program.totals)),
            watch=words(len(watch_words(program.workers, 0, 0))),
            several=torch.empty(kept, dtype=torch.int64, device=device),
            host=torch.zeros(2, dtype=torch.int32, pin_memory=True),
        )
        state.reset(program, budget)
        return state

    def reset(self, program: WaveProgram, budget: int) -> None:
        """As before the first launch."""
        self.exchange.fill_(-1)
        self.epochs.zero_()
        self.counters.zero_()
        self.several.fill_(-1)
        self.host.zero_()
        self.watch.copy_(torch.from_numpy(watch_words(program.workers, budget, self.host.data_ptr())))

    def ask_for_end(self, asked: bool) -> None:
        """Have launches of several tokens end early, or no longer."""
        if bool(self.host[1]) != asked:
            self.host[1] = int(asked)
