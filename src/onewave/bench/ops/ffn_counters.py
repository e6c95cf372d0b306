"""Counts the device memory traffic and L2 hits of each arrangement of a block or a layer (see `counters`).

The parent (`count_ffn`) runs this module under ncu; there `main` makes every arrangement once for warming up and then
`reps` times in a counted range, recorded in a CUDA graph, after a pass over other memory has emptied the L2 cache.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from onewave.base.errors import UnsupportedError
from onewave.bench.clock import recorded, summarize
from onewave.bench.counters import Counters, collect, count_cold
from onewave.bench.ledger import Measurement
from onewave.bench.ops.ffn import FFNShape, check_gpu
from onewave.bench.ops.post_attention import LayerShape


@dataclass(frozen=True)
class CountedFFN:
    """Counters of one implementation on one shape, a set a repetition."""

    shape: FFNShape
    implementation: str
    counters: tuple[Counters, ...]

    @property
    def median(self) -> Counters:
        """The median of each counter by itself."""
        columns = zip(*map(astuple, self.counters), strict=True)
        return Counters(*(summarize(column).p50 for column in columns))

    @property
    def times_least(self) -> float:
        """Bytes of device memory over the least that any way moves: weights, rows in, rows out."""
        return self.median.dram_bytes / self.shape.least_bytes

    def measurement(self, dtype: str) -> Measurement:
        """The ledger's line: bytes of device memory, both ways."""
        extra: dict[str, object] = {
            "implementation": self.implementation,
            "shape": str(self.shape),
            "dtype": dtype,
            **asdict(self.median),
            "least_bytes": self.shape.least_bytes,
            "method": "ncu, application range replay, cold L2",
        }
        summary = summarize([each.dram_bytes for each in self.counters])
        operator = self.shape.operator
        return Measurement(operator, f"{operator}_dram_bytes", "bytes", summary, None, extra)


def count_ffn(
    shapes: Sequence[FFNShape],
    device: torch.device,
    dtype: torch.dtype,
    *,
    reps: int = 1,
    show: Callable[[str], None] = lambda text: None,
) -> list[CountedFFN]:
    """Counters of every arrangement on every shape. show: told what runs.

    Raises UnsupportedError without a GPU or ncu.
    """
    check_gpu(device)
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names.json")
        asked = {
            "operator": shapes[0].operator,
            "shapes": [asdict(shape) for shape in shapes],
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "reps": reps,
            "names": str(names),
        }
        found = collect(__name__, [json.dumps(asked)], show=show)
        ran: list[list[str]] = json.loads(names.read_text()) if names.exists() else []
    if len(found) != reps * sum(map(len, ran)) or len(ran) != len(shapes):
        got = f"{len(found)} counted ranges of {reps * sum(map(len, ran))}"
        raise UnsupportedError("--counters: ncu", got=got, allowed="all of them")
    rest = iter(found)
    return [
        CountedFFN(shape, name, tuple(next(rest) for _ in range(reps)))
        for shape, implementations in zip(shapes, ran, strict=True)
        for name in implementations
    ]


def main(asked: dict[str, Any]) -> None:
    """Run the ranges under ncu: one a repetition, arrangement after arrangement, shape after shape."""
    device, dtype = torch.device(asked["device"]), getattr(torch, asked["dtype"])
    torch.cuda.set_device(device)
    names: list[list[str]] = []
    for each in asked["shapes"]:
        shape = (LayerShape if asked["operator"] == LayerShape.operator else FFNShape)(**each)
        ways = shape.arrangements(device, dtype, copies=1)
        with torch.inference_mode():
            for way in ways:
                count_cold(recorded(way.calls, device), device, reps=asked["reps"])
                for check in way.check:
                    check()
        names.append([way.name for way in ways])
        Path(asked["names"]).write_text(json.dumps(names))
        del ways
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
