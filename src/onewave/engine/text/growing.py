"""An answer's text as it grows."""

# Characters that a further piece copies at most.
_MAX_NEWEST = 1024


class GrowingText:
    """A text that grows piece by piece, in one thread, and is read in others. A piece copies no more than the newest
    part, however long the text is."""

    __slots__ = ("_newest", "_older")

    def __init__(self) -> None:
        # Where the newest part begins, and the part; one value, as a reader may come at any time.
        self._newest = (0, "")
        self._older: list[str] = []

    def __len__(self) -> int:
        begin, newest = self._newest
        return begin + len(newest)

    def __str__(self) -> str:
        begin, newest = self._newest
        return "".join(self._older)[:begin] + newest

    def add(self, piece: str) -> None:
        begin, newest = self._newest
        newest += piece
        if len(newest) >= _MAX_NEWEST:
            self._older.append(newest)
            begin, newest = begin + len(newest), ""
        self._newest = begin, newest

    def between(self, begin: int, end: int) -> str:
        """Its characters from `begin` to before `end`."""
        first, newest = self._newest
        return newest[begin - first : end - first] if begin >= first else str(self)[begin:end]

    def cut(self, length: int) -> None:
        """Leave no more than its first `length` characters. Nothing is added after that."""
        self._newest = 0, self.between(0, length)
