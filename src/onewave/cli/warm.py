"""`onewave warm`: compile attention's kernels before their first call."""

import json
import time
from typing import Annotated

import typer

from onewave.cli import options
from onewave.engine.arguments import check_device, check_dtype, whole


def warm(
    head_dim: Annotated[
        list[int] | None, typer.Option("--head-dim", help="Several make a list. Default: 64 and 128.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto (bfloat16), bfloat16 or float16.")] = "auto",
    device: options.Device = "auto",
    threads: Annotated[int | None, typer.Option("--threads", help="Default: one a processor.")] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Also full packed calls and sliding windows, and all with the LSE.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compile prefill attention's kernels for this GPU, side by side, into Triton's cache.

    A kernel is otherwise compiled when it is first called, for some seconds; what is in the cache is there for every
    process that has the same TRITON_CACHE_DIR.
    """
    check_device(device)
    check_dtype(dtype)
    if threads is not None:
        whole("--threads", threads, 1)
    from onewave.engine.load.choices import choose_device, choose_operand_dtype
    from onewave.ops.warm import warm as compile_kernels

    where = choose_device(device)
    kind = choose_operand_dtype(dtype, where)
    start = time.perf_counter()
    done = compile_kernels(where, dtypes=(kind,), head_dims=head_dim or (64, 128), threads=threads, every=every)
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"device": str(where), "seconds": seconds, "calls": [vars(each) for each in done]}))
        return
    width = max(len(each.name) for each in done)
    for each in done:
        print(f"{each.name:<{width}}  {each.seconds:5.1f} s")
    print(f"all of them ready after {seconds:.1f} s")
