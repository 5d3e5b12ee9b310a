"""A step of an engine on pages: append new tokens, then attend, for sequences of any number of new tokens.

Nothing here needs vLLM: a step is what its scheduler decides, as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from htree_ops.integrations.vllm.pages import LayerPools, page_sizes, pools_of
from htree_ops.ops.paging import on_device
from htree_ops.ops.tree_attention.attention import Index
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.functions import tree_cache_append_, tree_cache_attention
from htree_ops.ops.tree_cache.prompts import (
    PROMPT_ROWS,
    SequenceCopies,
    indexed_rows,
    prompt_begin,
    prompt_bytes,
    prompt_rows,
)
from htree_ops.ops.tree_cache.ring import RING, Ring


class Prompt(NamedTuple):
    """The rows of a sequence that the kernels of ``tree_attention`` compute, on a GPU.

    Attributes:
        sequence: of the step. begin, end: these rows, from a leader on. length: tokens that it has with them.
    """

    sequence: int
    begin: int
    end: int
    length: int


@dataclass
class Step:
    """A step, the same for all layers.

    Attributes:
        num_rows: N; rows behind those of the last sequence are padding.
        cu_rows: int32 [B + 1]. lengths: int32 [B], tokens with those of the step. block_table: int32 [B, max_pages].
        before: int32 [B], tokens before the step. counts: int32 [B], new tokens; 0 for a sequence of a trial run.
        max_new: an upper bound of counts.
        places: int64 [2, N], page and row of each new token. Those of tokens that are not stored are in page 0, which
            vLLM gives to nobody.
        prompts: rows that other kernels compute. others: whether there are rows beside them. other_counts,
            other_lengths: int32 [B], of what is left of each sequence before them; None is all.
        first: int64 [B], the page of the leader of a sequence's first row. last: int64 [B, RING], those of its last
            leaders, leader t in entry t / selection_stride mod RING; page 0 for one that the step does not compute.
    """

    num_rows: int
    cu_rows: Tensor
    lengths: Tensor
    block_table: Tensor
    before: Tensor
    counts: Tensor
    max_new: int
    places: Tensor
    prompts: tuple[Prompt, ...] = ()
    others: bool = True
    other_counts: Tensor | None = None
    other_lengths: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None


class Steps:
    """Makes steps. What a captured graph reads of them has addresses that do not change.

    Args:
        max_sequences, max_rows: most of a step. options: of the layers.
        takes_prompts: whether kernels of ``tree_attention`` compute sequences with many rows. Then which kernel
            computes a row depends on how the scheduler cuts a prompt; on a CPU the bits are the same.
    """

    def __init__(
        self,
        max_sequences: int,
        max_rows: int,
        page_size: int,
        options: TreeOptions,
        device: torch.device,
        *,
        takes_prompts: bool,
    ) -> None:
        self.page_size, self.device = page_size, device
        self.rate, self.stride = options.compression_rate, options.selection_stride
        self.takes_prompts = takes_prompts
        self._kept = torch.zeros(2, max_sequences, dtype=torch.int32, device=device)
        self._places = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self._first = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._last = torch.zeros(max_sequences, RING, dtype=torch.int64, device=device)
        self._entries = torch.arange(RING, device=device)

    def make(
        self,
        num_rows: int,
        max_rows: int,
        cu_rows: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        slots: Tensor,
        on_host: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Step:
        """A step of B sequences.

        Args:
            num_rows: N. max_rows: most rows of a sequence.
            cu_rows, lengths, block_table: as in :class:`Step`. slots: int64 [N], below 0 for a token that is not
                stored.
            on_host: cu_rows and lengths as numbers, the lengths exact for sequences with many rows.
        """
        batch = len(lengths)
        if batch > self._kept.shape[1]:
            raise ValueError(
                f"htree: a step must have at most max_num_seqs = {self._kept.shape[1]} sequences, got {batch}"
            )
        if num_rows > self._places.shape[1]:
            raise ValueError(
                f"htree: a step must have at most max_num_batched_tokens = {self._places.shape[1]} rows, got {num_rows}"
            )
        before, counts = self._kept[:, :batch]
        rows = cu_rows[1:] - cu_rows[:-1]
        torch.sub(lengths, rows, out=before)
        # A trial run has no slots for its tokens, while its block table may name pages in use.
        is_stored = slots[cu_rows[:-1].clamp(max=len(slots) - 1).long()] >= 0
        torch.mul(rows, is_stored, out=counts)
        places = self._places[:, :num_rows]
        torch.div(slots[:num_rows], self.page_size, rounding_mode="floor", out=places[0]).clamp_(min=0)
        torch.remainder(slots[:num_rows], self.page_size, out=places[1])
        step = Step(num_rows, cu_rows, lengths, block_table, before, counts, self._most(max_rows), places)
        if self.stride > 1:
            step.first, step.last = self._first[:batch], self._last[:batch]
            self._find_leaders(step)
        if self.takes_prompts and max_rows >= PROMPT_ROWS and on_host is not None:
            self._take_prompts(step, *on_host)
        return step

    def _find_leaders(self, step: Step) -> None:
        """Fills ``step.first`` and ``step.last``."""
        assert step.first is not None
        assert step.last is not None
        stride, before = self.stride, step.before[:, None].long()
        behind = before + step.counts[:, None]
        leader = before - before % stride
        end = (behind - 1) // stride  # of the last leader
        last = (end - (end - self._entries) % RING) * stride
        pages = self._pages_of(torch.cat((leader, last), 1), step.block_table)
        step.first.copy_(pages[:, 0])
        torch.mul(pages[:, 1:], (last >= before) & (last < behind), out=step.last)

    def _pages_of(self, tokens: Tensor, block_table: Tensor) -> Tensor:
        """int64 [B, n]: the pages of tokens [B, n]; of a token that has none any page."""
        column = (tokens // self.page_size).clamp(0, block_table.shape[1] - 1)
        return block_table.gather(1, column).long().clamp(min=0)

    def _take_prompts(self, step: Step, bounds: Sequence[int], lengths: Sequence[int]) -> None:
        """Finds the prompts of a step. Which rows these are depends on the sequence's own rows alone."""
        left = [end - begin for begin, end in pairwise(bounds)]
        before = list(lengths)
        for b, (length, count) in enumerate(zip(lengths, tuple(left), strict=True)):
            first = prompt_begin(length, count, self.stride)
            if first < count:
                step.prompts += (Prompt(b, bounds[b] + first, bounds[b + 1], length),)
                left[b], before[b] = first, length - count + first
        step.others = any(left)
        step.other_counts, step.other_lengths = on_device(left, self.device), on_device(before, self.device)

    def _most(self, max_rows: int) -> int:
        """An upper bound of a sequence's new tokens.

        A request may begin behind blocks that another one fills in the same step. With compression_rate new tokens or
        more it may finish a node that has children there. A bound above a page lets all sequences be written layer by
        layer.
        """
        return max_rows if max_rows < self.rate else max(max_rows, self.page_size + 1)


