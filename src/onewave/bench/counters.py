"""Hardware counters, read by NVIDIA Nsight Compute: what device memory moved, how often the L2 cache had it already.

`collect` runs a Python module once more under `ncu`. The module puts each thing to be counted into a `counted` range,
where nothing is serialised: kernels that overlap, overlap. Counters are those of the whole device over a range, so
the GPU should have nothing else to do; clocks are left alone.
"""

import csv
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from onewave.base.errors import UnsupportedError

_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_HITS = "lts__t_sector_hit_rate.pct"
_METRICS = (_READ, _WRITTEN, _HITS)
_SAYS = "==PROF== "
_MORE_THAN_L2 = 256 << 20


@dataclass(frozen=True)
class Counters:
    """The metrics of one range. l2_hit_rate: sectors found in L2 over those looked up, 0 to 1."""

    dram_read_bytes: float
    dram_write_bytes: float
    l2_hit_rate: float

    @property
    def dram_bytes(self) -> float:
        """Both ways."""
        return self.dram_read_bytes + self.dram_write_bytes


@contextmanager
def counted(device: torch.device) -> Generator[None]:
    """A range: what the device does meanwhile is counted, if this process runs under ncu."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize(device)
    driver.cuProfilerStart()
    yield
    torch.cuda.synchronize(device)
    driver.cuProfilerStop()


def count_cold(run: Callable[[], object], device: torch.device, *, reps: int = 1) -> None:
    """Run something `reps` times, each time once for warming up and then in a range, with an L2 cache that lacks it."""
    elsewhere = torch.zeros(_MORE_THAN_L2 // 4, dtype=torch.int32, device=device)
    for _ in range(reps):
        run()
        # Reading evicts what was written, too: writing would leave lines that come back in the range.
        elsewhere.sum()
        with counted(device):
            run()


def collect(
    module: str, arguments: Sequence[str], *, show: Callable[[str], None] = lambda text: None
) -> list[Counters]:
    """Run `python -m module arguments...` under ncu, as often as the counters need passes; one Counters a range.

    show: told what ncu says of its passes.
    Raises UnsupportedError without ncu, without permission to read counters, and where ncu fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnsupportedError("--counters", got="no ncu on the PATH", next="Install NVIDIA Nsight Compute.")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.csv")
        options = ["--replay-mode", "app-range", "--target-processes", "application-only"]
        options += ["--cache-control", "none", "--clock-control", "none"]
        options += ["--metrics", ",".join(_METRICS), "--csv", "--print-units", "base", "--log-file", str(report)]
        command = [ncu, *options, sys.executable, "-m", module, *arguments]
        lines: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ncu_itself:
            assert ncu_itself.stdout is not None
            for line in ncu_itself.stdout:
                lines.append(line)
                if line.startswith(_SAYS):
                    show(f"ncu: {line.removeprefix(_SAYS).strip()}")
        said, status = "".join(lines), ncu_itself.returncode
        text = report.read_text(encoding="utf-8", errors="replace") if report.exists() else ""
    if "ERR_NVGPUCTRPERM" in text + said:
        raise UnsupportedError(
            "--counters",
            got="no permission to read the counters",
            next="Run as root, or let the driver allow it to all users.",
        )
    found = parse(text)
    if status or not found:
        lines = [line for line in (said + text).splitlines() if line.strip()] or ["no output"]
        reason = next((line for line in lines if line.startswith("==ERROR==")), lines[-1])
        raise UnsupportedError("--counters: ncu", got=f"status {status}: {reason}")
    return found


def parse(report: str) -> list[Counters]:
    """The ranges of ncu's CSV in their order, which has a line a range and metric, in base units."""
    rows = csv.DictReader(line for line in report.splitlines() if line.startswith('"'))
    ranges: dict[str, dict[str, float]] = {}
    for row in rows:
        value = (row.get("Metric Value") or "").replace(",", "")
        # A counter that could not be read is "n/a".
        if row.get("Metric Name") in _METRICS and re.fullmatch(r"[0-9.]+(e[+-]?[0-9]+)?", value):
            ranges.setdefault(row["ID"], {})[row["Metric Name"]] = float(value)
    return [
        Counters(each[_READ], each[_WRITTEN], each[_HITS] / 100)
        for each in ranges.values()
        if each.keys() == set(_METRICS)
    ]
