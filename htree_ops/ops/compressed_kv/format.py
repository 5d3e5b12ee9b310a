"""The format of compressed rows and the checks of their functions (docs/semantics/compressed_kv.md §4.5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError
from htree_ops.ops.arguments import (
    FLOATING,
    FLOATING_AND_DOUBLE,
    check_dtype,
    check_int,
    check_number,
    check_tensors,
)
from htree_ops.ops.hadamard import MAX_LENGTH

__all__ = ["BITS", "WORD", "CompressedKV", "num_kept", "row_bytes"]

BITS = (16, 8, 4)
#: Channels of one word of a bitmap.
WORD = 64
#: Channels of a row.
WIDTHS = (64, 128, 256)


class CompressedKV(NamedTuple):
    """Compressed rows, one per token and K/V head (docs/semantics/compressed_kv.md §4.5).

    Attributes:
        bitmap: int64 [B, H_kv, S, D/64]; bit d mod 64 of word d // 64 says that channel d is kept.
        values: uint8 [B, H_kv, S, row_bytes]; the kept values in the order of channels.
        scales: float16 [B, H_kv, S]; [B, H_kv, 0] where bits is 16.
    """

    bitmap: Tensor
    values: Tensor
    scales: Tensor


def num_kept(head_dim: int, sparsity: float) -> int:
    """Channels that stay of a row: max(1, D - floor(sparsity * D)); sparsity in [0, 1]."""
    check_number("num_kept", "sparsity", sparsity)
    if not 0 <= sparsity <= 1:
        raise ValueError(f"num_kept: sparsity must be between 0 and 1, got {sparsity}")
    return max(1, head_dim - math.floor(sparsity * head_dim))


def row_bytes(keep: int, bits: int) -> int:
    """Bytes of the values of one row: ceil(keep * bits / 8), rounded up to a multiple of 4."""
    return (keep * bits + 31) // 32 * 4


def check_format(
    op: str, head_dim: int, keep: int, bits: int, prefix: str = "", width: str = "head_dim"
) -> None:
    """Checks the numbers that describe rows; ``width`` is what the message calls head_dim.

    Raises:
        ShapeMismatchError: head_dim is not 64, 128 or 256.
        TypeError: keep or bits is no int.
        ValueError: keep outside 1 ... head_dim, or bits other than 16, 8 and 4.
    """
    if head_dim not in WIDTHS:
        raise ShapeMismatchError(
            f"{op}: {width} must be 64, 128 or 256, got {head_dim}",
            expected=WIDTHS,
            actual=head_dim,
            tensor_name=None if width == "head_dim" else width.split()[-1],
        )
    check_int(op, f"{prefix}keep", keep, 1, head_dim)
    check_int(op, f"{prefix}bits", bits, -(2**31))
    if bits not in BITS:
        raise ValueError(f"{op}: {prefix}bits must be one of 16, 8, 4, got {bits}")


def _on_host(x: Tensor) -> bool:
    """Whether the values of x can be looked at without waiting for a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_rows(op: str, x: Tensor, keep: int, bits: int, weight: Tensor | None) -> None:
    check_tensors(op, x=(x, "B H_kv S D"), **({} if weight is None else {"weight": (weight, "B H_kv D")}))
    check_dtype(op, FLOATING, x=x)
    check_format(op, x.shape[-1], keep, bits, width="D of x")
    if weight is not None:
        check_weight(op, "weight", weight)


def check_weight(op: str, name: str, weight: Tensor) -> None:
    """Checks the dtype of a weight and, where no device is waited for, its sign."""
    check_dtype(op, FLOATING_AND_DOUBLE, **{name: weight})
    if _on_host(weight) and bool((weight < 0).any()):
        raise ValueError(f"{op}: {name} must not be negative, got {float(weight.min())}")


def check_compressed(
    op: str, lead: str, rows: CompressedKV, keep: int, bits: int, prefix: str = ""
) -> dict[str, tuple[Tensor, str]]:
    """Checks dtypes and sizes of compressed rows; returns their tensors with shapes in words for check_tensors."""
    no_scales = " ".join([*lead.split()[:2], "none"])
    words = {
        f"{prefix}bitmap": (rows.bitmap, f"{lead} {prefix}words"),
        f"{prefix}values": (rows.values, f"{lead} {prefix}row_bytes"),
        f"{prefix}scales": (rows.scales, no_scales if bits == 16 else lead),
    }
    check_tensors(op, **words)
    for part, dtype in (("bitmap", torch.int64), ("values", torch.uint8), ("scales", torch.float16)):
        check_dtype(op, (dtype,), **{f"{prefix}{part}": getattr(rows, part)})
    width = f"{WORD} times the words of {prefix}bitmap"
    check_format(op, rows.bitmap.shape[-1] * WORD, keep, bits, prefix, width)
    for part, size, wanted in (
        ("values", rows.values.shape[-1], row_bytes(keep, bits)),
        ("scales", rows.scales.shape[-1], 0 if bits == 16 else rows.scales.shape[-1]),
    ):
        if size != wanted:
            raise ShapeMismatchError(
                f"{op}: the last dim of {prefix}{part} must be {wanted} for keep {keep} and {bits} bits, got {size}",
                expected=wanted,
                actual=size,
                tensor_name=f"{prefix}{part}",
            )
    return words


def check_lengths(op: str, name: str, lengths: Tensor | None, most: int, batch: int) -> None:
    if lengths is None:
        return
    check_dtype(op, (torch.int32,), **{name: lengths})
    if _on_host(lengths) and batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
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
