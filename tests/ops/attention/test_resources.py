"""tools/resources.py: how many programs fit an SM."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

_SPEC = spec_from_file_location("resources", Path(__file__).parents[3] / "tools" / "resources.py")
tool = module_from_spec(_SPEC)
sys.modules["resources"] = tool  # where a dataclass looks for its module
_SPEC.loader.exec_module(tool)


@pytest.mark.parametrize(
    ("sizes", "programs"),
    [
        ({}, 2),
        ({"shared": 0}, 3),
        ({"shared": 0, "registers": 161}, 3),
        ({"shared": 0, "registers": 32}, 16),
        ({"threads": 384, "shared": 227 << 10}, 1),
        ({"threads": 32, "registers": 8, "shared": 0}, 32),
    ],
)
def test_the_scarcest_of_registers_shared_memory_and_threads_bounds_the_programs(
    sizes: dict[str, int], programs: int
) -> None:
    whole = {"threads": 128, "registers": 168, "stack": 0, "shared": 100 << 10} | sizes
    found = tool.Resources("x", 90, seconds=1.5, **whole)
    assert found.programs_an_sm == programs
    assert found.occupancy == programs * found.threads / 2048
