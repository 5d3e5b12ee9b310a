"""The fused operators one after another, as a Transformer block uses them (docs/semantics)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from htree_ops import FP8Linear, FusedGatedMLP, FusedRMSNormRoPE, quantize_model_
from tests.support.cases import normal
from tests.support.compare import assert_no_worse_than_eager

HIDDEN, HEAD, INNER = 256, 64, 192
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Block(nn.Module):
    """x + down(gated_mlp(rmsnorm_rope(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = FusedRMSNormRoPE(HIDDEN, HEAD)
        self.mlp = FusedGatedMLP(HIDDEN, INNER, "silu")
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        with torch.no_grad():
            for weight in (self.mlp.gate_weight, self.mlp.up_weight):
                weight.mul_(HIDDEN**-0.5 / 0.02)  # products of unit variance

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.down(self.mlp(self.norm(x, cos, sin)))


def eager(block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same composition in plain PyTorch, in the dtype of its arguments."""
    n = F.rms_norm(x, (HIDDEN,), block.norm.weight.to(x.dtype), 1e-6).unflatten(-1, (-1, HEAD))
    low, high = n.chunk(2, -1)
    n = (n * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]).flatten(-2)
    g, u = n @ block.mlp.gate_weight.to(x.dtype).mT, n @ block.mlp.up_weight.to(x.dtype).mT
    return x + (g * F.silu(u)) @ block.down.weight.to(x.dtype).mT


def make(dtype: torch.dtype, device: str) -> tuple[Block, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(1)
    block = Block().to(device, dtype)
    angle = torch.arange(33, device=device)[:, None] * 10000.0 ** (
        -torch.arange(0, HEAD, 2, device=device) / HEAD
    )
    angle = torch.cat((angle, angle), -1)
    return block, (
        normal((2, 33, HIDDEN), dtype, device, seed=2),
        angle.cos().to(dtype),
        angle.sin().to(dtype),
    )


def in_double(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.detach().double() for tensor in inputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype, device):
    block, inputs = make(dtype, device)
    with torch.no_grad():
        y = block(*inputs)
        assert_no_worse_than_eager(y, eager(block, *in_double(inputs)), eager(block, *inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype, device):
    block, inputs = make(dtype, device)
    dy = normal(inputs[0].shape, dtype, device, seed=3)
    parameters = list(block.parameters())

    def gradients(function, x, *tables):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x, *tables), (x, *parameters), dy.to(x.dtype))

    ours = gradients(block, *inputs)
    same = gradients(lambda *a: eager(block, *a), *inputs)
    # float64 parameters: autograd would round the gradients of these to their dtype
    exact, _ = make(dtype, device)
    exact.load_state_dict(block.state_dict())
    exact = exact.double()
    x, cos, sin = in_double(inputs)
    x.requires_grad_()
    wanted = torch.autograd.grad(eager(exact, x, cos, sin), (x, *exact.parameters()), dy.double())
    names = ("x", *(name for name, _ in block.named_parameters()))
    for name, a, b, c in zip(names, ours, wanted, same, strict=True):
        assert_no_worse_than_eager(a, b, c, name=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_quantised_weights(dtype, device):
    """An FP8 down projection changes what the block adds to x by at most 6 % in norm (property 6 (b))."""
    block, inputs = make(dtype, device)
    with torch.no_grad():
        wanted = eager(block, *in_double(inputs)) - inputs[0].double()
        quantize_model_(block)
        assert isinstance(block.down, FP8Linear)
        error = block(*inputs).double() - inputs[0].double() - wanted
    rounding = 4 * torch.finfo(dtype).eps * float(inputs[0].double().norm())
    assert 0 < float(error.norm()) <= 0.06 * float(wanted.norm()) + rounding


def test_compiled(device):
    block, inputs = make(torch.float32, device)
    quantize_model_(block)
    compiled = torch.compile(block, fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(*inputs), block(*inputs), rtol=1e-5, atol=1e-5)
