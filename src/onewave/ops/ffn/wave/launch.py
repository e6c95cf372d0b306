"""The feed-forward block in one launch of the wave kernel, and the packed weights it streams."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.base.weight_formats import COMPACT
from onewave.gpu.descriptors import describable
from onewave.ops import checks
from onewave.ops.ffn.call import FFNCall
from onewave.ops.ffn.choose import WaveChoice
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import DATA, FFNPlan, keeps_compact, plan_ffn, workers_for
from onewave.ops.library import refuse_grad
from onewave.wave.launch.launch import Wave, co_resident
from onewave.wave.weights.pack import Weight, WeightStream

# Packed copies kept for run()'s plain tensors: enough for the batch sizes of one block (1 to 32), or one size of six.
# Copies that a CUDA graph has recorded are kept beside them, for good: the graph's end is not announced.
_MAX_KEPT = 6


class Packing(NamedTuple):
    """The options of a packed copy: batches of up to `batch` rows; workers: None for plan.workers_for's."""

    batch: int
    activation: str | None
    order: str
    policy: str
    workers: int | None = None


class PackedFFN:
    """A feed-forward block packed for batches of up to `batch` rows. Call it with x [rows, hidden]; see op.ffn.

    waves: its launches, in order; their check() raises WaveStalled if one has stalled. compact: whether the weights are
    kept in thirteen bits each, without loss: see plan.keeps_compact (wave/weights/compact.py). streams: where they
    lie, of each launch. weight_bytes: what its launches read of them.
    """

    def __init__(self, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None, packing: Packing, *, delays: bool = False):
        padded = 1 << (packing.batch - 1).bit_length()
        sizes = FFNSizes(padded, w_up.shape[1], w_up.shape[0], w_down.shape[0], w_gate is not None)
        self.batch = packing.batch
        (self._inner, self._hidden), self._out = w_up.shape, w_down.shape[0]
        self._kind = (w_up.dtype, w_up.device)
        both = (w_up,) if w_gate is None else (w_gate, w_up)
        weights = {"up": Weight(both), "down": Weight((w_down,))}
        self.compact = keeps_compact(w_up.dtype, padded, packing.order, packing.policy)
        self.plan, streams = _packed(sizes, packing, weights, w_up, compact=self.compact)
        if self.compact and not bool(streams[0].reached):
            self.compact = False
            del streams  # before others come
            self.plan, streams = _packed(sizes, packing, weights, w_up, compact=False)
        self.streams = tuple(streams)
        self.weight_bytes = sum(stream.nbytes for stream in streams)
        self.waves = tuple(
            Wave(stream, activation=packing.activation, counters=packing.policy != DATA, delays=delays)
            for stream in streams
        )

    def __call__(self, x: Tensor, *, keep_back: str | None = None) -> Tensor:
        """x: [rows, hidden], the weights' dtype, rows at most `batch`. Returns [rows, out].

        Raises ShapeError, UnsupportedError, InvalidArgumentError; WaveStalled when an earlier launch has stalled.
        """
        checks.tensors("PackedFFN", x=x)
        if x.ndim != 2 or x.shape[1] != self._hidden:
            raise ShapeError("ffn: x", got=str(tuple(x.shape)), allowed=f"[rows, {self._hidden}]")
        if (x.dtype, x.device) != self._kind:
            allowed = "{} on {}, as the weights".format(*self._kind)
            raise UnsupportedError("ffn: x", got=f"{x.dtype} on {x.device}", allowed=allowed)
        if not 1 <= len(x) <= self.batch:
            raise InvalidArgumentError("ffn: rows of x", got=str(len(x)), allowed=f"1 to {self.batch}, as packed for")
        refuse_grad("PackedFFN", x)
        x = describable(x)
        for at, wave in enumerate(self.waves):
            width = self._out if at == len(self.waves) - 1 else self._inner
            x = wave(x, x.new_empty(len(x), width), keep_back=keep_back if at == 0 else None)
        return x

    def check(self) -> None:
        """Raise WaveStalled if a launch has stalled, as far as the host knows yet."""
        for wave in self.waves:
            wave.check()


