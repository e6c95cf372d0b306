"""What launches of one wave on one stream share."""
# pyright: reportUnknownMemberType=false
# (torch.from_numpy is only partly annotated.)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.wave.launch.watch import watch_words
from onewave.wave.plan.layout import several_words
from onewave.wave.plan.program import WaveProgram

__all__ = ["LaunchState"]

_MOST_COUNTED = 1 << 30


@dataclass
class LaunchState:
    """Buffers that nobody else may touch meanwhile.

    exchange: two sets of words that results travel in (exchange.py), taken in turns. epochs: how often each block has
    gone through its steps. counters: of what was produced; they are never reset, each time adds program.totals to
    them, so a wait is for its value plus epoch times total. watch: spin.py; several, asked: choose.py. host: int32 [1]
    of the host's memory, where launches write that one has stalled. asking: copies of `one`, of the host's memory, to
    `asked`; they run beside launches (of several tokens). ends: whether one has been made since the last launch began.
    counted: tokens that launches of several were asked for, since the last reset.
    """

    exchange: Tensor
    epochs: Tensor
    counters: Tensor
    watch: Tensor
    several: Tensor
    asked: Tensor
    host: Tensor
    one: Tensor
    asking: torch.cuda.Stream | None
    ends: bool = False
    counted: int = 0

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
            asked=words(1),
            host=torch.zeros(1, dtype=torch.int32, pin_memory=True),
            one=torch.ones(1, dtype=torch.int32, pin_memory=True),
            asking=torch.cuda.Stream(device) if tokens > 1 else None,
        )
        state.reset(program, budget)
        # Making a stream and its first copy waits for what runs: better here than when a launch is to end.
        state.ask_for_end()
        state.whole_again()
        return state

    def reset(self, program: WaveProgram, budget: int) -> None:
        """As before the first launch."""
        with torch.inference_mode():  # as they may have been made there
            self.exchange.fill_(-1)
            self.epochs.zero_()
            self.counters.zero_()
            self.several.fill_(-1)
            self.asked.zero_()
            self.host.zero_()
            self.watch.copy_(torch.from_numpy(watch_words(program.workers, budget, self.host.data_ptr())))

    def count(self, tokens: int, program: WaveProgram, budget: int) -> None:
        """Note that a launch on the current stream is going to make so many tokens. Before their number, by which the
        kernel takes turns with its buffers, would pass 31 bits, all begins anew, behind the launches before."""
        self.counted += tokens
        if self.counted > _MOST_COUNTED:
            self.reset(program, budget)
            self.counted = tokens

    def ask_for_end(self) -> None:
        """Have launches of several tokens that are on their way end early. A word of the host's memory in its place
        would cost every token a read of it, which takes longer than anything else that a launch waits for."""
        if self.asking is None:
            return
        self.ends = True
        with torch.inference_mode(), torch.cuda.stream(self.asking):  # as `asked` may have been made there
            self.asked.copy_(self.one, non_blocking=True)

    def whole_again(self) -> None:
        """Have launches from here on, on the current stream, be whole ones."""
        if self.asking is not None and self.ends:
            self.ends = False
            stream = torch.cuda.current_stream(self.asked.device)
            stream.wait_stream(self.asking)
            with torch.inference_mode():
                self.asked.zero_()
            self.asking.wait_stream(stream)  # or this would undo what is asked from here on
