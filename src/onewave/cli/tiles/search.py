"""`onewave tiles search`: the order of a product's tiles that loads the fewest panels, or a decode step's plan."""

import json
import re
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.cli import options
from onewave.cli.output import percent, show, table
from onewave.cli.tiles import options as given
from onewave.cli.tiles.search_plans import DecodeSearch
from onewave.tiles.graph.builders import cuts
from onewave.tiles.graph.programs import parse_tile, read_sizes
from onewave.tiles.search.panels import strip_snake_loads
from onewave.tiles.search.search import SearchResult, search_panels

MAX_SHOWN = 32
_OF_GEMM = {"tile", "cache_panels", "policy", "start", "method"}


def search_command(
    call: typer.Context,
    decode: DecodeSearch,
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="gemm: C[M,N] = A[M,K] B[K,N]; or decode.")],
    sizes: Annotated[
        list[str] | None, typer.Argument(metavar="SIZES...", help="gemm: M N K, in elements; decode: MODEL.")
    ] = None,
    tile: given.Tile = None,
    cache_panels: Annotated[
        int | None, typer.Option("--cache-panels", help="Whole panels of A and B that fit.")
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="belady (also called opt) or lru.")] = "belady",
    start: Annotated[str, typer.Option("--start", help="The tile to begin with, as ROW,COLUMN.")] = "0,0",
    method: Annotated[str, typer.Option("--method", help="auto, exact, beam or local.")] = "auto",
    time_limit: Annotated[
        float, typer.Option("--time-limit", "--seconds", help="Seconds after which the best so far is it.")
    ] = 10.0,
    as_json: options.Json = False,
) -> None:
    """Search the order of C's tiles that loads the fewest panels, or the plan of a decode step.

    gemm: a tile of C needs a row panel of A and a column panel of B; a load costs 1. Prints loads, a lower bound that
    holds for every order from that start, and whether the loads are proven least. Example: search gemm 512 512 512
    --tile 128x128x64 --cache-panels 4.

    decode: draws changes of the wave's own plan, simulates each by costs fitted to a measured launch, proves the best
    and writes them as files for `bench wave --plans DIR`. Example: search decode llama-3.1-8b --time-limit 600 --out
    plans.
    """
    for name in options.chosen(call, _OF_GEMM if program == "decode" else set(DecodeSearch.__dataclass_fields__)):
        raise InvalidArgumentError(name, got=f"with {program}", allowed="an option of that program; --help lists them")
    if program == "decode":
        decode.run(sizes or [], time_limit, as_json)
        return
    if program != "gemm":
        raise InvalidArgumentError("search", got=repr(program[:40]), allowed="gemm M N K, decode MODEL")
    if cache_panels is None:
        raise InvalidArgumentError("--cache-panels", got="nothing", allowed="2 or more panels")
    m, n, _ = read_sizes("gemm", sizes or [])
    cut = (128, 128, 64) if tile is None else parse_tile(tile)
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*,\s*([0-9]{1,9})\s*", start)
    if found is None:
        raise InvalidArgumentError("--start", got=repr(start[:40]), allowed="ROW,COLUMN, as 0,0")
    policy = {"opt": "belady"}.get(policy.lower(), policy.lower())
    where, how = (int(found[1]), int(found[2])), method.lower()
    grid = (cuts(m, cut[0]), cuts(n, cut[1]))
    result = search_panels(*grid, cache_panels, policy, start=where, method=how, time_limit=time_limit)
    title = " ".join((program, *(sizes or ())))
    if as_json:
        print(json.dumps({"program": title, **result.to_dict()}))
    else:
        _print(title, result)


def _print(title: str, result: SearchResult) -> None:
    head = table(f"{title}: {result.rows} x {result.cols} tiles, room for {result.capacity} panels", "", "")
    head.add_row("policy", result.policy)
    head.add_row("loads", f"{result.loads:,}, {'proven least' if result.proven else 'not proven least'}")
    head.add_row("bound", f"{result.bound:,} ({result.page_fetch:,} by page fetch alone)")
    head.add_row("gap", percent(result.gap))
    head.add_row("strip snake's formula", f"{strip_snake_loads(result.rows, result.cols, result.capacity):,}")
    head.add_row("states looked at", f"{result.expanded:,} in {result.seconds:.2f} s")
    steps = table("what was known when", "by", "seconds", "loads", "bound", "gap")
    for step in result.history:
        gap = percent(step.loads / step.bound - 1)
        steps.add_row(step.by, f"{step.seconds:.3f}", f"{step.loads:,}", f"{step.bound:,}", gap)
    show(head, steps)
    if result.rows <= MAX_SHOWN and result.cols <= MAX_SHOWN:
        place = {tile: at for at, tile in enumerate(result.order)}
        grid = table("when each tile is computed", "row", *map(str, range(result.cols)))
        for row in range(result.rows):
            grid.add_row(str(row), *(str(place[row, col]) for col in range(result.cols)))
        show(grid)
