"""A step of an engine on pages: append new tokens, then attend, for sequences of any number of new tokens.

Nothing here needs vLLM: a step is what its scheduler decides, as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from htree_ops.integrations.vllm.pages import LayerPools, page_sizes, pools_of
from htree_ops.ops.paging import on_device
from htree_ops.ops.tree_attention.options import TreeOptions
from htree_ops.ops.tree_cache.functions import tree_cache_append_, tree_cache_attention
from htree_ops.ops.tree_cache.prompts import PROMPT_ROWS, indexed_rows

__all__ = ["Index", "Prompt", "Step", "Steps", "attend_step", "try_prompt"]

#: Index queries and index keys of the rows of a step, [N or more, H_kv, d] each.
Index = tuple[Tensor, Tensor]


class Prompt(NamedTuple):
    """The rows of a sequence that the kernels of ``tree_attention`` compute, on a GPU.

    Attributes:
        sequence: of the step. begin, end: its rows. length: tokens that it has with them.
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
        prompts: sequences that another kernel computes. other_counts: int32 [B], rows of the others; None is all.
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
    other_counts: Tensor | None = None


class Steps:
    """Makes steps. What a captured graph reads of them has addresses that do not change.

    Args:
        max_sequences, max_rows: most of a step. rate: compression_rate.
        takes_prompts: whether kernels of ``tree_attention`` compute sequences with many rows. Then which kernel
            computes a row depends on how the scheduler cuts a prompt; on a CPU the bits are the same.
    """

    def __init__(
        self,
        max_sequences: int,
        max_rows: int,
        page_size: int,
        rate: int,
        device: torch.device,
        *,
        takes_prompts: bool,
    ) -> None:
        self.page_size, self.rate, self.device = page_size, rate, device
        self.takes_prompts = takes_prompts
        self._kept = torch.zeros(2, max_sequences, dtype=torch.int32, device=device)
        self._places = torch.zeros(2, max_rows, dtype=torch.int64, device=device)

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

        Raises:
            ValueError: more sequences than max_sequences, or more rows than max_rows.
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
        if self.takes_prompts and max_rows >= PROMPT_ROWS and on_host is not None:
            step.prompts = _prompts(*on_host)
            left = [end - begin for begin, end in zip(on_host[0], on_host[0][1:], strict=False)]
            for prompt in step.prompts:
                left[prompt.sequence] = 0
            step.other_counts = on_device(left, self.device)
        return step

    def _most(self, max_rows: int) -> int:
        """An upper bound of a sequence's new tokens.

        A request may begin behind blocks that another one fills in the same step. With compression_rate new tokens or
        more it may finish a node that has children there. A bound above a page lets all sequences be written layer by
        layer.
        """
        return max_rows if max_rows < self.rate else max(max_rows, self.page_size + 1)


def _prompts(bounds: Sequence[int], lengths: Sequence[int]) -> tuple[Prompt, ...]:
    """Sequences with PROMPT_ROWS rows or more, a number that depends on nothing else."""
    found = []
    for b, length in enumerate(lengths):
        begin, end = bounds[b], bounds[b + 1]
        if PROMPT_ROWS <= end - begin <= length:
            found.append(Prompt(b, begin, end, length))
    return tuple(found)


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
        index: by which nodes are chosen; None is by scores.
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
    if len(step.prompts) < len(step.lengths):
        others, *_ = tree_cache_attention(
            query[:n],
            pools.keys,
            pools.values,
            step.block_table,
            step.lengths,
            step.cu_rows,
            q_lengths=step.other_counts,
            page_size=page_size,
            index_query=None if index_query is None else index_query[:n],
            index_pool=pools.index_keys,
            options=options,
        )
        out[:n].copy_(others)
    for prompt in step.prompts:
        table = step.block_table[prompt.sequence : prompt.sequence + 1]
        rows, chooser = (
            None if x is None else x[None, prompt.begin : prompt.end] for x in (query, index_query)
        )
        assert rows is not None
        found = _prompt_rows(options, pools, rows, chooser, table, prompt.length, page_size)
        out[prompt.begin : prompt.end] = found


def try_prompt(
    options: TreeOptions, query: Tensor, key: Tensor, value: Tensor, length: int, index: Index | None = None
) -> None:
    """Takes once what the last rows of a prompt of ``length`` tokens take, for an engine that measures its memory.

    Args:
        query, key, value, index: as in :func:`attend_step`, of one step.
    """
    if index is None:
        pools = [x.new_empty(1, x.shape[1], 1, x.shape[2]) for x in (key, value)]
        query.new_empty(_prompt_bytes(options, pools, query.shape[1], length), dtype=torch.uint8)
        return
    rows, chooser = (x[None, -length:] for x in (query, index[0]))
    keys, values, index_keys = (x.new_zeros(1, length, *x.shape[1:]) for x in (key, value, index[1]))
    indexed_rows(rows, keys, values, chooser, index_keys, options)


def _prompt_bytes(options: TreeOptions, pools: Sequence[Tensor], heads: int, length: int) -> int:
    """Bytes of the copies from which a prompt of ``length`` tokens is computed; 0 where it needs none."""
    size: int = torch.ops.htree._tree_cache_prompt_bytes(*pools, 1, heads, length, *options.packed())
    return size


def _prompt_rows(
    options: TreeOptions,
    pools: LayerPools,
    query: Tensor,
    index_query: Tensor | None,
    table: Tensor,
    length: int,
    page_size: int,
) -> Tensor:
    """Rows [n, H, V] of the last tokens of one sequence, by the kernels of ``tree_attention``."""
    rows: Tensor
    if index_query is not None and pools.index_keys is not None:
        count = -(-length // page_size)
        keys, values, index_keys = (
            pool[table[0, :count].long(), :, :page_size].transpose(1, 2).flatten(0, 1)[None, :length]
            for pool in (pools.keys, pools.values, pools.index_keys)
        )
        rows = indexed_rows(query, keys, values, index_query, index_keys, options)[0][0]
        return rows
    packed, heads, both = options.packed(), query.shape[2], pools[:2]
    copies = query.new_empty(_prompt_bytes(options, both, heads, length), dtype=torch.uint8)
    if copies.numel():
        torch.ops.htree._tree_cache_pack_prompt_(
            copies, *both, table, heads, 0, length, length, page_size, *packed
        )
    found = torch.ops.htree._tree_cache_prompt(
        query, *both, table, length, copies, length, False, page_size, *packed
    )
    rows = found[0][0]
    return rows
