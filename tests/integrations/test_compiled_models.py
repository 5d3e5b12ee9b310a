"""attn_implementation="htree" in a model that torch compiles: padding, and documents between boundaries or restarts."""

from itertools import pairwise

import pytest
import torch
from small_models import SPARSE, logits_and_gradients, make_ids, make_model, padded_mask
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache
from transformers.integrations.executorch import register_dynamic_cache_export_support

from htree_ops.integrations.cache import CACHE
from htree_ops.integrations.transformers import _nan_where_packed


@pytest.mark.parametrize(
    ("backend", "positions", "padded", "lengths"),
    [("aot_eager", "own", False, (40,)), ("eager", "compact", True, (40, 57))],
)
def test_compiled_models_give_what_uncompiled_ones_give(backend, positions, padded, lengths):
    torch._dynamo.reset()
    model = make_model(options=SPARSE | {"positions": positions}, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=len(lengths) > 1)
    for length in lengths:
        ids = make_ids(length=length)
        mask = padded_mask(ids)
        call = {"attention_mask": mask} if padded else {}
        got, wanted = (logits_and_gradients(m, ids, **call) for m in (compiled, model))
        torch.testing.assert_close(got, wanted)


STEPS = {"ones": 0, "left": 9, "none": None}


@pytest.mark.parametrize(
    ("padding", "importance", "tokens", "backend"),
    [("ones", "lse_causal", 1, "aot_eager"), ("left", "lse", 3, "eager"), ("none", "lse_causal", 1, "eager")],
)
def test_steps_behind_the_default_cache_compile_once(padding, importance, tokens, backend):
    torch._dynamo.reset()
    model = make_model(options=SPARSE | {"importance": importance}, num_hidden_layers=1)
    ids = make_ids()
    mask = torch.ones_like(ids)
    mask[0, : STEPS[padding] or 0] = 0
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=True)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    compiled_at = []  # the number of graphs after each step
    with torch.no_grad():
        for begin, end in pairwise((0, *range(23, 40, tokens))):
            call = {} if STEPS[padding] is None else {"attention_mask": mask[:, :end]}
            got, wanted = (
                m(ids[:, begin:end], **{CACHE: cache}, **call).logits
                for m, cache in zip((compiled if begin else model, model), caches, strict=True)
            )
            torch.testing.assert_close(got, wanted)
            compiled_at.append(graphs.frame_count)
    assert 0 == compiled_at[0] < compiled_at[1] == compiled_at[-1]


@pytest.mark.parametrize("padding", STEPS)
def test_steps_behind_the_default_cache_are_exported(padding):
    """With the length of the cache as a dynamic one; with strict=True transformers itself fails at that."""
    model, ids = make_model(options=SPARSE, num_hidden_layers=1), make_ids()
    mask = torch.ones_like(ids)
    mask[0, : STEPS[padding] or 0] = 0

    def call(begin):
        masked = {} if STEPS[padding] is None else {"attention_mask": mask[:, : begin + 1]}
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(
                ids[:, :begin],
                attention_mask=masked["attention_mask"][:, :-1] if masked else None,
                **{CACHE: cache},
            )
        return {"input_ids": ids[:, begin : begin + 1], CACHE: cache, **masked}

    tokens = torch.export.Dim.DYNAMIC
    sizes = {"input_ids": None, CACHE: [[{2: tokens}], [{2: tokens}]]}
    sizes |= {} if STEPS[padding] is None else {"attention_mask": {1: tokens}}
    register_dynamic_cache_export_support()
    with torch.no_grad():
        exported = torch.export.export(model, (), call(20), dynamic_shapes=sizes, strict=False).module()
        for begin in (20, 31):
            torch.testing.assert_close(exported(**call(begin)).logits, model(**call(begin)).logits)