def _packed(
    sizes: FFNSizes, packing: Packing, weights: dict[str, Weight], like: Tensor, *, compact: bool
) -> tuple[FFNPlan, list[WeightStream]]:
    workers = packing.workers
    if workers is None:
        workers = workers_for(sizes, order=packing.order, available=co_resident(like.device), compact=compact)
    plan = plan_ffn(sizes, workers=workers, order=packing.order, policy=packing.policy, compact=compact)
    streams: list[WeightStream] = []
    for program in plan.programs:
        streams.append(WeightStream(program, like.dtype, like.device, COMPACT if compact else None))
        for name in streams[-1].names:
            streams[-1].put(name, weights[name])
    return plan, streams


@dataclass(frozen=True)
class _Kept:
    packed: PackedFFN
    # Storages, not tensors: a parameter reaches a registered operator as another tensor over the same memory.
    storages: tuple[weakref.ref[torch.UntypedStorage], ...]
    versions: tuple[int, ...]

    @property
    def is_alive(self) -> bool:
        return all(ref() is not None for ref in self.storages)

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        pairs = zip(self.storages, tensors, strict=True)
        return all(ref() is tensor.untyped_storage() for ref, tensor in pairs) and self.versions == _versions(tensors)


_kept: OrderedDict[tuple[object, ...], _Kept] = OrderedDict()
_recorded: set[PackedFFN] = set()
_lock = threading.RLock()


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    # Inference tensors count no versions: a caller that writes to them has to ask for another packed copy.
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _key(call: FFNCall, choice: WaveChoice) -> tuple[object, ...]:
    packing = Packing(choice.sizes.rows, call.activation, choice.order, choice.policy)
    return (*((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in call.weights), packing)


def is_ready(call: FFNCall, choice: WaveChoice) -> bool:
    """Return whether run() would find the weights packed, so that it may be recorded into a CUDA graph."""
    kept = _kept.get(_key(call, choice))
    return kept is not None and kept.holds(call.weights)


def has_room(call: FFNCall, choice: WaveChoice) -> bool:
    """Return whether run() may pack the weights, or has, for a caller that asked for no packing.

    No copy that is in use may be dropped for it: a model of many blocks must not pack one after the other at every
    step. The copy takes at most half of the device's free memory, and the weights tell when they are written to.
    """
    if is_ready(call, choice):
        return True
    if torch.cuda.is_current_stream_capturing() or any(tensor.is_inference() for tensor in call.weights):
        return False
    with _lock:
        _drop_dead()
        # A copy of weights that were written to since takes the place of the old one.
        if _key(call, choice) not in _kept and len(_kept) >= _MAX_KEPT:
            return False
    free, _ = torch.cuda.mem_get_info(call.x.device)
    free += torch.cuda.memory_reserved(call.x.device) - torch.cuda.memory_allocated(call.x.device)
    return 2 * sum(tensor.nbytes for tensor in call.weights) <= free


def _drop(keys: Iterable[tuple[object, ...]]) -> None:
    """Let go of packed copies, which launches on other streams may still read."""
    for key in keys:
        torch.cuda.synchronize(_kept[key].packed.waves[0].device)
        del _kept[key]


def _drop_dead() -> None:
    """Drop packed copies of weights that no longer exist."""
    _drop([key for key, kept in _kept.items() if not kept.is_alive])


def run(call: FFNCall, choice: WaveChoice) -> Tensor:
    """Return [rows, out]. Packs the weights at the first call with them and keeps the packed copy."""
    weights, key = call.weights, _key(call, choice)
    with _lock:
        kept = _kept.get(key)
        if kept is None or not kept.holds(weights):
            _drop_dead()
            _drop([key] if key in _kept else [])
            refs = tuple(weakref.ref(tensor.untyped_storage()) for tensor in weights)
            packing = Packing(choice.sizes.rows, call.activation, choice.order, choice.policy)
            made = PackedFFN(call.w_up, call.w_down, call.w_gate, packing)
            kept = _kept[key] = _Kept(made, refs, _versions(weights))
            _drop([*_kept][: max(0, len(_kept) - _MAX_KEPT)])  # the oldest
        _kept.move_to_end(key)
        if torch.cuda.is_current_stream_capturing():
            _recorded.add(kept.packed)
    return kept.packed(call.x)
