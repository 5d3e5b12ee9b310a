"""patch_model_: the same model with fused parts, and back; models with FP8 layers on disk."""

import copy
import json
from typing import Any

import pytest
import torch
from small_models import EXACT, MODELS, assert_near, logits_and_gradients, make_ids, make_model, padded_mask
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from htree_ops import FP8Linear, quantize_model_
from htree_ops.integrations import patch_model_, unpatch_model_
from htree_ops.integrations.patch import FusedQwen3Attention, _trained_norm, rotate


def classes(model: nn.Module) -> list[type]:
    return [type(part) for part in model.modules()]


@pytest.mark.parametrize("kind", MODELS)
def test_a_patched_model_is_the_same_model(kind, device):
    model, ids = make_model(kind, attention="eager", device=device), make_ids(device=device)
    mask = padded_mask(ids)

    def results():
        out, gradients = logits_and_gradients(model, ids, attention_mask=mask)
        return [out, *gradients]

    before, kinds, state = results(), classes(model), model.state_dict()
    changed = patch_model_(model)
    layers = [f"model.layers.{i}" for i in range(2)]
    assert changed["mlp"] == [f"{layer}.mlp" for layer in layers]
    assert changed["attention"] == changed["rotary"] == [f"{layer}.self_attn" for layer in layers]
    assert set(changed["norms"]) >= {"model.norm", *(f"{layer}.input_layernorm" for layer in layers)}
    assert (FusedQwen3Attention in classes(model)) == (kind == "qwen3")
    assert model.config._attn_implementation == "htree"
    assert_near(results(), before)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    assert unpatch_model_(model) is model
    assert classes(model) == kinds
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(got, want) for got, want in zip(results(), before, strict=True))


@pytest.mark.parametrize("part", ["attention", "norms", "rotary", "mlp"])
def test_parts_are_patched_one_by_one(part):
    model = make_model("qwen3", attention="eager")
    kinds = classes(model)
    changed = patch_model_(model, **{name: name == part for name in ("attention", "norms", "rotary", "mlp")})
    assert {name for name, names in changed.items() if names} == {part}
    assert (classes(model) != kinds) == (part != "attention")
    unpatch_model_(model)
    assert classes(model) == kinds


class Calls(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket).removeprefix("htree."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rotation_is_that_of_the_model(dtype, rows, device):
    generator = torch.Generator().manual_seed(0)
    q, k, dq, dk = (
        torch.randn(2, 7, heads, 24, generator=generator).to(device, dtype) for heads in (4, 2, 4, 2)
    )
    positions = torch.randint(-5, 9000, (rows, 7, 1), generator=generator)
    angles = (positions * 10000 ** (-torch.arange(12) / 12)).repeat(1, 1, 2)
    cos, sin = ((1.3 * table).to(device, dtype) for table in (angles.cos(), angles.sin()))

    def results(function, *inputs):
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        out = function(*inputs)
        return [*out, *torch.autograd.grad(out, inputs, [x.to(out[0].dtype) for x in (dq, dk)])]

    with Calls() as calls:
        got = results(lambda q, k: rotate(q, k, cos, sin), q, k)
    assert calls.names.count("rope") == 4
    assert not {"aten.mul", "aten.cat", "aten.neg", "aten.add"} & set(calls.names)
    wanted = results(
        lambda q, k: apply_rotary_pos_emb(q, k, cos.double(), sin.double(), unsqueeze_dim=2),
        q.double(),
        k.double(),
    )
    for ours, exact in zip(got, wanted, strict=True):
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, exact.to(dtype))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scaling", ["default", "yarn", "dynamic"])
def test_rotary_positions_of_any_kind(scaling, kind, device):
    rope = {"rope_type": scaling, "rope_theta": 10000.0}
    rope |= {} if scaling == "default" else {"factor": 4.0, "original_max_position_embeddings": 32}
    model = make_model(kind, attention="eager", device=device, rope_parameters=rope)
    ids = make_ids(device=device)
    positions = torch.stack((torch.arange(40), (7 * torch.arange(40) + 3) % 60)).to(device)
    with torch.no_grad():
        wanted = model(ids, position_ids=positions, use_cache=False).logits
        patch_model_(model, attention=False, norms=False, mlp=False)
        got = model(ids, position_ids=positions, use_cache=False).logits
    assert bool((got - wanted).norm() <= 1e-5 * wanted.norm())


