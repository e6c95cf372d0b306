"""Finding stop strings in text that arrives piece by piece."""

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    """Return where the first stop string begins, and the string; None when there is none.

    Only matches that end after text[:start] count. The one that ends first wins, and of those the longest: the one a
    reader sees completed first, however the text was cut into pieces.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, start - len(stop) + 1))
        if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
            best = (begin + len(stop), begin, stop)
    return None if best is None else (best[1], best[2])


def num_held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string could begin with."""
    held, last = 0, text[-1:]
    for stop in stops:
        if last not in stop:  # nearly always, and in a tenth of the time
            continue
        for length in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:length]):
                held = length
                break
    return held
