"""The hot loop: admit, prefill, decode, read, again.

A request's life:

1. `add` queues its samples (n of them; each is scheduled on its own).
2. `step` gives waiting samples the lowest free slots and runs their prompts together, long ones in chunks with decode
   steps between them; where a prompt ends, the first token is sampled and read at once. Samples of one request share
   one run of its prompt.
3. Every `step` decodes all running rows together. Sampled tokens go straight back in as the next step's input: token
   ids and positions live on the device and are rebuilt only when the set of rows changes.
4. The host reads a step's tokens `runner.run_ahead` steps later. With 1 it launches the next step first and reads while
   the device works; a row that turns out to have ended then has a surplus token, which is thrown away.
5. The sample decides whether the token ends it (`Sample.append`); its slot is free for the next one.

Nothing here knows about text, files or models: it needs a `Runner` and, for text, something that makes detokenizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from onewave.base.errors import CapacityError, OnewaveError
from onewave.engine.failures import own_copy, without_frames
from onewave.engine.grammar.compiler import Grammar
from onewave.engine.host_copies import HostLogprobs, check_room, to_list
from onewave.engine.params import SamplingParams
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.prompt.queue import PassLimits, Prompt, PromptQueue
from onewave.engine.request import Detokenizer, Ends, Reader, Request, Sample
from onewave.engine.sampler import Sampled, Sampler, SamplerRow, SamplingPlan
from onewave.engine.scheduler import Scheduler
from onewave.memory.shortage import is_out_of_memory
from onewave.memory.staging import Staging
from onewave.models.batch import StepRows
from onewave.ops.sampling import rows_without_numbers, stream_key, token_logprobs

# Room made at once for a request without max_tokens; more is made as it grows.
_FIRST_ROOM = 256
# Steps ahead of the launched ones for which positions lie on the device.
_STEPS_AHEAD = 64


class Runner(Protocol):
    """Runs the model. Sequences are known by their slot.

    run_ahead: decode steps that are launched before an earlier one's tokens are read: 0 on CPU, 1 on CUDA. limits: of
    one `prefill`.
    """

    device: torch.device
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    run_ahead: int
    limits: PassLimits

    def prefill(self, chunks: Sequence[PromptChunk], *, each: Callable[[int, Tensor], object] | None = None) -> Tensor:
        """Run chunks of prompts. Returns float32 logits [chunks, vocab] of each one's last token, valid until the next
        call. each: of one chunk alone, see Llama.forward. Raises CapacityError, with which no other sequence is
        harmed."""
        ...

    def copy_prompt(self, source: int, target: int, num_tokens: int) -> None:
        """Have a slot hold the first tokens of another one, too."""
        ...

    def decode(self, rows: StepRows) -> Tensor:
        """Feed one token a row. Returns float32 [rows, vocab], valid until the next call."""
        ...

    def check(self) -> None:
        """Raise WaveStalled if something launched so far has stalled, as far as the host knows: once a launch has
        ended, whether it did. What it gave is void then."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Make room for sequences of this length. Raises CapacityError."""
        ...


@dataclass
class _Rows:
    """The rows that decode together, fixed until one of them leaves or another joins.

    slots, token_ids: int64 [rows] on the device; token_ids are the next step's input. coming: the positions of steps
    ahead, see `_coming`. longest: cache entries that the longest row has after the next step. left: steps until a row
    has all its tokens.
    """

    samples: list[Sample]
    slots: Tensor
    token_ids: Tensor
    coming: Tensor
    plan: SamplingPlan
    longest: int
    left: int
    step: int = 0

    @property
    def next(self) -> StepRows:
        """The next step's rows."""
        return StepRows(self.token_ids, self.coming[self.step, : len(self.samples)], self.slots)

    def advance(self) -> None:
        """Go on to the step after a launched one."""
        self.longest += 1
        self.left -= 1
        self.step += 1
        if self.step >= len(self.coming):
            self.coming, self.step = self.coming + self.step, 0


