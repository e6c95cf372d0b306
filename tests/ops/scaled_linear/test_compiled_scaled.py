"""The kernels of one-byte products and of their activations as they are compiled, from the committed reports."""

import pytest

from kit.compiled import reports_of

REPORTS = reports_of("scaled ")


@pytest.mark.parametrize("name", [name for name, each in REPORTS.items() if each["kernel"] == "scaled_kernel"])
def test_hoppers_products_run_on_tensor_cores_and_do_not_wait_for_each_other(name: str) -> None:
    """Where the compiler puts products one after another, each has a wait of its own."""
    found = REPORTS[name]
    used, other = ("IGMMA", "QGMMA") if name.startswith("int8") else ("QGMMA", "IGMMA")
    assert found[used] % 4 == 0  # a slice of 128 columns of K is four of 32
    assert found[used] >= 4
    assert found[other] == 0
    assert found["WARPGROUP.DEPBAR"] <= found[used] // 4 + 2
    assert found["UTMALDG"] > 0


@pytest.mark.parametrize("name", [name for name, each in REPORTS.items() if "memory" in each])
def test_a_kernel_waits_for_the_one_before_where_it_may_begin_beside_it(name: str) -> None:
    words = REPORTS[name]["memory"]
    assert words[:2] == (["ACQBULK", "PREEXIT"] if REPORTS[name]["sm"] >= 90 else words[:2])
    assert "STG" in words
    assert ("ACQBULK" in words) == (REPORTS[name]["sm"] >= 90)
