"""The sampling operators' reference, one row at a time, in plain NumPy float64."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def logprobs(logits: Array) -> Array:
    """Log-softmax of one row."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def penalise(
    logits: Array,
    prompt_ids: list[int],
    output_ids: list[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Array:
    """vLLM's penalties for one row [vocab]."""
    result = logits.copy()
    for token in {*prompt_ids, *output_ids}:
        if np.isfinite(result[token]):
            penalised = result[token] / repetition if result[token] > 0 else result[token] * repetition
            result[token] = min(max(penalised, -1e30), 1e30)
    for token in set(output_ids):
        result[token] -= frequency * output_ids.count(token) + presence
    return result


def allowed(logits: Array, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Tokens that may be sampled from one row, most likely first; ties are ordered by id."""
    logits = logits / temperature
    order = np.argsort(-logits, kind="stable")
    relative = np.exp(logits[order] - logits.max())
    order = order[relative >= min_p]
    if top_k > 0:
        order = order[:top_k]
    probabilities = np.exp(logits[order] - logits.max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    return [int(token) for token in order[before < top_p]]


def sample(
    logits: Array, uniform: float, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """The token at `uniform` of the cumulative distribution, over ids or, with top_k or top_p, over the sorted ones."""
    if temperature == 0:
        return int(np.argmax(logits))
    tokens = allowed(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if top_k <= 0 and top_p == 1:
        tokens = sorted(tokens)
    scaled = logits[tokens] / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled.max()))
    passed = int((cumulative <= uniform * cumulative[-1]).sum())
    return tokens[min(passed, len(tokens) - 1)]
