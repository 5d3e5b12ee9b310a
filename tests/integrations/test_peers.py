"""What transformers asks of every attention implementation, asked of tree attention in twelve families of models.

While a sequence has no more than max_top_nodes tokens a model must compute what its own attention ("eager") computes:
logits, gradients and greedy tokens, with padding and with packed documents, and a cache must change nothing. Beyond,
where the two are different functions, each way to the same token must give the same: all at once, from a prompt and
steps, in chunks, padded, with either cache and without one.
"""

import functools
from typing import Any

import pytest
import torch
from small_models import EXACT, SIZES, SPARSE, make_ids, make_other, padded_mask
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from htree_ops.integrations.cache import CACHE
from htree_ops.integrations.transformers import TreeCache
from tests.support.compare import assert_no_worse_than_eager, compare

#: The default of transformers multiplies no float64.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
#: Families, and what their configs need beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"sliding_window": None, "num_local_experts": 4, **EXPERTS},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "Gemma": {},
    "Phi3": {"sliding_window": None},
    "Olmo2": {},
    "Granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "Starcoder2": {"sliding_window": None},
    "Cohere": {},
}
STRIDED = SPARSE | {"selection_stride": 4}
GREEDY = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 6}
#: Calls with tokens [2, 40].
CALLS: dict[str, dict[str, list[list[int]]]] = {
    "whole": {},
    "left": {"attention_mask": [[0] * 11 + [1] * 29, [1] * 40]},
    "right": {"attention_mask": [[1] * 29 + [0] * 11, [1] * 40]},
    "packed": {"position_ids": [[*range(13), *range(20), *range(7)], [*range(40)]]},
}
#: Lengths of the parts of a sequence of 40 tokens: a prompt, steps, and a chunk.
PARTS = (23, 1, 1, 1, 9, 1, 4)


@functools.cache
def model_of(
    family: str, attention: str = "eager", regime: str = "exact", double: bool = False
) -> PreTrainedModel:
    """The same weights for the same family."""
    options = {"exact": EXACT, "sparse": SPARSE, "strided": STRIDED}[regime]
    sizes = {**SIZES, **FAMILIES[family]}
    model = make_other(f"{family}Config", f"{family}ForCausalLM", sizes, attention, options)
    return model.double() if double else model


def call_of(name: str) -> dict[str, Tensor]:
    arguments = {argument: torch.tensor(values) for argument, values in CALLS[name].items()}
    return {"input_ids": make_ids(), **arguments}


def logits_of(model: PreTrainedModel, calls: list[dict[str, Tensor]]) -> Tensor:
    """[real tokens of all calls, vocabulary], without a cache."""
    found = [model(use_cache=False, **call).logits for call in calls]
    return torch.cat(
        [
            x[call["attention_mask"].bool()] if "attention_mask" in call else x.flatten(0, 1)
            for x, call in zip(found, calls, strict=True)
        ]
    )


def measure(model: PreTrainedModel, calls: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Logits, and the gradient of their mean square by every parameter, end to end."""
    logits = logits_of(model, calls)
    used = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(logits.square().mean(), used, materialize_grads=True)
    return {"logits": logits.detach(), "gradients": torch.cat([x.flatten() for x in gradients])}


def without_padding(call: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """A call for each sequence; eager itself gives NaN for rows of padding in float64, where no key is left."""
    if "attention_mask" not in call:
        return [call]
    column = torch.arange(40)
    rows = zip(call["input_ids"], call["attention_mask"].bool(), strict=True)
    return [{"input_ids": ids[real][None], "position_ids": column[real][None]} for ids, real in rows]


@torch.no_grad()
def in_parts(model: PreTrainedModel, cache: Any, call: dict[str, Tensor]) -> Tensor:
    """Logits of the real tokens, PARTS one after the other."""
    found, end = [], 0
    mask = call.get("attention_mask")
    for part in call["input_ids"].split(PARTS, dim=1):
        end += part.shape[1]
        masked = {} if mask is None else {"attention_mask": mask[:, :end]}
        found.append(model(part, **{CACHE: cache}, **masked).logits)
    return torch.cat(found, 1)[slice(None) if mask is None else mask.bool()].flatten(0, -2)


assert_precise = functools.partial(assert_no_worse_than_eager, factor=4.0)


# ---- no more tokens than max_top_nodes


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_eager(family, name):
    """And the error against float64 is no worse."""
    call = call_of(name)
    ours, eager = (measure(model_of(family, name), [call]) for name in ("htree", "eager"))
    exact = measure(model_of(family, double=True), without_padding(call))
    for what in ours:
        assert_precise(ours[what], exact[what], eager[what], name=what)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_eager(family):
    """Of whole and of left-padded prompts, from the default cache, a tree cache, and no cache."""
    ids = make_ids(length=30)
    mask = padded_mask(ids)
    ours, eager = model_of(family, "htree"), model_of(family)
    for call in ({}, {"attention_mask": mask}):
        wanted = eager.generate(ids, **call, **GREEDY)
        for cache in ({}, {CACHE: TreeCache(ours.config, 40)}, {"use_cache": False}):
            assert torch.equal(ours.generate(ids, **call, **cache, **GREEDY), wanted)


@pytest.mark.parametrize("name", ["whole", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_a_cache_are_those_of_eager(family, name):
    call, ours = call_of(name), model_of(family, "htree")
    with torch.no_grad():
        eager = logits_of(model_of(family), [call])
        exact = logits_of(model_of(family, double=True), without_padding(call))
    for cache in (DynamicCache(config=ours.config), TreeCache(ours.config, 40)):
        assert_precise(in_parts(ours, cache, call), exact, eager)


# ---- more tokens


@pytest.mark.parametrize("name", ["whole", "left", "right"])
@pytest.mark.parametrize("regime", ["sparse", "strided"])
@pytest.mark.parametrize("family", FAMILIES)
def test_neither_padding_nor_a_cache_changes_anything(family, regime, name):
    """All at once, or a prompt, steps and chunks behind a cache: the logits of each whole sequence alone."""
    call, model = call_of(name), model_of(family, "htree", regime)
    with torch.no_grad():
        alone = logits_of(model, without_padding(call))
        exact = logits_of(model_of(family, "htree", regime, double=True), without_padding(call))
        dense = logits_of(model_of(family), without_padding(call))
        padded = logits_of(model, [call])
    assert compare(alone, exact).norm < 1e-5  # float64 opens the same nodes
    assert compare(alone, dense).norm > 1e-3  # and tree attention is another function here
    assert_precise(padded, exact, alone)
    for cache in (DynamicCache(config=model.config), TreeCache(model.config, 40)):
        assert_precise(in_parts(model, cache, call), exact, alone)


@pytest.mark.parametrize("regime", ["sparse", "strided"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_changes_nothing(family, regime):
    """Greedy tokens with either cache, padded, in chunks, with beams and with drafts are those without a cache."""
    model, ids = model_of(family, "htree", regime), make_ids(length=30)
    mask = padded_mask(ids)
    for call in ({}, {"attention_mask": mask, "num_beams": 2}):
        wanted = model.generate(ids, use_cache=False, **call, **GREEDY)
        assert torch.equal(model.generate(ids, **call, **GREEDY), wanted)
        tree = {CACHE: TreeCache(model.config, 40)}
        assert torch.equal(model.generate(ids, **tree, **call, **GREEDY), wanted)
    wanted = model.generate(ids[1:], use_cache=False, **GREEDY)
    for call in ({"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 3}):
        tree = {CACHE: TreeCache(model.config, 40)}
        assert torch.equal(model.generate(ids[1:], **tree, **call, **GREEDY), wanted)
