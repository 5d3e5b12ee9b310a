"""Indexes in models of transformers: parameters of their attentions, made, fitted, saved and loaded with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from htree_ops.ops.arguments import FLOATING_AND_DOUBLE
from htree_ops.ops.index_loss.layers import WEIGHTS, add_index_, draw_index_, index_dim_of, set_index_
from htree_ops.ops.tree_attention import TreeOptions
from htree_ops.ops.tree_attention import options as of_tree
from htree_ops.ops.tree_attention.fitted import FittedLayer
from htree_ops.ops.tree_attention.index import resolve_index_dim
from htree_ops.ops.tree_attention.options import OTHER_CHOICES

#: The key of the width in ``config.htree``, and what stands for a config that does not have it.
KEY, ABSENT = "index_dim", -1
#: What ``config.htree = "recommended"`` says.
RECOMMENDED: dict[str, Any] = {**of_tree.RECOMMENDED["quality"], KEY: None}


def _add(module: Any, index_dim: int) -> None:
    weight = module.q_proj.weight
    dtype = weight.dtype if weight.dtype in FLOATING_AND_DOUBLE else torch.float32
    add_index_(module, *FittedAttention(module).sizes, index_dim, weight.device, dtype)


# ---- which layers have one


def chooses_by_index(module: nn.Module, asked: int | None, head_dim: int, options: TreeOptions) -> bool:
    """Whether an attention chooses by its index, which must have the width ``asked`` by ``config.htree``."""
    has = index_dim_of(module)
    if asked == ABSENT:
        if has:
            raise ValueError(
                f"htree: config.htree must have 'index_dim', {has} to choose by the index that the model has or 0 to "
                "leave it out"
            )
        return False
    wanted = resolve_index_dim("config.htree", asked, head_dim, options)
    if wanted not in (0, has):
        must = f"htree: the model must have an index of config.htree['index_dim'] = {wanted}, got"
        if has:
            raise ValueError(f"{must} one of {has}: set config.htree['index_dim'] = {has}")
        raise ValueError(
            f"{must} none: htree_ops.fit_index(model, batches, index_dim={wanted}) makes it, and a config that says "
            "so, given to from_pretrained or from_config after register(), loads it"
        )
    return wanted > 0


def add_indexes(
    model: PreTrainedModel, width_of: Callable[[PretrainedConfig], tuple[int | None, TreeOptions]]
) -> None:
    """Gives the attentions of a model the index that their config says.

    Args:
        width_of: index_dim of a config whose ``htree`` has one, and its options.
    """
    for part in (fitted.layer for fitted in fitted_layers(model)):
        if index_dim_of(part) or not _says_a_width(part.config):
            continue
        asked, options = width_of(part.config)
        width = resolve_index_dim("config.htree", asked, part.head_dim, options)
        if width:
            _add(part, width)


def _says_a_width(config: Any) -> bool:
    given = getattr(config, "htree", None)
    return given == "recommended" or (isinstance(given, Mapping) and KEY in given)


def draw_where_missing(
    initialize: Any, self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """``PreTrainedModel._initialize_weights`` of a module, which draws an index that no checkpoint had."""
    is_done = getattr(module, "_is_hf_initialized", False)
    initialize(self, module, *args, **kwargs)
    if not index_dim_of(module):
        return
    weights = [getattr(module, name) for name in WEIGHTS]
    if not is_done and not all(getattr(weight, "_is_hf_initialized", False) for weight in weights):
        draw_index_(module)
    for weight in weights:  # loading lets every weight require grad, and no loss has seen this one
        weight.requires_grad_(False)


# ---- for fit_index


class FittedAttention(FittedLayer):
    """An attention of transformers that gets an index."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads, K/V heads and their width."""
        heads, kv_heads = (
            x.out_features // self.layer.head_dim for x in (self.layer.q_proj, self.layer.k_proj)
        )
        return heads, kv_heads, self.layer.head_dim

    @property
    def options(self) -> TreeOptions:
        """Those of ``config.htree`` that choose in another way than by an index."""
        given = getattr(self.layer.config, "htree", None)
        others = {x: given[x] for x in OTHER_CHOICES if isinstance(given, Mapping) and x in given}
        others.pop("selection_span", None)
        return TreeOptions(**others)

    def take(self, query_weight: torch.Tensor, key_weight: torch.Tensor) -> None:
        """Gives the layer its index, and its config the width."""
        width = key_weight.shape[2]
        if not index_dim_of(self.layer):
            _add(self.layer, width)
        set_index_(self.layer, query_weight, key_weight)
        config = self.layer.config
        given = getattr(config, "htree", None) or {}
        given = dict(RECOMMENDED if given == "recommended" else given)
        given.pop("selection_span", None)
        config.htree = given | {KEY: width}


def fitted_layers(model: nn.Module) -> list[FittedAttention]:
    """The causal attentions of a model of transformers that project queries and keys."""
    return [
        FittedAttention(part)
        for part in model.modules()
        if getattr(part, "is_causal", False)
        and all(getattr(part, name, None) is not None for name in ("head_dim", "q_proj", "k_proj"))
    ]


@contextmanager
def our_attention(model: nn.Module) -> Iterator[None]:
    """Models of transformers with ``attn_implementation="htree"`` and without a cache, and afterwards as they were."""
    from htree_ops.integrations.transformers import NAME, implementations, refuse_without_interface, register

    register()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    within = {id(child) for part in parts for child in part.modules() if child is not part}
    tops = [part for part in parts if id(part) not in within]
    for top in tops:
        refuse_without_interface(type(top))
    before = [implementations(top.config) for top in tops]
    configs: list[Any] = list({id(part.config): part.config for part in parts}.values())
    cached = [(config, config.use_cache) for config in configs if hasattr(config, "use_cache")]
    try:
        for top in tops:
            top.set_attn_implementation(NAME)
        for config, _ in cached:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in cached:
            config.use_cache = use_cache
        for top, found in zip(tops, before, strict=True):
            top.set_attn_implementation(found)
