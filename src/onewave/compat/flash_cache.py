"""KV caches as FlashAttention's callers hold them: [rows, seq, heads, head_dim], or pages and a block table.

Everything here stays on the device: lengths are tensors, no value is read back, every shape is known before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.append_kv.op import append_kv
from onewave.ops.attention.masks import is_whole
from onewave.ops.decode_attention.caches import check_lengths
from onewave.ops.library import check_apart, check_tensors


@dataclass(frozen=True)
class FlashCache:
    """k, v: [rows, seq, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim] with block_table [batch, pages].

    rows: int64 [batch], the cache row of each sequence; None where it is the sequence's own number, or with pages.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None
    block_table: Tensor | None

    @classmethod
    def of(
        cls,
        batch: int,
        k: Tensor,
        v: Tensor,
        cache_batch_idx: Tensor | None,
        block_table: Tensor | None,
        *,
        written: bool,
    ) -> FlashCache:
        """Check a cache for `batch` sequences. Raises ShapeError, InvalidArgumentError."""
        name = "flash_attn_with_kvcache"
        if k.ndim != 4 or v.shape != k.shape:
            got = f"{tuple(k.shape)}, {tuple(v.shape)}"
            raise ShapeError(f"{name}: k_cache, v_cache", got=got, allowed="twice [rows, seq, kv_heads, head_dim]")
        if block_table is not None and cache_batch_idx is not None:
            raise InvalidArgumentError(
                f"{name}: block_table, cache_batch_idx",
                got="both",
                allowed="one of them",
                next="A block table has rows.",
            )
        for label, tensor, ndim in (("block_table", block_table, 2), ("cache_batch_idx", cache_batch_idx, 1)):
            if tensor is not None and (tensor.ndim != ndim or tensor.shape[0] != batch):
                allowed = f"[{batch}, pages a sequence]" if ndim == 2 else f"[{batch}]"
                raise ShapeError(f"{name}: {label}", got=str(tuple(tensor.shape)), allowed=allowed)
            check_index_dtype(f"{name}: {label}", tensor)
        if written:
            check_apart(f"{name}: k_cache", k)
            check_apart(f"{name}: v_cache", v)
        if block_table is None and cache_batch_idx is None and k.shape[0] != batch:
            raise ShapeError(
                f"{name}: rows of the cache", got=str(k.shape[0]), allowed=str(batch), next="Or pass cache_batch_idx."
            )
        rows = None if cache_batch_idx is None else cache_batch_idx.long()
        if block_table is not None and block_table.shape[1] > 1 and block_table.stride(1) != 1:
            block_table = block_table.contiguous()  # as kernels read it
        return cls(k, v, rows, block_table)

    @property
    def capacity(self) -> int:
        """Keys that one sequence can have."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def table(self) -> Tensor | None:
        """The block table that says the same for decode_attention: a row of the cache is one page."""
        return self.block_table if self.rows is None else self.rows[:, None]

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the first two axes for positions [batch, n] of each sequence."""
        if self.block_table is None:
            rows = torch.arange(len(positions), device=positions.device) if self.rows is None else self.rows
            return rows[:, None].expand_as(positions), positions
        size = self.k.shape[1]
        # Positions outside the table belong to no row; a wrong one must not read past its ends.
        page = (positions // size).clamp(min=0).clamp(max=self.block_table.shape[1] - 1)
        return self.block_table.long().gather(1, page), positions % size

    def exist(self, positions: Tensor) -> Tensor:
        """Whether the cache has them, bool like positions [batch, n]."""
        if self.capacity == 0:  # a table without columns has nothing to look up
            return torch.zeros_like(positions, dtype=torch.bool)
        rows, _ = self.places(positions)
        return (positions >= 0) & (positions < self.capacity) & (rows >= 0) & (rows < self.k.shape[0])

    def after(self, leftpad: Tensor) -> FlashCache:
        """Return the keys as pages of one, without each row's first leftpad (int64 [batch]) ones."""
        assert self.block_table is None
        rows = torch.arange(len(leftpad), device=leftpad.device) if self.rows is None else self.rows
        key = leftpad[:, None] + torch.arange(self.capacity, device=leftpad.device)
        # What lies beyond the row's end is not looked at, but must exist.
        pages = rows[:, None] * self.capacity + key.clamp(0, max(self.capacity - 1, 0))
        k, v = (each.flatten(0, 1)[:, None] for each in (self.k, self.v))
        return FlashCache(k, v, None, pages.int() if len(k) < 1 << 31 else pages)

    def append(self, k: Tensor, v: Tensor, past: Tensor, *, drops: bool) -> None:
        """Write new keys and values [batch, n, kv_heads, head_dim] behind the `past` ones. past: int [batch].

        drops: those without a place are left out. Otherwise each must have one.
        """
        positions = past.long()[:, None] + torch.arange(k.shape[1], device=k.device)
        if drops and min(positions.numel(), self.capacity, self.k.shape[0]) == 0:
            return
        places = self.places(positions)
        # A cache must not become a part of some graph of gradients.
        with torch.no_grad():
            if not drops:
                self.k[places] = k
                self.v[places] = v
                return
            exist = self.exist(positions).flatten()
            # Shapes must be known: what has no place becomes one more write of the first that has.
            source = torch.where(exist, torch.arange(len(exist), device=k.device), exist.int().argmax())
            rows, columns = (index.flatten()[source] for index in places)
            places = rows.clamp(0, self.k.shape[0] - 1), columns.clamp(0, self.k.shape[1] - 1)
            for cache, new in ((self.k, k), (self.v, v)):
                cache[places] = torch.where(exist.any(), new.flatten(0, 1)[source], cache[places])

    def append_rotated(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Tensor,
        angles: tuple[Tensor, Tensor],
        interleaved: bool,
        *,
        drops: bool,
    ) -> Tensor:
        """Rotate q [batch, n, heads, head_dim] and the new keys by their places, append, and return q: one kernel.

        angles: cosines and sines, [positions, rotary_dim / 2]. drops: as in append.
        """
        batch, num_new, num_heads, head_dim = q.shape
        positions = past.long()[:, None] + torch.arange(num_new, device=q.device)
        stored = torch.where(self.exist(positions), positions, -1) if drops else positions
        positions = positions.flatten()
        rows = torch.arange(batch, device=q.device) if self.rows is None else self.rows
        rotated = append_kv(
            torch.cat((q, k, v), dim=2).flatten(2).flatten(0, 1),
            torch.cat([values[positions].float() for values in angles], dim=1),
            self.k.transpose(1, 2),
            self.v.transpose(1, 2),
            rows[:, None].expand(-1, num_new).flatten(),
            stored.flatten(),
            num_heads=num_heads,
            rotary_style="interleaved" if interleaved else "neox",
            block_table=self.block_table,
        )
        return rotated.view(batch, num_new, num_heads, head_dim)

    def ragged(self, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all sequences one after another, and their cu_seqlens int32 [batch + 1].

        A copy, as long as the longest batch there can be: lengths are not known on the host.
        """
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        if self.k.shape[0] == 0:  # no row has a key, and there is no place to copy from
            return self.k.flatten(0, 1), self.v.flatten(0, 1), cu_seqlens
        row, position = _owners(cu_seqlens, len(lengths) * self.capacity, self.capacity)
        if self.block_table is None:
            places = (row if self.rows is None else self.rows[row], position)
        else:
            places = _page_places(self.block_table, row, position, self.k.shape[0], self.k.shape[1])
        return self.k[places], self.v[places], cu_seqlens


def _owners(cu_seqlens: Tensor, num_tokens: int, longest: int) -> tuple[Tensor, Tensor]:
    """Sequence and position of each token of a ragged batch; tokens past the end get some valid place."""
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens.long(), token, right=True).sub_(1).clamp_(0, max(len(cu_seqlens) - 2, 0))
    return row, (token - cu_seqlens[row]).clamp_(0, max(longest - 1, 0))


def _page_places(
    block_table: Tensor, row: Tensor, position: Tensor, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor]:
    page = block_table[row, (position // page_size).clamp(max=block_table.shape[1] - 1)].long()
    # Entries beyond a sequence's end may hold anything; what they lead to is not used, but must exist.
    return page.clamp_(0, num_pages - 1), position % page_size


def append_new(
    cache: FlashCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    moves: bool,
    *,
    drops: bool,
) -> Tensor:
    """Rotate q and k, append k and v, return q. moves: each query stands one further than the one before.

    drops: as in FlashCache.append.
    """
    if angles is None:
        cache.append(k, v, past, drops=drops)
        return q
    num_queries, num_new = q.shape[1], k.shape[1]
    fits = k.dtype is v.dtype is q.dtype and q.shape[3] % 8 == 0
    if fits and num_queries == num_new and (moves or num_new == 1):
        return cache.append_rotated(q, k, v, past, angles, interleaved, drops=drops)
    start = past.long()[:, None]
    k = _rotate(k, *angles, start + torch.arange(num_new, device=q.device), interleaved)
    cache.append(k, v, past, drops=drops)
    return _rotate(q, *angles, start + torch.arange(num_queries, device=q.device) * moves, interleaved)


def checked_angles(q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines, checked; None where nothing is rotated."""
    if cos is None and sin is None:
        return None
    if cos is None or sin is None or k is None:
        raise InvalidArgumentError(
            "flash_attn_with_kvcache: rotary", got="a part", allowed="rotary_cos, rotary_sin and new keys together"
        )
    most = q.shape[-1] // 2
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] > most:
        got = f"{tuple(cos.shape)}, {tuple(sin.shape)}"
        allowed = f"twice [positions, up to {most}]"
        raise ShapeError("flash_attn_with_kvcache: rotary_cos, rotary_sin", got=got, allowed=allowed)
    if not (cos.is_floating_point() and sin.is_floating_point()):
        got, allowed = f"{cos.dtype}, {sin.dtype}", "floating point"
        raise UnsupportedError("flash_attn_with_kvcache: dtypes of rotary_cos, rotary_sin", got=got, allowed=allowed)
    return cos, sin


def lengths_before(
    cache: FlashCache, q: Tensor, k: Tensor | None, v: Tensor | None, cache_seqlens: int | Tensor | None
) -> Tensor:
    """Keys that each sequence has before the new ones, int32 [batch]."""
    name, batch = "flash_attn_with_kvcache", q.shape[0]
    if (k is None) != (v is None):
        raise InvalidArgumentError(f"{name}: k, v", got="one of them", allowed="both or none")
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise InvalidArgumentError(f"{name}: cache_seqlens", got="None with new keys", next="Say where they go.")
        wanted = (batch, k.shape[1] if k.ndim == 4 else -1, *cache.k.shape[2:])
        if k.shape != wanted or v.shape != wanted:
            got = f"{tuple(k.shape)}, {tuple(v.shape)}"
            raise ShapeError(f"{name}: k, v", got=got, allowed=f"[{batch}, new, {wanted[2]}, {wanted[3]}]")
        if (k.dtype, v.dtype) != (
            cache.k.dtype,
            cache.v.dtype,
        ):  # bytes would need scales; no argument has them
            got, allowed = f"{k.dtype}, {v.dtype}", f"{cache.k.dtype}, {cache.v.dtype}, as the cache"
            raise UnsupportedError(f"{name}: dtypes of k, v", got=got, allowed=allowed)
    if isinstance(cache_seqlens, Tensor):
        check_tensors(name, cache_seqlens=cache_seqlens)
        if cache_seqlens.shape != (batch,) or cache_seqlens.dtype not in (torch.int32, torch.int64):
            got = f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)}"
            raise ShapeError(f"{name}: cache_seqlens", got=got, allowed=f"a number, or int32 [{batch}]")
        # One too long stays so: narrowed as it is, it could become a right one.
        return cache_seqlens.clamp(-1, cache.capacity + 1).to(torch.int32)
    past = cache.capacity if cache_seqlens is None else cache_seqlens
    num_new = 0 if k is None else k.shape[1]
    if not is_whole(past) or not 0 <= past <= cache.capacity - num_new:
        allowed = f"0 to {cache.capacity - num_new}, so that {num_new} more fit, or int32 [{batch}]"
        raise InvalidArgumentError(f"{name}: cache_seqlens", got=shown(past), allowed=allowed)
    return torch.full((batch,), int(past), dtype=torch.int32, device=q.device)


