"""A call of post_attention: its tensors and options, and what is checked before anything is chosen."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.choice import Call
from onewave.ops.linear import LinearWeight
from onewave.ops.linear.packed import PackedWeight
from onewave.ops.scaled_linear.matrix import ScaledMatrix

if TYPE_CHECKING:
    from onewave.wave.weights.pack import StreamMatrix  # a CPU never imports the wave

    Matrix = LinearWeight | StreamMatrix
else:
    Matrix = LinearWeight

BACKENDS = ("auto", "chain", "separate", "reference")


@dataclass(frozen=True, eq=False)
class PostAttentionWeights:
    """A decoder layer's weights after attention, and the gain of the next layer's first norm (or of the last norm).

    Matrices are [out, in] and whatever `linear` takes; gate_up stacks gate and up rows. Norms and biases: one row.
    next_matrix: what multiplies the normed rows; if it quantises them by row they may come quantised.
    """

    o: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix
    next_norm: Tensor
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    next_matrix: Matrix | None = None

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three, which `is_plain` says are tensors."""
        return cast("tuple[Tensor, Tensor, Tensor]", (self.o, self.gate_up, self.down))

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        return self.o_bias, self.gate_up_bias, self.down_bias

    def unpacked(self) -> "PostAttentionWeights":
        """Return these with the matrices as tensors that a wave's stream keeps unpacked; as they are elsewhere."""
        if self.is_plain or any(bias is not None for bias in self.biases):
            return self
        found = [_tensor_of(each) for each in (self.o, self.gate_up, self.down)]
        if any(each is None for each in found):
            return self
        o, gate_up, down = cast("list[Tensor]", found)
        return PostAttentionWeights(o, self.post_norm, gate_up, down, self.next_norm)

    @property
    def is_plain(self) -> bool:
        """Whether all matrices are tensors and there are no biases."""
        plain = all(isinstance(each, Tensor) for each in (self.o, self.gate_up, self.down))
        return plain and all(bias is None for bias in self.biases)


def _tensor_of(matrix: Matrix) -> Tensor | None:
    if isinstance(matrix, Tensor):
        return matrix
    return None if isinstance(matrix, (PackedWeight, ScaledMatrix)) else load("linear", "stream").kept(matrix)


@dataclass(frozen=True, eq=False)
class PostAttentionCall(Call):
    """One call; see op.post_attention. workers: thread blocks of the launch that explain is asked about."""

    attended: Tensor
    residual: Tensor
    weights: PostAttentionWeights
    eps: float
    order: str = "auto"
    policy: str = "auto"
    backend: str = "auto"
    workers: int | None = None
    described: Device | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.attended.dtype

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(attended, hidden, intermediate), of plain matrices."""
        o, gate_up, _ = self.weights.matrices
        return o.shape[1], o.shape[0], gate_up.shape[0] // 2


@lru_cache
def _orders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    # Late: `import onewave.ops` loads no tiles.
    from onewave.ops.ffn.chain.plan import BANDS
    from onewave.tiles.order.orders import ORDERS
    from onewave.tiles.order.policies import POLICIES

    return ("auto", *BANDS, "half_row", *(name for name in ORDERS if name != "explicit")), ("auto", *POLICIES)


def check(call: PostAttentionCall) -> None:
    """Check names, shapes, dtypes and devices as far as no operator below does.

    Raises InvalidArgumentError, ShapeError, UnsupportedError.
    """
    checks.one_of("post_attention", "backend", call.backend, BACKENDS)
    if (call.order, call.policy) != ("auto", "auto"):
        orders, policies = _orders()
        order = call.order.partition(":")[0] if isinstance(call.order, str) else call.order  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        checks.one_of("post_attention", "order", order, orders)
        checks.one_of("post_attention", "policy", call.policy, policies)
    checks.eps("post_attention", call.eps)
    attended, residual, weights = call.attended, call.residual, call.weights
    checks.tensors("post_attention", attended=attended, residual=residual, post_norm=weights.post_norm,
                  next_norm=weights.next_norm)  # fmt: skip
    if not weights.is_plain:
        return
    checks.tensors("post_attention", o=weights.o, gate_up=weights.gate_up, down=weights.down)
    o, gate_up, down = weights.matrices
    hidden = o.shape[0]
    shapes = [tuple(each.shape) for each in (attended, residual, o, gate_up, down)]
    right = all(len(shape) == 2 for shape in shapes) and shapes[0] == (len(residual), o.shape[1]) and (
        shapes[1][1] == gate_up.shape[1] == down.shape[0] == hidden and gate_up.shape[0] == 2 * down.shape[1]
    )  # fmt: skip
    if not right or any(tuple(norm.shape) != (hidden,) for norm in (weights.post_norm, weights.next_norm)):
        raise ShapeError(
            "post_attention: attended, residual, o, gate_up, down", got=", ".join(map(str, shapes)),
            allowed="[rows, heads], [rows, hidden], [hidden, heads], [2 x inner, hidden], [hidden, inner], "
            "norms [hidden]",
        )  # fmt: skip
    odd = [each for each in (o, gate_up, down) if each.dtype is not attended.dtype or each.device != attended.device]
    if odd or residual.device != attended.device:
        got = ", ".join(f"{each.dtype} on {each.device}" for each in (attended, residual, o, gate_up, down))
        raise UnsupportedError("post_attention: tensors", got=got, allowed="one dtype on one device")
