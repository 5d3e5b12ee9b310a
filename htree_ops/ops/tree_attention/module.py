"""The attention layer around tree attention (docs/semantics/tree_attention.md §1).

One class, with every way of a call; half of the lines are its documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from htree_ops.errors import UnsupportedDtypeError, refuse
from htree_ops.ops.arguments import (
    FLOATING_AND_DOUBLE,
    autocast_dtype,
    check_devices,
    check_int,
    check_kind,
    check_option_dtype,
    check_tensor,
    option_device,
    refuse_shape,
    validate_arguments_as,
)
from htree_ops.ops.index_loss.collector import Attended, collect, is_fitting
from htree_ops.ops.index_loss.layers import (
    WEIGHTS,
    add_index_,
    choose_by_index,
    draw_index_,
    index_of,
    know,
    set_index_,
)
from htree_ops.ops.paging import is_recorded
from htree_ops.ops.ranks import beside
from htree_ops.ops.tree_attention.attention import Balance, check_balance, expand_heads
from htree_ops.ops.tree_attention.index import TreeOf, every_node, resolve_index_dim
from htree_ops.ops.tree_attention.options import (
    NAMES,
    OTHER_CHOICES,
    Goal,
    Positions,
    TreeKeywords,
    TreeOptions,
    check_frequencies,
    other_choices,
    recommended_options,
    tree_options,
)
from htree_ops.ops.tree_attention.padding import Padding
from htree_ops.ops.tree_cache.cache import TreeKVCache
from htree_ops.ops.tree_cache.lengths import counts_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def _joined(out: Tensor) -> Tensor:
    """The heads [..., heads, head_dim] of an attention as channels.

    The gradient of a DTensor comes back as its channels lie here: one that is cut elsewhere would cut a head.
    """
    rows: Any = out.flatten(-2)
    return rows.redistribute(placements=rows.placements) if hasattr(rows, "device_mesh") else rows


@validate_arguments_as(
    "HTreeAttention", cu_seq_q="cu_seqlens", cu_seq_k="cu_seqlens", max_q="max_seqlen", max_k="max_seqlen"
)
def _attend_packed(
    tree: TreeOf, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Documents whose queries are all of their tokens."""
    return tree.documents(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)


