"""The sampling parameters of a batch's row, and the units that implementations count in."""

from typing import NamedTuple

# The largest vocabulary whose cumulative sum of weights up to 2**44 stays within int64.
MAX_VOCAB = 2**18
UNIT = 2.0**44
# The largest logit that a temperature may divide, and a softmax subtract from itself.
LARGEST_LOGIT = 1e30
NO_LIMIT = 2**63 - 1


class RowLimits(NamedTuple):
    """A sampled row's parameters; top_k is NO_LIMIT, top_p 1 and min_p 0 where it has none."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def ordered(self) -> bool:
        """Whether its tokens are sampled in the order of their probabilities, not of their ids."""
        return self.top_k < NO_LIMIT or self.top_p < 1
