"""Checks of a state_dict before a tree cache takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from htree_ops.ops.arguments import check_data
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.leaves import PackedLeaves

__all__ = ["check_leaders", "check_state", "free_stack", "options_as_tensors"]

IMPORTANCES = ("lse_causal", "exp_joint")
#: Entries of a state with a row for each of its pages.
PAGED = ("pages", "keys", "values", *PackedLeaves.PAGED)


def free_stack(users: Tensor) -> Tensor:
    """int32 [1 + num_pages]: the number of pages without users, then a stack of them with the smallest on top."""
    free = torch.nonzero(users == 0).flatten().flip(0).int()
    stack = users.new_zeros(len(users) + 1)
    stack[0] = len(free)
    stack[1 : 1 + len(free)] = free
    return stack


def options_as_tensors(
    options: TreeOptions, page_size: int, leaf_bits: int | None = None
) -> dict[str, Tensor]:
    """The options that the bytes and the lists depend on.

    0 and NaN stand for None, no number for no inv_freq and for no leaf_bits.
    """
    numbers = [
        page_size,
        options.compression_rate,
        options.max_top_nodes,
        options.top_k,
        options.selection_stride,
        options.selection_span or 0,
        # Together one number: a state from before open_next has the same numbers.
        IMPORTANCES.index(options.importance) + len(IMPORTANCES) * options.open_next,
        *([] if leaf_bits is None else [leaf_bits]),
    ]
    factors = [torch.nan if x is None else x for x in (options.scale, options.rope_base)]
    factors.extend(options.inv_freq or ())
    return {
        "options": torch.tensor(numbers, dtype=torch.int64),
        "factors": torch.tensor(factors, dtype=torch.float64),
    }


def _in_words(numbers: list[int]) -> str:
    """The options of a state by their names, as the message of an error needs them."""
    names = ("page_size", "compression_rate", "max_top_nodes", "top_k", "selection_stride", "selection_span")
    sizes, (both, *leaf_bits) = numbers[: len(names)], numbers[len(names) :]
    open_next, importance = divmod(both, len(IMPORTANCES))
    words: dict[str, object] = dict(zip(names, sizes, strict=True))
    words |= {"selection_span": words["selection_span"] or None, "importance": IMPORTANCES[importance]}
    words |= {"open_next": bool(open_next)} | ({"leaf_bits": leaf_bits[0]} if leaf_bits else {})
    return ", ".join(f"{name}={value!r}" for name, value in words.items())


def check_state(
    name: str,
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    page_size: int,
    capacity: int,
    num_pages: int,
) -> tuple[Tensor, Tensor]:
    """Checks a state against that of the cache which takes it; returns users [num_pages] and held [B], int32.

    Raises:
        ValueError, TypeError: see :meth:`htree_ops.TreeKVCache.load_state_dict`.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{name}: state must be a dict, got {type(state).__name__}")
    if state.keys() != own.keys():
        raise ValueError(f"{name}: the state must hold {sorted(own)}, got {sorted(state)}")
    for key, mine in own.items():
        theirs = state[key]
        if not isinstance(theirs, Tensor) or theirs.dtype != mine.dtype:
            raise TypeError(
                f"{name}: {key} must be a Tensor of {mine.dtype}, got {getattr(theirs, 'dtype', type(theirs))}"
            )
        check_data(name, key, theirs)
        skip = int(key in PAGED)
        if theirs.dim() != mine.dim() or theirs.shape[skip:] != mine.shape[skip:]:
            raise ValueError(f"{name}: {key} must be like {tuple(mine.shape)}, got {tuple(theirs.shape)}")
    for key in ("options", "factors"):
        if not torch.allclose(state[key], own[key], rtol=0.0, atol=0.0, equal_nan=True):
            words = _in_words if key == "options" else str
            raise ValueError(
                f"{name}: {key} must be {words(own[key].tolist())}, got {words(state[key].tolist())}"
            )
    pages, table, lengths = (state[key].tolist() for key in ("pages", "block_table", "lengths"))
    if len(set(pages)) != len(pages) or any(len(state[key]) != len(pages) for key in PAGED if key in state):
        raise ValueError(f"{name}: pages must be distinct, with as many keys and values, got {pages}")
    if any(not 0 <= page < num_pages for page in pages):
        raise ValueError(f"{name}: pages must lie between 0 and num_pages - 1 = {num_pages - 1}, got {pages}")
    held = []
    for row, length in zip(table, lengths, strict=True):
        count = next((i for i, page in enumerate(row) if page == -1), len(row))
        used = row[:count]
        if not 0 <= length <= min(capacity, count * page_size) or any(page != -1 for page in row[count:]):
            raise ValueError(f"{name}: lengths and block_table do not fit: {length} tokens in pages {row}")
        if len(set(used)) != count or not set(used) <= set(pages):
            raise ValueError(f"{name}: block_table must name pages of the state, each once, got {used}")
        held.append(count)
    users = Counter(page for row in table for page in row if page != -1)
    for row, length, count in zip(table, lengths, held, strict=True):
        if any(users[page] > 1 for page in row[length // page_size : count]):
            raise ValueError(
                f"{name}: only full pages can be shared, got block_table {table} for lengths {lengths}"
            )
    if set(users) != set(pages):
        raise ValueError(
            f"{name}: every page must be in block_table, got pages {pages} and block_table {table}"
        )
    counts = [users[page] for page in range(num_pages)]
    return torch.tensor(counts, dtype=torch.int32), torch.tensor(held, dtype=torch.int32)


def check_leaders(name: str, state: Mapping[str, Tensor], stride: int) -> None:
    """Checks which leaders a state has lists of, against its lengths: those of others would be taken for theirs.

    Raises:
        ValueError: an entry that is neither -1 nor a leader of its sequence in the place of that leader (§7.3).
    """
    for leaders, length in zip(state["list_pos"].tolist(), state["lengths"].tolist(), strict=True):
        for place, leader in enumerate(leaders):
            own = 0 <= leader < length and leader % stride == 0 and leader // stride % len(leaders) == place
            if leader != -1 and not own:
                raise ValueError(
                    f"{name}: list_pos must have -1 or a multiple t of selection_stride = {stride} below the length "
                    f"{length} in entry t / {stride} mod {len(leaders)}, got {leaders}"
                )