def test_a_compiled_model_tells_padding_from_documents():
    torch._dynamo.reset()
    model, ids = make_model(options=SPARSE, num_hidden_layers=1), make_ids()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    mask = padded_mask(ids)
    for padding in (mask, torch.ones_like(ids)):
        positions = (padding.cumsum(1) - 1).masked_fill(padding == 0, 1)
        call = {"attention_mask": padding, "position_ids": positions, "use_cache": False}
        torch.testing.assert_close(compiled(ids, **call).logits, model(ids, **call).logits)
        with pytest.raises(RuntimeError, match="htree: a compiled model does not look where"):
            compiled(ids, **call | {"position_ids": positions % 17})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("positions", ["own", "compact"])
def test_a_compiled_model_finds_documents_where_it_is_told_to_look(padded, positions):
    torch._dynamo.reset()
    model = make_model(options=SPARSE | {"positions": positions, "packed": True}, num_hidden_layers=1)
    compiled, ids = torch.compile(model, fullgraph=True, backend="aot_eager"), make_ids()
    mask = padded_mask(ids)
    mask[1, 35:] = 0
    whole = mask.cumsum(1) - 1 if padded else torch.arange(40).expand(2, 40)
    for period in (64, 17, 5, 1):  # 64: no document ends before its sequence
        call = {"position_ids": (whole % period).masked_fill(mask == 0, 1) if padded else whole % period}
        call |= {"attention_mask": mask} if padded else {}
        got, wanted = (logits_and_gradients(m, ids, **call) for m in (compiled, model))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_packed_models_compile_once_for_all_lengths(padded):
    torch._dynamo.reset()
    model = make_model(options=SPARSE | {"packed": True}, num_hidden_layers=1)
    graphs = 0

    def backend(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (40, 41, 57, 33, 64):
        ids = make_ids(length=length)
        mask = padded_mask(ids)
        call = {"position_ids": torch.arange(length).remainder(17).repeat(2, 1), "use_cache": False}
        call |= {"attention_mask": mask} if padded else {}
        if graphs == 0:
            for x in (ids, *(x for x in call.values() if isinstance(x, torch.Tensor))):
                torch._dynamo.mark_dynamic(x, 1)
        got, wanted = (m(ids, **call).logits for m in (compiled, model))
        if padded:
            got, wanted = got[mask.bool()], wanted[mask.bool()]
        torch.testing.assert_close(got, wanted)
    assert graphs == 1


def test_documents_behind_a_cache_are_refused_with_what_to_do():
    torch._dynamo.reset()
    model, ids = make_model(options=SPARSE | {"packed": True}, num_hidden_layers=1), make_ids()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    positions = torch.arange(40)[None]
    cache = model(ids[:, :20], position_ids=positions[:, :20])[CACHE]
    with pytest.raises(RuntimeError, match="htree: a cache holds one document per sequence"):
        compiled(ids[:, 20:], position_ids=positions[:, :20] % 7, **{CACHE: cache})


def test_the_word_packed_is_a_bool():
    with pytest.raises(TypeError, match=r"config.htree\['packed'\] must be a bool, got int"):
        make_model(options={"packed": 1})(make_ids())


def test_packed_rows_alone_are_nan(monkeypatch):
    """On a GPU, which asserts nothing."""
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    positions = torch.stack((torch.arange(40), torch.arange(40) % 17))
    for real in (None, torch.ones(2, 40, dtype=torch.bool)):
        found = _nan_where_packed(torch.zeros(2, 40, 4, 8), positions, real).isnan().flatten(1)
        assert (found.any(1).tolist(), found.all(1).tolist()) == ([False, True], [False, True])


def test_a_compiled_model_takes_packed_documents_between_boundaries():
    torch._dynamo.reset()
    model, ids = make_model(options=SPARSE, num_hidden_layers=1), make_ids()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    whole = torch.arange(40)[None]
    torch.testing.assert_close(
        compiled(ids, position_ids=whole).logits, model(ids, position_ids=whole).logits
    )
    with pytest.raises(RuntimeError, match="htree: a compiled model does not look where position_ids start"):
        compiled(ids, position_ids=whole % 17, use_cache=False)
    bounds = torch.tensor([0, 17, 40], dtype=torch.int32)
    packed = {"position_ids": whole % 17, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    got, wanted = (logits_and_gradients(m, ids[:1], **packed) for m in (compiled, model))
    torch.testing.assert_close(got, wanted)
