"""Units of scheduling: a prompt and its generated tokens, with their place in the KV cache. No torch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass
class DecodeClock:
    """Decode steps that a scheduler's sequences have been launched with so far."""

    steps: int = 0


@dataclass(eq=False)
class Scheduled:
    """One sample's prompt and growth.

    owner: the sample. prompt: its token ids. limit: tokens that are generated at most. priority: lower runs first.
    root: what the prompt's keys are chained to (block_pool.root_key). group: of samples that share a prompt.
    alone: its pass holds no other prompt and takes nothing from the cache, as the logits of all its tokens are wanted.

    The scheduler's: order (of arrival), slot (None while it waits), blocks, done (prompt tokens in the cache), clock,
    last (its steps when the last token is asked for; None until the prompt is through), num_cached (prompt tokens that
    it did not have to run, the first time), keys (of its prompt's first full blocks, as far as they were asked for).
    The engine's: replays (whether it is fed tokens that it has generated before it was preempted).
    """

    owner: Hashable
    prompt: Sequence[int]
    limit: int
    priority: int = 0
    root: bytes = b""
    group: Hashable | None = None
    alone: bool = False
    order: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list[int])
    done: int = 0
    clock: DecodeClock = field(default_factory=DecodeClock)
    last: int | None = None
    num_cached: int | None = None
    keys: list[bytes] = field(default_factory=list[bytes])
    replays: bool = False

    @property
    def turn(self) -> tuple[int, int]:
        """Its place in the order: priority, then arrival."""
        return self.priority, self.order

    @property
    def left(self) -> int:
        """Prompt tokens still to run."""
        return len(self.prompt) - self.done

    @property
    def launched(self) -> int:
        """Tokens that the device has been asked for since its prompt ran last: one of the prompt and, as every step has
        all rows, one of each step since."""
        return 0 if self.last is None else self.limit - max(0, self.last - self.clock.steps)

    @property
    def slot_now(self) -> int:
        """The slot of one that runs."""
        assert self.slot is not None
        return self.slot


@dataclass(frozen=True)
class PassLimits:
    """The limits of one prompt pass. whole: prompts are not cut into chunks."""

    max_tokens: int
    max_prompts: int
    whole: bool = False

    @property
    def beside_rows(self) -> int:
        """Tokens of a pass that rows wait for: half as many, as their next tokens come when it has ended."""
        return -(-self.max_tokens // 2)


@dataclass(frozen=True)
class StepPlan:
    """The plan of the next step: a prompt pass, or a decode step of `rows`.

    chunks: prompts of the pass, and how many tokens of each. rows: the same tuple as long as the rows are the same.
    copies: blocks to copy first, (from, to), in this order. entries: of the block table, (slot, place, block), to write
    before the launch. preempted: sequences that wait again because blocks ran out; they have neither slot nor blocks.
    """

    chunks: tuple[tuple[Scheduled, int], ...] = ()
    rows: tuple[Scheduled, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    entries: tuple[tuple[int, int, int], ...] = ()
    preempted: tuple[Scheduled, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that run in it."""
        return len(self.rows) + sum(count for _, count in self.chunks)
