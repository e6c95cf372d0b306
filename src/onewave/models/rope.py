"""Rotary position embedding: angles of every position, for the RoPE kinds that LLaMA-family models use.

All arithmetic is float32 in the order in which transformers does it: at position p an error of one rounding in a
frequency turns the angle by p roundings, so a "more exact" frequency would disagree at long context.
Sources: Su et al. 2021, arXiv:2104.09864 (RoPE); Chen et al. 2023, arXiv:2306.15595 (linear); Peng et al. 2023,
arXiv:2309.00071 (dynamic NTK, YaRN); Llama 3.1's reference code (llama3).
"""

import math

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.memory.host import available_bytes
from onewave.memory.shortage import is_out_of_memory
from onewave.models.config.model_config import ModelConfig, RopeConfig

# Bytes for each of a position's rotary_dim numbers: a float32, where it is copied to, and what it is made from.
_BYTES_WHILE_MADE = 14
_FEWEST_POSITIONS = 1024
_BLOCK = 1024


def inv_freq(rope: RopeConfig, *, seq_len: int, max_position: int) -> tuple[Tensor, float]:
    """Return the angle per position of each rotary pair, and the factor on cosines and sines.

    seq_len: tokens in the sequence, which only dynamic NTK looks at; max_position: the model's own context length.
    Returns (float32 [rotary_dim / 2] on the CPU, attention scaling).
    """
    if rope.kind == "dynamic":
        return _dynamic_inv_freq(rope, torch.tensor([seq_len]), max_position)[0], 1.0
    if rope.kind == "yarn":
        return _divided(rope, _yarn_inv_freq(rope)), _yarn_attention_scaling(rope)
    frequencies = _divided(rope, 1.0 / _powers(rope))
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_inv_freq(rope, frequencies), 1.0
    assert rope.kind == "default", rope.kind
    return frequencies, 1.0


class RotaryTable:
    """Cosines and sines of positions up to max_len, made when they are first asked for.

    A row has rotary_dim / 2 cosines, then as many sines, attention scaling multiplied in.
    """

    def __init__(self, config: ModelConfig, max_len: int, device: torch.device):
        self._config, self._max_len, self._device = config, max_len, device
        self.varies = config.rope.kind == "dynamic" and max_len > config.max_position
        self._made = torch.empty(0, config.rope.rotary_dim, device=device)

    def rows(self, length: int) -> Tensor:
        """Return the table of at least the first `length` positions, or of all, float32 [positions, rotary_dim].

        A longer one is another tensor with the same rows: keep the tensor where you keep its address. With dynamic NTK
        row p is meant for a sequence of p + 1 tokens. Raises CapacityError.
        """
        length = min(length, self._max_len)
        if length > len(self._made):
            self._grow(min(self._max_len, max(_FEWEST_POSITIONS, 1 << (length - 1).bit_length())))
        return self._made

    def prefill(self, start: int, end: int) -> Tensor:
        """Return the rows of positions start to end - 1, float32 [end - start, rotary_dim].

        With dynamic NTK all of them are for a sequence of `end` tokens, as transformers rotates a chunk.
        """
        if not self.varies or end <= self._config.max_position:
            return self.rows(end)[start:end]
        return _cos_sin(*self._angles(start, end, seq_len=end))

    def _grow(self, end: int) -> None:
        start, context = len(self._made), self._config.max_position
        needed = _BYTES_WHILE_MADE * (end - start) * self._config.rope.rotary_dim + 4 * self._made.numel()
        room = available_bytes() if self._device.type == "cpu" else None
        try:
            if room is not None and needed > room:
                raise MemoryError
            angles, scaling = self._angles(start, end, seq_len=min(end, context) if self.varies else end)
            if self.varies and end > context:
                first = max(start, context)
                frequencies = _inv_freq_by_position(self._config.rope, first, end, context)
                angles[first - start :] = (torch.arange(first, end).float()[:, None] * frequencies).to(self._device)
            self._made = torch.cat((self._made, _cos_sin(angles, scaling)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"rotary angles of {end} positions",
                got=f"{needed / 2**30:.1f} GiB do not fit on {self._device}",
                next="Lower max_model_len.",
            ) from error

    def _angles(self, start: int, end: int, *, seq_len: int) -> tuple[Tensor, float]:
        """Return (float32 [end - start, rotary_dim / 2], attention scaling)."""
        frequencies, scaling = inv_freq(self._config.rope, seq_len=seq_len, max_position=self._config.max_position)
        positions = torch.arange(start, end, device=self._device).float()
        return positions[:, None] * frequencies.to(self._device), scaling


def _cos_sin(angles: Tensor, scaling: float) -> Tensor:
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling


def _powers(rope: RopeConfig) -> Tensor:
    """theta^(2i / rotary_dim): the inverse of pair i's unscaled frequency."""
    return rope.theta ** (torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim)


def _divided(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    return frequencies if rope.factor_divisors is None else frequencies / torch.tensor(rope.factor_divisors)


def _dynamic_inv_freq(rope: RopeConfig, seq_lens: Tensor, max_position: int) -> Tensor:
    """Grow the base with the sequence beyond max_position. seq_lens: int64 [n]. Returns float32 [n, rotary_dim / 2]."""
    lengths = seq_lens.clamp(min=max_position)
    stretch = rope.factor * lengths / max_position - (rope.factor - 1)
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    exponents = torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim
    return 1.0 / (theta[:, None] ** exponents)


def _inv_freq_by_position(rope: RopeConfig, start: int, end: int, max_position: int) -> Tensor:
    """Dynamic NTK's for sequences that end with each position, float32 [end - start, rotary_dim / 2].

    In blocks at fixed places: PyTorch rounds a power by where in a tensor it stands.
    """
    begin = start // _BLOCK * _BLOCK
    lengths = torch.arange(begin, end, _BLOCK)[:, None] + torch.arange(1, _BLOCK + 1)
    blocks = [_dynamic_inv_freq(rope, block, max_position) for block in lengths]
    return torch.cat(blocks)[start - begin : end - begin]


def _llama3_inv_freq(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, blend those in between by their turns per context."""
    assert rope.original_max_position is not None
    turns = rope.original_max_position / (2 * math.pi / frequencies)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > rope.original_max_position / rope.low_freq_factor
    fast = wavelengths < rope.original_max_position / rope.high_freq_factor
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, blended))


def _yarn_inv_freq(rope: RopeConfig) -> Tensor:
    """Blend unscaled (fast pairs) and position-interpolated (slow pairs) frequencies along a ramp over the pairs."""
    low, high = _yarn_ramp(rope)
    kept = 1 - ((torch.arange(rope.rotary_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    powers = _powers(rope)
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_ramp(rope: RopeConfig) -> tuple[float, float]:
    """Return the pair indices between which the blend goes from unscaled to interpolated."""
    context = rope.original_max_position
    assert context is not None

    def pair_of(turns: float) -> float:
        """Index of the pair that makes this many turns over the original context."""
        return rope.rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_scaling(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
