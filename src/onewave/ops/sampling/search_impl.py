"""Tokens sampled with top_k or top_p on a GPU of compute capability 9.0, in one launch, without a sort.

A row of logits is cut among thread blocks, all of them on the GPU at once. They search for the sampled token's logit
in rounds of one exchange (rounds_impl.py), then for the token (draw_impl.py). Weights are whole numbers, so tokens are
those of op.py's sort. Bound: the exchanges, some ten of them.

constexpr    meaning [unit] (allowed values); also of rounds_impl.py and draw_impl.py
PIECES       pieces of a row, padded to a power of two (the threads of a block, or more)
XW           warps of a block (4, 8)
KEPT         layout of a part's packet, which a warp keeps
LAYOUT       layout of the rows of logits that are weighed; SIZE: how many
SHAPE        of words, with the last axis cut in two pairs
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.base.device import num_sms
from onewave.base.errors import WaveStalled
from onewave.gpu.launch import launch_kernel
from onewave.ops.sampling.draw_impl import clear_draws, draw_of
from onewave.ops.sampling.rounds_impl import clear_rounds
from onewave.ops.sampling.triton_impl import PIECE, max_of_pieces
from onewave.wave.launch.launch import POLLS
from onewave.wave.launch.watch import watch_words

MAX_ROWS = 16
"""Rows that are sampled side by side; of more, each would have too few blocks."""
_WARPS = 8
# Logits that a block looks at in one go.
_SHARE = _WARPS * 128


# A row of uniform numbers lies at any multiple of 8 bytes: no build of its own for every second one.
@gluon.jit(
    do_not_specialize=["vocabulary", "stride", "share", "set_words", "pieces"],
    do_not_specialize_on_alignment=["uniform"],
)
def draw_limited_kernel(
    sets, epochs, draws, uniform, logits, highest, tokens, watch, vocabulary, stride, share, set_words, pieces,
    PIECES: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """One token a row (program axis 1). sets: int64, set_words a row, what draw_impl.py and rounds_impl.py exchange;
    epochs: int32 [rows, blocks], launches so far; draws: float64 [rows, 4], op.draw_words; highest: float32
    [rows, pieces], pieces' highest logits; tokens: int64 [rows]; watch: see wave/kernel/spin.py."""
    block = gl.program_id(0)
    row = gl.program_id(1)
    place = row * gl.num_programs(0) + block
    number = gl.load(epochs + place)
    mine = sets + row * set_words
    # The launch before leaves its sets to be cleared for the next one.
    clear_draws(mine, number + 1, block, XW)
    clear_rounds(mine, number + 1, block, XW)
    piece = gl.arange(0, PIECES, layout=gl.BlockedLayout([1], [32], [XW], [0]))
    best = gl.max(gl.load(highest + row * pieces + piece, mask=piece < pieces, other=float("-inf")), axis=0)
    first = block * share
    rows = gl.maximum(gl.minimum(share, vocabulary - first), 0)
    words = logits.to(gl.pointer_type(gl.int32)) + row.to(gl.int64) * stride
    token = draw_of(
        mine, draws + row * 4, gl.load(uniform + row), words, vocabulary, first, rows, number, best, watch, block, row,
        XW,
    )  # fmt: skip
    if block == 0:
        gl.store(tokens + row, token)
    gl.store(epochs + place, number + 1)


def words_of_sets(blocks: int) -> int:
    """int64 words of what one row's blocks exchange: two of each packet (draw_impl.py), 64 of each round's."""
    return 4 * blocks + 4 + 128 * blocks


@dataclass(frozen=True)
class _State:
    """State that launches of as many blocks and rows on a stream share in turn. stalled: of the host's memory."""

    sets: Tensor
    epochs: Tensor
    watch: Tensor
    stalled: Tensor


_states: dict[tuple[int, int, int, int], _State] = {}
_making = threading.Lock()


def _state(device: torch.device, blocks: int, rows: int, set_words: int) -> _State:
    key = device.index, torch.cuda.current_stream(device).cuda_stream, blocks, rows
    with _making:
        state = _states.get(key)
        if state is not None and int(state.stalled[0]):
            # Blocks that leave may write to the host's word yet, whose memory is then given away.
            torch.cuda.current_stream(device).synchronize()
            del _states[key]
            raise WaveStalled("a draw with top_k or top_p", (), next="Drop the last call's tokens, and draw again.")
        if state is None:
            stalled = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            words = watch_words(blocks, POLLS, stalled.data_ptr())
            state = _State(
                sets=torch.full((rows * set_words,), -1, dtype=torch.int64, device=device),
                epochs=torch.zeros(rows * blocks, dtype=torch.int32, device=device),
                watch=torch.from_numpy(words).to(device),
                stalled=stalled,
            )
            _states[key] = state
        return state


def draw_limited(logits: Tensor, uniform: Tensor, draws: Tensor, highest: Tensor | None = None) -> Tensor:
    """float32 [rows, vocab], last axis contiguous, rows at most MAX_ROWS -> int64 [rows], each drawn at uniform
    (float64 [rows]) as draws (float64 [rows, 4], op.draw_words) say. highest: max_of_pieces, if it is there. Raises
    WaveStalled if a call before has given up waiting: its tokens are none."""
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens
    blocks = max(1, min(triton.cdiv(vocab, _SHARE), num_sms(device) // rows))
    share = triton.cdiv(triton.cdiv(vocab, blocks), 4) * 4
    set_words = words_of_sets(blocks)
    pieces = triton.cdiv(vocab, PIECE)
    highest = max_of_pieces(logits) if highest is None else highest
    state = _state(device, blocks, rows, set_words)
    launch_kernel(
        draw_limited_kernel, (blocks, rows),
        state.sets, state.epochs, draws, uniform, logits, highest, tokens, state.watch, vocab, logits.stride(0), share,
        set_words, pieces, PIECES=max(32 * _WARPS, triton.next_power_of_2(pieces)), XW=_WARPS, num_warps=_WARPS,
        # All blocks are on the GPU at once, as they wait for each other.
        launch_cooperative_grid=True,
    )  # fmt: skip
    return tokens
