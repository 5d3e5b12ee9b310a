"""Selection strides behind a ``DynamicCache``: its layers keep the queries of leaders beside keys and values.

Inside a stride every query opens what its leader has selected (docs/semantics/tree_attention.md §1.12), so keys and
values alone do not say what the next token attends to. transformers makes such caches by itself, as the default of
``generate()`` and for the second model or prompt of assisted generation and of classifier-free guidance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from htree_ops.integrations.documents import attend_cached
from htree_ops.ops.tree_attention.index import TreeOf

#: The attribute by which the attention call finds the layer of the keys that it gets.
LAYER = "htree_leaders"


class LeaderLayer(DynamicLayer):
    """A layer of a ``DynamicCache`` that also keeps the query of every ``stride``-th token of each sequence.

    Attributes:
        stride: selection_stride of the model.
        queries: [B, ceil(columns / stride), H, K], entry j of the real token stride * j; None before the first call.
        columns: int64 [B, ceil(columns / stride)], where that token stands; -1 where there is none.
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.queries: Tensor | None = None
        self.columns: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values so far. A model that changes the keys loses the way to this layer, and with it strides."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        keys = keys.view_as(keys)  # the layer's own tensor would refer to the layer in a circle
        setattr(keys, LAYER, self)
        return keys, values

    def keep(self, q: Tensor, real: Tensor | None) -> None:
        """Keeps the leaders among the last queries.

        Args:
            q: [B, n, H, K], of the last n columns.
            real: bool [B, columns], False at padding; None where all are real.
        """
        B, n = q.shape[:2]
        number = _number(real, B, self.get_seq_length(), q.device)
        count = -(-number.shape[1] // self.stride)
        if self.queries is None or self.columns is None:
            self.queries = q.new_empty(B, 0, *q.shape[2:])
            self.columns = number.new_empty(B, 0)
        more = count + 1 - self.queries.shape[1]  # the last entry takes what is no leader
        new = number[:, -n:]
        entry = torch.where((new >= 0) & (new % self.stride == 0), new // self.stride, count)
        column = torch.arange(number.shape[1] - n, number.shape[1], device=q.device).expand(B, n)
        queries = F.pad(self.queries, (0, 0, 0, 0, 0, more))
        src = q.detach().to(queries.dtype)
        self.queries = queries.scatter(1, entry[:, :, None, None].expand(q.shape), src)[:, :-1]
        self.columns = F.pad(self.columns, (0, more), value=-1).scatter(1, entry, column)[:, :-1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, tree: TreeOf) -> Tensor:
        """Rows of the last queries, which :meth:`keep` has seen: a call that begins at each sequence's leader.

        Args:
            q: [B, n, H, K]; k: [B, T, H_kv, K]; v: [B, T, H_kv, V].
            real: bool [B, T], False at padding; None where all are real.
            tree: the attention.

        Returns:
            [B, n, H, V], 0 at padding.

        Raises:
            ValueError: on the CPU, if the cache does not have the query of a leader, because a token before went
                through another attention or the mask of earlier columns has changed; on CUDA and in a compiled model
                the rows of that sequence are NaN.
        """
        assert self.queries is not None
        assert self.columns is not None
        B, n = q.shape[:2]
        before = k.shape[1] - n
        number = _number(real, B, k.shape[1], q.device)
        held = (number[:, :before] >= 0).sum(1, keepdim=True)
        inside = held % self.stride  # tokens of the cache since the leader, itself included
        leader = held - inside
        entry = (leader // self.stride).clamp(max=self.columns.shape[1] - 1)
        stands = (number == leader).int().argmax(1, keepdim=True)
        fits = (inside == 0) | (self.columns.gather(1, entry) == stands)
        if q.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(fits.all()):
            raise ValueError(
                f"htree: behind a cache with selection_stride = {self.stride} attention_mask must go on as it began, "
                "and every token must have gone through tree attention"
            )
        back = torch.arange(
            self.stride - 1, 0, -1, device=q.device
        )  # of each row before the new ones from the first
        query = self.queries.gather(1, entry[:, :, None, None].expand(B, 1, *q.shape[2:]))
        earlier = torch.where((back == inside)[:, :, None, None], query.to(q.dtype), 0)
        new = number[:, before:] >= 0
        real_q = torch.cat(((back <= inside) & new.any(1, keepdim=True), new), 1)
        out = attend_cached(torch.cat((earlier, q), 1), k, v, real_q, number >= 0, tree)[:, -n:]
        return out.masked_fill(~fits[:, :, None, None], torch.nan)

    # ---- what transformers asks of a layer

    def reset(self) -> None:
        """Takes all tokens back."""
        super().reset()
        self.queries = self.columns = None

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last columns back; ``tokens_to_remove`` is minus their number."""
        super().crop(tokens_to_remove)
        left = -(-self.get_seq_length() // self.stride)
        self._change(lambda x: x[:, :left])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence ``beam_idx[b]`` was."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence comes ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some of the sequences."""
        super().batch_select_indices(indices)
        self._change(lambda x: x[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.queries is not None and self.columns is not None:
            self.queries, self.columns = change(self.queries), change(self.columns)


def _number(real: Tensor | None, batch: int, columns: int, device: torch.device) -> Tensor:
    """int64 [B, columns]: each real token's number in its sequence; -1 at padding."""
    if real is None:
        return torch.arange(columns, device=device).expand(batch, columns)
    return torch.where(real, real.cumsum(1) - 1, -1)


def leaders_of(key: Tensor, stride: int) -> LeaderLayer | None:
    """The layer that keeps the leaders of these keys for a stride above 1; None where there is none."""
    layer: LeaderLayer | None = getattr(key, LAYER, None)
    return layer if layer is not None and layer.stride == stride else None


def keep_leaders(cache: DynamicCache, stride: int) -> None:
    """Lets the layers of an empty cache keep the leaders of a model with this ``selection_stride``."""
    # transformers exports a cache of its own layers alone, and of these keys and values.
    if stride > 1 and not torch.compiler.is_exporting():
        cache.layers = [
            LeaderLayer(stride) if type(layer) is DynamicLayer and not layer.is_initialized else layer
            for layer in cache.layers
        ]
