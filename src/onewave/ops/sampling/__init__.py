from onewave.ops.sampling.noise import stream_key, uniforms
from onewave.ops.sampling.op import MAX_VOCAB, RowParameters, TokenLogprobs, greedy, penalise, sample, token_logprobs

__all__ = [
    "MAX_VOCAB",
    "RowParameters",
    "TokenLogprobs",
    "greedy",
    "penalise",
    "sample",
    "stream_key",
    "token_logprobs",
    "uniforms",
]
