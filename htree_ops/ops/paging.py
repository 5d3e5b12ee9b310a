"""Which pages the sequences of a cache have: the host decides, and the device has the tables that kernels read.

Both caches have one :class:`Pages`. A page that is full in every sequence that has it may be shared. Behind its full
pages a sequence has pages of its own alone, so whoever writes tokens asks nobody. Where the pool has pages for the
capacity of all sequences, each of them has pages for its capacity at all times: tokens then never take a page, and what
is compiled or captured in a graph needs nothing before it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.errors import OutOfPagesError
from htree_ops.ops.arguments import check_int, check_integers

#: A page that a change will take from the free ones.
FRESH = -1


def is_recorded(device: torch.device) -> bool:
    """Whether calls are being compiled or captured in a graph: what the host counts then is not what replays do."""
    return torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )


def stream_of(x: Tensor) -> int:
    """The handle of the stream that work on a tensor's GPU goes to, without an object around it; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int32 on the device, without waiting for it."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=pinned).to(
        device, non_blocking=True
    )


def host_integers(
    op: str, name: str, values: Tensor | Sequence[int], count: int | None, least: int, most: int
) -> list[int]:
    """``count`` ints from ``least`` to ``most`` as a list; a tensor on a device is waited for. None is any count."""
    check_integers(op, name, values)
    numbers: list[int] = values.tolist() if isinstance(values, Tensor) else list(values)
    try:
        if any(isinstance(n, bool) for n in numbers):
            raise TypeError("bools")
        numbers = [operator.index(n) for n in numbers]
    except TypeError as error:
        raise TypeError(f"{op}: {name} must be a list of ints, got {values!r}") from error
    if count not in (None, len(numbers)) or not all(least <= n <= most for n in numbers):
        words = "numbers" if count is None else f"{count} numbers"
        raise ValueError(f"{op}: {name} must be {words} between {least} and {most}, got {numbers}")
    return numbers


@dataclass
class Change:
    """What a step makes of some sequences, before it is made.

    Attributes:
        rows: the pages of sequences, FRESH where one is to be taken.
        copies: (sequence, place, page): the page to copy into the one that the sequence gets there.
    """

    rows: Mapping[int, list[int]]
    copies: Sequence[tuple[int, int, int]] = ()


