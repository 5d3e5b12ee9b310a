"""How tokens come into a compressed cache: dense into its window, then packed, a chunk at a time (§4.6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from htree_ops.errors import UnsupportedDtypeError
from htree_ops.ops.arguments import FLOATING, check_int, check_tensors
from htree_ops.ops.compressed_kv_checks import (
    check_new_tokens,
    check_place,
    check_policy,
    check_shape,
    pair,
    prompt_lengths,
)
from htree_ops.ops.compressed_kv_format import CompressedKV, check_hadamard_group, check_weight
from htree_ops.ops.compressed_kv_storage import ContiguousRows, PagedRows, RowFormat
from htree_ops.ops.hadamard import grouped_hadamard

__all__ = ["CompressedTokens"]

OP = "CompressedKVCache"


class CompressedTokens:
    """The filling half of :class:`htree_ops.CompressedKVCache`, which has the documentation of the arguments."""

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        keep: int | tuple[int, int],
        bits: int | tuple[int, int] = 8,
        window: int = 32,
        chunk: int = 256,
        *,
        hadamard_group: int = 0,
        page_size: int | None = None,
        num_pages: int | None = None,
        split_size: int = 0,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value, least in (
            ("batch", batch, 0),
            ("num_kv_heads", num_kv_heads, 1),
            ("capacity", capacity, 1),
            ("hadamard_group", hadamard_group, 0),
        ):
            check_int(OP, name, value, least)
        check_policy(OP, window, chunk, page_size, split_size)
        self.formats = [RowFormat(*x) for x in zip((head_dim, head_dim), pair(keep), pair(bits), strict=True)]
        for row_format, prefix in zip(self.formats, ("k_", "v_"), strict=True):
            row_format.check(OP, prefix)
        supported = FLOATING[1:] if 16 in pair(bits) else FLOATING
        if dtype not in supported:
            raise UnsupportedDtypeError(
                f"{OP}: dtype must be {' or '.join(map(str, supported))} for {bits} bits, got {dtype}",
                dtype=dtype,
                supported_dtypes=supported,
            )
        check_hadamard_group(OP, hadamard_group, num_kv_heads, self.formats[0].head_dim)
        self.batch, self.num_kv_heads, self.capacity = batch, num_kv_heads, capacity
        self.window, self.chunk = window, chunk
        self.hadamard_group, self.split_size = hadamard_group, split_size
        self.page_size, self.num_pages = page_size, num_pages
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device
        rows = self._compressed_tokens(capacity)
        place = (self.formats, batch, num_kv_heads, rows, self.device)
        self.storage: ContiguousRows | PagedRows
        if page_size is None:
            if num_pages is not None:
                raise ValueError(f"{OP}: num_pages needs a page_size")
            self.storage = ContiguousRows(*place)
        else:
            full = batch * rows // page_size
            check_int(OP, "num_pages", full if num_pages is None else num_pages, 0)
            pages = full if num_pages is None else num_pages
            self.storage = PagedRows(*place, page=page_size, num_pages=pages)
        self.window_size = min(window + chunk, capacity)
        self.k_win, self.v_win = (
            torch.zeros(batch, num_kv_heads, self.window_size, f.head_dim, dtype=dtype, device=self.device)
            for f in self.formats
        )
        self.comp_len, self.win_len = (
            torch.zeros(batch, dtype=torch.int32, device=self.device) for _ in range(2)
        )
        self._key_weight: Tensor | None = None
        self._compressed = [0] * batch
        self._dense = [0] * batch

    def _compressed_tokens(self, length: int) -> int:
        return self.chunk * max(0, (length - self.window) // self.chunk)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; known on the host."""
        return [c + d for c, d in zip(self._compressed, self._dense, strict=True)]

    @property
    def compressed_lengths(self) -> list[int]:
        """Of these, the compressed ones."""
        return list(self._compressed)

    @property
    def key_weight(self) -> Tensor | None:
        """Weight of the channels of keys. Setting it checks type, shape, dtype, device and, on the CPU, the sign."""
        return self._key_weight

    @key_weight.setter
    def key_weight(self, weight: Tensor | None) -> None:
        if weight is not None:
            check_tensors(OP, key_weight=(weight, "B H_kv D"))
            check_place(OP, "key_weight", weight, self.device)
            check_shape(OP, "key_weight", weight, (*self.k_win.shape[:2], self.k_win.shape[3]))
            check_weight(OP, "key_weight", weight)
        self._key_weight = weight

    def _check_new(self, op: str, k: Tensor, v: Tensor) -> None:
        width = self.formats[0].head_dim
        check_new_tokens(op, k, v, (self.batch, self.num_kv_heads, width), self.dtype, self.device)

    def _check_room(self, name: str, new_lengths: Sequence[int], newly_compressed: Sequence[int]) -> None:
        for sequence, length in enumerate(new_lengths):
            if length > self.capacity:
                held = self.lengths[sequence]
                raise ValueError(
                    f"{OP}.{name}: sequence {sequence} holds {held} tokens; {length - held} more exceed the "
                    f"capacity of {self.capacity}"
                )
        missing = self.storage.missing_pages(newly_compressed)
        if missing:
            raise RuntimeError(
                f"{OP}.{name}: {missing} more pages of {self.page_size} tokens are needed than are free; "
                "give num_pages a larger value"
            )

    def _stored(self, k: Tensor) -> Tensor:
        """Keys in the space in which they are kept."""
        return grouped_hadamard(k, self.hadamard_group) if self.hadamard_group else k

    def _compress(self, k: Tensor, v: Tensor, sequences: Sequence[int]) -> list[CompressedKV]:
        """Rows of k, v [n, H_kv, S, ...], which belong to ``sequences``."""
        weight = None
        if self.key_weight is not None:
            weight = self.key_weight[torch.tensor(sequences, dtype=torch.int64, device=self.device)]
        return [
            CompressedKV(*torch.ops.htree.kv_compress(x, f.keep, f.bits, w))
            for x, f, w in ((k, self.formats[0], weight), (v, self.formats[1], None))
        ]

    def _count(self, compressed: list[int], dense: list[int]) -> None:
        self._compressed, self._dense = compressed, dense
        for target, values in ((self.comp_len, compressed), (self.win_len, dense)):
            target.copy_(torch.tensor(values, dtype=torch.int32, device="cpu"))

    @torch.no_grad()
    def prefill(self, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Takes the prompts into an empty cache; attention over them is the caller's, on the dense tensors.

        Args:
            k, v: [B, H_kv, S, D] in the dtype of the cache, keys rotated.
            lengths: tokens of each sequence, the first of its row; None is S for all.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            TypeError: lengths that are no ints.
            ValueError: a length outside 0 ... S or above the capacity.
            RuntimeError: the cache is not empty, or pages are lacking. The cache is left as it was.
        """
        self._check_new(f"{OP}.prefill", k, v)
        size = k.shape[2]
        totals = prompt_lengths(f"{OP}.prefill", lengths, self.batch, size)
        if any(self.lengths):
            raise RuntimeError(f"{OP}.prefill: the cache holds tokens already; append them, or reset() it")
        compressed = [self._compressed_tokens(n) for n in totals]
        self._check_room("prefill", totals, compressed)
        k = self._stored(k)
        most = max(compressed, default=0)
        if most:
            rows = self._compress(k[:, :, :most], v[:, :, :most], range(self.batch))
            if compressed == [most] * self.batch:
                self.storage.write(range(self.batch), [0] * self.batch, rows)
            else:
                for i, length in enumerate(compressed):
                    part = [CompressedKV(*(x[i : i + 1, :, :length] for x in part)) for part in rows]
                    self.storage.write([i], [0], part)
        for i, (start, stop) in enumerate(zip(compressed, totals, strict=True)):
            for target, x in ((self.k_win, k), (self.v_win, v)):
                target[i, :, : stop - start] = x[i, :, start:stop]
        self._count(compressed, [n - c for n, c in zip(totals, compressed, strict=True)])

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds S tokens to every sequence; compresses whatever leaves a full window on the way.

        Args:
            k, v: [B, H_kv, S, D] in the dtype of the cache, keys rotated.

        Raises:
            As :meth:`prefill`, less the demand for an empty cache. The cache is left as it was.
            ValueError: key_weight has become negative since it was set (seen on the CPU only).
        """
        self._check_new(f"{OP}.append", k, v)
        size, full = k.shape[2], self.window + self.chunk
        chunks = [max(0, -(-(dense + size - full) // self.chunk)) for dense in self._dense]
        self._check_room("append", [n + size for n in self.lengths], [self.chunk * n for n in chunks])
        if self.key_weight is not None and any(chunks):
            check_weight(f"{OP}.append", "key_weight", self.key_weight)
        k = self._stored(k)
        start = 0
        while start < size:
            self.settle()
            stop = min(size, start + self.window_size - max(self._dense, default=0))
            if len(set(self._dense)) == 1:
                first = self._dense[0]
                self.k_win[:, :, first : first + stop - start] = k[:, :, start:stop]
                self.v_win[:, :, first : first + stop - start] = v[:, :, start:stop]
                self.win_len += stop - start
            else:
                self._write(k[:, :, start:stop], v[:, :, start:stop])
            self._dense = [n + stop - start for n in self._dense]
            start = stop

    def _write(self, k: Tensor, v: Tensor) -> None:
        """Stored keys and values behind the windows, at a place that the device knows."""
        places = (
            self.win_len.long()[:, None, None, None] + torch.arange(k.shape[2], device=self.device)[:, None]
        )
        for target, x in ((self.k_win, k), (self.v_win, v)):
            target.scatter_(2, places.expand(x.shape), x)
        self.win_len += k.shape[2]

    @torch.no_grad()
    def write_token(self, k: Tensor, v: Tensor) -> None:
        """The part of :meth:`append` of one token that runs on the device alone, for CUDA graphs.

        Call :meth:`advance` once after each run: it counts the token and leaves room for another. After :meth:`append`
        the window may be full; :meth:`settle` makes room. A replayed graph checks nothing: stop at the capacity, for
        a write behind the window is an error of the device.

        Args:
            k, v: [B, H_kv, 1, D] in the dtype of the cache, keys rotated.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            ValueError: a sequence is at the capacity, or a window is full, as far as the host has counted.
        """
        self._check_new(f"{OP}.write_token", k, v)
        wanted = (*k.shape[:2], 1, k.shape[3])
        check_shape(f"{OP}.write_token", "k", k, wanted, f"one token {list(wanted)}")
        self._check_room("write_token", [n + 1 for n in self.lengths], [])
        if max(self._dense, default=0) == self.window + self.chunk:
            raise ValueError(f"{OP}.write_token: the window is full; settle() compresses its oldest chunk")
        self._write(self._stored(k), v)

    def advance(self) -> None:
        """Counts one token that :meth:`write_token` wrote, and compresses a full window.

        Raises:
            ValueError: the token was one more than the capacity; it is forgotten.
            RuntimeError: pages are lacking.
        """
        try:
            self._check_room("advance", [n + 1 for n in self.lengths], [])
        except ValueError:
            self._count(self._compressed, self._dense)  # the device counted it already
            raise
        self._dense = [n + 1 for n in self._dense]
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Compresses the oldest chunk of every window that is full.

        Raises:
            RuntimeError: pages are lacking.
        """
        full = [i for i, n in enumerate(self._dense) if n == self.window + self.chunk]
        if not full:
            return
        self._check_room("settle", [], [self.chunk] * len(full))
        places = torch.tensor(full, device=self.device)
        k, v = (x if len(full) == self.batch else x.index_select(0, places) for x in (self.k_win, self.v_win))
        rows = self._compress(k[:, :, : self.chunk], v[:, :, : self.chunk], full)
        self.storage.write(full, [self._compressed[i] for i in full], rows)
        compressed, dense = list(self._compressed), list(self._dense)
        for i in full:
            compressed[i] += self.chunk
            dense[i] -= self.chunk
        for target, x in ((self.k_win, k), (self.v_win, v)):
            target[:, :, : self.window].index_copy_(0, places, x[:, :, self.chunk :].clone())
        self._count(compressed, dense)
