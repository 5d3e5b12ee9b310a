"""patch_model_: the same model with fused parts, and back; models with FP8 layers on disk."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import EXACT, MODELS, make_model, make_text
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from htree_ops import FP8Linear, quantize_model_
from htree_ops.integrations import patch_model_, unpatch_model_
from htree_ops.integrations.patch import FusedQwen3Attention

pytestmark = pytest.mark.usefixtures("one_thread")


def classes(model: nn.Module) -> list[type]:
    return [type(part) for part in model.modules()]


@pytest.mark.parametrize("kind", MODELS)
def test_a_patched_model_is_the_same_model(kind: str, device: str) -> None:
    model, ids = make_model(kind, attention="eager", device=device), make_text(device=device)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    before, kinds, state = results(), classes(model), model.state_dict()
    changed = patch_model_(model)
    layers = [f"model.layers.{i}" for i in range(2)]
    assert changed["mlp"] == [f"{layer}.mlp" for layer in layers]
    assert changed["attention"] == [f"{layer}.self_attn" for layer in layers]
    assert set(changed["norms"]) >= {"model.norm", *(f"{layer}.input_layernorm" for layer in layers)}
    assert (FusedQwen3Attention in classes(model)) == (kind == "qwen3")
    assert model.config._attn_implementation == "htree"
    patched = results()
    for got, want in zip(patched, before, strict=True):
        assert bool((got - want).norm() <= 1e-4 * want.norm() + 1e-6)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    assert unpatch_model_(model) is model
    assert classes(model) == kinds
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(got, want) for got, want in zip(results(), before, strict=True))


@pytest.mark.parametrize("part", ["attention", "norms", "mlp"])
def test_parts_are_patched_one_by_one(part: str) -> None:
    model = make_model("qwen3", attention="eager")
    kinds = classes(model)
    changed = patch_model_(model, **{name: name == part for name in ("attention", "norms", "mlp")})
    assert {name for name, names in changed.items() if names} == {part}
    assert (classes(model) != kinds) == (part != "attention")
    unpatch_model_(model)
    assert classes(model) == kinds


def test_what_has_no_fused_form_stays() -> None:
    model = make_model(attention="eager", mlp_bias=True)
    assert patch_model_(model)["mlp"] == []
    assert patch_model_(make_model(attention="eager", hidden_act="relu"))["mlp"] == []
    with pytest.raises(ValueError, match="patch_model_: model must hold modules among LlamaRMSNorm"):
        patch_model_(model, attention=False, norms=False)
    with pytest.raises(TypeError, match="model must be a PreTrainedModel, got Linear"):
        patch_model_(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_generation_of_a_patched_model() -> None:
    ids = make_text(length=30)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    model = make_model("qwen3", attention="eager")
    call = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **call)
    patch_model_(model)
    assert torch.equal(model.generate(ids, **call), wanted)


def test_a_patched_model_compiles() -> None:
    torch._dynamo.reset()
    model, ids = make_model("qwen3", num_hidden_layers=1), make_text()
    patch_model_(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_fp8_is_for_good() -> None:
    model, ids = make_model(attention="eager"), make_text()
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


# ---- models with FP8 layers on disk


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantised_model_is_loaded_with_its_scales(
    dtype: torch.dtype, static: bool, tmp_path: Path
) -> None:
    model, ids = make_model("qwen3").to(dtype), make_text()
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


def test_a_model_without_the_quantised_layers_is_refused(tmp_path: Any) -> None:
    quantize_model_(model := make_model(options=EXACT), lambda name, _: name.endswith("q_proj"))
    model.config.quantization_config["layers"] = {"other.q_proj": "dynamic"}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers that were quantised \(other\.q_proj\), got none of them"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
