"""The K/V cache of one attention layer: compressed rows and a dense window of the latest tokens (§4.6).

One class, with all that a cache does with tokens, sequences and states; a quarter of the lines are its documentation.
What it is made of stands in the files beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from htree_ops.errors import UnsupportedDtypeError, refuse
from htree_ops.ops.arguments import (
    FLOATING,
    check_data,
    check_devices,
    check_int,
    check_shape,
    check_tensors,
    option_device,
)
from htree_ops.ops.compressed_kv.checks import (
    check_new_tokens,
    check_policy,
    check_query,
    pair,
    prompt_lengths,
)
from htree_ops.ops.compressed_kv.format import CompressedKV, check_format, check_hadamard_group, check_weight
from htree_ops.ops.compressed_kv.state import check_state, state_of
from htree_ops.ops.compressed_kv.storage import RowFormat, StoredRows
from htree_ops.ops.compressed_kv.window import DenseWindow
from htree_ops.ops.hadamard.transform import grouped_hadamard
from htree_ops.ops.paging import PagedCache, host_integers

OP = "CompressedKVCache"


class CacheBytes(NamedTuple):
    """What a cache holds, in bytes.

    Attributes:
        tokens: number of tokens of all sequences together.
        compressed: rows of the compressed tokens, without empty space; shared pages count once per sequence.
        window: dense tokens of the windows, without empty space.
        dense: the same tokens in a dense cache.
        allocated: everything the cache has taken, empty space included.
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


