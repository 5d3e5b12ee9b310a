"""The index of HTreeAttention, and the losses that index_losses gathers (docs/semantics/index_loss.md §9.5)."""

import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import htree_ops
from htree_ops import HTreeAttention, TreeOptions, index_losses
from htree_ops.ops.index_loss.function import draw_positions

OPTIONS = TreeOptions(compression_rate=4, top_k=4, max_top_nodes=16)


def layer_of(device: str, seed: int = 0, **keywords: Any) -> HTreeAttention:
    torch.manual_seed(seed)
    given: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "options": OPTIONS,
        "index_dim": 16,
        "device": device,
    }
    return HTreeAttention(64, **given | keywords)


def tokens(device: str, B: int = 2, T: int = 50, width: int = 64) -> Tensor:
    return torch.randn(B, T, width, generator=torch.Generator().manual_seed(1)).to(device)


class Model(nn.Module):
    """Three layers, two of which have an index."""

    def __init__(self, device: str, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(device, i, index_dim=16 * (i < 2)) for i in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


# ---- parameters of the layer


@pytest.mark.parametrize(
    ("head_dim", "keywords", "wanted"),
    [
        (64, {"options": TreeOptions()}, 32),
        (32, {"options": TreeOptions()}, 32),
        (24, {"options": TreeOptions()}, 16),
        (8, {"options": TreeOptions()}, 0),
        (64, {}, 32),
        (64, {"selection_span": 2}, 0),
        (64, {"options": TreeOptions(importance="lse")}, 0),
        (64, {"options": TreeOptions(scope="q_head")}, 0),
    ],
)
def test_a_width_of_none_follows_from_the_options(head_dim, keywords, wanted):
    layer = HTreeAttention(64, num_heads=2, head_dim=head_dim, **keywords)
    assert layer.index_dim == wanted
    assert (layer.index_key_weight is None) == (wanted == 0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"index_dim": 24}, "index_dim must be a multiple of 16 up to 128 and up to head_dim = 16, got 24"),
        ({"index_dim": 32}, "index_dim must be a multiple of 16 up to 128 and up to head_dim = 16, got 32"),
        ({"index_dim": -16}, "index_dim must be between 0 and"),
        ({"options": TreeOptions(selection_span=2)}, "index_dim must be 0 beside selection_span = 2, got 16"),
        ({"options": TreeOptions(importance="lse")}, "index_dim must be 0 beside importance = 'lse', got 16"),
    ],
)
def test_widths_that_are_refused(keywords, message):
    with pytest.raises(ValueError, match=f"^HTreeAttention: {message}"):
        layer_of("cpu", **keywords)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (None, TypeError, "options must be TreeOptions, got NoneType"),
        (
            TreeOptions(selection_span=2),
            ValueError,
            "options must have selection_span = None beside index_dim = 16, got 2",
        ),
        (TreeOptions(importance="lse"), ValueError, "options must have importance = 'lse_causal' beside .*, got 'lse'"),
        (TreeOptions(scope="q_head"), ValueError, "options must have scope = 'kv_head' beside .*, got 'q_head'"),
    ],
)  # fmt: skip
def test_options_that_are_refused_when_they_are_set(options, kind, message):
    layer = layer_of("cpu", index_dim=16)
    before = layer.options
    with pytest.raises(kind, match=f"^HTreeAttention: {message}"):
        layer.options = options
    assert layer.options is before


def test_the_first_index_approximates_the_attention(device):
    """Orthonormal projections, the same for the query heads of a K/V head."""
    layer = layer_of(device, index_dim=16)  # as wide as the heads: exact
    q, k = torch.randn(2, 9, 4, 16, device=device), torch.randn(2, 9, 2, 16, device=device)
    index_query, index_key = layer.index_of(q, k)
    assert index_query.shape == index_key.shape == (2, 9, 2, 16)
    products = torch.einsum("bisd,bjsd->bsij", index_query, index_key)
    scores = torch.einsum("bisgk,bjsk->bsgij", q.unflatten(2, (2, 2)), k) * 16**-0.5
    torch.testing.assert_close(products, scores.mean(2), rtol=1e-4, atol=1e-5)


