"""A request and its samples: everything the host knows about them. No torch.

A request holds a prompt and n samples. A sample is what is scheduled: it gets a slot, takes tokens one by one, and
decides by itself when it has ended.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from onewave.engine.grammar.compiler import Grammar, GrammarState
from onewave.engine.output import CompletionOutput, FinishReason, Logprobs, RequestMetrics, RequestOutput
from onewave.engine.params import SamplingParams
from onewave.engine.text.growing import GrowingText
from onewave.engine.text.stop_strings import find_stop, num_held_back

# Epoch seconds of the performance counter's zero.
_EPOCH = time.time() - time.perf_counter()


class Detokenizer(Protocol):
    """Text from tokens as they come; see engine.text.detokenizer.IncrementalDetokenizer."""

    def push(self, ids: Sequence[int], /) -> str: ...

    def finish(self) -> str: ...

    def hidden(self, token_id: int) -> str: ...


class SampleState(NamedTuple):
    """A sample's progress after a step, and how much of its text is final: all only grow.

    num_shown: characters of its text, with stop strings; without, the text is its tokens'. num_shown_tokens: tokens
    with text that is shown. A stop string that may yet come holds back text and tokens alike; one that has come takes
    both.
    """

    num_tokens: int
    num_shown: int
    num_shown_tokens: int
    cumulative_logprob: float
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class RequestState(NamedTuple):
    """A request's samples after some step. finished: whether it was over then. at: when, by the performance counter."""

    samples: list[SampleState]
    finished: bool
    at: float


class Updates(Protocol):
    """Takes what becomes of a request, in the engine's thread: a SimpleQueue, or an asyncio front's stream."""

    def put(self, item: RequestState | None, /) -> object: ...


@dataclass(frozen=True)
class Reader:
    """The updates that a caller wants about its requests, which may share one.

    updates: gets None when a request has ended; streaming: and a state after each step before that. wake: called once
    after all that is put between two steps, whatever the number of requests that share it.
    """

    streaming: bool = False
    updates: Updates = field(default_factory=SimpleQueue["RequestState | None"])
    wake: Callable[[], None] | None = None


