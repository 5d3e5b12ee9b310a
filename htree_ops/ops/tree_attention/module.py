"""The attention layer around tree attention (docs/semantics/tree_attention.md §1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError, refuse
from htree_ops.ops.arguments import (
    FLOATING_AND_DOUBLE,
    autocast_dtype,
    check_int,
    check_kind,
    check_option_dtype,
    check_tensor,
    options_of,
)
from htree_ops.ops.tree_attention.attention import Importance, Scope, tree_attention
from htree_ops.ops.tree_attention.options import RECOMMENDED, Goal, TreeOptions
from htree_ops.ops.tree_cache.cache import TreeKVCache

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["HTreeAttention"]

#: The options that a cache shares with its layer. Its heads say what ``scope`` is, and it keeps no ``store_parents``.
CACHE_OPTIONS = (
    "compression_rate",
    "max_top_nodes",
    "top_k",
    "selection_stride",
    "scale",
    "rope_base",
    "importance",
    "selection_span",
)


def _option(name: str) -> property:
    """An option of a module as its attribute. Setting it replaces it in ``options``, which checks it."""

    def read(module: Any) -> Any:
        return getattr(module.options, name)

    def write(module: Any, value: Any) -> None:
        with options_of("HTreeAttention"):
            module.options = replace(module.options, **{name: value})

    return property(read, write, doc=f"``{name}`` of :attr:`options`.")


class HTreeAttention(nn.Module):
    """Causal self-attention layer with :func:`tree_attention` between its projections.

    ``o_proj(tree_attention(q_proj(x), k_proj(x), v_proj(x)))``, rotary positions included. Parameters are
    those of ``q_proj`` [num_heads * head_dim, embed_dim], ``k_proj`` and ``v_proj`` [num_kv_heads *
    head_dim, embed_dim] and ``o_proj`` [embed_dim, num_heads * head_dim].

    Args:
        embed_dim: E, width of the input and the output.
        num_heads: H, query heads.
        num_kv_heads: H_kv, key and value heads, a divisor of H; None is H.
        head_dim: K = V, even; None is embed_dim / num_heads.
        bias: whether the projections have one.
        cp_group: ranks that share the tokens, for :func:`htree_ops.distributed.tree_attention_cp`; None is this process
            alone.
        cp_balance: how they share them, "head_tail" or "contiguous".
        device, dtype: of the parameters.
        The other keywords: as in :func:`tree_attention`.

    Attributes:
        options: the :class:`htree_ops.TreeOptions`; each of them is an attribute of the layer too, and may be set.

    Raises:
        TypeError: a size is not an int, or another option has a wrong type.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
        ValueError: a size or option out of range, sizes that do not divide, or an odd head_dim.
    """

    compression_rate = _option("compression_rate")
    max_top_nodes = _option("max_top_nodes")
    top_k = _option("top_k")
    selection_stride = _option("selection_stride")
    scale = _option("scale")
    rope_base = _option("rope_base")
    importance = _option("importance")
    scope = _option("scope")
    store_parents = _option("store_parents")
    selection_span = _option("selection_span")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        compression_rate: int = 16,
        max_top_nodes: int | None = None,
        top_k: int = 512,
        selection_stride: int = 1,
        scale: float | None = None,
        rope_base: float | None = 10000.0,
        importance: Importance = "lse_causal",
        scope: Scope = "kv_head",
        store_parents: bool = True,
        selection_span: int | None = None,
        cp_group: ProcessGroup | DeviceMesh | None = None,
        cp_balance: str = "head_tail",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in (sizes if head_dim is None else sizes | {"head_dim": head_dim}).items():
            check_int("HTreeAttention", name, size, 1)
        check_kind("HTreeAttention", "bias", bias, "bool")
        if dtype is not None:
            check_option_dtype("HTreeAttention", dtype, FLOATING_AND_DOUBLE)
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"HTreeAttention: num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if head_dim is None:
            if embed_dim % num_heads != 0:
                raise ValueError(
                    f"HTreeAttention: embed_dim must be a multiple of num_heads when head_dim is None, "
                    f"got {embed_dim} and {num_heads}"
                )
            head_dim = embed_dim // num_heads
        if head_dim < 2 or head_dim % 2 != 0:
            raise ValueError(f"HTreeAttention: head_dim must be even and at least 2, got {head_dim}")
        with options_of("HTreeAttention"):
            self.options = TreeOptions(
                compression_rate=compression_rate,
                max_top_nodes=max_top_nodes,
                top_k=top_k,
                selection_stride=selection_stride,
                scale=scale,
                rope_base=rope_base,
                importance=importance,
                scope=scope,
                store_parents=store_parents,
                selection_span=selection_span,
            )
        if cp_balance not in ("head_tail", "contiguous"):
            raise ValueError(
                f"HTreeAttention: cp_balance must be head_tail or contiguous, got {cp_balance!r}"
            )
        self.cp_group = cp_group
        self.cp_balance = cp_balance
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    @classmethod
    def recommended(
        cls,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        goal: Goal = "quality",
        **options: Any,
    ) -> HTreeAttention:
        """A layer with the selection that the measurements recommend, in place of the documents' default.

        ``goal="quality"`` is ``selection_span=2, selection_stride=1``, ``goal="speed"`` is ``selection_span=2,
        selection_stride=4``. Of the copies from far back that a small dense model finds, the same weights keep, with
        256 of 4096 tokens per query: 99.8 % and 90.0 %; with the default, which scores a node by its mean, 70.8 %;
        where 16 queries share a selection, at most 58.1 %. These are rows of docs/quality.md (a). They were measured
        on a model trained with dense attention, its keys rotated at their own positions (``rope_base=None``); how
        much a layer with the default positions finds depends on how it was trained.

        Args:
            goal: what to favour.
            options: further keywords of :class:`HTreeAttention`; they come before what ``goal`` chooses.
            The others: as in :class:`HTreeAttention`.

        Raises:
            TypeError, UnsupportedDtypeError, ValueError: as :class:`HTreeAttention`; another goal is a ValueError.
        """
        if goal not in RECOMMENDED:
            raise ValueError(
                f"HTreeAttention.recommended: goal must be one of {', '.join(RECOMMENDED)}, got {goal!r}"
            )
        return cls(embed_dim, num_heads, num_kv_heads, head_dim, bias, **(RECOMMENDED[goal] | options))

    def make_cache(
        self,
        batch: int,
        capacity: int,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> TreeKVCache:
        """An empty cache for this layer and its options, of ``batch`` sequences of at most ``capacity`` tokens.

        Where the projections are sharded over ranks by heads, it holds those of this rank.

        Args:
            page_size, num_pages: as in :class:`htree_ops.TreeKVCache`.
            dtype, device: None is that of the parameters; under autocast the dtype has to be that of autocast.

        Raises:
            ValueError: a size out of range, or importance="lse".
        """
        weight, options = self.k_proj.weight, self.options
        heads = self.num_heads if options.scope == "q_head" else self.num_kv_heads
        if hasattr(weight, "to_local"):  # sharded over ranks: each of them keeps its own heads
            heads = heads * weight.to_local().shape[0] // weight.shape[0]
        return TreeKVCache(
            batch,
            heads,
            self.head_dim,
            capacity,
            compression_rate=options.compression_rate,
            max_top_nodes=options.max_top_nodes,
            top_k=options.top_k,
            selection_stride=options.selection_stride,
            scale=options.scale,
            rope_base=options.rope_base,
            importance=options.importance,
            selection_span=options.selection_span,
            page_size=page_size,
            num_pages=num_pages,
            dtype=weight.dtype if dtype is None else dtype,
            device=weight.device if device is None else device,
        )

    def _attend_from(self, cache: TreeKVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Adds the tokens to the cache and returns their rows [B, T, H, K]."""
        if not isinstance(cache, TreeKVCache):
            raise TypeError(f"HTreeAttention: cache must be a TreeKVCache, got {type(cache).__name__}")
        for name in CACHE_OPTIONS:
            asked = "top_nodes" if name == "max_top_nodes" else name  # None is a number here
            theirs, ours = (getattr(options, asked) for options in (cache.options, self.options))
            if theirs != ours:
                raise ValueError(
                    f"HTreeAttention: cache must have the options of the layer ({name} = {ours!r}), got {theirs!r}"
                )
        if self.options.scope == "q_head":
            k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=2) for x in (k, v))
        cache.append(k, v)
        out = cache.attend(q)
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """A projection of x [B, T, E] as [B, T, heads, head_dim], with the heads that this rank has."""
        rows: Tensor = getattr(self, name)(x)
        if rows.shape[-1] % self.head_dim:
            raise ValueError(
                f"HTreeAttention: {name} must give whole heads of {self.head_dim} channels, got {rows.shape[-1]}: "
                "heads that the ranks do not divide stay whole on every rank"
            )
        return rows.unflatten(-1, (-1, self.head_dim))

    def forward(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cache: TreeKVCache | None = None,
    ) -> Tensor:
        """Attends causally within each sequence.

        Args:
            x: [B, T, E]; with ``cp_group`` this rank's tokens, as :func:`htree_ops.distributed.shard_sequence` gives
                them.
            attn_mask, key_padding_mask: must be None; they exist so that they can be refused by name.

        Returns:
            [B, T, E] in the dtype of x (of autocast, where it is on).

        Raises:
            ShapeMismatchError: another shape of x.
            UnsupportedDtypeError: x has another dtype than the parameters of an ``nn.Linear``, outside autocast; a
                layer that has replaced ``q_proj`` checks x itself.
            NotImplementedError: a mask or padding is given, or a cache beside ``cp_group``.
            TypeError, ValueError: a cache of another class, of other options or sizes, or without room.
            ValueError: projections that are sharded over ranks give query and key heads that do not belong together.
        """
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if mask is not None:
                raise NotImplementedError(
                    f"HTreeAttention: {name} is not supported: the attention is causal over the whole "
                    "sequence. Run sequences of different lengths one by one, or pad at the end and ignore "
                    "those rows"
                )
        check_tensor("HTreeAttention", "x", x)
        if type(self.q_proj) is nn.Linear:  # a layer that replaced it, such as FP8Linear, has its own rule
            dtype = self.q_proj.weight.dtype
            if not x.is_floating_point() or (x.dtype != dtype and autocast_dtype(x.device) is None):
                refuse(
                    UnsupportedDtypeError,
                    f"HTreeAttention: x must have the dtype of the parameters ({dtype}), got {x.dtype}",
                    dtype=x.dtype,
                    supported_dtypes=(dtype,),
                    tensor_name="x",
                )
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            refuse(
                ShapeMismatchError,
                f"HTreeAttention: x must be [B, T, {self.embed_dim}], got {tuple(x.shape)}",
                expected=("B", "T", self.embed_dim),
                actual=tuple(x.shape),
                tensor_name="x",
            )
        q, k, v = (self._heads(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        # Under tensor parallelism the projections of a rank may give some of the heads.
        if q.shape[2] * self.num_kv_heads != k.shape[2] * self.num_heads:
            raise ValueError(
                f"HTreeAttention: the projections must give {self.num_heads // self.num_kv_heads} query heads per key "
                f"head, got {q.shape[2]} and {k.shape[2]}: shard all three or, where num_kv_heads = "
                f"{self.num_kv_heads} is no multiple of the ranks, none"
            )
        if cache is not None:
            if self.cp_group is not None:
                raise NotImplementedError(
                    "HTreeAttention: a cache is not supported beside cp_group: make the layer without a group to decode"
                )
            return self.o_proj(self._attend_from(cache, q, k, v).flatten(2))
        attend: Callable[..., Any] = tree_attention
        if self.cp_group is not None:
            from htree_ops.distributed import tree_attention_cp  # only where it is asked for

            attend = partial(tree_attention_cp, group=self.cp_group, balance=self.cp_balance)
        options = self.options
        out = attend(
            q,
            k,
            v,
            compression_rate=options.compression_rate,
            max_top_nodes=options.max_top_nodes,
            top_k=options.top_k,
            selection_stride=options.selection_stride,
            scale=options.scale,
            rope_base=options.rope_base,
            importance=options.importance,
            scope=options.scope,
            store_parents=options.store_parents,
            selection_span=options.selection_span,
        )
        return self.o_proj(out.flatten(2))

    def extra_repr(self) -> str:
        """Sizes and the options that shape the tree."""
        sizes = {name: getattr(self, name) for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim")}
        return ", ".join(f"{name}={value!r}" for name, value in (sizes | self.options.to_dict()).items())
