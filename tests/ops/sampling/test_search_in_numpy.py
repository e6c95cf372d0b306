"""top_k and top_p without a sort: the kernel's own source in NumPy, on logits of every kind, against the sampler."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.lanes import slow
from kit.numpy_gpu.gluon_in_numpy import Fault, Memory, function, launch
from kit.numpy_gpu.numpy_memory import wrapped
from onewave.ops.sampling import RowParameters, draw_impl, rounds_impl, sample, search_impl
from onewave.ops.sampling.op import draw_words
from onewave.ops.sampling.triton_impl import PIECE

MODULES = (rounds_impl, draw_impl, search_impl)
# A round calls the kernel's delay, which `launch` hands to the test.
COUNTED = Fault("narrowed", "rounds += 1", "rounds += 1; delay(0)")


class Search:
    """Buffers that launches of the search leave to each other."""

    def __init__(self, rows: int, blocks: int) -> None:
        self.memory, self.rows, self.blocks = Memory(1 << 22), rows, blocks
        self.set_words = search_impl.words_of_sets(blocks)
        self.sets = self.memory.put(np.full(rows * self.set_words, -1, dtype=np.int64))
        self.behind = self.memory.put(np.full(64, 77, dtype=np.int64))
        self.epochs = self.memory.put(np.zeros(rows * blocks, dtype=np.int32))
        self.rounds: list[int] = []

    def draw(self, logits: np.ndarray, draws: list[list[float]], uniform: list[float]) -> list[int]:
        """A token a row; adds one to `rounds` for each round of each block."""
        put, (rows, vocabulary) = self.memory.put, logits.shape
        pieces = -(-vocabulary // PIECE)
        padded = np.full((rows, pieces * PIECE), -np.inf, dtype=np.float32)
        padded[:, :vocabulary] = np.where(np.isnan(logits), -np.inf, logits)
        tokens = put(np.full(rows, -1, dtype=np.int64))
        arguments = {
            "sets": self.sets,
            "epochs": self.epochs,
            "draws": put(np.array(draws)),
            "uniform": put(np.array(uniform)),
            "logits": put(logits),
            "highest": put(padded.reshape(rows, pieces, PIECE).max(axis=2)),
            "tokens": tokens,
            "watch": put(np.zeros(16 + 8 * self.blocks, dtype=np.int32)),
            "vocabulary": vocabulary,
            "stride": vocabulary,
            "share": -(-vocabulary // (4 * self.blocks)) * 4,
            "set_words": self.set_words,
            "pieces": pieces,
            "PIECES": 256,
            "XW": 8,
        }
        launch(
            self.memory,
            (self.blocks, rows),
            arguments,
            lambda: self.rounds.append(1),
            modules=MODULES,
            name="draw_limited_kernel",
            planted=[COUNTED],
        )
        assert (self.memory.get(self.behind, (64,)) == 77).all()
        return self.memory.get(tokens, (rows,)).tolist()


def drawn(logits: np.ndarray, draws: list[list[float]], uniform: list[float], blocks: int) -> list[int]:
    """The tokens that as many blocks come to by their own shares of logits, float32 [rows, vocabulary]."""
    return Search(len(logits), blocks).draw(logits, draws, uniform)


def rounds_of(logits: np.ndarray, words: list[float], number: float) -> int:
    """How many rounds one row's search takes."""
    search = Search(1, 2)
    search.draw(logits, [words], [number])
    assert len(search.rounds) % 2 == 0, "blocks that take different rounds"
    return len(search.rounds) // 2


def expected(logits: np.ndarray, draws: list[list[float]], uniform: list[float]) -> list[int]:
    temperature, min_p, top_k, top_p = zip(*draws, strict=True)
    rows = RowParameters.build(
        temperature=temperature, top_k=[int(k) for k in top_k], top_p=top_p, min_p=min_p, device=torch.device("cpu")
    )
    return sample(torch.from_numpy(logits), torch.tensor(uniform, dtype=torch.float64), rows).tolist()


VOCABULARY = 1500
LAST = 1 - 2.0**-53
UNIFORM = (0.6, LAST)


def normal(scale: float, *, steps: int = 0) -> np.ndarray:
    """One row of logits, [1, vocabulary]; with steps, rounded to so many a unit, so that many are equal."""
    values = np.random.default_rng(int(scale * 10)).standard_normal((1, VOCABULARY)) * scale
    return (np.round(values * steps) / steps if steps else values).astype(np.float32)


def rows_of_every_kind() -> dict[str, np.ndarray]:
    dice = np.random.default_rng(0)
    near_zero = dice.choice([-1.0, 0.0, 1.0], (1, VOCABULARY)) * 2.0 ** -dice.integers(0, 149, (1, VOCABULARY))
    masked = normal(3)
    masked[:, dice.integers(1, VOCABULARY, 1200)] = -np.inf
    return {
        "flat": normal(0.3),
        "peaked": normal(8),
        "ties": normal(2, steps=4),
        "all equal": np.full((1, VOCABULARY), 1.25, dtype=np.float32),
        "of both signs down to the smallest numbers": near_zero.astype(np.float32),
        "float16": normal(2).astype(np.float16).astype(np.float32),
        "bfloat16": (normal(2).view(np.uint32) & 0xFFFF0000).view(np.float32),
        "far from zero": normal(0.5) + np.float32(1e4),
        "mostly masked": masked,
    }


