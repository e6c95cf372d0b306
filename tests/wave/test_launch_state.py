"""LaunchState: the number of tokens by which launches of several take turns stays below 31 bits."""

from __future__ import annotations

from typing import Any, cast

import pytest

from onewave.wave.launch import state as launch_state
from onewave.wave.launch.state import LaunchState


def test_before_the_number_of_tokens_passes_31_bits_all_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    monkeypatch.setattr(LaunchState, "reset", lambda self, program, budget: resets.append(budget))
    state = LaunchState(*cast("Any", [None] * 9))
    for _ in range(3):
        state.count(64, cast("Any", None), 7)
    assert (state.counted, resets) == (192, [])
    monkeypatch.setattr(launch_state, "_MOST_COUNTED", 200)
    state.count(64, cast("Any", None), 7)
    assert (state.counted, resets) == (64, [7])
    assert launch_state._MOST_COUNTED + 64 < 1 << 31
