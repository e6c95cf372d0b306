"""How long it takes to start, as users meet it: in processes of their own, with caches empty and filled.

Caches are those of compiled kernels (Triton's, Numba's) and of the wave's finished programs. They lie in a directory
that is made for the first start and left for the second one. A model's files have been found before, and come from
memory where the system kept them; Python keeps its byte code, as pip does when it installs a package. Where the engine
chose the wave, starts that decode with CUDA graphs of plain operators stand beside it, with their own caches filled:
loading without what the wave adds. All processes import side by side, which takes seconds, and then load one after
another.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onewave.base.errors import OnewaveError
from onewave.bench.clock import Summary, summarize
from onewave.bench.engine.process import environment, last_words
from onewave.bench.ledger import Measurement

_WORKER = Path(__file__).with_name("startup_worker.py")
_ANSWER_TOKENS = 2


class StartupError(OnewaveError):
    """A process that was to be timed ended without an answer."""


@dataclass(frozen=True)
class Job:
    """The engine to start. options: LLM's arguments by name, of JSON's types. prompt: the first call's token ids."""

    options: Mapping[str, Any]
    prompt: Sequence[int]

    @classmethod
    def of(cls, options: Mapping[str, Any], *, vocab_size: int, max_model_len: int) -> "Job":
        """With a prompt of 16 tokens, or as many as fit before an answer, but one at least."""
        count = max(1, min(16, max_model_len - _ANSWER_TOKENS))
        return cls(options, [i % vocab_size for i in range(count)])


@dataclass(frozen=True)
class StartupResult:
    """Starts of one kind. All times in seconds.

    caches: "empty" or "filled". decode_path: how the engine decoded; compact: whether with compact weights. import_s:
    importing the package and PyTorch in all processes at once, slower than in one. load_s: making the LLM; phases:
    where the most of it went, medians by name; "imports" among them are the load's own, and no part of import_s.
    first_answer_s: its first call, the job's prompt and up to 2 tokens generated. peak_bytes: the most that PyTorch
    held of the GPU's memory by the time that the LLM was made, in any start; kept_bytes: what it held then; None on a
    CPU. cache_bytes: of keys and values.
    """

    caches: str
    decode_path: str
    compact: bool
    import_s: Summary
    load_s: Summary
    first_answer_s: Summary
    phases: Mapping[str, float]
    peak_bytes: int | None
    kept_bytes: int | None
    cache_bytes: int

    def measurements(self, model: str, extra: Mapping[str, Any]) -> Iterator[Measurement]:
        """The ledger's lines: one for loading, one for the first answer."""
        names = ("caches", "decode_path", "compact", "phases", "peak_bytes", "kept_bytes", "cache_bytes")
        own = {**extra, **{name: getattr(self, name) for name in names}, "import_s": self.import_s.p50}
        yield Measurement(model, "load", "s", self.load_s, None, own)
        yield Measurement(model, "first_answer", "s", self.first_answer_s, None, own)


@dataclass(frozen=True)
class WarmResult:
    """`onewave warm` in new processes. order: its calls "side by side" or "one after another". seconds: all of them,
    imports left out. calls: seconds until each one's first call came back, by name. prebuilt: kernels that come
    compiled are taken; otherwise Triton compiles all of them."""

    order: str
    caches: str
    seconds: Summary
    calls: Mapping[str, Summary]
    prebuilt: bool = True

    def measurements(self) -> Iterator[Measurement]:
        """The ledger's lines: one for all calls and, where nothing ran beside it, one for each."""
        how = {"caches": self.caches, "prebuilt": self.prebuilt}
        of_all = {**how, "order": self.order, "calls": len(self.calls)}
        yield Measurement("attention", "warm", "s", self.seconds, None, of_all)
        for name, summary in self.calls.items() if self.order == "one after another" else ():
            yield Measurement("attention", "first_call", "s", summary, None, {**how, "call": name})


def measure_startup(
    job: Job, *, reps: int, graphs: bool = True, show: Callable[[str], None] = lambda text: None
) -> list[StartupResult]:
    """Start the model `reps` times with empty caches and as often with filled ones; where it decodes with the wave and
    graphs are asked for, as often again with CUDA graphs. show: is told what runs. Raises StartupError."""
    empty: list[dict[str, Any]] = []
    filled: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="onewave-startup-") as folder:
        caches = [Path(folder, str(number)) for number in range(reps) for _ in range(2)]
        kept = [Path(folder, "plain")] * (reps + 1 if graphs else 0)
        show(f"importing in {len(caches) + len(kept)} processes")
        with _importing([*caches, *kept]) as workers:
            for number in range(reps):
                empty.append(_start(workers[2 * number], job, f"start {number + 1} with empty caches", show))
                filled.append(_start(workers[2 * number + 1], job, f"start {number + 1} with filled caches", show))
            others = workers[2 * reps :] if empty[0]["decode_path"] == "wave" else []
            plainly = Job({**job.options, "decode": "graph", "compact": None}, job.prompt)
            for number, worker in enumerate(others):
                plain.append(_start(worker, plainly, f"plain start {number}", show))
    kinds = [("empty", empty), ("filled", filled), ("filled", plain[1:])]
    return [_together(caches, starts) for caches, starts in kinds if starts]


