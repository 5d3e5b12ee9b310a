"""Swaps parts of a transformers model for fused ops, in place, and back (docs/models.md)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import (
    ALL_ATTENTION_FUNCTIONS,
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    eager_attention_forward,
)

from htree_ops.integrations.transformers import NAME, register
from htree_ops.ops.fp8 import quantize_model_
from htree_ops.ops.gated_mlp import gated_mlp
from htree_ops.ops.gated_mlp.module import formula_of
from htree_ops.ops.rmsnorm_rope import head_rmsnorm_rope

__all__ = ["patch_model_", "unpatch_model_"]


class _Norm(nn.Module):
    """RMSNorm in one kernel of torch's; the package's norm has rotary positions in it, and hidden states have none."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


class _MLP(nn.Module):
    """The gated MLP with its two first products and the activation in one op."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    htree_formula: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_mlp(x, self.gate_proj.weight, self.up_proj.weight, *self.htree_formula))


class FusedLlamaRMSNorm(_Norm, LlamaRMSNorm):
    """:class:`LlamaRMSNorm` in one kernel."""


class FusedMistralRMSNorm(_Norm, MistralRMSNorm):
    """:class:`MistralRMSNorm` in one kernel."""


class FusedQwen3RMSNorm(_Norm, Qwen3RMSNorm):
    """:class:`Qwen3RMSNorm` in one kernel."""


class FusedLlamaMLP(_MLP, LlamaMLP):
    """:class:`LlamaMLP` around :func:`htree_ops.gated_mlp`."""


class FusedMistralMLP(_MLP, MistralMLP):
    """:class:`MistralMLP` around :func:`htree_ops.gated_mlp`."""


class FusedQwen3MLP(_MLP, Qwen3MLP):
    """:class:`Qwen3MLP` around :func:`htree_ops.gated_mlp`."""


class FusedQwen3Attention(Qwen3Attention):
    """:class:`Qwen3Attention` with the norms of its heads and their rotary positions in one kernel each."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As :class:`Qwen3Attention`."""
        rows = hidden_states.shape[:-1]
        cos, sin = (table.expand(*rows, -1).flatten(0, -2) for table in position_embeddings)

        def heads(projection: nn.Module, norm: Any) -> Tensor:
            x = projection(hidden_states).view(1, -1, projection.out_features // self.head_dim, self.head_dim)  # type: ignore[operator]
            return head_rmsnorm_rope(x, norm.weight, cos, sin, norm.variance_epsilon).view(
                *rows, -1, self.head_dim
            )

        query = heads(self.q_proj, self.q_norm).transpose(1, 2)
        key = heads(self.k_proj, self.k_norm).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*rows, -1, self.head_dim).transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(out.reshape(*rows, -1).contiguous()), weights


NORMS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaRMSNorm: FusedLlamaRMSNorm,
    MistralRMSNorm: FusedMistralRMSNorm,
    Qwen3RMSNorm: FusedQwen3RMSNorm,
}
HEADS: dict[type[nn.Module], type[nn.Module]] = {Qwen3Attention: FusedQwen3Attention}
MLPS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaMLP: FusedLlamaMLP,
    MistralMLP: FusedMistralMLP,
    Qwen3MLP: FusedQwen3MLP,
}
ORIGINALS = {fused: plain for table in (NORMS, HEADS, MLPS) for plain, fused in table.items()}
#: Names under which a patched model keeps what it had.
ATTENTION_BEFORE, QUANTISED = "_htree_attention_before", "_htree_quantised"


def patch_model_(
    model: PreTrainedModel, attention: bool = True, norms: bool = True, mlp: bool = True, fp8: bool = False
) -> dict[str, list[str]]:
    """Swaps parts of a Llama, Mistral or Qwen3 model for fused ones, in place.

    Modules change their class and nothing else, so that parameters, the state dict, hooks and optimisers stay as they
    are. Results differ by rounding: the fused ops round once where the model rounds after every step. What has no fused
    form, such as an MLP with a bias, stays.

    Args:
        model: of transformers, or a part of such a model that holds the parts to be swapped.
        attention: tree attention by ``attn_implementation="htree"``, with the options of ``config.htree``.
        norms: RMSNorm in one kernel; for Qwen3 also the norms of the heads together with the rotary positions.
        mlp: :func:`htree_ops.gated_mlp`, with the activation on the side where the outputs are those of the model.
        fp8: :func:`htree_ops.quantize_model_` for the linear layers but the output embedding, and but the first two
            of an MLP that is fused, which the op reads by itself. For inference; it cannot be undone.

    Returns:
        What has changed: under "attention", "norms", "mlp" and "fp8" the names of the modules.

    Raises:
        TypeError: model is no ``PreTrainedModel``.
        ValueError: nothing in it can be swapped.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"patch_model_: model must be a PreTrainedModel, got {type(model).__name__}")
    changed: dict[str, list[str]] = {"attention": [], "norms": [], "mlp": [], "fp8": []}
    if attention:
        register()
        if model.config._attn_implementation != NAME:
            setattr(model, ATTENTION_BEFORE, model.config._attn_implementation)
            model.set_attn_implementation(NAME)
        changed["attention"] = [name for name, part in model.named_modules() if hasattr(part, "is_causal")]
    fused_weights = set()
    for name, part in model.named_modules():
        kind = type(part)
        if norms and kind in {**NORMS, **HEADS}:
            part.__class__ = {**NORMS, **HEADS}[kind]
            changed["norms"].append(name)
        if mlp and kind in MLPS and (formula := _formula(part)) is not None:
            part.__class__, part.htree_formula = MLPS[kind], formula
            changed["mlp"].append(name)
        if isinstance(part, _MLP):
            fused_weights |= {f"{name}.gate_proj", f"{name}.up_proj"}
    if fp8:
        output = model.get_output_embeddings()
        quantize_model_(model, lambda name, linear: linear is not output and name not in fused_weights)
        changed["fp8"] = sorted(model.config.quantization_config["layers"])
        setattr(model, QUANTISED, True)
    if not any(changed.values()):
        known = ", ".join(kind.__name__ for kind in (*NORMS, *HEADS, *MLPS))
        raise ValueError(f"patch_model_: model must hold modules among {known}, got {type(model).__name__}")
    return changed


def _formula(mlp: nn.Module) -> tuple[Any, Any] | None:
    """What the MLP computes, or None where the op does not compute it."""
    try:
        return formula_of(mlp)
    except (TypeError, ValueError):
        return None


def unpatch_model_(model: PreTrainedModel) -> PreTrainedModel:
    """Takes back what :func:`patch_model_` has done to ``model``, and returns it.

    Raises:
        ValueError: its layers are quantised, and their weights are rounded for good: load the checkpoint again.
    """
    if getattr(model, QUANTISED, False):
        raise ValueError("unpatch_model_: model must not be quantised (fp8=True): load its checkpoint again")
    if hasattr(model, ATTENTION_BEFORE):
        model.set_attn_implementation(getattr(model, ATTENTION_BEFORE))
        delattr(model, ATTENTION_BEFORE)
    for part in model.modules():
        if type(part) in ORIGINALS:
            if isinstance(part, _MLP):
                del part.htree_formula
            part.__class__ = ORIGINALS[type(part)]
    return model
