"""The language model of the study. Its parameters serve every attention, which is an argument of each call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from lm.model import ByteLM, draw_weights
from lm.settings import Settings
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from htree_ops import HTreeAttention, TreeOptions, tree_attention
from htree_ops.ops.tree_attention import rope, rope_cache
from htree_ops.ops.tree_attention.index import TreeOf

from .settings import RATE, Attention, Substitute, Training

Function = TypeVar("Function", bound=Callable[..., object])
#: cos, sin and positions; None where nothing is rotated.
Table = tuple[Tensor, Tensor, Tensor] | None

EPSILON = 1e-6
ROTARY_BASE = 10000.0
#: Fastest first; torch takes the first one that knows the call.
DENSE_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@functools.lru_cache(maxsize=2)
def rotary(
    context: int, head_dim: int, device: torch.device, base: float = ROTARY_BASE
) -> tuple[Tensor, Tensor, Tensor]:
    """cos, sin [context, head_dim / 2] and positions [context] of a sequence."""
    cos, sin = rope_cache(context, head_dim, base, device=device)
    return cos, sin, torch.arange(context, device=device)


def before_attention(
    x: Tensor, norm: Tensor, weight: Tensor, heads: int, kv_heads: int, table: Table
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, E] to q [B, T, H, D] and k, v [B, T, H_kv, D]; q and k rotated where there is a table."""
    y = F.linear(F.rms_norm(x, (x.shape[-1],), norm, EPSILON), weight)
    q, k, v = y.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=2)
    if table is not None:
        q, k = rope(q, *table), rope(k, *table)
    return q.contiguous(), k.contiguous(), v.contiguous()


