"""fit_index: a dense model gets its index, and everything else stays (docs/semantics/index_loss.md §9.6)."""

import io
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import htree_ops
from htree_ops import DeviceError, HTreeAttention, TreeOptions, fit_index, index_losses
from htree_ops.ops.index_loss.fit import _Progress
from htree_ops.ops.tree_attention.index import dense_attention

OPTIONS = TreeOptions(compression_rate=4, top_k=4, max_top_nodes=16)


class Model(nn.Module):
    """Layers with a norm and dropout between them, and one part that does not learn."""

    def __init__(self, device: str, *, layers: int = 2, seed: int = 0, **keywords: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "device": device, "options": OPTIONS}
        sizes["index_dim"] = 0
        self.layers = nn.ModuleList(HTreeAttention(64, **sizes | keywords) for _ in range(layers))
        self.norm = nn.LayerNorm(64, device=device).requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        self.seen: list[tuple[bool, Tensor]] = []

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(layer(self.norm(x), **call))
        self.seen.append((self.training, x.detach()))
        return x


def batches(device: str, *, T: int = 70, B: int = 2, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(B, T, 64, generator=generator).to(device)


def without_index(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items() if "index" not in name}


def loss_of(model: nn.Module, x: Tensor) -> float:
    model.eval()
    torch.manual_seed(5)
    with torch.no_grad(), index_losses(rows=400) as losses:
        model(x)
    return losses.mean().item()


def test_a_model_learns_its_index_and_everything_else_stays(device):
    model = Model(device)
    model(next(batches(device))).sum().backward()
    model.layers[1].eval()
    before = without_index(model)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    requires = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = [part.training for part in model.modules()]
    nats = fit_index(model, batches(device), steps=30, rows=32, learning_rate=0.02, index_dim=16)
    assert len(nats) == 2
    assert all(isinstance(x, float) and 0 <= x < math.inf for x in nats)
    assert modes == [part.training for part in model.modules()]
    for name, x in without_index(model).items():
        assert torch.equal(x, before[name]), name
    for name, p in model.named_parameters():
        if "index" in name:
            assert p.requires_grad
            assert p.grad is None
        else:
            assert p.requires_grad == requires[name]
            assert (p.grad is None and name not in gradients) or torch.equal(p.grad, gradients[name])
    assert all(layer.index_dim == 16 for layer in model.layers)


def test_the_index_is_better_than_the_one_that_was_drawn(device):
    model = Model(device, index_dim=16)
    for layer in model.layers:
        for name in "qk":
            nn.init.normal_(getattr(layer, f"{name}_proj").weight, std=0.4)
    x = next(batches(device, seed=9))
    first = loss_of(model, x)
    nats = fit_index(model, batches(device), steps=80, rows=64, learning_rate=0.02, index_dim=16)
    last = loss_of(model, x)
    assert last < 0.7 * first
    assert sum(nats) / 2 < 0.7 * first


def test_the_model_attends_densely_while_it_is_fitted(device):
    """The output of a step is that of a model that opens every node, in mode eval."""
    model = Model(device)
    xs = [x for _, x in zip(range(3), batches(device), strict=False)]
    fit_index(model, xs, steps=3, rows=8, index_dim=16)
    dense = Model(device, options=TreeOptions(compression_rate=4, top_k=32, max_top_nodes=128))
    dense.load_state_dict(without_index(model))
    dense.eval()
    with torch.no_grad():
        for (training, found), x in zip(model.seen, xs, strict=True):
            assert not training
            torch.testing.assert_close(found, dense(x), rtol=1e-4, atol=1e-5)


@given(
    seed=st.integers(0, 2**20),
    group=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    half=st.integers(1, 6),
    positions=st.sampled_from(["own", "compact"]),
    frequencies=st.booleans(),
    T=st.integers(1, 40),
)
def test_dense_attention_is_a_tree_whose_nodes_all_are_opened(
    seed, group, half, positions, frequencies, T, device
):
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = group
    inv_freq = tuple(torch.rand(half, generator=generator).tolist()) if frequencies else None
    rotation = {"rope_base": None} if positions == "own" else {"inv_freq": inv_freq}
    options = TreeOptions(compression_rate=4, top_k=10, max_top_nodes=40, scale=0.3, **rotation)
    q, k, v = (
        torch.randn(2, T, h, 2 * half, generator=generator).to(device) for h in (heads, kv_heads, kv_heads)
    )
    wanted = htree_ops.tree_attention(q, k, v, options=options)
    torch.testing.assert_close(dense_attention(q, k, v, options), wanted, rtol=1e-4, atol=2e-5)


@given(
    seed=st.integers(0, 2**20),
    steps=st.integers(1, 3),
    T=st.integers(1, 30),
    padded=st.booleans(),
    had=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    positions=st.sampled_from(["own", "compact"]),
)
def test_any_fit_leaves_the_rest(seed, steps, T, padded, had, dtype, positions, device):
    torch.manual_seed(seed)
    keywords = {"options": OPTIONS, "dtype": dtype, "positions": positions, "device": device}
    layer = HTreeAttention(32, num_heads=2, num_kv_heads=1, index_dim=16 * had, **keywords)
    before, training = without_index(layer), layer.training
    batch = {"x": torch.randn(2, T, 32, device=device, dtype=dtype)}
    if padded:
        batch["key_padding_mask"] = torch.rand(2, 1, device=device).expand(2, T) * T < torch.arange(
            T, device=device
        )
    nats = fit_index(layer, [batch] * steps, steps=steps, rows=3, index_dim=16)
    assert len(nats) == 1
    assert math.isfinite(nats[0])
    assert nats[0] >= -1e-3
    assert layer.training == training
    assert layer.index_key_weight.dtype == dtype
    assert all(torch.equal(x, before[name]) for name, x in without_index(layer).items())
    assert torch.isfinite(layer.index_query_weight).all()
    other = HTreeAttention(32, num_heads=2, num_kv_heads=1, index_dim=16, **keywords)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.index_query_weight, layer.index_query_weight)


