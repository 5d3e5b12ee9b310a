"""The sequences of a tree cache: what they hold, cut back, shared and freed (docs/semantics/tree_cache.md §7.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from htree_ops.ops.arguments import check_data, check_int
from htree_ops.ops.paging import Change, PagedCache, Pages, host_integers, is_recorded, on_device
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.errors import WRONG_LENGTH, in_words
from htree_ops.ops.tree_cache.lengths import HostLengths, counts_of
from htree_ops.ops.tree_cache.pools import Pools
from htree_ops.ops.tree_cache.prompts import Prompts
from htree_ops.ops.tree_cache.ring import Ring

OP = "TreeKVCache"


class CacheSequences(PagedCache):
    """The part of :class:`htree_ops.TreeKVCache` that sees sequences and their pages, and no token's keys or values.

    Attributes:
        pages, pools: whose the pages are, and what they hold. ring: the lists of the last leaders. prompts: the copies
            that chunks have left. host: what the host knows of ``lengths``.
    """

    OP = OP
    options: TreeOptions
    leaf_bits: int | None
    capacity: int
    page_size: int
    device: torch.device
    pages: Pages
    pools: Pools
    ring: Ring
    prompts: Prompts
    lengths: Tensor
    host: HostLengths
    _state: list[Tensor]
    _errors: Tensor
    _own_from: Tensor
    _packed_options: tuple[list[int], list[float]]

    def host_lengths(self) -> list[int]:
        """The lengths as numbers. Waits for the device where only it knows them."""
        return list(self.host.read())

    @torch.no_grad()
    def truncate(self, lengths: int | Tensor | Sequence[int]) -> None:
        """Takes tokens back: sequence b keeps its first ``lengths[b]`` tokens, or all of them where that is -1.

        With selection_stride s > 1 the new length is a multiple of s, or the lists of the last token's leader are in
        the ring of the last 4. With leaf_bits it is a multiple of compression_rate, or the tokens of the node that it
        opens are still kept as they came: those of the last page_size tokens are (docs/semantics/tree_cache.md §7.5).
        Lengths on a GPU are not read: there, and in a graph, a sequence can be cut back to the end of the pages that it
        shares with others. For a cut inside a stride of shared pages the host waits for the ring. Length 0 gives back
        the pages that :meth:`reserve` has taken, a length below the old one those behind it.

        Raises:
            ValueError: another length or more than the sequence holds, as far as the host knows. What only the device
                sees leaves the sequence as it was, and :meth:`check` reports it.
            OutOfPagesError: no page for the copy of an open one.
        """
        name = f"{OP}.truncate"
        if isinstance(lengths, int):
            lengths = [lengths] * self.batch
        request, wanted = counts_of(name, lengths, self.batch, -1, 2**31 - 1, self.device)
        if is_recorded(self.device):
            wanted = None
        left = wanted is None or self._is_left_to_the_device(wanted)
        if wanted is not None and left:
            # A cut into pages that others share takes new pages, which is the host's to do. It can be refused, so it is
            # first: nothing has changed then.
            shared = self._cuts_shared_pages(wanted)
            if any(shared):
                self.truncate([m if cut else -1 for m, cut in zip(wanted, shared, strict=True)])
                self.truncate([-1 if cut else m for m, cut in zip(wanted, shared, strict=True)])
                return
        self._end_prompts(None if wanted is None else [length + 1 for length in wanted])
        change = None
        if wanted is not None and not left:
            held = self.host.read()
            self._check_truncation(name, wanted, held)
            change = self.pages.cut(held, wanted)
            self.pages.check("truncate", change)
        own_from = torch.zeros_like(self._own_from) if change is not None else self._own_from
        torch.ops.htree._tree_cache_truncate_(
            self.pools.written,
            self._state,
            self.pages.block_table,
            request,
            own_from,
            self.page_size,
            *self._packed_options,
        )
        if change is not None and wanted is not None:
            self._move(change, "truncate")
            self.host.set([n if m < 0 else m for n, m in zip(self.host.read(), wanted, strict=True)])
        elif torch.compiler.is_compiling():
            self.host.lose()
        elif not is_recorded(self.device):
            self.host.exact = False

    def _cuts_shared_pages(self, wanted: list[int]) -> list[bool]:
        """For each sequence whether a truncation keeps a part of the pages that it shares with others."""
        return [0 <= m < self.pages.shared(b) * self.page_size for b, m in enumerate(wanted)]

    def _is_left_to_the_device(self, wanted: list[int]) -> bool:
        """Whether only the device knows if a truncation is possible: the host would have to wait for it."""
        if self.device.type != "cuda":
            return False
        if max(wanted, default=0) == 0 and (not any(wanted) or not self.pages.is_whole):
            return False  # nothing is left of all sequences, whatever they hold, or pages go back to the pool
        own = [-1 if cut else m for m, cut in zip(wanted, self._cuts_shared_pages(wanted), strict=True)]
        if not self.host.exact:
            return own == wanted or any(m >= 0 for m in own)
        unit = self.options.compression_rate if self.leaf_bits else self.options.selection_stride
        return any(m > 0 and m != n and m % unit for m, n in zip(own, self.host.read(), strict=True))

    def _check_truncation(self, name: str, wanted: list[int], held: list[int]) -> None:
        """Raises ValueError for a truncation that the op would refuse; ring and tails are read if it turns on them."""
        stride, rate, leaves = self.options.selection_stride, self.options.compression_rate, self.pools.leaves

        def turns_on(unit: int) -> bool:
            inside = any(m not in (-1, n) and m % unit for m, n in zip(wanted, held, strict=True))
            return inside and type(self.lengths) is Tensor

        leaders = self.ring.list_pos.tolist() if turns_on(stride) else None
        begins = leaves.tail_begin.tolist() if leaves is not None and turns_on(rate) else None
        for b, (length, holds) in enumerate(zip(wanted, held, strict=True)):
            if length > holds:
                raise ValueError(
                    f"{name}: a sequence can be truncated to at most what it holds, sequence {b} holds {holds} tokens, "
                    f"got {length}"
                )
            if length in (-1, holds):
                continue
            leader = length - 1 - (length - 1) % stride
            if leaders is not None and length % stride and leader not in leaders[b]:
                raise ValueError(
                    f"{name}: sequence {b} can be truncated to a multiple of selection_stride = {stride}, or where the "
                    f"lists of the last token's leader are in the ring, got {length}"
                )
            if begins is not None and length % rate and length - length % rate < begins[b]:
                raise ValueError(
                    f"{name}: with leaf_bits sequence {b} can be truncated to a multiple of compression_rate = {rate}, "
                    f"or to {begins[b]} and more within a node of which all tokens are still kept as they came, got "
                    f"{length}"
                )

    def _move(self, change: Change, method: str) -> None:
        """Makes a change of pages, with its copies."""
        if not change.rows:
            return
        self.pools.copy_pages(self.pages.make(method, change))
        self._mark_shared_pages()

    def _mark_shared_pages(self) -> None:
        """Tells the device where the pages of each sequence begin that are its own."""
        own_from = [self.pages.shared(b) * self.page_size for b in range(self.batch)]
        self._own_from.copy_(on_device(own_from, self.device))

    @torch.no_grad()
    def _reorder(self, method: str, beams: Tensor | Sequence[int]) -> None:
        name = f"{OP}.{method}"
        if is_recorded(self.device):
            raise NotImplementedError(
                f"{name}: cannot be compiled or captured, because pages are moved by the host: call it between two "
                "runs, which read the block table and the lengths where they are"
            )
        numbers = host_integers(name, "beams", beams, self.batch, 0, self.batch - 1)
        request = on_device(numbers, self.device)
        self._end_prompts([int(beam != b) for b, beam in enumerate(numbers)])
        held = self.host.read()
        self._move(self.pages.reorder(numbers, held), method)
        of_sequences = [self.lengths, self.ring.lists, self.ring.list_pos]
        if self.pools.leaves is not None:
            of_sequences += self.pools.leaves.of_sequences().values()
        for x in of_sequences:
            x.copy_(x.index_select(0, request))
        self.host.set([held[beam] for beam in numbers])

    def reset(self) -> None:
        """Empties every sequence; the memory stays."""
        self.truncate(0)

    def reserve(self, tokens: int) -> None:
        """Takes the pages for the next ``tokens`` tokens of every sequence now, so that they cannot run out later.

        A pool with pages for the capacity of all sequences has nothing to reserve. For another one, call it before a
        graph is captured or replayed: what runs on the device alone takes no page.

        Raises:
            ValueError: the capacity does not suffice. OutOfPagesError: the pages do not suffice.
        """
        name = f"{OP}.reserve"
        check_int(name, "tokens", tokens, 0)
        if is_recorded(self.device):
            if self.pages.is_whole:
                return
            raise NotImplementedError(
                f"{name}: call it before what is compiled or captured: the host takes the pages"
            )
        if self.host.most is None or (not self.host.exact and not self.pages.is_whole):
            self.host.read()
        self._take_pages(name, [tokens] * self.batch, tokens)

    def check(self) -> None:
        """Raises the errors that the device has recorded since the last call, and clears them. Waits for the device.

        Raises:
            ValueError: an error was recorded; the message names the sequences. Or the host has counted other lengths,
                because :meth:`advance` was not called after each replay of a graph; it takes those of the device. Or
                ``lengths`` was written to, and has a number below 0 or beyond the pages of its sequence; it becomes the
                nearest one that is possible.
            DeviceError: the cache is on the device meta, which records none.
        """
        check_data(f"{OP}.check", "cache", self._errors)
        found, lengths = self._errors.tolist(), self.lengths.tolist()
        counted = self.host.read()
        possible = [min(max(n, 0), self.pages.tokens(b)) for b, n in enumerate(lengths)]
        self.host.set(possible)
        if possible != lengths:
            self.lengths.copy_(on_device(possible, self.device))
            raise ValueError(
                f"{OP}.check: lengths on the device must lie between 0 and what the pages of each sequence hold, got "
                f"{lengths}: they are {possible} now"
            )
        if any(found):
            self._errors.zero_()
            raise ValueError(f"{OP}.check: {in_words(found)}")
        if counted != lengths:
            raise ValueError(
                f"{OP}.check: the host has counted {counted} tokens where the device has {lengths}: call advance() "
                "after every replay of a graph"
            )

    # ---- counts

    def advance(self, tokens: int | Sequence[int] | None = 1) -> None:
        """Follows a replay of a graph, in which the device has counted tokens that the host has not.

        Call it after every replay: what the host does with pages, lengths and prompts follows from its count.

        Args:
            tokens: what each sequence got and kept, or one number for all, below 0 where more was taken back; None
                where only the device knows, so that the host reads the lengths when it needs them.

        Raises:
            TypeError: tokens are no ints. ValueError: another number of them; more tokens than the capacity or than
                were there to be taken back, as far as the host knows the lengths. Nothing has changed.
        """
        name = f"{OP}.advance"
        if tokens is not None:
            numbers = tokens if isinstance(tokens, Sequence) else [tokens] * self.batch
            counts = host_integers(name, "tokens", numbers, self.batch, -self.capacity, 2**31 - 1)
            most = self.host.most or [self.capacity] * self.batch
            after = [n + count for n, count in zip(most, counts, strict=True)]
            if any(x < 0 or (self.host.exact and x > self.capacity) for x in after):
                raise ValueError(
                    f"{name}: tokens must leave each sequence between 0 and capacity = {self.capacity}, got {counts} "
                    f"beside {most}"
                )
        self.prompts.drop(None)
        if tokens is None:
            self.host.lose()
        else:
            self.host.grow(counts, self.capacity, exact=True)

    def _take_pages(self, name: str, counts: list[int] | None, n: int) -> None:
        """Takes the pages of an append as far as the host knows what they are; the device looks at its own lengths."""
        pages, host, most = self.pages, self.host, self.host.most
        if host.exact and most is not None and pages.is_whole and max(most, default=0) + n <= self.capacity:
            return  # most calls
        fits = most is not None and all(m + n <= pages.tokens(b) for b, m in enumerate(most))
        if not host.exact and (self.device.type == "cpu" or not (pages.is_whole or fits)):
            host.read()
        if host.most is None:
            return
        new = [n] * self.batch if counts is None else counts
        after = [m + x for m, x in zip(host.most, new, strict=True)]
        if counts is not None and host.exact:
            for b, x in enumerate(after):
                if x > self.capacity:
                    raise ValueError(
                        f"{name}: sequence {b} holds {host.most[b]} tokens; {new[b]} more exceed the capacity of "
                        f"{self.capacity}"
                    )
        if not pages.is_whole:
            pages.make(name.removeprefix(f"{OP}."), pages.growth([min(x, self.capacity) for x in after]))

    def _end_prompts(self, counts: list[int] | None) -> None:
        """Frees what chunks of prompts left, of the sequences with ``counts[b]`` > 0; None is all of them."""
        known = counts is not None and not is_recorded(self.device)
        self.prompts.drop([b for b, count in enumerate(counts) if count > 0] if known and counts else None)

    def _counts(self, name: str, lengths: Tensor | Sequence[int], n: int) -> tuple[Tensor, list[int] | None]:
        """How many of the n rows of each sequence count, [B], and the same on the host if it knows."""
        counts, given = counts_of(name, lengths, self.batch, 0, n, self.device)
        if given is not None:
            return counts, given
        wrong = (counts < 0) | (counts > n)
        self._errors.bitwise_or_(wrong.int() * WRONG_LENGTH)
        return counts.masked_fill(wrong, 0), None
