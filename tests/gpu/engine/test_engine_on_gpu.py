"""Sampling and the engine's loop on a CUDA GPU: the same tokens as on the CPU, whatever runs beside them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.models.dummy import ON_GPU, write_config
from kit.processes import python
from onewave import LLM, SamplingParams
from onewave.base.errors import WaveStalled
from onewave.bench.memory.record import record_serving
from onewave.memory.tensors import pool_of
from onewave.ops.sampling import RowParameters, greedy, op, penalise, sample, token_logprobs, uniforms

search_impl = pytest.importorskip("onewave.ops.sampling.search_impl")
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROWS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.05),
    (1.3, 40, 1.0, 0.0),
    (0.9, 0, 0.9, 0.0),
    (1.0, 200, 0.8, 0.02),
]


def parameters(device: torch.device, rows: list[tuple[float, int, float, float]]) -> RowParameters:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return RowParameters.build(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=device)


@pytest.mark.parametrize("vocab", [61, 49152, 128256])
def test_tokens_are_those_of_the_cpu_in_any_batch(vocab: int) -> None:
    for seed in range(10):
        logits = torch.randn(len(ROWS), vocab, generator=torch.Generator().manual_seed(seed)) * 3
        if seed % 2:
            logits = logits.bfloat16().float()  # many ties
        uniform = torch.from_numpy(uniforms([seed], [0], len(ROWS))[0])
        expected = sample(logits, uniform, parameters(torch.device("cpu"), ROWS)).tolist()
        found = sample(logits.to(CUDA), uniform.to(CUDA), parameters(CUDA, ROWS)).tolist()
        assert found == expected
        for i, row in enumerate(ROWS):
            one = sample(logits[i : i + 1].to(CUDA), uniform[i : i + 1].to(CUDA), parameters(CUDA, [row]))
            assert one.tolist() == expected[i : i + 1]


def kinds_of_logits(rows: int, vocab: int, dice: torch.Generator) -> dict[str, torch.Tensor]:
    normal = torch.randn(rows, vocab, generator=dice, device=CUDA)
    masked = (normal * 3).masked_fill(torch.rand(rows, vocab, generator=dice, device=CUDA) < 0.999, -torch.inf)
    masked[:, 0] = 0.5
    return {
        "flat": normal * 0.2,
        "peaked": normal * 6,
        "ties": (normal * 8).round() / 4,
        "all equal": torch.full_like(normal, 1.25),
        "hidden": masked,
    }


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("vocab", [131, 5003, 128256])
def test_rows_with_limits_are_drawn_as_a_sort_would(rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator(CUDA).manual_seed(rows + vocab)
    limits = [
        (0.8, 0, 0.9, 0.0),
        (1.0, 40, 1.0, 0.0),
        (1.3, 50, 0.95, 0.01),
        (0.3, 1, 1.0, 0.0),
        (2.0, 10**6, 0.5, 0.0),
    ]
    given = parameters(CUDA, [limits[i % len(limits)] for i in range(rows)])
    for turn in range(12):
        for kind, logits in kinds_of_logits(rows, vocab, dice).items():
            uniform = torch.rand(rows, generator=dice, device=CUDA, dtype=torch.float64)
            expected = sample(logits, uniform, given, search=False)
            with monkeypatch.context() as patch:
                patch.setattr(op, "_draw_sorted", lambda *_: pytest.fail("sorted"))
                assert torch.equal(sample(logits, uniform, given), expected), (turn, kind)
    nothing = torch.full((rows, vocab), torch.nan, device=CUDA)
    tokens = sample(nothing, torch.full((rows,), 0.5, dtype=torch.float64, device=CUDA), given)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    # And on another stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(sample(logits, uniform, given), expected)


def test_a_draw_that_has_given_up_is_named_and_the_next_is_whole() -> None:
    search_impl._states.clear()  # an engine's are made in inference mode
    logits, uniform = torch.randn(3, 4099, device=CUDA), torch.full((3,), 0.5, dtype=torch.float64, device=CUDA)
    given = parameters(CUDA, [(1.0, 40, 0.9, 0.0)] * 3)
    expected = sample(logits, uniform, given, search=False)
    assert torch.equal(sample(logits, uniform, given), expected)
    torch.cuda.synchronize()
    for state in search_impl._states.values():
        state.stalled.fill_(1)
    with pytest.raises(WaveStalled, match="draw again"):
        sample(logits, uniform, given)
    assert torch.equal(sample(logits, uniform, given), expected)
    search_impl._states.clear()


def test_greedy_takes_the_lowest_id_of_equals_on_the_gpu() -> None:
    for vocab in (1000, 49152, 128256):
        logits = torch.zeros(4, vocab, device=CUDA)
        logits[1, vocab // 2 :] = 1
        logits[2, vocab - 1] = 1
        logits[3, ::7] = 1
        logits[3, 0] = 0
        assert greedy(logits).tolist() == [0, vocab // 2, vocab - 1, 7]


def test_penalties_and_logprobs_agree_with_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5000, generator=generator) * 3
    in_prompt = torch.rand(3, 5000, generator=generator) < 0.1
    counts = torch.randint(0, 3, (3, 5000), generator=generator, dtype=torch.int32)
    values = {name: torch.tensor([1.0, 1.5, 0.7]) for name in ("repetition", "presence", "frequency")}
    expected = penalise(logits, in_prompt, counts, **values)
    on_gpu = {name: value.to(CUDA) for name, value in values.items()}
    torch.testing.assert_close(penalise(logits.to(CUDA), in_prompt.to(CUDA), counts.to(CUDA), **on_gpu).cpu(), expected)
    tokens = torch.tensor([0, 4999, 77])
    for ours, theirs in zip(
        token_logprobs(logits.to(CUDA), tokens.to(CUDA), 5), token_logprobs(logits, tokens, 5), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration alone; the weights are made up."""
    return write_config(tmp_path_factory.mktemp("dummy"), **ON_GPU, num_hidden_layers=4, eos_token_id=7)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, device="cuda", load_format="dummy", max_num_seqs=4) as model:
        yield model


