"""Calls do not depend on torch's default device: what they make beside their arguments goes where the arguments are."""

import ast
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors

import htree_ops
from htree_ops import (
    CompressedKVCache,
    FP8Linear,
    FusedGatedMLP,
    FusedRMSNormRoPE,
    HadamardTransform,
    HTreeAttention,
    MustafarAttention,
    TreeKVCache,
    TreeOptions,
    compat,
)
from htree_ops.compat import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput, TensorSpec
from htree_ops.ops.compressed_kv import key_weight_from_queries
from htree_ops.ops.fp8 import fp8_scale_inv
from htree_ops.ops.tree_cache.state import PAGED
from tests.support.cases import normal
from tests.support.module_makers import MAKERS, NAMED
from tests.test_compiled_errors import CALLS

#: Makes the arguments of a call on a device, and returns the call.
Prepare = Callable[[str], Callable[[], Any]]


def rows(device: str, *shape: int, seed: int = 0) -> Tensor:
    return normal(shape, torch.float32, device, seed)


# ---- functions


def placed(value: Any, device: str) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


#: Of E4M3; they are zeros in the table, which a call refuses.
SCALES = ("scale", "a_scale", "b_scale")


def of_table(function: Callable[..., Any], arguments: dict[str, Any]) -> Prepare:
    def prepare(device: str) -> Callable[[], Any]:
        mine = {name: placed(value, device) for name, value in arguments.items()}
        mine |= {name: torch.ones_like(x) for name, x in mine.items() if name in SCALES and x is not None}
        if "device" in inspect.signature(function).parameters:
            mine["device"] = device
        return lambda: function(**mine)

    return prepare


