"""selection_stride behind the DynamicCache that transformers makes: for generate(), an assistant, a second prompt."""

import copy
import functools
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from columns import check_columns
from hypothesis import given
from hypothesis import strategies as st
from small_models import SPARSE, make_ids, make_model, padded_mask
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache
from transformers.integrations.executorch import register_dynamic_cache_export_support

from htree_ops.integrations.cache import CACHE
from htree_ops.integrations.leaders import LeaderLayer
from htree_ops.integrations.transformers import TreeCache, register

STRIDED = SPARSE | {"selection_stride": 4}
GREEDY = {"do_sample": False, "eos_token_id": 60, "max_new_tokens": 16}


@functools.cache
def strided_model(device: str, **changes: Any) -> Any:
    return make_model(options=STRIDED, device=device, **changes)


def tree_cache(model: Any) -> dict[str, Any]:
    return {CACHE: TreeCache(model.config, 96, page_size=16)}


# ---- the second cache of generate()


@pytest.mark.parametrize("own", ["tree", "dynamic"])
@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_of_an_assistant_with_a_stride(layers, own, device):
    """The assistant is another model, or one whose speculative tokens are all right, which goes far ahead."""
    model, ids = strided_model(device), make_ids(1, 12, device).repeat(1, 3)
    assistant = make_model(options=STRIDED, device=device, num_hidden_layers=layers)
    assistant.generation_config.num_assistant_tokens = 8
    assistant.generation_config.assistant_confidence_threshold = 0.0
    wanted = model.generate(ids, use_cache=False, **GREEDY)
    cache = tree_cache(model) if own == "tree" else {}
    assert torch.equal(model.generate(ids, assistant_model=assistant, **cache, **GREEDY), wanted)


def test_drafts_of_the_first_layers(device):
    model, ids = strided_model(device), make_ids(1, 12, device).repeat(1, 3)
    wanted = model.generate(ids, use_cache=False, **GREEDY)
    found = model.generate(ids, assistant_early_exit=1, **tree_cache(model), **GREEDY)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_guidance_by_a_second_prompt(padded, device):
    """The second prompt has a cache of its own, with its own padding."""
    model, ids = strided_model(device), make_ids(2, 30, device)
    call = {"guidance_scale": 1.7, "negative_prompt_ids": make_ids(2, 23, device)}
    if padded:
        call["negative_prompt_attention_mask"] = torch.ones_like(call["negative_prompt_ids"])
        call["negative_prompt_attention_mask"][0, :5] = 0
    wanted = model.generate(ids, use_cache=False, **call, **GREEDY)
    assert not torch.equal(model.generate(ids, use_cache=False, **GREEDY), wanted)
    assert torch.equal(model.generate(ids, **tree_cache(model), **call, **GREEDY), wanted)
    assert torch.equal(model.generate(ids, **call, **GREEDY), wanted)


def test_a_prompt_that_is_kept(device):
    model, ids = strided_model(device), make_ids(device=device)
    wanted = model.generate(ids, use_cache=False, **GREEDY)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :23], **{CACHE: cache})
    for _ in range(2):
        assert torch.equal(model.generate(ids, **{CACHE: copy.deepcopy(cache)}, **GREEDY), wanted)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 1], device=device))
    swapped = model.generate(ids.flip(0), **{CACHE: cache}, **GREEDY)
    assert torch.equal(swapped, wanted.flip(0))
    cache.reset()
    if cache.get_seq_length() == 0:  # transformers before 5.24 zeroes the keys and counts them still
        assert torch.equal(model.generate(ids, **{CACHE: cache}, **GREEDY), wanted)


