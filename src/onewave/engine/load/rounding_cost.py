"""Cost of rounding a model's weights: how far its next-token distributions move on a small text."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from onewave.models.batch import Batch
from onewave.models.llama import Llama

_log = logging.getLogger("onewave")
TEXT = """The lighthouse keeper wrote down the weather every evening at six. On the third of March the wind came from
the north-west, the sea was rough, and two fishing boats had not returned by dusk. He lit the lamp an hour early,
checked the oil, and called the harbour: "If they see the light, they will make it." In 1921 the station got its first
radio; by 1960 the lamp was electric, and the 214 steps were climbed only to clean the lens. def area(radius): return
3.14159 * radius ** 2. Water boils at 100 degrees Celsius at sea level, but at 93 degrees on a mountain 2,000 m high."""
"""Prose, numbers, a quotation and a line of code."""


@torch.inference_mode()
def sample_logits(model: Llama, ids: Sequence[int]) -> Tensor:
    """Float32 logits of every token of a prompt, on the CPU: [tokens, vocab]."""
    kv = model.new_cache(num_slots=1, capacity=len(ids))
    rows: list[Tensor] = []
    model.forward(
        Batch.prefill([(0, list(ids), 0)], model.device), kv, each=lambda _, logits: rows.append(logits.cpu())
    )
    return torch.cat(rows)


def say_cost(name: str, before: Tensor, after: Llama, ids: Sequence[int]) -> None:
    """Log what rounding to a format cost. before: sample_logits of the model as stored."""
    nats = divergence(before, sample_logits(after, ids))
    text = "%s weights: KL %.4f nats a token to the model as stored, on %d tokens of text"
    _log.warning(text, name, nats, len(ids))


def divergence(before: Tensor, after: Tensor) -> float:
    """Mean Kullback-Leibler divergence of the distributions after from those before, in nats a token."""
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
