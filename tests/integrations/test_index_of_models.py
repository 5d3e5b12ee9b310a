"""Models of transformers with an index: config.htree["index_dim"] (docs/semantics/index_loss.md §9.6)."""

import warnings
from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from small_models import MODELS, make_ids, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import htree_ops
from htree_ops import fit_index, index_losses
from htree_ops.integrations import patch_model_
from htree_ops.integrations.cache import CACHE, TreeCache
from htree_ops.integrations.transformers import options_of_config
from htree_ops.ops.index_loss.layers import WEIGHTS, index_dim_of

SPARSE = {"compression_rate": 4, "top_k": 2, "max_top_nodes": 8}
INDEXED = SPARSE | {"index_dim": 16}
NAMES = {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in WEIGHTS}


def make(kind: str = "llama", options: Any = INDEXED, **changes: Any) -> PreTrainedModel:
    """Heads of 16, and an index that was drawn where the options have one."""
    model = make_model(kind, options, **{"head_dim": 16} | changes)
    for layer in attentions(model):
        if index_dim_of(layer):  # make_model has drawn all weights from one distribution
            torch.manual_seed(layer.layer_idx)
            htree_ops.ops.index_loss.layers.draw_index_(layer)
    return model


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def fitted(kind: str = "llama", device: str = "cpu", **changes: Any) -> PreTrainedModel:
    """A dense model that has got an index, which it uses."""
    model = make(kind, SPARSE, attention="sdpa", device=device, **changes)
    fit_index(model, [make_ids(2, 60, device)] * 4, steps=4, rows=8, index_dim=16)
    model.set_attn_implementation("htree")
    return model


def logits(model: Any, ids: Tensor, **call: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, **call).logits


@pytest.mark.parametrize("kind", MODELS)
def test_a_dense_model_is_fitted_saved_loaded_and_generates(kind, tmp_path, device):
    dense = make(kind, None, attention="sdpa", device=device)
    dense.config.htree = None
    ids = make_ids(2, 60, device)
    before, state = logits(dense, ids), deepcopy(dense.state_dict())
    dense.train()
    nats = fit_index(dense, ({"input_ids": ids} for _ in range(6)), steps=6, rows=8, index_dim=16)
    assert len(nats) == 2
    assert dense.training
    dense.eval()
    assert dense.config._attn_implementation == "sdpa"
    assert dense.config.use_cache
    assert dense.config.htree == {"index_dim": 16}
    assert torch.equal(logits(dense, ids), before)
    assert dense.state_dict().keys() - state.keys() == NAMES
    assert all(torch.equal(dense.state_dict()[name], x) for name, x in state.items())

    dense.config.htree = INDEXED
    dense.set_attn_implementation("htree")
    sparse = logits(dense, ids)
    assert not torch.equal(sparse, before)
    dense.save_pretrained(tmp_path)
    for attention, wanted in (("htree", sparse), ("sdpa", before)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).to(device)
        assert torch.equal(logits(loaded, ids), wanted)
        for name in NAMES:
            assert torch.equal(loaded.get_parameter(name), dense.get_parameter(name))
            assert not loaded.get_parameter(name).requires_grad
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        new = dense.generate(ids[:, :40], **options)
    assert torch.equal(new, dense.generate(ids[:, :40], use_cache=False, **options))


def test_the_attention_selects_by_the_index(device):
    """The output of a layer is that of tree_attention with the index of its rotated queries and keys."""
    model, ids = fitted(device=device), make_ids(2, 60, device)
    layer = attentions(model)[0]
    q, k, v = (torch.randn(2, heads, 60, 16, device=device) for heads in (4, 2, 2))
    found, _ = htree_ops.integrations.transformers.attention(layer, q, k, v, None, scaling=0.25)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = layer.index_query_weight.unflatten(0, (2, 2))
    index_query = torch.einsum("btsgk,sgkd->btsd", q.unflatten(2, (2, 2)), groups)
    index = (index_query, torch.einsum("btsk,skd->btsd", k, layer.index_key_weight))
    wanted = htree_ops.tree_attention(q, k, v, index=index, rope_base=None, scale=0.25, **SPARSE)
    torch.testing.assert_close(found, wanted)
    model.config.htree = SPARSE | {"index_dim": 0}
    assert not torch.equal(htree_ops.integrations.transformers.attention(layer, *(
        x.transpose(1, 2) for x in (q, k, v)), None, scaling=0.25)[0], found)  # fmt: skip
    assert logits(model, ids).isfinite().all()