def check_index_dtype(what: str, indices: Tensor | None) -> None:
    """Raises UnsupportedError."""
    if indices is not None and indices.dtype not in (torch.int32, torch.int64):
        raise UnsupportedError(f"{what}: dtype", got=str(indices.dtype), allowed="torch.int32, torch.int64")


def check_devices(name: str, q: Tensor, *others: Tensor | None) -> None:
    """Raises UnsupportedError."""
    for other in others:
        if other is not None and other.device != q.device:
            raise UnsupportedError(f"{name}: devices", got=f"{q.device} and {other.device}", allowed="one device")


def checked_leftpad(cache: FlashCache, batch: int, leftpad: Tensor | None) -> Tensor | None:
    """Keys of each row's beginning that are padding, int64 [batch]; None for none."""
    if leftpad is None:
        return None
    name = "flash_attn_with_kvcache: cache_leftpad"
    check_index_dtype(name, leftpad)
    if leftpad.shape != (batch,):
        raise ShapeError(name, got=str(tuple(leftpad.shape)), allowed=f"[{batch}]")
    if cache.block_table is not None:
        raise UnsupportedError(name, got="with block_table", next="Leave pages of padding out of the table.")
    return leftpad.long()


def check_places(
    cache: FlashCache,
    past: Tensor,
    num_new: int,
    angles: tuple[Tensor, Tensor] | None,
    reach: int,
    leftpad: Tensor | None,
) -> None:
    """Read lengths, rows, pages and padding back and check them. reach: places behind `past` that are rotated.

    Raises InvalidArgumentError. Waits for the device.
    """
    name = "flash_attn_with_kvcache"
    if past.numel() == 0:
        return
    low, high = (int(end) for end in past.aminmax())
    if low < 0:
        raise InvalidArgumentError(f"{name}: cache_seqlens", got=str(low), allowed="at least 0")
    check_lengths(name, past + num_new, cache.capacity, cache.table, cache.k.shape[0], cache.k.shape[1])
    if leftpad is not None and (wrong := leftpad[(leftpad < 0) | (leftpad > past + num_new)]).numel():
        allowed = "0 to the row's length"
        raise InvalidArgumentError(f"{name}: cache_leftpad", got=str(int(wrong[0])), allowed=allowed)
    if angles is not None and high + reach > len(angles[0]):
        got = f"{len(angles[0])} positions"
        raise InvalidArgumentError(f"{name}: rotary_cos, rotary_sin", got=got, allowed=f"at least {high + reach}")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first elements of each head. x: [batch, n, heads, head_dim]. positions: int64 [batch, n].

    cos, sin: [positions, rotary_dim / 2]. interleaved: pairs are neighbours (GPT-J), not halves (NeoX). In float32,
    rounded once. Source: Su et al. 2021, arXiv:2104.09864.
    """
    half = cos.shape[1]
    c, s = cos[positions].float()[:, :, None], sin[positions].float()[:, :, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
