"""Steps that a real engine has decided, on pages as vLLM lays them out (docs/vllm.md); no vLLM is needed."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from htree_ops import TreeOptions
from htree_ops.integrations.vllm import steps as steps_of_vllm
from htree_ops.integrations.vllm.pages import page_sizes, pools_of
from htree_ops.integrations.vllm.steps import Index, Steps, attend_step, try_prompt
from htree_ops.ops.tree_cache.prompts import indexed_rows
from tests.integrations.vllm_steps import RECORDS, Record, made_steps, rows_alone, step_tensors
from tests.support.cases import normal
from tests.support.graphs import capture

NAMES = sorted(path.stem for path in RECORDS.glob("*.json"))
HEADS, KV_HEADS, DIM = 8, 2, 64
#: Nodes of 16 and 256 tokens, which reach across pages.
OPTIONS = TreeOptions(top_k=8, max_top_nodes=64, selection_span=2, rope_base=None)
#: How nodes are chosen: options and the width of an index.
CHOICES = {
    "span": (OPTIONS, 0),
    "index": (replace(OPTIONS, selection_span=None), 32),
    "span, stride": (replace(OPTIONS, selection_stride=4), 0),
    "index, stride": (replace(OPTIONS, selection_span=None, selection_stride=2), 32),
}


def rows_of(n: int, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    """q, k and v of a step: parts of one product, as a layer of vLLM has them."""
    return list(
        normal((n, HEADS + 2 * KV_HEADS, DIM), dtype, device, seed).split((HEADS, KV_HEADS, KV_HEADS), 1)
    )


def index_rows(n: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Index | None:
    """Index queries and index keys of a step, as products over the heads give them."""
    if width == 0:
        return None
    made = normal((2, KV_HEADS, n, width), dtype, device, seed).transpose(1, 2)
    return made[0], made[1]


def test_there_are_records():
    assert NAMES == ["chunks_and_hits", "drafts_and_preemption", "same_step"]
    _, drafts, shared = (Record.load(name) for name in NAMES)
    assert any(_shares(step, shared.page_size) for step in shared.steps)
    assert any(5 in [b - a for a, b in pairwise(step["cu_rows"])] for step in drafts.steps)


def _shares(step: dict[str, Any], page_size: int) -> bool:
    """Whether a sequence begins behind pages that another one writes."""
    rows = [b - a for a, b in pairwise(step["cu_rows"])]
    parts = [(length - n) // page_size for length, n in zip(step["lengths"], rows, strict=True)]
    written = {page for row, first in zip(step["tables"], parts, strict=True) for page in row[first:]}
    return any(written & set(row[:first]) for row, first in zip(step["tables"], parts, strict=True))


def pages_in_use(record: Record, options: TreeOptions, cache: Tensor, width: int) -> list[Tensor]:
    """The bytes of a layer's pools without page 0, in which nobody's tokens are."""
    pools = pools_of(cache, page_sizes(options, record.page_size, record.width, width), DIM, DIM)
    return [pool[1:].view(torch.uint8) for pool in pools if pool is not None]


@pytest.mark.parametrize("takes_prompts", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_bits_of_a_sequence_alone(
    device: str, name: str, choice: str, takes_prompts: bool
) -> None:
    """Whatever stands beside it, in whichever pages, behind a prefix of another request or after a preemption.

    With prompts by the kernels of tree_attention these are, on a GPU, the bits of the same rows in one call.
    """
    record = Record.load(name)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options, width = CHOICES[choice]
    cache = record.empty_cache(options, KV_HEADS, DIM, dtype, device, width)
    steps = Steps(16, 512, record.page_size, options, cache.device, takes_prompts=takes_prompts)
    held_rows = (record.num_pages, record.page_size)
    queries = torch.empty(*held_rows, HEADS, DIM, dtype=dtype, device=device)
    index_queries = torch.empty(*held_rows, KV_HEADS, width, dtype=dtype, device=device)
    checked = 0
    for i, (numbers, step) in enumerate(made_steps(record, steps)):
        q, k, v = rows_of(step.num_rows, dtype, device, 3 * i)
        out = torch.full_like(q, torch.nan)
        index = index_rows(step.num_rows, width, dtype, device, 3 * i + 1)
        attend_step(options, cache, q, k, v, step, out, index)
        page, row = step.places
        queries[page, row] = q
        if index is not None:
            index_queries[page, row] = index[0]
        for b, (begin, end) in enumerate(pairwise(numbers["cu_rows"])):
            if (i + b) % 3 and len(numbers["lengths"]) < 2:
                continue  # every third step of one sequence
            length = numbers["lengths"][b]
            pages = numbers["tables"][b]
            held = record.tokens(options, cache, pages, length, width)
            new = slice(length - (end - begin), length)
            assert torch.equal(held[0][new], k[begin:end])
            assert index is None or torch.equal(held[2][new], index[1][begin:end])
            most = end - begin if takes_prompts else 128
            asked, choosers = (
                x[pages].flatten(0, 1)[:length] if x.numel() else None for x in (queries, index_queries)
            )
            chooser = None if choosers is None else (choosers, held[2])
            alone = rows_alone(options, asked, *held[:2], end - begin, most, chooser)
            # On a GPU a leader that was a prompt's has chosen by scores that are rounded otherwise.
            first = begin
            if takes_prompts and device != "cpu":
                first = min(end, begin - new.start % -options.selection_stride)
            assert out[begin:first].isfinite().all()
            assert torch.equal(alone[first - begin :], out[first:end]), (i, b)
            checked += 1
    assert checked > 20


def test_lists_of_a_prompt_are_kept_whatever_their_width(device):
    """A prompt's kernels make lists no wider than the sequence needs; the next row is inside a stride."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = replace(CHOICES["index, stride"][0], top_k=1100)
    record = Record(16, 400, 26, [])
    cache = record.empty_cache(options, KV_HEADS, DIM, dtype, device, 32)
    steps = Steps(1, 301, 16, options, cache.device, takes_prompts=True)
    all_rows, parts = [], []
    for length, n in ((301, 301), (302, 1)):
        numbers = {"num_rows": n, "max_rows": n, "cu_rows": [0, n], "lengths": [length]}
        numbers["tables"] = [list(range(1, 2 + (length - 1) // 16))]
        step = steps.make(n, n, *step_tensors(numbers, record, device), ([0, n], [length]))
        q, k, v = rows_of(n, dtype, device, length)
        index = index_rows(n, 32, dtype, device, length + 1)
        parts.append(torch.empty_like(q))
        attend_step(options, cache, q, k, v, step, parts[-1], index)
        all_rows.append((q, k, v, *(index or ())))
    q, k, v, query, key = (torch.cat(x) for x in zip(*all_rows, strict=True))
    assert torch.equal(rows_alone(options, q, k, v, 1, 1, (query, key)), parts[-1])


@pytest.mark.parametrize("choice", CHOICES)
def test_a_trial_run_writes_nothing(device, choice):
    """vLLM runs steps without slots, whose tables may name pages in use. Page 0 is nobody's."""
    record = Record.load(NAMES[0])
    options, width = CHOICES[choice]
    cache = record.empty_cache(options, KV_HEADS, DIM, torch.float32, device, width)
    steps = Steps(16, 512, record.page_size, options, cache.device, takes_prompts=False)
    numbers = record.steps[0]
    *tensors, slots = step_tensors(numbers, record, device)
    step = steps.make(numbers["num_rows"], numbers["max_rows"], *tensors, torch.full_like(slots, -1))
    q, k, v = rows_of(step.num_rows, torch.float32, device, 0)
    index = index_rows(step.num_rows, width, torch.float32, device, 1)
    before = [pool.clone() for pool in pages_in_use(record, options, cache, width)]
    attend_step(options, cache, q, k, v, step, torch.empty_like(q), index)
    for pool, held in zip(pages_in_use(record, options, cache, width), before, strict=True):
        assert torch.equal(pool, held)


@pytest.mark.parametrize(("rows", "length", "taken"), [(512, 701, 511), (512, 300, 300), (200, 701, 0)])
def test_a_prompt_is_tried(monkeypatch, rows, length, taken):
    """The rows of the longest prompt's last chunk, from a leader on, over all of its tokens."""
    options, width = CHOICES["index, stride"]
    seen = []

    def record(q, *others):
        seen.append((q.shape[1], others[0].shape[1]))
        return indexed_rows(q, *others)

    monkeypatch.setattr(steps_of_vllm, "indexed_rows", record)
    index = index_rows(rows, width, torch.float32, "cpu", 1)
    try_prompt(options, *rows_of(rows, torch.float32, "cpu", 0), length, index)
    assert seen == ([(taken, length)] if taken else [])
    try_prompt(OPTIONS, *rows_of(rows, torch.float32, "cpu", 0), length)


def test_a_step_must_fit(device):
    given = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 2)]
    given += [torch.zeros(2, 8, dtype=torch.int32, device=device), torch.zeros(2, device=device).long()]
    for sizes, words in (((1, 2), "max_num_seqs = 1 sequences, got 2"), ((2, 1), "tokens = 1 rows, got 2")):
        steps = Steps(*sizes, 16, OPTIONS, given[0].device, takes_prompts=False)
        with pytest.raises(ValueError, match=f"at most .*{words}"):
            steps.make(2, 1, *given)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_serves_batches_of_one_shape(choice, rows):
    """Captured once in a trial run, replayed for decoding and for drafts to verify, also for fewer sequences."""
    batch, page, pages = 8, 16, 40
    record = Record(page, 640, 1 + batch * pages, [])
    options, width = CHOICES[choice]
    cache, eager = (
        record.empty_cache(options, KV_HEADS, DIM, torch.bfloat16, "cuda", width) for _ in range(2)
    )
    steps, beside = (Steps(batch, 2400, page, options, cache.device, takes_prompts=False) for _ in range(2))
    n = batch * rows
    fixed = [torch.zeros(batch + 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)]
    fixed += [torch.zeros(batch, record.width, dtype=torch.int32), torch.full((n,), -1)]
    fixed = [x.cuda() for x in fixed]
    fixed[0].copy_(torch.arange(batch + 1) * rows)
    fixed[1].fill_(rows)
    static = rows_of(n, torch.bfloat16, "cuda", 0)
    static_index = index_rows(n, width, torch.bfloat16, "cuda", 0)
    out = torch.zeros_like(static[0])
    step = steps.make(n, rows, *fixed)
    call = partial(attend_step, options, cache, *static, step, out, static_index)
    call()  # what is made once
    graph, _ = capture(call)
    graph.replay()
    for own, other in zip(*(pages_in_use(record, options, x, width) for x in (cache, eager)), strict=True):
        assert torch.equal(own, other), "nothing was to be written"

    order = (
        torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).add(1).view(batch, pages)
    )
    lengths = [0] * batch
    for i in range(12):
        live = batch - i % 3  # the sequences behind these wait
        grow = 300 if i == 0 else rows
        counts = [grow] * live + [0] * (batch - live) if i else [grow] * batch
        lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        numbers = {
            "num_rows": sum(counts),
            "max_rows": max(counts),
            "cu_rows": torch.tensor([0, *counts]).cumsum(0).tolist(),
            "lengths": [length if count else 0 for length, count in zip(lengths, counts, strict=True)],
            "tables": [row[: -(-x // page)].tolist() for row, x in zip(order, lengths, strict=True)],
        }
        tensors = step_tensors(numbers, record, "cuda")
        q, k, v = rows_of(numbers["num_rows"], torch.bfloat16, "cuda", 10 * i)
        expected = torch.zeros_like(q)
        index = index_rows(len(q), width, torch.bfloat16, "cuda", 10 * i + 1)
        attend_step(options, eager, q, k, v, beside.make(len(q), max(counts), *tensors), expected, index)
        if i == 0:  # prompts are not captured
            attend_step(options, cache, q, k, v, steps.make(len(q), grow, *tensors), expected, index)
            continue
        for to, now in zip(fixed[:3], tensors[:3], strict=True):
            to.copy_(now)
        fixed[3].fill_(-1)[: len(q)] = tensors[3]
        for to, now in zip((*static, *(static_index or ())), (q, k, v, *(index or ())), strict=True):
            to[: len(q)] = now
        steps.make(n, rows, *fixed)
        graph.replay()
        assert torch.equal(out[: len(q)], expected), i
    for own, other in zip(*(pages_in_use(record, options, x, width) for x in (cache, eager)), strict=True):
        if own.dim() < 5:  # what a list holds behind its last child is nobody's
            assert torch.equal(own, other)