def _first_difference(a: list[int], b: list[int]) -> int:
    """How many entries two lists begin with that are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Pages:
    """The pages of ``batch`` sequences of at most ``capacity`` tokens.

    Args:
        op: name for the messages.
        page_size: tokens of a page. num_pages: of the pool.

    Attributes:
        block_table: int32 [B, max_pages] on the device: page i of a sequence holds its tokens i * page_size and
            following; -1 where it has none.
        rows: the same on the host, for each sequence what it has.
        users: how many sequences have a page. free: pages that none has, the next one last.
        is_whole: whether each sequence has pages for its capacity at all times.
    """

    def __init__(
        self, op: str, batch: int, capacity: int, page_size: int, num_pages: int, device: torch.device
    ) -> None:
        self.op, self.page_size, self.capacity, self.num_pages = op, page_size, capacity, num_pages
        self.max_pages = max(1, -(-capacity // page_size))
        self.is_whole = num_pages >= batch * self.max_pages
        self.users: list[int] = []
        self.free: list[int] = []
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.block_table = torch.full((batch, self.max_pages), -1, dtype=torch.int32, device=device)
        self.clear()

    def tokens(self, sequence: int) -> int:
        """How many tokens the pages of a sequence have space for."""
        return min(self.capacity, len(self.rows[sequence]) * self.page_size)

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens need."""
        return -(-tokens // self.page_size)

    def shared(self, sequence: int) -> int:
        """How many of the first pages of a sequence others have too: who shares a page shares those before it."""
        row = self.rows[sequence]
        low, high = 0, len(row)
        while low < high:
            middle = (low + high) // 2
            if self.users[row[middle]] > 1:
                low = middle + 1
            else:
                high = middle
        return low

    # ---- changes

    def lacking(self, change: Change) -> int:
        """How many pages a change needs beyond those that are free then."""
        return self._lacking(change, self._users_after(change))

    def _lacking(self, change: Change, users: Mapping[int, int]) -> int:
        wanted = sum(row.count(FRESH) for row in change.rows.values())
        return wanted - len(self.free) - sum(self.users[page] + n == 0 for page, n in users.items() if n < 0)

    def _users_after(self, change: Change) -> Counter[int]:
        """How many users each page gets, below 0 where it loses some."""
        users: Counter[int] = Counter()
        for sequence, row in change.rows.items():
            old = self.rows[sequence]
            begin = _first_difference(old, row)
            end = _first_difference(old[begin:][::-1], row[begin:][::-1]) if len(old) == len(row) else 0
            users.subtract(old[begin : len(old) - end])
            users.update(page for page in row[begin : len(row) - end] if page != FRESH)
        return users

    def check(self, method: str, change: Change) -> None:
        """Raises OutOfPagesError where there are too few pages for a change."""
        lacking = self.lacking(change)
        if lacking > 0:
            raise OutOfPagesError(
                f"{self.op}.{method}: {lacking} more pages of {self.page_size} tokens are needed than are free of the "
                f"{self.num_pages}: give num_pages a larger value, or free a sequence",
                pages=lacking,
            )

    def check_pool(self, method: str, tokens: Sequence[int]) -> None:
        """Raises OutOfPagesError where the pool is too small for sequences of so many tokens and nothing else."""
        lacking = sum(map(self.pages_for, tokens)) - self.num_pages
        if lacking > 0:
            raise OutOfPagesError(
                f"{self.op}.{method}: {lacking} more pages of {self.page_size} tokens are needed than the "
                f"{self.num_pages} of the pool: give num_pages a larger value",
                pages=lacking,
            )

    def make(self, method: str, change: Change) -> list[tuple[int, int]]:
        """Makes a change.

        Returns:
            (from, to) for each page that the caller has to copy; none is both.

        Raises:
            OutOfPagesError: there are too few pages. Nothing has changed.
        """
        users = self._users_after(change)
        if self._lacking(change, users) > 0:
            self.check(method, change)
        for page, n in users.items():
            self.users[page] += n
            if n < 0 and self.users[page] == 0:
                self.free.append(page)
        entries: list[tuple[int, int, int]] = []  # sequence, place, page
        for sequence, row in change.rows.items():
            for _ in range(row.count(FRESH)):
                place = row.index(FRESH)
                row[place] = self.free.pop()
                self.users[row[place]] = 1
            old = self.rows[sequence]
            wide = max(len(old), len(row))
            before, after = (x + [-1] * (wide - len(x)) for x in (old, row))
            begin = _first_difference(before, after)
            end = wide - _first_difference(before[begin:][::-1], after[begin:][::-1])
            entries += ((sequence, i, after[i]) for i in range(begin, end) if before[i] != after[i])
            self.rows[sequence] = row
        if entries:
            sequences, places, pages = on_device(list(zip(*entries, strict=True)), self.block_table.device)
            self.block_table[sequences.long(), places.long()] = pages
        return [(page, change.rows[sequence][place]) for sequence, place, page in change.copies]

    # ---- steps

    def growth(self, tokens: Sequence[int]) -> Change:
        """Pages for ``tokens[b]`` tokens of sequence b, beside those that it has."""
        rows = {}
        for b, count in enumerate(tokens):
            lacking = self.pages_for(count) - len(self.rows[b])
            if lacking > 0:
                rows[b] = self.rows[b] + [FRESH] * lacking
        return Change(rows)

    def cut(self, lengths: Sequence[int], kept: Sequence[int]) -> Change:
        """Sequences of ``lengths[b]`` tokens become their first ``kept[b]``; pages that are open then are their own.

        Where that is -1, a sequence stays as it is; where it is 0, it gives back reserved pages too. The last user of a
        page keeps it, so that no page is copied that this step makes free.
        """
        rows: dict[int, list[int]] = {}
        left = Counter[int]()  # how many users a page loses
        for b, keep in enumerate(kept):
            if 0 <= keep < lengths[b] or (keep == 0 and not self.is_whole):
                count = self.pages_for(keep)
                rows[b] = list(self.rows[b])
                for i in range(count, self.shared(b) if self.is_whole else len(rows[b])):
                    if not self.is_whole or self._is_shared(rows[b][i], left):
                        left[rows[b][i]] += 1
                        rows[b][i] = FRESH
                if not self.is_whole:
                    del rows[b][count:]
        copies = []
        for b, row in rows.items():
            place = kept[b] // self.page_size
            if self._is_open(kept[b]) and self._is_shared(row[place], left):
                copies.append((b, place, row[place]))
                left[row[place]] += 1
                row[place] = FRESH
        return Change(rows, copies)

    def _is_shared(self, page: int, left: Mapping[int, int]) -> bool:
        return self.users[page] - left[page] > 1

    def reorder(self, beams: Sequence[int], lengths: Sequence[int]) -> Change:
        """Sequence b becomes what sequence ``beams[b]`` was: it shares its full pages and gets a copy of the open one.

        Who takes the place of a sequence that does not stay itself keeps its open page.
        """
        moved = [b for b, beam in enumerate(beams) if beam != b]
        heirs: dict[int, int] = {}
        for b in moved:
            if beams[beams[b]] != beams[b]:
                heirs.setdefault(beams[b], b)
        taken = {
            self.rows[beam][lengths[beam] // self.page_size] for beam in heirs if self._is_open(lengths[beam])
        }
        rows, copies = {}, []
        for b in moved:
            beam, old = beams[b], self.rows[b]
            full = lengths[beam] // self.page_size
            row = self.rows[beam][:full]
            if self._is_open(lengths[beam]):
                page = self.rows[beam][full]
                if heirs.get(beam) == b:
                    row.append(page)
                else:
                    copies.append((b, full, page))
            count = self.max_pages if self.is_whole else self.pages_for(lengths[beam])
            own = max(len(row), lengths[b] // self.page_size)  # from here on its pages are its own
            row += [FRESH] * (min(own, count) - len(row))
            row += [FRESH if page in taken else page for page in old[own:count]]
            rows[b] = row + [FRESH] * (count - len(row))
        return Change(rows, copies)

    def _is_open(self, length: int) -> bool:
        return length % self.page_size > 0

    def load(self, rows: Sequence[Sequence[int]]) -> None:
        """Sequences have these pages and, where there are pages for all, others behind them."""
        self.rows = [list(row) for row in rows]
        counted = Counter(page for row in rows for page in row)
        self.users = [counted[page] for page in range(self.num_pages)]
        self.free = [page for page in range(self.num_pages) if not counted[page]][::-1]
        self.block_table.copy_(self.table_of(self.rows))
        if self.is_whole:
            self.make("load_state_dict", self.growth([self.capacity] * len(self.rows)))

    def table_of(self, rows: Sequence[list[int]]) -> Tensor:
        """The block table of sequences that have these pages, on the host."""
        table = [row + [-1] * (self.max_pages - len(row)) for row in rows]
        return torch.tensor(table, dtype=torch.int32, device="cpu").view(len(rows), self.max_pages)

    def clear(self) -> None:
        """Forgets every sequence."""
        batch = len(self.rows)
        count = self.max_pages if self.is_whole else 0
        given = batch * count
        self.rows = [list(range(b * count, (b + 1) * count)) for b in range(batch)]
        self.users = [1] * given + [0] * (self.num_pages - given)
        self.free = list(range(given, self.num_pages))[::-1]
        if self.is_whole:
            pages = torch.arange(given, dtype=torch.int32, device=self.block_table.device)
            self.block_table.copy_(pages.view(batch, self.max_pages))
        else:
            self.block_table.fill_(-1)

    def copy_from(self, other: Pages) -> None:
        """Takes what another one of the same sizes has."""
        self.rows = [list(row) for row in other.rows]
        self.users, self.free = list(other.users), list(other.free)
        self.block_table.copy_(other.block_table)


class PagedCache:
    """What every cache does with its sequences once it can reorder them and cut them back.

    Attributes:
        OP: name for the messages. batch: B, sequences.
    """

    OP: str
    batch: int

    def _reorder(self, method: str, beams: Tensor | Sequence[int]) -> None:
        """Sequence b becomes what sequence ``beams[b]`` was; messages name the ``method``."""
        raise NotImplementedError

    def reorder_(self, beams: Tensor | Sequence[int]) -> None:
        """Beam search: sequence b becomes what sequence ``beams[b]`` was. Full pages are shared, open ones are copied.

        Whose the pages are, the host decides: beams on a device are waited for, and lengths that only it knows.

        Raises:
            TypeError: beams holds no ints. DeviceError: it is on the device meta. ValueError: beams does not have B
                entries, or one that does not exist. OutOfPagesError: too few pages for the copies. Nothing has changed.
            NotImplementedError: the call is being compiled or captured: reorder between two replays.
        """
        self._reorder("reorder_", beams)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Sequence b keeps its first ``lengths[b]`` tokens, or all of them where that is -1."""
        raise NotImplementedError

    def _of_all(self, op: str, lengths: int | Tensor | Sequence[int]) -> Tensor | Sequence[int]:
        """The lengths of a truncation, where an int stands for all sequences."""
        if isinstance(lengths, (Tensor, Sequence)):
            return lengths
        try:
            operator.index(lengths)
        except TypeError:
            came = type(lengths).__name__
            raise TypeError(f"{op}: lengths must be an int, a list of ints or a Tensor, got {came}") from None
        return [lengths] * self.batch

    def fork(self, source: int, target: int) -> None:
        """Sequence ``target`` becomes a copy of ``source``, whose full pages it shares. The old ``target`` is freed.

        Raises:
            TypeError, ValueError: a sequence that does not exist. OutOfPagesError: no page for the copy of an open one.
                Nothing has changed.
            NotImplementedError: the call is being compiled or captured.
        """
        for name, sequence in (("source", source), ("target", target)):
            check_int(f"{self.OP}.fork", name, sequence, 0, self.batch - 1)
        self._reorder("fork", [source if b == target else b for b in range(self.batch)])

    def free(self, sequence: int) -> None:
        """Empties a sequence and gives back the pages that nobody else uses."""
        check_int(f"{self.OP}.free", "sequence", sequence, 0, self.batch - 1)
        self.truncate([0 if b == sequence else -1 for b in range(self.batch)])
