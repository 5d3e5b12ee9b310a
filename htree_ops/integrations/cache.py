"""The tree cache as a ``Cache`` of transformers: ``generate()`` that never builds a tree again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.models.llama.modeling_llama import LlamaAttention

from htree_ops.integrations.documents import take_rows
from htree_ops.ops.arguments import FLOATING, autocast_dtype, check_int
from htree_ops.ops.index_loss.layers import choose_by_index
from htree_ops.ops.tree_attention import TreeOptions
from htree_ops.ops.tree_attention.attention import expand_heads
from htree_ops.ops.tree_attention.index import TreeOf
from htree_ops.ops.tree_cache import TreeCacheBytes, TreeKVCache
from htree_ops.ops.tree_cache.leaves import check_bits
from htree_ops.ops.tree_cache.ring import RING

#: The keyword of a cache in a model and in ``generate()``: another since transformers 5.24, which warns of the old one;
#: before it "cache" meant a paged one.
CACHE = "cache" if "cache" in inspect.signature(LlamaAttention.forward).parameters else "past_key_values"
#: A crop by so many strides always finds the lists that the next token needs (docs/semantics/tree_cache.md §7.4).
STRIDES_BACK = RING - 1
CHANGED_ON_THE_WAY = (
    "htree: a TreeCache needs attn_implementation='htree', and a model that hands what its cache returns to its "
    "attention unchanged: use a DynamicCache"
)


@dataclass
class HandedOver:
    """What :meth:`TreeCache.update` returns in the place of keys and values: tree attention appends and attends.

    Attributes:
        layer: where the new tokens go.
        key, value: [B, H_kv, n, K] and [B, H_kv, n, V], the new tokens.
    """

    layer: TreeLayer
    key: Tensor
    value: Tensor

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(CHANGED_ON_THE_WAY)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise NotImplementedError(CHANGED_ON_THE_WAY)


@dataclass
class NewRows:
    """The new columns of a padded batch.

    Attributes:
        mask: bool [B, columns], False at padding, of all columns so far.
        before: columns before the call.
        order: int64 [B, n], the n new columns with the real ones first; None where n is 1.
        lengths: int32 [B], how many of them are real.
        fits: bool [B], whether the mask of the older columns counts the tokens that the cache holds.
    """

    mask: Tensor
    before: int
    order: Tensor | None
    lengths: Tensor
    fits: Tensor


@dataclass
class Shared:
    """What the layers of a cache share.

    Attributes:
        max_cache_len: of :class:`TreeCache`. sizes: its other keywords, those of :class:`htree_ops.TreeKVCache`.
        rows: of the latest call whose batch was padded.
    """

    max_cache_len: int
    sizes: dict[str, int | None]
    rows: NewRows | None = None

    def new_rows(self, mask: Tensor | None, before: int, n: int, held: Tensor) -> NewRows | None:
        """What a mask says of n new columns, worked out by the first layer of a call. None where nothing was padded.

        Raises:
            ValueError: on the CPU, if the mask of the older columns does not count the tokens ``held`` [B].
        """
        if mask is None:
            if self.rows is None:
                return None
            # The caller says that no column is padding.
            mask = torch.ones(len(held), before + n, dtype=torch.bool, device=held.device)
        elif self.rows is not None and self.rows.mask is mask and self.rows.before == before:
            return self.rows
        new = mask[:, before:]
        counted = mask[:, :before].sum(1)
        if (
            held.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not torch.equal(counted, held.long())
        ):
            raise ValueError(
                "TreeCache: attention_mask must have as many ones before the new tokens as the cache holds, "
                f"{held.tolist()}, got {counted.tolist()}"
            )
        order = torch.argsort(~new, dim=1, stable=True) if n > 1 else None
        self.rows = NewRows(mask, before, order, new.sum(1, dtype=torch.int32), counted == held)
        return self.rows


class TreeLayer(CacheLayerMixin):
    """One layer of a :class:`TreeCache`: a :class:`htree_ops.TreeKVCache`, made by the first attention call."""

    is_compileable = (
        False  # to transformers this means static shapes, for which generate() compiles by itself
    )
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.cache: TreeKVCache | None = None
        self.columns = 0
        self.options: TreeOptions | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Not supported: only the attention call knows the scale and the positions of its model."""
        raise NotImplementedError("htree: a TreeCache is filled by attention calls: give it to the model")

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[HandedOver, HandedOver]:
        """Changes nothing: the attention call finds the layer in what is returned, and calls :meth:`attend`."""
        handed = HandedOver(self, key_states, value_states)
        return handed, handed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tree: TreeOf) -> Tensor:
        """Appends n tokens to every sequence and returns their rows.

        Args:
            q: [B, n, H, K]; k: [B, n, H_kv, K]; v: [B, n, H_kv, V].
            mask: bool [B, columns so far], False at padding; None where there is none.
            tree: the attention, with the same options in every call.

        Returns:
            [B, n, H, V], 0 at padding.

        Raises:
            ValueError: more columns than ``max_cache_len``, other options, another index or another batch than
                before, and on the CPU a mask that does not fit the tokens that the cache holds; on CUDA its rows are
                NaN.
        """
        before, n = self.columns, q.shape[1]
        most = self.shared.max_cache_len
        if before + n > most:
            reset = f", or reset() the {before} that it holds" if before and n <= most else ""
            raise ValueError(
                f"TreeCache: max_cache_len must be at least {before + n}, the tokens of a sequence with its padding, "
                f"got {most}: make a larger cache{reset}"
            )
        if (dtype := autocast_dtype(q.device)) is not None:
            q, k, v = (x.to(dtype) for x in (q, k, v))
        options = tree.options
        index = choose_by_index(tree.function, tree.layer, q, k) if tree.by_index else None
        index_dim = 0 if index is None else index[1].shape[3]
        k, v = expand_heads(options, q, k, v)
        if self.cache is None:
            if torch.compiler.is_compiling():
                raise NotImplementedError(
                    "htree: the first call with a TreeCache takes its memory: make it uncompiled"
                )
            self.cache, self.options = self._new_cache(k, v, options, index), options
            self.is_initialized = True
        elif options != self.options:
            raise ValueError(
                f"TreeCache: options must stay those of the first call, {self.options}, got {options}"
            )
        elif index_dim != self.cache.index_dim:
            raise ValueError(
                f"TreeCache: index_dim must stay that of the first call, {self.cache.index_dim}, got {index_dim}"
            )
        elif len(q) != self.cache.batch:
            raise ValueError(f"TreeCache: the batch must stay {self.cache.batch}, got {len(q)}")
        rows = self.shared.new_rows(mask, before, n, self.cache.lengths)
        lengths = None if rows is None else rows.lengths
        if rows is not None and rows.order is not None:
            order = rows.order
            q, k, v = (take_rows(x, order) for x in (q, k, v))
            index = None if index is None else (take_rows(index[0], order), take_rows(index[1], order))
        out = self.cache.decode(q, k, v, lengths, index=index)
        self.columns += n
        assert isinstance(out, Tensor)  # a pair only with return_lse
        if rows is None:
            return out
        if rows.order is not None:
            out = take_rows(out, torch.argsort(rows.order, dim=1))
        return out.masked_fill(~rows.fits[:, None, None, None], torch.nan)

    def _new_cache(
        self, k: Tensor, v: Tensor, options: TreeOptions, index: tuple[Tensor, Tensor] | None
    ) -> TreeKVCache:
        batch, _, heads, width = k.shape
        sizes: dict[str, Any] = self.shared.sizes
        return TreeKVCache(
            batch,
            heads,
            width,
            self.shared.max_cache_len,
            value_dim=v.shape[3],
            **sizes,
            index_dim=0 if index is None else index[1].shape[3],
            # What generate() gives without a cache chooses by index keys that are not rounded.
            index_dtype=k.dtype if index is not None and k.dtype in FLOATING else None,
            dtype=k.dtype,
            device=k.device,
            options=replace(options, scope="kv_head"),  # k and v have a head for each selection
        )

    # ---- what transformers asks of a layer

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of a mask, 0)."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns: tokens of a sequence with its padding."""
        return self.columns

    def get_max_length(self) -> int:
        """Most columns."""
        return self.shared.max_cache_len

    def tokens(self) -> tuple[Tensor | None, Tensor | None]:
        """Copies of the keys [B, H_kv, columns, K] and values [B, H_kv, columns, V], 0 at padding; (None, None) before
        the first call. The host waits for the device.
        """
        cache, rows = self.cache, self.shared.rows
        if cache is None:
            return None, None
        shape = (cache.batch, cache.num_kv_heads, self.columns)
        keys, values = (
            torch.zeros(*shape, width, dtype=cache.dtype, device=cache.device)
            for width in (cache.head_dim, cache.value_dim)
        )
        for b in range(cache.batch):
            real: Tensor | slice = (
                slice(None) if rows is None else rows.mask[b, : self.columns].to(cache.device)
            )
            for target, held in zip((keys, values), cache.layer(b, 0), strict=True):
                target[b, :, real] = held.transpose(0, 1)
        return keys, values

    def reset(self) -> None:
        """Takes all tokens back and keeps the memory."""
        if self.cache is not None:
            self.cache.reset()
        self.columns = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence ``beam_idx[b]`` was; full pages are shared."""
        if self.cache is not None:
            self.cache.reorder_(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns back.

        Args:
            tokens_to_remove: 0, or minus their number.

        Raises:
            ValueError: a positive number, or one below the number of columns; with selection_stride s > 1 more than
                3 s tokens, unless nothing is padded and a multiple of s or nothing is left; with leaf_bits more than
                page_size - compression_rate tokens, unless nothing is padded and a multiple of compression_rate or
                nothing is left. Tokens that were taken back before and have not come again count too: on the CPU the
                cache raises then, on CUDA it stays as it was and :meth:`TreeCache.check` reports it.
        """
        remove = -int(tokens_to_remove)  # transformers 5.17 hands over a tensor
        if not 0 <= remove <= self.columns:
            raise ValueError(
                f"TreeCache.crop: tokens_to_remove must lie between -{self.columns} and 0, got {tokens_to_remove}"
            )
        if remove == 0 or self.cache is None:
            return
        left = self.columns - remove
        stride, rate = self.cache.options.selection_stride, self.cache.options.compression_rate
        mask = None if self.shared.rows is None else self.shared.rows.mask
        limits = [
            (stride, STRIDES_BACK * stride, f"{STRIDES_BACK} times selection_stride", "selection_stride = 1")
        ]
        if self.cache.leaf_bits is not None:
            limits.append(
                (rate, self.cache.page_size - rate, "page_size - compression_rate", "leaf_bits = None")
            )
        for unit, most, words, remedy in limits:
            ends_there = left == 0 or (mask is None and left % unit == 0)
            if unit > 1 and remove > most and not ends_there:
                raise ValueError(
                    f"TreeCache.crop: tokens_to_remove must be at least -{most}, {words}, got {tokens_to_remove}: take "
                    f"fewer speculative tokens (num_assistant_tokens), or {remedy}"
                )
        gone: int | Tensor = remove
        if mask is not None:  # it may lie where another layer does
            gone = mask[:, left : self.columns].sum(1, dtype=torch.int32).to(self.cache.device)
        self.cache.truncate(self.cache.lengths - gone)
        self.columns = left

    def offload(self) -> None:
        """Not supported."""
        raise NotImplementedError(
            "htree: a TreeCache cannot be offloaded: use a DynamicCache(offloading=True)"
        )

    prefetch = offload

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not supported."""
        raise NotImplementedError(
            "htree: the batch of a TreeCache cannot change: repeat the inputs before the first call"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not supported."""
        raise NotImplementedError(
            "htree: the batch of a TreeCache cannot change: use reorder_cache, which keeps its size"
        )


