"""The sequences of a compressed cache: what they hold, cut back and shared (docs/semantics/compressed_kv.md §4.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from htree_ops.ops.compressed_kv.storage import StoredRows
from htree_ops.ops.compressed_kv.window import DenseWindow
from htree_ops.ops.paging import PagedCache, host_integers

OP = "CompressedKVCache"


class CompressedSequences(PagedCache):
    """The part of :class:`htree_ops.CompressedKVCache` that sees sequences, and no token's keys or values."""

    OP = OP
    capacity: int
    window: int
    chunk: int
    device: torch.device
    storage: StoredRows
    comp_len: Tensor
    win_len: Tensor
    _dense_rows: DenseWindow
    _key_weight: Tensor | None
    _compressed: list[int]
    _dense: list[int]

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
        numbers = [lengths] * self.batch if isinstance(lengths, int) else lengths
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
