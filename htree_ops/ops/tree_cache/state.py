"""Checks of a state_dict before a tree cache takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from htree_ops.errors import OutOfPagesError
from htree_ops.ops.arguments import check_data
from htree_ops.ops.paging import Pages
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.index import CODES, INDEX_KEYS, INDEX_SCALES
from htree_ops.ops.tree_cache.leaves import LEAF_BITS, PackedLeaves
from htree_ops.ops.tree_cache.pools import Sizes

#: Options that make no difference to a cache.
OF_NO_CACHE = ("scope", "store_parents")
#: Entries of a state that say what it was made with; as long as their numbers need.
OPTIONS = ("options", "factors")
#: Entries of a state with a row for each of its pages.
PAGED = ("pages", "keys", "values", INDEX_KEYS, INDEX_SCALES, *PackedLeaves.PAGED)
#: What a state tells of the cache that it came from: (argument, entry, its dim; None is its dtype).
ARGUMENTS: tuple[tuple[str, str, int | None], ...] = (
    ("batch", "lengths", 0),
    ("dtype", "values", None),
    ("num_kv_heads", "values", 1),
    ("head_dim", "keys", 3),
    ("value_dim", "values", 3),
    ("index_dim", INDEX_KEYS, 3),
    ("index_heads", INDEX_KEYS, 1),
    ("index_dtype", INDEX_KEYS, None),
)


def options_as_tensors(
    options: TreeOptions, page_size: int, leaf_bits: int | None = None
) -> dict[str, Tensor]:
    """What the bytes and the lists depend on: page size, leaf bits (0 for None) and the packed options."""
    ints, floats = options.packed()
    return {
        "options": torch.tensor([page_size, leaf_bits or 0, *ints], dtype=torch.int64, device="cpu"),
        "factors": torch.tensor(floats, dtype=torch.float64, device="cpu"),
    }


def _in_words(state: Mapping[str, Tensor]) -> str:
    """The options of a state by their names, as the message of an error needs them."""
    numbers, factors = state["options"].tolist(), state["factors"].tolist()
    try:
        page_size, leaf_bits, *ints = numbers
        options = TreeOptions.from_packed(ints, factors).to_dict()
    except (IndexError, TypeError, ValueError):
        return f"{numbers} and {factors}"  # no packed options
    words = {"page_size": page_size, "leaf_bits": leaf_bits or None, **options}
    return ", ".join(f"{name}={value!r}" for name, value in words.items() if name not in OF_NO_CACHE)


def _arguments(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments of the cache that a state came from, as far as its entries tell."""
    found: dict[str, Any] = {} if INDEX_KEYS in state or INDEX_SCALES in state else {"index_dim": 0}
    for argument, entry, dim in ARGUMENTS:
        x = state.get(entry)
        if x is not None and x.dim() > (dim or 0):
            found[argument] = x.dtype if dim is None else x.shape[dim]
    if found.get("index_dtype") == torch.uint8:
        found["index_dtype"] = CODES
    options = state.get("options")
    if options is not None and options.dtype == torch.int64 and options.dim() == 1 and len(options) > 1:
        found["leaf_bits"] = int(options[1]) or None
    return found