class TreeCache(Cache):
    """A cache of finished tree nodes for models with ``attn_implementation="htree"``, one per ``generate()``.

    ``model.generate(ids, cache=TreeCache(model.config, max_cache_len=4096))`` gives the tokens of
    ``generate(ids, use_cache=False)``, and a step reads what its query opens; before transformers 5.24 the argument is
    ``past_key_values``. It serves padded batches, beam search, speculative decoding (assisted generation), prompts in
    chunks and any ``selection_stride``. ``copy.deepcopy`` of a filled cache keeps a prompt; ``reset()`` makes it ready
    for another one. Memory for ``max_cache_len`` tokens of every sequence and layer is taken by the first call.
    Iteration gives what it gives for a ``DynamicCache``, as copies: keys and values of each layer, 0 at padding, and
    None; so ``DynamicCache(cache)`` holds the same tokens. No gradient flows through it.
    Source: docs/semantics/tree_cache.md §7; docs/models.md says how to serve with it.

    Args:
        config: of the model.
        max_cache_len: most tokens of a sequence, its padding included.
        page_size, num_pages, leaf_bits, prompt_bytes: as in :class:`htree_ops.TreeKVCache`; each layer has a cache of
            its own. leaf_bits = 8 takes 0.54 to 0.63 of the memory; what it costs in time and quality:
            docs/performance.md and docs/quality.md (g).

    Raises:
        NotImplementedError: a config with other layers than those of full attention, or with a window.
        TypeError, ValueError: a config or a size of the wrong kind, or a size out of range. The head size and dtype of
            the model must suit leaf_bits; the first call finds out.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        max_cache_len: int,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        leaf_bits: int | None = None,
        prompt_bytes: int | None = None,
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise TypeError(f"TreeCache: config must be a PretrainedConfig, got {type(config).__name__}")
        check_int("TreeCache", "max_cache_len", max_cache_len, 1)
        if leaf_bits is not None:
            check_bits("TreeCache", leaf_bits)
        sizes = {"page_size": page_size, "num_pages": num_pages, "leaf_bits": leaf_bits}
        self.shared = Shared(max_cache_len, sizes | {"prompt_bytes": prompt_bytes})
        text = config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or ())
        window = getattr(text, "sliding_window", None)
        if not kinds and window is not None and getattr(text, "use_sliding_window", True):
            raise NotImplementedError(
                f"htree: a TreeCache holds layers of 'full_attention', this config has sliding_window = {window}: set "
                "config.sliding_window = None"
            )
        if others := sorted(kinds - {"full_attention"}):
            raise NotImplementedError(
                f"htree: a TreeCache holds layers of 'full_attention', this config has {', '.join(others)} too: use a "
                "DynamicCache"
            )
        super().__init__(layers=[TreeLayer(self.shared) for _ in range(text.num_hidden_layers)])

    @property
    def is_initialized(self) -> bool:
        """Whether every layer has taken its memory."""
        return len(self._filled()) == len(self)

    def num_bytes(self) -> TreeCacheBytes:
        """Tokens of all sequences, and the memory of all layers (:meth:`htree_ops.TreeKVCache.num_bytes`)."""
        found = [cache.num_bytes() for cache in self._filled()]
        return TreeCacheBytes(
            tokens=found[0].tokens if found else 0,
            used=sum(x.used for x in found),
            allocated=sum(x.allocated for x in found),
        )

    def _filled(self) -> list[TreeKVCache]:
        """The caches of the layers that have one."""
        return [x.cache for x in self.layers if isinstance(x, TreeLayer) and x.cache is not None]

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        for layer in self.layers:
            assert isinstance(layer, TreeLayer)
            yield *layer.tokens(), None

    def __repr__(self) -> str:
        batch = self._filled()[0].batch if self._filled() else None
        sizes = {"layers": len(self), "batch": batch, "tokens": self.get_seq_length()}
        sizes |= {"max_cache_len": self.shared.max_cache_len, **self.shared.sizes}
        return f"TreeCache({', '.join(f'{name}={size}' for name, size in sizes.items() if size is not None)})"

    def reset(self) -> None:
        """Takes all tokens back and keeps the memory."""
        super().reset()
        self.shared.rows = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence ``beam_idx[b]`` was; full pages are shared."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        if (rows := self.shared.rows) is not None:
            rows.mask = rows.mask.index_select(0, beam_idx.to(rows.mask.device))

    def check(self) -> None:
        """Raises what the device has recorded (:meth:`htree_ops.TreeKVCache.check`); waits for it.

        Raises:
            ValueError: an error was recorded.
        """
        for cache in self._filled():
            cache.check()
