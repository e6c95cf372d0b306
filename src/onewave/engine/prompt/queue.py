"""Prompts that have a slot and no token yet: which of them share the next pass, and how much of each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from onewave.engine.output import Logprobs
from onewave.engine.request import Sample


@dataclass(eq=False)
class Prompt:
    """A sample's prompt. done: tokens that lie in the cache.

    leader: another sample's run of the same prompt; all of it but the last token is copied from the leader's slot.
    logprobs: those of its tokens so far, where they are asked for.
    """

    slot: int
    sample: Sample
    done: int = 0
    leader: Prompt | None = None
    logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        return self.sample.request.prompt_token_ids

    @property
    def left(self) -> int:
        """Tokens still to run."""
        return len(self.tokens) - self.done

    @property
    def wants_logprobs(self) -> bool:
        """Whether its tokens' own log-probabilities are asked for, and not there yet."""
        request = self.sample.request
        return request.params.prompt_logprobs is not None and request.prompt_logprobs is None


@dataclass(frozen=True)
class PassLimits:
    """Of one pass. whole: prompts are not cut into chunks."""

    max_tokens: int
    max_prompts: int
    whole: bool = False


class PromptQueue:
    """Prompts in the order in which they got their slots.

    The first one always gets as much of a pass as fits; others share what it leaves. A prompt whose tokens' logits are
    asked for runs alone. Samples of one request run their prompt once.
    """

    def __init__(self, limits: PassLimits) -> None:
        self._limits = limits
        self._prompts: list[Prompt] = []
        # Prompts that are through and that samples of the same request, which come later, can copy.
        self._leaders: list[Prompt] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def clear(self) -> None:
        """Forget all."""
        self._prompts.clear()
        self._leaders.clear()

    def ran(self, chosen: Sequence[tuple[Prompt, int]]) -> None:
        """Take note of a pass."""
        for prompt, count in chosen:
            prompt.done += count
            if not prompt.left:
                self._prompts.remove(prompt)
                if len(prompt.sample.request.samples) > 1:
                    self._leaders.append(prompt)

    def next_pass(self, admit: Callable[[], tuple[int, Sample] | None]) -> list[tuple[Prompt, int]]:
        """Return the prompts of the next pass, and how many tokens of each. admit: gives a waiting sample a slot.

        One that still has its leader has to be copied first, all its `done` tokens.
        """
        self._prompts, self._leaders = (
            [prompt for prompt in prompts if not prompt.sample.finished] for prompts in (self._prompts, self._leaders)
        )
        chosen: list[tuple[Prompt, int]] = []
        room = self._limits.max_tokens
        for prompt in self._in_turn(admit):
            if self._waits_for_leader(prompt):
                continue
            count = prompt.left if self._limits.whole else min(prompt.left, room)
            if chosen and (prompt.wants_logprobs or count > room):
                break
            chosen.append((prompt, count))
            room = 0 if prompt.wants_logprobs else room - count
            if room <= 0 or len(chosen) == self._limits.max_prompts:
                break
        return chosen

    def _in_turn(self, admit: Callable[[], tuple[int, Sample] | None]) -> Iterator[Prompt]:
        """Those that are here, then those that can come."""
        yield from list(self._prompts)
        while (admitted := admit()) is not None:
            prompt = Prompt(*admitted)
            if not self._limits.whole:
                others = (*self._leaders, *self._prompts)
                prompt.leader = next((p for p in others if p.sample.request is prompt.sample.request), None)
            self._prompts.append(prompt)
            yield prompt

    def _waits_for_leader(self, prompt: Prompt) -> bool:
        leader = prompt.leader
        if leader is None or prompt.done:
            return False
        if leader.sample.finished:
            prompt.leader = None  # it runs itself
        elif leader.left:
            return True
        else:
            prompt.done = len(prompt.tokens) - 1
        return False
