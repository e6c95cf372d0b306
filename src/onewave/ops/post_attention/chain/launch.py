"""Launches of what comes behind attention: see ffn/chain/launch.py, whose state, watch and checks these are."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from onewave.gpu.descriptors import describable
from onewave.gpu.launch import launch_kernel
from onewave.ops.ffn.chain.launch import Chain, Launch, is_kept, keep, rows_planned
from onewave.ops.post_attention.call import PostAttentionCall, PostAttentionWeights
from onewave.ops.post_attention.chain.kernel import post_attention_kernel
from onewave.ops.post_attention.chain.plan import LayerSizes, plan_layer
from onewave.ops.post_attention.choose import ChainChoice
from onewave.wave.launch.launch import co_resident


class PostAttentionChain(Chain):
    """A plan of plan_layer bound to a device; see Chain."""

    what = "post_attention"

    def _launch(  # pyright: ignore[reportIncompatibleMethodOverride] (other operands, the same launches)
        self, how: Launch, attended: Tensor, residual: Tensor, weights: PostAttentionWeights, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (normed, residual stream) of up to the plan's rows."""
        state = how.state
        attended, residual = describable(attended), residual.contiguous()
        o, gate_up, down = (describable(plain) for plain in weights.matrices)
        inner, hidden = len(gate_up) // 2, gate_up.shape[1]
        rows, half = len(attended), self.plan.tile.columns // 2
        projected, normed, y, following = (attended.new_empty(rows, hidden) for _ in range(4))
        between, total = attended.new_empty(rows, inner), residual.new_empty(rows, hidden)
        box = self._box
        launch_kernel(
            post_attention_kernel, (self.plan.blocks[0],),
            box(attended, 64, 64), box(o, half, 64), box(projected, 64, half),
            box(normed, 64, 64), box(gate_up[:inner], half, 64), box(gate_up[inner:], half, 64),
            box(between, 64, 64), box(between, 64, half), box(down, half, 64), box(y, 64, half),
            projected, y, residual, total, normed, following, weights.post_norm, weights.next_norm, rows, hidden, eps,
            self._records, self._lanes[0], self._waits, self._totals, state.counters, state.epochs[0],
            state.watches[0], how.trace, how.skipped,
            HIDDEN=hidden, num_warps=4, launch_cooperative_grid=True, **how.flags, **self._constants_of_tiles,
        )  # fmt: skip
        return following, total

    @property
    def _constants_of_tiles(self) -> dict[str, Any]:
        return {name: self._constants[name] for name in ("DTYPE", "BN", "W", "S", "OB")}


def _asked(call: PostAttentionCall) -> Hashable:
    return _sizes(call), co_resident(call.attended.device), call.order, call.policy, call.attended.device, call.dtype


def _sizes(call: PostAttentionCall) -> LayerSizes:
    attended, hidden, intermediate = call.sizes
    return LayerSizes(rows_planned(len(call.attended)), hidden, intermediate, hidden, True, attended)


def chain(call: PostAttentionCall) -> PostAttentionChain:
    """Return the launches for a call's sizes, kept from call to call."""

    def make() -> PostAttentionChain:
        workers = co_resident(call.attended.device)
        plan = plan_layer(_sizes(call), workers=workers, order=call.order, policy=call.policy)
        return PostAttentionChain(plan, call.attended.device, call.dtype)

    return keep(_asked(call), make)


def is_ready(call: PostAttentionCall) -> bool:
    """Return whether run() would find its plan and buffers made, so that it may be recorded into a CUDA graph."""
    return is_kept(_asked(call))


def run(call: PostAttentionCall, choice: ChainChoice) -> tuple[Tensor, Tensor]:
    """Return (normed, residual stream). Plans at the first call with a number of row blocks."""
    return chain(call)(call.attended, call.residual, call.weights, call.eps)