@pytest.mark.parametrize(
    ("head_dim", "had", "width"), [(16, None, 16), (64, None, 32), (64, 16, 16), (64, 0, 32), (24, 0, 16)]
)
def test_the_width_is_that_of_the_index_or_what_fits(head_dim, had, width):
    keywords = {} if had is None else {"index_dim": had}
    layer = HTreeAttention(2 * head_dim, num_heads=2, top_k=2, max_top_nodes=32, **keywords)
    fit_index(layer, [torch.randn(1, 40, 2 * head_dim)], steps=1, rows=2)
    assert layer.index_dim == width


def test_an_index_takes_the_place_of_a_span(device):
    layer = HTreeAttention(64, num_heads=2, top_k=4, max_top_nodes=64, index_dim=0, device=device)
    assert layer.options.selection_span == 2
    xs = batches(device, T=200)
    fit_index(layer, xs, steps=2, rows=8)
    assert (layer.index_dim, layer.options.selection_span) == (32, None)
    x = next(xs)
    q, k, v = layer._project(x)
    q, k = layer._rotated(q, k, layer._places(x))
    index = layer.index_of(q, k)
    wanted = htree_ops.tree_attention(q, k, v, index=index, options=layer._of_attention())
    assert torch.equal(layer(x), layer.o_proj(wanted.flatten(2)))


def test_a_fit_goes_on_from_the_index_that_there_is(device):
    """A step of almost nothing leaves the weights almost as they were."""
    model = Model(device, index_dim=16)
    before = [layer.index_query_weight.clone() for layer in model.layers]
    fit_index(model, batches(device), steps=1, learning_rate=1e-9, index_dim=16)
    for layer, weight in zip(model.layers, before, strict=True):
        torch.testing.assert_close(layer.index_query_weight.detach(), weight, rtol=1e-5, atol=1e-7)