def attend_step(
    options: TreeOptions,
    cache: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Step,
    out: Tensor,
    index: Index | None = None,
) -> None:
    """Appends keys and values to the pages of a layer, and writes the rows of their queries.

    Args:
        cache: [num_pages, H_kv, page_size, K + V], the memory of the layer (:func:`pools_of`).
        query: [N or more, H, K]; key: [N or more, H_kv, K]; value: [N or more, H_kv, V]; rotated.
        out: [N or more, H, V], written.
        index: [N or more, H_kv, d] each, by which nodes are chosen; None is by scores.
    """
    n, page_size = step.num_rows, cache.shape[2]
    key_dim, value_dim = key.shape[2], value.shape[2]
    index_query, index_key = (None, None) if index is None else index
    index_dim = 0 if index_key is None else index_key.shape[2]
    sizes = page_sizes(options, page_size, step.block_table.shape[1], index_dim)
    pools = pools_of(cache, sizes, key_dim, value_dim)
    tree_cache_append_(
        pools.keys,
        pools.values,
        key[:n],
        value[:n],
        step.block_table,
        step.before,
        step.cu_rows,
        step.counts,
        step.max_new,
        page_size=page_size,
        options=options,
    )
    if index_key is not None and pools.index_keys is not None:
        pools.index_keys[step.places[0], :, step.places[1]] = index_key[:n]
    if step.others:
        others, _, lists, leaders = tree_cache_attention(
            query[:n],
            pools.keys,
            pools.values,
            step.block_table,
            step.lengths if step.other_lengths is None else step.other_lengths,
            step.cu_rows,
            *_lists_of(pools, step.first),
            q_lengths=step.other_counts,
            page_size=page_size,
            index_query=None if index_query is None else index_query[:n],
            index_pool=pools.index_keys,
            options=options,
        )
        out[:n].copy_(others)
        _keep_lists(pools, step.last, lists, leaders)
    for prompt in step.prompts:
        table = step.block_table[prompt.sequence : prompt.sequence + 1]
        rows, chooser = (
            None if x is None else x[None, prompt.begin : prompt.end] for x in (query, index_query)
        )
        assert rows is not None
        found, made = _prompt_rows(options, pools, rows, chooser, table, prompt.length, page_size)
        out[prompt.begin : prompt.end] = found
        if step.last is not None:
            ring = Ring(1, sizes.layers, key.shape[1], options, query.device)
            ring.keep([0], prompt.length, made)
            own = step.last[prompt.sequence : prompt.sequence + 1]
            _keep_lists(pools, own, ring.lists, ring.list_pos)


