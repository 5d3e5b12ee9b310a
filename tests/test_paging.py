"""Pages of the caches on the host (htree_ops/ops/paging.py), beside a model that gives every sequence its tokens."""

import random
from collections import Counter

import pytest
import torch

from htree_ops.errors import OutOfPagesError
from htree_ops.ops.paging import Change, Pages


class Model:
    """Sequences of token numbers, and what each page of a pool holds; a token is written where the table says."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.tokens: list[list[int]] = [[] for _ in pages.rows]
        self.pool = [[-1] * pages.page_size for _ in range(pages.num_pages)]
        self.next = 0
        self.refused: Counter[str] = Counter()

    def make(self, method: str, change: Change) -> bool:
        """Makes a change and its copies; False where there are too few pages."""
        before = [list(row) for row in self.pages.rows], list(self.pages.users), sorted(self.pages.free)
        lacking = self.pages.lacking(change)
        if lacking > 0:
            with pytest.raises(OutOfPagesError) as raised:
                self.pages.make(method, change)
            assert raised.value.pages == lacking
            assert ([*map(list, self.pages.rows)], self.pages.users, sorted(self.pages.free)) == before
            self.refused[method] += 1
            return False
        copies = self.pages.make(method, change)
        assert not {page for page, _ in copies} & {page for _, page in copies}
        for old, new in copies:
            self.pool[new] = list(self.pool[old])
        return True

    def append(self, counts: list[int]) -> None:
        after = [len(x) + n for x, n in zip(self.tokens, counts, strict=True)]
        if max(after) > self.pages.capacity or not self.make("append", self.pages.growth(after)):
            return
        for b, count in enumerate(counts):
            for _ in range(count):
                place, row = divmod(len(self.tokens[b]), self.pages.page_size)
                assert self.pages.users[self.pages.rows[b][place]] == 1, "only full pages are shared"
                self.pool[self.pages.rows[b][place]][row] = self.next
                self.tokens[b].append(self.next)
                self.next += 1

    def truncate(self, kept: list[int]) -> None:
        lengths = [len(x) for x in self.tokens]
        if self.make("truncate", self.pages.cut(lengths, kept)):
            self.tokens = [x[:n] for x, n in zip(self.tokens, kept, strict=True)]

    def reorder(self, beams: list[int]) -> None:
        if self.make("reorder_", self.pages.reorder(beams, [len(x) for x in self.tokens])):
            self.tokens = [list(self.tokens[beam]) for beam in beams]

    def check(self) -> None:
        pages, size = self.pages, self.pages.page_size
        assert Counter(page for row in pages.rows for page in row) == +Counter(dict(enumerate(pages.users)))
        assert sorted(pages.free) == [page for page, users in enumerate(pages.users) if users == 0]
        for b, (row, tokens) in enumerate(zip(pages.rows, self.tokens, strict=True)):
            assert len(set(row)) == len(row) >= pages.pages_for(len(tokens))
            assert not pages.is_whole or len(row) == pages.max_pages
            assert [self.pool[row[t // size]][t % size] for t in range(len(tokens))] == tokens
            assert all(pages.users[page] == 1 for page in row[len(tokens) // size :])
            assert pages.shared(b) == sum(pages.users[page] > 1 for page in row)
            assert pages.block_table[b].tolist() == row + [-1] * (pages.max_pages - len(row))


def drawn(seed: int) -> tuple[random.Random, Model]:
    draw = random.Random(seed)
    batch, size, most = draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 6)
    capacity = most * size - draw.randint(0, size - 1)
    few = draw.randint(1, (batch * most + 1) // 2)
    num_pages = draw.choice((batch * most, batch * most + 2, few, few))
    return draw, Model(Pages("test", batch, capacity, size, num_pages, torch.device("cpu")))


def test_schedules_keep_every_token_in_a_page_of_its_own():
    shared, refused = 0, Counter[str]()
    for seed in range(2000):
        draw, model = drawn(seed)
        batch = len(model.tokens)
        for _ in range(12):
            kind = draw.choice(("append", "append", "append", "truncate", "reorder", "reorder", "free"))
            before = [len(x) for x in model.tokens]
            if kind == "append":
                model.append([draw.randint(0, 2 * model.pages.page_size) for _ in range(batch)])
            elif kind == "truncate":
                model.truncate([draw.choice((n, draw.randint(0, n))) for n in before])
            elif kind == "reorder":
                model.reorder([draw.randrange(batch) for _ in range(batch)])
            else:
                freed = draw.randrange(batch)
                model.truncate([0 if b == freed else n for b, n in enumerate(before)])
            model.check()
            shared += any(users > 1 for users in model.pages.users)
        refused += model.refused
    assert refused["append"] > 1000
    assert refused["reorder_"] > 10
    assert refused["truncate"] > 0
    assert shared > 2000


def test_a_state_takes_pages_by_their_numbers():
    for seed in range(200):
        draw, model = drawn(seed)
        pages = model.pages
        chosen = draw.sample(range(pages.num_pages), draw.randint(0, pages.num_pages))
        rows = [chosen[b :: len(pages.rows)][: pages.max_pages] for b in range(len(pages.rows))]
        pages.load(rows)
        assert [row[: len(wanted)] for row, wanted in zip(pages.rows, rows, strict=True)] == rows
        model.check()
        pages.clear()
        model.check()


def test_what_is_lacking_is_said():
    pages = Pages("TreeKVCache", 2, 40, 8, 5, torch.device("cpu"))
    pages.make("append", pages.growth([16, 17]))
    with pytest.raises(
        OutOfPagesError,
        match=r"TreeKVCache\.append: 2 more pages of 8 tokens are needed than are free of the 5: give num_pages",
    ) as raised:
        pages.make("append", pages.growth([17, 25]))
    assert raised.value.pages == 2


def test_a_permutation_of_open_sequences_copies_nothing():
    pages = Pages("test", 4, 64, 8, 32, torch.device("cpu"))
    rows = [list(row) for row in pages.rows]
    assert pages.make("reorder_", pages.reorder([1, 2, 3, 0], [20, 20, 20, 20])) == []
    assert [row[:3] for row in pages.rows] == [rows[b][:3] for b in (1, 2, 3, 0)]
    copies = pages.make("reorder_", pages.reorder([0, 0, 0, 3], [20, 20, 20, 20]))
    assert [old for old, _ in copies] == [pages.rows[0][2]] * 2
