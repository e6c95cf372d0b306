"""What launches of one wave on one stream share."""
# pyright: reportUnknownMemberType=false
# (torch.from_numpy is only partly annotated.)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.wave.launch.watch import watch_words
from onewave.wave.plan.program import WaveProgram

__all__ = ["LaunchState"]


@dataclass
class LaunchState:
    """Buffers that nobody else may touch meanwhile.

    exchange: two sets of words that results travel in (exchange.py), taken in turns. epochs: how often each block has
    gone through its steps. counters: of what was produced; they are never reset, each time adds program.totals to
    them, so a wait is for its value plus epoch times total. watch: spin.py. host: int32 [1] of the host's memory, where
    launches write that one has stalled.
    """

    exchange: Tensor
    epochs: Tensor
    counters: Tensor
    watch: Tensor
    host: Tensor

    @classmethod
    def made(cls, program: WaveProgram, budget: int, device: torch.device) -> LaunchState:
        """Buffers for launches of a program."""

        def words(count: int) -> Tensor:
            return torch.empty(max(1, count), dtype=torch.int32, device=device)

        state = cls(
            exchange=words(2 * program.set_words),
            epochs=words(program.workers),
            counters=words(len(program.totals)),
            watch=words(len(watch_words(program.workers, 0, 0))),
            host=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        )
        state.reset(program, budget)
        return state

    def reset(self, program: WaveProgram, budget: int) -> None:
        """As before the first launch."""
        with torch.inference_mode():  # as they may have been made there
            self.exchange.fill_(-1)
            self.epochs.zero_()
            self.counters.zero_()
            self.host.zero_()
            self.watch.copy_(torch.from_numpy(watch_words(program.workers, budget, self.host.data_ptr())))