def _check_arguments(name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raises where the caches of a state and of ``own`` were made with other sizes, in the words of the arguments."""
    theirs, ours = _arguments(state), _arguments(own)
    if "batch" not in theirs:
        return  # no state of a cache
    for argument, value in theirs.items():
        mine = ours.get(argument)
        if value == mine or (argument == "leaf_bits" and value not in (None, *LEAF_BITS)):
            continue
        kind = TypeError if isinstance(value, torch.dtype) else ValueError
        raise kind(
            f"{name}: {argument} must be {value}, that of the state, got {mine}: make the cache with {argument}={value}"
        )


def _check_entries(name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor], sizes: Sizes) -> None:
    """Checks kinds and shapes; the capacity of the state may be another one, which changes some sizes."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name}: state must be a dict, got {type(state).__name__}")
    for key, theirs in state.items():
        check_data(name, key, theirs)
    _check_arguments(name, state, own)
    if state.keys() != own.keys():
        raise ValueError(f"{name}: the state must hold {sorted(own)}, got {sorted(state)}")
    for key, mine in own.items():
        if state[key].dtype != mine.dtype:
            raise TypeError(f"{name}: {key} must be a Tensor of {mine.dtype}, got {state[key].dtype}")
    if not all(torch.equal(state[key].cpu(), own[key]) for key in OPTIONS):
        raise ValueError(f"{name}: options must be {_in_words(own)}, got {_in_words(state)}")
    wanted = {key: list(mine.shape) for key, mine in own.items()}
    if state["block_table"].dim() == 2:
        layers, rows = sizes.of(state["block_table"].shape[1])
        wanted["block_table"][1], wanted["lists"][2] = state["block_table"].shape[1], layers
        wanted["keys"][2], wanted["values"][2] = rows
    for key, shape in wanted.items():
        if key in OPTIONS:
            continue
        skip = int(key in PAGED)
        theirs = state[key]
        if theirs.dim() != len(shape) or list(theirs.shape[skip:]) != shape[skip:]:
            raise ValueError(f"{name}: {key} must be like {tuple(shape)}, got {tuple(theirs.shape)}")


def check_state(
    name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor], sizes: Sizes, into: Pages
) -> tuple[list[int], list[list[int]], list[int]]:
    """Checks a state against the cache which takes it, whose own entries are ``own``; copies nothing.

    Returns:
        Where its pages go in the pool, the pages of each sequence, and their tokens.
    """
    _check_entries(name, state, own, sizes)
    size, capacity, num_pages = into.page_size, into.capacity, into.num_pages
    pages, table, lengths = (state[key].tolist() for key in ("pages", "block_table", "lengths"))
    sizes_of = {key: len(state[key]) for key in PAGED if key in state}
    fits = all(size == len(pages) for size in sizes_of.values())
    if not fits or len(set(pages)) != len(pages) or min(pages, default=0) < 0:
        raise ValueError(
            f"{name}: pages must be distinct and at least 0, entries with pages as long, got {pages} and lengths "
            f"{sizes_of}"
        )
    held = []
    for row, length in zip(table, lengths, strict=True):
        count = next((i for i, page in enumerate(row) if page == -1), len(row))
        used = row[:count]
        if not 0 <= length <= count * size or any(page != -1 for page in row[count:]):
            raise ValueError(f"{name}: lengths and block_table do not fit: {length} tokens in pages {row}")
        if len(set(used)) != count or not set(used) <= set(pages):
            raise ValueError(f"{name}: block_table must name pages of the state, each once, got {used}")
        held.append(count)
    users = Counter(page for row in table for page in row if page != -1)
    for row, length, count in zip(table, lengths, held, strict=True):
        if any(users[page] > 1 for page in row[length // size : count]):
            raise ValueError(
                f"{name}: only full pages can be shared, got block_table {table} for lengths {lengths}"
            )
    if set(users) != set(pages):
        raise ValueError(
            f"{name}: every page must be in block_table, got pages {pages} and block_table {table}"
        )
    needed = max([0, *lengths, *((count - 1) * size + 1 for count in held)])
    if needed > capacity:
        raise ValueError(
            f"{name}: capacity must be at least {needed}, what a sequence of the state has taken, got {capacity}"
        )
    if len(pages) > num_pages:
        raise OutOfPagesError(
            f"{name}: num_pages must be at least {len(pages)}, the pages of the state, got {num_pages}",
            pages=len(pages) - num_pages,
        )
    # Pages keep their numbers, unless the pool has no such pages.
    places = pages if all(0 <= page < num_pages for page in pages) else list(range(len(pages)))
    place_of = dict(zip(pages, places, strict=True))
    rows = [[place_of[page] for page in row[:count]] for row, count in zip(table, held, strict=True)]
    return list(places), rows, lengths
