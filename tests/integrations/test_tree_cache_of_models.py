"""TreeCache: generate() with it gives the tokens of generate() without a cache, and what it cannot do is refused."""

import copy
from typing import Any

import pytest
import torch
from columns import check_columns
from hypothesis import given
from hypothesis import strategies as st
from small_models import EXACT, SPARSE, assert_threads_agree, make_ids, make_model, padded_mask
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MistralConfig, PreTrainedModel

import htree_ops
from htree_ops.integrations.cache import CACHE
from htree_ops.integrations.transformers import TreeCache

STRIDED = SPARSE | {"selection_stride": 4}
COMPACT = {"positions": "compact"}
#: No token ends a sequence early.
GREEDY = {"do_sample": False, "eos_token_id": 60}


def generate(
    model: PreTrainedModel, ids: Tensor, cached: bool = True, leaf_bits: int | None = None, **call: Any
) -> Tensor:
    tree = TreeCache(model.config, 96, page_size=16, leaf_bits=leaf_bits)
    cache = {CACHE: tree} if cached else {"use_cache": False}
    return model.generate(ids, **{"max_new_tokens": 10, **GREEDY, **cache, **call})


# ---- the same tokens


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", SPARSE),
        ("llama", STRIDED | COMPACT),
        ("mistral", STRIDED),
        ("mistral", EXACT | COMPACT),
        ("qwen3", SPARSE | {"scope": "q_head", "importance": "exp_joint"}),
        ("qwen3", SPARSE | COMPACT | {"selection_span": 2, "store_parents": False}),
    ],
    ids=["llama", "llama-compact", "mistral-stride", "mistral-exact", "qwen3-heads", "qwen3-span"],
)
def test_generation_needs_no_tree_built_again(kind, options, device):
    model, ids = make_model(kind, options, device=device), make_ids(length=30, device=device)
    mask = padded_mask(ids)
    for call in ({}, {"attention_mask": mask}, {"attention_mask": mask, "num_beams": 3}):
        assert torch.equal(generate(model, ids, **call), generate(model, ids, cached=False, **call))


def test_neighbours_are_opened_in_models_too():
    """A layer asks its cache for what the model's config says."""
    wide = STRIDED | {"top_k": 4, "max_top_nodes": 12}
    ids = make_ids(length=60)
    model = make_model(options=wide | {"open_next": True})
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        assert not torch.allclose(whole, make_model(options=wide)(ids, use_cache=False).logits, atol=1e-4)
        cache = TreeCache(model.config, 96, page_size=16)
        parts = [model(part, **{CACHE: cache}).logits for part in ids.split([37, 1, 1, 21], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [SPARSE, STRIDED], ids=["stride1", "stride4"])
def test_drafts_are_taken_back(options, device):
    """Assisted generation by another model and by the prompt itself, of a model that repeats itself now and then."""
    model = make_model(options=options, device=device)
    ids = make_ids(1, 12, device).repeat(1, 3)
    wanted = generate(model, ids, cached=False, max_new_tokens=24)
    assistant = make_model(num_hidden_layers=1, device=device)
    assistant.generation_config.num_assistant_tokens = 8
    assistant.generation_config.assistant_confidence_threshold = 0.0
    for call in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 5}):
        assert torch.equal(generate(model, ids, max_new_tokens=24, **call), wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_in_fewer_bits(bits, device):
    """Near to 16 bits, in less memory, and with speculative decoding and chunks the same tokens as step by step."""
    model, ids = make_model(options=SPARSE, device=device, head_dim=64), make_ids(length=30, device=device)
    plain, packed = (TreeCache(model.config, 96, page_size=16, leaf_bits=x) for x in (None, bits))
    wanted, found = (model(ids, **{CACHE: cache}).logits for cache in (plain, packed))
    assert not torch.equal(found, wanted)
    error = (found - wanted).norm() / wanted.norm()
    assert error < {8: 0.02, 4: 0.3}[bits]
    layers = [cache.layers[0].cache for cache in (plain, packed)]
    assert [layer.leaf_bits for layer in layers] == [None, bits]
    stepwise = generate(model, ids[:1], leaf_bits=bits, max_new_tokens=16)
    assert torch.equal(
        generate(model, ids[:1], leaf_bits=bits, max_new_tokens=16, prompt_lookup_num_tokens=5), stepwise
    )
    packed.crop(-12)
    assert packed.get_seq_length() == 18
    again = model(ids[:, 18:], **{CACHE: packed}).logits
    torch.testing.assert_close(again, found[:, 18:], rtol=1e-5, atol=1e-4)
    packed.check()


@pytest.mark.parametrize("options", [SPARSE, STRIDED | COMPACT], ids=["stride1", "stride4"])
def test_prompts_in_chunks_and_prompts_that_are_kept(options, device):
    model, ids = make_model(options=options, device=device), make_ids(length=40, device=device)
    wanted = generate(model, ids, cached=False)
    assert torch.equal(generate(model, ids, prefill_chunk_size=7), wanted)
    mask = padded_mask(ids)
    assert torch.equal(
        generate(model, ids, attention_mask=mask, prefill_chunk_size=7),
        generate(model, ids, cached=False, attention_mask=mask),
    )
    cache = TreeCache(model.config, 96)
    with torch.no_grad():
        model(ids[:, :23], **{CACHE: cache})
    for _ in range(2):
        kept = copy.deepcopy(cache)
        assert torch.equal(generate(model, ids, **{CACHE: kept}), wanted)
        assert kept.get_seq_length() == 49
    assert torch.equal(generate(model, ids, **{CACHE: cache}), wanted)
    longer = torch.cat([wanted, ids], 1)  # goes on where the cache ends
    again = generate(model, longer, **{CACHE: cache}, max_new_tokens=3)
    assert torch.equal(again, generate(model, longer, cached=False, max_new_tokens=3))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, ids, **{CACHE: cache}, attention_mask=mask)[1], wanted[1])
    cache.check()


