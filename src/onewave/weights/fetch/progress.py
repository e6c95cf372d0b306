"""A progress bar in bytes on stderr."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

Report = Callable[[int], None]
"""Called with the number of bytes done so far."""


@contextmanager
def byte_progress(title: str, total_bytes: int, *, enabled: bool) -> Generator[Report]:
    """Draw a bar while the block runs; it yields the function to report with. Draws nothing when not enabled."""
    if not enabled:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda done: bar.update(task, completed=min(done, total_bytes))
        bar.update(task, completed=total_bytes)
