"""The gated MLP with its weights, as a module (docs/semantics/gated_mlp.md §3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from htree_ops.ops.arguments import check_int, reraise_as
from htree_ops.ops.gated_mlp.function import ACTIVATIONS, SIDES, Activation, Side, gated_mlp


def formula_of(module: nn.Module) -> tuple[Activation, Side]:
    """What a gated MLP computes, ``(activation, act_on)``, for a module as :meth:`FusedGatedMLP.from_module` takes it.

    It is called with small weights of this function's own, so its size and its weights do not matter.
    """
    names = ("gate_proj", "up_proj", "down_proj")
    layers = {name: getattr(module, name, None) for name in names}
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            raise TypeError(f"formula_of: module.{name} must be an nn.Linear, got {type(layer).__name__}")
        if name != "down_proj" and layer.bias is not None:
            raise ValueError(
                f"formula_of: module.{name} must have no bias, which the fused op lacks, got one"
            )
    generator = torch.Generator().manual_seed(0)
    on_cpu: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    gate, up, down = (torch.randn(8, 8, generator=generator, **on_cpu) for _ in names)
    x = torch.randn(16, 8, generator=generator, **on_cpu)
    ours = {f"{name}.weight": weight for name, weight in zip(names, (gate, up, down), strict=True)}
    if "down_proj.bias" in dict(module.named_parameters()):
        ours["down_proj.bias"] = torch.zeros(8, **on_cpu)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        actual = torch.func.functional_call(module, ours, (x,))
        for activation in ACTIVATIONS:
            for side in SIDES:
                if torch.allclose(gated_mlp(x, gate, up, activation, side) @ down.t(), actual):
                    return activation, side
    raise ValueError(
        f"formula_of: module must compute one of act(gate) * up and gate * act(up) with act among "
        f"{', '.join(ACTIVATIONS)}, got another output from {type(module).__name__}"
    )


class FusedGatedMLP(nn.Module):
    """``g · act(u)`` of two projections with their weights: the activation is on **up**; Llama's is on **gate**.

    The module around :func:`gated_mlp`. The default ``act_on="up"`` is the order of the design document. Llama, Qwen,
    Mistral and nearly every other current model compute ``act(g) · u``: give ``act_on="gate"``, or take their module
    with :meth:`from_module`, which finds out. New weights have a normal distribution with a deviation of 0.02.

    Args:
        hidden_dim: Hd.
        intermediate_dim: I.
        activation: "silu" or "gelu".
        act_on: "up" or "gate".
        device, dtype: of the weights [I, Hd].

    Raises:
        TypeError: a size is not an int. ValueError: a size below 1, an unknown activation or side.

    Example:
        >>> FusedGatedMLP(64, 96, act_on="gate")(torch.randn(1, 3, 64)).shape
        torch.Size([1, 3, 96])
    """

    def __init__(
        self,
        hidden_dim: int,
        intermediate_dim: int,
        activation: Activation = "silu",
        act_on: Side = "up",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden_dim", hidden_dim), ("intermediate_dim", intermediate_dim)):
            check_int("FusedGatedMLP", name, value, 1)
        with reraise_as("FusedGatedMLP"):
            none = torch.empty(0, 0, device="meta")  # a call without rows checks the options alone
            gated_mlp(none, none, none, activation, act_on)
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.act_on = act_on
        size = (intermediate_dim, hidden_dim)
        self.gate_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.up_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_module(cls, module: nn.Module) -> FusedGatedMLP:
        """The fused form of a model's gated MLP, which shares its weights: everything before ``down_proj``.

        ``module.down_proj(FusedGatedMLP.from_module(module)(x))`` equals ``module(x)`` up to rounding, and
        :func:`htree_ops.integrations.patch_model_` does that for a whole model. Which projection goes through which
        activation is found by comparing outputs.

        Args:
            module: with ``gate_proj``, ``up_proj`` and ``down_proj``, each an ``nn.Linear``, the first two without a
                bias, such as ``LlamaMLP``.

        Raises:
            TypeError: a projection is missing or no ``nn.Linear``.
            ValueError: a bias, or a formula that the op does not compute.
        """
        with reraise_as("FusedGatedMLP.from_module"):
            activation, act_on = formula_of(module)
        fused = cls(1, 1, activation, act_on, device="meta")
        fused.gate_weight = module.get_parameter("gate_proj.weight")
        fused.up_weight = module.get_parameter("up_proj.weight")
        fused.intermediate_dim, fused.hidden_dim = fused.gate_weight.shape
        return fused.train(module.training)

    def reset_parameters(self) -> None:
        """Draws both weights anew."""
        nn.init.normal_(self.gate_weight, std=0.02)
        nn.init.normal_(self.up_weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., Hd] -> [..., I]."""
        return gated_mlp(x, self.gate_weight, self.up_weight, self.activation, self.act_on)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_dim}, {self.intermediate_dim}, activation={self.activation}, act_on={self.act_on}"
        )
