"""FP8Linear and the swap of a model's layers (docs/semantics/fp8.md §3.3)."""

import copy
import io
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from htree_ops import FP8Linear, HTreeAttention, quantize_model_
from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.fp8 import calibrate_activation_scales
from htree_ops.reference import fp8 as reference
from tests.support.cases import normal
from tests.support.fp8_cases import codes_of
from tests.support.fp8_gemm_cases import sum_error

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DELTA = 1 / 17


def make(dtype: torch.dtype, device: str, k: int = 96, n: int = 80, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(k, n, bias, device=device, dtype=dtype)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_is_the_product_of_what_was_quantised(dtype, bias, static, device):
    linear = make(dtype, device, bias=bias)
    scale = 90.0 if static else None
    module = FP8Linear.from_linear(linear, scale)
    for shape in ((7, 96), (2, 5, 96), (96,), (0, 96), (3, 0, 96)):
        x = normal(shape, dtype, device, seed=2)
        y = module(x)
        assert (y.shape, y.dtype) == (torch.Size((*shape[:-1], 80)), dtype)
        rows = x.reshape(-1, 96)
        if not rows.numel():
            continue
        given = torch.tensor(90.0, device=device) if static else None
        codes, used, _ = reference.quantize(rows, given, "tensor" if static else "channel")
        a = reference.dequantize(codes, used, "tensor" if static else "channel")
        b = reference.dequantize(codes_of(module.weight), module.weight_scale, "channel")
        expected = a @ b.t()
        unit = torch.finfo(dtype).eps / 2
        slack = (
            sum_error(device) * (a.abs() @ b.abs().t())
            + unit * expected.abs()
            + torch.finfo(dtype).smallest_normal
        )
        if bias:
            expected = expected + linear.bias.detach().double()
            slack = slack + unit * expected.abs()
        assert bool(((y.reshape(-1, 80).double() - expected).abs() <= slack * (1 + 2 * unit)).all())


def test_error_against_the_full_layer(device):
    """Property 6 (a): each factor is within 1/17 of itself, or half a subnormal of its own row."""
    linear = make(torch.float32, device, k=512)
    x = normal((33, 512), torch.float32, device, seed=3)
    w = linear.weight.detach().double()
    error = (FP8Linear.from_linear(linear)(x).double() - linear(x).detach().double()).abs()
    magnitudes = x.double().abs() @ w.abs().t()
    floor = 2.0**-10 / 448
    rows = x.double().abs().amax(1, keepdim=True) * w.abs().sum(1)
    columns = w.abs().amax(1) * x.double().abs().sum(1, keepdim=True)
    bound = (2 * DELTA + DELTA**2) * magnitudes + floor * (1 + DELTA) * (rows + columns)
    assert bool((error <= bound + 1e-6).all())
    norm = (error.norm() / (x.double() @ w.t()).norm()).item()
    assert norm <= 0.06


def test_weights_are_quantised_once(device):
    linear = make(torch.bfloat16, device)
    module = FP8Linear.from_linear(linear)
    assert module.weight.dtype == torch.float8_e4m3fn
    assert module.weight_scale.shape == (80, 1)
    codes, scale, _ = reference.quantize(linear.weight.detach(), None, "channel")
    assert torch.equal(codes_of(module.weight), codes)
    assert torch.equal(module.weight_scale, scale)
    before = module.weight.data_ptr()
    module(normal((2, 96), torch.bfloat16, device, seed=4))
    assert module.weight.data_ptr() == before
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("static", [False, True])
def test_state_dict_round_trip(static, device):
    module = FP8Linear.from_linear(make(torch.float16, device), 17.0 if static else None)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = FP8Linear(96, 80, static_activation=static, device=device, dtype=torch.float16)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = normal((5, 96), torch.float16, device, seed=5)
    assert torch.equal(other(x), module(x))
    assert set(module.state_dict()) == {"weight", "weight_scale", "bias"} | (
        {"activation_scale"} if static else set()
    )
    assert torch.equal(copy.deepcopy(module)(x), module(x))


@pytest.mark.parametrize("static", [False, True])
def test_a_float_checkpoint_is_quantised_while_it_loads(static, device):
    linear = make(torch.float32, device)
    module = FP8Linear(96, 80, static_activation=static, device=device)
    state = linear.state_dict()
    module.load_state_dict(state)
    assert state["weight"].dtype == torch.float32, "the caller's state dict must stay as it is"
    wanted = FP8Linear.from_linear(linear, 1.0 if static else None)
    assert torch.equal(codes_of(module.weight), codes_of(wanted.weight))
    assert torch.equal(module.weight_scale, wanted.weight_scale)
    assert torch.equal(module.bias, linear.bias)


def test_casts_keep_codes_and_scales(device):
    module = FP8Linear.from_linear(make(torch.float32, device), 3.0)
    codes = codes_of(module.weight).clone()
    for cast in (module.half(), module.to(torch.bfloat16), module.double(), module.to(device)):
        assert cast.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(codes_of(cast.weight), codes)
        assert cast.weight_scale.dtype == torch.float32
        assert cast.activation_scale.dtype == torch.float32
    assert module.bias.dtype == torch.float64
    moved = module.to("meta")
    assert moved.weight.device.type == "meta"
    assert moved(torch.empty(2, 96, device="meta")).shape == (2, 80)


def test_there_is_no_gradient(device):
    module = FP8Linear.from_linear(make(torch.float32, device))
    x = torch.randn(3, 96, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"not implemented|derivative|not support"):
        module(x).sum().backward()


class Model(nn.Module):
    """Layers in several places: nested, shared, in attention, and a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(OrderedDict(up=nn.Linear(32, 64), act=nn.GELU(), down=nn.Linear(64, 32)))
            for _ in range(2)
        )
        self.shared = self.blocks[0].up
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.attention(x, x, x)[0]
        return self.head(x + self.shared(x)[..., :32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_swapped_in_place(dtype, device):
    torch.manual_seed(2)
    model = Model().to(device, dtype)
    tokens = torch.randint(0, 11, (2, 9), device=device)
    before = model(tokens).detach()
    assert quantize_model_(model, lambda name, layer: name != "head" and layer.in_features == 32) is model
    assert isinstance(model.blocks[0].up, FP8Linear)
    assert model.shared is model.blocks[0].up
    assert type(model.blocks[1].down) is nn.Linear
    assert type(model.head) is nn.Linear
    assert type(model.attention.out_proj) is not FP8Linear
    with torch.no_grad():
        after = model(tokens)
    assert after.dtype == dtype
    error = (after - before).norm() / before.norm()
    assert 0 < float(error) < 0.06
    quantize_model_(model)
    assert isinstance(model.head, FP8Linear)
    assert sum(isinstance(m, FP8Linear) for m in model.modules()) == 5


def test_calibrated_activations(device):
    torch.manual_seed(3)
    model = Model().to(device)
    batches = [torch.randint(0, 11, (2, 9), device=device) for _ in range(3)]
    scales = calibrate_activation_scales(model, batches)
    assert set(scales) >= {"blocks.0.up", "blocks.1.down", "head"}
    largest = max(float(model.embed(b).detach().abs().max()) for b in batches)
    assert float(scales["blocks.0.up"]) <= 448 / largest * (1 + 1e-6)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        before = model(batches[0])
        names = {"blocks.0.up", "blocks.1.down"}
        quantize_model_(model, activation_scales={name: scales[name] for name in names})
        assert model.blocks[0].up.activation_scale is not None
        assert model.head.activation_scale is None
        assert float((model(batches[0]) - before).norm() / before.norm()) < 0.08


def test_keyword_batches():
    model = nn.Sequential(nn.Linear(4, 3))
    by_name = calibrate_activation_scales(model, [{"input": torch.full((1, 4), 2.0)}])
    assert float(by_name["0"]) == 224.0
    assert float(calibrate_activation_scales(model, [(torch.zeros(1, 4),)])["0"]) == 1.0


def test_calibration_sees_keywords_and_refuses_what_is_no_tensor():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 3)

        def forward(self, x):
            return self.l(input=x)

    assert float(calibrate_activation_scales(ByName(), [torch.full((1, 4), 2.0)])["l"]) == 224.0
    with pytest.raises(TypeError, match="the input of layer 'l' must be a Tensor, got list"):
        calibrate_activation_scales(ByName(), [[torch.zeros(1, 4)]])


def test_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    with pytest.raises(UnsupportedDtypeError, match=r"layer '1': linear\.weight must have dtype"):
        quantize_model_(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="layer '1': activation_scale must be positive and finite"):
        quantize_model_(model, activation_scales={"0": 2.0, "1": math.nan})
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_layers_that_occur_twice_stay_one_layer():
    def twice():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return model.append(model[0])

    model = quantize_model_(twice(), activation_scales={"2": 5.0})
    assert model[0] is model[2]
    assert float(model[0].activation_scale) == 5.0
    assert model[1].activation_scale is None
    quantize_model_(twice(), activation_scales={"0": 5.0, "2": torch.tensor(5.0)})
    with pytest.raises(ValueError, match="must have one scale for a layer of several names, got"):
        quantize_model_(twice(), activation_scales={"0": 5.0, "2": 6.0})
    model = quantize_model_(twice(), lambda name, _: name != "2")
    assert [type(layer) for layer in model] == [nn.Linear, FP8Linear, nn.Linear]
    assert model[0] is model[2]


def _state(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**FP8Linear(32, 16, static_activation=True).state_dict(), **changes}


BAD_STATES = {
    "nan scale": (
        _state(weight_scale=torch.full((16, 1), math.nan)),
        "weight_scale must be positive and finite",
    ),
    "zero scale": (_state(weight_scale=torch.zeros(16, 1)), "weight_scale must be positive and finite"),
    "activations": (
        _state(activation_scale=torch.tensor(-1.0)),
        "activation_scale must be positive and finite",
    ),
    "e5m2": (
        _state(weight=torch.zeros(16, 32).to(torch.float8_e5m2)),
        "weight must have dtype .*float8_e5m2",
    ),
    "double": (nn.Linear(32, 16).double().state_dict(), "weight must have dtype .*float64"),
    "decoded": (_state(weight=torch.zeros(16, 32)), "where weight_scale is given, got torch.float32"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_states_are_refused(name):
    state, message = BAD_STATES[name]
    module = FP8Linear(32, 16, static_activation=True)
    before = codes_of(module.weight).clone()
    with pytest.raises(RuntimeError, match=f"FP8Linear: .*{message}"):
        module.load_state_dict(state)
    assert torch.equal(codes_of(module.weight), before)


def test_compiled_forward(device):
    module = FP8Linear.from_linear(make(torch.float32, device))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (4, 9):
            x = normal((2, rows, 96), torch.float32, device, seed=rows)
            assert torch.equal(compiled(x), module(x))


def test_refusals():
    linear = nn.Linear(4, 3)
    with pytest.raises(TypeError, match=r"use FP8Linear\.from_linear"):
        quantize_model_(linear)
    with pytest.raises(TypeError, match=r"linear must be an nn\.Linear, got Embedding"):
        FP8Linear.from_linear(nn.Embedding(2, 3))
    with pytest.raises(ValueError, match="must name swapped layers, got absent"):
        quantize_model_(nn.Sequential(linear), activation_scales={"absent": 1.0})
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="activation_scale must be positive and finite"):
            FP8Linear.from_linear(linear, wrong)
    for wrong, came in (("a", "str"), (True, "bool"), ([1.0], "list")):
        with pytest.raises(TypeError, match=f"activation_scale must be a number or a Tensor, got {came}"):
            FP8Linear.from_linear(linear, wrong)
        with pytest.raises(
            TypeError, match=f"layer '0': activation_scale must be a number or a .*, got {came}"
        ):
            quantize_model_(nn.Sequential(linear), activation_scales={"0": wrong})
    with pytest.raises(
        TypeError, match="quantize_model_: activation_scales must map names to scales, got list"
    ):
        quantize_model_(nn.Sequential(linear), activation_scales=[1.0])
    for f, name in (
        (quantize_model_, "quantize_model_"),
        (lambda m, wanted: calibrate_activation_scales(m, [], wanted), "calibrate_activation_scales"),
    ):
        with pytest.raises(TypeError, match=f"{name}: filter must be callable or None, got int"):
            f(nn.Sequential(linear), 3)
    with pytest.raises(ShapeMismatchError, match="activation_scale must have one element"):
        FP8Linear.from_linear(linear, torch.ones(3))
    with pytest.raises(ShapeMismatchError, match="the last dim of x must be in_features = 4"):
        FP8Linear.from_linear(linear)(torch.zeros(2, 5))
    with pytest.raises(ShapeMismatchError, match="the last dim of x must be in_features = 4"):
        FP8Linear.from_linear(linear)(torch.zeros(()))
    with pytest.raises(UnsupportedDtypeError, match=r"linear\.weight must have dtype"):
        FP8Linear.from_linear(nn.Linear(4, 3, dtype=torch.float64))
    with pytest.raises(UnsupportedDtypeError, match=r"^FP8Linear: dtype must be"):
        FP8Linear(4, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="FP8Linear: in_features must be an int, got float"):
        FP8Linear(2.0, 3)
    with pytest.raises(ValueError, match="FP8Linear: in_features must be between 0 and"):
        FP8Linear(-1, 3)
    layer = FP8Linear(4, 3)
    with pytest.raises(TypeError, match="FP8Linear: x must be a Tensor, got list"):
        layer([1.0])
    with pytest.raises(UnsupportedDtypeError, match="FP8Linear: x must have dtype"):
        layer(torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(
        DeviceError, match=r"FP8Linear: x must be on the device of weight \(cpu\), got meta"
    ) as caught:
        layer(torch.zeros(2, 4, device="meta"))
    assert caught.value.tensor_name == "x"
    for wrong in (3, None):
        with pytest.raises(TypeError, match=r"quantize_model_: module must be an nn\.Module, got"):
            quantize_model_(wrong)
        with pytest.raises(
            TypeError, match=r"calibrate_activation_scales: module must be an nn\.Module, got"
        ):
            calibrate_activation_scales(wrong, [])
    assert "activation=static" in repr(FP8Linear(4, 3, static_activation=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_reaches_it_as_it_does_a_linear_layer(dtype, device):
    linear = make(torch.float32, device)
    module, x = FP8Linear.from_linear(linear), normal((5, 96), torch.float32, device, seed=6)
    with torch.autocast(device, dtype=dtype):
        y, of_linear = module(x), linear(x)
        with torch.autocast(device, enabled=False):
            assert module(x).dtype == torch.float32
    assert y.dtype == of_linear.dtype == dtype
    assert torch.equal(y, module(x.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layer_of_tree_attention_is_quantised_like_any_model(dtype, device):
    layer = HTreeAttention(64, 4, 2, top_k=4, max_top_nodes=64, device=device, dtype=dtype)
    x = normal((2, 70, 64), dtype, device, seed=7)
    with torch.no_grad():
        before = layer(x)
        after = quantize_model_(layer)(x)
    assert all(type(child) is FP8Linear for child in layer.children())
    assert after.dtype == dtype
    assert bool((after.float() - before.float()).norm() < 0.15 * before.float().norm())
    with pytest.raises(UnsupportedDtypeError, match="x"):
        layer(x.double())


def test_the_layer_of_tree_attention_takes_projections_without_a_weight():
    class Int8Linear(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.scale = linear.weight.detach().abs().max() / 127
            self.codes = (linear.weight.detach() / self.scale).round().to(torch.int8)

        def forward(self, x):
            return x @ (self.codes.to(x.dtype) * self.scale.to(x.dtype)).t()

    layer = HTreeAttention(16, 2)
    x = normal((1, 9, 16), torch.float32, "cpu", seed=8)
    before = layer(x)
    for name, child in list(layer.named_children()):
        setattr(layer, name, Int8Linear(child))
    assert bool((layer(x) - before).norm() < 0.05 * before.norm())
