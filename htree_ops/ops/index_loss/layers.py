"""The index of an attention layer: its weights, and the index queries and keys that they make.

A layer is an :class:`htree_ops.HTreeAttention` or an attention of transformers: a module with the parameters
``index_query_weight`` [H, K, d] and ``index_key_weight`` [H_kv, K, d] (docs/semantics/index_loss.md §9.5).
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from htree_ops.ops.paging import is_recorded
from htree_ops.ops.ranks import beside, here, placed_as

WEIGHTS = ("index_query_weight", "index_key_weight")
#: A query weight that differs by less from what the key weight says is as it was drawn: in steps of its dtype, relative
#: to the largest one. The two were rounded apart, by half a step each.
DRAWN = 1.5


def index_dim_of(layer: nn.Module) -> int:
    """The width of a layer's index, 0 where it has none."""
    weight = getattr(layer, "index_key_weight", None)
    return 0 if weight is None else weight.shape[-1]


def add_index_(
    layer: nn.Module,
    heads: int,
    kv_heads: int,
    head_dim: int,
    index_dim: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Gives a layer the weights of an index, which do not require grad; :func:`draw_index_` sets their values."""
    for name, count in zip(WEIGHTS, (heads, kv_heads), strict=True):
        weight = torch.empty(count, head_dim, index_dim, device=device, dtype=dtype)
        layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    layer.register_load_state_dict_pre_hook(_keep_missing)
    state: Any = layer
    state._index_chose = state._index_forward = None
    state._index_pending = []
    know(layer)


#: The layers that may hold a loss that compiled code has computed, in the order in which they were made.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


def know(layer: nn.Module) -> None:
    """Lets :func:`take_pending` find a layer that has an index; a deep copy of a layer is another one."""
    _KNOWN.setdefault(layer, None)


def take_pending() -> list[tuple[nn.Module, Tensor]]:
    """The losses that compiled code has left in its layers, which do not hold them any longer.

    What code leaves in the layer that it runs for is the same for all layers, so that they share the compiled code.
    """
    found = []
    for layer in _KNOWN:
        losses: list[Tensor] = getattr(layer, "_index_pending", [])
        found += [(layer, loss) for loss in losses]
        losses.clear()
    return found


def _keep_missing(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Dense weights have no index: a state dict without one leaves it as it is."""
    for name in WEIGHTS:
        weight = getattr(layer, name, None)
        if weight is not None:
            state_dict.setdefault(prefix + name, weight)


def draw_index(
    heads: int,
    kv_heads: int,
    head_dim: int,
    index_dim: int,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The weights of a new index, [heads, head_dim, index_dim] and [kv_heads, head_dim, index_dim].

    Of each K/V head a random orthonormal projection, the same for its query heads, such that a product of the index is
    on average that of a query with a key, the mean over the heads.
    """
    wide = torch.promote_types(dtype, torch.float32)
    drawn = torch.randn(kv_heads, head_dim, index_dim, dtype=wide, device=device)
    base = torch.linalg.qr(drawn).Q * (head_dim / index_dim) ** 0.5
    group = heads // kv_heads
    of_queries = base.repeat_interleave(group, dim=0) / query_scale(head_dim, group)
    return of_queries.to(dtype), base.to(dtype)


@torch.no_grad()
def draw_index_(layer: nn.Module) -> None:
    """:func:`draw_index` for a layer that has an index."""
    of_queries, of_keys = (getattr(layer, name) for name in WEIGHTS)
    if not of_keys.is_meta:
        kv_heads, head_dim, index_dim = of_keys.shape
        drawn = draw_index(len(of_queries), kv_heads, head_dim, index_dim, of_keys.device, of_keys.dtype)
        for weight, new in zip((of_queries, of_keys), drawn, strict=True):
            weight.copy_(new)


@torch.no_grad()
def set_index_(layer: nn.Module, query_weight: Tensor, key_weight: Tensor) -> None:
    """Gives the index of a layer these weights, which require grad from now on."""
    for name, new in zip(WEIGHTS, (query_weight, key_weight), strict=True):
        weight = getattr(layer, name)
        weight.copy_(new)
        weight.requires_grad_(True)


def query_scale(head_dim: int, group: int) -> float:
    """By how much the weight of a query of a new index is smaller than that of its key."""
    return group * head_dim**0.5


def index_of(
    function: str, q: Tensor, k: Tensor, query_weight: Tensor, key_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Index queries and index keys [..., H_kv, d] of q [..., H, K] and k [..., H_kv, K].

    Weights that are sharded over ranks give a rank the index of its heads.
    """
    q = placed_as(q, k)
    query_weight, key_weight = (_as_lies(weight, q) for weight in (query_weight, key_weight))
    heads, kv_heads = query_weight.shape[0], key_weight.shape[0]
    if (q.shape[-2], k.shape[-2]) != (heads, kv_heads):
        raise ValueError(
            f"{function}: q and k must have the {heads} and {kv_heads} heads of the index, got {q.shape[-2]} and "
            f"{k.shape[-2]}: heads that are sharded over ranks need ColwiseParallel for the layer and for "
            "q_proj, k_proj and v_proj"
        )
    grouped = query_weight.to(q.dtype).unflatten(0, (kv_heads, -1))
    index_query = torch.einsum("...sgk,sgkd->...sd", q.unflatten(-2, (kv_heads, -1)), grouped)
    return index_query, torch.einsum("...sk,skd->...sd", k, key_weight.to(k.dtype))


def _as_lies(weight: Tensor, x: Tensor) -> Tensor:
    """A weight as a DTensor where x is one, else the part of it that this rank has."""
    return beside(weight, x) if hasattr(x, "device_mesh") else here(weight)


def choose_by_index(function: str, layer: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`index_of` for a selection, without a gradient. A layer whose index is as it was drawn warns, once."""
    of_queries, of_keys = (getattr(layer, name) for name in WEIGHTS)
    with torch.no_grad():
        index = index_of(function, q, k, of_queries, of_keys)
    if torch.compiler.is_compiling() or layer._index_chose or is_recorded(q.device):
        return index
    layer._index_chose = True  # type: ignore[assignment]
    know(layer)
    if is_drawn(of_queries, of_keys):
        warnings.warn(
            f"{function}: this layer selects by an index that was never fitted: call htree_ops.fit_index, train it "
            "with htree_ops.index_losses, or load its weights. (Said once per layer.)",
            UserWarning,
            stacklevel=4,
        )
    return index


@torch.no_grad()
def is_drawn(query_weight: Tensor, key_weight: Tensor) -> bool:
    """Whether an index is as :func:`draw_index_` left it; waits for the device."""
    if (
        hasattr(key_weight, "device_mesh")
        or type(key_weight) not in (Tensor, nn.Parameter)
        or key_weight.is_meta
    ):
        return False
    group = query_weight.shape[0] // key_weight.shape[0]
    wanted = key_weight.float().repeat_interleave(group, dim=0)
    found = query_weight.float() * query_scale(key_weight.shape[1], group)
    return bool(
        (found - wanted).abs().max() <= DRAWN * torch.finfo(key_weight.dtype).eps * wanted.abs().max()
    )
