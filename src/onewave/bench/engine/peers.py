"""This engine beside others on the same file, in the same run.

Every engine lives in a process of its own with the same number of threads; all load first, one after another, then
they take turns, a round each, so that whatever else the machine does falls on all alike. While one runs the others
wait for input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from onewave.base.errors import OnewaveError, shown
from onewave.bench.clock import Summary, summarize
from onewave.bench.engine.process import environment, last_words

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer

_WORKER = Path(__file__).with_name("peer_worker.py")
_MODULES = {"onewave": "onewave", "transformers": "transformers", "llama-cpp-python": "llama_cpp"}
_PASSAGE = (
    "The harbour lay quiet in the early morning. Fishing boats rocked against the pier, and the first gulls circled "
    "above the market hall. An old man with a lantern walked along the water, counting the boats as he had done every "
    "day for forty years. When he came to the last one he stopped, because it was not there. He looked out over the "
    "bay, where the fog was slowly lifting, and tried to remember whose boat it was and who had taken it out during "
    "the night. Behind him a door opened, and his daughter came down the steps with two cups of coffee. "
)


@dataclass(frozen=True)
class Job:
    """The work of every engine. path, kind: the model ("hf" directory or "gguf" file). context: prompt and output."""

    path: str
    kind: str
    dtype: str
    device: str
    threads: int
    prompt_tokens: int
    output_tokens: int

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class PeerResult:
    """One engine's figures, or `absent`: why there are none.

    load_s: from the process's start until it could answer. prefill, decode: tokens a second. ratio: our median decode
    rate over this engine's; prefill_ratio likewise. same_tokens: greedy tokens equal to ours before the first that
    differs, of `num_tokens`, in the last round.
    """

    name: str
    absent: str | None = None
    version: str | None = None
    load_s: float | None = None
    prefill: Summary | None = None
    decode: Summary | None = None
    ratio: float | None = None
    prefill_ratio: float | None = None
    same_tokens: int | None = None
    num_tokens: int | None = None


class _Absent(OnewaveError):
    """An engine that can't be compared."""


def compare(
    job: Job,
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    pythons: Mapping[str, str] | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> list[PeerResult]:
    """Measure every named engine (keys of peer_worker.PEERS; the first is the one the others are compared with).

    prompts: job.prompt_tokens ids each, one a round; the first round warms up. pythons: another
    interpreter for an engine. show: is told what runs.
    """
    results: dict[str, PeerResult] = {}
    runners: dict[str, _Worker] = {}
    try:
        for name in names:
            show(f"loading {name}")
            try:
                runners[name] = _Worker(name, job, (pythons or {}).get(name, sys.executable))
            except _Absent as error:
                results[name] = PeerResult(name, absent=str(error))
        for number, prompt in enumerate(prompts):
            show(f"{', '.join(runners)}: round {number + 1} of {len(prompts)}")
            for name, worker in list(runners.items()):
                try:
                    worker.run(prompt, job.output_tokens, keep=number > 0)
                except _Absent as error:
                    results[name] = PeerResult(name, absent=str(error))
                    runners.pop(name).close()
    finally:
        for worker in runners.values():
            worker.close()
    ours = runners.get(names[0])
    for name, worker in runners.items():
        results[name] = worker.result(job, ours)
    return [results[name] for name in names]


@dataclass
class _Worker:
    """One engine's process. Raises _Absent when it isn't installed or fails."""

    name: str
    job: Job
    python: str
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        if self.name == "llama-cpp-python" and self.job.kind != "gguf":
            raise _Absent("reads GGUF files only")
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        began = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                # -P: this directory's modules must not hide others of the same names.
                [self.python, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment(dict.fromkeys(("OMP_NUM_THREADS", "ONEWAVE_NUM_THREADS"), str(self.job.threads))),
            )
        except OSError as error:
            raise _Absent(f"{self.python} can't be run ({error.strerror})") from None
        try:
            reply = self._ask({"peer": self.name, "context": self.job.context, **asdict(self.job)})
        except BaseException:
            self.close()
            raise
        self.version: str = reply["version"]
        self.load_s = time.perf_counter() - began

    def run(self, prompt: Sequence[int], tokens: int, *, keep: bool) -> None:
        """Generate once; keep the figures or not."""
        reply = self._ask({"prompt": list(prompt), "tokens": tokens})
        if keep:
            self.rounds.append(reply)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._log):
            stream.close()
        # Closing flushes unwritten input; it has no reader any more.
        with suppress(OSError):
            self._process.stdin.close()

    def result(self, job: Job, ours: _Worker | None) -> PeerResult:
        """All rounds together."""
        prefill, decode = self._rates(job)
        ratio = prefill_ratio = same = None
        if ours is not None:
            our_prefill, our_decode = ours._rates(job)
            ratio, prefill_ratio = our_decode.p50 / decode.p50, our_prefill.p50 / prefill.p50
            pairs = zip(ours.rounds[-1]["token_ids"], self.rounds[-1]["token_ids"], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), job.output_tokens)
        rates = (prefill, decode, ratio, prefill_ratio)
        return PeerResult(self.name, None, self.version, self.load_s, *rates, same, job.output_tokens)

    def _rates(self, job: Job) -> tuple[Summary, Summary]:
        prefill = summarize([job.prompt_tokens / one["prefill_s"] for one in self.rounds])
        return prefill, summarize([(job.output_tokens - 1) / one["decode_s"] for one in self.rounds])

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A process that has died may have left its last words.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        try:
            reply: dict[str, Any] = json.loads(line) if line.strip() else {"failed": self._last_words()}
        except ValueError:
            raise _Absent(f"failed: answered {shown(line.strip())}") from None
        if "missing" in reply:
            module = reply["missing"]
            own = _MODULES.get(self.name)
            raise _Absent("not installed" if module == own else f"not installed (it needs {module})")
        if "failed" in reply:
            raise _Absent(f"failed: {reply['failed']}")
        return reply

    def _last_words(self) -> str:
        """Return the exit status and last output of a process that died without an answer."""
        self._process.wait()
        self._log.seek(0)
        said = last_words(self._log.read())
        return f"exit status {self._process.returncode}" + (f", {said}" if said else "")


def text_prompts(tokenizer: Tokenizer, *, tokens: int, count: int) -> list[list[int]]:
    """`count` different prompts of `tokens` ids each from one English passage, repeated as need be.

    Text rather than random ids: where a model is sure of the next token, engines that compute alike agree on it.
    """
    ids = tokenizer.encode(_PASSAGE, add_special_tokens=False)
    doubled = ids * (tokens // len(ids) + 2)
    return [doubled[start : start + tokens] for start in (number * 5 % len(ids) for number in range(count))]
