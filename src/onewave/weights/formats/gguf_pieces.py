"""How GGUF files are known: by their first bytes, and split ones by names such as `name-00001-of-00003.gguf`."""

import re
from pathlib import Path

GGUF_MAGIC = b"GGUF"
_PIECE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def piece_paths(path: Path) -> list[Path]:
    """Return the paths of all pieces of the model that `path` belongs to, in order.

    The first piece has the metadata. A file that is not named as a piece is its own only piece. No file is looked at.
    """
    match = _PIECE.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [path]
    count, suffix = int(match["count"]), path.suffix
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{suffix}") for number in range(1, count + 1)]
