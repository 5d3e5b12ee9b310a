"""The K/V cache of one attention layer: compressed rows and a dense window of the latest tokens (§4.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from htree_ops.errors import UnsupportedDtypeError, refuse
from htree_ops.ops.arguments import FLOATING, check_int, check_tensors
from htree_ops.ops.compressed_kv.checks import (
    check_new_tokens,
    check_place,
    check_policy,
    check_query,
    check_shape,
    integers,
    pair,
    prompt_lengths,
)
from htree_ops.ops.compressed_kv.format import CompressedKV, check_hadamard_group, check_weight
from htree_ops.ops.compressed_kv.state import check_state
from htree_ops.ops.compressed_kv.storage import ContiguousRows, PagedRows, RowFormat
from htree_ops.ops.hadamard.transform import grouped_hadamard

__all__ = ["CacheBytes", "CompressedKVCache", "CompressedTokens"]

OP = "CompressedKVCache"


class CacheBytes(NamedTuple):
    """What a cache holds, in bytes.

    Attributes:
        tokens: number of tokens of all sequences together.
        compressed: rows of the compressed tokens, without empty room; shared pages count once per sequence.
        window: dense tokens of the windows, without empty room.
        dense: the same tokens in a dense cache.
        allocated: everything the cache has taken, empty room included.
    """

    tokens: int
    compressed: int
    window: int
    dense: int
    allocated: int

    @property
    def per_token(self) -> float:
        """Bytes in use per token of one sequence; 0 for an empty cache."""
        return (self.compressed + self.window) / self.tokens if self.tokens else 0.0

    @property
    def of_dense(self) -> float:
        """Bytes in use divided by those of a dense cache; 1 for an empty cache."""
        return (self.compressed + self.window) / self.dense if self.dense else 1.0


class CompressedKVCache:
    """Keys and values of one attention layer, the older ones pruned and quantised.

    The last tokens stay dense in a window. When it holds window + chunk tokens, its oldest ``chunk`` are compressed,
    *after* the attention of that step: the next :meth:`append` does it, or :meth:`settle`. Once settled, L tokens have
    ``chunk * max(0, (L - window) // chunk)`` compressed ones, however they were added. Rows are compressed one by
    one, so the bytes do not depend on that either (where ``key_weight`` is None). Keys must be rotated already.

    In a loop: ``cache.prefill(k, v)`` with the prompt, then per token ``cache.append(k, v); out = cache.attend(q)``.
    A cache made inside ``torch.inference_mode()`` can only be filled there, as is so for all tensors of torch.
    For a CUDA graph, capture :meth:`write_token` and :meth:`attend`, and call :meth:`advance` after each replay.
    Source: docs/semantics/compressed_kv.md §4.5, §4.6, design document [003].

    Args:
        batch: B, sequences; num_kv_heads: H_kv.
        head_dim: D, 64, 128 or 256.
        capacity: most tokens of a sequence.
        keep, bits: of the rows, 1 ... D and 16, 8 or 4; one number, or (keys, values).
        window: R, tokens that always stay dense. chunk: C, tokens that are compressed at a time.
        hadamard_group: 0 stores keys as they are, 1 the transform of each, G > 1 that of groups of G adjacent heads.
        page_size: tokens of a page, a divisor of chunk; None stores rows without pages.
        num_pages: of the pool; by default enough for every sequence to be full.
        split_size: of :func:`htree_ops.kv_decode_attention`.
        dtype: of keys, values and queries: float32, float16 or bfloat16. 16 bits need one of the latter two.
        device: where the cache lies.

    Attributes:
        key_weight: [B, H_kv, D] >= 0 or None: weight of the channels for keys that are compressed from now on;
            checked when it is set.
        comp_len, win_len: int32 [B] on the device: numbers of compressed and of dense tokens.

    Raises:
        ShapeMismatchError: another head_dim.
        UnsupportedDtypeError: another dtype, or float32 with 16 bits.
        TypeError, ValueError: a number of the wrong kind or out of range.
    """

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
            refuse(
                UnsupportedDtypeError,
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
                raise ValueError(f"{OP}: num_pages must be None where page_size is None, got {num_pages}")
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
        """Number of tokens of each sequence, known on the host."""
        return [c + d for c, d in zip(self._compressed, self._dense, strict=True)]

    @property
    def compressed_lengths(self) -> list[int]:
        """How many of these are compressed."""
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
        """Keys as they are stored: transformed, where the cache transforms them."""
        return grouped_hadamard(k, self.hadamard_group) if self.hadamard_group else k

    def _compress(self, k: Tensor, v: Tensor, sequences: Sequence[int]) -> list[CompressedKV]:
        """Compresses rows of k, v [n, H_kv, S, ...], which belong to ``sequences``."""
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
        """Takes the prompts into an empty cache. The caller attends to them, on the dense tensors.

        Args:
            k, v: [B, H_kv, S, D] in the dtype of the cache, keys rotated.
            lengths: number of tokens of each sequence, which come first in its row; None is S for all.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            TypeError: lengths are not ints.
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
        """Adds S tokens to every sequence, and compresses what leaves a full window.

        Args:
            k, v: [B, H_kv, S, D] in the dtype of the cache, keys rotated.

        Raises:
            As :meth:`prefill`, but the cache need not be empty. The cache is left as it was.
            ValueError: key_weight has become negative since it was set (checked on the CPU only).
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
        """Writes stored keys and values behind the windows, at places that the device knows."""
        places = (
            self.win_len.long()[:, None, None, None] + torch.arange(k.shape[2], device=self.device)[:, None]
        )
        for target, x in ((self.k_win, k), (self.v_win, v)):
            target.scatter_(2, places.expand(x.shape), x)
        self.win_len += k.shape[2]

    @torch.no_grad()
    def write_token(self, k: Tensor, v: Tensor) -> None:
        """The part of :meth:`append` for one token that runs on the device alone, for CUDA graphs.

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

    def attend(self, q: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """:func:`htree_ops.kv_decode_attention` of q over everything that the cache holds.

        Args:
            q: [B, H, D] or [B, H, 1, D] in the dtype of the cache, rotated, not transformed.
            scale: factor of the scores; None is D^-1/2.

        Returns:
            out, of the shape and dtype of q, and lse float32 [B, H] or [B, H, 1]. No gradient: where q requires
            one, a backward through them raises RuntimeError.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a q that does not fit.
            TypeError, ValueError: scale is no finite number.
        """
        place = (self.batch, self.num_kv_heads, self.formats[0].head_dim)
        check_query(f"{OP}.attend", q, scale, place, self.dtype, self.device)
        keys, values = self.formats
        k, v = self.storage.parts
        return torch.ops.htree.kv_decode_attention(
            q, *k, *v, self.k_win, self.v_win, self.comp_len, self.win_len, scale, self.storage.block_table,
            k_keep=keys.keep, v_keep=values.keep, k_bits=keys.bits, v_bits=values.bits,
            hadamard_group=self.hadamard_group, split_size=self.split_size,
        )  # fmt: skip

    @torch.no_grad()
    def to_dense(self) -> tuple[Tensor, Tensor]:
        """Keys [B, H_kv, L, D] and values [B, H_kv, L, D] as attention sees them, L the longest sequence.

        In the dtype of the cache; keys are transformed back (one more rounding), and rows past a sequence are 0.
        """
        longest = max(self.lengths, default=0)
        dense: list[Tensor] = []
        for row_format, window in zip(self.formats, (self.k_win, self.v_win), strict=True):
            shape = (self.batch, self.num_kv_heads, longest, row_format.head_dim)
            dense.append(torch.zeros(shape, dtype=self.dtype, device=window.device))
        for i, (compressed, length) in enumerate(zip(self._compressed, self.lengths, strict=True)):
            rows = self.storage.read(i, compressed)
            for target, part, f, window in zip(
                dense, rows, self.formats, (self.k_win, self.v_win), strict=True
            ):
                target[i, :, :compressed] = torch.ops.htree.kv_decompress(
                    *(x[None] for x in part), f.head_dim, f.keep, f.bits, self.dtype
                )[0]
                target[i, :, compressed:length] = window[i, :, : length - compressed]
        keys, values = dense
        return self._stored(keys), values  # the transform is its own inverse

    def num_bytes(self) -> CacheBytes:
        """The report of bytes; it does not wait for a device."""
        row = sum(f.num_bytes() for f in self.formats)
        dense_row = sum(f.head_dim for f in self.formats) * self.dtype.itemsize
        tensors = [x for part in self.storage.parts for x in part]
        tensors += [self.k_win, self.v_win, self.comp_len, self.win_len]
        tensors += [] if self.storage.block_table is None else [self.storage.block_table]
        return CacheBytes(
            tokens=sum(self.lengths),
            compressed=sum(self._compressed) * self.num_kv_heads * row,
            window=sum(self._dense) * self.num_kv_heads * dense_row,
            dense=sum(self.lengths) * self.num_kv_heads * dense_row,
            allocated=sum(x.numel() * x.element_size() for x in tensors),
        )

    # ---- states and beams

    def config(self) -> dict[str, Any]:
        """What decides the bytes of a token; :meth:`load_state_dict` compares it."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.formats[0].head_dim,
            "keep": tuple(f.keep for f in self.formats),
            "bits": tuple(f.bits for f in self.formats),
            "window": self.window,
            "chunk": self.chunk,
            "hadamard_group": self.hadamard_group,
            "dtype": str(self.dtype),
        }

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The tokens and what is needed to read them; the same with and without pages.

        Keys: config; compressed and dense, lists of B lengths; k_bitmap ... v_scales [B, H_kv, S, ...] with S the
        longest compressed part, and k_win, v_win [B, H_kv, W, ...], zeros behind each sequence; key_weight or None.
        """
        state: dict[str, Any] = {
            "config": self.config(),
            "compressed": list(self._compressed),
            "dense": list(self._dense),
            "key_weight": None if self.key_weight is None else self.key_weight.clone(),
        }
        most = max(self._compressed, default=0)
        for f, prefix in zip(self.formats, "kv", strict=True):
            rows = f.allocate(self.batch, self.num_kv_heads, most, self.device)
            state |= {f"{prefix}_{name}": x for name, x in rows._asdict().items()}
        for name, window in (("k_win", self.k_win), ("v_win", self.v_win)):
            state[name] = torch.zeros_like(window[:, :, : max(self._dense, default=0)])
            for i, length in enumerate(self._dense):
                state[name][i, :, :length] = window[i, :, :length]
        for i, length in enumerate(self._compressed):
            for part, prefix in zip(self.storage.read(i, length), "kv", strict=True):
                for name, x in part._asdict().items():
                    state[f"{prefix}_{name}"][i, :, : x.shape[1]] = x
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces what the cache holds by :meth:`state_dict` of a cache with the same :meth:`config` and batch.

        Everything is copied. The bytes of the rows are taken as they are.

        Raises:
            TypeError: the state is not a dict, or key_weight is not a floating tensor.
            ValueError: an entry is missing or does not fit: another configuration or batch, more tokens than the
                capacity, lengths that no cache has, a tensor of another shape or dtype. The cache is left as it was.
            RuntimeError: pages are lacking; the cache is empty then.
        """
        op = f"{OP}.load_state_dict"
        check_state(op, state, self.config(), self.formats, self.batch, self.capacity, self.dtype)
        weight = state["key_weight"]
        self.key_weight = weight.to(self.device, copy=True) if isinstance(weight, Tensor) else weight
        compressed, dense = list(state["compressed"]), list(state["dense"])
        self.reset()
        self._check_room("load_state_dict", [], compressed)
        parts = [
            CompressedKV(*(state[f"{prefix}_{name}"].to(self.device) for name in CompressedKV._fields))
            for prefix in "kv"
        ]
        for i, length in enumerate(compressed):
            rows = [CompressedKV(*(x[i : i + 1, :, :length] for x in part)) for part in parts]
            self.storage.write([i], [0], rows)
        for target, name in ((self.k_win, "k_win"), (self.v_win, "v_win")):
            most = max(dense, default=0)
            target[:, :, :most] = state[name][:, :, :most].to(self.device)
        self._count(compressed, dense)

    def _indices(self, name: str, index: Tensor | Sequence[int]) -> list[int]:
        numbers = integers(f"{OP}.{name}", "index", index)
        if not all(0 <= i < self.batch for i in numbers):
            raise IndexError(f"{OP}.{name}: index must lie in [0, {self.batch}), got {numbers}")
        return numbers

    @torch.no_grad()
    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Beam search: sequence i becomes what sequence index[i] was. With pages, compressed tokens are shared.

        The lengths are known on the host, so an index on a device is waited for.

        Raises:
            TypeError: index holds no ints. ValueError: index does not have B entries. IndexError: an entry outside [0,
                B).
        """
        numbers = self._indices("reorder", index)
        if len(numbers) != self.batch:
            raise ValueError(f"{OP}.reorder: index must have {self.batch} entries, got {len(numbers)}")
        self.storage.reorder(numbers, max(self._compressed, default=0))
        places = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        for window in (self.k_win, self.v_win):
            window.copy_(window.index_select(0, places))
        if self.key_weight is not None:
            self.key_weight = self.key_weight.index_select(0, places)
        self._count([self._compressed[i] for i in numbers], [self._dense[i] for i in numbers])

    @torch.no_grad()
    def select(self, index: Tensor | Sequence[int]) -> CompressedKVCache:
        """A new cache whose sequence i is a copy of sequence index[i]; any number of them, repeats allowed."""
        numbers = self._indices("select", index)
        config = self.config() | {"dtype": self.dtype}
        chosen = CompressedKVCache(
            len(numbers), **config, capacity=self.capacity, page_size=self.page_size, split_size=self.split_size,
            device=self.device,
        )  # fmt: skip
        state = self.state_dict()
        for name, value in state.items():
            if isinstance(value, list):
                state[name] = [value[i] for i in numbers]
            elif isinstance(value, Tensor):
                state[name] = value[torch.tensor(numbers, dtype=torch.int64, device=self.device)]
        chosen.load_state_dict(state)
        return chosen

    def reset(self) -> None:
        """Forgets every token; the memory stays, and pages are free again."""
        self.storage.clear()
        self._count([0] * self.batch, [0] * self.batch)


#: An older name: what fills the cache was once a class of its own.
CompressedTokens = CompressedKVCache
