"""Device memory's bytes and the L2 cache's hits of a prompt's parts, a layer of each, read by ncu (see counters.py)."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from onewave.base.errors import UnsupportedError
from onewave.bench.clock import recorded
from onewave.bench.counters import Counters, collect, counted
from onewave.bench.profile.measure import PromptOperands
from onewave.models.config.read import find_config
from onewave.models.profile import PREFILL, parts

_MORE_THAN_L2 = 256 << 20


def count_prompt(model: str, tokens: list[int]) -> dict[tuple[int, str], Counters]:
    """Counters of each part but the whole, by tokens and name, a layer of it. Raises UnsupportedError without ncu."""
    config = find_config(model)
    found = collect(__name__, [json.dumps({"model": model, "tokens": tokens})])
    names = [(count, part.name) for count in tokens for part in parts(config, PREFILL, count, 0)[:-1]]
    if len(found) != len(names):
        raise UnsupportedError("--counters: ncu", got=f"{len(found)} counted ranges of {len(names)}")
    return dict(zip(names, found, strict=True))


def main(asked: dict[str, Any]) -> None:
    """What runs under ncu: each part once for warming up, then once in a range, with an L2 cache that lacks it."""
    device, config = torch.device("cuda", 0), find_config(asked["model"])
    elsewhere = torch.zeros(_MORE_THAN_L2 // 4, dtype=torch.int32, device=device)
    with torch.inference_mode():
        for tokens in asked["tokens"]:
            operands = PromptOperands(config, tokens, device)
            for part in parts(config, PREFILL, tokens, 0)[:-1]:
                run = recorded(operands.calls(part)[:1], device)
                run()
                elsewhere.sum()
                with counted(device):
                    run()
                del run
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