def after_attention(x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x + o(attended), then + MLP: [B, T, E]."""
    x = x + F.linear(attended.flatten(2), o)
    h = F.linear(F.rms_norm(x, (x.shape[-1],), norm, EPSILON), up)
    return x + F.linear(F.gelu(h, approximate="tanh"), down)


def compiled(function: Function) -> Function:
    """``function`` under torch.compile, one graph per shape; the same object at every call."""
    if function not in _COMPILED:
        torch._dynamo.config.recompile_limit = 64
        _COMPILED[function] = torch.compile(function, dynamic=False, fullgraph=True)
    return _COMPILED[function]  # type: ignore[return-value]


_COMPILED: dict[Callable[..., object], Callable[..., object]] = {}


def sliding_window(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    """Causal attention of each query to the last ``width`` tokens, itself among them; q [B, T, H, D].

    Blocks of ``width`` queries see their own block and the one before it, through a mask.

    Raises:
        ValueError: T is above ``width`` and no multiple of it.
    """
    count, context, heads, _ = q.shape
    width = min(width, context)
    if context % width:
        raise ValueError(f"the window, {width}, must divide the sequence, {context}")
    blocks = context // width

    def in_blocks(x: Tensor) -> Tensor:
        return x.unflatten(1, (blocks, width))

    def with_previous(x: Tensor) -> Tensor:
        x = in_blocks(x.repeat_interleave(heads // x.shape[2], dim=2))
        previous = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        return torch.cat((previous, x), dim=2).flatten(0, 1).transpose(1, 2)

    row, column = torch.arange(width, device=q.device)[:, None], torch.arange(2 * width, device=q.device)
    seen = (column > row) & (column <= row + width)
    seen = seen & ((torch.arange(blocks, device=q.device) > 0)[:, None, None] | (column >= width))
    with sdpa_kernel(MASKED_BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(
            in_blocks(q).flatten(0, 1).transpose(1, 2),
            with_previous(k),
            with_previous(v),
            attn_mask=seen.repeat(count, 1, 1)[:, None],
        )
    return out.transpose(1, 2).unflatten(0, (count, blocks)).flatten(1, 2)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to every earlier token; q [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    with sdpa_kernel(DENSE_BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, layer: HTreeAttention | None = None
) -> Tensor:
    """The attention of q [B, T, H, D] on k, v [B, T, H_kv, D], as q; rotated unless positions are compact.

    Args:
        layer: which has the index, or gets it from ``fit_index``.
    """
    if isinstance(attention, Substitute):
        return attention.function(q, k, v)
    if attention.kind == "dense":
        return dense_attention(q, k, v)
    if attention.kind == "window":
        return sliding_window(q, k, v, attention.window)
    options = TreeOptions(
        compression_rate=RATE,
        max_top_nodes=attention.max_top_nodes,
        top_k=attention.top_k,
        selection_stride=attention.stride,
        rope_base=ROTARY_BASE if attention.positions == "compact" else None,
        selection_span=attention.span,
    )
    if attention.index_dim:
        assert layer is not None
        return TreeOf("quality", options, layer, by_index=True).sequences(q, k, v)
    out = tree_attention(q, k, v, options=options)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


def settings_of(size: Training, index_dim: int) -> Settings:
    """Sizes of the examples' model; what its attention's own options are does not matter here."""
    return Settings(
        device="cpu", text="", layers=size.layers, dim=size.width, heads=size.heads, kv_heads=size.kv_heads,
        compression_rate=RATE, top_k=max(size.top_k, 1), max_top_nodes=size.max_top_nodes or RATE, index_dim=index_dim,
    )  # fmt: skip


class LanguageModel(nn.Module):
    """The language model of the examples (``lm.model``) with an attention that is an argument of each call.

    What enters a position is the sum of ``size.seen`` embeddings, of its token and of those before it, each from a
    table of its own: one layer can then look for a place by the bytes that led to it.

    Args:
        size: layers, width, heads and ``seen``. vocabulary: 256 for bytes. seed: of the initial weights.
        fused: compile what stands between the attentions, while gradients are recorded. index_dim: of its layers.
    """

    def __init__(
        self, size: Training, vocabulary: int = 256, seed: int = 0, fused: bool = False, index_dim: int = 0
    ) -> None:
        super().__init__()
        self.head_dim, self.rotary_base = size.width // size.heads, size.rotary_base
        self.vocabulary, self.fused = vocabulary, fused
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for the index; all other weights are drawn below
            self.body = ByteLM(settings_of(size, index_dim), vocabulary=vocabulary)
        self.before = nn.ParameterList(torch.empty(vocabulary, size.width) for _ in range(size.seen - 1))
        draw_weights(self, size.layers, torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """tokens int64 [B, T] -> hidden states [B, T, E], ready for :meth:`logits`."""
        x = self.body.embedding(tokens)
        for back, embedding in enumerate(self.before, 1):
            x = x + F.pad(F.embedding(tokens[:, :-back], embedding), (0, 0, back, 0))
        table = None
        if attention.positions == "own":
            table = rotary(tokens.shape[1], self.head_dim, x.device, self.rotary_base)
        is_fused = self.fused and torch.is_grad_enabled()
        before = compiled(before_attention) if is_fused else before_attention
        after = compiled(after_attention) if is_fused else after_attention
        blocks: Any = self.body.blocks
        for block in blocks:
            projections = block.attention
            qkv = torch.cat([p.weight for p in (projections.q_proj, projections.k_proj, projections.v_proj)])
            heads = (projections.num_heads, projections.num_kv_heads)
            q, k, v = before(x, block.attention_norm.weight, qkv, *heads, table)
            attended = attend(q, k, v, attention, projections)
            weights = (projections.o_proj, block.mlp_norm, block.up, block.down)
            x = after(x, attended, *(module.weight for module in weights))
        return self.body.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., E] -> float32 [..., vocabulary]."""
        return F.linear(hidden, self.body.embedding.weight).float()

    def num_parameters(self) -> int:
        """All of them."""
        return sum(parameter.numel() for parameter in self.parameters())


class SearchModel(nn.Module):
    """One layer of attention that can find what followed the last tokens before, with nothing around it.

    What enters it at a position are the embeddings of ``size.seen`` tokens side by side, of the token itself and of
    those before it.

    Args:
        size: width, heads and ``seen``. vocabulary: 256 for bytes. seed: of the initial weights.
    """

    fused = False

    def __init__(self, size: Training, vocabulary: int = 256, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.width // size.heads
        self.seen, self.vocabulary = size.seen, vocabulary
        self.embedding = nn.Parameter(torch.randn(vocabulary, size.width // size.seen, generator=generator))
        self.norm = nn.Parameter(torch.ones(size.width))
        self.qkv = nn.Linear(size.width, (size.heads + 2 * size.kv_heads) * self.head_dim, bias=False)
        self.o = nn.Linear(size.width, size.width, bias=False)
        self.output = nn.Linear(size.width, vocabulary, bias=False)
        bound = size.width**-0.5
        for linear in (self.qkv, self.o, self.output):
            nn.init.uniform_(linear.weight, -bound, bound, generator=generator)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """tokens int64 [B, T] -> hidden states [B, T, E], ready for :meth:`logits`."""
        embedded = F.embedding(tokens, self.embedding)
        context = tokens.shape[1]
        x = torch.cat([F.pad(embedded, (0, 0, back, 0))[:, :context] for back in range(self.seen)], dim=-1)
        table = rotary(context, self.head_dim, x.device) if attention.positions == "own" else None
        q, k, v = before_attention(x, self.norm, self.qkv.weight, self.heads, self.kv_heads, table)
        return self.o(attend(q, k, v, attention).flatten(2))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., E] -> float32 [..., vocabulary]."""
        return self.output(hidden).float()

    def num_parameters(self) -> int:
        """All of them."""
        return sum(parameter.numel() for parameter in self.parameters())


Model = LanguageModel | SearchModel
