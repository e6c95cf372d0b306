"""What launches of several tokens refuse before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.models.llama_plan import plan_decode
from onewave.wave.launch_checks import check_rows, check_tokens

sys.path.insert(0, str(Path(__file__).parent))
from tiny_decoders import BASE


def test_every_worker_must_make_logits_in_its_last_step() -> None:
    few = plan_decode(BASE, batch=1, workers=3).program
    check_tokens(few, 64, decodes=True, threads=256)
    many = plan_decode(BASE, batch=1, workers=30).program
    check_tokens(many, 1, decodes=True, threads=256)
    with pytest.raises(UnsupportedError, match=r"30 workers, 17 of which make logits.*all of which do"):
        check_tokens(many, 2, decodes=True, threads=256)
    with pytest.raises(UnsupportedError, match="up to 2, all"):
        check_tokens(few, 2, decodes=True, threads=2)


@pytest.mark.parametrize(("tokens", "decodes"), [(0, True), (65, True), (2, False)])
def test_a_launch_makes_1_to_64_tokens_and_one_that_does_not_decode_none_more(tokens: int, decodes: bool) -> None:
    program = plan_decode(BASE, batch=1, workers=3).program
    with pytest.raises(UnsupportedError, match="tokens of a launch"):
        check_tokens(program, tokens, decodes=decodes, threads=256)


def test_limits_and_draws_of_another_shape_or_dtype_are_refused() -> None:
    limits, draws = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.float64)
    check_rows(None, None, 3, 4)
    check_rows(limits, draws, 3, 4)
    for wrong in (limits[:2], limits[:, :7], limits.int()):
        with pytest.raises(ShapeError, match="limits"):
            check_rows(wrong, draws, 3, 4)
    for wrong in (draws[:2], draws[:, :7], draws.float()):
        with pytest.raises(ShapeError, match="draws"):
            check_rows(limits, wrong, 3, 4)