@pytest.mark.parametrize("attention", ["htree", "sdpa"])
def test_dense_weights_load_and_the_index_is_drawn(attention, tmp_path, device):
    dense = make(options=None, attention="sdpa", device=device)
    dense.config.htree = INDEXED
    dense.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).to(device)
    for layer in attentions(loaded):
        of_queries, of_keys = (getattr(layer, name) for name in WEIGHTS)
        assert not of_queries.requires_grad
        products = of_keys.transpose(1, 2) @ of_keys  # orthonormal columns of heads as wide as the index
        torch.testing.assert_close(products, torch.eye(16, device=device).expand_as(products))
        torch.testing.assert_close(of_queries, of_keys.repeat_interleave(2, 0) / 8)
    made = make(device=device)
    kept = made.get_parameter(min(NAMES)).clone()
    assert made.load_state_dict(dense.state_dict(), strict=True).missing_keys == []
    assert torch.equal(made.get_parameter(min(NAMES)), kept)
    assert torch.equal(made.lm_head.weight, dense.lm_head.weight)
    if attention == "htree":
        with pytest.warns(UserWarning, match="htree: this layer selects by an index that was never fitted"):
            logits(loaded, make_ids(1, 40, device))


def test_recommended(tmp_path, device):
    model = make(options=None, attention="sdpa", device=device, head_dim=32)
    ids = make_ids(1, 60, device)
    fit_index(model, [ids] * 2, steps=2, rows=8)
    model.config.htree = "recommended"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="htree").to(device)
    assert loaded.config.htree == "recommended"
    choices = options_of_config(loaded.config)
    assert choices.options["top_k"] == 128
    assert choices.index_dim is None
    assert [index_dim_of(layer) for layer in attentions(loaded)] == [32, 32]
    torch.testing.assert_close(
        logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=1e-4
    )  # 60 tokens are dense


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side, device):
    model, ids = fitted(device=device), make_ids(1, 33, device)
    wanted = logits(model, ids)
    pad = torch.full((1, 9), 5, device=device)
    parts = (pad, ids) if side == "left" else (ids, pad)
    mask = torch.cat([torch.full_like(x, x is ids) for x in parts], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, torch.cat(parts, 1), attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(found[mask.bool()], wanted[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_from_a_tree_cache(padded, stride, device):
    """The tokens of generation without a cache; index keys lie in the pages."""
    model, ids = fitted(device=device), make_ids(2, 40, device)
    model.config.htree = INDEXED | {"selection_stride": stride}
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :13] = 0
        options["attention_mask"] = mask
    cache = TreeCache(model.config, max_cache_len=64, page_size=16)
    found = model.generate(ids, **{CACHE: cache}, **options)
    assert torch.equal(found, model.generate(ids, use_cache=False, **options))
    assert [layer.cache.index_dim for layer in cache.layers] == [16, 16]
    assert cache.layers[0].cache.index_dtype == torch.float32


@given(
    stride=st.sampled_from([1, 2, 4]),
    columns=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    padded=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_pieces_behind_a_dynamic_cache_are_the_whole(stride, columns, padded, seed, device):
    """Any pieces of prompts and tokens, padded or not, with every stride."""
    from transformers import DynamicCache

    from htree_ops.integrations.transformers import attention

    layer = LAYER[0] if LAYER else LAYER.append(attentions(fitted())[0]) or LAYER[0]
    layer.config.htree = INDEXED | {"selection_stride": stride}
    layer = layer.to(device)
    generator, total = torch.Generator().manual_seed(seed), sum(columns)
    q, k, v = (torch.randn(2, h, total, 16, generator=generator).to(device) for h in (4, 2, 2))
    real = torch.ones(2, total, dtype=torch.bool, device=device)
    if padded:
        real[0, : min(total - 1, 5)] = False
    mask = None if bool(real.all()) else real
    wanted, _ = attention(layer, q, k, v, mask)
    cache, done = DynamicCache(config=layer.config), 0
    for n in columns:
        part = slice(done, done + n)
        keys, values = cache.update(k[:, :, part], v[:, :, part], 0)
        seen = None if mask is None else mask[:, : done + n]
        found, _ = attention(layer, q[:, :, part], keys, values, seen)
        torch.testing.assert_close(found, wanted[:, part], rtol=1e-4, atol=1e-5)
        done += n


LAYER: list[Any] = []


@pytest.mark.parametrize("positions", ["own", "compact"])
def test_losses_of_a_model_in_training(positions, device):
    model = make(options=INDEXED | {"positions": positions}, device=device).train()
    ids = make_ids(2, 40, device)
    assert not model.get_parameter(min(NAMES)).requires_grad
    with index_losses(rows=8) as losses:
        out = model(ids, labels=ids, use_cache=False)
    assert len(losses) == 2
    (out.loss + losses.mean()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in NAMES)


def test_losses_beside_checkpoints_are_the_same(device):
    found = []
    for checkpoints in (False, True):
        model = make(device=device).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        with index_losses(rows=8) as losses:
            loss = model(make_ids(2, 40, device), use_cache=False).logits.square().mean()
        (loss + losses.mean()).backward()
        assert len(losses) == 2
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_padding_has_no_position(device):
    """Hidden states of padding that are NaN would make a loss NaN that counted any of them."""
    model = make(device=device)
    layer = attentions(model)[0]
    q, k, v = (torch.randn(2, h, 40, 16, device=device) for h in (4, 2, 2))
    real = torch.ones(2, 40, dtype=torch.bool, device=device)
    real[0, :15], real[1, 30:] = False, False
    q, k = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k))
    with index_losses(rows=100) as losses:
        htree_ops.integrations.transformers.attention(layer, q, k, v, real)
    assert losses.mean().isfinite()
    assert losses.mean() > 0


@pytest.mark.parametrize("ways", ["positions", "boundaries"])
def test_packed_documents_are_sequences_of_their_own(ways, device):
    model, ids = fitted(device=device), make_ids(1, 50, device)
    wanted = torch.cat([logits(model, ids[:, :20]), logits(model, ids[:, 20:])], 1)
    call = {"position_ids": torch.tensor([[*range(20), *range(30)]], device=device)}
    if ways == "boundaries":
        ends = torch.tensor([0, 20, 50], dtype=torch.int32, device=device)
        call |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 30, "max_length_k": 30}
    torch.testing.assert_close(logits(model, ids, **call), wanted, rtol=1e-4, atol=1e-4)
    with index_losses(rows=4) as losses:
        logits(model, ids, **call)
    assert len(losses) == 2
    nats = fit_index(model, [{"input_ids": ids, **call}] * 2, steps=2, rows=4, index_dim=16)
    assert all(x > 0 for x in nats)


