"""ops.sampling against its reference, row by row, and against the distribution it promises."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from kit.processes import python
from onewave.base.errors import ShapeError
from onewave.engine.params import SamplingParams
from onewave.engine.sampler import Sampler, SamplerRow
from onewave.models.batch import Batch
from onewave.ops.sampling import (
    RowParameters,
    greedy,
    op,
    penalise,
    reference,
    rows_without_numbers,
    sample,
    stream_key,
    token_logprobs,
    uniforms,
)

CPU = torch.device("cpu")
Row = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
CASES: list[Row] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.3, 1, 1.0, 0.0),
    (1.3, 7, 1.0, 0.0),
    (0.9, -1, 0.9, 0.0),
    (2.0, 40, 0.8, 0.02),
    (1.0, 10**6, 0.5, 0.0),
    (5.0, 0, 0.999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 0.95, 1.0),
]


def parameters(rows: list[Row]) -> RowParameters:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return RowParameters.build(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=CPU)


def random_logits(rows: int, vocab: int, seed: int, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if ties else logits


def reference_token(logits: torch.Tensor, uniform: float, row: Row) -> int:
    temperature, top_k, top_p, min_p = row
    # The operator divides in float32; the reference takes the quotient as it is.
    if temperature == 0:
        return reference.sample(logits.double().numpy(), uniform, temperature=0.0)
    scaled = (logits / torch.tensor(temperature)).double().numpy()
    return reference.sample(scaled, uniform, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize("vocab", [1, 2, 17, 1000, 5001])
@pytest.mark.parametrize("ties", [False, True])
def test_every_row_equals_the_reference_in_a_mixed_batch(vocab: int, ties: bool) -> None:
    for seed in range(5):
        logits = random_logits(len(CASES), vocab, seed, ties=ties)
        uniform = uniforms([seed], [0], len(CASES))[0]
        tokens = sample(logits, torch.from_numpy(uniform), parameters(CASES))
        expected = [reference_token(logits[i], uniform[i], row) for i, row in enumerate(CASES)]
        assert tokens.tolist() == expected


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(CASES), min_size=1, max_size=6), st.integers(1, 400), st.integers(0, 10**6), st.booleans()
)
def test_a_row_is_the_same_alone_and_in_any_batch(rows: list[Row], vocab: int, seed: int, ties: bool) -> None:
    logits = random_logits(len(rows), vocab, seed, ties=ties)
    uniform = torch.from_numpy(uniforms([seed] * len(rows), range(len(rows)), 1)[:, 0])
    together = sample(logits, uniform, parameters(rows))
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], uniform[i : i + 1], parameters([row])).tolist() == [int(together[i])]


@settings(max_examples=80)
@given(
    st.integers(1, 3000),
    st.sampled_from([0, 1, 5, 300, 2000, 10**9]),
    st.sampled_from([1.0, 0.99, 0.9, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    st.sampled_from([0.2, 1.0, 8.0]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_sorting_only_the_candidates_changes_nothing(
    vocab: int, top_k: int, top_p: float, min_p: float, temperature: float, seed: int, ties: bool
) -> None:
    given = parameters([(temperature, top_k, top_p, min_p)])
    if given.ordered is None:
        return
    logits = random_logits(1, vocab, seed, ties=ties)
    uniform = torch.from_numpy(uniforms([seed], [0], 1)[:, 0])
    everything = op._draw_sorted(logits / temperature, uniform, given.ordered)
    assert sample(logits, uniform, given).tolist() == everything.tolist()


@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.5, 8, 1.0, 0.0), (1.0, 0, 1.0, 0.1)])
def test_draws_follow_the_distribution(row: Row) -> None:
    temperature, top_k, top_p, min_p = row
    draws = 6_000
    logits = random_logits(1, 30, 7)[0]
    kept = reference.allowed(logits.double().numpy(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = torch.softmax(logits[kept].double() / temperature, 0).numpy()
    uniform = torch.from_numpy(uniforms([stream_key(1)], [0], draws)[0])
    tokens = sample(logits.expand(draws, -1).contiguous(), uniform, parameters([row] * draws)).numpy()
    counts = np.array([(tokens == token).sum() for token in kept])
    assert counts.sum() == draws  # nothing that was cut off is ever drawn
    common = probabilities * draws >= 5
    expected, observed = probabilities[common] * draws, counts[common]
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    degrees = int(common.sum()) - 1
    # 99.9 % quantile by Wilson and Hilferty's approximation.
    assert chi_square < degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def test_uniform_numbers_are_uniform_and_independent_of_neighbours_and_blocks() -> None:
    keys = [stream_key(seed, 0) for seed in range(200)]
    block = uniforms(keys, [0] * 200, 200)
    assert block.min() >= 0
    assert block.max() < 1
    counts = np.histogram(block, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 148.2  # 99.9 % quantile at 99 degrees of freedom
    assert abs(np.corrcoef(block[:, :-1].ravel(), block[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(block[:-1].ravel(), block[1:].ravel())[0, 1]) < 0.02
    assert np.array_equal(block[3:5, 17:40], uniforms(keys[3:5], [17, 17], 23))


def test_uniform_numbers_are_pinned_down_forever() -> None:
    assert stream_key(0, 0) == 0x3B9D11EB55856BAF
    np.testing.assert_allclose(uniforms([stream_key(0, 0)], [0], 3)[0], [0.97712723, 0.52363806, 0.9501609], atol=1e-8)
    assert stream_key(1, 2) != stream_key(2, 1)
    assert stream_key(2**64 - 1) < 2**64


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 500] = logits[1, 700] = 1
    logits[2, 999] = 1
    assert greedy(logits).tolist() == [0, 500, 999]
    assert sample(logits, torch.zeros(3).double(), parameters([(1.0, 1, 1.0, 0.0)] * 3)).tolist() == [0, 500, 999]


def test_min_p_is_told_from_what_is_almost_as_likely() -> None:
    """Probabilities that float32 cannot tell apart: of 1 and 1 - 2e-8 only the first is as likely as the best."""
    logits = torch.tensor([[0.0, 2e-8, 0.0, -3e-8]])
    for row in ((1.0, 4, 1.0, 1.0), (1.0, 0, 0.9, 1.0), (1.0, 0, 1.0, 1.0)):
        for number in (0.0, 0.5, 1 - 2.0**-53):
            drawn = sample(logits, torch.tensor([number], dtype=torch.float64), parameters([row]))
            assert drawn.tolist() == [reference_token(logits[0], number, row)] == [1]


@pytest.mark.parametrize("worst", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_row_without_a_finite_best_logit_gives_a_token_and_disturbs_no_other(worst: float, everywhere: bool) -> None:
    limits = [(1.0, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.7, 2, 1.0, 0.0), (1.0, 3, 0.9, 0.1), (1.0, 0, 1.0, 0.1)]
    for number in (0.0, 0.5, 1 - 2.0**-53):
        for row in limits:
            logits = random_logits(3, 6, 4)
            uniform = torch.full((3,), number, dtype=torch.float64)
            expected = sample(logits, uniform, parameters([row] * 3)).tolist()
            logits[1, slice(None) if everywhere else slice(3, 4)] = worst
            ordered = parameters([row] * 3).ordered
            found = [sample(logits, uniform, parameters([row] * 3))]
            if ordered is not None:  # as on a GPU
                found.append(op._draw_sorted(logits / row[0], uniform, ordered))
            for tokens in found:
                first, some, last = tokens.tolist()
                assert [first, last] == [expected[0], expected[2]]
                assert 0 <= some < 6


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((64, 10), -torch.inf)
    logits[:, 3] = logits[:, 8] = 0
    uniform = torch.from_numpy(uniforms([5], [0], 64)[0])
    for row in ((1.0, 0, 1.0, 0.0), (1.0, 0, 0.99, 0.0), (1.0, 9, 1.0, 0.0)):
        assert set(sample(logits, uniform, parameters([row] * 64)).tolist()) == {3, 8}


def test_the_ends_of_the_unit_interval_give_the_first_and_last_token() -> None:
    logits = torch.zeros(2, 5)
    uniform = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for row in ((1.0, 0, 1.0, 0.0), (1.0, 0, 0.9999, 0.0), (1.0, 5, 1.0, 0.0)):
        assert sample(logits, uniform, parameters([row] * 2)).tolist() == [0, 4]


@settings(max_examples=30)
@given(st.data())
def test_penalties_equal_the_reference(data: st.DataObject) -> None:
    vocab = 23
    ids = st.lists(st.integers(0, vocab - 1), max_size=12)
    rows = data.draw(st.lists(st.tuples(ids, ids), min_size=1, max_size=4))
    values = data.draw(
        st.lists(
            st.tuples(st.sampled_from([1.0, 0.5, 1.3]), st.sampled_from([0.0, -1.5, 0.7]), st.sampled_from([0.0, 0.3])),
            min_size=len(rows),
            max_size=len(rows),
        )
    )
    logits = random_logits(len(rows), vocab, 11)
    in_prompt = torch.zeros(len(rows), vocab, dtype=torch.bool)
    counts = torch.zeros(len(rows), vocab, dtype=torch.int32)
    for i, (prompt, output) in enumerate(rows):
        in_prompt[i, prompt] = True
        for token in output:
            counts[i, token] += 1
    repetition, presence, frequency = (torch.tensor(column) for column in zip(*values, strict=True))
    result = penalise(logits, in_prompt, counts, repetition=repetition, presence=presence, frequency=frequency)
    for i, (prompt, output) in enumerate(rows):
        rep, pres, freq = values[i]
        expected = reference.penalise(
            logits[i].double().numpy(), prompt, output, repetition=rep, presence=pres, frequency=freq
        )
        np.testing.assert_allclose(result[i].numpy(), expected, rtol=1e-6, atol=1e-6)


def test_a_penalty_makes_no_logit_infinite_and_leaves_those_that_are() -> None:
    logits = torch.tensor([[1e30, -1e30, 3.0, float("-inf")]] * 2)
    seen, none = torch.ones(2, 4, dtype=torch.bool), torch.zeros(2)
    repetition = torch.tensor([1e-30, 1e30])
    counts = torch.zeros(2, 4, dtype=torch.int32)
    result = penalise(logits, seen, counts, repetition=repetition, presence=none, frequency=none)
    assert result[0, :3].tolist() == pytest.approx([1e30, -1.0, 1e30])
    assert result[1, :3].tolist() == pytest.approx([1.0, -1e30, 3e-30])
    assert result[:, 3].tolist() == [float("-inf")] * 2
    for row, penalty in zip(result, repetition.tolist(), strict=True):
        expected = reference.penalise(logits[0].double().numpy(), [0, 1, 2, 3], [], repetition=penalty)
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-6)


def test_logprobs_equal_the_reference() -> None:
    logits = random_logits(4, 50, 3)
    tokens = torch.tensor([0, 49, 7, 7])
    found = token_logprobs(logits, tokens, 5)
    for i, token in enumerate(tokens.tolist()):
        expected = reference.logprobs(logits[i].double().numpy())
        order = np.argsort(-expected)
        np.testing.assert_allclose(float(found.sampled[i]), expected[token], rtol=1e-5)
        assert int(found.rank[i]) == int(np.flatnonzero(order == token)[0]) + 1
        assert found.top_ids[i].tolist() == order[:5].tolist()
        np.testing.assert_allclose(found.top[i].numpy(), expected[order[:5]], rtol=1e-5)


def test_equal_logprobs_are_in_the_order_of_their_ids_however_many_are_asked_for() -> None:
    logits = torch.randint(0, 40, (3, 3000), generator=torch.Generator().manual_seed(0)).float() / 2
    logits[0, ::2] = 0.0
    logits[0, 1::2] = -0.0
    logits[1, 5:] = -torch.inf
    logits[2] = -torch.inf
    logits[2, [7, 2999]] = torch.tensor([4.0, -300.0])
    tokens = torch.zeros(3, dtype=torch.int64)
    expected = np.argsort(-logits.numpy(), axis=1, kind="stable")
    logprobs = torch.log_softmax(logits, dim=1)
    for k in (1, 2, 17, 2999, 3000, 5000):
        found = token_logprobs(logits, tokens, k)
        assert np.array_equal(found.top_ids.numpy(), expected[:, :k])
        assert torch.equal(found.top, logprobs.gather(1, found.top_ids))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="sample: logits"):
        sample(torch.zeros(2, 5), torch.zeros(2).double(), parameters([CASES[1]]))
    with pytest.raises(ShapeError, match="vocabulary"):
        sample(torch.zeros(1, 2**18 + 1), torch.zeros(1).double(), parameters([CASES[1]]))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the threads of a process")
def test_sampling_on_a_cpu_begins_no_threads() -> None:
    """PyTorch's operators share one row among threads, and wait for all of them wherever other processes run."""
    code = """
import numpy, os, torch
from onewave.engine.params import SamplingParams
from onewave.engine.sampler import Sampler, SamplerRow
torch.set_num_threads(2)
before = len(os.listdir("/proc/self/task"))
sampler = Sampler(num_slots=4, vocab_size=30_000, device=torch.device("cpu"))
logits = torch.from_numpy(numpy.zeros((4, 30_000), numpy.float32))
for more in ({"temperature": 0}, {}, {"top_p": 0.9, "top_k": 50, "min_p": 0.01}):
    params = SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.2, min_tokens=3, logprobs=2, **more)
    for slot in range(4):
        sampler.begin(slot, [1, 2], params)
    plan = sampler.plan([SamplerRow(slot, params, 0, 0, (5,)) for slot in range(4)])
    for _ in range(2):
        plan(logits)
print(len(os.listdir("/proc/self/task")) - before)
torch.zeros(100_000).cos()
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert python("-c", code).split() == ["0", "1"]


def test_what_rows_ask_for_is_sent_to_a_device_without_waiting_for_what_that_runs() -> None:
    meta, waits = torch.device("meta"), list[bool]()

    class Sent(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = kwargs or {}
            if func is torch.Tensor.to or (func is torch.tensor and named.get("device") is not None):
                waits.append(not named.get("non_blocking"))
            return func(*args, **named)

    sampler = Sampler(num_slots=4, vocab_size=30, device=meta)
    with Sent():
        for slot, more in enumerate(({"temperature": 0}, {}, {"top_p": 0.9}, {"repetition_penalty": 1.2})):
            params = SamplingParams(logit_bias={3: 1.0}, min_tokens=3, **more)  # type: ignore[arg-type]
            sampler.begin(slot, [1, 2], params, [3])
            sampler.plan([SamplerRow(each, params, 0, 0, (5,)) for each in range(slot, 4)])
        Batch.prefill([(0, [1, 2], 0)], meta)
    assert len(waits) > 10
    assert not any(waits)


def test_parameters_of_rows_are_sent_once_for_batches_that_ask_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onewave.engine.sampler._MAX_KEPT", 2)
    sampler = Sampler(num_slots=4, vocab_size=30, device=CPU)

    def sent(*temperatures: float) -> RowParameters | None:
        return sampler.row_parameters(
            [SamplingParams(temperature=each, seed=len(temperatures)) for each in temperatures]
        )

    first = sent(0.5, 0.0)
    assert sent(0.5, 0.0) is first is not None
    other = sent(0.0, 0.5)
    assert other is not first
    assert [row is None for row in other.host] == [True, False]
    assert sent(0.0, 0.0) is None
    assert sent(0.5, 0.0) is not first  # no more are kept


def test_a_compiler_that_watches_sees_the_operators_of_the_same_tokens() -> None:
    rows = [CASES[2], CASES[7], CASES[0]]
    given, logits = parameters(rows), random_logits(3, 200, 5)
    uniform = torch.from_numpy(uniforms([9], [0], 3)[0])
    watched = torch.compile(lambda some: sample(some, uniform, given), backend="eager")
    assert watched(logits).tolist() == sample(logits, uniform, given).tolist()


@pytest.mark.parametrize("rows", [5, 100])
def test_rows_without_numbers_are_found_among_few_and_many(rows: int) -> None:
    highest = torch.randn(rows, 4)
    found = memoryview(highest.numpy())
    assert rows_without_numbers(found) == []
    highest[0, 1:], highest[3] = -torch.inf, torch.finfo(torch.float32).max  # a part of a vocabulary that is ruled out
    assert rows_without_numbers(found) == []
    highest[1, 3], highest[2, 0], highest[4] = torch.nan, torch.inf, -torch.inf
    assert rows_without_numbers(found) == [1, 2, 4]