def test_where_the_tree_rotates_nothing_else_does():
    model, ids = make_model(options={**EXACT, "positions": "compact"}), make_ids()
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        patch_model_(model, norms=False, mlp=False)
        with Calls() as calls:
            got = model(ids, use_cache=False).logits
    assert "rope" not in calls.names
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("shape", [(2, 3, 6), (3, 256), (1, 2, 3, 24), (2, 3, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_training_is_the_norm(dtype, shape, device):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[-1], generator=generator)).to(device, dtype)

    def results(function, *inputs):
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, dy.to(out.dtype))]

    got = results(lambda x, weight: _trained_norm(x, weight, 1e-5), x, weight)
    wanted = results(
        lambda x, weight: nn.functional.rms_norm(x, weight.shape, weight, 1e-5), x.double(), weight.double()
    )
    for ours, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, exact.to(dtype))


def test_what_has_no_fused_form_stays():
    model = make_model(attention="eager", mlp_bias=True)
    assert patch_model_(model)["mlp"] == []
    assert patch_model_(make_model(attention="eager", hidden_act="relu"))["mlp"] == []
    with pytest.raises(ValueError, match="patch_model_: model must hold modules among LlamaRMSNorm"):
        patch_model_(model, attention=False, norms=False, rotary=False)
    with pytest.raises(TypeError, match="model must be a PreTrainedModel, got Linear"):
        patch_model_(nn.Linear(2, 2))


def test_generation_of_a_patched_model():
    ids = make_ids(length=30)
    mask = padded_mask(ids)
    model = make_model("qwen3", attention="eager")
    call = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **call)
    patch_model_(model)
    assert torch.equal(model.generate(ids, **call), wanted)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("norms", [False, True])
def test_a_patched_model_compiles(norms, kind):
    torch._dynamo.reset()
    model, ids = make_model(kind, num_hidden_layers=1), make_ids()
    patch_model_(model, norms=norms)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(logits_and_gradients(m, ids) for m in (compiled, model)))


def test_fp8_is_for_good():
    model, ids = make_model(attention="eager"), make_ids()
    with torch.no_grad():
        before = model(ids).logits
        changed = patch_model_(model, fp8=True)
        after = model(ids).logits
    assert changed["fp8"] == sorted(
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in ("mlp.down_proj", *(f"self_attn.{x}_proj" for x in "qkvo"))
    )
    assert bool((after - before).norm() < 0.3 * before.norm())
    with pytest.raises(ValueError, match="load its checkpoint again"):
        unpatch_model_(model)


