"""Launch the wave kernel: its buffers and grid, and the error for a launch that stalls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, WaveStalled, shown
from onewave.base.settings import Settings
from onewave.tiles.sim.trace import Trace
from onewave.wave.launch.boxes import keys_box, rows_box, streams_keys
from onewave.wave.launch.checks import (
    BYTE_NUMBERS,
    check_bytes,
    check_cache,
    check_entries,
    check_pages,
    check_sequences,
)
from onewave.wave.launch.state import LaunchState
from onewave.wave.launch.watch import measured_trace, stalls
from onewave.wave.plan.layout import BLOCK_KEYS, POINTERS, TOGETHER
from onewave.wave.plan.operations import HeadGroups
from onewave.wave.plan.resources import kernel_resources
from onewave.wave.plan.steps import Kind, LaunchPlaces, Place, Word, words_of
from onewave.wave.weights.pack import WeightStream

ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2}
"""The kernel's ACT by the name of an activation function."""

POLLS = 1 << 18
"""Polls of one wait before a launch gives up: tenths of a second, where a wait takes microseconds. With fewer a slow
launch is refused; with more a stalled one blocks the GPU longer."""

_EXCHANGE_WARPS = 8


def runs_here(device: torch.device) -> bool:
    """Whether the device is an sm_90 GPU, with wgmma and TMA."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def co_resident(device: torch.device) -> int:
    """The thread blocks that the device holds at once: one an SM, because the ring fills its shared memory."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_launch(what: str, device: torch.device, workers: int, activation: str | None) -> None:
    """Refuse a device without sm_90, more workers than it holds at once, and an activation that no kernel has. Raises
    UnsupportedError, InvalidArgumentError."""
    if not runs_here(device):
        raise UnsupportedError(f"{what}: device", got=str(device), allowed="a GPU of compute capability 9.0")
    if workers > co_resident(device):
        allowed = f"up to {co_resident(device)}, what {device} holds at once"
        raise UnsupportedError(f"{what}: workers", got=str(workers), allowed=allowed)
    if activation not in ACTIVATIONS:
        raise InvalidArgumentError("activation", got=shown(activation), allowed="'silu', 'gelu', None")


@dataclass(frozen=True)
class AttentionSetup:
    """The inputs of a decode step's attention beside its program. The caches have the weights' dtype.

    embedding: [rows, hidden], where the step's tokens say. vocab: logits of a sequence. rotary: makes float32
    [positions, head_dim], cosines then sines, of at least as many positions. biases: float32 [n]. q_norm, k_norm:
    float32 [layers, head_dim] or None. hidden: width of the residual stream. gains: [norms, hidden] of the weights'
    dtype, of the norms in a step's order; None where they are in the weights.
    """

    layers: int
    groups: HeadGroups
    embedding: Tensor
    vocab: int
    rotary: Callable[[int], Tensor]
    biases: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    hidden: int
    eps: float
    scale: float
    gains: Tensor | None = None


