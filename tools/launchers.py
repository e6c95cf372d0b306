"""Write down what a C compiler makes for each load of a built-in model: the types of the arguments of what it launches.

`PYTHONPATH=tests python tools/launchers.py` (`make kernels` runs it too) after a change of what a load launches; a test
fails until it has run. A load with empty caches then has these made while Python imports (gpu/first_launch.py).
"""

import json
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from kit.no_device import DEVICE, pretended_device
from onewave.engine.load.first_load import launches_of_load
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.plan_cache import LAUNCHERS, launchers_key, load_program
from onewave.gpu.hashes import hash_in_order
from onewave.gpu.launch import distinct
from onewave.gpu.prebuilt import compiled_from
from onewave.models.llama_plan import DecodeStep
from prebuild import TARGET
from programs import BATCHES, MODELS, config_of, formats, place_of


def types_of(signature: Mapping[str, Any]) -> list[Any]:
    """The types of arguments as the launcher gets them: a descriptor is a TMA map, its sizes and its strides."""
    found: list[Any] = []
    for kind in signature.values():
        box = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", kind) if isinstance(kind, str) else None
        if box is None:
            found.append(kind)
        else:
            axes = box.group(1).count(",") + 1
            found += ["nvTmaDesc", *["i32"] * axes, *["i64"] * axes]
    return found


def launchers_of(model: str, sequences: int, kept: Any) -> list[list[Any]]:
    """The launchers of a load, each once; without its program as of one that is planned now."""
    config, options = config_of(model), LoadOptions(torch.bfloat16, DEVICE, sequences, weight_format=kept)
    program = load_program(place_of(options.step(config))[0])
    with pretended_device():
        made = distinct(launches_of_load(config, options, program))
    found: list[list[Any]] = []
    for launch in made:
        hash_in_order(launch.function)
        source, _ = compiled_from(launch, TARGET)
        # JSON's form: tuples are lists.
        types = json.loads(json.dumps(types_of(source.signature)))
        assert launch.function.is_gluon() or "nvTmaDesc" not in types, "a portable kernel's descriptor may be no map"
        if types not in found:
            found.append(types)
    return found


def contents() -> dict[str, Any]:
    """All that the package is to say of launchers."""
    launchers: list[list[Any]] = []
    loads: dict[str, list[int]] = {}
    for model, sequences in product(MODELS, BATCHES):
        for kept in formats(model):
            key = launchers_key(DecodeStep(config_of(model), sequences, kept))
            for types in launchers_of(model, sequences, kept):
                if types not in launchers:
                    launchers.append(types)
                number = launchers.index(types)
                if number not in loads.setdefault(key, []):
                    loads[key].append(number)
    return {"launchers": launchers, "loads": loads}


def as_text(found: Mapping[str, Any]) -> str:
    """The file's text, a launcher and a load a line."""
    rows = ",\n".join(json.dumps(each) for each in found["launchers"])
    loads = ",\n".join(f"{json.dumps(key)}: {numbers}" for key, numbers in found["loads"].items())
    return f'{{"launchers": [\n{rows}\n], "loads": {{\n{loads}\n}}}}\n'


if __name__ == "__main__":
    LAUNCHERS.write_text(as_text(contents()))
    print(f"{LAUNCHERS.name}: {LAUNCHERS.stat().st_size:,} bytes")
