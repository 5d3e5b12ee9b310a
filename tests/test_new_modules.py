"""What a module holds after a start on the device meta: what a fresh one holds.

FSDP2 and ``torch.nn.utils.skip_init`` make modules on meta, ``to_empty`` gives them memory with whatever it held, and
``reset_parameters`` of every submodule fills it (FSDP1 calls both by itself).
"""

import pytest
import torch
from torch import Tensor, nn

from htree_ops import FP8Linear, quantize_model_
from tests.support.module_makers import MAKERS, NAMED, public_modules


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and bits; torch compares no float8."""
    rows = [x.detach().reshape(-1).view(torch.uint8) for x in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*rows)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that no state dict has too."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def started(module: nn.Module, device: str) -> nn.Module:
    """``module``, which is on meta, with memory of NaN, and then reset."""
    module.to_empty(device=device)
    with torch.no_grad():
        for x in tensors_of(module).values():
            x.fill_(torch.nan)
    torch.manual_seed(0)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return module


def test_no_module_is_missing():
    assert public_modules() == set(MAKERS)


@pytest.mark.parametrize("name", NAMED)
def test_a_module_from_meta_is_a_fresh_one(name, device):
    make = NAMED[name]
    torch.manual_seed(0)
    fresh = tensors_of(make(device))
    module = make("meta")
    found = tensors_of(started(module, device))
    assert found.keys() == fresh.keys()
    for key, wanted in fresh.items():
        assert found[key].float().isfinite().all(), key
        assert found[key].requires_grad == wanted.requires_grad, key
        assert same_bytes(found[key], wanted), key
    for part in module.modules():  # FSDP1 asks it of every module with tensors of its own
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        assert not own or hasattr(part, "reset_parameters"), type(part)


def test_a_quantised_layer_draws_in_the_dtype_that_it_was_made_in(device):
    """Whatever its bias was cast to since, and however it was made."""
    for dtype in (torch.float32, torch.float16):
        linear = nn.Linear(64, 32, dtype=dtype, device=device)
        layer = FP8Linear.from_linear(linear, activation_scale=3.0).bfloat16()
        torch.manual_seed(0)
        fresh = FP8Linear(64, 32, dtype=dtype, static_activation=True, device=device).bfloat16()
        torch.manual_seed(0)
        layer.reset_parameters()
        assert same_bytes(layer.weight, fresh.weight)
        assert same_bytes(layer.weight_scale, fresh.weight_scale)
        assert float(layer.activation_scale) == 1.0


def test_a_quantised_model_from_meta(device):
    torch.manual_seed(0)
    fresh = quantize_model_(nn.Sequential(nn.Linear(32, 16, device=device), nn.Linear(16, 8, device=device)))
    model = quantize_model_(nn.Sequential(nn.Linear(32, 16, device="meta"), nn.Linear(16, 8, device="meta")))
    found = tensors_of(started(model, device))
    for key, wanted in tensors_of(fresh).items():
        assert same_bytes(found[key], wanted), key
