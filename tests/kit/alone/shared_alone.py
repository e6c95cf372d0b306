"""Print what plans say of shared memory and what the compiler takes: `python shared_alone.py`, TRITON_INTERPRET unset.

A line of JSON a decode step of deep rings: its format, its batch, bytes that the kernel takes, and the plan's bound.
"""

import json
from dataclasses import replace
from functools import partial
from itertools import product

from triton._C.libtriton import ir, nvidia, passes
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.compiler import make_backend

from kit.calls import wave
from kit.recorder import Recorded, record
from onewave.base.weight_formats import NIBBLES
from onewave.gpu.launch import without_collection
from onewave.models.config.model_config import RopeConfig
from onewave.models.llama_plan import DecodeStep, step_parts
from onewave.wave.plan.layout import shared_bytes

# Hidden and intermediate sizes that fill no larger tile, whose ring is deepest, with each head_dim.
_SIZES = ((576, 1536, 64), (1088, 2112, 32), (640, 6208, 128), (1216, 8256, 64))
_FORMATS = [*(found.name for found in NIBBLES.values()), "q4_k_m", "int8", "fp8", "compact"]


def _shared_bytes(recorded: Recorded) -> int:
    """Return the shared memory that a Gluon kernel takes, compiled no further than to where Triton places it."""
    options, backend, context = recorded.options, make_backend(recorded.target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    capability, metadata = recorded.target.arch, {}
    functions = backend.get_codegen_implementation(options)
    with without_collection():
        made = recorded.source.make_ir(recorded.target, options, functions, backend.get_module_map(), context)
        made = backend.gluon_to_ttgir(made, metadata, options, capability)
        # As CUDABackend.make_llir begins.
        manager = ir.pass_manager(context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        version = get_ptx_version_from_options(options, capability)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
        manager.run(made, "_shared_bytes")
        return int(made.get_int_attr("ttg.shared"))


def main() -> None:
    """Print all."""
    wave.FORMATS.update({found.name: found for found in NIBBLES.values()})
    for number, (batch, name) in enumerate(product((1, 2, 4, 8, 16), _FORMATS)):
        hidden, inner, head_dim = _SIZES[number % len(_SIZES)]
        kv_heads = max(hidden // head_dim // 4, 1)
        config = replace(
            wave.MODELS["1B"], hidden_size=hidden, intermediate_size=inner, num_heads=4 * kv_heads,
            num_kv_heads=kv_heads, head_dim=head_dim, rope=RopeConfig("default", 5e5, head_dim),
        )  # fmt: skip
        wave.MODELS["edge"] = config
        [launch] = record(partial(wave.step, "edge", batch, weights=name), sms=16)
        shape = step_parts(DecodeStep(config, batch, wave.FORMATS[name]))[1]
        print(json.dumps([name, batch, _shared_bytes(launch), shared_bytes(shape, head_dim)]), flush=True)


if __name__ == "__main__":
    main()
