"""Decoding of the byte-level model one byte at a time, with a dense or a compressed cache per layer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from htree_ops import CompressedKVCache, HTreeAttention, MustafarAttention
from htree_ops.ops.tree_attention.stages import rope

from .model import Block, ByteLM
from .training import wait_for

#: Names of the caches and the options of their :class:`htree_ops.MustafarAttention`; None is the dense one.
CACHES: dict[str, dict[str, object] | None] = {
    "dense": None,
    "16 bits, all channels": {"bits": 16, "sparsity": 0.0},
    "8 bits, all channels": {"bits": 8, "sparsity": 0.0},
    "8 bits, half of them": {"bits": 8, "sparsity": 0.5},
    "4 bits, 30 % of them": {"bits": 4, "sparsity": 0.7},
    "4 bits, keys transformed": {"bits": 4, "sparsity": (0.0, 0.5), "use_grouped_hadamard": True},
}


def cache_dtype(device: str) -> torch.dtype:
    """What caches hold: bfloat16 on a GPU, float16 on the CPU, for all of them alike."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float16


class Storage(Protocol):
    """The cache of one layer."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Adds k, v [1, S, H_kv, D] and returns the attention of q [1, S, H, D], causal, as q; not rotated."""

    def num_bytes(self) -> float:
        """The bytes in use."""


class DenseStorage:
    """Keys and values uncompressed; attention by torch."""

    def __init__(self, rotation: MustafarAttention, capacity: int, dtype: torch.dtype, device: str) -> None:
        shape = (1, capacity, rotation.num_kv_heads, rotation.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.tables = rotation.tables
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = self.length
        self.length += q.shape[1]
        cos, sin = self.tables
        places = torch.arange(first, self.length, device=q.device)
        self.k[:, first : self.length] = rope(k, cos, sin, places)
        self.v[:, first : self.length] = v
        rows = (rope(q, cos, sin, places), self.k[:, : self.length], self.v[:, : self.length])
        queries, keys, values = (x.transpose(1, 2) for x in rows)
        # cuDNN's attention, torch's choice on an H100, plans anew for every length: 30 ms per byte
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=first == 0, enable_gqa=True)
        return out.transpose(1, 2)

    def num_bytes(self) -> float:
        return 2 * self.k[:, : self.length].numel() * self.k.element_size()


class CompressedStorage:
    """A :class:`htree_ops.CompressedKVCache` under :class:`htree_ops.MustafarAttention`."""

    def __init__(self, attention: MustafarAttention, cache: CompressedKVCache) -> None:
        self.attention, self.cache = attention, cache

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, cache=self.cache)

    def num_bytes(self) -> float:
        report = self.cache.num_bytes()
        return report.compressed + report.window


class Decoder:
    """A model with the caches of one sequence, of ``dtype``; ``make_storage`` makes that of a layer."""

    def __init__(
        self, model: ByteLM, make_storage: Callable[[HTreeAttention], Storage], dtype: torch.dtype
    ) -> None:
        self.model, self.dtype, self.length = model.eval(), dtype, 0
        self.device = str(model.embedding.weight.device)
        self.blocks = cast("list[Block]", list(model.blocks))
        self.storages = [make_storage(block.attention) for block in self.blocks]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """tokens int64 [S], the prompt or one byte after it; logits float32 [256] of the next byte."""
        x = self.model.embedding(tokens[None])
        for block, storage in zip(self.blocks, self.storages, strict=True):
            layer, h = block.attention, block.attention_norm(x)
            q, k, v = (
                project(h).unflatten(-1, (heads, layer.head_dim)).to(self.dtype)
                for project, heads in (
                    (layer.q_proj, layer.num_heads),
                    (layer.k_proj, layer.num_kv_heads),
                    (layer.v_proj, layer.num_kv_heads),
                )
            )
            x = x + layer.o_proj(storage.attend(q, k, v).flatten(2).to(x.dtype))
            x = x + block.down(F.gelu(block.up(block.mlp_norm(x)), approximate="tanh"))
        self.length += tokens.numel()
        return F.linear(self.model.norm(x[0, -1]), self.model.embedding.weight).float()

    def num_bytes(self) -> float:
        """Bytes of the caches of all layers."""
        return sum(storage.num_bytes() for storage in self.storages)

    def bytes_per_token(self) -> float:
        """The same per byte of text."""
        return self.num_bytes() / max(self.length, 1)


