"""A model that is a hash, a tokenizer that is a table, and what a request must give, written down the slow way."""

import hashlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import WaveStalled
from onewave.engine.engine import Engine
from onewave.engine.params import SamplingParams
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.scheduler.sequence import PassLimits
from onewave.memory.block_pool import PrefixCaching
from onewave.models.batch import StepRows
from onewave.ops.sampling import reference, uniforms

VOCAB = 61
EOS = 2
# Pieces overlap in many ways, so that stop strings start and end within tokens.
PIECES = [
    "",
    "",
    "",
    *(
        a + b
        for a in ("", "a", "b", "ab", "ba", "c")
        for b in ("a", "b", "c", "ca", "bb", " ", "x", "aab", "cc", "b c")
    ),
]
PIECES = PIECES[:VOCAB] + ["z"] * (VOCAB - len(PIECES))


def hash_logits(sequence: Sequence[int]) -> np.ndarray:
    """float32 [VOCAB] that depend on every token of the sequence."""
    digest = hashlib.blake2b(bytes(sequence), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    return (rng.standard_normal(VOCAB) * 2).astype(np.float32)


LIMITS = PassLimits(max_tokens=64, max_prompts=4)


class FakeRunner:
    """Keeps, per KV block, the tokens a real cache would hold, and fails on any use that one would not survive.

    Each token is kept with all before it: a block that another sequence has written, or an old one, is noticed.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        max_model_len: int = 64,
        run_ahead: int = 0,
        limits: PassLimits = LIMITS,
        num_blocks: int | None = None,
        block_size: int = 8,
    ) -> None:
        self.device = torch.device("cpu")
        self.vocab_size = VOCAB
        self.max_num_seqs, self.max_model_len, self.run_ahead = max_num_seqs, max_model_len, run_ahead
        self.limits, self.block_size = limits, block_size
        self.num_blocks = num_blocks or max_num_seqs * -(-max_model_len // block_size)
        self.passes: list[list[tuple[int, int, int]]] = []
        self.stalls_at = -1
        self.blocks: list[list[tuple[int, ...]]] = [[()] * block_size for _ in range(self.num_blocks)]
        self.table: dict[tuple[int, int], int] = {}
        self.batch_sizes: list[int] = []
        self.fail_at_decode: BaseException | None = None
        self._last: Tensor | None = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.blocks[target] = list(self.blocks[source])

    def set_blocks(self, entries: Sequence[tuple[int, int, int]]) -> None:
        for slot, place, block in entries:
            assert 0 <= slot < self.max_num_seqs
            self.table[slot, place] = block

    def sequence(self, slot: int, length: int) -> tuple[int, ...]:
        """The tokens that a slot holds, `length` of them."""
        if length == 0:
            return ()
        last = length - 1
        found = self.blocks[self.table[slot, last // self.block_size]][last % self.block_size]
        assert len(found) == length, "a block that holds something else"
        for position in range(last):
            block = self.blocks[self.table[slot, position // self.block_size]]
            assert block[position % self.block_size] == found[: position + 1]
        return found

    def write(self, slot: int, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        before = self.sequence(slot, start)
        for token in tokens:
            before = (*before, token)
            position = len(before) - 1
            self.blocks[self.table[slot, position // self.block_size]][position % self.block_size] = before
        return before

    def prefill(self, chunks: Sequence[PromptChunk], *, each: Callable[[int, Tensor], object] | None = None) -> Tensor:
        assert 0 < len(chunks) <= self.limits.max_prompts
        assert len(chunks) == 1 or each is None
        ends: list[np.ndarray] = []
        for chunk in chunks:
            sequence = self.write(chunk.slot, chunk.token_ids, chunk.start)
            rows = np.stack([hash_logits(sequence[: end + 1]) for end in range(chunk.start, chunk.end)])
            for first in range(0, len(rows) if each is not None else 0, 7):
                each(first, torch.from_numpy(rows[first : first + 7]))
            ends.append(rows[-1])
        self.passes.append([(chunk.slot, chunk.start, chunk.end) for chunk in chunks])
        return torch.from_numpy(np.stack(ends))

    def check(self) -> None:
        if 0 <= self.stalls_at <= len(self.batch_sizes):
            self.stalls_at = -1
            raise WaveStalled("wave stalled", [])

    def decode(self, rows: StepRows) -> Tensor:
        if self.fail_at_decode is not None:
            failure, self.fail_at_decode = self.fail_at_decode, None
            raise failure
        if self._last is not None:
            self._last.fill_(torch.nan)  # logits are valid until the next decode only
        logits: list[np.ndarray] = []
        assert len(set(rows.slots.tolist())) == rows.num_rows
        for token, position, slot in zip(*(part.tolist() for part in rows), strict=True):
            assert 0 <= token < VOCAB
            logits.append(hash_logits(self.write(slot, [token], position)))
        self.batch_sizes.append(rows.num_rows)
        self._last = torch.from_numpy(np.stack(logits))
        return self._last


class FakeDetokenizer:
    """Joins pieces; like a real one it may hold text back: piece 'x' is shown with the token after it."""

    def __init__(self, skip: Collection[int] = ()) -> None:
        self.held = ""
        self.skip = skip

    def hidden(self, token_id: int) -> str:
        return PIECES[token_id] if token_id in self.skip else ""

    def push(self, ids: Sequence[int]) -> str:
        text = self.held + "".join(PIECES[token] for token in ids if token not in self.skip)
        self.held = "x" if text.endswith("x") else ""
        return text[: len(text) - len(self.held)]

    def finish(self) -> str:
        return self.held


def make_engine(
    runner: FakeRunner, seed: int = 0, special: Collection[int] = (), *, prefixes: PrefixCaching | None = None
) -> Engine:
    return Engine(
        runner,
        eos_token_ids=[EOS],
        make_detokenizer=lambda prompt, skip: FakeDetokenizer(special if skip else ()),
        token_text=lambda token: PIECES[token],
        seed=seed,
        prefixes=prefixes,
    )


def expected_tokens(
    prompt: list[int],
    params: SamplingParams,
    key: int,
    max_model_len: int = 64,
    allowed: Callable[[list[int]], Collection[int]] | None = None,
) -> list[int]:
    """Generate one sample's tokens, without stop strings: one at a time, everything recomputed, in float64.

    allowed: what may follow some tokens; it ends where nothing but an end may.
    """
    limit = max_model_len - len(prompt)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    ends = set(params.stop_ids) | (set() if params.ignore_eos else {EOS})
    output: list[int] = []
    while len(output) < limit:
        logits = hash_logits(prompt + output).astype(np.float64)
        for token, bias in (params.logit_bias or {}).items():
            logits[token] = np.float32(logits[token]) + np.float32(bias)
        if len(output) < params.min_tokens:
            logits[list(ends)] = -np.inf
        logits = reference.penalise(
            logits,
            prompt,
            output,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
        if allowed is not None:
            may = allowed(output)
            if set(may) <= {EOS}:
                break
            logits[[token for token in range(VOCAB) if token not in may]] = -np.inf
        output.append(
            reference.sample(
                logits,
                float(uniforms([key], [len(output)], 1)[0, 0]),
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
            )
        )
        if output[-1] in ends:
            break
    return output


def run_all(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")
