"""Which sequences run, in which slots and KV blocks: plain Python, no torch, no clock.

A sequence waits, runs (it has a slot) or is gone. Sequences start in turn: by priority, then by arrival, and none
overtakes. One starts when a slot is free and there are blocks for its whole prompt; nothing is reserved for what it
will generate. A row that grows takes a block when it needs one. Where there is none, the running sequence whose turn
is last gives up slot and blocks and waits again, in its old turn. The first in turn is never preempted, so everything
comes to an end.

A prompt takes blocks that are cached instead of running their tokens, its last token excepted, whose logits are
wanted. A block that is written, yet shared, is copied first. Samples of one request run their prompt once.

The same calls give the same plans.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import count

from onewave.base.errors import InvalidArgumentError
from onewave.engine.scheduler.sequence import DecodeClock, PassLimits, Scheduled, StepPlan
from onewave.memory.block_pool import BlockPool, next_key


class Scheduler:
    """Plans steps over num_slots slots and the blocks of a pool.

    reuse: take prefixes from the cache and leave prompts there. Of limits.whole prompts neither is done.
    """

    def __init__(self, num_slots: int, pool: BlockPool, limits: PassLimits, *, reuse: bool = True) -> None:
        if num_slots < 1:
            raise InvalidArgumentError("num_slots", got=str(num_slots), allowed="a whole number from 1")
        self.num_slots, self.pool, self._limits = num_slots, pool, limits
        self._reuses = reuse and not limits.whole
        self._numbers = count()
        self._of_owner: dict[Hashable, Scheduled] = {}
        # Those that were removed while they waited stay until their turn comes.
        self._waiting: list[tuple[tuple[int, int], Scheduled]] = []
        self._free = list(range(num_slots))
        # By slot, in the order in which they started.
        self._running: dict[int, Scheduled] = {}
        # Running ones whose prompt is not through, in turn.
        self._prompts: list[Scheduled] = []
        # The sample of a request that runs the prompt for the others.
        self._leaders: dict[Hashable, Scheduled] = {}
        self._clock = DecodeClock()
        self._rows: tuple[Scheduled, ...] | None = ()
        # The clock's steps when one of these rows has asked for all its tokens, and steps from now on that need no
        # further block: known, so that a step asks no row.
        self._rows_until = self._steps_within_blocks = 0
        # Whether the first in turn found no blocks, and none came free since.
        self._starved = False
        self._prompts_last = False

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._of_owner)

    @property
    def running(self) -> tuple[Scheduled, ...]:
        """Sequences with a slot, in the order in which they started."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Scheduled, ...]:
        """Sequences without a slot, in turn."""
        return tuple(
            sorted((each for each in self._of_owner.values() if each.slot is None), key=lambda each: each.turn)
        )

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._of_owner) - len(self._running)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the pool can hold."""
        return self.pool.num_blocks * self.pool.block_size

    @property
    def runs_prompts_next(self) -> bool:
        """Whether the next plan is a prompt pass, as far as can be said without making it."""
        if self._prompts_last and self._decoding():
            return False
        return any(each.blocks for each in self._prompts) or (
            not self._starved and bool(self._prompts or (self._free and self.num_waiting))
        )

    def add(self, sequence: Scheduled) -> None:
        """Have a sequence wait. It must fit the pool: prompt and limit are at most max_tokens together."""
        assert sequence.owner not in self._of_owner
        assert len(sequence.prompt) + sequence.limit <= self.max_tokens
        sequence.order, sequence.clock = next(self._numbers), self._clock
        self._of_owner[sequence.owner] = sequence
        heapq.heappush(self._waiting, (sequence.turn, sequence))
        self._starved = False

    def find(self, owner: Hashable) -> Scheduled | None:
        """Return an owner's sequence, None if it is gone."""
        return self._of_owner.get(owner)

    def remove(self, owner: Hashable) -> None:
        """Take a sequence out, finished or aborted; slot and blocks are free at once. An unknown owner is ignored."""
        sequence, self._starved = self._of_owner.pop(owner, None), False
        if sequence is not None and sequence.slot is not None:
            self._stop(sequence)

    def plan(self) -> StepPlan:
        """Return the next step. Prompt passes and decode steps take turns as long as there is work for both, so that a
        first token comes soon and no row waits for more than one pass. Report it with `ran`."""
        if self.runs_prompts_next:
            plan = self._next_pass(len(self._decoding()))
            if plan.chunks:
                self._prompts_last = True
                return plan
        self._prompts_last = False
        return self._grow(self._decoding())

    def ran(self, plan: StepPlan) -> None:
        """Take note of a step that was launched, or of those chunks of it that were."""
        for sequence, tokens in plan.chunks:
            sequence.done += tokens
            self._seal(sequence, sequence.done - tokens)
            if not sequence.left:
                self._prompts.remove(sequence)
                sequence.last = self._clock.steps + sequence.limit - 1
                self._rows = None
        if plan.rows:
            self._clock.steps += 1
            self._steps_within_blocks = max(0, self._steps_within_blocks - 1)
            if self._clock.steps == self._rows_until:
                self._rows = None

    def _decoding(self) -> tuple[Scheduled, ...]:
        if self._rows is None:
            now = self._clock.steps
            self._rows = tuple([e for e in self._running.values() if e.last is not None and e.last > now])
            self._rows_until = min([e.last for e in self._rows if e.last is not None], default=now)
            self._steps_within_blocks = 0
        return self._rows

    def _next_pass(self, num_rows: int) -> StepPlan:
        chosen: list[tuple[Scheduled, int]] = []
        copies: list[tuple[int, int]] = []
        entries: list[tuple[int, int, int]] = []
        room = self._limits.beside_rows if num_rows else self._limits.max_tokens
        for sequence in self._in_turn():
            if not sequence.blocks:
                if self._starved or self._waits_for_leader(sequence):
                    continue
                if not self._start(sequence, num_rows, copies):
                    self._starved = True  # those that have begun go on, and free blocks
                    continue
                entries += [(sequence.slot_now, at, block) for at, block in enumerate(sequence.blocks)]
            tokens = sequence.left if self._limits.whole else min(sequence.left, room)
            if chosen and (sequence.alone or tokens > room):
                break
            chosen.append((sequence, tokens))
            room = 0 if sequence.alone else room - tokens
            if room <= 0 or len(chosen) == self._limits.max_prompts:
                break
        return StepPlan(chunks=tuple(chosen), copies=tuple(copies), entries=tuple(entries))

    def _in_turn(self) -> Iterator[Scheduled]:
        """Prompts that have slots, and those that can get one."""
        with_slots = deque(self._prompts)
        while with_slots or self._next_waiting() is not None:
            waiting = self._next_waiting()
            if waiting is None or (with_slots and with_slots[0].turn < waiting.turn):
                yield with_slots.popleft()
            else:
                heapq.heappop(self._waiting)
                slot = heapq.heappop(self._free)
                self._running[slot], waiting.slot = waiting, slot
                insort(self._prompts, waiting, key=lambda each: each.turn)
                yield waiting

    def _next_waiting(self) -> Scheduled | None:
        """The first in turn without a slot, None where it could not start."""
        while self._waiting and self._of_owner.get(self._waiting[0][1].owner) is not self._waiting[0][1]:
            heapq.heappop(self._waiting)  # removed meanwhile
        return self._waiting[0][1] if self._free and self._waiting and not self._starved else None

    def _waits_for_leader(self, sequence: Scheduled) -> bool:
        if sequence.group is None or self._limits.whole:
            return False
        leader = self._leaders.setdefault(sequence.group, sequence)
        return leader is not sequence and leader.left > 0

    def _start(self, sequence: Scheduled, num_rows: int, copies: list[tuple[int, int]]) -> bool:
        """Give a prompt its blocks, those that hold its beginning already among them; False where there are too few.

        Every row that decodes may soon need a block: as many stay free, or a start would preempt what it began.
        """
        pool, size, prompt = self.pool, self.pool.block_size, sequence.prompt
        known, num_known = self._known(sequence)
        done = min(num_known, len(prompt) - 1)
        shared, copied = known[: done // size], known[done // size :]
        pool.share(known)  # so that `take` evicts none of them
        wanted = -(-len(prompt) // size) - len(shared)
        taken = pool.take(wanted) if wanted + num_rows <= pool.num_free else None
        if taken is None:
            pool.release(known)
            return False
        copies += zip(copied, taken, strict=False)
        pool.release(copied)
        sequence.blocks, sequence.done = [*shared, *taken], done
        if sequence.num_cached is None:
            sequence.num_cached = done
        return True

    def _known(self, sequence: Scheduled) -> tuple[list[int], int]:
        """Find blocks that hold the beginning of a prompt, and how many of its tokens."""
        size, prompt = self.pool.block_size, sequence.prompt
        leader = None if sequence.group is None else self._leaders.get(sequence.group)
        if leader is not None and leader is not sequence:
            return leader.blocks[: -(-len(prompt) // size)], len(prompt)
        if not self._reuses or sequence.alone:
            return [], 0
        found = self.pool.find(self._key(sequence, at) for at in range(len(prompt) // size))
        return found, len(found) * size

    def _key(self, sequence: Scheduled, at: int) -> bytes:
        """The key of a prompt's full block. Those behind the last one that is cached are first asked for when the pass
        has been launched."""
        keys, size = sequence.keys, self.pool.block_size
        for begin in range(len(keys) * size, (at + 1) * size, size):
            keys.append(next_key(keys[-1] if keys else sequence.root, sequence.prompt[begin : begin + size]))
        return keys[at]

    def _seal(self, sequence: Scheduled, before: int) -> None:
        """Let blocks be found that a prompt has filled, those after its first `before` tokens. What is generated is not
        sealed: a decode step may round otherwise than a pass, and a prompt's bits must not depend on the cache."""
        if not self._reuses:
            return
        size = self.pool.block_size
        for at in range(before // size, sequence.done // size):
            tokens = sequence.prompt[at * size : (at + 1) * size]
            key, parent = self._key(sequence, at), self._key(sequence, at - 1) if at else None
            self.pool.seal(sequence.blocks[at], key, parent=parent, token_ids=tokens)

    def _grow(self, rows: tuple[Scheduled, ...]) -> StepPlan:
        """Give every row a block for the token that it is fed, those in turn first; preempt where there is none."""
        if self._steps_within_blocks or not rows:
            return StepPlan(rows=rows)
        size = self.pool.block_size
        room = [len(row.blocks) * size - len(row.prompt) - row.launched for row in rows]
        short = [row for row, tokens in zip(rows, room, strict=True) if tokens < 0]
        if not short:
            self._steps_within_blocks = min(room) + 1
            return StepPlan(rows=rows)
        entries: list[tuple[int, int, int]] = []
        preempted: list[Scheduled] = []
        for row in sorted(short, key=lambda each: each.turn):
            while row.slot is not None:
                block = self.pool.take(1)
                if block is not None:
                    entries.append((row.slot, len(row.blocks), block[0]))
                    row.blocks += block
                    break
                victim = max((each for each in self._running.values() if each.blocks), key=lambda each: each.turn)
                self._stop(victim)
                heapq.heappush(self._waiting, (victim.turn, victim))
                preempted.append(victim)
        slots = {row.slot for row in self._decoding()}
        kept = tuple(entry for entry in entries if entry[0] in slots)
        return StepPlan(rows=self._decoding(), entries=kept, preempted=tuple(preempted))

    def _stop(self, sequence: Scheduled) -> None:
        """Take slot and blocks away."""
        slot = sequence.slot_now
        del self._running[slot]
        heapq.heappush(self._free, slot)
        if sequence in self._prompts:
            self._prompts.remove(sequence)
        if self._leaders.get(sequence.group) is sequence:
            del self._leaders[sequence.group]
        self.pool.release(sequence.blocks)
        sequence.slot, sequence.blocks, sequence.done, sequence.last = None, [], 0, None
        self._rows, self._starved = None, False
