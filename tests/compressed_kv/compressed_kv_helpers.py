"""What the tests of CompressedKVCache share."""

from typing import Any

import torch
from torch import Tensor

from htree_ops import CompressedKVCache
from tests.support.cases import normal
from tests.support.compressed_kv_cases import rows_with_outliers

BATCH, HEADS, WIDTH, CAPACITY = 3, 4, 64, 130
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paged": {"page_size": 8},
    "page_is_chunk": {"page_size": 16, "bits": 4},
    "transformed": {"hadamard_group": 2, "keep": 64, "bits": 4},
    "paged_16": {"page_size": 4, "bits": 16},
    "mixed": {"bits": (4, 16), "keep": (20, 64)},
}


def make(device: str, batch: int = BATCH, **changes: Any) -> CompressedKVCache:
    options: dict[str, Any] = {
        "keep": 20,
        "bits": 8,
        "window": 5,
        "chunk": 16,
        "dtype": torch.float16,
    } | changes
    return CompressedKVCache(batch, HEADS, WIDTH, options.pop("capacity", CAPACITY), device=device, **options)


def tokens(device: str, length: int, seed: int = 0, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Keys and values [B, S, H_kv, D]."""
    k = rows_with_outliers((batch, HEADS, length, WIDTH), torch.float16, device, seed)
    return heads_last(k), normal((batch, length, HEADS, WIDTH), torch.float16, device, seed + 1)


def heads_last(x: Tensor) -> Tensor:
    """x [B, H, S, D] as [B, S, H, D], and the reverse: what caches take, and what ops and the reference take."""
    return x.transpose(1, 2).contiguous()


def assert_same_content(a: CompressedKVCache, b: CompressedKVCache) -> None:
    """Asserts that the sequences of both caches hold the same bytes."""
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, Tensor):
            assert value.shape == second[name].shape, name
            same = value.contiguous().view(torch.uint8) if value.numel() else value
            other = second[name].contiguous().view(torch.uint8) if value.numel() else second[name]
            assert torch.equal(same, other), name
        else:
            assert value == second[name], name


def compressed_length(length: int, window: int = 5, chunk: int = 16) -> int:
    return chunk * max(0, (length - window) // chunk)
