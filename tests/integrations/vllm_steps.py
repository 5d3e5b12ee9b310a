"""Steps that an engine of vLLM has decided, and pages to run them on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from htree_ops import TreeKVCache, TreeOptions
from htree_ops.integrations.vllm.pages import page_sizes, pools_of, table_width
from htree_ops.integrations.vllm.steps import Index, Step, Steps

RECORDS = Path(__file__).parent / "vllm_records"


@dataclass
class Record:
    """What the scheduler of an engine decided from its start on (tests/vllm writes them with HTREE_RECORD_STEPS).

    Attributes:
        page_size, max_tokens: of the engine. num_pages: that it used.
        steps: num_rows, max_rows, cu_rows, lengths and tables of each; a table has the pages of its tokens alone.
    """

    page_size: int
    max_tokens: int
    num_pages: int
    steps: list[dict[str, Any]]

    @staticmethod
    def load(name: str) -> Record:
        return Record(**json.loads((RECORDS / f"{name}.json").read_text()))

    @property
    def width(self) -> int:
        return table_width(self.max_tokens, self.page_size)

    def empty_cache(
        self,
        options: TreeOptions,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: str | torch.device,
        index_dim: int = 0,
    ) -> Tensor:
        """The memory of a layer as vLLM binds it, filled with NaN."""
        page = self.page_size
        size = page_sizes(options, page, self.width, index_dim).elements(heads, dim, dim, dtype)
        memory = torch.full((self.num_pages * size,), torch.nan, dtype=dtype, device=device)
        strides = (size, page * 2 * dim, 2 * dim, 1)
        return memory.as_strided((self.num_pages, heads, page, 2 * dim), strides)

    def tokens(
        self, options: TreeOptions, cache: Tensor, pages: list[int], length: int, index_dim: int = 0
    ) -> list[Tensor]:
        """Keys, values and index keys [length, H_kv, .] of a sequence with these pages."""
        dim = cache.shape[3] // 2
        pools = pools_of(cache, page_sizes(options, self.page_size, self.width, index_dim), dim, dim)
        return [
            pool[pages, :, : self.page_size].transpose(1, 2).flatten(0, 1)[:length].contiguous()
            for pool in pools[:3]
            if pool is not None
        ]


def slots_of(step: dict[str, Any], page_size: int) -> list[int]:
    """Where each new token of a step stands."""
    found = []
    for b, (begin, end) in enumerate(pairwise(step["cu_rows"])):
        length = step["lengths"][b]
        for token in range(length - (end - begin), length):
            found.append(step["tables"][b][token // page_size] * page_size + token % page_size)
    return found


def step_tensors(step: dict[str, Any], record: Record, device: str | torch.device) -> list[Tensor]:
    """cu_rows, lengths, block_table and slots, as vLLM hands them over."""
    table = [row + [0] * (record.width - len(row)) for row in step["tables"]]
    found = [torch.tensor(x, dtype=torch.int32) for x in (step["cu_rows"], step["lengths"], table)]
    return [x.to(device) for x in (*found, torch.tensor(slots_of(step, record.page_size)))]


def made_steps(record: Record, steps: Steps) -> Iterator[tuple[dict[str, Any], Step]]:
    """The steps as the backend makes them."""
    for step in record.steps:
        tensors = step_tensors(step, record, steps.device)
        on_host = step["cu_rows"], step["lengths"]
        yield step, steps.make(step["num_rows"], step["max_rows"], *tensors, on_host=on_host)


def rows_alone(
    options: TreeOptions, q: Tensor, k: Tensor, v: Tensor, rows: int, most: int, index: Index | None = None
) -> Tensor:
    """The last ``rows`` of one sequence, [rows, H, V], from a cache of its own, ``most`` of them in a call.

    Args:
        q, k, v, index: of all tokens; queries are read from the leader of the first row on.
    """
    length = len(k)
    query, key = (None, None) if index is None else index
    cache = TreeKVCache(
        1,
        k.shape[1],
        k.shape[2],
        length,
        options=options,
        index_dim=0 if key is None else key.shape[2],
        index_dtype=None if key is None else key.dtype,
        dtype=k.dtype,
        device=k.device,
        prompt_bytes=0,
    )

    def append(new: slice) -> None:
        cache.append(k[None, new], v[None, new], index_key=None if key is None else key[None, new])

    first = length - rows
    leader = first - first % options.selection_stride
    found = []
    for begin, end in pairwise(sorted({0, leader, first, *range(first, length, most), length})):
        new = slice(begin, end)
        append(new)
        if begin >= leader:
            chooser = None if query is None else query[None, new]
            found.append(cache.attend(q[None, new], index_query=chooser)[0])
    return torch.cat(found)[-rows:]
