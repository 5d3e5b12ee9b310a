"""Tables of pages that contradict themselves: the CPU refuses them, CUDA reports them, and neither follows them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from page_tables import FENCE, STATE, STEPS, Sizes, fenced
from torch import Tensor

from htree_ops import TreeKVCache
from tests.support.tree_cache_cases import state_of

ops = torch.ops.htree
HELD, USERS, STACK, PAGE = 256, 512, 1024, 64  # bits of errors

#: A table of two sequences, 14 tokens in pages 0 and 1 of 8 and none, with one tensor overwritten: which, by what, the
#: error of the CPU, and the bits of CUDA in an append or reserve, in a truncation and in a reorder. 0: the step reads
#: nothing that is wrong.
BROKEN: dict[str, tuple[int, Any, type, str, tuple[int, int, int]]] = {
    "held": (2, [5, 0], ValueError, "held must lie between 0 and max_pages = 4, got 5", (HELD,) * 3),
    "negative held": (2, [-1, 0], ValueError, "held must lie between 0", (HELD,) * 3),
    "lengths": (1, [17, 0], ValueError, "the tokens of the pages held = 16, got 17", (HELD,) * 3),
    "negative length": (1, [-1, 0], ValueError, "lengths must lie between 0", (HELD,) * 3),
    "largest length": (1, [2**31 - 1, 0], ValueError, "lengths must lie between 0", (HELD,) * 3),
    "table": (0, [[0, 77, -1, -1], [-1] * 4], IndexError, r"block_table\[0, 1\] must be", (PAGE,) * 3),
    "hole": (0, [[0, -1, -1, -1], [-1] * 4], IndexError, r"block_table\[0, 1\] must be", (PAGE,) * 3),
    "no users": (3, [1, 0, 0, 0, 0, 0], ValueError, "users must be how often", (USERS,) * 3),
    "users below 0": (3, [1, -(2**31), 0, 0, 0, 0], ValueError, "users must be how often", (USERS,) * 3),
    "users": (3, [1, 2, 0, 0, 0, 0], ValueError, "users must be how often", (USERS, 0, 0)),
    "page again": (0, [[0, 0, -1, -1], [-1] * 4], ValueError, "got page 0 again at", (0, USERS, 0)),
    "count": (4, [7, 5, 4, 3, 2, 1, 0], ValueError, "free_pages must begin with", (STACK,) * 3),
    "negative count": (4, [-1, 5, 4, 3, 2, 1, 0], ValueError, "free_pages must begin with", (STACK,) * 3),
    "page twice": (4, [4, 5, 4, 2, 2, 1, 0], ValueError, "each once, got 2 at 4", (STACK, 0, 0)),
    "page in use": (4, [4, 5, 4, 3, 1, 1, 0], ValueError, "without users", (STACK, 0, STACK)),
    "page of nowhere": (4, [4, 5, 4, 3, -3, 1, 0], ValueError, "pages of the pool", (STACK, 0, STACK)),
    "page behind the pool": (4, [4, 5, 4, 3, 6, 1, 0], ValueError, "pages of the pool", (STACK, 0, STACK)),
}
#: Two more pages, one token, and a copy of the open page.
REQUESTS = {"append": [11, 0], "reserve": [11, 0], "truncate": [1, 0], "reorder": [0, 0]}
OPTIONS = {"capacity": 30, "page_size": 8}


def integers(values: Any, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_untouched(state: list[Tensor], before: list[Tensor]) -> None:
    """All but errors and plan; of the free pages, those that are counted."""
    count = 1 + min(max(int(before[4][0]), 0), len(before[3]))
    for name, ours, theirs in zip(STATE[:7], state, before, strict=False):
        end = count if name == "free_pages" else None
        assert name == "errors" or torch.equal(ours[:end], theirs[:end]), name


@pytest.mark.parametrize("step", REQUESTS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_table_that_contradicts_itself_does_not_change(device: str, name: str, step: str) -> None:
    which, values, error, message, bits = BROKEN[name]
    state = state_of(device)
    ops.tree_cache_pages_(*state, integers([14, 0], device), "append", **OPTIONS)
    state[which].copy_(integers(values, device))
    before = [x.clone() for x in state]
    request = integers(REQUESTS[step], device)
    if device == "cpu":
        with pytest.raises(error, match=f"tree_cache_pages_: .*{message}"):
            ops.tree_cache_pages_(*state, request, step, **OPTIONS)
        assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
        return
    ops.tree_cache_pages_(*state, request, step, **OPTIONS)
    bit = bits[max(0, list(REQUESTS).index(step) - 1)]
    at_target = step == "reorder" and bit == STACK  # sequence 1 found no page for its copy
    assert state[5].tolist() == ([0, bit] if at_target else [bit, 0])
    if bit:
        assert_untouched(state, before)
        taken = [0, 1] if step == "reorder" else [0, 0]
        assert state[7].tolist() == [before[1].tolist(), taken, [-1, -1], [-1, -1]]


@pytest.mark.parametrize("step", ["append", "reserve"])
def test_a_shared_page_gets_no_tokens(device: str, step: str) -> None:
    """Two sequences whose last page, with 6 and 5 tokens, is the same; the third may be served."""
    state = state_of(device, batch=3)
    for tensor, values in zip(
        state, ([[0, 1, -1, -1]] * 2 + [[-1] * 4], [14, 13, 0], [2, 2, 0], [2, 2, 0, 0, 0, 0]), strict=False
    ):
        tensor.copy_(integers(values, device))
    state[4][0] = 4
    before = [x.clone() for x in state]
    request = integers([1, 3, 9], device)
    if device == "cpu":
        with pytest.raises(
            ValueError, match=r"only full pages can be shared, got page 1 at block_table\[0, 1\]"
        ):
            ops.tree_cache_pages_(*state, request, step, **OPTIONS)
        return
    ops.tree_cache_pages_(*state, request, step, **OPTIONS)
    assert state[5].tolist() == [USERS, USERS, 0]
    assert state[7][1].tolist() == [0, 0, 9]
    assert torch.equal(state[0][:2], before[0][:2])
    assert state[0][2].tolist() == [2, 3, -1, -1]
    assert state[1].tolist() == [14, 13, 9 * (step == "append")]


def test_any_contradiction_leaves_refused_sequences_alone(device: str) -> None:
    """Random integers of a table and of requests are overwritten, then a step is made."""
    reported = accepted = 0
    for seed in range(300):
        draw = random.Random(seed)
        sizes = Sizes.draw(draw)
        state = sizes.table()
        for _ in range(8):
            step = draw.choice(STEPS)
            request = sizes.request(draw, step, state[1])
            bad = {n: x.clone() for n, x in zip((*STATE, "request"), (*state, request), strict=True)}
            sizes.corrupt(draw, bad)
            expected = [x.clone() for x in bad.values()]
            possible = runs(expected, step, sizes)
            ours, fences = fenced(list(bad.values()), device)
            if runs(ours, step, sizes):
                now = {n: x.cpu() for n, x in zip(bad, ours, strict=True)}
                check_step(step, sizes, bad, now)
                reported += bool(now["errors"].any())
            assert all(bool((fence == FENCE).all()) for fence in fences), (seed, step)
            if possible:
                accepted += 1
                assert_same(ours, expected)
            if runs([*(trial := [x.clone() for x in state]), request], step, sizes):
                state = trial
                state[5].zero_()
    assert accepted > 100
    assert device == "cpu" or reported > 500


def runs(state: list[Tensor], step: str, sizes: Sizes) -> bool:
    """Makes a step; False where the CPU refuses it."""
    before = [x.clone() for x in state]
    try:
        ops.tree_cache_pages_(*state, step, **sizes.options())
    except (ValueError, IndexError):
        for name, ours, theirs in zip(STATE, state, before, strict=False):
            assert name == "plan" or torch.equal(ours, theirs), (step, name)
        return False
    return True


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for name, x, y in zip(STATE, ours, expected, strict=False):
        count = int(expected[4][0]) + 1 if name == "free_pages" else None
        assert torch.equal(x.cpu()[:count], y[:count]), name


def check_step(step: str, sizes: Sizes, before: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """A sequence with an error is what it was; what the others got was free, and is theirs alone."""
    errors = now["errors"].tolist()
    for b, error in enumerate(errors):
        if error and step != "attend":
            for name in ("block_table", "lengths", "held", "list_pos"):
                assert torch.equal(now[name][b], before[name][b]), (step, name)
            stays = b if step == "reorder" else 0
            assert now["plan"][:, b].tolist() == [int(before["lengths"][b]), stays, -1, -1]
    if all(errors) or step == "attend" or (step == "reorder" and any(errors)):
        assert_untouched(list(now.values()), list(before.values()))
    if step not in ("append", "reserve"):
        return
    given = []
    for b in (b for b, error in enumerate(errors) if not error):
        begin, after = int(before["lengths"][b]), int(before["lengths"][b] + before["request"][b])
        held = int(now["held"][b])
        assert 0 <= begin <= after <= min(sizes.capacity, held * sizes.page_size)
        given += now["block_table"][b, int(before["held"][b]) : held].tolist()
        for page in now["block_table"][b, begin // sizes.page_size : -(-after // sizes.page_size)].tolist():
            assert 0 <= page < sizes.num_pages
            assert now["users"][page] == 1
    assert len(set(given)) == len(given)
    assert all(before["users"][page] == 0 for page in given)


@pytest.mark.gpu
def test_a_cache_says_what_contradicts_what() -> None:
    for which, values, words in (
        ("_held", [9, 1], "sequence 0 has a length that its pages do not hold"),
        ("_users", [1, 3, 0, 0, 0, 0], "sequence 1 has a page whose users are not those of the table"),
        ("_free", [-5, 0, 0, 0, 0, 0, 0], "sequence 0 found a contradiction in the free pages"),
    ):
        cache = TreeKVCache(
            2,
            1,
            8,
            48,
            page_size=16,
            num_pages=6,
            compression_rate=4,
            max_top_nodes=4,
            top_k=1,
            device="cuda",
        )
        rows = torch.ones(2, 14, 1, 8, device="cuda", dtype=cache.dtype)
        cache.append(rows[:, :10], rows[:, :10])
        getattr(cache, which).copy_(integers(values, "cuda"))
        before = cache.k_pool.clone()
        cache.append(rows, rows, lengths=[14, 2])
        with pytest.raises(ValueError, match=words):
            cache.check()
        refused = int(words[9])
        page = int(cache.block_table[refused, 0])
        assert cache.lengths[refused] == 10
        assert torch.equal(cache.k_pool[page].nan_to_num(), before[page].nan_to_num())
