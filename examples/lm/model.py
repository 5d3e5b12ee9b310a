"""The language model: bytes in, logits of the next byte out; its attention is a tree or dense."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from htree_ops import HTreeAttention, TreeKVCache
from htree_ops.flops import tree_candidates

from .settings import Settings

VOCABULARY = 256


@functools.lru_cache(maxsize=4)
def rotary_table(num_rows: int, half: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of t * base^(-i / half), float32 [num_rows, 1, half] each, from float64 angles."""
    frequency = base ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angle = torch.arange(num_rows, device=device, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, base: float = 10000.0, start: int = 0) -> Tensor:
    """Half-split rotary positions on x [B, T, H, K]: row t turns by (start + t) * base^(-2i / K) (docs/semantics §1.4).

    The product is taken in float32 and rounded once to the dtype of x.
    """
    cos, sin = (part[start:] for part in rotary_table(start + x.shape[1], x.shape[3] // 2, base, x.device))
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(x.dtype)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention over every earlier token: q [B, T, H, K], k and v [B, T, H_kv, K] -> as q."""
    q, k, v = (x.transpose(1, 2) for x in (rotate(q), rotate(k), v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class DenseAttention(HTreeAttention):
    """The same projections and rotary positions around :func:`dense_attention`; parameters are exchangeable."""

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
        """x [B, T, E] -> [B, T, E]; masks, caches and packed documents are refused."""
        if any(x is not None for x in (attn_mask, key_padding_mask, cache, lengths, cu_seqlens, max_seqlen)):
            raise NotImplementedError("DenseAttention: masks, caches and packed documents are not supported")
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return self.o_proj(dense_attention(q, k, v).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)) of four times the width."""

    def __init__(self, settings: Settings, attention: type[HTreeAttention]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.dim, eps=1e-6)
        self.attention = attention(
            settings.dim,
            settings.heads,
            settings.kv_heads,
            compression_rate=settings.compression_rate,
            max_top_nodes=settings.max_top_nodes,
            top_k=settings.top_k,
            selection_stride=settings.selection_stride,
            selection_span=settings.selection_span or None,
            index_dim=settings.index_dim,
        )
        self.mlp_norm = nn.RMSNorm(settings.dim, eps=1e-6)
        self.up = nn.Linear(settings.dim, 4 * settings.dim, bias=False)
        self.down = nn.Linear(4 * settings.dim, settings.dim, bias=False)

    def forward(self, x: Tensor, cache: TreeKVCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class ByteLM(nn.Module):
    """Embedding, blocks, norm and a tied output. The attention's rotary positions are the only ones.

    Args:
        settings: sizes and options of the tree.
        attention: HTreeAttention or DenseAttention; the parameters have the same names and shapes.
        vocabulary: 256 for bytes.
    """

    def __init__(
        self,
        settings: Settings,
        attention: type[HTreeAttention] = HTreeAttention,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.dim)
        self.blocks = nn.ModuleList(Block(settings, attention) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.dim, eps=1e-6)
        draw_weights(self, settings.layers)

    def forward(self, tokens: Tensor, caches: Sequence[TreeKVCache] | None = None) -> Tensor:
        """tokens int64 [B, T] -> logits [B, T, 256]; with a cache for each block, those behind what the caches hold."""
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return F.linear(self.norm(x), self.embedding.weight)


def draw_weights(model: nn.Module, layers: int, generator: torch.Generator | None = None) -> None:
    """Normal initial values for every matrix; what adds to the residual stream starts smaller, by the layers."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            adds = name.endswith(("o_proj.weight", "down.weight"))
            deviation = parameter.shape[1] ** -0.5 / ((2 * layers) ** 0.5 if adds else 1)
            nn.init.normal_(parameter, std=deviation, generator=generator)


def candidates_by_layer(context: int, settings: Settings) -> list[Tensor]:
    """Nodes that each query scores, int64 [context] per layer, tokens first (docs/semantics/tree_attention.md §1.3).

    Dense attention scores t + 1 at position t.
    """
    rate, top_nodes = settings.compression_rate, settings.max_top_nodes
    layers = tree_candidates(context, context, rate, top_nodes, settings.top_k, settings.selection_stride)
    return [torch.from_numpy(counts) for *_, counts in reversed(layers)]


def candidates_per_query(context: int, settings: Settings) -> Tensor:
    """Nodes that each query scores, all layers together, int64 [context]."""
    return torch.stack(candidates_by_layer(context, settings)).sum(0)


def span_means_of_last_query(context: int, settings: Settings) -> int:
    """Means of tokens that the last query scores to select (docs/semantics/tree_attention.md §1.15)."""
    if not settings.selection_span:
        return 0
    above = list(enumerate(candidates_by_layer(context, settings)))[1:]
    return sum(
        max(0, int(n[-1]) - 1) * settings.compression_rate**layer // settings.selection_span
        for layer, n in above
    )
