"""Launches of the kernel for many rows: as one launch, or as two that run side by side on two streams."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onewave.base.errors import WaveStalled
from onewave.gpu.descriptors import describable
from onewave.gpu.launch import launch_kernel
from onewave.ops.ffn.call import FFNCall
from onewave.ops.ffn.chain.kernel import chain_kernel, started_kernel
from onewave.ops.ffn.chain.plan import ChainPlan, plan_chain
from onewave.ops.ffn.choose import ChainChoice
from onewave.ops.ffn.sizes import FFNSizes
from onewave.tiles.graph.builders import cuts
from onewave.tiles.sim.trace import Trace
from onewave.wave.launch.launch import ACTIVATIONS, POLLS, check_launch, co_resident
from onewave.wave.launch.watch import measured_trace, stall_records, watch_words

# Polls of the warp that watches the first launch begin: it may have to wait for whatever else the GPU is doing.
_PATIENT_POLLS = 1 << 23
_ROWS = 128
# Plans and buffers kept for run(): a few hundred KiB each, more only with slices of K. What a CUDA graph has recorded
# is kept beside them, for good: the graph's end is not announced.
_MAX_KEPT = 32


@dataclass
class _State:
    """State shared by the launches on one stream. No other launch may touch it meanwhile."""

    counters: Tensor
    started: Tensor
    # One tensor a launch; the last is the watcher's.
    epochs: tuple[Tensor, ...]
    watches: tuple[Tensor, ...]
    host: Tensor
    partials: Tensor
    side: torch.cuda.Stream | None

    def reset(self, lanes: tuple[np.ndarray[Any, np.dtype[np.int32]], ...]) -> None:
        """As before the first launch."""
        budgets = (*(POLLS for _ in lanes), _PATIENT_POLLS)
        sizes = (*(len(each) for each in lanes), 1)
        with torch.inference_mode():  # as they may have been made there
            for tensor in (self.counters, self.started, *self.epochs, self.host):
                tensor.zero_()
            for watch, workers, polls in zip(self.watches, sizes, budgets, strict=True):
                watch.copy_(torch.from_numpy(watch_words(workers, polls, self.host.data_ptr())))


class Launch(NamedTuple):
    """One launch beside its operands. trace: int32, where times go. skipped: a record whose post is left out, or -1."""

    state: _State
    trace: Tensor
    skipped: int
    flags: dict[str, bool]


class Chain:
    """A plan bound to a device. Calls are launches on the current stream.

    activation: silu, gelu or None. test: a build that sleeps at random before every task and every post. Each stream
    has buffers of its own; launches recorded into CUDA graphs share one set, so graphs of one Chain must not run at the
    same time.
    Raises UnsupportedError on a device without sm_90, or with fewer SMs than the plan has workers.
    """

    what = "ffn"

    def __init__(
        self,
        plan: ChainPlan,
        device: torch.device,
        dtype: torch.dtype,
        *,
        activation: str | None = "silu",
        test: bool = False,
    ):
        check_launch(self.what, device, max(plan.blocks), activation)
        self.plan, self.device, self.dtype, self.test = plan, device, dtype, test
        tile = plan.tile
        self._records, self._waits, self._totals = (
            torch.from_numpy(words if words.size else np.zeros(2, dtype=np.int32)).to(device)
            for words in (plan.records, plan.waits, plan.totals)
        )
        self._lanes = tuple(torch.from_numpy(lanes).to(device) for lanes in plan.lanes)
        # Slices of K but the last.
        self._splits = int(plan.records[:, 12].max())
        self._constants: dict[str, Any] = {
            "DTYPE": gl.bfloat16 if dtype is torch.bfloat16 else gl.float16,
            "BN": tile.columns,
            "W": tile.warpgroups,
            "S": tile.stages,
            "OB": tile.buffers,
            "ACT": ACTIVATIONS[activation],
            "GATED": plan.sizes.gated,
            "SPLIT": self._splits > 0,
        }
        self._layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        self._states: dict[int, _State] = {}
        self._graphs = self._new_state()
        self._no_trace = torch.zeros(4, dtype=torch.int32, device=device)

    def _new_state(self) -> _State:
        plan, device = self.plan, self.device

        def words(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        sizes = (*(len(lanes) for lanes in plan.lanes), 1)
        rows, outs = (
            cuts(n, t) * t for n, t in ((plan.sizes.rows, plan.tile.rows), (plan.sizes.out, plan.tile.columns))
        )
        made = _State(
            counters=words(max(1, len(plan.totals))),
            started=words(1),
            epochs=tuple(words(size) for size in sizes),
            watches=tuple(words(len(watch_words(size, 0, 0))) for size in sizes),
            host=torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
            partials=torch.empty(max(1, rows * outs * self._splits), dtype=torch.float32, device=device),
            side=torch.cuda.Stream(device) if len(plan.lanes) == 2 else None,
        )
        made.reset(plan.lanes)
        return made

    def _state(self) -> _State:
        if torch.cuda.is_current_stream_capturing():
            return self._graphs
        key = torch.cuda.current_stream(self.device).cuda_stream
        if key not in self._states:
            self._states[key] = self._new_state()
        return self._states[key]

    def __call__(self, *operands: Any, keep_back: int | None = None) -> Any:
        """Launch with the operands of _launch and return its result. keep_back: a record whose post is left out.

        Raises WaveStalled if an earlier launch has stalled.
        """
        return self._checked(operands, None, keep_back)

    def trace(self, *operands: Any) -> Trace:
        """Run once and return when every task waited, began and ended; waits for the device."""
        words = torch.zeros(len(self.plan.records) * 4, dtype=torch.int32, device=self.device)
        self._checked(operands, words)
        torch.cuda.synchronize(self.device)
        self.check()
        number = self.plan.records[:, 11]
        steps, tasks = np.concatenate([lanes[:, 1] for lanes in self.plan.lanes]), self.plan.graph.tasks
        names, phases = ([getattr(tasks[at], of) for at in number.tolist()] for of in ("name", "phase"))
        return measured_trace(words.cpu().numpy().reshape(-1, 4), steps, number, names, phases)

    def _box(self, tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], self._layout)

    def _checked(self, operands: tuple[Any, ...], trace: Tensor | None, keep_back: int | None = None) -> Any:
        state = self._state()
        if not torch.cuda.is_current_stream_capturing():
            self._raise_if_stalled(state)
        skipped = -1 if keep_back is None else keep_back
        flags = {"TEST": self.test or skipped >= 0, "TRACE": trace is not None}
        return self._launch(Launch(state, self._no_trace if trace is None else trace, skipped, flags), *operands)

    def _launch(self, how: Launch, x: Tensor, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None = None) -> Tensor:
        """x: [rows, hidden], up to the plan's rows. Returns [rows, out]."""
        state = how.state
        x, w_up, w_down = describable(x), describable(w_up), describable(w_down)
        gate = w_up if w_gate is None else describable(w_gate)
        half = self.plan.tile.columns // 2
        outs = cuts(len(w_down), self.plan.tile.columns) * self.plan.tile.columns
        hidden, y = x.new_empty(len(x), len(w_up)), x.new_empty(len(x), len(w_down))
        tensors = (
            *(self._box(x, 64, 64), self._box(gate, half, 64), self._box(w_up, half, 64), self._box(w_down, half, 64)),
            *(self._box(hidden, 64, 64), self._box(hidden, 64, half), self._box(y, 64, half)),
        )

        def start(launch: int, **options: Any) -> None:
            launch_kernel(
                chain_kernel, (len(self.plan.lanes[launch]),),
                *tensors, self._records, self._lanes[launch], self._waits, self._totals, state.counters,
                state.epochs[launch], state.watches[launch], state.started, how.trace,
                state.partials, outs, outs * cuts(self.plan.sizes.rows, self.plan.tile.rows) * self.plan.tile.rows,
                how.skipped, num_warps=4, **how.flags, **options, **self._constants,
            )  # fmt: skip

        if state.side is None:
            # Cooperative: all blocks are on the GPU at once, or none.
            start(0, MARK=False, launch_cooperative_grid=True)
            return y
        here = torch.cuda.current_stream(self.device)
        state.side.wait_stream(here)
        start(0, MARK=True)
        with torch.cuda.stream(state.side):
            blocks = len(self.plan.lanes[0])
            launch_kernel(started_kernel, (1,), state.started, state.epochs[2], state.watches[2], blocks, num_warps=1)
            start(1, MARK=False)
        here.wait_stream(state.side)
        return y

    def check(self) -> None:
        """Raise WaveStalled if a launch has stalled (as far as the host knows yet), and make the next one work."""
        for state in (*self._states.values(), self._graphs):
            self._raise_if_stalled(state)

    def _raise_if_stalled(self, state: _State) -> None:
        if not int(state.host[0]):
            return
        torch.cuda.synchronize(self.device)
        found = [entry for watch in state.watches for entry in self._stalls(watch, state.counters.data_ptr())]
        state.reset(self.plan.lanes)
        torch.cuda.synchronize(self.device)
        raise WaveStalled(
            f"{self.what} of {self.plan.workers} workers stalled",
            found,
            next="Its results are void; the next launch works.",
        )

    def _stalls(self, watch: Tensor, counters: int) -> list[dict[str, object]]:
        """One entry a block that gave up."""
        found: list[dict[str, object]] = []
        for stall in stall_records(watch.cpu().numpy()):
            number = (stall.address - counters) // 4
            known = 0 <= number < len(self.plan.totals)
            counter = f"counter {number}" if known else "the first launch's blocks"
            task = self.plan.name(stall.step) if known else "watcher"
            numbers = {"expected": stall.expected, "got": stall.got}
            found.append({"worker": stall.worker, "task": task, "counter": counter, **numbers})
        return found


