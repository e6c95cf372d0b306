"""Whether a matrix in a stream reads back."""

from onewave.wave.weights.pack import Weight, WeightStream
from onewave.wave.weights.read_back import ReadBack


def differs(stream: WeightStream, name: str, weight: Weight) -> bool:
    """Say whether a packed matrix reads back otherwise than it is."""
    check = ReadBack(stream)
    check.add(name, weight)
    return check.differs()