def _lists_of(pools: LayerPools, first: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """lists [B, RING, layers, H_kv, k] and list_pos [B, RING] of the leaders in pages [B]; None without strides."""
    if first is None or pools.lists is None or pools.leaders is None:
        return None, None
    return pools.lists[first], pools.leaders[first]


def _keep_lists(pools: LayerPools, last: Tensor | None, lists: Tensor, leaders: Tensor) -> None:
    """Writes what :func:`_lists_of` reads in later steps, each entry to its page."""
    if last is None or pools.lists is None or pools.leaders is None:
        return
    entries = torch.arange(RING, device=last.device)
    pools.lists[last, entries] = lists
    pools.leaders[last, entries] = leaders


def try_prompt(
    options: TreeOptions, query: Tensor, key: Tensor, value: Tensor, length: int, index: Index | None = None
) -> None:
    """Takes once what the last rows of a prompt of ``length`` tokens take, for an engine that measures its memory.

    Args:
        query, key, value, index: as in :func:`attend_step`, of one step.
    """
    if index is None:
        keys, values = (x.new_empty(1, x.shape[1], 1, x.shape[2]) for x in (key, value))
        size = prompt_bytes(keys, values, 1, query.shape[1], length, options)
        query.new_empty(size, dtype=torch.uint8)
        return
    count = min(len(query), length)
    first = prompt_begin(length, count, options.selection_stride)
    if first == count:
        return
    rows, chooser = (x[None, first:count] for x in (query, index[0]))
    keys, values, index_keys = (x.new_zeros(1, length, *x.shape[1:]) for x in (key, value, index[1]))
    indexed_rows(rows, keys, values, chooser, index_keys, options)


def _prompt_rows(
    options: TreeOptions,
    pools: LayerPools,
    query: Tensor,
    index_query: Tensor | None,
    table: Tensor,
    length: int,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Rows [n, H, V] of the last tokens of one sequence, from a leader on, by the kernels of ``tree_attention``.

    Also the lists [layers, 1, leaders, H_kv, k] of the last leaders, for a stride above 1.
    """
    if index_query is not None and pools.index_keys is not None:
        count = -(-length // page_size)
        keys, values, index_keys = (
            pool[table[0, :count].long(), :, :page_size].transpose(1, 2).flatten(0, 1)[None, :length]
            for pool in (pools.keys, pools.values, pools.index_keys)
        )
        out, _, lists = indexed_rows(query, keys, values, index_query, index_keys, options)
        return out[0], lists.transpose(0, 1)
    heads, both = query.shape[2], (pools.keys, pools.values)
    size = prompt_bytes(*both, 1, heads, length, options)
    copies = SequenceCopies((), heads, 0, length, query.new_empty(size, dtype=torch.uint8))
    out, _, lists = prompt_rows(query, (*both, table), length, copies, options, page_size, return_lse=False)
    return out[0], lists