_kept: OrderedDict[Hashable, Chain] = OrderedDict()
_recorded: set[Chain] = set()
_lock = threading.Lock()


def rows_planned(rows: int) -> int:
    """Rows of the plan for a call: it knows rows by the tile, and what is beyond the last one, TMA leaves out."""
    return 64 if rows <= 64 else cuts(rows, _ROWS) * _ROWS


def _sizes(call: FFNCall) -> FFNSizes:
    return FFNSizes(rows_planned(len(call.x)), *call.block)


def _asked(call: FFNCall, *, streams: bool) -> Hashable:
    x = call.x
    return _sizes(call), co_resident(x.device), call.order, call.policy, streams, x.device, x.dtype, call.activation


_Made = TypeVar("_Made", bound=Chain)


def keep(asked: Hashable, make: Callable[[], _Made]) -> _Made:
    """Return what was made for the same question before, or make it; the oldest beyond _MAX_KEPT goes."""
    with _lock:
        made = _kept.get(asked)
        if made is None:
            made = _kept[asked] = make()
            while len(_kept) > _MAX_KEPT:
                oldest = next(iter(_kept.values()))
                torch.cuda.synchronize(oldest.device)  # a launch on another stream may still read what goes
                _kept.popitem(last=False)
        _kept.move_to_end(asked)
        if torch.cuda.is_current_stream_capturing():
            _recorded.add(made)
    return cast("_Made", made)


def is_kept(asked: Hashable) -> bool:
    """Return whether keep() would have nothing to make."""
    return asked in _kept


def chain(call: FFNCall, *, streams: bool = False) -> Chain:
    """Return the Chain for a call's sizes, kept from call to call."""

    def make() -> Chain:
        workers, device = co_resident(call.x.device), call.x.device
        plan = plan_chain(_sizes(call), workers=workers, order=call.order, policy=call.policy, streams=streams)
        return Chain(plan, device, call.x.dtype, activation=call.activation)

    return keep(_asked(call, streams=streams), make)


def is_ready(call: FFNCall, choice: ChainChoice) -> bool:
    """Return whether run() would find its plan and buffers made, so that it may be recorded into a CUDA graph."""
    return is_kept(_asked(call, streams=choice.streams))


def run(call: FFNCall, choice: ChainChoice) -> Tensor:
    """Return [rows, out]. Plans at the first call with a number of row blocks."""
    return chain(call, streams=choice.streams)(call.x, call.w_up, call.w_down, call.w_gate)
