"""Static plans."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onewave.base.errors import InvalidArgumentError
from onewave.memory.allocator import ALIGNMENT
from onewave.memory.plan import Lifetime, plan_offsets


@st.composite
def lifetimes(draw):
    begin, length = draw(st.integers(0, 30)), draw(st.integers(0, 8))
    return Lifetime(draw(st.integers(0, 5000)), begin, begin + length)


@settings(max_examples=150)
@given(st.lists(lifetimes(), max_size=25))
def test_values_that_live_together_lie_apart_and_no_plan_is_below_what_lives(values):
    plan = plan_offsets(values)
    ends = [at + -(-value.num_bytes // ALIGNMENT) * ALIGNMENT for at, value in zip(plan.offsets, values, strict=True)]
    for one, other in combinations(range(len(values)), 2):
        if values[one].first <= values[other].last and values[other].first <= values[one].last:
            assert ends[one] <= plan.offsets[other] or ends[other] <= plan.offsets[one]
    assert plan.total_bytes == max(ends, default=0)
    sizes = [end - at for end, at in zip(ends, plan.offsets, strict=True)]
    live = [sum(size for size, v in zip(sizes, values, strict=True) if v.first <= s <= v.last) for s in range(40)]
    assert plan.live_bytes == max(live) <= plan.total_bytes


def test_a_chain_of_equal_values_takes_turns_in_two_places():
    plan = plan_offsets([Lifetime(1000, step, step + 1) for step in range(10)])
    assert plan.total_bytes == plan.live_bytes == 2048


def test_a_value_that_ends_before_it_begins_is_refused():
    with pytest.raises(InvalidArgumentError, match="last=2"):
        plan_offsets([Lifetime(1, 3, 2)])
