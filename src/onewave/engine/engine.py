"""The hot loop: plan, launch, read, again.

A request's life:

1. `add` queues its samples (n of them; each is scheduled on its own).
2. `step` asks the scheduler what comes next (scheduler/scheduler.py: slots, KV blocks, cached prefixes, preemption). A
   prompt pass runs prompts together, long ones in chunks with decode steps between them; where a prompt ends, the first
   token is sampled.
3. A decode step runs all rows together. Sampled tokens go straight back in as the next step's input: token ids and
   positions live on the device and are rebuilt only when the set of rows changes (rows.py).
4. The host reads a pass's or a step's tokens `runner.run_ahead` steps later. With 1 it launches the next step first and
   reads while the device works; a row that turns out to have ended then has a surplus token, which is thrown away.
5. The sample decides whether the token ends it (`Sample.append`); its slot and blocks are free for the next one.

Nothing here knows about text, files or models: it needs a `Runner` and, for text, something that makes detokenizers.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor

from onewave.base.errors import CapacityError, OnewaveError
from onewave.engine.failures import own_copy, without_frames
from onewave.engine.grammar.compiler import Grammar
from onewave.engine.host_copies import HostLogprobs, InFlight, check_room
from onewave.engine.params import SamplingParams
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.request import Detokenizer, Ends, Reader, Request, Sample
from onewave.engine.rows import DecodeRows, NewestTokens, sample_of, sampler_row
from onewave.engine.sampler import Sampled, Sampler
from onewave.engine.scheduler.load import EngineLoad, HostTimes
from onewave.engine.scheduler.scheduler import Scheduler
from onewave.engine.scheduler.sequence import PassLimits, Scheduled, StepPlan
from onewave.memory.block_pool import BlockEvent, BlockPool, PrefixCaching
from onewave.memory.shortage import is_out_of_memory
from onewave.memory.staging import Staging, views_of
from onewave.models.batch import StepRows
from onewave.ops.sampling import rows_without_numbers, stream_key, token_logprobs

# How long Python is left to readers of first tokens: about what a server's first event takes. A device has a step to
# run meanwhile.
_FIRST_TOKENS_SECONDS = 250e-6


class Runner(Protocol):
    """Runs the model. Sequences are known by their slot.

    run_ahead: decode steps that are launched before an earlier one's tokens are read: 0 on CPU, 1 on CUDA. limits: of
    one `prefill`. num_blocks, block_size: of the KV cache.
    """

    device: torch.device
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    run_ahead: int
    limits: PassLimits
    num_blocks: int
    block_size: int

    def prefill(self, chunks: Sequence[PromptChunk], *, each: Callable[[int, Tensor], object] | None = None) -> Tensor:
        """Run chunks of prompts. Returns float32 logits [chunks, vocab] of each one's last token, valid until the next
        call. each: of one chunk alone, see Llama.forward. Raises CapacityError, with which no other sequence is
        harmed."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks, (from, to), one after the other."""
        ...

    def set_blocks(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Have a slot use a block: (slot, place among its blocks, block)."""
        ...

    def decode(self, rows: StepRows) -> Tensor:
        """Feed one token a row. Returns float32 [rows, vocab], valid until the next call."""
        ...

    def check(self) -> None:
        """Raise WaveStalled if something launched so far has stalled, as far as the host knows: once a launch has
        ended, whether it did. What it gave is void then."""
        ...


class Engine:
    """Runs requests on one runner, in the scheduler's order. One thread at a time.

    make_detokenizer: (prompt_token_ids, skip_special_tokens) -> Detokenizer, or None for no text.
    token_text: token id -> its text, for Logprob.decoded_token. eos_token_ids: what ends a sample unless ignore_eos.
    seed: where requests without a seed of their own get their random streams.
    stream: the CUDA stream that was current when the engine was made, and the weights loaded; None on a CPU.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        eos_token_ids: Sequence[int] = (),
        make_detokenizer: Callable[[Sequence[int], bool], Detokenizer] | None = None,
        token_text: Callable[[int], str] | None = None,
        seed: int = 0,
        prefixes: PrefixCaching | None = None,
    ) -> None:
        self._runner, self._prefixes = runner, prefixes or PrefixCaching()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._make_detokenizer = make_detokenizer
        # Kept: a text is asked for again at each position, and shared by all entries.
        text_of: Callable[[int], str] = token_text or (lambda token_id: "")
        self._token_text = cache(text_of)
        self._seed = seed
        self._num_requests = self._num_preempted = 0
        self._steps, self._host = Counter[int](), HostTimes()
        self._scheduler = self._new_scheduler()
        # Requests that have not ended, and ended ones that a caller still holds.
        self._live: WeakSet[Request] = WeakSet()
        self._sampler = Sampler(num_slots=runner.max_num_seqs, vocab_size=runner.vocab_size, device=runner.device)
        self._on_cuda = runner.device.type == "cuda"
        self.stream = torch.cuda.current_stream(runner.device) if self._on_cuda else None
        self._staging = Staging(runner.device) if self._on_cuda else None
        self._rows: DecodeRows | None = None
        self._newest: NewestTokens | None = None
        self._in_flight: deque[InFlight] = deque()
        # Requests that have ended, and streaming ones that have got tokens, since readers were told.
        self._changed: set[Request] = set()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_work

    @property
    def load(self) -> EngineLoad:
        """How much there is to do now. Any thread may ask."""
        plans, pool = self._scheduler, self._scheduler.pool
        used = 1 - pool.num_free / pool.num_blocks
        host = self._host.steps, self._host.seconds
        return EngineLoad(plans.num_running, plans.num_waiting, used, self._num_preempted, self._steps.copy(), *host)

    def add(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        reader: Reader | None = None,
        grammar: Grammar | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        packed: array[int] | None = None,
    ) -> Request:
        """Queue a request. Its prompt is not empty, and shorter than max_model_len; it is kept, not copied.

        priority: lower runs first. cache_salt: prefixes are shared with requests of the same one alone. packed: the
        prompt's ids in int32. Raises CapacityError for what the KV cache can never hold, and for log-probabilities that
        the host can't.
        """
        room = self._runner.max_model_len - len(prompt_token_ids)
        assert 0 < room < self._runner.max_model_len
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        if params.prompt_logprobs is not None:
            check_room((len(prompt_token_ids) - 1) * self._num_entries(params.prompt_logprobs))
        limit = self._within_cache(len(prompt_token_ids), limit, as_asked=params.max_tokens is not None)
        number = self._num_requests
        self._num_requests += 1
        # The first part keeps the streams of given seeds apart from those of the engine's own.
        base = (0, params.seed) if params.seed is not None else (1, self._seed, number)
        make = self._make_detokenizer if params.detokenize else None
        ends = frozenset((*params.stop_ids, *(() if params.ignore_eos else self._eos_token_ids)))
        request = Request(
            str(number),
            prompt,
            prompt_token_ids,
            params,
            keys=[stream_key(*base, i) for i in range(params.n)],
            ends=Ends(ends, limit, grammar),
            reader=reader,
            make_detokenizer=None if make is None else lambda: make(prompt_token_ids, params.skip_special_tokens),
        )
        self._live.add(request)
        root, packed = self._prefixes.root_key(cache_salt or ""), packed or array("i", prompt_token_ids)
        for sample in request.samples:
            sequence = Scheduled(
                sample, packed, limit, priority, root,
                group=request if params.n > 1 else None, alone=params.prompt_logprobs is not None,
            )  # fmt: skip
            self._scheduler.add(sequence)
        return request

    def _within_cache(self, num_prompt_tokens: int, limit: int, *, as_asked: bool) -> int:
        """Return how many tokens a request may generate at most, as far as the KV cache goes. as_asked: no fewer.

        Raises CapacityError for one that would never run.
        """
        room = self._scheduler.max_tokens - num_prompt_tokens
        if room < (limit if as_asked else 1):
            raise CapacityError(
                f"request of {num_prompt_tokens} prompt tokens and {limit if as_asked else 1} more",
                got=f"a KV cache of {self._scheduler.max_tokens} tokens",
                next="Shorten it, or raise kv_cache_memory_bytes.",
            )
        return min(room, limit)

    @torch.inference_mode()
    def step(self) -> bool:
        """Start what can start or else launch a step of every running row, and read what is due.

        A step that prefills does not decode; the step after it does, so that a flood of short requests can't hold up
        the running ones. Readers of first tokens are told as soon as those are there.
        A prompt, or a row that grows, that finds no memory ends its own request (`Request.failure`). If anything is
        raised here every request that has begun ends with a copy of it, because the device's state is unknown then;
        those that wait go on waiting, and the engine is ready for new ones. After an interrupt all end.
        Returns whether a step runs ahead: then the next one tells readers, when it has launched and only waits for the
        device. A reader that wakes while a step is launched would hold it up, as Python runs one thread at a time.
        """
        try:
            with torch.cuda.device(self._runner.device) if self._on_cuda else nullcontext():
                return self._step()
        except BaseException as error:
            self.abort_all(error, only_begun=isinstance(error, Exception))
            raise

    def _step(self) -> bool:
        if self._scheduler.runs_prompts_next:
            # Reading first may free more slots, and keeps every sample's tokens in order.
            self.tell_readers()
            self._read(0)
        self._host.begin()
        plan = self._scheduler.plan()
        self._num_preempted += len(plan.preempted)
        self._steps[plan.num_tokens] += 1
        if not plan.chunks:
            self._host.end("scheduler")
        # Surplus steps of a block's last owner may still be queued and write entries. They run before all that follows
        # on the same stream, and a sequence reads no entry of its own that it has not written: they are never read.
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        if plan.entries:
            self._runner.set_blocks(plan.entries)
        if plan.chunks:
            self._run_prompts(plan)
            return False
        ahead = self._runner.run_ahead if self._decode(plan) else 0
        self.tell_readers()
        self._host.end("readers")
        if self._read(ahead):
            self._tell_of_first_tokens()
        # Where it does not hold all requests end, and the pool is made anew.
        assert self.has_work or self._scheduler.pool.num_free == self._runner.num_blocks, "KV blocks without an owner"
        return ahead > 0

    def tell_readers(self) -> bool:
        """Put what has changed since the last call into requests' updates, then wake readers once each. Returns whether
        one was woken."""
        if not self._changed:
            return False
        now = time.perf_counter()
        for request in self._changed:
            request.tell_reader(now)
        wakes = {request.wake for request in self._changed if request.wake is not None}
        self._changed.clear()
        for wake in wakes:
            wake()
        return bool(wakes)

    def abort(self, request: Request, failure: BaseException | None = None) -> None:
        """Drop a request, wherever it is; its slots are free at once. Finished ones are left as they are. failure: the
        reason, where its caller did not ask for it."""
        for sample in request.samples:
            if not sample.finished:
                request.failure = failure
                sample.abort()
                self._scheduler.remove(sample)
                self._changed.add(request)
        request.note_finished()

    def abort_all(self, error: BaseException | None = None, *, only_begun: bool = False) -> None:
        """Drop every request and whatever is in flight. error: what a step raised. only_begun: requests of which the
        device has seen nothing go on waiting."""
        fresh = [each for each in self._scheduler.waiting if only_begun and each.num_cached is None]
        waiting = {cast("Sample", each.owner): each for each in fresh}
        # Not the scheduler's: where a step was interrupted amid its bookkeeping, a request may be in neither list.
        for request in [request for request in self._live if not request.finished]:
            if all(sample in waiting for sample in request.samples):
                continue
            request.failure = None if error is None else own_copy(error)
            for sample in request.samples:
                if not sample.finished:
                    sample.abort()
            request.note_finished()
            self._changed.add(request)
        self._live = WeakSet(request for request in self._live if not request.finished)
        # The cache's contents may be void: a step may have been interrupted.
        self._scheduler.pool.clear()
        self._scheduler = self._new_scheduler()
        for sample, sequence in waiting.items():
            if not sample.finished:
                self._scheduler.add(sequence)
        if self._staging is not None:
            dropped = [step.copied for step in self._in_flight if step.copied is not None]
            self._staging.clear((copied, copied.ready) for copied in dropped)
        self._in_flight.clear()
        self._rows = self._newest = None

    def listen(self, listener: Callable[[BlockEvent], object]) -> None:
        """Tell a listener what the cache stores and removes from now on."""
        self._prefixes = replace(self._prefixes, listener=listener)
        self._scheduler.pool.listener = listener

    def _new_scheduler(self) -> Scheduler:
        runner, prefixes = self._runner, self._prefixes
        pool = BlockPool(runner.num_blocks, runner.block_size, listener=prefixes.listener)
        return Scheduler(runner.max_num_seqs, pool, runner.limits, reuse=prefixes.enabled)

    def _run_prompts(self, plan: StepPlan) -> None:
        """Run one pass. The first tokens of prompts that end in it are read when the decode step behind it has been
        launched, or now where there can be none."""
        try:
            self._run_pass(plan)
        except CapacityError as error:
            # Alone each takes less, and the one that does not fit is known.
            (first, _), *others = plan.chunks
            if others:
                for sequence, count in plan.chunks:
                    if sequence.slot is not None:  # its request may have ended with another sample
                        self._run_prompts(StepPlan(chunks=((sequence, count),)))
                        self._read(0)
            else:
                self.abort(sample_of(first).request, without_frames(error))
            return
        self.tell_readers()  # of the decode step before: the pass may take long
        if self._runner.run_ahead == 0 or self._scheduler.runs_prompts_next:
            self._read(0)
            self._tell_of_first_tokens()

    def _tell_of_first_tokens(self) -> None:
        """Tell readers, and leave Python to them for a moment."""
        if self.tell_readers():
            time.sleep(_FIRST_TOKENS_SECONDS)

    def _run_pass(self, plan: StepPlan) -> None:
        """Launch a pass, and the sampling of the first tokens that it ends with."""
        chosen = plan.chunks
        chunks = [PromptChunk(s.slot_now, s.prompt[s.done : s.done + count], s.done) for s, count in chosen]
        for sequence, _ in chosen:
            sample_of(sequence).request.note_scheduled()
        first, look = chosen[0][0], None
        request = sample_of(first).request
        if first.alone:
            wanted = request.params.prompt_logprobs
            assert wanted is not None
            check_room((first.left - 1) * self._num_entries(wanted))  # others may have taken it since
            look = partial(self._find_logprobs, first, wanted)
        logits = self._runner.prefill(chunks, each=look)
        # A sample that was preempted knows its first token.
        begun = [row for row, (s, count) in enumerate(chosen) if count == s.left and not sample_of(s).token_ids]
        sequences = [chosen[row][0] for row in begun]
        sampled = self._sample_first(sequences, logits if len(begun) == len(chosen) else logits[begun])
        self._scheduler.ran(plan)
        for sequence, _ in chosen:
            sample = sample_of(sequence)
            sample.request.note_cached(sample, sequence.num_cached or 0)
            sequence.replays = bool(sample.token_ids)
        if look is not None and not first.left:
            request.prompt_logprobs = request.found_logprobs
            for sample in request.samples:
                if (scheduled := self._scheduler.find(sample)) is not None:
                    scheduled.alone = False
        if sampled is not None:
            self._newest = tuple(sequences), sampled.tokens
            self._copy(sampled, [sample_of(sequence) for sequence in sequences], first=True)

    def _sample_first(self, sequences: list[Scheduled], logits: Tensor) -> Sampled | None:
        """Launch the sampling of prompts' first tokens. logits: float32 [sequences, vocab]."""
        if not sequences:
            return None
        try:
            for sequence in sequences:
                self._sampler.begin(sequence.slot_now, sequence.prompt, sample_of(sequence).request.params)
            return self._sampler.plan([sampler_row(sequence) for sequence in sequences])(logits)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"penalties or sampling of {max(len(sequence.prompt) for sequence in sequences)} tokens",
                got=f"do not fit beside the model on {self._runner.device}",
                next="Ask for less of them, or lower max_model_len or max_num_seqs.",
            ) from error

    def _decode(self, plan: StepPlan) -> bool:
        """Launch one step of the plan's rows; False when there are none."""
        if not plan.rows:
            self._rows = self._newest = None
            return False
        rows = self._rows
        if rows is None or not rows.are(plan.rows):
            rows = self._rows = DecodeRows.build(plan.rows, self._newest, self._sampler)
        numbers = None if rows.known is None else [each.launched for each in plan.rows]
        logits = self._runner.decode(rows.next)
        self._host.end("launch")
        if rows.plan.has_masks:
            self._read(0)  # what a grammar allows follows from the token before; the device runs this step meanwhile
        sampled = rows.plan(logits)
        self._host.end("sampling")
        rows.advance(sampled.tokens)
        self._newest = rows.sequences, rows.token_ids
        self._scheduler.ran(plan)
        self._host.end("scheduler")
        self._copy(sampled, rows.samples, numbers=numbers)
        self._host.end("launch")
        self._host.steps += 1
        return True

    def _copy(
        self, sampled: Sampled, samples: list[Sample], *, first: bool = False, numbers: list[int] | None = None
    ) -> None:
        """Start moving a step's results to the host. first, numbers: InFlight's."""
        copied = None if self._staging is None else self._staging.start(sampled.parts)
        self._in_flight.append(InFlight(samples, sampled, copied, first, numbers))

    def _read(self, keep: int) -> bool:
        """Wait for launched steps, oldest first, until only `keep` are left; hand their tokens to the samples. Returns
        whether there were first ones among them."""
        any_first = False
        while len(self._in_flight) > keep:
            step = self._in_flight.popleft()
            if step.copied is not None and step.copied.ready is not None:
                step.copied.ready.synchronize()
            self._host.begin()
            self._runner.check()  # before a reader sees a token of a launch that gave up
            tokens, highest, *found = step.parts
            for row in rows_without_numbers(highest):
                self._end_without_numbers(step.samples[row])
            token_ids, logprobs = tokens.tolist(), HostLogprobs(found) if found else None
            if self._staging is not None and step.copied is not None:
                self._staging.give(step.copied)
            self._note_tokens(step, token_ids, logprobs)
            self._host.end("detokenising")
            any_first |= step.first
        return any_first

    def _end_without_numbers(self, sample: Sample) -> None:
        if not sample.finished:
            got = f"logits that are not finite, after {len(sample.token_ids)} tokens"
            next = "The model's activations overflow: use another dtype, or other weights."
            self.abort(sample.request, OnewaveError("request", got=got, next=next))

    def _note_tokens(self, step: InFlight, token_ids: list[int], logprobs: HostLogprobs | None) -> None:
        """Hand one token to each sample of a step."""
        changed, numbers = self._changed, step.numbers
        for row, (sample, token_id) in enumerate(zip(step.samples, token_ids, strict=True)):
            if sample.finish_reason is not None or (numbers is not None and numbers[row] < len(sample.token_ids)):
                continue  # ended, or was aborted, while this step ran; or is fed what it knows
            if step.first:
                sample.request.note_first_token()
            sample.append(token_id)
            if sample.grammar is not None and sample.grammar.failure is not None:
                self.abort(sample.request, sample.grammar.failure)
            if logprobs is not None and (wanted := sample.request.params.logprobs) is not None:
                try:
                    check_room(self._num_entries(wanted))
                except CapacityError as error:
                    self.abort(sample.request, without_frames(error))
                    continue
                sample.add_logprobs(*logprobs.entry(row, token_id, wanted, self._token_text))
            if sample.finish_reason is not None:
                self._scheduler.remove(sample)
                sample.request.note_finished()
                changed.add(sample.request)  # the samples that go on are told then too
            elif sample.streaming:
                changed.add(sample.request)

    def _num_entries(self, wanted: int) -> int:
        """Entries of a position: the token itself and the `wanted` most probable ones (-1: all)."""
        return self._runner.vocab_size if wanted == -1 else wanted + 1

    def _find_logprobs(self, sequence: Scheduled, wanted: int, first: int, logits: Tensor) -> None:
        """Log-probabilities of the tokens that follow some of a pass, `first` and on, given all before them. logits:
        float32 [some, vocab]."""
        begin = sequence.done + first + 1
        following = sequence.prompt[begin : begin + len(logits)]
        entries = sample_of(sequence).request.found_logprobs
        del entries[begin:]  # of a pass that was begun and failed, or of a run that was preempted
        if not following:
            return
        tokens = torch.tensor(following, dtype=torch.int64).to(logits.device)
        k = logits.shape[1] if wanted == -1 else wanted
        found = HostLogprobs(views_of(token_logprobs(logits[: len(following)], tokens, k)))
        entries += [found.entry(row, token_id, wanted, self._token_text)[1] for row, token_id in enumerate(following)]
