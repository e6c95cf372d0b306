"""How long it takes to start, as users meet it: in processes of their own, with caches empty and filled.

Caches are those of compiled kernels (Triton's, Numba's) and of the wave's finished programs. They lie in a directory
that is made for the first start and left for the second one. A model's files have been found before, and come from
memory where the system kept them; Python keeps its byte code, as pip does when it installs a package. Where the engine
chose the wave, starts that decode with CUDA graphs of plain operators stand beside it, with their own caches filled:
loading without what the wave adds.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """What is started. options: LLM's arguments by name, of JSON's types. prompt: the first call's token ids."""

    options: Mapping[str, Any]
    prompt: Sequence[int]

    @classmethod
    def of(cls, options: Mapping[str, Any], *, vocab_size: int, max_model_len: int) -> Job:
        """With a prompt of 16 tokens, or as many as fit before an answer, but one at least."""
        count = max(1, min(16, max_model_len - _ANSWER_TOKENS))
        return cls(options, [i % vocab_size for i in range(count)])


@dataclass(frozen=True)
class StartupResult:
    """Starts of one kind. All times in seconds.

    caches: "empty" or "filled". decode_path: how the engine decoded; compact: whether with compact weights. import_s:
    importing the package and PyTorch. load_s: making the LLM. first_answer_s: its first call, the job's prompt and up
    to 2 tokens generated. peak_bytes: the most that PyTorch held of the GPU's memory by the time that the LLM was
    made, in any start; kept_bytes: what it held then; None on a CPU.
    """

    caches: str
    decode_path: str
    compact: bool
    import_s: Summary
    load_s: Summary
    first_answer_s: Summary
    peak_bytes: int | None
    kept_bytes: int | None

    def measurements(self, model: str, extra: Mapping[str, Any]) -> Iterator[Measurement]:
        """The ledger's lines: one for loading, one for the first answer."""
        names = ("caches", "decode_path", "compact", "peak_bytes", "kept_bytes")
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


def measure_startup(job: Job, *, reps: int, show: Callable[[str], None] = lambda text: None) -> list[StartupResult]:
    """Start the model `reps` times with empty caches and as often with filled ones; where it decodes with the wave, as
    often again with CUDA graphs. show: is told what runs. Raises StartupError."""
    empty: list[dict[str, Any]] = []
    filled: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    graphs = Job({**job.options, "decode": "graph", "compact": None}, job.prompt)
    with tempfile.TemporaryDirectory(prefix="onewave-plain-") as kept:
        for number in range(1, reps + 1):
            with tempfile.TemporaryDirectory(prefix="onewave-startup-") as caches:
                show(f"empty caches: {number} of {reps}")
                empty.append(_start(job, Path(caches)))
                show(f"filled caches: {number} of {reps}")
                filled.append(_start(job, Path(caches)))
            if empty[0]["decode_path"] == "wave":
                show(f"plain loading: {number} of {reps}")
                if not plain:
                    _start(graphs, Path(kept))
                plain.append(_start(graphs, Path(kept)))
    kinds = [("empty", empty), ("filled", filled), ("filled", plain)]
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
                        show(f"{order}, {caches} caches{'' if prebuilt else ', compiling'}: {number} of {reps}")
                        answer = _in_new_process([*arguments, *more], "", Path(directory), prebuilt=prebuilt)
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


def _start(job: Job, caches: Path) -> dict[str, Any]:
    """Load the model and answer once. Raises StartupError."""
    order = {"options": dict(job.options), "prompt": list(job.prompt), "tokens": _ANSWER_TOKENS}
    # -P: the worker's directory must not hide modules of the same names.
    return _in_new_process(["-P", str(_WORKER)], json.dumps(order) + "\n", caches)


def _in_new_process(arguments: Sequence[str], text: str, caches: Path, *, prebuilt: bool = True) -> dict[str, Any]:
    """What Python, called so and given a text, prints as JSON; its caches lie in that directory.

    prebuilt: take prebuilt kernels. Raises StartupError.
    """
    kept = {name: str(caches / name.lower()) for name in ("ONEWAVE_CACHE", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment({**kept, "ONEWAVE_PREBUILT": "1" if prebuilt else "0", "PYTHONDONTWRITEBYTECODE": ""}),
        check=False,
    )
    if done.returncode != 0 or not done.stdout.strip():
        # A traceback's last line; of our own errors without the class.
        said = re.sub(r"^onewave\.[\w.]+: ", "", last_words(done.stderr, 400))[:300] or "nothing on stderr"
        ended = f"status {done.returncode}" if done.returncode >= 0 else f"killed by signal {-done.returncode}"
        if done.returncode == -signal.SIGKILL:
            said = "probably out of memory"  # the kernel leaves no time to say so
        raise StartupError("a start in a process of its own", got=f"{ended}, {said}")
    return json.loads(done.stdout.splitlines()[-1])


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
        peak_bytes=sizes["peak_bytes"],
        kept_bytes=sizes["kept_bytes"],
    )
