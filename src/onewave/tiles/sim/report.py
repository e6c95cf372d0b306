"""Figures of a simulation beyond times: bytes per level and tensor, hits, waves, energy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from onewave.base.errors import InvalidArgumentError

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
# Far above any count; a ratio of two such numbers is still a float.
_MAX_VALUE = 1e30


def _checked(what: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Check plain fields against their annotations. Raises ValueError, and TypeError as an unknown field will."""
    for field in fields(what):
        allowed = _TYPES.get(str(field.type))
        if allowed is not None and type(values.get(field.name)) not in allowed:
            raise TypeError(f"{field.name} {values.get(field.name)!r}")
        if allowed is not None and str not in allowed and abs(values[field.name]) > _MAX_VALUE:
            raise ValueError(f"{field.name} above {_MAX_VALUE:g}")
    return values


@dataclass(frozen=True)
class TensorTraffic:
    """One tensor's part of a level's traffic, in bytes and accesses."""

    tensor: str
    accesses: int
    hits: int
    loaded_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class LevelTraffic:
    """One cache level. requested_bytes: what reached it; loaded_bytes, stored_bytes: what it passed to the next level.

    hits: accesses that found their tile. evictions: tiles pushed out, the flush at the end not counted.
    """

    level: str
    policy: str
    capacity: int
    accesses: int
    hits: int
    requested_bytes: int
    loaded_bytes: int
    stored_bytes: int
    evictions: int
    tensors: tuple[TensorTraffic, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Hits over accesses, 0 where there are none."""
        return self.hits / self.accesses if self.accesses else 0.0


@dataclass(frozen=True)
class Report:
    """One simulation. order, mode: as they were asked for.

    memory_loaded, memory_stored: bytes through the last level, both ways. compulsory_loaded, compulsory_stored: what
    any order must move: each input tile once in, each output that is not overwritten once out. flops: of all tasks.
    waves: of the cache's wave mode, or how often all lanes could have been filled. critical_path: the longest chain of
    dependent tasks, each as long as it took. energy_mj: millijoules by level.
    """

    order: str
    mode: str
    levels: tuple[LevelTraffic, ...]
    memory_loaded: int
    memory_stored: int
    compulsory_loaded: int
    compulsory_stored: int
    flops: int
    waves: int
    critical_path: float
    energy_mj: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON's plain types."""
        return asdict(self) | {"levels": [asdict(level) | {"hit_rate": level.hit_rate} for level in self.levels]}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Report:
        """Read what to_dict made. Raises InvalidArgumentError."""
        try:
            levels: list[LevelTraffic] = []
            for given in document["levels"]:
                level = {key: value for key, value in given.items() if key != "hit_rate"}
                tensors = tuple(TensorTraffic(**_checked(TensorTraffic, tensor)) for tensor in level.pop("tensors", ()))
                levels.append(LevelTraffic(**_checked(LevelTraffic, level), tensors=tensors))
            energy = {str(name): float(value) for name, value in document["energy_mj"].items()}
            whole: dict[str, Any] = {**_checked(cls, document), "levels": tuple(levels), "energy_mj": energy}
            found = cls(**whole)
            if not all(isfinite(number) for number in (found.critical_path, *energy.values())):
                raise ValueError("a number that JSON does not have")
            return found
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            got = f"{type(error).__name__} {error}"[:80]
            raise InvalidArgumentError("trace: report", got=got, allowed="a simulation's report, or null") from None
