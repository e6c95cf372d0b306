"""Ledger files as tests read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onewave.bench.ledger import validate


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of a ledger file, checked, and that it is of the file's device."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        record = json.loads(line)
        validate(record, f"{path}:{number}")
        assert record["device"] == path.stem, (path, number)
        yield record