def take_rows(x: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Rows [B, n, ...] of x [B, S, ...]: row i of sequence b is its row places[b][i], or the last one."""
    index = torch.tensor([list(row) for row in places], device="cpu").clamp_(max=x.shape[1] - 1).to(x.device)
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


def hide_rows(out: Tensor, lse: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sets out [B, n, H, D] to 0 and lse [B, n, H] to -inf in rows counts[b] and following of sequence b."""
    stops = torch.tensor(counts, device="cpu").to(out.device)
    hidden = (torch.arange(out.shape[1], device=out.device) >= stops[:, None])[..., None]
    return out.masked_fill(hidden[..., None], 0.0), lse.masked_fill(hidden, -math.inf)


class CompressedKVCache(PagedCache):
    """Keys and values of one attention layer, the older ones pruned and quantised.

    The last tokens stay dense in a window. When it holds window + chunk tokens, its oldest ``chunk`` are compressed,
    *after* the attention of that step: the next :meth:`append` does it, or :meth:`settle`. Once settled, L tokens have
    ``chunk * max(0, (L - window) // chunk)`` compressed ones, however they were added. Rows are compressed one by
    one, so the bytes do not depend on that either (where ``key_weight`` is None). Keys must be rotated already.

    In a loop: ``cache.prefill(k, v)`` with the prompt, then ``out, lse = cache.decode(q, k, v)`` with one token or
    several, or :meth:`append` and :meth:`attend`. Every sequence has its own length, and :meth:`truncate` takes tokens
    back. A cache made inside ``torch.inference_mode()`` can only be filled there, as is so for all tensors of torch.
    For a CUDA graph or a compiled step, capture or compile :meth:`write_token` and :meth:`attend`, and call
    :meth:`advance` after each run. What counts tokens does so on the host, and raises NotImplementedError while a call
    is compiled or exported.
    Source: docs/semantics/compressed_kv.md §4.5, §4.6, design document [003].

    Args:
        batch: B, sequences; num_kv_heads: H_kv.
        head_dim: D of keys, a multiple of 64 up to 512. value_dim: D of values, the same; None is that of keys.
        capacity: most tokens of a sequence.
        keep, bits: of the rows, 1 ... D and 16, 8 or 4; one number, or (keys, values).
        window: R, tokens that always stay dense. chunk: C, tokens that are compressed at a time.
        hadamard_group: 0 stores keys as they are, 1 the transform of each, G > 1 that of groups of G adjacent heads.
        page_size: tokens of a page, a divisor of chunk; None stores rows without pages.
        num_pages: of the pool; by default enough for every sequence to be full.
        split_size: of :func:`htree_ops.kv_decode_attention`.
        rollback: the last so many tokens can be taken back without a trace, at most ``chunk``: space for their dense
            rows is added. None is the smaller of window and chunk.
        dtype: of keys, values and queries: float32, float16 or bfloat16. 16 bits need one of the latter two.
        device: where the cache lies.

    Attributes:
        key_weight: [B, H_kv, D] >= 0 or None: weight of the channels for keys that are compressed from now on;
            checked when it is set; a NaN keeps its channel. :meth:`free` makes it 1 for a sequence, :meth:`reset` None.
        comp_len, win_len: int32 [B] on the device: numbers of compressed and of dense tokens.

    Raises:
        ShapeMismatchError: another head_dim.
        UnsupportedDtypeError: another dtype, or float32 with 16 bits. DeviceError: a device that torch does not know.
        TypeError, ValueError: a number or a device of the wrong kind, a number out of range.

    Example:
        >>> cache = CompressedKVCache(1, 2, 64, capacity=1024, keep=32, dtype=torch.float32)
        >>> q, k, v = (torch.randn(1, 100, heads, 64) for heads in (8, 2, 2))
        >>> cache.prefill(k, v)
        >>> cache.decode(q[:, :1], k[:, :1], v[:, :1])[0].shape, cache.host_lengths()
        (torch.Size([1, 1, 8, 64]), [101])
    """

    OP = OP

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
        value_dim: int | None = None,
        hadamard_group: int = 0,
        page_size: int | None = None,
        num_pages: int | None = None,
        split_size: int = 0,
        rollback: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
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
        rollback = min(window, chunk) if rollback is None else rollback
        check_int(OP, "rollback", rollback, 0, chunk)
        widths = (head_dim, head_dim if value_dim is None else value_dim)
        self.formats = [RowFormat(*x) for x in zip(widths, pair(keep), pair(bits), strict=True)]
        for f, prefix in zip(self.formats, ("k_", "v_"), strict=True):
            check_format(OP, f.head_dim, f.keep, f.bits, prefix)
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
        self.window, self.chunk, self.rollback = window, chunk, rollback
        self.hadamard_group, self.split_size = hadamard_group, split_size
        self.page_size, self.num_pages = page_size, num_pages
        self.dtype = dtype
        self.device = option_device(OP, device)
        rows = self._compressed_tokens(capacity)
        if page_size is None:
            if num_pages is not None:
                raise ValueError(f"{OP}: num_pages must be None where page_size is None, got {num_pages}")
            pages = 0
        else:
            pages = batch * rows // page_size if num_pages is None else num_pages
            check_int(OP, "num_pages", pages, 0)
        self.storage = StoredRows(OP, self.formats, batch, num_kv_heads, rows, self.device, page_size, pages)
        self.window_size = min(window + chunk, capacity)
        self._dense_rows = DenseWindow(
            (batch, num_kv_heads, self.window_size),
            [f.head_dim for f in self.formats],
            dtype,
            self.device,
            recent=window,
            chunk=chunk,
            spare=rollback,
        )
        self.comp_len, self.win_len = (
            torch.zeros(batch, dtype=torch.int32, device=self.device) for _ in range(2)
        )
        self._key_weight: Tensor | None = None
        self._compressed = [0] * batch
        self._dense = [0] * batch

    @property
    def k_win(self) -> Tensor:
        """The window of keys [B, H_kv, slots, D], transformed where the cache transforms them."""
        return self._dense_rows.parts[0]

    @property
    def v_win(self) -> Tensor:
        """The window of values [B, H_kv, slots, D]."""
        return self._dense_rows.parts[1]

    @property
    def key_weight(self) -> Tensor | None:
        """Weight of the channels of keys. Setting it checks type, shape, dtype, device and, on the CPU, the sign."""
        return self._key_weight

    @key_weight.setter
    def key_weight(self, weight: Tensor | None) -> None:
        if weight is not None:
            check_tensors(OP, key_weight=(weight, "B H_kv D"))
            check_devices(OP, {"the cache": self.comp_len, "key_weight": weight})
            check_shape(OP, "key_weight", weight, (*self.k_win.shape[:2], self.k_win.shape[3]))
            check_weight(OP, "key_weight", weight)
        self._key_weight = weight

    def _check_new(self, op: str, k: Tensor, v: Tensor) -> None:
        widths = (self.formats[0].head_dim, self.formats[1].head_dim)
        check_new_tokens(op, k, v, (self.batch, self.num_kv_heads, *widths), self.dtype, self.comp_len)

    def _check_capacity(self, name: str, new_lengths: Sequence[int]) -> None:
        for sequence, length in enumerate(new_lengths):
            if length > self.capacity:
                held = self.host_lengths()[sequence]
                raise ValueError(
                    f"{OP}.{name}: sequence {sequence} holds {held} tokens; {length - held} more exceed the "
                    f"capacity of {self.capacity}"
                )

    def _stored(self, k: Tensor) -> Tensor:
        """Keys [B, H_kv, S, D] as they are stored: transformed, where the cache transforms them."""
        return grouped_hadamard(k, self.hadamard_group) if self.hadamard_group else k

    def _compress(self, k: Tensor, v: Tensor, sequences: Sequence[int]) -> list[CompressedKV]:
        """Compresses rows of stored k, v [n, H_kv, S, ...], which belong to ``sequences``."""
        weight = None
        if self.key_weight is not None:
            weight = self.key_weight[torch.tensor(sequences, dtype=torch.int64, device=self.device)]
        return [
            CompressedKV(*torch.ops.htree.kv_compress(x, f.keep, f.bits, w))
            for x, f, w in ((k, self.formats[0], weight), (v, self.formats[1], None))
        ]

    @torch.no_grad()
    def prefill(self, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Takes the prompts into an empty cache. The caller attends to them, on the dense tensors.

        Args:
            k, v: [B, S, H_kv, D] in the dtype of the cache, keys rotated.
            lengths: number of tokens of each sequence, which come first in its row; None is S for all.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            TypeError: lengths are not ints.
            ValueError: a length outside 0 ... S or above the capacity.
            OutOfPagesError: pages are lacking.
            RuntimeError: the cache is not empty. The cache is left as it was.
        """
        self._refuse_graph("prefill")
        self._check_new(f"{OP}.prefill", k, v)
        size = k.shape[1]
        totals = prompt_lengths(f"{OP}.prefill", lengths, self.batch, size)
        if any(self.host_lengths()):
            raise RuntimeError(f"{OP}.prefill: the cache holds tokens already; append them, or reset() it")
        compressed = [self._compressed_tokens(n) for n in totals]
        self._check_capacity("prefill", totals)
        self.storage.check_pages("prefill", compressed)
        k, v = self._stored(k.transpose(1, 2)), v.transpose(1, 2)
        most = max(compressed, default=0)
        if most:
            rows = self._compress(k[:, :, :most], v[:, :, :most], range(self.batch))
            self.storage.fill(rows, compressed)
        dense = [n - c for n, c in zip(totals, compressed, strict=True)]
        self._dense_rows.put(k, v, compressed, dense, [0] * self.batch)
        for i, start in enumerate(compressed):
            if start:
                last = slice(start - self.chunk, start)
                self._dense_rows.keep(i, k[i, :, last], v[i, :, last], dense[i])
        self._count(compressed, dense)

    def _check_append(self, name: str, counts: Sequence[int]) -> None:
        """Raises unless ``counts[b]`` tokens can be appended to each sequence."""
        lengths = [n + count for n, count in zip(self.host_lengths(), counts, strict=True)]
        self._check_capacity(name, lengths)
        after = [self._compressed_after(b, n) for b, n in enumerate(lengths)]
        self.storage.check_pages(name, after)
        if self.key_weight is not None and after != self._compressed:
            check_weight(f"{OP}.{name}", "key_weight", self.key_weight)

    def _pieces(self, counts: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Cuts ``counts[b]`` new tokens of each sequence where its window is full, and compresses what leaves it then.

        Yields the first token of each piece and how many there are; the caller puts them before it asks for the next.
        What happens to a sequence follows from its own tokens alone.
        """
        done = [0] * self.batch
        while done != list(counts):
            self._settle([b for b in range(self.batch) if done[b] < counts[b]])
            sizes = [min(counts[b] - done[b], self._limit(b) - self._dense[b]) for b in range(self.batch)]
            yield done, sizes
            done = [n + size for n, size in zip(done, sizes, strict=True)]

    def _put(self, k: Tensor, v: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Writes rows start ... start + size - 1 of stored k, v [B, H_kv, S, D] behind the windows, and counts them."""
        after = [n + size for n, size in zip(self._dense, sizes, strict=True)]
        if len(set(starts)) == len(set(sizes)) == 1 < len(set(self._dense)):
            part = slice(starts[0], starts[0] + sizes[0])
            self._dense_rows.put_at(k[:, :, part], v[:, :, part], self.win_len)
        else:
            self._dense_rows.put(k, v, starts, sizes, self._dense)
        if len(set(sizes)) == 1:
            self.win_len += sizes[0]
        else:
            self.win_len.copy_(torch.tensor(after, dtype=torch.int32, device="cpu"))
        self._dense = after
        self._dense_rows.grown(after)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Adds S tokens to every sequence, or the first ``lengths[b]`` of them to sequence b.

        What leaves a full window is compressed. A sequence without new tokens does not change.

        Args:
            k, v: [B, S, H_kv, D] in the dtype of the cache, keys rotated.
            lengths: tokens of each sequence that count, 0 ... S; None is S for all.

        Raises:
            As :meth:`prefill`, but the cache need not be empty. The cache is left as it was.
            ValueError: key_weight has become negative since it was set (checked on the CPU only).
        """
        self._refuse_graph("append")
        self._check_new(f"{OP}.append", k, v)
        counts = prompt_lengths(f"{OP}.append", lengths, self.batch, k.shape[1])
        self._check_append("append", counts)
        k, v = self._stored(k.transpose(1, 2)), v.transpose(1, 2)
        for starts, sizes in self._pieces(counts):
            self._put(k, v, starts, sizes)

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int] | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Appends tokens; each attends to everything before it and to itself, as if they came one at a time.

        Where a chunk has to be compressed between two of them, the later ones see its compressed rows.

        Args:
            q: [B, S, H, D]; k, v: [B, S, H_kv, D]; in the dtype of the cache, rotated, not transformed.
            lengths: tokens of each sequence that count, 0 ... S, which come first in its row; None is S for all.
            scale: factor of the scores; None is D^-1/2.

        Returns:
            As :meth:`attend`. Rows at or behind ``lengths[b]`` have 0 and -inf.

        Raises:
            As :meth:`append` and :meth:`attend`. The cache is left as it was.
        """
        op = f"{OP}.decode"
        self._refuse_graph("decode")
        self._check_new(op, k, v)
        self._check_q(op, q, scale)
        size = k.shape[1]
        check_shape(op, "q", q, (self.batch, size, *q.shape[-2:]), "[B, S of k, H, D]")
        counts = prompt_lengths(op, lengths, self.batch, size)
        self._check_append("decode", counts)
        stored, values = self._stored(k.detach().transpose(1, 2)), v.detach().transpose(1, 2)

        def no_rows() -> tuple[Tensor, Tensor]:
            out = q.new_zeros(*q.shape[:3], self.formats[1].head_dim)
            return out, q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)

        results: tuple[Tensor, Tensor] | None = None
        for starts, sizes in self._pieces(counts):
            with torch.no_grad():
                self._put(stored, values, starts, sizes)
            if sizes == [size] * self.batch:
                return self.attend(q, scale)
            found = self.attend(take_rows(q, [range(n, n + max(sizes)) for n in starts]), scale, sizes)
            results = results or no_rows()
            for b, (start, count) in enumerate(zip(starts, sizes, strict=True)):
                for target, rows in zip(results, found, strict=True):
                    target[b, start : start + count] = rows[b, :count]
        return results or no_rows()

    def _check_token(self, name: str) -> None:
        """Raises ValueError unless every sequence has space for a token that no chunk is compressed for."""
        self._check_capacity(name, [n + 1 for n in self.host_lengths()])
        if any(n == self._limit(b) for b, n in enumerate(self._dense)):
            raise ValueError(f"{OP}.{name}: the window is full; settle() compresses its oldest chunk")

    @torch.no_grad()
    def write_token(self, k: Tensor, v: Tensor) -> None:
        """The part of :meth:`append` for one token that runs on the device alone, for CUDA graphs and torch.compile.

        Call :meth:`advance` once after each run: it counts the token and leaves space for another. After :meth:`append`
        the window may be full; :meth:`settle` makes space. A replayed or compiled graph checks nothing: stop at the
        capacity, for a write behind the window is an error of the device.

        Args:
            k, v: [B, 1, H_kv, D] in the dtype of the cache, keys rotated.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            ValueError: a sequence is at the capacity, or a window is full, as far as the host has counted.
        """
        self._check_new(f"{OP}.write_token", k, v)
        wanted = (k.shape[0], 1, *k.shape[2:])
        check_shape(f"{OP}.write_token", "k", k, wanted, f"one token {list(wanted)}")
        if not torch.compiler.is_compiling():  # a graph is not to depend on the counts of its trace
            self._check_token("write_token")
        self._dense_rows.put_at(self._stored(k.transpose(1, 2)), v.transpose(1, 2), self.win_len)
        # What depends on no argument torch.export would do at once, to the cache itself.
        one = k.new_ones((), dtype=torch.int32) if torch.compiler.is_compiling() else 1
        self.win_len += one

    def advance(self) -> None:
        """Counts one token that :meth:`write_token` wrote, and compresses a full window.

        Raises:
            ValueError: the token was one more than the capacity, or a window was full before it, for want of
                :meth:`settle`. It is forgotten.
            OutOfPagesError: pages are lacking. The token is counted: free a sequence, then :meth:`settle`.
        """
        self._refuse_graph("advance")
        try:
            self._check_token("advance")
        except ValueError:
            self._count(self._compressed, self._dense)  # the device counted it already
            raise
        self._dense = [n + 1 for n in self._dense]
        self._dense_rows.grown(self._dense)
        self._settle(range(self.batch), "advance")

    def settle(self) -> None:
        """Compresses the oldest chunk of every window that is full.

        Raises:
            OutOfPagesError: pages are lacking.
        """
        self._refuse_graph("settle")
        self._settle(range(self.batch))

    @torch.no_grad()
    def _settle(self, sequences: Sequence[int], method: str = "settle") -> None:
        full = [b for b in sequences if self._dense[b] == self._limit(b)]
        if not full:
            return
        sizes = {b: self._limit(b) - self.window for b in full}  # less than a chunk after a truncation
        self.storage.check_pages(method, [n + sizes.get(b, 0) for b, n in enumerate(self._compressed)])
        compressed, dense = list(self._compressed), list(self._dense)
        for size in sorted(set(sizes.values())):
            some = [b for b in full if sizes[b] == size]
            k, v = self._dense_rows.oldest(some, size)
            rows = self._compress(k, v, some)
            self.storage.write(some, [self._compressed[b] for b in some], rows)
            self._dense_rows.drop(some, size)
            for b in some:
                compressed[b] += size
                dense[b] -= size
        self._count(compressed, dense)

    def _check_q(self, op: str, q: Tensor, scale: float | None) -> None:
        place = (self.batch, self.num_kv_heads, self.formats[0].head_dim)
        check_query(op, q, scale, place, self.dtype, self.comp_len)

    def attend(
        self, q: Tensor, scale: float | None = None, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """:func:`htree_ops.kv_decode_attention` of q over what the cache holds now.

        Args:
            q: [B, H, D] or [B, n, H, D] in the dtype of the cache, rotated, not transformed. Several queries are those
                of the last n tokens, which must all be dense still: query i sees the tokens up to its own.
            scale: factor of the scores; None is D^-1/2.
            lengths: how many of the n queries of each sequence count, 0 ... n, which come first in its row and are
                those of its last tokens; None is n for all.

        Returns:
            out, of the shape and dtype of q but with the D of values, and lse float32 [B, H] or [B, n, H]. Rows at or
            behind ``lengths[b]``, and rows that a shorter sequence lacks, have 0 and -inf. No gradient: where q
            requires one, a backward through them raises RuntimeError.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a q that does not fit.
            TypeError, ValueError: scale is no finite number, lengths that do not fit, or several queries of which the
                first is that of a compressed token; :meth:`decode` attends while they are appended.
        """
        op = f"{OP}.attend"
        self._check_q(op, q, scale)
        if q.dim() == 3:
            return self._attend(q, scale)
        size = q.shape[1]
        counts = prompt_lengths(op, lengths, self.batch, size)
        held = [] if torch.compiler.is_compiling() else self._dense
        for b, (count, dense) in enumerate(zip(counts, held, strict=False)):
            if count > max(1, dense) and self._compressed[b]:
                raise ValueError(
                    f"{op}: the queries must be those of dense tokens, got {count} queries for the {dense} dense "
                    f"tokens of sequence {b}; decode() attends while it appends"
                )
        if counts == [size] * self.batch:
            return self._attend(q, scale)
        last = take_rows(q, [[max(0, i - size + n) for i in range(size)] for n in counts])
        out, lse = self._attend(last, scale)
        places = [[min(size - 1, i + size - n) for i in range(size)] for n in counts]
        return hide_rows(take_rows(out, places), take_rows(lse, places), counts)

    def _attend(self, q: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        keys, values = self.formats
        k, v = self.storage.parts
        out, lse = torch.ops.htree.kv_decode_attention(
            q.transpose(1, -2), *k, *v, self.k_win, self.v_win, self.comp_len, self.win_len, scale,
            self.storage.block_table, k_keep=keys.keep, v_keep=values.keep, k_bits=keys.bits, v_bits=values.bits,
            hadamard_group=self.hadamard_group, split_size=self.split_size,
        )  # fmt: skip
        return out.transpose(1, -2), lse.transpose(1, -1)

    @torch.no_grad()
    def to_dense(self) -> tuple[Tensor, Tensor]:
        """Keys [B, L, H_kv, D] and values [B, L, H_kv, D] as attention sees them, L the longest sequence.

        In the dtype of the cache; keys are transformed back (one more rounding), and rows past a sequence are 0.
        """
        lengths, windows = self.host_lengths(), self._dense_rows.parts
        keys, values = (x.new_zeros(*x.shape[:2], max(lengths, default=0), x.shape[3]) for x in windows)
        for i, (compressed, length) in enumerate(zip(self._compressed, lengths, strict=True)):
            rows = self.storage.read(i, compressed)
            for target, part, f, window in zip((keys, values), rows, self.formats, windows, strict=True):
                target[i, :, :compressed] = torch.ops.htree.kv_decompress(
                    *(x[None] for x in part), f.head_dim, f.keep, f.bits, self.dtype
                )[0]
                target[i, :, compressed:length] = window[i, :, : length - compressed]
        # the transform is its own inverse
        return self._stored(keys).transpose(1, 2), values.transpose(1, 2)

    def num_bytes(self) -> CacheBytes:
        """The report of bytes; it does not wait for a device."""
        row = sum(f.num_bytes() for f in self.formats)
        dense_row = sum(f.head_dim for f in self.formats) * self.dtype.itemsize
        tensors = [x for part in self.storage.parts for x in part]
        tensors += [*self._dense_rows.tensors(), self.comp_len, self.win_len]
        tensors += [] if self.storage.block_table is None else [self.storage.block_table]
        return CacheBytes(
            tokens=sum(self.host_lengths()),
            compressed=sum(self._compressed) * self.num_kv_heads * row,
            window=sum(self._dense) * self.num_kv_heads * dense_row,
            dense=sum(self.host_lengths()) * self.num_kv_heads * dense_row,
            allocated=sum(x.numel() * x.element_size() for x in tensors),
        )

    # ---- sequences

    @property
    def lengths(self) -> Tensor:
        """int32 [B] on the device: number of tokens of each sequence."""
        return self.comp_len + self.win_len

    def host_lengths(self) -> list[int]:
        """The lengths as numbers, which the host knows at all times."""
        return [c + d for c, d in zip(self._compressed, self._dense, strict=True)]

    @property
    def compressed_lengths(self) -> list[int]:
        """How many of these are compressed."""
        return list(self._compressed)

    def _compressed_tokens(self, length: int) -> int:
        return self.chunk * max(0, (length - self.window) // self.chunk)

    def _limit(self, sequence: int) -> int:
        """How many dense tokens the window of a sequence may have: the last chunk ends at a multiple of C."""
        return self.window + self.chunk - self._compressed[sequence] % self.chunk

    def _compressed_after(self, sequence: int, length: int) -> int:
        """How many tokens are compressed once ``length`` of them are appended, before the cache is settled."""
        compressed = self._compressed[sequence]
        if length <= compressed + self._limit(sequence):
            return compressed
        return self.chunk * (math.ceil((length - self.window) / self.chunk) - 1)

    def _refuse_graph(self, name: str) -> None:
        """Refuses a step that counts tokens on the host in a graph, which would hold for the traced counts alone."""
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{OP}.{name}: cannot be compiled or exported, because the cache counts its tokens on the host: "
                "compile write_token and attend, and call advance after each run"
            )

    def _count(self, compressed: list[int], dense: list[int]) -> None:
        self._compressed, self._dense = compressed, dense
        for target, values in ((self.comp_len, compressed), (self.win_len, dense)):
            target.copy_(torch.tensor(values, dtype=torch.int32, device="cpu"))

    @torch.no_grad()
    def truncate(self, lengths: int | Tensor | Sequence[int]) -> None:
        """Takes tokens back: sequence b keeps its first ``lengths[b]`` tokens, or all of them where that is -1.

        Any length up to that of the sequence is possible. Up to ``rollback`` tokens behind the longest length that
        a sequence had leave no trace: once settled, the cache holds the bytes that it would hold if they had never
        come. Where more are taken back, the rows that are kept stay as they are, so tokens may be compressed that
        would else still be dense: all of them, if the new length lies among the compressed tokens. New tokens then
        go to the window as always, and compressed tokens end at a multiple of the chunk from the next chunk on.

        Raises:
            TypeError: lengths are not ints. DeviceError: they are on the device meta.
            ValueError: another number of them, or one outside -1 ... the length.
            OutOfPagesError: no page for the copy of a page that others have too. The cache is left as it was.
        """
        op = f"{OP}.truncate"
        self._refuse_graph("truncate")
        numbers = self._of_all(op, lengths)
        wanted = host_integers(op, "lengths", numbers, self.batch, -1, self.capacity)
        held = self.host_lengths()
        if any(n > most for n, most in zip(wanted, held, strict=True)):
            raise ValueError(f"{op}: lengths must be at most those of the sequences, {held}, got {wanted}")
        compressed, dense = list(self._compressed), list(self._dense)
        restored: list[int] = []
        for b, length in enumerate(wanted):
            if length in (-1, held[b]):
                continue
            start = self._compressed[b]
            if self._dense_rows.whole[b] and start - self.chunk < length < start + self.window:
                restored.append(b)
                start -= self.chunk
            compressed[b], dense[b] = min(start, length), max(0, length - start)
        self.storage.truncate(self._compressed, compressed)
        for b, (old, new) in enumerate(zip(self._compressed, compressed, strict=True)):
            if b in restored:
                self._dense_rows.restore(b, max(0, wanted[b] - old))
            elif new < old:
                self._dense_rows.whole[b] = False
        self._count(compressed, dense)

    @torch.no_grad()
    def _reorder(self, method: str, beams: Tensor | Sequence[int]) -> None:
        self._refuse_graph(method)
        numbers = host_integers(f"{OP}.{method}", "beams", beams, self.batch, 0, self.batch - 1)
        self.storage.reorder(method, numbers, self._compressed)
        self._dense_rows.copy_from(self._dense_rows, numbers)
        if self._key_weight is not None:
            places = torch.tensor(numbers, dtype=torch.int64, device=self.device)
            self._key_weight = self._key_weight.index_select(0, places)
        self._count([self._compressed[i] for i in numbers], [self._dense[i] for i in numbers])

    @torch.no_grad()
    def free(self, sequence: int) -> None:
        """Empties a sequence and gives back the pages that nobody else uses. Its key_weight becomes 1, the default."""
        super().free(sequence)
        if self._key_weight is not None:
            self._key_weight = self._key_weight.clone()
            self._key_weight[sequence] = 1.0

    def reset(self) -> None:
        """Forgets every token and key_weight; the memory stays, and pages are free again."""
        self._forget()
        self._key_weight = None

    def _forget(self) -> None:
        """Forgets every token."""
        self.storage.clear()
        self._dense_rows.clear()
        self._count([0] * self.batch, [0] * self.batch)

    # ---- states and other caches

    def to(
        self,
        *to: torch.device | torch.dtype | str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CompressedKVCache:
        """This cache where it is already as asked for, else a copy on that device, or in that dtype.

        As :meth:`torch.Tensor.to`: ``cache.to("cuda")``, ``cache.to(torch.bfloat16)``, ``cache.to("cpu", torch.half)``.
        Dense tokens and rows of 16 bits are rounded to the dtype; rows of 8 and 4 bits do not change.

        Raises:
            TypeError: an argument of another kind. UnsupportedDtypeError: a dtype that the cache cannot have.
            DeviceError: a device that torch does not know, or any for a cache on the device meta.
        """
        for x in to:
            if isinstance(x, torch.dtype) and dtype is None:
                dtype = x
            elif isinstance(x, (torch.device, str)) and device is None:
                device = x
            else:
                second = " a second" if isinstance(x, (torch.dtype, torch.device, str)) else ""
                raise TypeError(f"{OP}.to: takes a device and a dtype, got{second} {type(x).__name__}")
        place = self.device if device is None else option_device(f"{OP}.to", device)
        dtype = self.dtype if dtype is None else dtype
        if (place, dtype) == (self.device, self.dtype):
            return self
        if place.type != "meta":
            check_data(f"{OP}.to", "cache", self.comp_len)
        other = self._like(self.batch, num_pages=self.num_pages, dtype=dtype, device=place)
        other.storage.copy_from(self.storage, self.dtype, dtype)
        other._dense_rows.copy_from(self._dense_rows, range(self.batch))
        weight = self.key_weight
        other._key_weight = None if weight is None else weight.to(place, copy=True)
        other._count(list(self._compressed), list(self._dense))
        return other

    def _like(self, batch: int, **changes: Any) -> CompressedKVCache:
        """An empty cache like this one of another batch."""
        options = self.config() | {
            "capacity": self.capacity,
            "page_size": self.page_size,
            "split_size": self.split_size,
            "rollback": self.rollback,
            "dtype": self.dtype,
            "device": self.device,
        }
        return CompressedKVCache(batch, **(options | changes))

    def config(self) -> dict[str, Any]:
        """What decides the bytes of a token; :meth:`load_state_dict` compares it."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.formats[0].head_dim,
            "value_dim": self.formats[1].head_dim,
            "keep": tuple(f.keep for f in self.formats),
            "bits": tuple(f.bits for f in self.formats),
            "window": self.window,
            "chunk": self.chunk,
            "hadamard_group": self.hadamard_group,
            "dtype": str(self.dtype),
        }

    def __repr__(self) -> str:
        names = ["capacity", "page_size", "num_pages", "split_size", "rollback"]
        sizes = {"batch": self.batch} | self.config() | {name: getattr(self, name) for name in names}
        listed = ", ".join(f"{name}={value}" for name, value in sizes.items() if value is not None)
        return f"{OP}({listed}, device='{self.device}', lengths={self.host_lengths()})"

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """The tokens and what is needed to read them; the same with and without pages.

        A flat dict of contiguous tensors that share no memory, as safetensors wants it: options, int64; compressed and
        dense, int64 [B], the lengths; k_bitmap ... v_scales [B, H_kv, S, ...] with S the longest compressed part, and
        k_win, v_win [B, H_kv, W, ...], zeros behind each sequence; key_weight, [0, H_kv, D] where there is none. The
        dense rows of the last chunk, with which :meth:`truncate` leaves no trace, are not in it.
        """
        lengths = (self._compressed, self._dense)
        return state_of(self.config(), lengths, self.storage, self._dense_rows.parts, self.key_weight)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces what the cache holds by :meth:`state_dict` of a cache with the same :meth:`config` and batch.

        Everything is copied. The bytes of the rows are taken as they are.

        Raises:
            TypeError: the state is not a dict, an entry is not dense or of another dtype, the cache has another dtype,
                or key_weight is not a floating tensor.
            DeviceError: an entry has no numbers, because it is on the device meta.
            ValueError: an entry is missing or does not fit: another configuration or batch, more tokens than the
                capacity, lengths that no cache has, a tensor of another shape.
            OutOfPagesError: pages are lacking. The cache is left as it was.
        """
        op = f"{OP}.load_state_dict"
        self._refuse_graph("load_state_dict")
        limits = (self.capacity, self._compressed_tokens(self.capacity))
        check_state(op, state, self.config(), self.formats, self.batch, limits, self.dtype)
        compressed, dense = (state[name].tolist() for name in ("compressed", "dense"))
        if self.storage.pages is not None:
            self.storage.pages.check_pool("load_state_dict", compressed)
        weight = state["key_weight"]
        self.key_weight = weight.to(self.device, copy=True) if weight.shape[0] or not self.batch else None
        self._forget()
        rows = [
            CompressedKV(*(state[f"{prefix}_{name}"].to(self.device) for name in CompressedKV._fields))
            for prefix in "kv"
        ]
        self.storage.fill(rows, compressed)
        k, v = (state[name].to(self.device) for name in ("k_win", "v_win"))
        self._dense_rows.put(k, v, [0] * self.batch, dense, [0] * self.batch)
        self._count(compressed, dense)

    @torch.no_grad()
    def select(self, index: Tensor | Sequence[int]) -> CompressedKVCache:
        """A new cache whose sequence i is a copy of sequence index[i]; any number of them, repeats allowed."""
        self._refuse_graph("select")
        check_data(f"{OP}.select", "cache", self.comp_len)
        numbers = host_integers(f"{OP}.select", "index", index, None, 0, self.batch - 1)
        chosen = self._like(len(numbers))
        places = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        state = self.state_dict()
        for name, value in state.items():
            if name != "options" and (name != "key_weight" or self.key_weight is not None):
                state[name] = value[places.to(value.device)]
        chosen.load_state_dict(state)
        chosen._dense_rows.copy_from(self._dense_rows, numbers)
        return chosen
