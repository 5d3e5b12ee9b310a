"""One engine with tree attention: chunked prompts, prefix hits, many requests at once, an abort (docs/vllm.md)."""

from typing import Any

import pytest
import torch
from vllm import LLM

from htree_ops.integrations.vllm.pages import page_sizes
from htree_ops.integrations.vllm.steps import Steps, attend_step
from tests.vllm.engines import (
    assert_generated,
    engine,
    generate,
    greedy,
    load_model,
    prompts,
    recorded_calls,
    recorded_steps,
    rows_by_request,
    save_model,
    tokens_of,
)

#: Nodes of 4, 16 and 64 tokens: those of the upper layers reach across pages of 32.
OPTIONS = {"compression_rate": 4, "top_k": 8, "max_top_nodes": 32}
PAGE = 32
INDEX_DIM = 16


@pytest.fixture(scope="module")
def started(models):
    """An engine of a model with an index."""
    path = save_model(models, "Mistral", sliding_window=None, htree=OPTIONS | {"index_dim": INDEX_DIM})
    with engine(path, attention_backend="CUSTOM", block_size=PAGE) as llm:
        yield llm, path


@pytest.fixture(scope="module", params=["index", "scores"])
def served(started, request):
    """The engine, and the model of transformers that says what is right.

    Without the index the layers become what an engine with ``index_dim = 0`` makes of them, but for larger pages.
    """
    llm, path = started
    width = INDEX_DIM if request.param == "index" else 0
    llm.reset_prefix_cache()
    for layer in _layers(llm):
        assert layer.impl.index_dim in (width, INDEX_DIM)
        layer.impl.index_dim = width
    return llm, load_model(path, "htree", htree=OPTIONS | {"index_dim": width})


def test_the_index_chooses(started):
    """The tokens of the tests below tell a choice by the index from one by scores, and both from dense attention."""
    _, path = started
    ids = torch.tensor(prompts(1300))
    of_index, of_scores, dense = (
        load_model(path, kind, htree=OPTIONS | {"index_dim": width})(ids, use_cache=False).logits.argmax(-1)
        for kind, width in (("htree", INDEX_DIM), ("htree", 0), ("sdpa", 0))
    )
    for other in (of_scores, dense):
        assert (of_index != other)[0, 300:].float().mean() > 0.1


def test_tokens_are_those_of_transformers(served):
    """Mixed lengths, prompts in chunks, then the same ones behind prefixes that are cached."""
    llm, model = served
    asked = prompts(700, 33, 1300, 1)
    with recorded_steps("chunks_and_hits", 2048):
        first = generate(llm, asked)
        again = generate(llm, asked[::-1])[::-1]
    for prompt, request in zip(asked, first, strict=True):
        assert_generated(model, prompt, tokens_of(request))
    assert [tokens_of(x) for x in again] == [tokens_of(x) for x in first]
    assert [x.num_cached_tokens for x in again] == [672, 32, 1280, 0]
    # a prefix that ends inside a node of the upper layers, and another continuation
    other = [asked[2][:992] + prompts(150, seed=7)[0]]
    (request,) = generate(llm, other)
    assert request.num_cached_tokens == 992
    assert_generated(model, other[0], tokens_of(request))


def test_a_prefix_of_the_same_step(served):
    """The second request begins behind blocks that the first one fills in the same step."""
    llm, model = served
    llm.reset_prefix_cache()
    (shared,) = prompts(200, seed=3)
    asked = [[*shared, 5], shared + prompts(60, seed=4)[0], shared + prompts(90, seed=5)[0]]
    with recorded_calls() as calls, recorded_steps("same_step", 2048):
        found = generate(llm, asked)
    assert [x.num_cached_tokens for x in found] == [0, 192, 192]
    assert len(calls[0].step.lengths) > 1, "they were to come in one step"
    for prompt, request in zip(asked, found, strict=True):
        assert_generated(model, prompt, tokens_of(request))


def test_requests_at_once_are_those_alone(served):
    """Tokens of eight requests, and bits of attention for the same queries, keys and values."""
    llm, _ = served
    asked = prompts(300, 1, 64, 31, 700, 128, 257, 90, seed=11)
    alone = []
    for prompt in asked:
        llm.reset_prefix_cache()
        alone += [tokens_of(x) for x in generate(llm, [prompt], tokens=12)]
    llm.reset_prefix_cache()
    with recorded_calls() as calls:
        together = [tokens_of(x) for x in generate(llm, asked, tokens=12)]
    assert together == alone
    assert max(len(call.step.lengths) for call in calls) == 8
    recorded = rows_by_request(calls)
    assert {len(rows) for rows in recorded.values()} == {6 if _layers(llm)[0].impl.index_dim else 4}
    assert sorted(len(rows[0]) for rows in recorded.values()) == sorted(
        2 * [len(prompt) + 11 for prompt in asked]
    )
    options = _layers(llm)[0].impl.options
    for query, key, value, out, *index in recorded.values():
        assert torch.equal(_alone(options, query, key, value, index), out)


def test_an_abort_leaves_the_others_alone(served):
    """Blocks of a request that is gone serve others."""
    llm, model = served
    llm.reset_prefix_cache()
    asked = prompts(600, 400, 150, seed=21)
    core = llm.llm_engine
    for i, prompt in enumerate(asked):
        core.add_request(str(i), {"prompt_token_ids": prompt}, greedy(20))
    finished = {}
    for step in range(200):
        if step == 3:
            core.abort_request(["1"])
        for request in core.step():
            if request.finished:
                finished[request.request_id] = request
        if not core.has_unfinished_requests():
            break
    assert sorted(finished) == ["0", "2"]
    for i in (0, 2):
        assert len(tokens_of(finished[str(i)])) == 20
        assert_generated(model, asked[i], tokens_of(finished[str(i)]))
    (request,) = generate(llm, [asked[1]])
    assert_generated(model, asked[1], tokens_of(request))


def _layers(llm: LLM) -> list[Any]:
    """The attention layers of a running engine."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return list(runner.vllm_config.compilation_config.static_forward_context.values())


def _alone(
    options: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: list[torch.Tensor]
) -> torch.Tensor:
    """The rows of one sequence that comes at once, in pages of its own."""
    (n, heads, dim), kv_heads = query.shape, key.shape[1]
    pages = -(-n // PAGE)
    sizes = page_sizes(options, PAGE, pages, index[1].shape[2] if index else 0)
    size = sizes.elements(kv_heads, dim, dim, query.dtype)
    memory = torch.full((pages * size,), torch.nan)
    cache = memory.as_strided((pages, kv_heads, PAGE, 2 * dim), (size, PAGE * 2 * dim, 2 * dim, 1))
    bounds, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, n], [n]))
    table = torch.arange(pages, dtype=torch.int32)[None]
    steps = Steps(1, n, PAGE, options, cache.device, takes_prompts=False)
    step = steps.make(n, n, bounds, lengths, table, torch.arange(n))
    out = torch.full((n, heads, dim), torch.nan)
    attend_step(options, cache, query, key, value, step, out, (index[0], index[1]) if index else None)
    return out
