"""The format of compressed rows and the checks of their functions (docs/semantics/compressed_kv.md §4.5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.arguments import FLOATING_AND_DOUBLE, check_dtype, check_int, check_number
from htree_ops.ops.hadamard.transform import MAX_LENGTH

BITS = (16, 8, 4)
#: Channels that one word of a bitmap covers.
WORD = 64
#: The numbers of channels that a row may have.
WIDTHS = tuple(range(WORD, 513, WORD))


class CompressedKV(NamedTuple):
    """Compressed rows, one per token and K/V head (docs/semantics/compressed_kv.md §4.5).

    Attributes:
        bitmap: int64 [B, H_kv, S, D/64]; bit d mod 64 of word d // 64 says that channel d is kept.
        values: uint8 [B, H_kv, S, row_bytes]; the kept values in the order of channels.
        scales: float16 [B, H_kv, S]; [B, H_kv, 0] where bits is 16.

    Example:
        >>> rows = kv_compress(torch.randn(1, 2, 100, 64), keep=32)
        >>> rows.values.dtype, tuple(rows.scales.shape)
        (torch.uint8, (1, 2, 100))
    """

    bitmap: Tensor
    values: Tensor
    scales: Tensor


def num_kept(head_dim: int, sparsity: float) -> int:
    """How many channels of a row are kept: max(1, D - floor(sparsity * D)), for a sparsity in [0, 1]."""
    check_number("num_kept", "sparsity", sparsity)
    if not 0 <= sparsity <= 1:
        raise ValueError(f"num_kept: sparsity must be between 0 and 1, got {sparsity}")
    return max(1, head_dim - math.floor(sparsity * head_dim))


def row_bytes(keep: int, bits: int) -> int:
    """Bytes of the values of one row: ceil(keep * bits / 8), rounded up to a multiple of 4."""
    return (keep * bits + 31) // 32 * 4


def check_format(op: str, head_dim: int, keep: int, bits: int, prefix: str = "") -> None:
    """Raises ShapeMismatchError, TypeError or ValueError for numbers that describe no rows."""
    if head_dim not in WIDTHS:
        name = "value_dim" if prefix == "v_" else "head_dim"
        refuse(
            ShapeMismatchError,
            f"{op}: {name} must be a multiple of {WORD} between {WORD} and {WIDTHS[-1]}, got {head_dim}",
            expected=WIDTHS,
            actual=head_dim,
        )
    check_int(op, f"{prefix}keep", keep, 1, head_dim)
    check_int(op, f"{prefix}bits", bits, -(2**31))
    if bits not in BITS:
        raise ValueError(f"{op}: {prefix}bits must be one of 16, 8, 4, got {bits}")


def _on_host(x: Tensor) -> bool:
    """Whether the values of x can be read without waiting for a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_weight(op: str, name: str, weight: Tensor) -> None:
    """Checks the dtype of a weight and, where that waits for no device, its sign."""
    check_dtype(op, FLOATING_AND_DOUBLE, **{name: weight})
    if _on_host(weight) and bool((weight < 0).any()):
        raise ValueError(f"{op}: {name} must not be negative, got {float(weight.min())}")


def check_lengths(op: str, name: str, lengths: Tensor | None, most: int) -> None:
    """Raises ValueError for int32 lengths outside 0 ... most, where that can be seen without waiting for a device."""
    if lengths is None or lengths.dtype != torch.int32 or not lengths.numel() or not _on_host(lengths):
        return
    if not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise ValueError(f"{op}: {name} must lie between 0 and {most}, got {lengths.tolist()}")


def check_hadamard_group(op: str, group: int, kv_heads: int, width: int) -> None:
    """Raises ValueError unless keys of ``kv_heads`` heads can be stored as the transform of groups of ``group``."""
    if not group:
        return
    if kv_heads % group:
        raise ValueError(f"{op}: hadamard_group must divide H_kv = {kv_heads}, got {group}")
    length = group * width
    if length & (length - 1) or length > MAX_LENGTH:
        raise ValueError(
            f"{op}: hadamard_group * Dk must be a power of two of at most {MAX_LENGTH}, got {group} * {width}"
        )