def measure_warm(
    device: str, *, reps: int, every: bool = False, show: Callable[[str], None] = lambda text: None
) -> list[WarmResult]:
    """`onewave warm` as often with empty caches and with what those left, and with empty ones and every kernel
    compiled. One after another, a call's time is its kernels' alone. every: `onewave warm --every`, and nothing
    compiled but what has to be. Raises StartupError."""
    arguments = ["-m", "onewave", "warm", "--json", "--device", device, *(["--every"] if every else [])]
    kinds = [[("empty", True), ("filled", True)], *([] if every else [[("empty", False)]])]
    found: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for number in range(1, reps + 1):
        for order, more in (("side by side", []), ("one after another", ["--threads", "1"])):
            for starts in kinds:
                with tempfile.TemporaryDirectory(prefix="onewave-warm-") as directory:
                    for caches, prebuilt in starts:
                        show(f"{order}, {caches} caches{'' if prebuilt else ', compiling'}, start {number}")
                        answer = _in_new_process([*arguments, *more], Path(directory), prebuilt=prebuilt)
                        found.setdefault((order, caches, prebuilt), []).append(answer)
    return [
        WarmResult(
            order=order,
            caches=caches,
            prebuilt=prebuilt,
            seconds=summarize([run["seconds"] for run in runs]),
            calls={
                call["name"]: summarize([run["calls"][place]["seconds"] for run in runs])
                for place, call in enumerate(runs[0]["calls"])
            },
        )
        for (order, caches, prebuilt), runs in found.items()
    ]


@contextmanager
def _importing(caches: Sequence[Path]) -> Generator[list[subprocess.Popen[str]]]:
    """Workers that have imported, one for each directory of caches. Those that still wait for a job end with this."""
    # -P: the worker's directory must not hide modules of the same names.
    workers = [_begin(["-P", str(_WORKER)], each) for each in caches]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        yield workers
    finally:
        for worker in workers:
            with worker:  # which closes its input
                worker.kill()


def _start(worker: subprocess.Popen[str], job: Job, name: str, show: Callable[[str], None]) -> dict[str, Any]:
    """Load the model and answer once. show: told when that begins, and how long it took. Raises StartupError."""
    show(name)
    order = {"options": dict(job.options), "prompt": list(job.prompt), "tokens": _ANSWER_TOKENS}
    found = _answer_of(worker, json.dumps(order) + "\n")
    show(f"{name}: loading {found['load_s']:.2f} s, first answer {found['first_answer_s']:.2f} s")
    return found


def _in_new_process(arguments: Sequence[str], caches: Path, *, prebuilt: bool = True) -> dict[str, Any]:
    """Run Python so and return the JSON that it prints; its caches lie in that directory. Raises StartupError."""
    with _begin(arguments, caches, prebuilt=prebuilt) as process:
        return _answer_of(process, "")


def _begin(arguments: Sequence[str], caches: Path, *, prebuilt: bool = True) -> subprocess.Popen[str]:
    """prebuilt: take prebuilt kernels."""
    kept = {name: str(caches / name.lower()) for name in ("ONEWAVE_CACHE", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
        env=environment({**kept, "ONEWAVE_PREBUILT": "1" if prebuilt else "0", "PYTHONDONTWRITEBYTECODE": ""}),
    )  # fmt: skip


def _answer_of(process: subprocess.Popen[str], text: str) -> dict[str, Any]:
    """Send a process a text and return the JSON that it prints. Raises StartupError."""
    printed, errors = process.communicate(text)
    status = process.returncode
    if status != 0 or not printed.strip():
        # A traceback's last line; of our own errors without the class.
        said = re.sub(r"^onewave\.[\w.]+: ", "", last_words(errors, 400))[:300] or "nothing on stderr"
        ended = f"status {status}" if status >= 0 else f"killed by signal {-status}"
        if status == -signal.SIGKILL:
            said = "probably out of memory"  # the kernel leaves no time to say so
        raise StartupError("a start in a process of its own", got=f"{ended}, {said}")
    return json.loads(printed.splitlines()[-1])


def _together(caches: str, starts: Sequence[Mapping[str, Any]]) -> StartupResult:
    times = {name: summarize([start[name] for start in starts]) for name in ("import_s", "load_s", "first_answer_s")}
    sizes: dict[str, int | None] = {
        name: None if starts[0][name] is None else max(int(start[name]) for start in starts)
        for name in ("peak_bytes", "kept_bytes")
    }
    return StartupResult(
        caches,
        starts[0]["decode_path"],
        starts[0]["compact"],
        **times,
        phases={name: summarize([start["phases"][name] for start in starts]).p50 for name in starts[0]["phases"]},
        peak_bytes=sizes["peak_bytes"],
        kept_bytes=sizes["kept_bytes"],
        cache_bytes=starts[0]["cache_bytes"],
    )