class Wave:
    """Launch a program with its packed weights, on the current stream.

    weights: every matrix of its program, packed. activation: silu, gelu or None, for operations that have one.
    counters: hand off by the table's counters instead of data-as-flag. delays: a test build that sleeps at random
    before every task. Each CUDA stream has its own buffers, except a decode step's residual stream: decode steps wait
    for those on other streams. Launches recorded into CUDA graphs share one set of buffers, so graphs of one Wave must
    not run at the same time, nor beside its decode steps; two threads must not launch at once.
    Raises UnsupportedError on a device without sm_90, or with fewer SMs than the program has workers.
    """

    def __init__(
        self,
        weights: WeightStream,
        *,
        activation: str | None = None,
        counters: bool = False,
        delays: bool = False,
        attention: AttentionSetup | None = None,
    ):
        program, stream, scales, lists = weights.program, weights.tensor, weights.scales, weights.lists
        device = stream.device
        check_launch("wave", device, program.workers, activation)
        self.program, self.device, self._stream = program, device, stream
        self._weight_format, self._scales = weights.weight_format, scales
        self._counters, self._delays = counters, delays
        self._records, self._lanes, self._totals = (
            torch.from_numpy(words).to(device)
            for words in (np.pad(program.steps, ((1, 0), (0, 0))), program.lanes, _padded(program.totals))
        )
        # Row 0 is `places`, the others are the steps.
        self._places, self._steps = self._records[0].view(torch.int64), self._records[1:]
        self._records_box = rows_box(self._records, TOGETHER, swizzle=0)
        self._slack, self._tasks = (torch.from_numpy(words).to(device) for words in (program.slack, program.key_tasks))
        self._waits = torch.from_numpy(_padded(program.waits)).to(device)
        self._attention = attention
        if attention is None and scales is not None:
            self._places[Place.SCALES] = scales.data_ptr()
        self._constants = self._kernel_constants(activation)
        if attention is not None:
            self._residual = torch.zeros(program.shape.batch, attention.hidden, device=device)
        form, images = weights.weight_format, program.shape.images
        rows = program.shape.tile_rows if form is None else form.box_rows * images
        self._weights_box = self._lasts_box = self._lists_box = rows_box(stream, rows, swizzle=128)
        if form is not None and form.beside_rows:
            self._lasts_box = rows_box(stream, form.copied_rows * images, swizzle=0)
        if lists is not None:
            self._lists_box = rows_box(lists, 1, swizzle=0)
        # Placeholders: no launch reads keys before bind_cache.
        self._key_boxes = (self._weights_box, self._weights_box)
        self._states: dict[int, LaunchState] = {}
        self._last: torch.cuda.Stream | None = None
        # Keys, values, block table, rotary angles, scales.
        self._bound: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None] | None = None
        self._graphs = self._new_state()
        self._no_trace = torch.zeros(4, dtype=torch.int32, device=device)
        # The first launch may be on another stream than the one that made weights, records and lanes.
        torch.cuda.current_stream(device).synchronize()

    def _kernel_constants(self, activation: str | None) -> dict[str, Any]:
        program, setup = self.program, self._attention
        attention: dict[str, Any] = {"D": 0, "GP": 1, "CH": 1, "KSPLITS": 1, "QKNORM": False, "EPS": 1.0, "SCALE": 1.0}
        if setup is not None:
            groups = setup.groups
            attention |= {"D": groups.head_dim, "GP": groups.size, "CH": groups.merged, "KSPLITS": groups.splits}
            attention |= {"QKNORM": setup.q_norm is not None, "EPS": _shortest(setup.eps), "SCALE": setup.scale}
        return {
            **program.constants,
            "ACT": ACTIVATIONS[activation],
            "SYNC": int(self._counters),
            "FORMAT": 0 if self._weight_format is None else self._weight_format.number,
            "XW": _EXCHANGE_WARPS,
            **kernel_resources(program.shape, attention["D"]),
            **attention,
            "PAGE": 0,
            "STREAMS": 0,
            "MULTIPLIERS": program.shape.multipliers,
            "KV": 0,
        }

    def bind_cache(self, k: Tensor, v: Tensor, table: Tensor | None = None, *, scales: Tensor | None = None) -> None:
        """Use these caches from now on: both [layers, slots, kv_heads, capacity, head_dim], contiguous.

        table: int32 [slots, blocks a slot], rows contiguous, on the device. Then the caches are [layers, blocks,
        kv_heads, page, head_dim], page a power of two from 16 to 256, and a slot's key i is key i % page of KV block
        table[slot, i // page]. Entries may change between launches; those that a launch reads or writes must be valid
        when it starts. Results are bitwise those of a plain cache.
        scales: of int8 and float8_e4m3fn caches, which need a table: float32 [layers, kv_heads, 2], what a stored
        number of keys and of values is multiplied by.
        Do not call while a graph that has recorded a step is replayed: it is not waited for. Raises ShapeError.
        """
        setup = self._attention
        assert setup is not None
        check_cache(k, v, setup.layers, setup.groups, dtype=setup.embedding.dtype, device=self.device)
        if table is not None:
            check_pages(k, v, table)
        check_bytes(k, table, scales)
        # Its address is read until the next cache is bound.
        rotary = setup.rotary(k.shape[3] * (1 if table is None else table.shape[1]))
        layer_stride, slot_stride, head_stride = (k.stride(dim) * k.itemsize // 4 for dim in range(3))
        if scales is not None:
            scales = torch.cat((scales, 1.0 / scales), -1)
        places = LaunchPlaces(
            embedding=_address(setup.embedding),
            rotary=_address(rotary),
            keys=_address(k),
            values=_address(v),
            residual=_address(self._residual),
            biases=_address(setup.biases),
            q_norm=_address(setup.q_norm),
            k_norm=_address(setup.k_norm),
            layer_stride=layer_stride,
            slot_stride=slot_stride,
            head_stride=head_stride if scales is None else _address(scales),  # byte_cache.py
            stream=_address(self._stream),
            scales=_address(self._scales),
            gains=_address(setup.gains),
            table=_address(table),
            table_stride=0 if table is None else table.stride(0),
        )
        self._constants |= {"PAGE": 0 if table is None else k.shape[3], "KV": BYTE_NUMBERS.get(k.dtype, 0)}
        streams = streams_keys(k, self.program.shape) and (table is None or self._streams_pages(k.shape[3]))
        resources = kernel_resources(
            self.program.shape, setup.groups.head_dim, paged=table is not None, streams=streams
        )
        self._constants |= resources | {"STREAMS": int(streams)}
        self._key_boxes = (keys_box(k), keys_box(v)) if streams else (self._weights_box, self._weights_box)
        self._bound = (k, v, table, rotary, scales)
        # After the last launch, which reads it. Blocking, from pageable memory: the next may be on another stream.
        if self.device.type == "cuda":
            self.after_last()
        with torch.inference_mode():  # as it may have been made there
            self._places.copy_(torch.from_numpy(words_of([places], POINTERS, np.int64)[0]))

    def _streams_pages(self, page: int) -> bool:
        """Whether keys in pages can come through the ring: a block of keys lies in one page. It does not where a window
        begins anywhere."""
        kinds, windows = (self.program.steps[:, word] for word in (Word.KIND, Word.WINDOW))
        return page % BLOCK_KEYS == 0 and not windows[kinds == Kind.ATTEND].any()

    def _check(self, tokens: Tensor, positions: Tensor, slots: Tensor, logits: Tensor) -> None:
        """Check a decode step's arguments and, in debug mode (ONEWAVE_DEBUG=1), the block table's entries in use.

        The latter waits for the device. Raises ShapeError, InvalidArgumentError.
        """
        assert self._attention is not None
        max_rows, vocab = self.program.shape.batch, self._attention.vocab
        check_sequences(tokens, positions, slots, logits, max_rows=max_rows, vocab=vocab, device=self.device)
        if self._bound is None:
            raise InvalidArgumentError("wave: decode", got="no cache", next="Call bind_cache first.")
        k, _, table, *_ = self._bound
        if table is None or not Settings.from_env().debug or torch.cuda.is_current_stream_capturing():
            return
        check_entries(table, k.shape[1], k.shape[3], slots, positions)

    def decode(self, tokens: Tensor, positions: Tensor, slots: Tensor, logits: Tensor) -> Tensor:
        """Run one decode step: int64 [batch] each; writes float32 logits [batch, vocab], contiguous, and returns them.

        positions[i]: the cache index that token i's key and value are written to, in slot slots[i]. Needs bind_cache
        first. Raises ShapeError, InvalidArgumentError, and WaveStalled if an earlier launch has stalled.
        """
        assert self._attention is not None
        self._check(tokens, positions, slots, logits)
        self._launch(self._attention.embedding, logits, None, None, (tokens, positions, slots))
        return logits

    def _new_state(self) -> LaunchState:
        return LaunchState.made(self.program, POLLS, self.device)

    def _state(self) -> LaunchState:
        if torch.cuda.is_current_stream_capturing():
            return self._graphs
        stream = self.after_last() if self._attention is not None else torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._states:
            self._states[stream.cuda_stream] = self._new_state()
        return self._states[stream.cuda_stream]

    def after_last(self) -> torch.cuda.Stream:
        """Order the current stream after the last decode step's, which uses the same cache; return it. While a graph
        is captured nothing is ordered."""
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            return stream
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        return stream

    def __call__(self, x: Tensor, out: Tensor, *, keep_back: str | None = None) -> Tensor:
        """Run once: x [batch, columns] to out [batch, rows], both of the weights' dtype, last axis contiguous.

        keep_back: name of a task; a test build withholds its results. Returns out. Raises ShapeError, and WaveStalled
        if an earlier launch has stalled.
        """
        self._run(x, out, keep_back, None)
        return out

    def trace_decode(self, tokens: Tensor, positions: Tensor, slots: Tensor, logits: Tensor) -> Trace:
        """Run one decode step and return its trace; waits for the device. Arguments and errors as in decode."""
        assert self._attention is not None
        self._check(tokens, positions, slots, logits)
        words = self._trace_words()
        self._launch(self._attention.embedding, logits, None, words, (tokens, positions, slots))
        return self._trace(words)

    def trace(self, x: Tensor, out: Tensor) -> Trace:
        """Run once and return when every task waited, started and ended; waits for the device."""
        words = self._trace_words()
        self._run(x, out, None, words)
        return self._trace(words)

    def _trace_words(self) -> Tensor:
        return torch.zeros(len(self.program.steps) * 4, dtype=torch.int32, device=self.device)

    def _trace(self, words: Tensor) -> Trace:
        torch.cuda.synchronize(self.device)
        self.check()
        program = self.program
        numbers, steps = np.arange(len(program.steps)), program.lanes[:, 3]
        return measured_trace(words.cpu().numpy().reshape(-1, 4), steps, numbers, program.names, program.phases)

    def _run(self, x: Tensor, out: Tensor, keep_back: str | None, trace: Tensor | None) -> None:
        for name, tensor in (("x", x), ("out", out)):
            if tensor.ndim != 2 or tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
                got = f"{tuple(tensor.shape)}, strides {tensor.stride()}"
                raise ShapeError(f"wave: {name}", got=got, allowed="[batch, columns], rows 16-byte aligned")
        self._launch(x, out, keep_back, trace, None)

    def _launch(
        self,
        x: Tensor,
        out: Tensor,
        keep_back: str | None,
        trace: Tensor | None,
        sequences: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        from onewave.gpu.launch import launch_kernel
        from onewave.wave.kernel.kernel import wave_kernel

        state = self._state()
        if not torch.cuda.is_current_stream_capturing():
            self._raise_if_stalled(state)
        test = self._delays or keep_back is not None
        dtype = self._stream.dtype
        launch_kernel(
            wave_kernel, (self.program.workers,),
            self._weights_box, self._lasts_box, self._lists_box, *self._key_boxes, self._slack, self._tasks,
            self._records_box, self._steps, self._lanes, x.view(torch.int32), state.exchange, out.view(torch.int32),
            self._waits, state.counters, self._totals, state.epochs, state.watch,
            self._no_trace if trace is None else trace, *(sequences or (self._places,) * 3),
            self.program.workers * self.program.shape.tile_rows, self.program.slack.shape[1],
            self.program.key_tasks.shape[1], len(x if sequences is None else sequences[0]), x.stride(0) // 2,
            out.stride(0) * out.element_size() // 4, self.program.set_words,
            -1 if keep_back is None else self.program.step_of(keep_back), DTYPE=_gluon_dtype(dtype),
            TEST=2 if self._delays else 1 if test else 0, TRACE=trace is not None, num_warps=4,
            launch_cooperative_grid=True, launch_pdl=True, **self._constants,
        )  # fmt: skip

    def check(self) -> None:
        """Raise WaveStalled if a launch has stalled, as far as the host knows yet, and reset its buffers."""
        for state in (*self._states.values(), self._graphs):
            self._raise_if_stalled(state)

    def _raise_if_stalled(self, state: LaunchState) -> None:
        if not state.stalled:
            return
        torch.cuda.synchronize(self.device)
        addresses = (state.exchange.data_ptr(), state.counters.data_ptr())
        found = stalls(self.program, state.watch.cpu().numpy(), *addresses)
        state.reset(self.program, POLLS)
        torch.cuda.synchronize(self.device)
        raise WaveStalled(
            f"wave of {self.program.workers} workers stalled",
            found,
            next="Its results are void; the next launch works.",
        )


def _shortest(number: float) -> float:
    """The shortest number of the same float32: a GGUF file has that where a config.json has 1e-5, and the kernel, which
    computes in float32, is to be one and the same."""
    return float(str(np.float32(number)))


def _address(tensor: Tensor | None) -> int:
    """Return a tensor's address; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def _padded(words: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Pad to at least one word, because an empty tensor has no address."""
    return words if words.size else np.zeros(2, dtype=np.int32)


def _gluon_dtype(dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