PROMPT_IDS = [[1, 2, 3], [4] * 50, [5, 6], [8, 9, 10, 11], [12], [13] * 7]
MIXED = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(seed=1, max_tokens=40, top_p=0.9),
    SamplingParams(seed=2, max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(seed=3, max_tokens=25, min_tokens=5, logit_bias={7: 8.0}),
    SamplingParams(seed=4, max_tokens=35, top_k=20, min_p=0.01, stop_token_ids=[100, 200, 300]),
    SamplingParams(seed=5, max_tokens=1),
]


def token_ids(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_running_ahead_changes_no_token(llm: LLM) -> None:
    assert llm.runner.run_ahead == 1
    ahead = token_ids(llm, PROMPT_IDS, MIXED)
    llm.runner.run_ahead = 0
    try:
        assert token_ids(llm, PROMPT_IDS, MIXED) == ahead
    finally:
        llm.runner.run_ahead = 1


def test_a_request_gives_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    together = token_ids(llm, PROMPT_IDS, MIXED)
    alone = [token_ids(llm, [prompt], [params])[0] for prompt, params in zip(PROMPT_IDS, MIXED, strict=True)]
    assert alone == together


def test_graphs_change_no_token(directory: Path) -> None:
    def produced(decode: str) -> list[list[int]]:
        with LLM(directory, device="cuda", load_format="dummy", max_num_seqs=4, decode=decode) as llm:
            assert llm.runner.decode_path == decode
            return token_ids(llm, PROMPT_IDS, MIXED)

    assert produced("eager") == produced("graph")


def test_streams_closed_early_leave_the_engine_usable(llm: LLM) -> None:
    expected = token_ids(llm, PROMPT_IDS, MIXED)
    for _ in range(6):
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        next(stream)
        stream.close()
    assert token_ids(llm, PROMPT_IDS, MIXED) == expected


@pytest.mark.parametrize("decode", ["graph", "auto"])
def test_logits_that_are_not_finite_end_their_own_request(decode: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with LLM("llama-3.2-1b", load_format="dummy", decode=decode, max_model_len=512, max_num_seqs=4) as llm:
        right = llm.generate([5, 6, 7], greedy)[0].outputs[0].token_ids
        step = llm.runner.decode

        def overflowing(rows):
            logits = step(rows)
            return torch.where((rows.positions == 9)[:, None] & (rows.slots == 1)[:, None], torch.nan, logits)

        llm.runner.decode = overflowing
        with pytest.raises(Exception, match="logits that are not finite"):
            llm.generate([[5, 6, 7], [8, 9]], greedy)
        llm.runner.decode = step
        assert llm.generate([5, 6, 7], greedy)[0].outputs[0].token_ids == right


def device_allocations() -> dict[str, int]:
    """Calls for memory so far: PyTorch's of the GPU and of pinned memory, and our pools'."""
    torch.cuda.synchronize()
    pools = {f"pinned={pinned}": pool_of(CUDA, pinned=pinned).allocator.statistics() for pinned in (False, True)}
    return {
        "device": torch.cuda.memory_stats()["num_device_alloc"],
        "pinned": torch.cuda.host_memory_stats()["num_host_alloc"],
        **{name: found.num_reserves for name, found in pools.items()},
    }


@pytest.mark.parametrize("decode", ["eager", "graph", "wave"])
def test_decode_in_a_steady_state_allocates_no_memory(decode: str) -> None:
    if decode == "wave" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the wave needs compute capability 9.0")
    params = [replace(each, max_tokens=200, ignore_eos=True) for each in MIXED[:4]]
    with LLM(
        "llama-3.2-1b", device="cuda", load_format="dummy", max_num_seqs=4, max_model_len=512, decode=decode
    ) as llm:
        for _ in range(3):  # the second one captures the prompts' graph
            token_ids(llm, [[1, 2, 3]] * 4, params)
        before = device_allocations()
        token_ids(llm, [[1, 2, 3]] * 4, params)
        assert device_allocations() == before
        assert pool_of(CUDA, pinned=True).allocator.statistics().num_allocations > 0


def test_a_serving_run_s_blocks_are_recorded_and_replayed_on_the_gpu(llm: LLM, tmp_path: Path) -> None:
    trace = record_serving(llm, num_requests=6)
    assert trace.num_allocations > 10
    assert trace.peak_bytes >= 512
    trace.write(tmp_path / "trace.json")
    # In a process without a model, of which PyTorch's allocator would serve what it left free.
    command = ("-m", "onewave", "bench", "memory", "--trace", str(tmp_path / "trace.json"), "--device", "cuda")
    ours, torchs, driver, *_ = json.loads(python(*command, "--reps", "1", "--json"))["results"]
    assert [each["allocator"] for each in (ours, torchs, driver)] == ["onewave", "torch caching", "cudaMalloc"]
    assert all((each["reserved_bytes"] or 0) >= trace.peak_bytes for each in (ours, torchs))