LOGITS = rows_of_every_kind()
LIMITS = {
    "the best alone": draw_words(1.0, top_k=1),
    "a few": draw_words(0.7, top_k=7),
    "all but one": draw_words(2.0, top_k=VOCABULARY - 1),
    "the whole vocabulary": draw_words(1.0, top_k=VOCABULARY),
    "more than there are": draw_words(1.0, top_k=10**6),
    "a tiny share": draw_words(1.0, top_p=1e-300),
    "half": draw_words(1.3, top_p=0.5),
    "nearly everything": draw_words(1.0, top_p=LAST),
    "both": draw_words(0.9, top_k=40, top_p=0.9),
    "all three": draw_words(0.8, 0.02, 200, 0.95),
    "only what is as likely as the best": draw_words(1.0, 1.0, 0, 0.9),
}


@pytest.mark.parametrize("turn", [0, slow(1)])
@pytest.mark.parametrize(("kind", "blocks"), [*((kind, 3) for kind in LOGITS), ("ties", 1), ("flat", 1)])
def test_tokens_are_those_of_the_sampler(kind: str, blocks: int, turn: int) -> None:
    """All limits side by side, one row each, of the same logits; each pair of a kind, a limit and a number."""
    draws = list(LIMITS.values())
    first = turn + list(LOGITS).index(kind) + blocks // 2
    uniform = [UNIFORM[(first + number) % 2] for number in range(len(draws))]
    logits = LOGITS[kind].repeat(len(draws), axis=0)
    assert drawn(logits, draws, uniform, blocks) == expected(logits, draws, uniform)


def test_rows_do_not_disturb_each_other_nor_does_one_launch_the_next() -> None:
    dice = np.random.default_rng(1)
    logits = np.concatenate([normal(scale) for scale in (0.5, 1, 2, 4, 5)])
    draws = [LIMITS[name] for name in ("a few", "both", "the whole vocabulary", "half", "all three")]
    search = Search(5, 3)
    for number in range(4):
        uniform = dice.uniform(size=5).tolist()
        rolled = np.roll(logits, number, axis=0)
        together = search.draw(rolled, draws, uniform)
        assert together == expected(rolled, draws, uniform)
        alone = [drawn(rolled[i : i + 1], draws[i : i + 1], uniform[i : i + 1], 2 + number)[0] for i in range(5)]
        assert together == alone


def test_equals_at_the_limit_are_kept_in_the_order_of_their_ids() -> None:
    logits = np.zeros((1, VOCABULARY), dtype=np.float32)
    logits[0, 700] = 1.0
    seen: list[set[int]] = []
    for limits in (draw_words(1.0, top_k=4), draw_words(1.0, top_p=(np.e + 2.5) / (np.e + VOCABULARY - 1))):
        draws, uniform = [limits] * 16, [i / 16 for i in range(16)]
        seen.append(set(drawn(logits.repeat(16, axis=0), draws, uniform, 3)))
    assert seen == [{700, 0, 1, 2}] * 2


def test_logits_that_are_no_numbers_end_the_search() -> None:
    logits = np.full((1, VOCABULARY), np.nan, dtype=np.float32)
    assert 0 <= drawn(logits, [LIMITS["all three"]], [0.5], 3)[0] < VOCABULARY


def test_a_search_takes_few_rounds() -> None:
    """A round is an exchange between blocks, so their number is what limits cost."""
    most = {"peaked": 6, "flat": 14, "ties": 8, "all equal": 1}
    for kind, rounds in most.items():
        for words in LIMITS.values():
            assert rounds_of(LOGITS[kind], words, 0.6) <= rounds, kind


def test_a_logit_over_the_temperature_is_rounded_as_a_division_rounds_it() -> None:
    """Where rounding turns between two float32, above all: quotients next to numbers of 25 bits."""
    dice = np.random.default_rng(5)
    over = function(rounds_impl.over.fn, {"gl": SimpleNamespace(float32=np.float32, float64=np.float64)}, ())
    temperatures = dice.integers(1 << 23, 1 << 24, 400_000).astype(np.float32)
    halfway = dice.integers(1 << 24, 1 << 25, 400_000) | 1
    near = (halfway * temperatures.astype(np.float64)).astype(np.float32)
    near = np.nextafter(near, dice.choice([-np.inf, 0, np.inf], 400_000).astype(np.float32) + near * 0)
    bits = dice.integers(0, 1 << 32, 400_000, dtype=np.uint32).view(np.float32)
    for logits in (near, -near * np.float32(2.0**-40), bits):
        with np.errstate(all="ignore"):
            expected = logits / temperatures
            found = over(wrapped(logits), 1.0 / temperatures.astype(np.float64))
        assert np.array_equal(found, expected, equal_nan=True)