class Sample:
    """One continuation of a prompt.

    token_ids: what the host has read. grammar: how far it has come in the form that its request asks for.

    Stop strings are looked for in the engine's thread, as the text grows. Without them a text is made of all tokens
    that there are when a reader asks for it, in the reader's thread, so that no step waits for it.
    """

    def __init__(self, request: Request, index: int, key: int, detokenizer: Detokenizer | None) -> None:
        self.request, self.streaming = request, request.streaming
        self.grammar: GrammarState | None = None
        if request.grammar is not None:
            self.grammar = request.grammar.begin(
                may_end=not request.params.ignore_eos,
                min_tokens=request.params.min_tokens,
                end_ids=request.end_ids,
            )
        self.index = index
        self.key = key
        self.token_ids: list[int] = []
        self._text = GrowingText()
        self.logprobs: list[Logprobs] | None = [] if request.params.logprobs is not None else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer = detokenizer
        self._stops = request.params.stop_strings
        # Stop strings are looked for in the text with its hidden tokens: its length, and its end, in which one may have
        # begun. Of hidden tokens, (where one begins, its length) each.
        self._num_whole, self._whole_end = 0, ""
        self._max_begun = max((len(stop) - 1 for stop in self._stops), default=0)
        self._hidden: list[tuple[int, int]] = []
        # Where each token's text ends. Kept with stop strings only.
        self._token_ends: list[int] = []
        # Where the stop string that ended the sample begins.
        self._stop_begin: int | None = None
        # Without stop strings: the text so far, of so many tokens; whether it is all; whether the last token has none.
        self._pieces: list[str] = []
        self._num_read, self._read_to_end, self._hides_end = 0, False, False
        # Its own, as the newest tokens of all rows are appended one after another: tokens that end it, and the number
        # up to which only those can; none where a grammar or stop strings can, too.
        simple = self.grammar is None and not self._stops
        self._ends, self._max_simple = request.end_ids, request.max_new_tokens if simple else 0
        self._shown = self._shown_tokens = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text of its tokens so far. Its reader's to ask for, in place of deltas."""
        if self._stops:
            return str(self._text)
        self._read(self.state())
        return self._all_read()

    def append(self, token_id: int) -> None:
        """Take the next token; may end the sample."""
        ids = self.token_ids
        ids.append(token_id)
        if len(ids) < self._max_simple and token_id not in self._ends:
            return
        self._take(token_id)
        if self._stops:
            self._token_ends.append(self._num_whole)

    def _take(self, token_id: int) -> None:
        """Grow the text by the newest token, and end the sample where that ends it."""
        ids, request = self.token_ids, self.request
        if self.grammar is not None:
            self.grammar.accept(token_id)
        # Before min_tokens an end is sampled only where every other token is banned: it does not end the sample yet.
        if token_id in request.end_ids and len(ids) > request.params.min_tokens:
            self.stop_reason = token_id if token_id in request.params.stop_ids else None
            self._hides_end = not request.params.include_stop_str_in_output
            if self._stops:
                self._push([] if self._hides_end else [token_id], last=True)
            self.finish_reason = "stop"
            return
        complete = self.grammar is not None and self.grammar.ended
        last = complete or len(ids) >= request.max_new_tokens
        if self._stops:
            self._push([token_id], last=last)
        if last and self.finish_reason is None:
            self.finish_reason = "stop" if complete else "length"

    def add_logprobs(self, logprob: float, entries: Logprobs) -> None:
        """Record the log-probabilities of the token taken last."""
        assert self.logprobs is not None
        self.logprobs.append(entries)
        self.cumulative_logprob += logprob

    def abort(self) -> None:
        """End without another token."""
        self.finish_reason = self.finish_reason or "abort"

    def state(self) -> SampleState:
        """How far it has come."""
        if not self._stops:
            count = len(self.token_ids)
            return SampleState(count, 0, count, self.cumulative_logprob, self.finish_reason, self.stop_reason)
        shown, tokens = len(self._text), len(self.token_ids)
        if not self.request.params.include_stop_str_in_output:
            if self.finish_reason is None:
                end = self._num_whole - num_held_back(self._whole_end, self._stops)
                shown, tokens = self._without_hidden(end), self._num_tokens_until(end)
            elif self._stop_begin is not None:
                tokens = bisect_left([0, *self._token_ends[:-1]], self._stop_begin)
        return SampleState(
            len(self.token_ids), shown, tokens, self.cumulative_logprob, self.finish_reason, self.stop_reason
        )

    def output(self, state: SampleState, *, delta: bool = False) -> CompletionOutput:
        """A copy of what the sample was in a state, or with `delta` of what is new since the call before."""
        begin, end = (self._shown_tokens, state.num_shown_tokens) if delta else (0, state.num_tokens)
        self._shown_tokens = state.num_shown_tokens
        if self._stops:
            new = self._text.between(self._shown, state.num_shown)
            self._shown = state.num_shown
        else:
            new = self._read(state)
        return CompletionOutput(
            index=self.index,
            text=new if delta else self._text.between(0, state.num_shown) if self._stops else self._all_read(),
            token_ids=self.token_ids[begin:end],
            cumulative_logprob=None if self.logprobs is None else state.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[begin:end],
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            delta=new,
        )

    def _read(self, state: SampleState) -> str:
        """Return what a text without stop strings grows by up to a state."""
        detokenizer, ended = self._detokenizer, state.finish_reason is not None
        if detokenizer is None or self._read_to_end:
            return ""
        end = max(self._num_read, state.num_tokens - (ended and self._hides_end))
        new = detokenizer.push(self.token_ids[self._num_read : end])
        self._num_read = end
        if ended:
            new += detokenizer.finish()
            self._read_to_end = True
        self._pieces.append(new)
        return new

    def _all_read(self) -> str:
        """Return a text without stop strings as far as it was read."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _push(self, ids: Sequence[int], *, last: bool) -> None:
        """Grow the text by some tokens and, with `last`, by what was held back; end it at a stop string. With those."""
        if self._detokenizer is None:
            return
        new = self._detokenizer.push(ids)
        if last:
            new += self._detokenizer.finish()
        self._text.add(new)
        old, hidden = self._num_whole, "".join(map(self._detokenizer.hidden, ids))
        if hidden:
            self._hidden.append((old, len(hidden)))
        before, whole = len(self._whole_end), self._whole_end + hidden + new
        self._num_whole += len(whole) - before
        self._whole_end = whole[max(0, len(whole) - self._max_begun) :]
        if len(self.token_ids) <= self.request.params.min_tokens:
            return
        found = find_stop(whole, self._stops, before)
        if found is not None:
            begin, stop = found[0] + old - before, found[1]
            keep = self.request.params.include_stop_str_in_output
            self._text.cut(self._without_hidden(begin + len(stop) if keep else begin))
            self.finish_reason, self.stop_reason, self._stop_begin = "stop", stop, begin

    def _num_tokens_until(self, position: int) -> int:
        """Tokens with text before a position of the whole text; those without text go with the next that has some."""
        ends = self._token_ends
        count = bisect_right(ends, position)
        return bisect_left(ends, ends[count - 1]) + bool(ends[count - 1]) if count else 0

    def _without_hidden(self, position: int) -> int:
        """Where a position of the whole text lies in the text without hidden tokens."""
        return position - sum(min(max(position - begin, 0), length) for begin, length in self._hidden)


@dataclass(frozen=True)
class Ends:
    """Conditions that end a sample: token_ids (EOS unless ignored, and stop tokens), max_new_tokens, which is
    what max_tokens and max_model_len leave, or a grammar that it follows to the end."""

    token_ids: frozenset[int]
    max_new_tokens: int
    grammar: Grammar | None = None


class Request:
    """A prompt, its parameters and its samples.

    keys: the random stream of each sample. num_cached_tokens: prompt tokens that were in the cache when the first
    sample's prompt ran; None before. found_logprobs: prompt_logprobs, as far as they have come. failure: what ended the
    request, where that was neither its tokens nor its caller. A reader in another thread looks no further than a state
    that has come to its updates, and at all of it once None has.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        keys: Sequence[int],
        ends: Ends,
        reader: Reader | None = None,
        make_detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.end_ids, self.max_new_tokens, self.grammar = ends.token_ids, ends.max_new_tokens, ends.grammar
        reader = reader or Reader()
        self.streaming, self.updates, self.wake = reader.streaming, reader.updates, reader.wake
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.found_logprobs: list[Logprobs | None] = [None]
        self.num_cached_tokens: int | None = None
        self.failure: BaseException | None = None
        self.samples = [
            Sample(self, i, key, make_detokenizer() if make_detokenizer else None) for i, key in enumerate(keys)
        ]
        self._arrival = time.perf_counter()
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._finished: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the last sample has ended and the request's times are taken."""
        return self._finished is not None

    def note_scheduled(self) -> None:
        """Take the time at which the prompt first runs; later calls change nothing."""
        if self._scheduled is None:
            self._scheduled = time.perf_counter()

    def note_cached(self, sample: Sample, num_tokens: int) -> None:
        """Take how many tokens of a sample's prompt did not have to run; of the first sample, the first time."""
        if self.num_cached_tokens is None and sample is self.samples[0]:
            self.num_cached_tokens = num_tokens

    def note_first_token(self) -> None:
        """Take the time of the first token of all samples; later calls change nothing."""
        if self._first_token is None:
            self._first_token = time.perf_counter()

    def note_finished(self) -> None:
        """Take the time, if this was the last sample to end."""
        if self._finished is None and all(sample.finished for sample in self.samples):
            self._finished = time.perf_counter()

    def tell_reader(self, now: float) -> None:
        """Put what has become of the request into its updates. now: by the performance counter."""
        if self._finished is not None:
            self.updates.put(None)
        elif self.streaming:
            self.updates.put(RequestState([sample.state() for sample in self.samples], False, now))

    def output(self, state: RequestState | None = None, *, delta: bool = False) -> RequestOutput:
        """A copy of what the request was in a state, or is now. delta: of its samples only what is new since the last
        one; what belongs to the prompt is then shared, not copied."""
        state = state or self._state()
        ids, logprobs = self.prompt_token_ids, self.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=ids if delta else list(ids),
            prompt_logprobs=logprobs if delta or logprobs is None else list(logprobs),
            outputs=[s.output(then, delta=delta) for s, then in zip(self.samples, state.samples, strict=True)],
            finished=state.finished,
            metrics=self._metrics(state),
            num_cached_tokens=self.num_cached_tokens,
        )

    def _state(self) -> RequestState:
        return RequestState([sample.state() for sample in self.samples], self.finished, time.perf_counter())

    def _metrics(self, state: RequestState) -> RequestMetrics:
        """Times up to a state."""
        counts = [sample.num_tokens for sample in state.samples]
        generated, started = sum(counts), len(counts) - counts.count(0)
        ended = self._finished if state.finished else None
        rate: float | None = None
        if self._first_token is not None and generated > started:
            end = state.at if ended is None else ended
            rate = (generated - started) / max(end - self._first_token, 1e-9)
        return RequestMetrics(
            arrival_time=_EPOCH + self._arrival,
            first_token_time=None if self._first_token is None else _EPOCH + self._first_token,
            finished_time=None if ended is None else _EPOCH + ended,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_generation_tokens=generated,
            time_to_first_token=None if self._first_token is None else self._first_token - self._arrival,
            tokens_per_second=rate,
            first_scheduled_time=None if self._scheduled is None else _EPOCH + self._scheduled,
        )
