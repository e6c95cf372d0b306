"""KV caches as FlashAttention's callers hold them: [rows, seq, heads, head_dim], or pages and a block table.

Everything here stays on the device: lengths are tensors, no value is read back, every shape is known before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops import checks
from onewave.ops.append_kv.op import append_kv
from onewave.ops.append_kv.reference import rotate
from onewave.ops.decode_attention.caches import check_lengths

_NAME = "flash_attn_with_kvcache"


@dataclass(frozen=True)
class NewKeys:
    """k, v: [batch, n, kv_heads, head_dim], to stand behind `past` (int32 [batch]) keys of each sequence.

    angles: cosines and sines, [positions, rotary_dim / 2] each, by which they are rotated, None for none; interleaved:
    in pairs of neighbours. moves: each query stands one place behind the one before. drops: keys without a place are
    left out; otherwise each must have one.
    """

    k: Tensor
    v: Tensor
    past: Tensor
    angles: tuple[Tensor, Tensor] | None
    interleaved: bool
    moves: bool
    drops: bool

    @property
    def positions(self) -> Tensor:
        """int64 [batch, n]."""
        return self.past.long()[:, None] + torch.arange(self.k.shape[1], device=self.k.device)


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
        cls, batch: int, k: Tensor, v: Tensor, rows: Tensor | None, block_table: Tensor | None, *, written: bool
    ) -> "FlashCache":
        """Check a cache for `batch` sequences. Raises ShapeError, InvalidArgumentError, UnsupportedError."""
        if k.ndim != 4 or v.shape != k.shape:
            got = f"{tuple(k.shape)}, {tuple(v.shape)}"
            raise ShapeError(f"{_NAME}: k_cache, v_cache", got=got, allowed="twice [rows, seq, kv_heads, head_dim]")
        if block_table is not None and rows is not None:
            what, next = f"{_NAME}: block_table, cache_batch_idx", "A block table has rows."
            raise InvalidArgumentError(what, got="both", allowed="one of them", next=next)
        for label, tensor, ndim in (("block_table", block_table, 2), ("cache_batch_idx", rows, 1)):
            if tensor is not None and (tensor.ndim != ndim or tensor.shape[0] != batch):
                allowed = f"[{batch}, pages a sequence]" if ndim == 2 else f"[{batch}]"
                raise ShapeError(f"{_NAME}: {label}", got=str(tuple(tensor.shape)), allowed=allowed)
            check_index_dtype(f"{_NAME}: {label}", tensor)
        if written:
            checks.apart(_NAME, "k_cache", k)
            checks.apart(_NAME, "v_cache", v)
        if block_table is None and rows is None and k.shape[0] != batch:
            what, next = f"{_NAME}: rows of the cache", "Or pass cache_batch_idx."
            raise ShapeError(what, got=str(k.shape[0]), allowed=str(batch), next=next)
        if block_table is not None and block_table.shape[1] > 1 and block_table.stride(1) != 1:
            block_table = block_table.contiguous()  # as kernels read it
        return cls(k, v, None if rows is None else rows.long(), block_table)

    @property
    def capacity(self) -> int:
        """Keys that one sequence can have."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def table(self) -> Tensor | None:
        """The block table that says the same for decode_attention: a row of the cache is one page."""
        return self.block_table if self.rows is None else self.rows[:, None]

    def rows_of(self, batch: int) -> Tensor:
        """The cache row of each sequence, int64 [batch]."""
        return torch.arange(batch, device=self.k.device) if self.rows is None else self.rows

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the first two axes for positions [batch, n] of each sequence."""
        if self.block_table is None:
            return self.rows_of(len(positions))[:, None].expand_as(positions), positions
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

    def after(self, leftpad: Tensor) -> "FlashCache":
        """Return the keys as pages of one, without each row's first leftpad (int64 [batch]) ones."""
        assert self.block_table is None
        key = leftpad[:, None] + torch.arange(self.capacity, device=leftpad.device)
        # Keys beyond the row's end are not looked at, but must exist.
        pages = self.rows_of(len(leftpad))[:, None] * self.capacity + key.clamp(0, max(self.capacity - 1, 0))
        k, v = (each.flatten(0, 1)[:, None] for each in (self.k, self.v))
        return FlashCache(k, v, None, pages.int() if len(k) < 1 << 31 else pages)

    def append(self, new: NewKeys, q: Tensor) -> Tensor:
        """Rotate q [batch, queries, heads, head_dim] and the new keys, write those and their values, and return q."""
        if new.angles is None:
            self._write(new, new.k)
            return q
        num_queries, num_new = q.shape[1], new.k.shape[1]
        fits = new.k.dtype is new.v.dtype is q.dtype and q.shape[3] % 8 == 0
        if fits and num_queries == num_new and (new.moves or num_new == 1):
            return self._append_rotated(new, new.angles, q)
        self._write(new, _rotate(new.k, new.angles, new.positions, new.interleaved))
        places = new.past.long()[:, None] + torch.arange(num_queries, device=q.device) * new.moves
        return _rotate(q, new.angles, places, new.interleaved)

    def _write(self, new: NewKeys, k: Tensor) -> None:
        """Write k, the new keys, and the new values where they belong."""
        positions = new.positions
        if new.drops and min(positions.numel(), self.capacity, self.k.shape[0]) == 0:
            return
        places = self.places(positions)
        # A cache must not become a part of some graph of gradients.
        with torch.no_grad():
            if not new.drops:
                self.k[places] = k
                self.v[places] = new.v
                return
            exist = self.exist(positions).flatten()
            # Shapes must be known: what has no place becomes one more write of the first that has.
            source = torch.where(exist, torch.arange(len(exist), device=k.device), exist.int().argmax())
            rows, columns = (index.flatten()[source] for index in places)
            places = rows.clamp(0, self.k.shape[0] - 1), columns.clamp(0, self.k.shape[1] - 1)
            for cache, values in ((self.k, k), (self.v, new.v)):
                cache[places] = torch.where(exist.any(), values.flatten(0, 1)[source], cache[places])

    def _append_rotated(self, new: NewKeys, angles: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
        """The same for as many queries as keys, each at its key's place: one kernel."""
        positions = new.positions
        stored = torch.where(self.exist(positions), positions, -1) if new.drops else positions
        rotated = append_kv(
            torch.cat((q, new.k, new.v), dim=2).flatten(2).flatten(0, 1),
            _angles_at(angles, positions.flatten()),
            self.k.transpose(1, 2),
            self.v.transpose(1, 2),
            self.rows_of(len(q))[:, None].expand_as(positions).flatten(),
            stored.flatten(),
            num_heads=q.shape[2],
            rotary_style="interleaved" if new.interleaved else "neox",
            block_table=self.block_table,
        )
        return rotated.view(q.shape)


def _angles_at(angles: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """Cosines, then sines, of places [n]: float32 [n, rotary_dim]."""
    return torch.cat([values[positions].float() for values in angles], dim=1)


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [batch, n, heads, head_dim] by places [batch, n]."""
    rotary = _angles_at(angles, positions.flatten())
    return rotate(x.flatten(0, 1), rotary, interleaved=interleaved).view(x.shape)


def checked_angles(q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines, checked; None where nothing is rotated."""
    if cos is None and sin is None:
        return None
    if cos is None or sin is None or k is None:
        allowed = "rotary_cos, rotary_sin and new keys together"
        raise InvalidArgumentError(f"{_NAME}: rotary", got="a part", allowed=allowed)
    most = q.shape[-1] // 2
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] > most:
        got = f"{tuple(cos.shape)}, {tuple(sin.shape)}"
        allowed = f"twice [positions, up to {most}]"
        raise ShapeError(f"{_NAME}: rotary_cos, rotary_sin", got=got, allowed=allowed)
    if not (cos.is_floating_point() and sin.is_floating_point()):
        got, allowed = f"{cos.dtype}, {sin.dtype}", "floating point"
        raise UnsupportedError(f"{_NAME}: dtypes of rotary_cos, rotary_sin", got=got, allowed=allowed)
    return cos, sin


def lengths_before(
    cache: FlashCache, q: Tensor, k: Tensor | None, v: Tensor | None, cache_seqlens: int | Tensor | None
) -> Tensor:
    """Keys that each sequence has before the new ones, int32 [batch]."""
    batch = q.shape[0]
    if (k is None) != (v is None):
        raise InvalidArgumentError(f"{_NAME}: k, v", got="one of them", allowed="both or none")
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise InvalidArgumentError(f"{_NAME}: cache_seqlens", got="None with new keys", next="Say where they go.")
        wanted = (batch, k.shape[1] if k.ndim == 4 else -1, *cache.k.shape[2:])
        if k.shape != wanted or v.shape != wanted:
            got = f"{tuple(k.shape)}, {tuple(v.shape)}"
            raise ShapeError(f"{_NAME}: k, v", got=got, allowed=f"[{batch}, new, {wanted[2]}, {wanted[3]}]")
        # Bytes would need scales; no argument has them.
        if (k.dtype, v.dtype) != (cache.k.dtype, cache.v.dtype):
            got, allowed = f"{k.dtype}, {v.dtype}", f"{cache.k.dtype}, {cache.v.dtype}, as the cache"
            raise UnsupportedError(f"{_NAME}: dtypes of k, v", got=got, allowed=allowed)
    if isinstance(cache_seqlens, Tensor):
        checks.tensors(_NAME, cache_seqlens=cache_seqlens)
        if cache_seqlens.shape != (batch,) or cache_seqlens.dtype not in (torch.int32, torch.int64):
            got = f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)}"
            raise ShapeError(f"{_NAME}: cache_seqlens", got=got, allowed=f"a number, or int32 [{batch}]")
        # One too long stays so: narrowed as it is, it could become a right one.
        return cache_seqlens.clamp(-1, cache.capacity + 1).to(torch.int32)
    past = cache.capacity if cache_seqlens is None else cache_seqlens
    num_new = 0 if k is None else k.shape[1]
    if not checks.is_whole(past) or not 0 <= past <= cache.capacity - num_new:
        allowed = f"0 to {cache.capacity - num_new}, so that {num_new} more fit, or int32 [{batch}]"
        raise InvalidArgumentError(f"{_NAME}: cache_seqlens", got=shown(past), allowed=allowed)
    return torch.full((batch,), int(past), dtype=torch.int32, device=q.device)