def test_the_same_seed_gives_the_same_bits(device):
    found = []
    for _ in range(2):
        model = Model(device)
        torch.manual_seed(3)
        nats = fit_index(model, batches(device), steps=4, rows=16, index_dim=16)
        found.append((nats, [layer.index_key_weight.detach() for layer in model.layers]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


def test_a_compiled_model_is_fitted_uncompiled(device):
    model = Model(device)
    compiled = torch.compile(model, backend="eager")
    x = next(batches(device))
    compiled(x)
    assert len(fit_index(compiled, [x], steps=1, rows=4, index_dim=16)) == 2


def test_no_activation_is_kept(device):
    model = Model(device)
    seen = []
    model.layers[1].register_forward_hook(lambda layer, args, out: seen.append(out.requires_grad))
    fit_index(model, batches(device), steps=2, rows=4, index_dim=16)
    assert seen == [False, False]


# ---- layers that were never fitted


def test_an_index_that_was_never_fitted_warns_once(device):
    model, x = Model(device, index_dim=16), next(batches(device))
    with pytest.warns(UserWarning, match="an index that was never fitted") as found:
        model(x)
    assert len(found) == 2  # one for each layer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


@pytest.mark.parametrize("way", ["fit_index", "index_losses", "state"])
def test_an_index_that_learned_does_not_warn(way, device):
    model, x = Model(device, index_dim=16), next(batches(device))
    fit_index(model, batches(device), steps=1, index_dim=16)
    if way == "state":
        state = model.state_dict()
        model = Model(device, seed=2, index_dim=16)
        model.load_state_dict(state)
    if way == "index_losses":
        model = Model(device, index_dim=16)
        with warnings.catch_warnings(), index_losses(rows=4):
            warnings.simplefilter("error")
            model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


# ---- bad input


def test_a_fit_that_fails_changes_nothing(device):
    model = Model(device)
    x = next(batches(device))

    def breaking():
        yield x
        yield "text"

    before, modes = without_index(model), [part.training for part in model.modules()]
    with pytest.raises(TypeError, match=r"fit_index: batches\[1\] must be a Tensor or a dict, got str"):
        fit_index(model, breaking(), steps=2, index_dim=16)
    with pytest.raises(ValueError, match="fit_index: batches must be at least steps = 3, got 2"):
        fit_index(model, [x, x], steps=3, index_dim=16)
    with pytest.raises(ValueError, match="fit_index: model must attend with finite queries and keys"):
        fit_index(model, [x.fill_(torch.nan)], steps=1, index_dim=16)
    assert all(layer.index_dim == 0 for layer in model.layers)
    assert model.state_dict().keys() == before.keys()
    assert modes == [part.training for part in model.modules()]


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be between 1 and"),
        ({"rows": 2.0}, TypeError, "rows must be an int, got float"),
        *(
            (
                {"learning_rate": x},
                ValueError,
                rf"learning_rate must be positive and below 1e30, got {re.escape(str(x))}",
            )
            for x in (0.0, math.nan, math.inf, 1e300, 10**400)
        ),
        (
            {"batches": [torch.zeros(2, 70, 64, device="meta")]},
            DeviceError,
            r"batches\[0\] must be on a device that holds numbers, got meta",
        ),
        (
            {"batches": [{"x": torch.zeros(2, 70, 64, device="meta")}]},
            DeviceError,
            r"batches\[0\]\['x'\] must be on a device that holds numbers, got meta",
        ),
        (
            {"index_dim": 24},
            ValueError,
            "index_dim must be a multiple of 16 up to 128 and up to head_dim = 16",
        ),
        (
            {"index_dim": 32},
            ValueError,
            "index_dim must be a multiple of 16 up to 128 and up to head_dim = 16, got 32",
        ),
        ({"model": nn.Linear(2, 2)}, ValueError, "model must have layers of HTreeAttention"),
        ({"model": 1}, TypeError, r"model must be a torch\.nn\.Module, got int"),
        ({"batches": torch.zeros(2, 70, 64)}, TypeError, "batches must be tensors of tokens or dicts"),
    ],
)
def test_arguments_that_are_refused(keywords, kind, message):
    call = {"model": Model("cpu"), "batches": batches("cpu"), **keywords}
    with pytest.raises(kind, match=f"^fit_index: {message}"):
        fit_index(**call)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_fits_the_same(mode, device):
    found = []
    for around in (torch.enable_grad, mode):
        model = Model(device)
        with around():
            nats = fit_index(model, batches(device), steps=3, rows=8)
            assert torch.is_inference_mode_enabled() == (around is torch.inference_mode)
        found.append([nats, *(layer.index_key_weight.tolist() for layer in model.layers)])
        seen(model, next(batches(device)))
    assert found[0] == found[1]


def test_a_model_that_was_made_in_inference_mode():
    with torch.inference_mode():
        dense, indexed = Model("cpu"), Model("cpu", index_dim=16)
    assert len(fit_index(dense, batches("cpu"), steps=1, rows=8)) == 2
    with pytest.raises(ValueError, match="fit_index: model must be made outside of inference_mode"):
        fit_index(indexed, batches("cpu"), steps=1, rows=8)


def seen(model: nn.Module, x: Tensor) -> None:
    """A fitted model trains its index."""
    with index_losses(rows=4) as losses:
        model(x)
    losses.mean().backward()


def test_layers_that_are_refused(device):
    for options, message in (
        (TreeOptions(importance="lse"), "index_dim must be 0 beside importance = 'lse', got 16"),
        (TreeOptions(scope="q_head"), "index_dim must be 0 beside scope = 'q_head', got 16"),
    ):
        with pytest.raises(ValueError, match=f"fit_index: {message}"):
            fit_index(Model(device, options=options), batches(device), index_dim=16)
    with pytest.raises(
        ValueError, match="fit_index: index_dim must be 16, that of the index that the model has"
    ):
        fit_index(Model(device, index_dim=16, head_dim=32), batches(device), index_dim=32)
    unused = Model(device)
    unused.spare = HTreeAttention(64, num_heads=2, index_dim=0, device=device)
    with pytest.raises(
        ValueError, match="fit_index: model must call each of its layers, got a HTreeAttention"
    ):
        fit_index(unused, batches(device), steps=1, index_dim=16)


def test_the_line_of_progress(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    with _Progress(4) as progress:
        progress.show(1, [torch.tensor(0.5)])
    assert shown.getvalue() == ""  # no terminal
    monkeypatch.setattr(shown, "isatty", lambda: True)
    with _Progress(4) as progress:
        for step in range(1, 5):
            progress.show(step, [torch.tensor(0.5), torch.tensor(1.0)])
    assert "1/4  0.7500 nats" in shown.getvalue()
    assert "2/4" not in shown.getvalue()  # less than half a second later
    assert f"[{'#' * 30}] 4/4" in shown.getvalue()
    assert shown.getvalue().endswith("\n")
