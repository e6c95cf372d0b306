"""Token ids of texts that were encoded lately: a conversation's turns come again with each request."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable

_Stretch = tuple[str, bool, frozenset[int]]

# Characters of one text. Shorter ones are encoded as soon as they are looked up.
_MIN_CHARACTERS = 256
# Characters of all texts together, beside which their ids take as many bytes. More texts are found again, each takes
# memory of the host.
_MAX_CHARACTERS = 1 << 20


class KeptStretches:
    """Encodes stretches of text, each a text with what its ids depend on besides; the ones used last are kept.

    encode: what gives the same ids for the same arguments. Any thread may call.
    """

    def __init__(self, encode: Callable[[str, bool, frozenset[int]], list[int]]) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Stretch, array[int]] = OrderedDict()
        self._num_characters = 0

    def ids(self, text: str, *, at_start: bool, tags: frozenset[int]) -> list[int]:
        """The ids of a text. Raises as `encode`."""
        if not _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS:
            return self._encode(text, at_start, tags)
        stretch = text, at_start, tags
        with self._lock:
            if (found := self._kept.get(stretch)) is not None:
                self._kept.move_to_end(stretch)
                return found.tolist()
        ids = self._encode(text, at_start, tags)
        with self._lock:
            if stretch not in self._kept:  # another thread's work meanwhile
                self._num_characters += len(text)
            self._kept[stretch] = array("i", ids)
            while self._num_characters > _MAX_CHARACTERS:
                (old, _, _), _ = self._kept.popitem(last=False)
                self._num_characters -= len(old)
        return ids