def check_index_dtype(what: str, indices: Tensor | None) -> None:
    """Raises UnsupportedError."""
    if indices is not None and indices.dtype not in (torch.int32, torch.int64):
        raise UnsupportedError(f"{what}: dtype", got=str(indices.dtype), allowed="torch.int32, torch.int64")


def checked_leftpad(cache: FlashCache, batch: int, leftpad: Tensor | None) -> Tensor | None:
    """Keys of each row's beginning that are padding, int64 [batch]; None for none."""
    if leftpad is None:
        return None
    name = f"{_NAME}: cache_leftpad"
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
    if past.numel() == 0:
        return
    low, high = (int(end) for end in past.aminmax())
    if low < 0:
        raise InvalidArgumentError(f"{_NAME}: cache_seqlens", got=str(low), allowed="at least 0")
    check_lengths(_NAME, past + num_new, cache.capacity, cache.table, cache.k.shape[0], cache.k.shape[1])
    if leftpad is not None and (wrong := leftpad[(leftpad < 0) | (leftpad > past + num_new)]).numel():
        allowed = "0 to the row's length"
        raise InvalidArgumentError(f"{_NAME}: cache_leftpad", got=str(int(wrong[0])), allowed=allowed)
    if angles is not None and high + reach > len(angles[0]):
        got = f"{len(angles[0])} positions"
        raise InvalidArgumentError(f"{_NAME}: rotary_cos, rotary_sin", got=got, allowed=f"at least {high + reach}")
