"""Chooses the implementation of post_attention: one launch, or an operator after the other."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from onewave.base.device import Device
from onewave.base.errors import UnsupportedError
from onewave.ops.backends import load
from onewave.ops.choice import Asked, Choice, Reason, because, empty_on_meta
from onewave.ops.ffn.chain.plan import ChainPlan
from onewave.ops.post_attention.call import PostAttentionCall, PostAttentionWeights, check
from onewave.ops.post_attention.chain.plan import LayerSizes, plan_layer
from onewave.ops.post_attention.measured import Layer, fastest, table_lines

_HALVES = (torch.bfloat16, torch.float16)
_ALLOWED = (
    "rows of bfloat16 or float16 with a float32 residual on a GPU of compute capability 9.0, plain matrices of "
    "multiples of 64, 576 to 4096 hidden columns, no bias"
)
_SEPARATE = "post_attention/separate.py: an operator after the other"


@dataclass(frozen=True)
class ChainChoice(Choice):
    """One launch from the weights as they are."""

    sizes: LayerSizes
    order: str
    policy: str
    workers: int

    @property
    def plan(self) -> ChainPlan:
        """The plan for exactly so many rows."""
        return plan_layer(self.sizes, workers=self.workers, order=self.order, policy=self.policy)

    @property
    def tile(self) -> str:
        tile = self.plan.tile
        return f"{tile.rows} rows x {tile.columns}, ring of {tile.stages}"

    @property
    def programs(self) -> str:
        return str(self.workers)

    @property
    def why(self) -> tuple[Reason, ...]:
        made = self.plan
        products = made.records[made.records[:, 4] > 0]
        return (
            because("one launch, {} semaphores; order {}, {}", len(made.totals), made.order, made.policy),
            because(
                "{} tiles and {} tasks of norms, proved; the last ends {:.0%} after the mean", len(products),
                len(made.records) - len(products),
                made.predicted * self.workers / (int(products[:, 4].sum()) + 6 * len(products)) - 1,
            ),
            *self.reasons,
        )  # fmt: skip


def separate(*reasons: Reason) -> Choice:
    """Return the choice of one operator after the other."""
    return Choice("separate", "separate", _SEPARATE, reasons)


def choose(call: PostAttentionCall) -> Choice:
    """Return what runs; see ops/choice.py. Raises UnsupportedError where the named backend does not take the call."""
    if call.backend == "reference":
        return Choice("reference", "reference", "post_attention/reference.py", (because("asked for"),))
    if call.backend == "separate":
        return separate(because("asked for"))
    if not call.weights.is_plain or call.residual.dtype is not torch.float32 or not _fits(*call.sizes):
        if call.backend == "chain":
            raise _unsupported(call)
        return separate(because("one launch takes {}", _ALLOWED))
    named = (call.order, call.policy, call.backend, call.workers)
    return _chosen(len(call.attended), call.sizes, call.dtype, *named, call.device)


def _fits(attended: int, hidden: int, intermediate: int) -> bool:
    return all(size % 64 == 0 for size in (attended, hidden, intermediate)) and 512 < hidden <= 4096


def _unsupported(call: PostAttentionCall) -> UnsupportedError:
    bias = "" if all(each is None for each in call.weights.biases) else ", biases"
    got = f"{call.dtype} with a {call.residual.dtype} residual on {call.where}{bias}"
    return UnsupportedError("post_attention (backend=chain)", got=got, allowed=_ALLOWED, next='Use backend="separate".')


@lru_cache(maxsize=1024)
def _chosen(
    rows: int, sizes: tuple[int, int, int], dtype: torch.dtype, order: str, policy: str, backend: str,
    workers: int | None, device: Device,
) -> Choice:  # fmt: skip
    attended, hidden, intermediate = sizes
    layer = Layer(*sizes, str(dtype).removeprefix("torch."), device.name)
    known = tuple(because("{}", line) for line in table_lines(layer))
    if device.capability != (9, 0) or dtype not in _HALVES or rows < 1:
        if backend == "chain":
            got = f"{rows} rows of {dtype} on {device.text}"
            raise UnsupportedError("post_attention (backend=chain)", got=got, allowed=_ALLOWED)
        return separate(because("one launch needs 16-bit types on sm_90"))
    if backend == "auto" and fastest(rows, layer) == "separate":
        return separate(*known)
    return ChainChoice(
        "chain", "chain.launch", "post_attention/chain/kernel.py: post_attention_kernel", known,
        LayerSizes(rows, hidden, intermediate, hidden, True, attended), order, policy, workers or device.num_sms,
    )  # fmt: skip


def settled(call: PostAttentionCall, choice: Choice) -> Choice:
    """Return the choice, or separate launches where a recording CUDA graph would need a new plan.

    Raises UnsupportedError for a named backend then.
    """
    if not isinstance(choice, ChainChoice) or not torch.cuda.is_current_stream_capturing():
        return choice
    if load("post_attention", choice.module).is_ready(call):
        return choice
    if call.backend == "auto":
        return separate()
    what = "post_attention (backend=chain): recording a CUDA graph"
    raise UnsupportedError(what, got="nothing planned for these sizes yet", next="Call it once before recording.")


def describe(asked: Asked) -> PostAttentionCall:
    """A question: attended, o, gate_up."""
    attended, o, gate_up = (empty_on_meta(shape, asked.dtype) for shape in asked.take((2,), (2,), (2,)))
    residual = empty_on_meta((len(attended), len(o)), torch.float32)
    down = empty_on_meta((len(o), len(gate_up) // 2), asked.dtype)
    norm = empty_on_meta((len(o),), asked.dtype)
    choices = {"order": "auto", "policy": "auto", "backend": "auto"}
    choices |= asked.given(*choices)
    weights = PostAttentionWeights(o, norm, gate_up, down, norm)
    eps = asked.options.get("eps", 1e-5)
    call = PostAttentionCall(
        attended, residual, weights, eps, **choices, workers=asked.number("workers"), described=asked.device
    )
    check(call)
    return call