def test_patched_models_have_an_index_too(device):
    model, ids = fitted(device=device), make_ids(1, 50, device)
    wanted = logits(model, ids)
    patch_model_(model)
    torch.testing.assert_close(logits(model, ids), wanted, rtol=1e-4, atol=1e-4)
    nats = fit_index(model, [ids], steps=1, index_dim=16)
    assert len(nats) == 2
    with index_losses(rows=4) as losses:
        logits(model, ids)
    assert len(losses) == 2


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model_selects_by_its_index(fullgraph, device):
    model, ids = fitted(device=device), make_ids(1, 50, device)
    wanted = logits(model, ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    torch.testing.assert_close(logits(compiled, ids), wanted, rtol=1e-4, atol=1e-4)


# ---- refused


def test_what_does_not_fit_says_so(device):
    ids = make_ids(1, 40, device)
    dense = make(options=INDEXED, attention="sdpa", device=device)
    for layer in attentions(dense):
        for name in WEIGHTS:
            delattr(layer, name)
    dense.set_attn_implementation("htree")
    with pytest.raises(
        ValueError, match=r"index of config.htree\['index_dim'\] = 16, got none: htree_ops.fit_index"
    ):
        logits(dense, ids)
    model = fitted(device=device)
    model.config.htree = SPARSE
    with pytest.raises(ValueError, match=r"config\.htree must have 'index_dim', 16 to choose by the index"):
        logits(model, ids)
    model.config.htree = SPARSE | {"index_dim": 32}
    with pytest.raises(
        ValueError, match=r"config\.htree: index_dim must be a multiple of 16 up to 128 and up to"
    ):
        logits(model, ids)
    model.config.htree = INDEXED | {"selection_span": 2}
    with pytest.raises(
        ValueError, match=r"config\.htree: index_dim must be 0 beside selection_span = 2, got 16"
    ):
        logits(model, ids)
    model.config.htree = "fast"
    with pytest.raises(
        TypeError, match=r"config\.htree must be a dict of options or 'recommended', got 'fast'"
    ):
        logits(model, ids)
    with pytest.raises(ValueError, match=r"config\.htree: index_dim must be a multiple of 16"):
        make(options=SPARSE | {"index_dim": 24})


def test_models_that_cannot_be_fitted(device):
    from transformers import BloomConfig, BloomForCausalLM

    small = BloomConfig(hidden_size=32, n_head=2, n_layer=1, vocab_size=61)
    with pytest.raises(ValueError, match="fit_index: model must have layers of HTreeAttention"):
        fit_index(BloomForCausalLM(small), [make_ids(1, 40)], steps=1, index_dim=16)
    model = make(options={"importance": "exp_joint"}, attention="sdpa", device=device)
    with pytest.raises(
        ValueError, match="fit_index: index_dim must be 0 beside importance = 'exp_joint', got 16"
    ):
        fit_index(model, [make_ids(1, 40, device)], steps=1, index_dim=16)
    assert model.config._attn_implementation == "sdpa"