def linears(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16, device=device), nn.Linear(16, 8, device=device))


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = (nn.Linear(16, 24, bias=False, device=device) for _ in range(2))
        self.down_proj = nn.Linear(24, 16, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def on_model(call: Callable[[nn.Sequential, Tensor], Any]) -> Prepare:
    def prepare(device: str) -> Callable[[], Any]:
        model, x = linears(device), rows(device, 4, 32)
        return lambda: call(model, x)

    return prepare


def on_rows(call: Callable[..., Any], *shapes: tuple[int, ...]) -> Prepare:
    def prepare(device: str) -> Callable[[], Any]:
        tensors = [rows(device, *shape, seed=seed) for seed, shape in enumerate(shapes)]
        return lambda: call(*tensors)

    return prepare


def index_losses(device: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    layer, x = indexed(device), rows(device, 1, 40, 64)

    def call() -> Any:
        torch.manual_seed(1)
        with htree_ops.index_losses(rows=4) as losses:
            layer(x)
        return losses.mean()

    return call


def fitted(device: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    layer, x = indexed(device), rows(device, 1, 40, 64)

    def call() -> Any:
        torch.manual_seed(1)
        htree_ops.fit_index(layer, [x, x], steps=2, rows=4, index_dim=layer.index_dim)
        return layer.index_key_weight.detach()

    return call


NORM = ((2, 3, 8), (8,), (3, 4), (3, 4))
MLP = ((1, 2, 4), (3, 4), (3, 4))
FUNCTIONS: dict[str, Prepare] = {
    **{function.__name__: of_table(function, arguments) for function, arguments, _ in CALLS},
    "calibrate_activation_scales": on_model(
        lambda m, x: htree_ops.ops.fp8.calibrate_activation_scales(m, [x])
    ),
    "quantize_model_": on_model(
        lambda m, _: htree_ops.quantize_model_(
            m, activation_scales={"0": 2.0, "1": torch.tensor(3.0, device="cpu")}
        )
    ),
    "index_losses": index_losses,
    "fit_index": fitted,
    "fp8_scale_inv": on_rows(fp8_scale_inv, (3,)),
    "fp8_quantize by a number": on_rows(lambda x: htree_ops.fp8_quantize(x, 2.0, "block", block=3), (2, 8)),
    "fp8_fake_quant by a number": on_rows(lambda x: htree_ops.fp8_fake_quant(x, 2.0, "channel"), (2, 8)),
    "handle_fp8_overflow": on_rows(lambda x: compat.handle_fp8_overflow(x, 1000.0), (2, 8)),
    "key_weight_from_queries": on_rows(
        lambda q: key_weight_from_queries(q, 2, lengths=[2, 3]), (2, 3, 4, 64)
    ),
    "tree_attention with frequencies": on_rows(
        lambda q, k: htree_ops.tree_attention(q, k, k, inv_freq=[1.0, 0.5], return_lse=True),
        (1, 9, 4, 4),
        (1, 9, 2, 4),
    ),
    "validate_rmsnorm_rope_inputs": on_rows(compat.validate_rmsnorm_rope_inputs, *NORM),
    "validate_gated_mlp_inputs": on_rows(compat.validate_gated_mlp_inputs, *MLP),
    "validate_fp8_quantize_inputs": on_rows(compat.validate_fp8_quantize_inputs, (2, 8)),
    "validate_fp8_gemm_inputs": lambda device: (
        lambda tensors: lambda: compat.validate_fp8_gemm_inputs(*tensors)
    )(fp8_operands(device)),
    "RMSNormRoPEInput": on_rows(lambda *x: RMSNormRoPEInput(*x).validate(), *NORM),
    "GatedMLPInput": on_rows(lambda *x: GatedMLPInput(*x).validate(), *MLP),
    "FP8GEMMInput": lambda device: (lambda tensors: lambda: FP8GEMMInput(*tensors).validate())(
        fp8_operands(device)
    ),
    "TensorSpec": lambda device: lambda: TensorSpec((2, 3), torch.int32, device).create_tensor(),
    "TreeOptions": on_rows(lambda x: TreeOptions(inv_freq=x.cpu().abs()).to_dict(), (4,)),
}


def fp8_operands(device: str) -> list[Tensor]:
    one = torch.ones((), device=device)
    return [*(rows(device, 16, 16, seed=seed).to(torch.float8_e4m3fn) for seed in (0, 1)), one, one]


# ---- modules

TREE = {"compression_rate": 4, "top_k": 4, "max_top_nodes": 16}


def on_module(
    make: Callable[[str], nn.Module], call: Callable[..., Any], *shapes: tuple[int, ...], seed: int = 0
) -> Prepare:
    def prepare(device: str) -> Callable[[], Any]:
        torch.manual_seed(seed)
        module, tensors = make(device), [rows(device, *shape, seed=i) for i, shape in enumerate(shapes)]
        return lambda: (call(module, *tensors), module)

    return prepare


def attention(device: str) -> HTreeAttention:
    return HTreeAttention(32, 4, 2, **TREE, device=device)


def indexed(device: str) -> HTreeAttention:
    return HTreeAttention(64, 4, 2, index_dim=16, selection_span=None, **TREE, device=device)


def mustafar(device: str, **options: Any) -> MustafarAttention:
    return MustafarAttention(
        4, 2, 64, window=4, chunk=8, max_positions=64, dtype=torch.float32, device=device, **options
    )


def from_caches(
    layer: nn.Module, prompt: tuple[Tensor, ...], step: tuple[Tensor, ...], **options: Any
) -> Any:
    """A prompt and a step from a cache, which the call makes."""
    cache = layer.make_cache(2, 48)
    with torch.no_grad():
        return layer(*prompt, cache=cache, **options), layer(*step, cache=cache), cache


def masked(layer: nn.Module, x: Tensor) -> Any:
    mask = torch.zeros(2, 20, dtype=torch.bool, device=x.device)
    mask[1, 15:] = True
    documents = torch.tensor([0, 7, 20], dtype=torch.int32, device=x.device)
    return layer(x, key_padding_mask=mask), layer(x[:1], cu_seqlens=documents)


HEADS = ((2, 20, 4, 64), (2, 20, 2, 64), (2, 20, 2, 64))
ONE = ((2, 1, 4, 64), (2, 1, 2, 64), (2, 1, 2, 64))
LINEAR = NAMED["FP8Linear dynamic"], NAMED["FP8Linear static"]
MODULES: dict[str, Prepare] = {
    **{f"{name} made": lambda device, make=make: lambda: made(make, device) for name, make in NAMED.items()},
    **{
        f"{kind.__name__}.reset_parameters": on_module(NAMED[name], lambda m: seeded(m.reset_parameters))
        for kind, name in (
            (FP8Linear, "FP8Linear static"),
            (FusedGatedMLP, "FusedGatedMLP"),
            (FusedRMSNormRoPE, "FusedRMSNormRoPE"),
            (MustafarAttention, "MustafarAttention"),
        )
    },
    "FP8Linear.forward": on_module(LINEAR[0], lambda m, x: m(x), (3, 32)),
    "FP8Linear.forward static": on_module(LINEAR[1], lambda m, x: m(x), (3, 32)),
    "FP8Linear.from_linear": on_model(lambda m, _: FP8Linear.from_linear(m[0], 2.0)),
    "FP8Linear of a linear state": on_model(lambda m, _: loaded(m[0])),
    "FusedGatedMLP.forward": on_module(NAMED["FusedGatedMLP"], lambda m, x: m(x), (3, 16)),
    "FusedGatedMLP.from_module": on_module(Gated, lambda m, x: FusedGatedMLP.from_module(m)(x), (3, 16)),
    "FusedRMSNormRoPE.forward": on_module(
        NAMED["FusedRMSNormRoPE"], lambda m, *x: m(*x), (2, 3, 16), (3, 4), (3, 4)
    ),
    "HadamardTransform.forward": on_module(
        lambda device: HadamardTransform(2), lambda m, x: m(x), (1, 4, 3, 8)
    ),
    "HTreeAttention.forward": on_module(attention, lambda m, x: m(x), (2, 20, 32)),
    "HTreeAttention.forward masked": on_module(attention, masked, (2, 20, 32)),
    "HTreeAttention.forward with an index": on_module(indexed, lambda m, x: m(x), (2, 40, 64)),
    "HTreeAttention.index_of": on_module(indexed, lambda m, *x: m.index_of(*x), (2, 4, 16), (2, 2, 16)),
    "HTreeAttention.reset_parameters": on_module(indexed, lambda m: seeded(m.reset_parameters)),
    "HTreeAttention.from_documents": lambda device: (
        lambda: made(lambda place: HTreeAttention.from_documents(32, 4, top_k=4, device=place), device)
    ),
    "HTreeAttention.recommended": lambda device: (
        lambda: made(lambda place: HTreeAttention.recommended(32, 4, top_k=4, device=place), device)
    ),
    "HTreeAttention.make_cache": on_module(
        attention, lambda m, x, y: from_caches(m, (x,), (y,)), (2, 20, 32), (2, 1, 32)
    ),
    "MustafarAttention.forward": on_module(mustafar, lambda m, *x: m(*x, lengths=[20, 7]), *HEADS),
    "MustafarAttention.make_cache": on_module(
        mustafar, lambda m, *x: from_caches(m, x[:3], x[3:], lengths=[20, 7]), *HEADS, *ONE
    ),
    "MustafarAttention.make_cache weighted": on_module(
        lambda device: mustafar(device, output_aware=True, page_size=4),
        lambda m, *x: from_caches(m, x[:3], x[3:], lengths=[20, 0]),
        *HEADS,
        *ONE,
    ),
}


def made(make: Callable[[str], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    return make(device)


def seeded(call: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return call()


def loaded(linear: nn.Linear) -> FP8Linear:
    layer = FP8Linear(32, 16, device=linear.weight.device)
    layer.load_state_dict(linear.state_dict())
    return layer


# ---- caches


def tree_cache(device: str, capacity: int = 640, **options: Any) -> TreeKVCache:
    settings = {**TREE, "page_size": 16, "dtype": torch.float32, "device": device} | options
    return TreeKVCache(2, 2, 64, capacity, **settings)


def filled_tree_cache(device: str, n: int, seed: int, **options: Any) -> TreeKVCache:
    cache = tree_cache(device, **options)
    cache.append(rows(device, 2, n, 2, 64, seed=seed), rows(device, 2, n, 2, 64, seed=seed + 1))
    cache.attend(rows(device, 2, n, 4, 64, seed=seed + 2))
    return cache


TREE_CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"selection_stride": 4, "selection_span": 2},
    "packed": {"leaf_bits": 8},
}
#: By method a call: of the cache, of new tokens (keys, values and queries of a step and a prompt) and of a state.
TREE_METHODS: dict[str, Callable[[TreeKVCache, Any, Any], Any]] = {
    "append": lambda c, x, _: c.append(x["step"][1], x["step"][1], [1, 0]),
    "attend": lambda c, x, _: c.attend(x["step"][0], [2, 1], return_lse=True),
    "attend a prompt": lambda c, x, _: (
        c.append(x["prompt"][1], x["prompt"][1], [300, 280]),
        c.attend(x["prompt"][0], [300, 20]),
    ),
    "advance": lambda c, *_: c.advance(0),
    "check": lambda c, *_: c.check(),
    "decode": lambda c, x, _: c.decode(*x["step"], x["step"][1], [1, 2], return_lse=True),
    "fork": lambda c, *_: c.fork(0, 1),
    "free": lambda c, *_: c.free(1),
    "host_lengths": lambda c, *_: c.host_lengths(),
    "layer": lambda c, *_: (c.layer(0, 0), c.layer(1, 2)),
    "load_state_dict": lambda c, _, state: c.load_state_dict(state),
    "num_bytes": lambda c, *_: c.num_bytes(),
    "reorder_": lambda c, *_: c.reorder_([1, 0]),
    "reserve": lambda c, *_: c.reserve(5),
    "reset": lambda c, *_: c.reset(),
    "step_arguments": lambda c, *_: c.step_arguments(c.lengths.clone(), 2)[1],
    # memory that no token was written to may hold anything
    "state_dict": lambda c, *_: {name: x for name, x in c.state_dict().items() if name not in PAGED},
    "to": lambda c, *_: c.to(c.device),
    "truncate": lambda c, *_: c.truncate(36),
    "made": lambda c, *_: tree_cache(str(c.device)),
}


def on_tree_cache(method: str, options: dict[str, Any]) -> Prepare:
    def prepare(device: str) -> Callable[[], Any]:
        cache = filled_tree_cache(device, 40, 0, **options)
        new = {
            name: [rows(device, 2, n, heads, 64, seed=9 + heads) for heads in (4, 2)]
            for name, n in (("step", 2), ("prompt", 300))
        }
        state = filled_tree_cache(device, 21, 5, capacity=64, **options).state_dict()
        return lambda: (TREE_METHODS[method](cache, new, state), cache)

    return prepare


def compressed_cache(device: str, **options: Any) -> CompressedKVCache:
    settings = {"dtype": torch.float32, "device": device} | options
    return CompressedKVCache(2, 2, 64, 64, 20, 8, 4, 8, **settings)


COMPRESSED_CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "paged": {"page_size": 4},
    "transformed": {"hadamard_group": 2},
    "weighted": {},
}
COMPRESSED_METHODS: dict[str, Callable[[CompressedKVCache, Any, Any], Any]] = {
    "advance": lambda c, x, _: (c.settle(), c.write_token(x[1][:, :1], x[2][:, :1]), c.advance()),
    "append": lambda c, x, _: c.append(*x[1:], [9, 4]),
    "attend": lambda c, x, _: c.attend(x[0][:, :3], lengths=[2, 3]),
    "config": lambda c, *_: c.config(),
    "decode": lambda c, x, _: c.decode(*x, [9, 4]),
    "fork": lambda c, *_: c.fork(1, 0),
    "free": lambda c, *_: c.free(1),
    "load_state_dict": lambda c, _, state: c.load_state_dict(state),
    "num_bytes": lambda c, *_: c.num_bytes(),
    "prefill": lambda c, x, _: (c.reset(), c.prefill(*x[1:], [9, 4])),
    "host_lengths": lambda c, *_: c.host_lengths(),
    "reorder_": lambda c, *_: c.reorder_([1, 0]),
    "reset": lambda c, *_: c.reset(),
    "select": lambda c, *_: c.select([1, 1, 0]),
    "settle": lambda c, *_: c.settle(),
    "state_dict": lambda c, *_: c.state_dict(),
    "to": lambda c, *_: c.to(torch.bfloat16),
    "to_dense": lambda c, *_: c.to_dense(),
    "truncate": lambda c, *_: c.truncate([11, 17]),
    "write_token": lambda c, x, _: (c.settle(), c.write_token(x[1][:, :1], x[2][:, :1])),
    "made": lambda c, *_: compressed_cache(str(c.device), page_size=4),
}


def filled_compressed_cache(device: str, kind: str, lengths: list[int]) -> CompressedKVCache:
    cache = compressed_cache(device, **COMPRESSED_CACHES[kind])
    if kind == "weighted":
        cache.key_weight = rows(device, 2, 2, 64, seed=8).abs()
    cache.prefill(rows(device, 2, 30, 2, 64, seed=1), rows(device, 2, 30, 2, 64, seed=2), lengths)
    return cache


def on_compressed_cache(method: str, kind: str) -> Prepare:
    def prepare(device: str) -> Callable[[], Any]:
        cache = filled_compressed_cache(device, kind, [30, 21])
        new = [rows(device, 2, 9, heads, 64, seed=9 + heads) for heads in (4, 2, 2)]
        state = filled_compressed_cache(device, kind, [12, 3]).state_dict()
        return lambda: (COMPRESSED_METHODS[method](cache, new, state), cache)

    return prepare


CACHES: dict[str, Prepare] = {
    **{
        f"TreeKVCache.{method} {kind}": on_tree_cache(method, options)
        for method in TREE_METHODS
        for kind, options in TREE_CACHES.items()
    },
    **{
        f"CompressedKVCache.{method} {kind}": on_compressed_cache(method, kind)
        for method in COMPRESSED_METHODS
        for kind in COMPRESSED_CACHES
    },
}


# ---- the tests


def facts(x: Any) -> Any:
    """What a call has returned or changed, as plain values and tensors."""
    if isinstance(x, TreeKVCache):
        layers = [x.layer(b, layer) for b in range(x.batch) for layer in range(x.num_layers)]
        return facts([layers, x.lengths, x.block_table, x.ring.lists, x.ring.list_pos, str(x.device)])
    if isinstance(x, CompressedKVCache):
        return facts([x.state_dict(), x.k_win, x.comp_len, str(x.device)])
    if isinstance(x, nn.Module):
        return facts({**dict(x.named_parameters()), **dict(x.named_buffers())})
    if isinstance(x, dict):
        return {key: facts(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [facts(value) for value in x]
    if isinstance(x, Tensor):
        flat = x.detach().cpu().reshape(-1).view(torch.uint8)
        return (x.device.type, x.dtype, tuple(x.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    return x


@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES, *CACHES])
def test_a_call_does_not_depend_on_the_default_device(name, device):
    """CPU tensors beside the default device meta, CUDA tensors beside both that and the CPU."""
    prepare = {**FUNCTIONS, **MODULES, **CACHES}[name]
    with torch.device(device):
        wanted = facts(prepare(device)())
    for default in ("meta",) if device == "cpu" else ("meta", "cpu"):
        call = prepare(device)
        with torch.device(default):
            found = call()
        assert facts(found) == wanted, default


def methods(kind: type) -> set[str]:
    """The public methods that a class defines itself."""
    plain = {
        name for name, value in vars(kind).items() if inspect.isroutine(value) and not name.startswith("_")
    }
    return plain - {"extra_repr"}


def test_every_public_call_is_in_a_table():
    functions = {name for name in htree_ops.__all__ if inspect.isfunction(getattr(htree_ops, name))}
    assert {getattr(htree_ops, name).__name__ for name in functions} - FUNCTIONS.keys() == set()
    assert methods(TreeKVCache) - TREE_METHODS.keys() == set()
    assert methods(CompressedKVCache) - COMPRESSED_METHODS.keys() == set()
    for kind in MAKERS:
        assert {f"{kind.__name__}.{name}" for name in methods(kind)} - MODULES.keys() == set()


def test_every_factory_of_the_package_names_its_device():
    """``device=None`` says that the default device is meant."""
    factories = {function.__name__ for function in _device_constructors()}
    assert {"arange", "tensor", "empty"} <= factories
    missing = []
    for path in sorted(Path(htree_ops.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            given = {keyword.arg for keyword in node.keywords}
            is_factory = ast.unparse(node.func.value) == "torch" and node.func.attr in factories
            if is_factory and not given & {"device", None}:  # None is a mapping of keywords
                missing.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert missing == []
