"""Errors as users meet them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Expect an error whose message is one line, which any terminal can show, with each of the words."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    message.encode()
    assert "\n" not in message
    for word in words:
        assert word in message
