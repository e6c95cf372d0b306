"""`onewave bench ops --host`: the host's time of eager calls, beside PyTorch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onewave.base.errors import InvalidArgumentError, shown
from onewave.cli.bench.report import Results, Rows, name_of, show_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from onewave.models.config.model_config import ModelConfig


def bench_host(
    names: Sequence[str], config: ModelConfig, model: str, device: torch.device, dtype: torch.dtype, *, rounds: int,
    out: Results,
) -> None:  # fmt: skip
    """Time the operators of these names, all without one. Raises InvalidArgumentError."""
    from onewave.bench.ops.host import OURS, PEER, host_trials, measure_host

    trials = host_trials(config, device, dtype)
    known = {trial.operator for trial in trials}
    wanted = [name.replace("-", "_") for name in names]
    for name in wanted:
        if name not in known:
            raise InvalidArgumentError("operator with --host", got=shown(name), allowed=", ".join(sorted(known)))
    show_status("timing eager calls")
    results = measure_host([t for t in trials if not wanted or t.operator in wanted], device, rounds=rounds)
    title = f"{model}, {name_of(dtype)} on {device}: host time of eager calls"
    rows = Rows(out, device, title, "operator", "shape", f"{OURS} us", f"{PEER} us", "ratio", left=2)
    found: list[dict[str, Any]] = []
    for result in results:
        trial, us = result.trial, {name: seconds.p50 * 1e6 for name, seconds in result.seconds.items()}
        cells = ("" if value is None else f"{value:.1f}" for value in (us[OURS], us.get(PEER)))
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        rows.add((trial.operator, trial.shape, *cells, ratio), result.measurements(model, name_of(dtype)))
        found.append({"operator": trial.operator, "shape": trial.shape, "us": us, "ratio": result.ratio})
    rows.finish({"model": model, "device": str(device), "trials": found})
