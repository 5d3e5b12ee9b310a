"""Attention that reads its prompt dense and decodes from a compressed cache (docs/semantics §4.2-4.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from htree_ops.ops.arguments import (
    FLOATING,
    autocast_dtype,
    check_dtype,
    check_int,
    check_kind,
    check_number,
    check_option_dtype,
    check_shape,
    check_tensors,
    option_device,
    refuse_shape,
    validate_arguments_as,
)
from htree_ops.ops.compressed_kv.cache import CompressedKVCache
from htree_ops.ops.compressed_kv.checks import check_policy, pair, prompt_lengths
from htree_ops.ops.compressed_kv.format import check_format, check_hadamard_group, num_kept
from htree_ops.ops.tree_attention.stages import rope_cache

OP = "MustafarAttention"


def key_weight_from_queries(
    q: Tensor, num_kv_heads: int, last: int = 32, lengths: Sequence[int] | None = None
) -> Tensor:
    """How much the channels of the keys matter to the latest queries: the output-aware weight of §4.4.

    w_d is the sum over the query heads of a K/V head of the mean of |q_d| over the last ``last`` queries. Give it to
    ``kv_compress``, or to a cache as its ``key_weight``.

    Args:
        q: [B, S, H, D], S at least 1, rotated; H a multiple of num_kv_heads.
        lengths: number of queries of each sequence, which come first in its row; None is S for all.

    Returns:
        float32 [B, H_kv, D].

    Raises:
        ShapeMismatchError: another rank, no query, or an H that num_kv_heads does not divide.
        TypeError, ValueError: numbers or lengths of the wrong kind or out of range.
    """
    op = "key_weight_from_queries"
    check_tensors(op, q=(q, "B S H D"))
    check_int(op, "num_kv_heads", num_kv_heads, 1)
    check_int(op, "last", last, 1)
    if q.shape[2] % num_kv_heads or not q.shape[1]:
        words = f"[B, S >= 1, a multiple of {num_kv_heads}, D]"
        refuse_shape(op, "q", q, words, f"a multiple of {num_kv_heads} heads")
    stop = torch.tensor(prompt_lengths(op, lengths, q.shape[0], q.shape[1]), device=q.device)[:, None]
    rows = torch.arange(q.shape[1], device=q.device)
    share = ((rows < stop) & (rows >= stop - last)).float()
    share = share / share.sum(dim=1, keepdim=True).clamp(min=1.0)
    # a NaN in a row without a share has no weight
    sizes = q.detach().float().abs().masked_fill((share == 0)[..., None, None], 0.0)
    heads = torch.einsum("bshd,bs->bhd", sizes, share)
    return heads.unflatten(1, (num_kv_heads, -1)).sum(dim=2)


@validate_arguments_as(OP, positions="position_ids")
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """:func:`htree_ops.ops.tree_attention.stages.rope` in the words of the module."""
    return torch.ops.htree.rope(x, cos, sin, positions)


class MustafarAttention(nn.Module):
    """Rotary positions, dense causal attention over a prompt, then decoding from a :class:`CompressedKVCache`.

    It has no parameters: the caller projects. The order is rotation, optional Hadamard transform, pruning,
    quantisation, packing. The transform spreads outliers, which helps few bits and hurts pruning
    (docs/semantics §4.3); keys are therefore pruned or transformed, not both. Transformed keys give the scores of
    the keys themselves: for head_group_num = 1 because the transform is orthonormal, for larger groups because the
    query is expanded to the stored row of its whole group (§4.2).
    Source: docs/semantics §4.2-4.6, design document [003].

    Args:
        num_heads: H, query heads. num_kv_heads: H_kv, a divisor of H; None is H.
        head_dim: D of queries and keys, a multiple of 64 up to 512; transformed keys need a power of two.
        value_dim: D of values, a multiple of 64 up to 512; None is that of keys.
        sparsity: part of the channels that is dropped, one number or (keys, values). By default half, but none of the
            keys where those are transformed.
        bits: 16, 8 or 4 per kept value, one number or (keys, values).
        use_grouped_hadamard: store the transform of the keys.
        head_group_num: G, adjacent K/V heads that are transformed together; a divisor of H_kv.
        output_aware: prune the prompt's keys with weights from its last ``window`` queries.
        rope_base: base of the rotary angles, half-split; None for inputs that are rotated already.
        max_positions: number of positions that can be rotated, from 0 on.
        scale: factor of the scores; None for D^-1/2.
        window, chunk, page_size, split_size: of the cache.
        dtype: of the caches that :meth:`make_cache` makes; ``module.half()`` and the like change it. The module
            computes in the dtype of its inputs.

    Raises:
        ShapeMismatchError: another head_dim.
        TypeError: an option of another type.
        ValueError: num_heads is not a multiple of num_kv_heads, a sparsity outside [0, 1], other bits, a group
            without the transform, or pruned transformed keys.

    Example:
        >>> layer = MustafarAttention(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32)
        >>> cache = layer.make_cache(batch=1, capacity=1024)
        >>> for tokens in (100, 1):  # a prompt, then a token
        ...     q, k, v = (torch.randn(1, tokens, heads, 64) for heads in (8, 2, 2))
        ...     out = layer(q, k, v, cache=cache)
        >>> out.shape, cache.host_lengths()
        (torch.Size([1, 1, 8, 64]), [101])
    """

    tables: Tensor
    of_dtype: Tensor  # empty: it only has the dtype of the module

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int = 128,
        *,
        value_dim: int | None = None,
        sparsity: float | tuple[float, float] | None = None,
        bits: int | tuple[int, int] = 8,
        use_grouped_hadamard: bool = False,
        head_group_num: int = 1,
        output_aware: bool = False,
        rope_base: float | None = 10000.0,
        max_positions: int = 32768,
        scale: float | None = None,
        window: int = 32,
        chunk: int = 256,
        page_size: int | None = None,
        split_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        check_option_dtype(OP, dtype, FLOATING)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            check_int(OP, name, value, 1)
        check_int(OP, "head_group_num", head_group_num, 1)
        check_int(OP, "max_positions", max_positions, 1)
        check_policy(OP, window, chunk, page_size, split_size)
        check_kind(OP, "use_grouped_hadamard", use_grouped_hadamard, "bool")
        check_kind(OP, "output_aware", output_aware, "bool")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{OP}: num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if head_group_num > 1 and not use_grouped_hadamard:
            raise ValueError(f"{OP}: head_group_num = {head_group_num} needs use_grouped_hadamard=True")
        if sparsity is None:
            sparsity = (0.0 if use_grouped_hadamard else 0.5, 0.5)
        of_keys, of_values = pair(sparsity)
        value_dim = head_dim if value_dim is None else value_dim
        for prefix, width in (("", head_dim), ("v_", value_dim)):
            check_format(OP, width, 1, 8, prefix)
        self.keep = (num_kept(head_dim, of_keys), num_kept(value_dim, of_values))
        self.bits = pair(bits)
        for width, keep, one in zip((head_dim, value_dim), self.keep, self.bits, strict=True):
            check_format(OP, width, keep, one)
        if use_grouped_hadamard and self.keep[0] != head_dim:
            raise ValueError(
                f"{OP}: transformed keys are not pruned, for the transform spreads what pruning looks for: the "
                f"sparsity of keys must be 0, got {of_keys}"
            )
        self.hadamard_group = head_group_num if use_grouped_hadamard else 0
        check_hadamard_group(OP, self.hadamard_group, num_kv_heads, head_dim)
        if rope_base is not None:
            check_number(OP, "rope_base", rope_base, positive=True)
        if scale is not None:
            check_number(OP, "scale", scale)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.output_aware, self.rope_base, self.scale = output_aware, rope_base, scale
        self.max_positions = max_positions
        self.window, self.chunk = window, chunk
        self.page_size, self.split_size = page_size, split_size
        self.register_buffer("tables", self._make_tables(device), persistent=False)
        self.register_buffer("of_dtype", torch.empty(0, dtype=dtype, device=device), persistent=False)

    def reset_parameters(self) -> None:
        """Computes the rotary table anew, for FSDP1, which calls this on every module that it takes from meta."""
        self.tables.copy_(self._make_tables(self.tables.device))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the caches that :meth:`make_cache` makes."""
        return self.of_dtype.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MustafarAttention:
        """Moves the rotary table with the module, but keeps it fp32."""
        kept = self.tables
        super()._apply(fn, recurse)
        if self.tables is not kept:
            self.tables = (
                self._make_tables(self.tables.device) if kept.is_meta else kept.to(self.tables.device)
            )
        return self

    def _make_tables(self, device: torch.device | str | None) -> Tensor:
        size = 0 if self.rope_base is None else self.max_positions
        return rope_cache(size, self.head_dim, self.rope_base or 1.0, device=device)

    def make_cache(
        self,
        batch: int,
        capacity: int,
        *,
        num_pages: int | None = None,
        rollback: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> CompressedKVCache:
        """An empty cache for this layer, of ``batch`` sequences of at most ``capacity`` tokens.

        Args:
            num_pages, rollback: as in :class:`CompressedKVCache`.
            dtype, device: None is that of the module; under autocast its dtype, as keys and values then have it.

        Raises:
            ValueError: capacity above ``max_positions`` where the module rotates.
            UnsupportedDtypeError: a dtype that a cache with these bits cannot have.
        """
        check_int(f"{OP}.make_cache", "capacity", capacity, 1)
        if self.rope_base is not None and capacity > self.max_positions:
            raise ValueError(
                f"{OP}.make_cache: capacity must be at most max_positions = {self.max_positions}, got {capacity}"
            )
        place = self.tables.device if device is None else option_device(f"{OP}.make_cache", device)
        if dtype is None:
            dtype = autocast_dtype(place) or self.dtype
        return CompressedKVCache(
            batch,
            self.num_kv_heads,
            self.head_dim,
            capacity,
            self.keep,
            self.bits,
            self.window,
            self.chunk,
            value_dim=self.value_dim,
            hadamard_group=self.hadamard_group,
            page_size=self.page_size,
            num_pages=num_pages,
            split_size=self.split_size,
            rollback=rollback,
            dtype=dtype,
            device=place,
        )

    def _positions(self, query: Tensor, cache: CompressedKVCache | None) -> Tensor:
        """[S] or [B, S]: the positions after those that the cache holds; rows behind the lengths may have the last."""
        held = [0] if cache is None else cache.host_lengths()
        tokens = torch.arange(query.shape[1], device=query.device)
        if held == held[:1] * len(held):
            tokens = tokens + (held[0] if held else 0)
        else:
            tokens = torch.tensor(held, device=query.device)[:, None] + tokens
        return tokens.clamp(max=self.max_positions - 1)

    def _check_positions(self, stops: Sequence[int], cache: CompressedKVCache | None) -> None:
        """Raises ValueError where tokens would be counted beyond the rotary table, which CUDA would not notice."""
        held = [0] * len(stops) if cache is None else cache.host_lengths()
        end = max([0, *(n + stop for n, stop in zip(held, stops, strict=True) if stop)])
        if self.rope_base is not None and end > self.max_positions:
            raise ValueError(
                f"{OP}: max_positions = {self.max_positions} must be at least the tokens with those that the cache "
                f"holds, got {end}"
            )

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position_ids: Tensor | None,
        cache: CompressedKVCache | None,
    ) -> None:
        check_tensors(OP, query=(query, "B S H D"), key=(key, "B S H_kv D"), value=(value, "B S H_kv V"))
        check_dtype(OP, FLOATING, query=query, key=key, value=value)
        for name, x, heads, width in (
            ("query", query, self.num_heads, self.head_dim),
            ("key", key, self.num_kv_heads, self.head_dim),
            ("value", value, self.num_kv_heads, self.value_dim),
        ):
            check_shape(OP, name, x, (*x.shape[:2], heads, width), f"[B, S, {heads}, {width}]")
        if position_ids is not None:
            rows = "S" if isinstance(position_ids, Tensor) and position_ids.dim() == 1 else "B S"
            check_tensors(OP, query=(query, "B S H D"), position_ids=(position_ids, rows))
            check_dtype(OP, (torch.int32, torch.int64), position_ids=position_ids)
        if cache is None:
            return
        if not isinstance(cache, CompressedKVCache):
            raise TypeError(f"{OP}: cache must be a CompressedKVCache, got {type(cache).__name__}")
        wanted = (cache.batch, *query.shape[1:])
        check_shape(OP, "query", query, wanted, f"{list(wanted)}, with B of the cache")
        for name, theirs in cache.config().items():
            ours = getattr(self, name)
            if theirs != ours and name != "dtype":  # that of the inputs decides
                raise ValueError(
                    f"{OP}: cache must have {name} of the layer = {ours}, got {theirs}: make_cache of the layer makes "
                    "one"
                )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position_ids: Tensor | None = None,
        cache: CompressedKVCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Causal attention of S tokens: of a prompt, dense, or of tokens after what the cache holds.

        While the cache is empty, the tokens attend to each other as they are. Else they attend as if they came one at
        a time, to what the cache then holds: to compressed rows of all but the latest tokens.

        Args:
            query: [B, S, H, D]; key, value: [B, S, H_kv, D], each with its D; one dtype, float32, float16 or bfloat16;
                not rotated.
            position_ids: [S] or [B, S], int32 or int64, below ``max_positions``; None counts on from the cache.
                One outside is an IndexError on the CPU, and on CUDA the last position is taken.
            cache: from :meth:`make_cache`; the tokens are added to it. None keeps nothing.
            lengths: number of tokens of each sequence, 0 ... S, which come first in its row; the rows behind them are
                ignored, whatever they hold, and the results there mean nothing. None is S for all.

        Returns:
            [B, S, H, D of values] in the dtype of query; differentiable for a prompt. A backward through a decoded
            token raises RuntimeError, and what the cache holds never has a gradient. A NaN or an infinity in the value
            of a token of a prompt may also reach the rows before it: torch multiplies it by the weight 0.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            TypeError: position_ids is not a tensor of ints, cache is of another class, or lengths are not ints.
            ValueError: the cache is full, or of another format or window than that of :meth:`make_cache`; positions
                counted beyond ``max_positions``, or lengths outside 0 ... S.
        """
        self._check_call(query, key, value, position_ids, cache)
        decoding = cache is not None and any(cache.host_lengths())
        stops = prompt_lengths(OP, lengths, query.shape[0], query.shape[1])
        if position_ids is None:
            self._check_positions(stops, cache)
        if lengths is not None:
            places = torch.arange(query.shape[1], device=query.device)
            behind = places >= torch.tensor(stops, device=query.device)[:, None]
            # A weight or a gradient of 0 is not enough: 0 * NaN is NaN.
            query, key, value = (x.masked_fill(behind[..., None, None], 0.0) for x in (query, key, value))
        if self.rope_base is not None:
            places = self._positions(query, cache) if position_ids is None else position_ids
            cos, sin = self.tables
            query, key = (_rotated(x, cos, sin, places) for x in (query, key))
        if cache is not None and decoding:
            if self.output_aware and 0 in cache.host_lengths():
                self._weigh_new_sequences(cache, query, stops)
            asks = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
            if asks and not query.requires_grad:
                query = query.detach().requires_grad_()  # so that a backward raises and does not leave zeros
            return cache.decode(query, key, value, stops, self.scale)[0]
        if cache is not None and query.shape[1]:
            if self.output_aware:
                cache.key_weight = key_weight_from_queries(
                    query, self.num_kv_heads, max(1, self.window), lengths
                )
            cache.prefill(key.detach(), value.detach(), lengths)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return out.transpose(1, 2)

    def _weigh_new_sequences(self, cache: CompressedKVCache, query: Tensor, stops: Sequence[int]) -> None:
        """Gives sequences that begin beside others the weights of their own queries; rotated query [B, S, H, D]."""
        new = [held == 0 and stop > 0 for held, stop in zip(cache.host_lengths(), stops, strict=True)]
        if any(new):
            own = key_weight_from_queries(query, self.num_kv_heads, max(1, self.window), stops)
            theirs = torch.ones_like(own) if cache.key_weight is None else cache.key_weight.to(own.dtype)
            begins = torch.tensor(new, device="cpu").to(own.device)
            cache.key_weight = torch.where(begins[:, None, None], own, theirs)

    def extra_repr(self) -> str:
        """Sizes and the format of the cache."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"value_dim={self.value_dim}, keep={self.keep}, bits={self.bits}, hadamard_group={self.hadamard_group}, "
            f"rope_base={self.rope_base}, window={self.window}, chunk={self.chunk}, dtype={self.dtype}"
        )
