"""Swaps parts of a transformers model for fused ops, in place, and back (docs/models.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralMLP, MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import (
    ALL_ATTENTION_FUNCTIONS,
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    eager_attention_forward,
)

from htree_ops.integrations.cache import CACHE
from htree_ops.integrations.transformers import (
    NAME,
    has_compact_positions,
    implementations,
    refuse_without_interface,
    register,
)
from htree_ops.ops.arguments import check_kind
from htree_ops.ops.fp8 import FP8Linear, quantize_model_
from htree_ops.ops.gated_mlp import gated_mlp
from htree_ops.ops.gated_mlp.function import Activation, Side
from htree_ops.ops.gated_mlp.module import formula_of
from htree_ops.ops.rmsnorm_rope import head_rmsnorm_rope
from htree_ops.ops.tree_attention import rope

#: Width of the heads of a rotation by no angle, where it divides the width of a row.
IDENTITY_WIDTH = 128


def _is_just(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of the module is the forward of one of ``kinds`` and nothing else.

    A part that another library has wrapped, such as one with an adapter, and one with hooks, such as those that fetch
    its weights, must be called; an op that reads its weight alone would leave that out.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return type(module) in kinds and not any(hooks) and "forward" not in module.__dict__


def _trained_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows by the op that rotates as well, here by no angle: its backward reads x and dy once."""
    width = IDENTITY_WIDTH if weight.shape[0] % IDENTITY_WIDTH == 0 else weight.shape[0]
    rows = x if x.dim() == 3 else x.reshape(1, -1, weight.shape[0])
    shape = (rows.shape[1], width // 2)
    cos, sin = x.new_ones(1, shape[1]).expand(shape), x.new_zeros(1, shape[1]).expand(shape)
    return torch.ops.htree.rmsnorm_rope(rows, weight, cos, sin, eps, weight.shape[0] // width).view(x.shape)


class _Norm(nn.Module):
    """RMSNorm in one kernel: where a gradient is wanted the package's, else torch's, which torch.compile can fuse."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        wanted = torch.is_grad_enabled() and (hidden_states.requires_grad or self.weight.requires_grad)
        if wanted and self.weight.shape[0] % 2 == 0 and not torch.compiler.is_compiling():
            return _trained_norm(hidden_states, self.weight, self.variance_epsilon)
        weight = self.weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


class _MLP(nn.Module):
    """The gated MLP with its two first products and the activation in one op, while these are as they were.

    Attributes:
        htree_formula: (the module of the activation that was there, activation, side).
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: nn.Module
    htree_formula: tuple[nn.Module, Activation, Side]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        act_fn, activation, side = self.htree_formula
        layers_are_plain = all(_is_just(layer, nn.Linear) and layer.bias is None for layer in (gate, up))
        if not (layers_are_plain and self.act_fn is act_fn and _is_just(act_fn, type(act_fn))):
            return super().forward(x)  # of the model
        return self.down_proj(gated_mlp(x, gate.weight, up.weight, activation, side))


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


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb`` of transformers, one kernel for each tensor and one for its gradient.

    Args:
        query, key: [B, T, H, K].
        cos, sin: [B or 1, T, K], with equal halves.

    Returns:
        The rotated tensors, contiguous and in the dtype that they had, rounded once.
    """
    half, dtype = cos.shape[-1] // 2, torch.promote_types(query.dtype, torch.float32)
    cos, sin = (table[..., :half].to(dtype) for table in (cos, sin))
    rows = torch.arange(cos.shape[:2].numel(), device=cos.device, dtype=torch.int32)
    rows = rows.view(cos.shape[:2]).expand(query.shape[:2])
    cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    return rope(query, cos, sin, rows), rope(key, cos, sin, rows)


class _Attention(nn.Module):
    """The attention of a model, with its queries and keys rotated by a kernel each."""

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: Any
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def queries_and_keys(
        self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Both [B, T, H, K], rotated by the tables of ``positions``, [B or 1, T, K]."""
        if has_compact_positions(self.config):  # the tree rotates, and these tables hold no angle
            return query, key
        return rotate(query, key, *positions)

    def window(self) -> dict[str, Any]:
        """What this model says of its window to an attention."""
        return {}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As the attention of the model."""
        cache = kwargs.pop(CACHE, None)
        rows = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*rows, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        assert position_embeddings is not None
        query, key = self.queries_and_keys(query, key, position_embeddings)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:  # a paged one finds and leaves what is its own among the keywords
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
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
            **self.window(),
            **kwargs,
        )
        return self.o_proj(out.reshape(*rows, -1).contiguous()), weights


class RotaryLlamaAttention(_Attention, LlamaAttention):
    """:class:`LlamaAttention` with :func:`rotate`."""


class RotaryMistralAttention(_Attention, MistralAttention):
    """:class:`MistralAttention` with :func:`rotate`."""

    def window(self) -> dict[str, Any]:
        """Of the config."""
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


class RotaryQwen3Attention(_Attention, Qwen3Attention):
    """:class:`Qwen3Attention` with :func:`rotate`."""

    def queries_and_keys(
        self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """With the norm of each head before the rotation."""
        return super().queries_and_keys(self.q_norm(query), self.k_norm(key), positions)

    def window(self) -> dict[str, Any]:
        """Of the layer."""
        return {"sliding_window": self.sliding_window}


class FusedQwen3Attention(RotaryQwen3Attention):
    """:class:`Qwen3Attention` with the norms of its heads and their rotary positions in one kernel each."""

    def queries_and_keys(
        self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Norm and rotation at once."""
        kinds = (Qwen3RMSNorm, FusedQwen3RMSNorm)
        if not (_is_just(self.q_norm, *kinds) and _is_just(self.k_norm, *kinds)):
            return super().queries_and_keys(query, key, positions)
        rows = query.shape[:2]
        cos, sin = (table.expand(*rows, -1).flatten(0, -2) for table in positions)

        def fused(x: Tensor, norm: Any) -> Tensor:
            return head_rmsnorm_rope(
                x.flatten(0, 1)[None], norm.weight, cos, sin, norm.variance_epsilon
            ).view(x.shape)

        return fused(query, self.q_norm), fused(key, self.k_norm)


NORMS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaRMSNorm: FusedLlamaRMSNorm,
    MistralRMSNorm: FusedMistralRMSNorm,
    Qwen3RMSNorm: FusedQwen3RMSNorm,
}
HEADS: dict[type[nn.Module], type[nn.Module]] = {Qwen3Attention: FusedQwen3Attention}
ROTATIONS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaAttention: RotaryLlamaAttention,
    MistralAttention: RotaryMistralAttention,
    Qwen3Attention: RotaryQwen3Attention,
}
MLPS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaMLP: FusedLlamaMLP,
    MistralMLP: FusedMistralMLP,
    Qwen3MLP: FusedQwen3MLP,
}
ORIGINALS = {fused: plain for table in (NORMS, HEADS, ROTATIONS, MLPS) for plain, fused in table.items()}
#: Names under which a patched model keeps what it had.
ATTENTION_BEFORE, QUANTISED = "_htree_attention_before", "_htree_quantised"


