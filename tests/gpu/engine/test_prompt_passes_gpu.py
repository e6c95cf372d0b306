"""Prompts alone, packed, in chunks, with and without graphs: bitwise the same logits, and tokens as alone."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from onewave import LLM, SamplingParams
from onewave.engine.prompt.passes import MAX_SEQUENCES, PromptChunk

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 7, 33, 64, 65, 200, 511, 700, 1500)


@pytest.fixture(scope="module", params=["graph", "auto"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Decoding by graphs, whose matrices are plain, and by the wave, whose stream is unpacked for prompts."""
    with LLM("llama-3.2-1b", load_format="dummy", decode=request.param, max_model_len=4096, max_num_seqs=16) as made:
        yield made


def run(llm: LLM, *chunks: PromptChunk) -> Tensor:
    """A pass in slots that have blocks of their own."""
    places = -(-llm.max_model_len // llm.runner.block_size)
    own = [(chunk.slot, place, chunk.slot * places + place) for chunk in chunks for place in range(places)]
    llm.runner.set_blocks(own)
    return llm.runner.prefill(chunks).clone()


@pytest.mark.parametrize("seed", range(3))
def test_logits_are_bitwise_the_same_alone_packed_and_in_chunks(llm: LLM, seed: int) -> None:
    draw = random.Random(seed)
    prompts = [[draw.randrange(llm.config.vocab_size) for _ in range(length)] for length in LENGTHS]
    # A bucket's first pass is eager, its second is captured.
    first, again, graph = ([run(llm, PromptChunk(slot, each)) for each in prompts] for slot in (0, 3, 5))
    packed = run(llm, *(PromptChunk(slot, each) for slot, each in enumerate(prompts[:8])))
    for index, each in enumerate(prompts):
        assert torch.isfinite(first[index]).all()
        assert torch.equal(first[index], again[index])
        assert torch.equal(first[index], graph[index])
        if index < len(packed):
            assert torch.equal(first[index], packed[index : index + 1]), len(each)
        done, last = 0, first[index]
        while done < len(each):
            size = draw.choice((1, 3, 64, 100, 257, 600))
            # Beside a neighbour that changes.
            neighbour = PromptChunk(9, [7] * draw.randrange(1, 90))
            last = run(llm, neighbour, PromptChunk(6, each[done : done + size], done))[1:]
            done += size
        assert torch.equal(first[index], last), len(each)


@pytest.mark.parametrize("own", [1, 32, 61])
def test_a_short_chunk_alone_behind_a_long_prefix_has_the_bits_of_the_whole_prompt(llm: LLM, own: int) -> None:
    draw = random.Random(own)
    ids = [draw.randrange(llm.config.vocab_size) for _ in range(2100)]
    whole = run(llm, PromptChunk(0, ids[:2000]), PromptChunk(1, [5]))[:1]
    beside = run(llm, PromptChunk(0, ids[2000 : 2000 + own], 2000), PromptChunk(1, [5]))[:1]
    assert torch.isfinite(whole).all()
    for _ in range(3):  # eager, captured, replayed
        assert torch.equal(run(llm, PromptChunk(0, ids[2000 : 2000 + own], 2000)), beside)


def test_graphs_are_captured_anew_once_they_were_forgotten(llm: LLM) -> None:
    """PyTorch refuses a memory pool whose graphs are gone."""
    prompts = [[5] * 11, [6] * 90]
    right = [run(llm, PromptChunk(0, each)) for each in prompts]
    for _ in range(2):
        llm.runner._passes.clear()
        found = [[run(llm, PromptChunk(0, each)) for each in prompts] for _ in range(3)]
        assert all(torch.equal(one, each) for turn in found for one, each in zip(turn, right, strict=True))


def test_requests_together_give_the_tokens_that_each_gives_alone(llm: LLM) -> None:
    draw = random.Random(1)
    lengths = [draw.choice((1, 5, 60, 300, 2100)) for _ in range(MAX_SEQUENCES + 5)]
    prompts = [[draw.randrange(llm.config.vocab_size) for _ in range(length)] for length in lengths]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    together = llm.generate(prompts, greedy)
    for prompt, out in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, greedy)[0]
        assert out.outputs[0].token_ids == alone.outputs[0].token_ids


def test_samples_of_one_request_and_its_log_probabilities(llm: LLM) -> None:
    prompt = list(range(5, 2605))
    params = SamplingParams(n=3, temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    out = llm.generate(prompt, params)[0]
    plain = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False))[0]
    assert [each.token_ids for each in out.outputs] == [plain.outputs[0].token_ids] * 3
    assert len(out.prompt_logprobs) == len(prompt)


def test_memory_given_back_leaves_no_graph_that_reads_it(llm: LLM) -> None:
    before = [run(llm, PromptChunk(0, list(range(40)))) for _ in range(3)]
    llm.runner._release()
    assert all(torch.equal(run(llm, PromptChunk(0, list(range(40)))), before[0]) for _ in range(3))