def make_decoder(
    model: ByteLM,
    options: dict[str, object] | None,
    capacity: int,
    window: int,
    chunk: int,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """A model with dense attention, or the parameters of one, from a dense or a compressed cache.

    Args:
        options: an entry of :data:`CACHES`.
        capacity: most bytes of text. window, chunk: options of the compressed caches, in bytes of text.
        dtype: of the caches; None is that of :func:`cache_dtype`.
    """
    device = str(model.embedding.weight.device)
    dtype = cache_dtype(device) if dtype is None else dtype

    def make_storage(layer: HTreeAttention) -> Storage:
        attention = MustafarAttention(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, max_positions=capacity, window=window,
            chunk=chunk, device=device, **(options or {}),  # type: ignore[arg-type]
        )  # fmt: skip
        if options is None:
            return DenseStorage(attention, capacity, dtype, device)
        return CompressedStorage(attention, attention.make_cache(1, capacity, dtype=dtype))

    return Decoder(model, make_storage, dtype)


@dataclass
class Trace:
    """What a decoder said while it read a text byte by byte.

    Attributes:
        log_shares: natural logarithms of the shares of the next byte, float64 [N, 256], on the CPU.
        seconds: per byte, the median.
        bytes_per_token: of the caches at the end.
    """

    log_shares: Tensor
    seconds: float
    bytes_per_token: float

    def bits_per_byte(self, tokens: Tensor) -> float:
        """Cross-entropy of the true next bytes, int64 [N]."""
        return float(F.nll_loss(self.log_shares, tokens.cpu()) / math.log(2))

    def agreement(self, other: Trace) -> float:
        """The share of the steps in which both take the same byte for the most likely one."""
        return float((self.log_shares.argmax(-1) == other.log_shares.argmax(-1)).float().mean())

    def divergence(self, other: Trace) -> float:
        """Mean Kullback-Leibler divergence from ``other`` to this, in bits."""
        terms = other.log_shares.exp() * (other.log_shares - self.log_shares)
        return float(terms.sum(-1).mean() / math.log(2))


def read_along(make: Callable[[], Decoder], prompt: Tensor, text: Tensor, label: str) -> Trace:
    """Reads the prompt at once and then ``text`` [N] byte by byte, whatever the model would have said."""
    decoder = make()
    shares = [decoder.read(prompt)]
    seconds: list[float] = []
    for token in tqdm(text[:-1], desc=label, unit="byte", leave=False):
        wait_for(decoder.device)
        started = time.perf_counter()
        shares.append(decoder.read(token[None]))
        wait_for(decoder.device)
        seconds.append(time.perf_counter() - started)
    log_shares = torch.stack(shares).double().log_softmax(-1).cpu()
    median = sorted(seconds)[len(seconds) // 2] if seconds else math.nan
    return Trace(log_shares, median, decoder.bytes_per_token())


def continuation(make: Callable[[], Decoder], prompt: Tensor, num_bytes: int, seed: int) -> list[int]:
    """Bytes drawn after the prompt at temperature 0.7, with the same random numbers for the same seed."""
    decoder = make()
    generator = torch.Generator().manual_seed(seed)
    logits = decoder.read(prompt)
    written: list[int] = []
    for _ in range(num_bytes):
        # the largest of logits with Gumbel noise is a draw from their softmax
        noise = -torch.empty(logits.shape).exponential_(generator=generator).log()
        token = (logits.cpu() / 0.7 + noise).argmax().to(logits.device)
        written.append(int(token))
        logits = decoder.read(token[None])
    return written