@pytest.mark.filterwarnings("ignore:tree_attention. q is")
@given(data=st.data())
def test_however_columns_come_rows_are_those_of_the_whole_sequence(data):
    """The lists of the last four leaders before the furthest column are kept, and no older ones."""
    cache, columns = check_columns(
        data,
        (1, 2, 4),
        lambda config, columns: TreeCache(config, columns, page_size=8),
        lambda done, most, stride: min(done, done - most + 3 * stride),
    )
    assert cache.get_seq_length() == columns


# ---- threads, checkpoints, compile, autocast


def test_two_threads_with_a_cache_each():
    models = [make_model(options=options) for options in (SPARSE, STRIDED)]
    ids = make_ids(length=30)
    masks = [padded_mask(ids), padded_mask(ids, 20)]
    assert_threads_agree(lambda i: generate(models[i], ids, attention_mask=masks[i]), 4)


def test_training_leaves_the_cache_alone_or_says_that_it_has_no_gradient(device):
    model, ids = make_model(options=SPARSE, device=device).train(), make_ids(device=device)
    cache = TreeCache(model.config, 64)
    with pytest.raises(RuntimeError, match="derivative for htree::_tree_cache_step_ is not implemented"):
        model(ids, labels=ids, **{CACHE: cache}).loss.backward()
    cache.reset()
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids, **{CACHE: cache}).loss.backward()
    assert cache.get_seq_length() == 0
    assert all(torch.equal(p.grad, want) for p, want in zip(model.parameters(), wanted, strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_steps_compile_into_one_graph(padded, device):
    torch._dynamo.reset()
    model = make_model(options=STRIDED, num_hidden_layers=1, device=device)
    ids = make_ids(device=device)
    mask = padded_mask(ids)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    caches = [TreeCache(model.config, 64) for _ in range(2)]

    def call(m, cache, begin, end):
        masked = {"attention_mask": mask[:, :end]} if padded else {}
        return m(ids[:, begin:end], **{CACHE: cache}, **masked).logits

    with torch.no_grad():
        if not padded:
            with pytest.raises(Exception, match="the first call with a TreeCache takes its memory"):
                call(compiled, caches[0], 0, 20)
        for cache in caches:
            call(model, cache, 0, 20)
        for column in range(20, 26):
            got, wanted = (
                call(m, c, column, column + 1) for m, c in zip((compiled, model), caches, strict=True)
            )
            torch.testing.assert_close(got, wanted)
        got, wanted = (call(m, c, 26, 31) for m, c in zip((compiled, model), caches, strict=True))
        torch.testing.assert_close(got, wanted)


def test_a_cache_follows_autocast(device):
    """Qwen3 normalises heads in float32 there, and its values are bfloat16."""
    model, ids = make_model("qwen3", SPARSE, device=device), make_ids(length=30, device=device)
    with torch.autocast(device, torch.bfloat16):
        cache = TreeCache(model.config, 64)
        with torch.no_grad():
            got = model(ids, **{CACHE: cache}).logits
            wanted = model(ids, use_cache=False).logits
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
        assert cache.layers[0].cache.dtype == torch.bfloat16


# ---- refusals


def filled(
    options: dict[str, Any] = SPARSE,
    mask: Tensor | None = None,
    size: int = 64,
    head_dim: int = 8,
    **memory: int,
) -> tuple[Any, TreeCache]:
    model = make_model(options=options, num_hidden_layers=1, head_dim=head_dim)
    cache = TreeCache(model.config, size, **memory)
    with torch.no_grad():
        model(make_ids(length=30), **{CACHE: cache}, attention_mask=mask)
    return model, cache


def go_on(model: Any, cache: TreeCache, columns: int = 1, **call: Any) -> None:
    with torch.no_grad():
        model(make_ids(call.pop("batch", 2), columns), **{CACHE: cache}, **call)


def with_other_options() -> None:
    model, cache = filled()
    model.config.htree = SPARSE | {"top_k": 3}
    go_on(model, cache)


def without_its_index() -> None:
    model, cache = filled(SPARSE | {"index_dim": 16}, head_dim=16)
    model.config.htree = SPARSE | {"index_dim": 0}
    go_on(model, cache)


def with_other_attention(name: str) -> None:
    model = make_model(attention=name)
    generate(model, make_ids())


PADDING = padded_mask(make_ids(length=30))
DOCUMENTS = torch.arange(30)[None] % 17
BOUNDS = torch.tensor([0, 17, 30], dtype=torch.int32)
REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "capacity": (
        lambda: go_on(*filled(size=35), 6),
        ValueError,
        "max_cache_len must be at least 36, .*, got 35",
    ),
    "capacity of a prompt": (lambda: filled(size=29), ValueError, "max_cache_len must be at least 30"),
    "size": (lambda: TreeCache(make_model().config, 0), ValueError, "max_cache_len must be .*1.*got 0"),
    "no config": (
        lambda: TreeCache(make_model(), 8),
        TypeError,
        "config must be a PretrainedConfig, got LlamaForCausalLM",
    ),
    "window": (
        lambda: TreeCache(MistralConfig(sliding_window=16), 8),
        NotImplementedError,
        "has sliding_window = 16: set config.sliding_window = None",
    ),
    "batch": (lambda: go_on(*filled(), batch=3), ValueError, "the batch must stay 2, got 3"),
    "options": (with_other_options, ValueError, "options must stay those of the first call"),
    "index": (without_its_index, ValueError, "index_dim must stay that of the first call, 16, got 0"),
    "mask that is forgotten": (
        lambda: go_on(*filled(mask=PADDING)),
        ValueError,
        r"as many ones .* as the cache holds, \[21, 30\], got \[30, 30\]",
    ),
    "mask that changes": (
        lambda: go_on(*filled(), attention_mask=padded_mask(make_ids(length=31))),
        ValueError,
        r"as the cache holds, \[30, 30\], got \[21, 30\]",
    ),
    "mask that is too short": (
        lambda: go_on(*filled(), attention_mask=PADDING),
        ValueError,
        r"attention_mask must have shape \[2, 31\], .* a column per key, got \[2, 30\]",
    ),
    "documents": (
        lambda: make_model()(
            make_ids(length=30), position_ids=DOCUMENTS, **{CACHE: TreeCache(make_model().config, 64)}
        ),
        NotImplementedError,
        "one document per sequence",
    ),
    "documents in a padded batch": (
        lambda: make_model()(
            make_ids(length=30),
            position_ids=DOCUMENTS,
            attention_mask=PADDING,
            **{CACHE: TreeCache(make_model().config, 64)},
        ),
        NotImplementedError,
        "one document per sequence",
    ),
    "a document behind the tokens": (
        lambda: go_on(*filled(), 5, position_ids=torch.arange(5)[None]),
        NotImplementedError,
        "one document per sequence",
    ),
    "boundaries": (
        lambda: make_model()(
            make_ids(1, 30), cu_seq_lens_q=BOUNDS, **{CACHE: TreeCache(make_model().config, 64)}
        ),
        NotImplementedError,
        "one document per sequence",
    ),
    "mask of 4 dims": (
        lambda: go_on(*filled(), attention_mask=torch.ones(2, 1, 1, 31, dtype=torch.bool)),
        NotImplementedError,
        r"mask of padding \[B, T\]",
    ),
    "sdpa": (lambda: with_other_attention("sdpa"), NotImplementedError, "needs attn_implementation='htree'"),
    "eager": (
        lambda: with_other_attention("eager"),
        NotImplementedError,
        "needs attn_implementation='htree'",
    ),
    "lse": (lambda: filled(SPARSE | {"importance": "lse"}), ValueError, "importance must be"),
    "offload": (lambda: filled()[1].offload(0), NotImplementedError, "cannot be offloaded"),
    "prefetch": (lambda: filled()[1].layers[0].prefetch(), NotImplementedError, "cannot be offloaded"),
    "repeat": (lambda: filled()[1].batch_repeat_interleave(2), NotImplementedError, "batch .* cannot change"),
    "select": (
        lambda: filled()[1].batch_select_indices(torch.tensor([0])),
        NotImplementedError,
        "batch .* cannot change",
    ),
    "early": (
        lambda: TreeCache(make_model().config, 8).layers[0].lazy_initialization(torch.ones(1), torch.ones(1)),
        NotImplementedError,
        "filled by attention calls",
    ),
    "crop forward": (lambda: filled()[1].crop(3), ValueError, "between -30 and 0, got 3"),
    "crop too much": (lambda: filled()[1].crop(-31), ValueError, "between -30 and 0, got -31"),
    "bits": (
        lambda: TreeCache(make_model().config, 8, leaf_bits=5),
        ValueError,
        "must be None, 8 or 4, got 5",
    ),
    "bits of narrow heads": (
        lambda: generate(make_model(options=SPARSE), make_ids(length=9), leaf_bits=8),
        htree_ops.errors.ShapeMismatchError,
        "head_dim must be a multiple of 64 up to 512 with leaf_bits, got 8",
    ),
    "crop of packed tokens": (
        lambda: filled(SPARSE, head_dim=64, page_size=16, leaf_bits=8)[1].crop(-13),
        ValueError,
        "at least -12, page_size - compression_rate, got -13.*num_assistant_tokens",
    ),
    "crop of strides": (
        lambda: filled(STRIDED)[1].crop(-13),
        ValueError,
        "at least -12, 3 times selection_stride, got -13.*num_assistant_tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_tree_cache_cannot_do_is_refused_in_one_line(name):
    call, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_full_cache_is_refused_with_what_to_do():
    model, cache = filled(size=35)
    with pytest.raises(
        ValueError, match=r"at least 60, .*, got 35: make a larger cache, or reset\(\) the 30 that it"
    ):
        go_on(model, cache, 30)
    cache.reset()
    go_on(model, cache, 30)
    with pytest.raises(
        ValueError, match=r"at least 70, .*: make a larger cache$"
    ):  # a reset would not be enough
        go_on(model, cache, 40)


# ---- what it tells of itself


def test_a_cache_says_what_it_holds():
    model = make_model(options=SPARSE)
    cache = TreeCache(model.config, 64, page_size=16)
    assert not cache.is_initialized
    assert cache.num_bytes() == (0, 0, 0)
    assert list(cache) == [(None, None, None)] * 2
    assert repr(cache) == "TreeCache(layers=2, tokens=0, max_cache_len=64, page_size=16)"
    with torch.no_grad():
        model(make_ids(length=30), attention_mask=PADDING, **{CACHE: cache})
    assert cache.is_initialized
    assert repr(cache) == "TreeCache(layers=2, batch=2, tokens=30, max_cache_len=64, page_size=16)"
    held, layers = cache.num_bytes(), [layer.cache.num_bytes() for layer in cache.layers]
    assert held.tokens == 51
    assert (held.used, held.allocated) == (sum(x.used for x in layers), sum(x.allocated for x in layers))
    cache.reset()
    assert cache.is_initialized
    assert cache.num_bytes().tokens == 0


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_keys_and_values_move_to_another_cache(padded, device):
    """The model goes on with them, with tree attention or with its own."""
    model, ids = make_model(device=device), make_ids(length=40, device=device)
    mask = padded_mask(ids) if padded else torch.ones_like(ids)
    caches = TreeCache(model.config, 64, page_size=16), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :30], attention_mask=mask[:, :30], **{CACHE: cache})
            model(ids[:, 30:35], attention_mask=mask[:, :35], **{CACHE: cache})
        caches[0].crop(-2)
        caches[1].crop(-2)
        moved = DynamicCache(caches[0])
        for ours, theirs in zip(moved, caches[1], strict=True):
            for got, want in zip(ours[:2], theirs[:2], strict=True):
                real = mask[:, None, :33, None].bool()
                torch.testing.assert_close(got, want.masked_fill(~real, 0))
        wanted = model(ids, attention_mask=mask, use_cache=False).logits[:, 33:]
        for name in ("htree", "eager"):
            model.set_attn_implementation(name)
            found = model(ids[:, 33:], attention_mask=mask, **{CACHE: copy.deepcopy(moved)}).logits
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_window_that_is_not_used_is_no_window():
    assert TreeCache(LlamaConfig(sliding_window=16, use_sliding_window=False, num_hidden_layers=3), 8).layers
    assert TreeCache(MistralConfig(sliding_window=None), 8).layers


def test_a_crop_of_whole_strides_needs_no_lists():
    model, cache = filled(STRIDED)
    cache.crop(-18)
    go_on(model, cache, 5)
    assert cache.get_seq_length() == 17
    assert cache.get_max_length() == 64
    cache.crop(-17)
    assert cache.get_seq_length() == 0
