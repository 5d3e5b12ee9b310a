"""The transforms of torch.func are refused in every op, and the message names the way out (docs/semantics §0.5)."""

import pytest
import torch
from torch.autograd import forward_ad

import htree_ops
from htree_ops import gated_mlp, tree_attention
from tests.support.cases import normal


def differentiable_calls(device: str):
    x = normal((1, 12, 2, 8), torch.float32, device, 1)
    weight, table = torch.ones(8, device=device), torch.ones(12, 8, device=device)
    square = normal((8, 8), torch.float32, device, 2)
    return x, {
        "tree_attention": lambda x: tree_attention(x, x, x),
        "tree_build": lambda x: torch.ops.htree.tree_build(x, x)[0],
        "gated_mlp": lambda x: gated_mlp(x, square, square),
        "causal_softmax": lambda x: htree_ops.causal_softmax(x[0, :, 0, :].mT),
        "head_rmsnorm_rope": lambda x: htree_ops.head_rmsnorm_rope(x, weight, table, table),
        "hadamard_transform": lambda x: htree_ops.hadamard_transform(x),
        "fp8_fake_quant": lambda x: htree_ops.fp8_fake_quant(x),
    }


@pytest.mark.parametrize("name", differentiable_calls("cpu")[1])
def test_torch_func_is_refused_with_the_way_out(name, device):
    x, calls = differentiable_calls(device)
    call = calls[name]
    way_out = r"torch\.autograd\.grad"
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(NotImplementedError, match=rf"functorch transforms.*{way_out}.*functional_call"):
            transform(lambda x: call(x).sum())(x)
    with pytest.raises(NotImplementedError, match=rf"forward-mode.*{way_out}"):
        torch.func.jvp(call, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=rf"forward-mode.*{way_out}"):
        call(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=r"torch\.func\.vmap is not supported; give the mapped dim"):
        torch.func.vmap(call)(torch.stack([x, x]))
    assert torch.func.functionalize(call)(x).shape == call(x).shape


def test_ops_without_a_gradient_refuse_vmap_too(device):
    x = normal((2, 3, 8), torch.float32, device, 1)
    with pytest.raises(NotImplementedError, match=r"fp8_quantize: torch\.func\.vmap"):
        torch.func.vmap(lambda y: htree_ops.fp8_quantize(y)[1])(x)
    with pytest.raises(NotImplementedError, match=r"attention_forward: torch\.func\.vmap"):
        torch.func.vmap(lambda y: torch.ops.htree.attention_forward(y, y, y)[0])(x.view(2, 1, 3, 1, 8))