def test_no_name_of_an_argument_is_one_that_transformers_warns_of():
    model = strided_model("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model.generate(make_ids(), **tree_cache(model), **GREEDY)


# ---- rows


@pytest.mark.filterwarnings("ignore:tree_attention. q is")
@given(data=st.data())
def test_however_columns_come_rows_are_those_of_the_whole_sequence(data):
    cache, columns = check_columns(
        data, (2, 4), lambda config, _: DynamicCache(config=config), lambda done, most, stride: done - 1
    )
    kept = cache.layers[0].queries
    assert kept.shape[1] == -(-columns // cache.layers[0].stride)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_steps_compile_once(padded):
    torch._dynamo.reset()
    model, ids = strided_model("cpu", num_hidden_layers=1), make_ids()
    mask = padded_mask(ids)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=True)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask if padded else None, use_cache=False).logits
        for begin, end in pairwise((0, *range(23, 33))):
            call = {"attention_mask": mask[:, :end]} if padded else {}
            got = (compiled if begin else model)(ids[:, begin:end], **{CACHE: cache}, **call).logits
            torch.testing.assert_close(got, wanted[:, begin:end], rtol=1e-4, atol=1e-4)
    assert graphs.frame_count == 1


def test_a_compiled_model_gives_nan_where_the_mask_has_changed():
    """It cannot look, as on a GPU."""
    torch._dynamo.reset()
    model, ids = strided_model("cpu", num_hidden_layers=1), make_ids(length=23)
    cache = DynamicCache(config=model.config)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :9] = 0
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        step = torch.compile(model, fullgraph=True, backend="eager")
        found = step(ids[:, :1], attention_mask=mask, **{CACHE: cache}).logits
    assert found.isnan().flatten(1).all(1).tolist() == [True, False]


def test_whole_sequences_are_exported_and_steps_are_not():
    model, ids = strided_model("cpu", num_hidden_layers=1), make_ids()
    register_dynamic_cache_export_support()
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), strict=False).module()
        torch.testing.assert_close(exported(ids).logits, model(ids).logits)
        cache = exported(ids)[CACHE]
        assert cache.get_seq_length() == ids.shape[1]
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.export.export(model, (ids[:, :1],), {CACHE: cache}, strict=False)


# ---- whose layers they are


def test_only_layers_of_a_strided_tree_keep_queries():
    register()  # a second time
    layers = {
        "strided": strided_model("cpu"),
        "no stride": make_model(options=SPARSE),
        "eager": make_model(options=STRIDED, attention="eager"),
    }
    for name, model in layers.items():
        kinds = {type(layer) is LeaderLayer for layer in DynamicCache(config=model.config).layers}
        assert kinds == {name == "strided"}
    assert not DynamicCache().layers


def test_training_with_a_cache_that_nobody_asked_for_is_training_without():
    model, ids = strided_model("cpu"), make_ids()
    gradients = []
    for use_cache in (True, False):
        loss = model(ids, labels=ids, use_cache=use_cache).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def step_behind(cache: Any, model: Any, mask: Tensor | None = None) -> None:
    with torch.no_grad():
        model(make_ids(length=23), **{CACHE: cache})
        model(make_ids(length=1), attention_mask=mask, **{CACHE: cache})


def filled_by_another() -> None:
    model = make_model(options=STRIDED, attention="eager")
    model.set_attn_implementation("htree")
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(make_ids(length=23), **{CACHE: cache})
        model.set_attn_implementation("htree")
        model(make_ids(length=1), **{CACHE: cache})


def with_another_stride() -> None:
    model = make_model(options=STRIDED)
    cache = DynamicCache(config=model.config)
    model.config.htree = SPARSE | {"selection_stride": 2}
    step_behind(cache, model)


CHANGED = torch.ones(2, 24, dtype=torch.long)
CHANGED[0, :9] = 0
REFUSED = (
    rf"stride = \d need .* {CACHE}=TreeCache.* {CACHE}=DynamicCache\(config=model.config\).*use_cache=False"
)
REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "a cache without the config": (
        lambda: step_behind(DynamicCache(), strided_model("cpu")),
        NotImplementedError,
        REFUSED,
    ),
    "another stride": (with_another_stride, NotImplementedError, REFUSED),
    "tokens of another attention": (
        filled_by_another,
        ValueError,
        "every token must have gone through tree attention",
    ),
    "a mask that changes": (
        lambda: step_behind(DynamicCache(config=strided_model("cpu").config), strided_model("cpu"), CHANGED),
        ValueError,
        "attention_mask must go on as it began",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_leaders_is_refused_in_one_line(name):
    call, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
