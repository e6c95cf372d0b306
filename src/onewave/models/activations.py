"""How much memory a pass's activations take, planned from the model's sizes without running it."""

from onewave.memory.plan import Lifetime, Plan, plan_offsets
from onewave.models.config.model_config import ModelConfig

_FLOAT_BYTES = 4
# Steps of a layer in Llama.forward: each makes one value, or a norm two. The last one is the next layer's first norm.
_QKV, _QUERIES, _ATTEND, _OUT, _POST_NORM, _GATE_UP, _HIDDEN, _DOWN, _NORM, _STEPS = range(10)


def plan_pass(config: ModelConfig, num_tokens: int, num_sequences: int, itemsize: int) -> Plan:
    """Place the values of Llama.forward's pass over num_tokens, as long as its names hold them.

    itemsize: bytes of a value; the residual stream and the logits are float32. Gate and up are taken to be made before
    they are multiplied, which a fused operator spares. Two layers are planned: all that follow are alike.
    """
    hidden, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    row = num_tokens * itemsize
    end = _STEPS * 2 + 2
    # The embedding, as the first residual, which the layers are given, and the first norm. A name is held until it is
    # given anew.
    values = [Lifetime(num_tokens * hidden * _FLOAT_BYTES, 0, end), Lifetime(row * hidden, 1, 2 + _NORM)]
    for layer in range(2):
        at, after = _STEPS * layer + 2, _STEPS * (layer + 1) + 2
        values += [
            Lifetime(row * (heads + 2 * kv), at + _QKV, at + _QUERIES),
            Lifetime(row * heads, at + _QUERIES, after + _QUERIES),
            Lifetime(row * heads, at + _ATTEND, after + _ATTEND),
            Lifetime(row * hidden, at + _OUT, at + _DOWN),
            Lifetime(row * hidden, at + _POST_NORM, at + _NORM),
            Lifetime(num_tokens * hidden * _FLOAT_BYTES, at + _POST_NORM, at + _NORM),
            Lifetime(row * 2 * config.intermediate_size, at + _GATE_UP, at + _HIDDEN),
            Lifetime(row * config.intermediate_size, at + _HIDDEN, at + _DOWN),
            Lifetime(row * hidden, at + _DOWN, at + _NORM),
            Lifetime(row * hidden, at + _NORM, after + _NORM),
            Lifetime(num_tokens * hidden * _FLOAT_BYTES, at + _NORM, after + _NORM),
        ]
    values.append(Lifetime(num_sequences * config.vocab_size * _FLOAT_BYTES, end, end + _STEPS))
    return plan_offsets(values)