def test_weights_wait_for_a_loss_and_are_saved(device):
    layer = layer_of(device)
    assert not layer.index_query_weight.requires_grad
    layer(tokens(device)).sum().backward()
    assert layer.index_query_weight.grad is None
    state = layer.state_dict()
    assert {"index_query_weight", "index_key_weight"} < state.keys()
    other = layer_of(device, seed=5)
    other.load_state_dict(state)
    assert torch.equal(other.index_key_weight, layer.index_key_weight)
    dense = {name: x for name, x in state.items() if "index" not in name}
    fresh = layer_of(device, seed=6)
    kept = fresh.index_key_weight.clone()
    assert fresh.load_state_dict(dense, strict=True).missing_keys == []
    assert torch.equal(fresh.index_key_weight, kept)
    with pytest.raises(RuntimeError, match="q_proj"):
        fresh.load_state_dict({name: x for name, x in dense.items() if "q_proj" not in name})


def test_layers_without_an_index_are_as_before():
    assert set(HTreeAttention(64, num_heads=4, index_dim=0).state_dict()) == {
        f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert HTreeAttention.from_documents(64, num_heads=4).index_dim == 0


@pytest.mark.parametrize("positions", ["own", "compact"])
def test_the_layer_selects_by_its_index(positions, device):
    """The output is that of tree_attention with the index of what it attends with."""
    layer, x = layer_of(device, positions=positions), tokens(device)
    q, k, v = layer._project(x)
    if positions == "own":
        q, k = layer._rotated(q, k, layer._places(x))
    index = layer.index_of(q, k)
    wanted = layer.o_proj(
        htree_ops.tree_attention(q, k, v, index=index, options=layer._of_attention()).flatten(2)
    )
    assert torch.equal(layer(x), wanted)
    without = layer_of(device, positions=positions, index_dim=0)
    without.load_state_dict(layer.state_dict(), strict=False)
    assert not torch.equal(without(x), wanted)
    torch.testing.assert_close(without(x)[:, :16], wanted[:, :16])  # dense: nothing is selected


def test_padding_in_front_moves_nothing(device):
    layer, x = layer_of(device), tokens(device)
    mask = torch.zeros(2, 50, dtype=torch.bool, device=device)
    mask[:, :20] = True
    torch.testing.assert_close(layer(x, key_padding_mask=mask)[:, 20:], layer(x[:, 20:]))


@pytest.mark.parametrize("positions", ["own", "compact"])
def test_the_loss_is_that_of_the_queries_and_keys_of_the_attention(positions, device):
    layer, x = layer_of(device, positions=positions), tokens(device)
    q, k = (getattr(layer, f"{name}_proj")(x).unflatten(-1, (-1, 16)) for name in "qk")
    if positions == "own":
        q, k = layer._rotated(q, k, torch.arange(50, device=device))
    torch.manual_seed(3)
    with index_losses(rows=5) as losses:
        layer(x)
    torch.manual_seed(3)
    drawn = draw_positions(q, k, 5, 4)
    wanted = htree_ops.index_loss(q, k, *layer.index_of(q, k), positions=drawn, block_size=4)
    torch.testing.assert_close(losses.mean(), wanted)


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_an_index_is_made_once(use_reentrant, device, monkeypatch):
    """The selection takes what the loss has, in a checkpoint that runs again too; padded sequences and documents."""

    def second(function, layer, q, k):
        raise AssertionError("made for the selection alone")

    monkeypatch.setattr("htree_ops.ops.tree_attention.index.choose_by_index", second)
    model, x = Model(device, use_reentrant), tokens(device)
    mask = torch.zeros(2, 50, dtype=torch.bool, device=device)
    mask[:, :20] = True
    ends = torch.tensor([0, 30, 50], dtype=torch.int32, device=device)
    with index_losses(rows=6) as losses:
        out = model(x)
        if use_reentrant is None:
            model.layers[0](x, key_padding_mask=mask)
            model.layers[0](x[:1], cu_seqlens=ends)
    (out.sum() + losses.mean()).backward()
    with pytest.raises(AssertionError, match="made for the selection alone"):
        model(x)


def test_a_model_learns_its_indexes_and_nothing_else(device):
    model, x = Model(device), tokens(device)
    with index_losses(rows=6) as losses:
        out = model(x)
    assert len(losses) == 2
    assert len(list(losses)) == 2
    torch.testing.assert_close(losses.mean(), torch.stack(list(losses)).mean())
    losses.mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("index" in name), name
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_backward_may_stand_inside(device):
    model, x = Model(device), tokens(device)
    with index_losses(rows=6) as losses:
        (model(x).square().mean() + losses.mean()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("inside", [True, False])
def test_checkpoints_draw_the_same_positions_once(inside, device):
    x = tokens(device)
    found = []
    for use_reentrant in (None, False):
        model = Model(device, use_reentrant)
        torch.manual_seed(7)
        with index_losses(rows=6) as losses:
            loss = model(x).square().mean() + losses.mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert len(losses) == 2
        assert all(len(calls) == 1 for calls in losses._of_layers.values())
        found.append((loss.detach(), *(p.grad for p in model.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_without_losses_behind_one_with(device):
    """Whether a layer is run again with its loss follows from its last forward, not from an earlier one."""
    model, x = Model(device, use_reentrant=False), tokens(device)
    with index_losses(rows=6) as losses:
        (model(x).sum() + losses.mean()).backward()
    model(x).sum().backward()
    with index_losses(rows=6) as losses:
        out = model(x)
    (out.sum() + losses.mean()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_reentrant_checkpoints_are_refused(device):
    model, x = Model(device, use_reentrant=True), tokens(device).requires_grad_()
    with index_losses(rows=6):
        out = model(x)
    with pytest.raises(RuntimeError, match=r"index_losses: .* reentrant"):
        out.sum().backward()


def test_padding_has_no_position(device):
    """Padding holds NaN, and a loss that counted any of it would too."""
    layer, x = layer_of(device), tokens(device)
    mask = torch.zeros(2, 50, dtype=torch.bool, device=device)
    mask[0, 30:], mask[1, :20] = True, True
    with index_losses(rows=200) as losses:
        layer(x.masked_fill(mask[..., None], torch.nan), key_padding_mask=mask)
    assert losses.mean().isfinite()
    assert losses.mean() > 0


def test_padded_sequences_have_the_loss_of_their_tokens(device):
    layer, x = layer_of(device), tokens(device, B=1)
    mask = torch.zeros(1, 50, dtype=torch.bool, device=device)
    mask[0, :20] = True
    found = []
    for call in ({"key_padding_mask": mask}, {}):
        with index_losses(rows=4000) as losses:
            layer(x if call else x[:, 20:], **call)
        found.append(losses.mean())
    torch.testing.assert_close(*found, rtol=0.03, atol=0)  # positions are drawn anew


def test_sequences_of_one_block_add_nothing(device):
    layer = layer_of(device)
    mask = torch.zeros(2, 6, dtype=torch.bool, device=device)
    mask[:, 4:] = True
    x = tokens(device, T=6)
    for call in ((x[:, :4], {}), (x, {"key_padding_mask": mask})):
        with index_losses(rows=3) as losses:
            layer(call[0], **call[1])
        losses.mean().backward()
        assert losses.mean().item() == 0.0
        assert not layer.index_key_weight.grad.any()


def test_calls_of_a_layer_are_one_loss_and_collectors_nest(device):
    layer, x = layer_of(device), tokens(device)
    with index_losses(rows=4) as outer:
        layer(x)
        with index_losses(rows=4) as inner:
            layer(x)
            layer(x)
    assert len(outer) == len(inner) == 1
    assert [len(calls) for calls in (*outer._of_layers.values(), *inner._of_layers.values())] == [1, 2]


def test_a_layer_of_another_thread_adds_its_loss():
    layer, x = layer_of("cpu"), tokens("cpu")
    with index_losses(rows=4) as losses:
        thread = threading.Thread(target=layer, args=(x,))
        thread.start()
        thread.join()
    assert len(losses) == 1


def test_no_layer_is_an_error_that_says_so():
    with index_losses() as losses:
        HTreeAttention(64, num_heads=4, index_dim=0)(tokens("cpu"))
    with pytest.raises(RuntimeError, match="no HTreeAttention with index_dim above 0 was called"):
        losses.mean()


def test_without_grad_losses_have_values(device):
    layer, x = layer_of(device), tokens(device)
    with torch.no_grad(), index_losses(rows=4) as losses:
        layer(x)
    assert losses.mean() > 0
    assert not losses.mean().requires_grad


@pytest.mark.parametrize("rows", [0, -1])
def test_rows_that_are_refused(rows):
    with pytest.raises(ValueError, match="index_losses: rows must be between 1 and"), index_losses(rows):
        pass


def test_what_is_not_supported_says_so(device):
    layer, x = layer_of(device), tokens(device)
    compiled = torch.compile(lambda x: layer(x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))
    with index_losses(), pytest.raises(Exception, match=r"require grad before torch\.compile has the model"):
        compiled(x)
    with pytest.raises(ValueError, match="index_dim must be above 0"):
        layer_of(device, index_dim=0).index_of(x, x)


# ---- packed documents


def test_packed_documents_select_by_the_index_of_each(device):
    layer, x = layer_of(device), tokens(device, B=1, T=90)
    ends = torch.tensor([0, 37, 40, 85], dtype=torch.int32, device=device)
    out = layer(x, cu_seqlens=ends)
    wanted = [layer(x[:, a:b]) for a, b in ((0, 37), (37, 40), (40, 85))]
    torch.testing.assert_close(out[:, :85], torch.cat(wanted, 1))
    assert not out[:, 85:].any()


def test_packed_documents_have_the_loss_of_their_rows(device):
    """Rows behind the last document hold NaN, and documents of one block have no position."""
    layer, x = layer_of(device), tokens(device, B=1, T=90)
    x[:, 88:] = torch.nan
    ends = torch.tensor([0, 37, 40, 85], dtype=torch.int32, device=device)
    torch.manual_seed(3)
    with index_losses(rows=9) as losses:
        layer(x, cu_seqlens=ends)
    q, k, _ = layer._project_documents(x[0, :88], torch.arange(88, device=device), ends)
    torch.manual_seed(3)
    drawn = draw_positions(q, k, 9, 4, cu_seqlens=ends)
    assert bool((((drawn >= 4) & (drawn < 37)) | ((drawn >= 44) & (drawn < 85))).all())
    index = layer.index_of(q, k)
    wanted = htree_ops.index_loss(q, k, *index, positions=drawn, block_size=4, cu_seqlens=ends)
    torch.testing.assert_close(losses.mean(), wanted)
    losses.mean().backward()
    assert layer.index_key_weight.grad.isfinite().all()
    with index_losses(rows=9) as losses:
        layer(x[:, :6], cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32, device=device))
    assert losses.mean().item() == 0.0


# ---- torch.compile


def seen(model: nn.Module, x: Tensor) -> None:
    """The first losses, from which on the indexes require grad."""
    with index_losses(rows=2):
        model(x)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_layers_have_the_same_losses(whole, device):
    """A model compiled as one graph, and each of its layers compiled alone, which share their code."""
    x, found = tokens(device), []
    for compiles in (False, True):
        model = Model(device)
        seen(model, x)
        call = model
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        if compiles and whole:
            call = torch.compile(model, fullgraph=True, backend=counter)
        elif compiles:
            for layer in model.layers:
                layer.compile(fullgraph=True, backend=counter)
        results = []
        for seed in (3, 4):
            torch.manual_seed(seed)
            with index_losses(rows=6) as losses:
                out = call(x)
                assert len(losses) == 2
            assert [len(calls) for calls in losses._of_layers.values()] == [1, 1]
            results.append(losses.mean().detach())
        if compiles:
            assert counter.frame_count <= (1 if whole else 3)
        (out.square().mean() + losses.mean()).backward()
        found.append((*results, *(p.grad for p in model.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_compiled_code_without_losses_leaves_none(device):
    model, x = Model(device), tokens(device)
    seen(model, x)
    compiled = torch.compile(model, backend="aot_eager")

    def broken():
        with index_losses(rows=2):
            compiled(x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    wanted = compiled(x)
    assert all(layer._index_pending == [] for layer in model.layers if layer.index_dim)
    with index_losses(rows=2) as outer:
        compiled(x)
        with index_losses(rows=2) as inner:
            compiled(x)
            compiled(x)
    assert [len(calls) for calls in (*outer._of_layers.values(), *inner._of_layers.values())] == [1, 1, 2, 2]
    torch.testing.assert_close(model(x), wanted)


def test_copies_of_a_model_leave_their_own_losses(device):
    model, x = Model(device), tokens(device)
    seen(model, x)
    copied = deepcopy(model)
    compiled = torch.compile(copied, backend="aot_eager")
    with index_losses(rows=2) as losses:
        compiled(x)
    assert len(losses) == 2


def test_copies_have_an_index_of_their_own(device):
    layer = layer_of(device)
    copied = deepcopy(layer)
    assert torch.equal(copied.index_key_weight, layer.index_key_weight)
    assert copied.index_key_weight is not layer.index_key_weight


def test_autocast_trains_the_index(device):
    layer, x = layer_of(device), tokens(device)
    with torch.autocast(device, dtype=torch.bfloat16), index_losses(rows=8) as losses:
        layer(x)
    losses.mean().backward()
    assert layer.index_query_weight.grad.dtype == torch.float32
    assert layer.index_query_weight.grad.abs().max() > 0


def test_training_lowers_the_loss(device):
    layer, x = layer_of(device, index_dim=16, num_kv_heads=1), 3 * tokens(device, B=4)
    with index_losses(rows=64) as losses:
        layer(x)
    first = losses.mean().item()
    optimizer = torch.optim.Adam([layer.index_query_weight, layer.index_key_weight], lr=0.02)
    for _ in range(60):
        with index_losses(rows=64) as losses:
            layer(x)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    assert losses.mean().item() < 0.8 * first
