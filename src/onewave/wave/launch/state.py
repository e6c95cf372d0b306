"""The buffers that launches of one wave on one CUDA stream share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.wave.launch.watch import watch_words
from onewave.wave.plan.program import WaveProgram


@dataclass
class LaunchState:
    """Device buffers of one CUDA stream's launches.

    exchange: two sets of words for hand-offs (kernel/exchange.py), used by launches in turn. epochs: launches that each
    thread block has finished. counters: counter hand-offs. They are never reset: each launch adds program.totals, and a
    wait is for its value plus epoch * total. watch: kernel/spin.py. host: int32 [1], pinned host memory, which a
    stalled launch sets.
    """

    exchange: Tensor
    epochs: Tensor
    counters: Tensor
    watch: Tensor
    host: Tensor

    def __post_init__(self) -> None:
        self._stalled = self.host.numpy()

    @property
    def stalled(self) -> bool:
        """Whether a launch has stalled, as far as the host knows. Asked at each step, in a tenth of a tensor's time."""
        return self._stalled.item(0) != 0

    @classmethod
    def made(cls, program: WaveProgram, budget: int, device: torch.device) -> "LaunchState":
        """Allocate buffers for launches of a program."""

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
        """Set all buffers to their state before the first launch."""
        with torch.inference_mode():  # as they may have been made there
            self.exchange.fill_(-1)
            self.epochs.zero_()
            self.counters.zero_()
            self.host.zero_()
            self.watch.copy_(torch.from_numpy(watch_words(program.workers, budget, self.host.data_ptr())))
