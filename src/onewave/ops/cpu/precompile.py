"""Compile the CPU kernels ahead of their first use: `python -m onewave.ops.cpu.precompile`.

Numba keeps what it compiles beside the source, or in the user's cache where that can't be written, so this is needed
once for a machine and a version; without it the first prompt pays. Set-up runs it.
"""

from importlib import import_module

_MODULES = ("append_kv", "attention", "decode_attention", "linear", "rms_norm", "scaled_linear", "swiglu")


def precompile() -> int:
    """Compile, or load from the cache, every kernel of the CPU operators. Returns how many there are."""
    from onewave.ops.cpu.team_impl import kernel

    modules = (import_module(f"onewave.ops.{name}.numba_impl") for name in _MODULES)
    values = [value for module in modules for value in vars(module).values()]
    values += [each for table in values if isinstance(table, dict) for each in table.values()]
    return sum(1 for value in values if isinstance(value, kernel) and value.address)


if __name__ == "__main__":
    print(f"{precompile()} CPU kernels compiled")