def _coming(positions: Tensor) -> Tensor:
    """Positions of the next _STEPS_AHEAD steps, int64 [steps, rows or one more]: adding one on the device would be a
    kernel a step. Rows are 16-byte aligned, as kernels are compiled for."""
    even = torch.nn.functional.pad(positions, (0, len(positions) % 2))
    return even + torch.arange(_STEPS_AHEAD, device=positions.device)[:, None]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step with tokens that the host has not read: copies under way to host memory, done when `ready` is.
    source: what is copied, which has to live as long."""

    samples: list[Sample]
    sampled: Sampled
    ready: torch.cuda.Event | None = None
    source: Sampled | None = None


class Engine:
    """Runs requests on one runner, first come, first served. One thread at a time.

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
    ) -> None:
        self._runner = runner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._make_detokenizer = make_detokenizer
        # Kept: a text is asked for again at each position, and shared by all entries.
        text_of: Callable[[int], str] = token_text or (lambda token_id: "")
        self._token_text = cache(text_of)
        self._seed = seed
        self._num_requests = 0
        self._scheduler: Scheduler[Sample] = Scheduler(runner.max_num_seqs)
        # Requests that have not ended, and ended ones that a caller still holds.
        self._live: WeakSet[Request] = WeakSet()
        self._sampler = Sampler(num_slots=runner.max_num_seqs, vocab_size=runner.vocab_size, device=runner.device)
        self._on_cuda = runner.device.type == "cuda"
        self.stream = torch.cuda.current_stream(runner.device) if self._on_cuda else None
        self._staging = Staging(runner.device) if self._on_cuda else None
        self._rows: _Rows | None = None
        # Set when the rows that should decode are no longer those of self._rows.
        self._rows_changed = False
        self._prompts = PromptQueue(runner.limits)
        self._prefilled_last = False
        self._in_flight: deque[_InFlight] = deque()
        # Requests that have ended, and streaming ones that have got tokens, since readers were told.
        self._changed: set[Request] = set()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_work

    @torch.inference_mode()
    def add(
        self,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        reader: Reader | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """Queue a request. Its prompt is not empty, and shorter than max_model_len. Raises CapacityError."""
        room = self._runner.max_model_len - len(prompt_token_ids)
        assert 0 < room < self._runner.max_model_len
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        if params.prompt_logprobs is not None:
            check_room((len(prompt_token_ids) - 1) * self._num_entries(params.prompt_logprobs))
        first_room = min(limit, _FIRST_ROOM) if params.max_tokens is None else limit
        self._runner.reserve(len(prompt_token_ids) + first_room)
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
        for sample in request.samples:
            self._scheduler.add(sample)
        return request

    @torch.inference_mode()
    def step(self) -> bool:
        """Start what can start or else launch a step of every running row, and read what is due.

        A step that prefills does not decode, so that a first token is seen as soon as it is there; the step after it
        does, so that a flood of short requests can't hold up the running ones.
        A prompt, or a row that grows, that finds no memory ends its own request (`Request.failure`). If anything is
        raised here every request ends with a copy of it, because the device's state is unknown then, and the engine is
        ready for new ones.
        Returns whether a step runs ahead: then the next one tells readers, when it has launched and only waits for the
        device. A reader that wakes while a step is launched would hold it up, as Python runs one thread at a time.
        """
        try:
            with torch.cuda.device(self._runner.device) if self._on_cuda else nullcontext():
                return self._step()
        except BaseException as error:
            self.abort_all(error)
            raise

    def _step(self) -> bool:
        if (self._prompts or self._scheduler.can_admit) and not self._prefilled_last:
            # Reading first may free more slots, and keeps every sample's tokens in order.
            self.tell_readers()
            self._read(0)
            if chosen := self._prompts.next_pass(self._scheduler.admit):
                self._run_prompts(chosen)
                self._prefilled_last = True
                return False
        self._prefilled_last = False
        ahead = self._runner.run_ahead if self._decode() else 0
        self.tell_readers()
        self._read(ahead)
        return ahead > 0

    def tell_readers(self) -> None:
        """Put what has changed since the last call into requests' updates, then wake readers once each."""
        if not self._changed:
            return
        for request in self._changed:
            request.tell_reader()
        wakes = {request.wake for request in self._changed}
        self._changed.clear()
        for wake in wakes:
            if wake is not None:
                wake()

    def abort(self, request: Request, failure: BaseException | None = None) -> None:
        """Drop a request, wherever it is; its slots are free at once. Finished ones are left as they are. failure: the
        reason, where its caller did not ask for it."""
        for sample in request.samples:
            if not sample.finished:
                request.failure = failure
                sample.abort()
                self._scheduler.remove(sample)
                self._rows_changed = True
                self._changed.add(request)
        request.note_finished()

    def abort_all(self, error: BaseException | None = None) -> None:
        """Drop every request and whatever is in flight. error: what a step raised."""
        # Not the scheduler's: where a step was interrupted amid its bookkeeping, a request may be in neither list.
        for request in [request for request in self._live if not request.finished]:
            request.failure = None if error is None else own_copy(error)
            for sample in request.samples:
                if not sample.finished:
                    sample.abort()
            request.note_finished()
            self._changed.add(request)
        self._live.clear()
        self._scheduler = Scheduler(self._runner.max_num_seqs)
        for step in self._in_flight:
            if self._staging is not None:
                self._staging.give(step.sampled.parts, step.ready)
        self._in_flight.clear()
        self._prompts.clear()
        self._rows, self._rows_changed, self._prefilled_last = None, False, False

    def _run_prompts(self, chosen: list[tuple[Prompt, int]]) -> None:
        """Run one pass, and read the first token of each prompt that ends in it."""
        try:
            self._run_pass(chosen)
        except CapacityError as error:
            # Alone each takes less, and the one that does not fit is known.
            if len(chosen) > 1:
                for each in chosen:
                    self._run_prompts([each])
            else:
                self.abort(chosen[0][0].sample.request, without_frames(error))
            return
        self._read(0)

    def _run_pass(self, chosen: list[tuple[Prompt, int]]) -> None:
        """Launch a pass, and the sampling of the first tokens that it ends with."""
        # Surplus steps of a slot's last owner may still be queued and write entries. They run before this pass on the
        # same stream, and a sequence reads no entry that it has not written itself: the leftover is never read.
        for prompt, _ in chosen:
            if prompt.leader is not None:
                self._runner.copy_prompt(prompt.leader.slot, prompt.slot, prompt.done)
        chunks = [PromptChunk(p.slot, p.tokens[p.done : p.done + count], p.done) for p, count in chosen]
        first, look = chosen[0][0], None
        if first.wants_logprobs:
            wanted = first.sample.request.params.prompt_logprobs
            assert wanted is not None
            check_room((first.left - 1) * self._num_entries(wanted))  # others may have taken it since
            look = partial(self._find_logprobs, first, wanted)
        logits = self._runner.prefill(chunks, each=look)
        ended = [row for row, (prompt, count) in enumerate(chosen) if count == prompt.left]
        prompts = [chosen[row][0] for row in ended]
        sampled = self._sample_first(prompts, logits if len(ended) == len(chosen) else logits[ended])
        self._prompts.ran(chosen)
        if sampled is not None:
            if look is not None:
                first.sample.request.prompt_logprobs = first.logprobs
            for prompt in prompts:
                prompt.sample.launched = 1
            self._rows_changed = True
            self._launch_copy([prompt.sample for prompt in prompts], sampled)

    def _sample_first(self, prompts: list[Prompt], logits: Tensor) -> Sampled | None:
        """Launch the sampling of prompts' first tokens. logits: float32 [prompts, vocab]."""
        if not prompts:
            return None
        try:
            for prompt in prompts:
                self._sampler.begin(prompt.slot, prompt.tokens, prompt.sample.request.params)
            return self._sampler.plan([self._sampler_row(p.slot, p.sample) for p in prompts])(logits)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"penalties or sampling of {max(len(prompt.tokens) for prompt in prompts)} tokens",
                got=f"do not fit beside the model on {self._runner.device}",
                next="Ask for less of them, or lower max_model_len or max_num_seqs.",
            ) from error

    def _decode(self) -> bool:
        """Launch one step of all rows that need more tokens; False when there are none."""
        rows = self._rows
        if self._rows_changed or (rows is not None and rows.left <= 0):
            self._rows_changed = False  # first: what changes them meanwhile counts
            rows = self._rows = self._build_rows()
        if rows is None:
            return False
        try:
            self._runner.reserve(rows.longest)
        except CapacityError as error:
            # It ends the row that needs the most, and the others go on.
            longest = max(rows.samples, key=lambda sample: len(sample.request.prompt_token_ids) + sample.launched)
            self.abort(longest.request, without_frames(error))
            return self._decode()
        logits = self._runner.decode(rows.next)
        if rows.plan.has_masks:
            self._read(0)  # what a grammar allows follows from the token before; the device runs this step meanwhile
        sampled = rows.plan(logits)
        rows.token_ids = sampled.tokens
        rows.advance()
        for sample in rows.samples:
            sample.launched += 1
        self._launch_copy(rows.samples, sampled)
        return True

    def _build_rows(self) -> _Rows | None:
        """Collect the running samples that have tokens left to launch; their newest tokens stay on the device."""
        old = self._rows
        running = self._scheduler.running.items()
        # None launched: the prompt is not through.
        chosen = [(slot, sample) for slot, sample in running if 0 < sample.launched < sample.request.max_new_tokens]
        if not chosen:
            return None
        device = self._runner.device
        # A sample that is ahead of the host has its newest token on the device only: the last output of its row.
        # Every other newest token is known here. One transfer carries slots, positions, known tokens and old rows.
        old_row = {} if old is None else {sample: row for row, sample in enumerate(old.samples)}
        known = [sample.token_ids[-1] if len(sample.token_ids) == sample.launched else -1 for _, sample in chosen]
        lengths = [len(sample.request.prompt_token_ids) + sample.launched for _, sample in chosen]
        columns = torch.tensor(
            [
                [slot for slot, _ in chosen],
                [length - 1 for length in lengths],
                known,
                [old_row.get(sample, 0) for _, sample in chosen],
            ],
            dtype=torch.int64,
        ).to(device, non_blocking=True)
        slots, positions, token_ids, from_row = (column.clone() for column in columns)
        if old is not None and -1 in known:
            token_ids = torch.where(token_ids < 0, old.token_ids[from_row], token_ids)
        return _Rows(
            samples=[sample for _, sample in chosen],
            slots=slots,
            token_ids=token_ids,
            coming=_coming(positions),
            plan=self._sampler.plan([self._sampler_row(slot, sample) for slot, sample in chosen]),
            longest=max(lengths),
            left=min(sample.request.max_new_tokens - sample.launched for _, sample in chosen),
        )

    def _sampler_row(self, slot: int, sample: Sample) -> SamplerRow:
        banned = tuple(sample.request.end_ids)
        return SamplerRow(slot, sample.request.params, sample.key, sample.launched, banned, sample.grammar)

    def _launch_copy(self, samples: list[Sample], sampled: Sampled) -> None:
        """Start moving a step's results to the host."""
        if self._staging is None:
            self._in_flight.append(_InFlight(samples, sampled))
            return
        copied, ready = self._staging.start(sampled.parts)
        self._in_flight.append(_InFlight(samples, Sampled.of(copied), ready, source=sampled))

    def _read(self, keep: int) -> None:
        """Wait for launched steps, oldest first, until only `keep` are left; hand their tokens to the samples."""
        while len(self._in_flight) > keep:
            step = self._in_flight.popleft()
            if step.ready is not None:
                step.ready.synchronize()
            self._runner.check()  # before a reader sees a token of a launch that gave up
            for row in rows_without_numbers(step.sampled.highest):
                self._end_without_numbers(step.samples[row])
            logprobs = None if step.sampled.logprobs is None else HostLogprobs(step.sampled.logprobs)
            tokens = to_list(step.sampled.tokens)
            if self._staging is not None:
                self._staging.give(step.sampled.parts)
            self._note_tokens(step.samples, tokens, logprobs)

    def _end_without_numbers(self, sample: Sample) -> None:
        if not sample.finished:
            got = f"logits that are not finite, after {len(sample.token_ids)} tokens"
            next = "The model's activations overflow: use another dtype, or other weights."
            self.abort(sample.request, OnewaveError("request", got=got, next=next))

    def _note_tokens(self, samples: list[Sample], token_ids: list[int], logprobs: HostLogprobs | None) -> None:
        """Hand one token to each sample of a step."""
        for row, (sample, token_id) in enumerate(zip(samples, token_ids, strict=True)):
            if sample.finish_reason is not None:
                continue  # ended, or was aborted, while this step ran
            request = sample.request
            if not sample.token_ids:
                request.note_first_token()
            sample.append(token_id)
            if sample.grammar is not None and sample.grammar.failure is not None:
                self.abort(request, sample.grammar.failure)
            wanted = request.params.logprobs
            if wanted is not None and logprobs is not None:
                try:
                    check_room(self._num_entries(wanted))
                except CapacityError as error:
                    self.abort(request, without_frames(error))
                    continue
                sample.add_logprobs(*logprobs.entry(row, token_id, wanted, self._token_text))
            if sample.finish_reason is not None:
                self._scheduler.remove(sample)
                self._rows_changed = True
                request.note_finished()
            if request.streaming or request.finished:
                self._changed.add(request)

    def _num_entries(self, wanted: int) -> int:
        """Entries of a position: the token itself and the `wanted` most probable ones (-1: all)."""
        return self._runner.vocab_size if wanted == -1 else wanted + 1

    def _find_logprobs(self, prompt: Prompt, wanted: int, first: int, logits: Tensor) -> None:
        """Log-probabilities of the tokens that follow some of a pass, `first` and on, given all before them. logits:
        float32 [some, vocab]."""
        begin = prompt.done + first + 1
        following = prompt.tokens[begin : begin + len(logits)]
        del prompt.logprobs[begin:]  # of a pass that was begun and failed
        if not following:
            return
        tokens = torch.tensor(following, dtype=torch.int64).to(logits.device)
        k = logits.shape[1] if wanted == -1 else wanted
        found = HostLogprobs(token_logprobs(logits[: len(following)], tokens, k))
        prompt.logprobs += [
            found.entry(row, token_id, wanted, self._token_text)[1] for row, token_id in enumerate(following)
        ]