class Adapter(nn.Module):
    """A layer with another beside it; like those of peft it shows the weight of the first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.beside = base, nn.Linear(base.in_features, base.out_features)

    @property
    def weight(self) -> nn.Parameter:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.beside(x)


def add_adapters(model: nn.Module) -> None:
    torch.manual_seed(5)
    for name, part in list(model.named_modules()):
        if name.endswith(("gate_proj", "up_proj")):
            model.set_submodule(name, Adapter(part))


def add_hooks(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if name.endswith(("gate_proj", "q_norm")):
            part.register_forward_hook(lambda part, args, out: 2 * out)


def replace_forwards(model: nn.Module) -> None:
    """As accelerate does, whose hooks fetch the weights."""
    for name, part in model.named_modules():
        if name.endswith(("up_proj", "k_norm")):
            part.forward = lambda x, forward=part.forward: 2 * forward(x)


def replace_activations(model: nn.Module) -> None:
    for part in model.model.layers:
        part.mlp.act_fn = nn.ReLU()


def hook_activations(model: nn.Module) -> None:
    for part in model.model.layers:
        part.mlp.act_fn.register_forward_hook(lambda part, args, out: 2 * out)


def replace_forwards_of_activations(model: nn.Module) -> None:
    for part in model.model.layers:
        part.mlp.act_fn.forward = torch.relu


def add_biases(model: nn.Module) -> None:
    for part in model.model.layers:
        part.mlp.up_proj.bias = nn.Parameter(torch.ones(48))


def quantise(model: nn.Module) -> None:
    quantize_model_(model, lambda name, _: name.endswith("gate_proj"))


CHANGES = [
    add_adapters,
    add_hooks,
    replace_forwards,
    quantise,
    replace_activations,
    hook_activations,
    replace_forwards_of_activations,
    add_biases,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_changes_after_the_patch_counts(kind, change, device):
    model, patched = (make_model(kind, attention="eager", device=device) for _ in range(2))
    patch_model_(patched)
    ids = make_ids(device=device)
    with torch.no_grad():
        before = model(ids).logits
        for x in (model, patched):
            change(x)
            x.to(device)
        wanted, found = model(ids).logits, patched(ids).logits
    effect = (wanted - before).norm() / before.norm()
    assert effect > 1e-3
    assert bool((found - wanted).norm() <= 0.2 * effect * wanted.norm())


@pytest.mark.parametrize("change", [replace_activations, add_biases])
def test_what_changes_after_a_compiled_call_counts(change):
    torch._dynamo.reset()
    model, patched = (make_model(attention="eager", num_hidden_layers=1) for _ in range(2))
    patch_model_(patched, attention=False)
    compiled, ids = torch.compile(patched, fullgraph=True, backend="eager"), make_ids()
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
        change(model)
        change(patched)
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_arguments_of_the_wrong_kind():
    model = make_model(attention="eager")
    for name in ("attention", "norms", "mlp", "fp8", "rotary"):
        with pytest.raises(TypeError, match=f"patch_model_: {name} must be a bool, got str"):
            patch_model_(model, **{name: "no"})
    with pytest.raises(TypeError, match="unpatch_model_: model must be a PreTrainedModel, got NoneType"):
        unpatch_model_(None)


def test_patching_again_changes_nothing():
    model = make_model(attention="sdpa")
    patch_model_(model)
    kinds = classes(model)
    nothing = patch_model_(model, attention=False)
    assert not any(nothing.values())
    assert classes(model) == kinds
    unpatch_model_(unpatch_model_(model))
    assert model.config._attn_implementation == "sdpa"


def test_fp8_names_what_a_call_has_quantised():
    """GPT-2 has no layer to quantise."""
    model = make_model(attention="eager")
    first = patch_model_(model, attention=False, fp8=True)["fp8"]
    assert (len(first), patch_model_(model, attention=False, fp8=True)["fp8"]) == (10, [])
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    assert patch_model_(model, fp8=True)["fp8"] == []
    assert unpatch_model_(model).config._attn_implementation == "eager"


# ---- models with FP8 layers on disk


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantised_model_is_loaded_with_its_scales(dtype, static, tmp_path):
    model, ids = make_model("qwen3").to(dtype), make_ids()
    names = [name for name, part in model.named_modules() if type(part) is nn.Linear and name != "lm_head"]
    quantize_model_(
        model,
        lambda name, _: name != "lm_head",
        activation_scales=dict.fromkeys(names, 2.0) if static else None,
    )
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved == {
        "quant_method": "htree_fp8",
        "layers": dict.fromkeys(names, "static" if static else "dynamic"),
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="htree", dtype=dtype)
    assert [name for name, part in again.named_modules() if type(part) is FP8Linear] == names
    for (name, ours), theirs in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours.float(), theirs.float()), name
    model.model.rotary_emb = again.model.rotary_emb  # .to(dtype) has rounded the one of the model
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    again.save_pretrained(tmp_path / "second")
    assert (
        json.loads((tmp_path / "second" / "config.json").read_text())["quantization_config"]["layers"]
        == saved["layers"]
    )
    part = AutoModel.from_pretrained(tmp_path, attn_implementation="htree", dtype=dtype)
    with torch.no_grad():
        wanted = model.model(ids).last_hidden_state
        assert torch.equal(part(ids).last_hidden_state, wanted)


def test_a_loaded_model_keeps_the_layers_that_were_left(tmp_path):
    """Those of an MLP that was fused; loaded with FP8 layers it has no fused form."""
    patch_model_(model := make_model(), fp8=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="htree")
    kinds = [type(part.mlp.gate_proj) for part in again.model.layers]
    changed = patch_model_(again, fp8=True)
    assert (changed["mlp"], changed["fp8"]) == ([], [])
    assert [type(part.mlp.gate_proj) for part in again.model.layers] == kinds == [nn.Linear] * 2


def test_a_model_without_the_quantised_layers_is_refused(tmp_path):
    quantize_model_(model := make_model(options=EXACT), lambda name, _: name.endswith("q_proj"))
    model.config.quantization_config["layers"] = {"other.q_proj": "dynamic"}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers that were quantised \(other\.q_proj\), got none of them"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