def patch_model_(
    model: PreTrainedModel,
    attention: bool = True,
    norms: bool = True,
    mlp: bool = True,
    fp8: bool = False,
    rotary: bool = True,
) -> dict[str, list[str]]:
    """Swaps parts of a Llama, Mistral or Qwen3 model for fused ones, in place.

    Modules change their class and nothing else, so that parameters, the state dict, hooks and optimisers stay as they
    are. Results differ by rounding: the fused ops round once where the model rounds after every step. What has no fused
    form, such as an MLP with a bias, stays. Where a layer, its bias or an activation changes later, as by an adapter or
    hooks, the model's own computation comes back.

    Args:
        model: of transformers, or a part of such a model that holds the parts to be swapped.
        attention: tree attention by ``attn_implementation="htree"``, with the options of ``config.htree``.
        norms: RMSNorm in one kernel; for Qwen3 also the norms of the heads together with the rotary positions.
        mlp: :func:`htree_ops.gated_mlp`, with the activation on the side where the outputs are those of the model.
        fp8: :func:`htree_ops.quantize_model_` for the linear layers but the output embedding, and but the first two
            of an MLP that is fused, which the op reads by itself, or was fused in the model that a checkpoint was
            saved from. For inference; it cannot be undone.
        rotary: the rotary positions of queries and keys in one kernel each, by the model's own cos and sin.

    Returns:
        What has changed: under "attention", "norms", "rotary", "mlp" and "fp8" the names of the modules. An attention
        whose norms rotate as well is under both.

    Raises:
        TypeError: model is no ``PreTrainedModel``, or another argument no bool.
        ValueError: nothing in it can be swapped.
        NotImplementedError: attention of a model that does not use the attention interface of transformers.
    """
    _check_model("patch_model_", model)
    flags = {"attention": attention, "norms": norms, "mlp": mlp, "fp8": fp8, "rotary": rotary}
    for name, flag in flags.items():
        check_kind("patch_model_", name, flag, "bool")
    changed: dict[str, list[str]] = {"attention": [], "norms": [], "rotary": [], "mlp": [], "fp8": []}
    if attention:
        refuse_without_interface(type(model))
        register()
        if model.config._attn_implementation != NAME:
            setattr(model, ATTENTION_BEFORE, implementations(model.config))
            model.set_attn_implementation(NAME)
        changed["attention"] = [name for name, part in model.named_modules() if hasattr(part, "is_causal")]
    fused_weights = set()
    for name, part in model.named_modules():
        kind = type(part)
        if rotary and kind in ROTATIONS:
            part.__class__ = ROTATIONS[kind]
            changed["rotary"].append(name)
        if norms and kind in {**NORMS, **HEADS}:
            part.__class__ = {**NORMS, **HEADS}[kind]
            changed["norms"].append(name)
        if mlp and kind in MLPS and (formula := _formula(part)) is not None:
            part.__class__, part.htree_formula = MLPS[kind], (part.act_fn, *formula)
            changed["mlp"].append(name)
        if isinstance(part, _MLP) or (mlp and kind in MLPS and type(part.down_proj) is FP8Linear):
            fused_weights |= {f"{name}.gate_proj", f"{name}.up_proj"}
    if fp8:
        output, before = model.get_output_embeddings(), _quantised(model)
        quantize_model_(model, lambda name, linear: linear is not output and name not in fused_weights)
        changed["fp8"] = sorted(_quantised(model) - before)
        if changed["fp8"]:
            setattr(model, QUANTISED, True)
    tables = ((norms, NORMS), (norms, HEADS), (rotary, HEADS), (rotary, ROTATIONS), (mlp, MLPS))
    fused = {kind for wanted, table in tables if wanted for kind in table.values()}  # by an earlier call
    if not any(changed.values()) and not any(type(part) in fused for part in model.modules()):
        unpatch_model_(model)
        known = ", ".join(kind.__name__ for kind in (*NORMS, *ROTATIONS, *MLPS))
        raise ValueError(f"patch_model_: model must hold modules among {known}, got {type(model).__name__}")
    return changed


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{function}: model must be a PreTrainedModel, got {type(model).__name__}")


def _quantised(model: nn.Module) -> set[str]:
    return {name for name, part in model.named_modules() if type(part) is FP8Linear}


def _formula(mlp: nn.Module) -> tuple[Any, Any] | None:
    """What the MLP computes, or None where the op does not compute it."""
    try:
        return formula_of(mlp)
    except (TypeError, ValueError):
        return None


def unpatch_model_(model: PreTrainedModel) -> PreTrainedModel:
    """Takes back what :func:`patch_model_` has done to ``model``, and returns it.

    Raises:
        TypeError: model is no ``PreTrainedModel``.
        ValueError: its layers are quantised, and their weights are rounded for good: load the checkpoint again.
    """
    _check_model("unpatch_model_", model)
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
