from onewave.ops.sampling.bitmask import restrict, restrict_numpy
from onewave.ops.sampling.noise import stream_key, uniforms
from onewave.ops.sampling.op import (
    MAX_VOCAB,
    Chosen,
    RowParameters,
    TokenLogprobs,
    bound_greedy,
    choose,
    greedy,
    highest_of,
    penalise,
    rows_without_numbers,
    sample,
    token_logprobs,
)

__all__ = [
    "MAX_VOCAB",
    "Chosen",
    "RowParameters",
    "TokenLogprobs",
    "bound_greedy",
    "choose",
    "greedy",
    "highest_of",
    "penalise",
    "restrict",
    "restrict_numpy",
    "rows_without_numbers",
    "sample",
    "stream_key",
    "token_logprobs",
    "uniforms",
]