class HTreeAttention(nn.Module):
    """Causal self-attention layer with :func:`tree_attention` between its projections.

    ``o_proj(tree_attention(rotated(q_proj(x)), rotated(k_proj(x)), v_proj(x)))``. Without options it selects as the
    measurements recommend for quality (:meth:`recommended`), by an index that has to learn: by
    :func:`htree_ops.fit_index` or :func:`htree_ops.index_losses`. Its positions serve weights that were trained
    densely. :meth:`from_documents` makes the layer of the design documents.

    Parameters are those of ``q_proj`` [num_heads * head_dim, embed_dim], ``k_proj`` and ``v_proj`` [num_kv_heads *
    head_dim, embed_dim] and ``o_proj`` [embed_dim, num_heads * head_dim]. With an index also ``index_query_weight``
    [num_heads, head_dim, index_dim] and ``index_key_weight`` [num_kv_heads, head_dim, index_dim], which do not require
    grad until :func:`htree_ops.index_losses` has seen the layer. A state dict without them loads, the index as it was
    made.

    Args:
        embed_dim: E, width of the input and the output.
        num_heads: H, query heads.
        num_kv_heads: H_kv, key and value heads, a divisor of H; None is H.
        head_dim: K = V, even; None is embed_dim / num_heads.
        bias: whether the projections have one.
        cp_group: ranks that share the tokens, for :func:`htree_ops.distributed.tree_attention_cp` and its variant for
            packed documents; None is this process alone.
        cp_balance: how they share them, "zigzag", "striped", "contiguous" or "work".
        device, dtype: of the parameters.
        positions: where q and k are rotated. "own": each at its token's place in its sequence or document, before the
            tree is built, as dense models do, so that weights of these serve at any length that they were trained for.
            "compact": inside of the attention, at a node's place among the candidates of a query (§1.4), none of which
            reaches the larger one of top_k * compression_rate and ``max_top_nodes``, which a stride rounds up. Up to
            ``max_top_nodes`` tokens both are the same. Beyond, models that are trained from scratch find more with
            "compact"; dense weights fit "own" alone (docs/quality.md (a), (b)).
        index_dim: d, numbers of an index query and of an index key, a multiple of 16 up to 128 and up to head_dim; 0 is
            no index. None is 32, where head_dim is below that the largest multiple of 16 that fits, else 0; and 0
            beside selection_span, another importance than "lse_causal" or scope="q_head". The index is linear in q and
            k as the attention takes them: of a K/V head the sum of ``q @ index_query_weight`` over its query heads, and
            ``k @ index_key_weight``. The layer selects by it as ``tree_attention(..., index=...)`` does. It learns by
            :func:`htree_ops.fit_index` or :func:`htree_ops.index_losses`; until then it is a random projection, which
            warns once.
        options, keywords: as in :func:`tree_attention`, with rope_base and inv_freq for either kind of positions. Where
            ``options`` is None, keywords that are not given are the recommended ones: ``top_k=128`` and
            ``max_top_nodes=8192``. Without an index it is ``selection_span=2`` in their place, where ``importance`` is
            "lse_causal" and ``compression_rate`` even.

    Attributes:
        options: the :class:`htree_ops.TreeOptions`. ``layer.options = dataclasses.replace(layer.options, top_k=256)``
            changes one.
        positions: as given.

    Raises:
        TypeError: a size is not an int, or another option has a wrong type. DeviceError: a device torch does not know.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
        ValueError: a size or option out of range, sizes that do not divide, or an odd head_dim.

    Example:
        >>> layer = HTreeAttention(64, num_heads=4, num_kv_heads=2, top_k=8, max_top_nodes=128)
        >>> layer(torch.randn(1, 1000, 64)).shape
        torch.Size([1, 1000, 64])
    """

    _frequencies: tuple[Any, Tensor] | None = None
    index_query_weight: nn.Parameter  # None without an index
    index_key_weight: nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        options: TreeOptions | None = None,
        cp_group: ProcessGroup | DeviceMesh | None = None,
        cp_balance: Balance = "zigzag",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        positions: Positions = "own",
        index_dim: int | None = None,
        **keywords: Unpack[TreeKeywords],
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in (sizes if head_dim is None else sizes | {"head_dim": head_dim}).items():
            check_int("HTreeAttention", name, size, 1)
        check_kind("HTreeAttention", "bias", bias, "bool")
        if device is not None:
            option_device("HTreeAttention", device)
        if dtype is not None:
            check_option_dtype("HTreeAttention", dtype, FLOATING_AND_DOUBLE)
        if cp_group is not None:
            from torch.distributed import ProcessGroup  # only where it is asked for
            from torch.distributed.device_mesh import DeviceMesh

            if not isinstance(cp_group, (ProcessGroup, DeviceMesh)):
                came = type(cp_group).__name__
                raise TypeError(f"HTreeAttention: cp_group must be a ProcessGroup or DeviceMesh, got {came}")
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
        asked = tree_options("HTreeAttention", options, keywords)
        self.index_dim = resolve_index_dim("HTreeAttention", index_dim, head_dim, asked)
        if options is None:
            asked = recommended_options("HTreeAttention", "quality", keywords, self.index_dim > 0)
        self.options = asked
        if positions not in get_args(Positions):
            raise ValueError(
                f"HTreeAttention: positions must be one of {', '.join(get_args(Positions))}, got {positions!r}"
            )
        self.positions = positions
        check_frequencies("HTreeAttention", self.options, head_dim)
        check_balance("HTreeAttention", cp_balance, "cp_balance")
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
        if self.index_dim:
            add_index_(self, num_heads, num_kv_heads, head_dim, self.index_dim, device, dtype)
        else:
            for name in WEIGHTS:
                self.register_parameter(name, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A new index; the projections have a ``reset_parameters`` of their own.

        Of each K/V head a random orthonormal projection, the same for its query heads, such that a product of the index
        is on average that of a query with a key, the mean over the heads.
        """
        if self.index_dim:
            draw_index_(self)

    def _take_index(self, query_weight: Tensor, key_weight: Tensor) -> None:
        """Selects by a fitted index from now on, in the place of spans or of an index that the layer had."""
        if not self.index_dim:
            self.index_dim = key_weight.shape[2]
            self.options = replace(self.options, selection_span=None)
            weight: Any = getattr(self.k_proj, "weight", None)
            dtype = getattr(weight, "dtype", None)  # of FP8Linear none of these
            dtype = dtype if dtype in FLOATING_AND_DOUBLE else key_weight.dtype
            sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.index_dim)
            add_index_(self, *sizes, key_weight.device, dtype)
        set_index_(self, query_weight, key_weight)

    def index_of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries and index keys [..., H_kv, index_dim] of q [..., H, K] and k [..., H_kv, K].

        Where the weights are sharded over ranks these are of this rank's heads, or DTensors of all.

        Raises:
            ValueError: the layer has no index, or q and k have other heads.
        """
        if not self.index_dim:
            raise ValueError("HTreeAttention.index_of: index_dim must be above 0, got 0")
        return index_of("HTreeAttention.index_of", q, k, self.index_query_weight, self.index_key_weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> HTreeAttention:
        """A copy that shares the tokens with the same ranks: Python cannot copy a process group."""
        copied = type(self).__new__(type(self))
        memo |= {id(self): copied, id(self.cp_group): self.cp_group}
        copied.__setstate__(deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What a copy or a loaded layer is made of."""
        super().__setstate__(state)
        if self.index_dim:
            know(self)

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
        **keywords: Any,
    ) -> HTreeAttention:
        """A layer with the selection that the measurements recommend for a goal.

        It selects by an index of ``index_dim=None`` numbers, with ``top_k=128, max_top_nodes=8192``. ``goal="quality"``
        is ``selection_stride=1``, which a layer without options has too; ``goal="speed"`` is ``selection_stride=4``.
        Without an index it has ``selection_span=2`` in the place of these. docs/quality.md has what models keep.

        Args:
            goal: what to favour.
            keywords: further keywords of :class:`HTreeAttention`; options among them come before what ``goal`` chooses.
            The others: as in :class:`HTreeAttention`.

        Raises:
            TypeError, UnsupportedDtypeError, ValueError: as :class:`HTreeAttention`; another goal is a ValueError.
        """
        if "options" in keywords:
            raise TypeError(
                "HTreeAttention.recommended: options must be given one by one, as keywords, got options"
            )
        given = {name: value for name, value in keywords.items() if name in NAMES}
        layer = cls(embed_dim, num_heads, num_kv_heads, head_dim, bias, **keywords)
        layer.options = recommended_options("HTreeAttention.recommended", goal, given, layer.index_dim > 0)
        return layer

    @classmethod
    def from_documents(
        cls,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        **keywords: Any,
    ) -> HTreeAttention:
        """The layer of the design documents: compact positions, and candidates scored by the mean of their keys.

        These are the descriptions of public projects that this library was first written after; tree attention is that
        of skywong14/htree (docs/ops.md has all sources). The layer is
        ``HTreeAttention(..., options=TreeOptions(), positions="compact")``, with ``keywords`` in place of these.
        """
        given: dict[str, Any] = {
            "options": TreeOptions(),
            "positions": "compact",
            "index_dim": 0,
            **keywords,
        }
        return cls(embed_dim, num_heads, num_kv_heads, head_dim, bias, **given)

    def make_cache(
        self,
        batch: int,
        capacity: int,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        leaf_bits: int | None = None,
        prompt_bytes: int | None = None,
        index_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> TreeKVCache:
        """An empty cache for this layer and its options, of ``batch`` sequences of at most ``capacity`` tokens.

        Where the projections are sharded over ranks by heads, it holds those of this rank.

        Args:
            page_size, num_pages, leaf_bits, prompt_bytes, index_dtype: as in :class:`htree_ops.TreeKVCache`. In float32
                the layer with the cache selects as without one only where index_dtype is float32 too. With
                float8_e4m3fn it selects by rounded keys, and no row measures what that costs a model.
            dtype, device: None is that of the keys that the layer will give: the dtype of autocast where it is on, else
                that of the parameters. A cache serves calls under the autocast that it was made under. Where ``k_proj``
                was replaced by a layer without a floating weight, such as FP8Linear, dtype must be given outside of
                autocast.

        Raises:
            ValueError: a size out of range or importance="lse"; no dtype.
        """
        options = self._of_attention()
        weight: Any = getattr(self.k_proj, "weight", None)  # a layer in its place may have none
        if device is None:
            tensors = chain(self.k_proj.parameters(), self.k_proj.buffers())
            device = next((x.device for x in tensors), None)
        if dtype is None:
            dtype = getattr(weight, "dtype", None)
            if dtype != torch.float64:  # which autocast leaves alone
                dtype = autocast_dtype(option_device("HTreeAttention.make_cache", device)) or dtype
            if dtype not in FLOATING_AND_DOUBLE:
                raise ValueError(
                    "HTreeAttention.make_cache: dtype must be given, that of the keys and values, because "
                    f"{type(self.k_proj).__name__} in the place of k_proj does not tell it, got None"
                )
        heads = self.num_heads if options.scope == "q_head" else self.num_kv_heads
        if hasattr(weight, "to_local"):  # sharded over ranks: each of them keeps its own heads
            heads = heads * weight.to_local().shape[0] // weight.shape[0]
        return TreeKVCache(
            batch,
            heads,
            self.head_dim,
            capacity,
            options=options if options.scope == "kv_head" else replace(options, scope="kv_head"),
            page_size=page_size,
            num_pages=num_pages,
            leaf_bits=leaf_bits,
            prompt_bytes=prompt_bytes,
            index_dim=self.index_dim,
            index_dtype=index_dtype,
            dtype=dtype,
            device=device,
        )

    def _attend_from(self, cache: TreeKVCache, x: Tensor, lengths: Tensor | Sequence[int] | None) -> Tensor:
        """Adds the tokens [B, T, E] to the cache, or the first ``lengths[b]`` of each sequence; the layer on them."""
        if not isinstance(cache, TreeKVCache):
            raise TypeError(f"HTreeAttention: cache must be a TreeKVCache, got {type(cache).__name__}")
        if cache.index_dim != self.index_dim:
            raise ValueError(
                f"HTreeAttention: cache must have the index_dim of the layer = {self.index_dim}, got "
                f"{cache.index_dim}: make_cache of the layer makes one"
            )
        options = self._of_attention()
        if cache.options is not options and cache.options.packed() != options.packed():
            name, ours, theirs = options.difference(cache.options)
            raise ValueError(
                f"HTreeAttention: cache must have the options of the layer ({name} = {ours!r}), got {theirs!r}"
            )
        if cache.batch != x.shape[0]:
            raise ValueError(
                f"HTreeAttention: cache must have the batch of x = {x.shape[0]}, got {cache.batch}: a sequence "
                "without new tokens has rows too, and 0 in lengths"
            )
        counts = None
        if lengths is not None:
            counts, _ = counts_of("HTreeAttention", lengths, cache.batch, 0, x.shape[1], cache.device)
        q, k, v = self._project(x)
        for name, rows in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            if type(rows) is not Tensor and hasattr(rows, "device_mesh"):
                raise NotImplementedError(
                    f"HTreeAttention: cache must be None where {name} gives a DTensor, because a cache holds the heads "
                    "of its rank: shard q_proj, k_proj and v_proj by ColwiseParallel(use_local_output=True), its "
                    "default, or none of them"
                )
        if self._rotates:
            places = cache.lengths[:, None]
            if q.shape[1] != 1:
                places = places + torch.arange(q.shape[1], device=cache.device)
            q, k = self._rotated(q, k, places)
        index = choose_by_index("HTreeAttention", self, q, k) if self.index_dim else None
        out = cache.decode(q, *expand_heads(options, q, k, v), lengths, index=index)
        assert isinstance(out, Tensor)  # a pair only with return_lse
        y: Tensor = self.o_proj(out.flatten(2))
        if counts is None:
            return y
        behind = torch.arange(x.shape[1], device=y.device) >= counts.to(y.device)[:, None]
        return y.masked_fill(behind[..., None], 0)

    def _heads(self, name: str, rows: Tensor) -> Tensor:
        """A projection [..., heads * head_dim] as [..., heads, head_dim], with the heads that this rank has."""
        *lead, channels = rows.shape
        if type(rows) is Tensor and channels % self.head_dim == 0:
            return rows.view(*lead, channels // self.head_dim, self.head_dim)
        # A DTensor has the channels of all ranks, and may say itself that a head would be cut.
        mesh = getattr(rows, "device_mesh", None)
        if channels % self.head_dim == 0:
            try:
                return rows.unflatten(-1, (-1, self.head_dim))
            except RuntimeError:
                if mesh is None:
                    raise
        came = channels if mesh is None else f"{channels} on {mesh.size()} ranks"
        raise ValueError(
            f"HTreeAttention: {name} must give whole heads of {self.head_dim} channels, got {came}: "
            "heads that the ranks do not divide stay whole on every rank"
        )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, with the heads before the last dim."""
        q = self._heads("q_proj", self.q_proj(x))
        k = self._heads("k_proj", self.k_proj(x))
        v = self._heads("v_proj", self.v_proj(x))
        # Under tensor parallelism the projections of a rank may give some of the heads.
        if q.shape[-2] * self.num_kv_heads != k.shape[-2] * self.num_heads:
            raise ValueError(
                f"HTreeAttention: the projections must give {self.num_heads // self.num_kv_heads} query heads per key "
                f"head, got {q.shape[-2]} and {k.shape[-2]}: shard all three or, where num_kv_heads = "
                f"{self.num_kv_heads} is no multiple of the ranks, none"
            )
        return q, k, v

    def _of_attention(self) -> TreeOptions:
        """The options of the attention: what the layer has rotated is not rotated there."""
        options = self.options if self.positions == "compact" else self._unrotated_options
        return options.beside_index() if self.index_dim else options

    @property
    def options(self) -> TreeOptions:
        return self._options

    @options.setter
    def options(self, options: TreeOptions) -> None:
        if not isinstance(options, TreeOptions):
            raise TypeError(f"HTreeAttention: options must be TreeOptions, got {type(options).__name__}")
        if self.index_dim and (others := other_choices(options)):
            name = others[0]
            raise ValueError(
                f"HTreeAttention: options must have {name} = {OTHER_CHOICES[name]!r} beside index_dim = "
                f"{self.index_dim}, got {getattr(options, name)!r}"
            )
        # Both are made here: what a forward call added to the layer would compile it a second time.
        unrotated = tree_options("HTreeAttention", options, {"rope_base": None, "inv_freq": None})
        self._options, self._unrotated_options = options, unrotated

    @property
    def _rotates(self) -> bool:
        return self.positions == "own" and self.options.rope_base is not None

    def _rotated(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [B, T, heads, K] at the tokens' ``places``, ints [T] or [B, T] that every rank has whole."""
        if places.numel() == 0:
            return q, k
        # A table of just these rows: that of a whole cache would be made again in each step that a graph records.
        device = places.device
        angles = places.view(-1, 1) * self._rotation_frequencies(device)
        cos, sin = angles.cos(), angles.sin()
        if q.dtype != torch.float64:
            cos, sin = cos.float(), sin.float()
        rows = torch.arange(len(angles), device=device).view_as(places)
        if type(q) is not Tensor:
            cos, sin, rows = (beside(x, q) for x in (cos, sin, rows))
        return torch.ops.htree.rope(q, cos, sin, rows), torch.ops.htree.rope(k, cos, sin, rows)

    def _rotation_frequencies(self, device: torch.device) -> Tensor:
        """The rotation frequencies [K/2] of a layer that rotates, float64; kept for the next call outside of graphs."""
        half, base, given = self.head_dim // 2, self.options.rope_base, self.options.inv_freq
        key = (base, given, half, device)
        recorded = is_recorded(device)
        if not recorded and self._frequencies is not None and self._frequencies[0] == key:
            return self._frequencies[1]
        if given is not None:
            found = torch.tensor(given, dtype=torch.float64, device=device)
        else:
            assert base is not None  # _rotates
            found = base ** (torch.arange(half, dtype=torch.float64, device=device) / -half)
        if not recorded and type(found) is Tensor:  # not one of a tracer
            self._frequencies = (key, found)
        return found

    def _attend(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The layer on [B, T, E], of which each sequence has ``lengths`` tokens, None for T."""
        q, k, v = self._project(x)
        if self._rotates:
            q, k = self._rotated(q, k, self._places(x))
        if self.cp_group is None:
            return self.o_proj(_joined(self._tree().sequences(q, k, v, lengths)))
        from htree_ops.distributed import tree_attention_cp  # only where it is asked for

        shared = self._shared(q, k, x.shape[1])
        out = tree_attention_cp(q, k, v, self.cp_group, **shared)
        assert isinstance(out, Tensor)  # a pair only with return_lse
        self._learn_shared(q, k)
        return self.o_proj(_joined(out))

    def _shared(self, q: Tensor, k: Tensor, tokens: int) -> dict[str, Any]:
        """How the ranks of ``cp_group``, of which this one has so many tokens, attend to a sequence that they share."""
        options, index = self._of_attention(), None
        if is_fitting():
            from htree_ops.distributed.collectives import group_of

            options = every_node(options, tokens * group_of("HTreeAttention", self.cp_group).size())
        elif self.index_dim:
            index = choose_by_index("HTreeAttention", self, q, k)
        return {"index": index, "balance": self.cp_balance, "options": options}

    def _learn_shared(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Adds the loss of a call on ranks that share tokens: after the attention, which compares what they have."""
        if self.index_dim or is_fitting():
            scale, rate = self.options.scale, self.options.compression_rate
            of_ranks: dict[str, Any] = {
                "cu_seqlens": cu_seqlens,
                "group": self.cp_group,
                "balance": self.cp_balance,
            }
            collect(self, Attended("HTreeAttention", q, k, scale, rate, **of_ranks))

    def _tree(self) -> TreeOf:
        """The attention between the projections."""
        return TreeOf("HTreeAttention", self._of_attention(), self, self.index_dim > 0)

    def _places(self, x: Tensor) -> Tensor:
        """Where the tokens [..., T, E] of this rank stand in their sequence, [T]."""
        if self.cp_group is None:
            return torch.arange(x.shape[-2], device=x.device)
        from htree_ops.distributed.documents import positions_of

        return positions_of(x.shape[-2], self.cp_group, self.cp_balance, x.device)

    def _attend_documents(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
        """The layer on packed documents [N, E], of which this rank may have some rows, with offsets on the CPU."""
        check_tensor("HTreeAttention", "cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            words = "[documents + 1]"
            refuse_shape("HTreeAttention", "cu_seqlens", cu_seqlens, words, ("documents + 1",))
        if self.cp_group is None:
            check_devices("HTreeAttention", {"x": x, "cu_seqlens": cu_seqlens})
        rows = self._places(x)
        behind = (rows >= cu_seqlens[-1])[:, None]
        q, k, v = self._project_documents(x.masked_fill(behind, 0), rows, cu_seqlens)
        if self.cp_group is None:
            longest = x.shape[0] if max_seqlen is None else max_seqlen
            out = _attend_packed(self._tree(), q, k, v, beside(cu_seqlens, q), longest)
        else:
            from htree_ops.distributed import tree_attention_varlen_cp

            shared: Any = self._shared(q, k, x.shape[0])
            out = tree_attention_varlen_cp(q, k, v, cu_seqlens, self.cp_group, **shared)
            self._learn_shared(q, k, cu_seqlens)
        y = self.o_proj(_joined(out))
        return y.masked_fill(beside(behind, y), 0)

    def _project_documents(
        self, x: Tensor, rows: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the rows [n] of packed documents, rotated at their places in these."""
        q, k, v = self._project(x)
        if not self._rotates:
            return q, k, v
        offsets = cu_seqlens.to(x.device)
        document = torch.bucketize(rows, offsets[1:], right=True)
        places = (rows - offsets[document]).clamp(min=0)  # descending offsets are refused where they are read
        q, k = self._rotated(q[None], k[None], places)
        return q[0], k[0], v

    def _check_x(self, x: Tensor, is_packed: bool) -> None:
        check_tensor("HTreeAttention", "x", x)
        projection = self.q_proj
        if type(projection) is nn.Linear:  # a layer that replaced it, such as FP8Linear, has its own rule
            dtype = projection.weight.dtype
            if x.dtype != dtype and (not x.is_floating_point() or autocast_dtype(x.device) is None):
                refuse(
                    UnsupportedDtypeError,
                    f"HTreeAttention: x must have the dtype of the parameters ({dtype}), got {x.dtype}",
                    dtype=x.dtype,
                    supported_dtypes=(dtype,),
                    tensor_name="x",
                )
        fits = (x.dim() == 2 or (x.dim() == 3 and x.shape[0] == 1)) if is_packed else x.dim() == 3
        if not fits or x.shape[-1] != self.embed_dim:
            width = self.embed_dim
            words = f"[1, N, {width}] or [N, {width}] with cu_seqlens" if is_packed else f"[B, T, {width}]"
            refuse_shape("HTreeAttention", "x", x, words, ("N", width) if is_packed else ("B", "T", width))

    def forward(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cache: TreeKVCache | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attends causally within each sequence, or within each document.

        Nothing of padding reaches a real row or a gradient, whatever stands there.

        Args:
            x: [B, T, E], with ``cu_seqlens`` [1, N, E] or [N, E]; with ``cp_group`` this rank's tokens, as
                :func:`htree_ops.distributed.shard_sequence` gives them.
            attn_mask: must be None; it exists so that it can be refused by name.
            key_padding_mask: bool [B, T], True at padding as in ``torch.nn.MultiheadAttention``. Padding stands at one
                or both ends of a sequence, whose first real row is its token 0. The host reads nothing.
            cache: x holds the new tokens of its sequences.
            lengths: with ``cache``, how many of the T tokens of each sequence count, 0 ... T, which come first: prompts
                of several lengths, with every ``selection_stride``. None is T.
            cu_seqlens: int32 [documents + 1], ascending from 0: document i is the rows cu_seqlens[i] ...
                cu_seqlens[i + 1] - 1, as in :func:`htree_ops.tree_attention_varlen`, which says when it reads them.
                With ``cp_group`` they are of the whole sequence and best on the CPU, for each layer reads them, as in
                :func:`htree_ops.distributed.tree_attention_varlen_cp`.
            max_seqlen: no document is longer; None is N.

        Returns:
            The shape of x, in its dtype (of autocast, where it is on). Padded rows, rows at or behind ``lengths[b]``,
            and rows at or behind cu_seqlens[-1], are 0. On CUDA and under torch.compile, where nothing is read, the
            other rows of a sequence with padding between tokens are NaN.

        Raises:
            ShapeMismatchError: another shape of x or of the mask.
            UnsupportedDtypeError: x has another dtype than the parameters of an ``nn.Linear``, outside autocast; a
                layer that has replaced ``q_proj`` checks x itself. A mask that is not bool.
            NotImplementedError: attn_mask is given; a cache or a mask beside ``cp_group``; a cache beside projections
                that give DTensors.
            TypeError, ValueError: a cache of another class, of other options or sizes, or full; lengths outside
                0 ... T; more than one of key_padding_mask, cache and cu_seqlens; key_padding_mask with
                importance="lse"; on the CPU padding between tokens, or documents that do not fit.
            ValueError: projections that are sharded over ranks give query and key heads that do not belong together.
        """
        if attn_mask is not None:
            raise NotImplementedError(
                "HTreeAttention: attn_mask is not supported: the attention is causal over the whole sequence. "
                "key_padding_mask leaves out padding, cu_seqlens separates packed documents"
            )
        given = (("key_padding_mask", key_padding_mask), ("cache", cache), ("cu_seqlens", cu_seqlens))
        names = [name for name, value in given if value is not None]
        if len(names) > 1:
            raise ValueError(f"HTreeAttention: {names[1]} must be None where {names[0]} is given")
        if names and self.cp_group is not None and cu_seqlens is None:
            what = "a cache" if cache is not None else names[0]
            raise NotImplementedError(
                f"HTreeAttention: {what} is not supported beside cp_group: make the layer without a group"
                f"{' to decode' if cache is not None else ''}"
            )
        if lengths is not None and cache is None:
            came = type(lengths).__name__
            raise ValueError(f"HTreeAttention: lengths must be None where cache is None, got {came}")
        if max_seqlen is not None:
            check_int("HTreeAttention", "max_seqlen", max_seqlen, 0)
            if cu_seqlens is None:
                raise ValueError(
                    f"HTreeAttention: max_seqlen must be None where cu_seqlens is None, got {max_seqlen}"
                )
        self._check_x(x, is_packed=cu_seqlens is not None)
        if cu_seqlens is not None:
            return self._attend_documents(x.flatten(0, -2), cu_seqlens, max_seqlen).view(x.shape)
        if cache is not None:
            return self._attend_from(cache, x, lengths)
        if key_padding_mask is None:
            return self._attend(x)
        padding = Padding.of("HTreeAttention", x, key_padding_mask, self.options.importance)
        return padding.from_front(self._attend(padding.to_front(x), (~padding.mask).sum(1)))

    def extra_repr(self) -> str:
        """Sizes and the options that shape the tree."""
        sizes = {name: getattr(self, name) for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim")}
        sizes |= {"index_dim": self.index_dim} if self.index_dim else {}
        shown = sizes | {"positions": self.positions} | self.options.to_dict()
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
