"""Report of each kernel, by its name: resources, instructions, and what analysers find in its text."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from kit.build import Built
from kit.calls.call import Call
from kit.recorder import Recorded
from kit.reports import attention, decode, scaled, small, wave
from kit.reports.common import Report, partitions, resources
from kit.source_digest import digest_of_files

__all__ = ["checks_of", "report_of"]

_Checks = list[Callable[[Built], Report]]
# Modules of which the key itself holds what is recorded.
_RECORDING = {Recorded.__module__, Call.__module__}
_GLUON: dict[str, _Checks] = {
    "attention_kernel": [attention.hopper],
    "fp8_kernel": [attention.hopper],
    "mma_kernel": [attention.mma],
    "stream_kernel": [decode.stream],
    "chain_kernel": [small.chain],
    "post_attention_kernel": [small.chain],
    "scaled_kernel": [scaled.product],
    "wave_kernel": [wave.wave],
}
_TRITON: dict[str, _Checks] = {
    "attention_kernel": [attention.portable],
    "split_kv_kernel": [decode.split_kv],
    "append_kv_kernel": [small.dependent, small.conversions],
    "append_halves_kernel": [small.dependent],
    **{
        name: [small.dependent]
        for name in (
            "rms_norm_kernel",
            "swiglu_kernel",
            "row_kernel",
            "tile_kernel",
            "quantize_kernel",
            "product_kernel",
        )
    },
    **{name: [wave.packing] for name in ("_bases_kernel", "_pack_kernel", "_unpack_kernel")},
}


def report_of(recorded: Recorded, built: Built, call: Call) -> Report:
    """Return what all checks of a kernel report, and the call's own."""
    found: Report = {}
    for check in _checks(recorded):
        found |= check(built)
    return found if call.check is None else found | call.check(recorded, built)


def checks_of(recorded: Recorded, call: Call) -> str:
    """Return a digest of the code of a kernel's checks and of the call's own, and of what they call."""
    modules: set[str] = set()
    left = [check.__module__ for check in _checks(recorded)]
    if call.check is not None:
        left.append(getattr(call.check, "func", call.check).__module__)
    while left:
        name = left.pop()
        if name not in modules and name.startswith("kit.") and name not in _RECORDING:
            modules.add(name)
            left += {getattr(value, "__module__", "") or "" for value in vars(sys.modules[name]).values()}
    return digest_of_files(Path(inspect.getfile(sys.modules[name])) for name in modules)


def _checks(recorded: Recorded) -> _Checks:
    if recorded.asked.function.is_gluon():
        return [resources, partitions, *_GLUON.get(recorded.kernel, [])]
    return [resources, *_TRITON.get(recorded.kernel, [])]
