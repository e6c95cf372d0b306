"""Energy costs of moving a byte and of doing an operation: rough figures, to compare orders with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EnergyCost:
    """picojoules: an amount of energy per `per` ("byte" or "flop"). source: where the figure comes from."""

    picojoules: float
    per: str
    source: str


_HOROWITZ = "Horowitz 2014, Computing's energy problem, ISSCC, figure 1.1.9 (45 nm, 0.9 V)"

ENERGY: dict[str, EnergyCost] = {
    "memory": EnergyCost(31.3, "byte", "O'Connor et al. 2017, Fine-Grained DRAM, MICRO: HBM2 3.92 pJ/bit"),
    "DDR": EnergyCost(162.5, "byte", f"{_HOROWITZ}: 1.3 nJ per 64-bit access, the lower end"),
    "L2": EnergyCost(12.5, "byte", f"{_HOROWITZ}: 1 MB cache, 100 pJ per 64-bit access"),
    "smem": EnergyCost(2.5, "byte", f"{_HOROWITZ}: 32 KB cache, 20 pJ per 64-bit access"),
    "flop": EnergyCost(0.75, "flop", f"{_HOROWITZ}: fp16 add 0.4 pJ and multiply 1.1 pJ, halved"),
}
"""Costs by level; a level that is not listed costs as much as L2."""


def energy_mj(bytes_by_level: dict[str, int], flops: int) -> dict[str, float]:
    """Millijoules by level and for the arithmetic. bytes_by_level: bytes read from and written to each level."""
    cost = {level: ENERGY.get(level, ENERGY["L2"]).picojoules * n * 1e-9 for level, n in bytes_by_level.items()}
    return cost | {"flop": ENERGY["flop"].picojoules * flops * 1e-9}
