"""Rows of a K/V cache with few channels and few bits, and attention to them (docs/semantics §4.2-4.6).

The functions here are the ops; :mod:`htree_ops.ops.compressed_kv.cache` has the cache that a model keeps, and
:mod:`htree_ops.ops.compressed_kv.attention` the module around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.ops.arguments import validate_arguments
from htree_ops.ops.compressed_kv.format import CompressedKV, check_lengths


@validate_arguments
def kv_prune(x: Tensor, keep: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Zeros all but the ``keep`` largest channels of each row, by |x_d| * weight_d.

    The product is taken in fp32. Of equal channels the lower one stays. NaN counts as larger than infinity. Exactly
    ``keep`` bits are set even where a kept value is 0.
    Source: docs/semantics/compressed_kv.md §4.4, design document [003].

    Args:
        x: [B, H_kv, S, D], D a multiple of 64 up to 512, any strides; float32, float16 or bfloat16.
        keep: channels that stay, 1 ... D; :func:`num_kept` gives it for a sparsity.
        weight: [B, H_kv, D] >= 0, any floating dtype, or None for ones.

    Returns:
        The pruned rows [B, H_kv, S, D] in the dtype of x, and their bitmap int64 [B, H_kv, S, D/64]. No gradient.

    Raises:
        ShapeMismatchError: a rank or size that does not fit, or another D.
        UnsupportedDtypeError: another dtype.
        ValueError: keep outside 1 ... D, or a negative weight (checked on the CPU only).
    """
    return torch.ops.htree.kv_prune(x, keep, weight)


@validate_arguments
def kv_compress(x: Tensor, keep: int, bits: int = 8, weight: Tensor | None = None) -> CompressedKV:
    """Prunes rows as :func:`kv_prune` does, quantises what is kept and packs it, for keys and values alike.

    With a = max|kept| and qmax = 127 (8 bits) or 7 (4 bits)::

        scale = fp16(a / qmax);  code = clamp(round(x / scale), -qmax, qmax)

    Eight bits are two's complement, four bits are code + 8 with the lower nibble first; 16 bits are the values as they
    are. A row with a NaN or an infinity gets the scale NaN, and its kept channels decode to NaN.
    Source: docs/semantics/compressed_kv.md §4.5, design document [003] (``convert_key_batched_quant``).

    Args:
        x: [B, H_kv, S, D], D a multiple of 64 up to 512, any strides; float32, float16 or bfloat16. Not float32 for 16
            bits.
        keep: channels that stay, 1 ... D.
        bits: 16, 8 or 4 per kept value.
        weight: as in :func:`kv_prune`.

    Returns:
        (bitmap, values, scales), see :class:`CompressedKV`. No gradient.

    Raises:
        As :func:`kv_prune`; ValueError also for other bits, UnsupportedDtypeError for float32 with 16 bits.

    Example:
        >>> x = torch.randn(1, 2, 100, 64)
        >>> bitmap, values, scales = kv_compress(x, keep=32, bits=8)
        >>> kv_decompress(bitmap, values, scales, D=64, keep=32, bits=8).count_nonzero(-1).max().item() <= 32
        True
    """
    return CompressedKV(*torch.ops.htree.kv_compress(x, keep, bits, weight))


@validate_arguments
def kv_decompress(
    bitmap: Tensor,
    values: Tensor,
    scales: Tensor,
    D: int,
    keep: int,
    bits: int,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Makes rows dense again: code * scale where the bit is set, 0 elsewhere, rounded once to ``dtype``.

    A kept value is off by at most scale * (0.5 + qmax * 2^-11). Source: docs/semantics/compressed_kv.md §4.5.

    Args:
        bitmap, values, scales: of :func:`kv_compress` with ``keep`` and ``bits``.
        D: width of a row, 64 times the words of the bitmap.
        dtype: float16, bfloat16 or, for 8 and 4 bits, float32. 16-bit values must have this dtype, which is
            not stored with them.

    Returns:
        [B, H_kv, S, D] in ``dtype``. No gradient.

    Raises:
        ShapeMismatchError: a rank or size that does not fit keep, bits and D.
        UnsupportedDtypeError: tensors or ``dtype`` of another dtype.
        ValueError: keep outside 1 ... D, or other bits. TypeError: keep, bits or D is not an int.

    Example:
        >>> rows = kv_compress(torch.ones(1, 2, 100, 64), keep=64)
        >>> kv_decompress(*rows, D=64, keep=64, bits=8, dtype=torch.float32).shape
        torch.Size([1, 2, 100, 64])
    """
    return torch.ops.htree.kv_decompress(bitmap, values, scales, D, keep, bits, dtype)


@validate_arguments
def kv_decode_attention(
    q: Tensor,
    k_bitmap: Tensor,
    k_values: Tensor,
    k_scales: Tensor,
    v_bitmap: Tensor,
    v_values: Tensor,
    v_scales: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    comp_len: Tensor | None = None,
    win_len: Tensor | None = None,
    scale: float | None = None,
    block_table: Tensor | None = None,
    *,
    k_keep: int,
    v_keep: int,
    k_bits: int = 8,
    v_bits: int = 8,
    hadamard_group: int = 0,
    split_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of the latest queries of each head over compressed tokens and a dense window of the newest ones.

    One fp32 softmax over both parts, query head h on K/V head h // (H / H_kv)::

        s_j = scale * <q, K_j>;  out = sum_j exp(s_j - lse) V_j;  lse = log sum_j exp(s_j)

    Several queries are those of the last n tokens of the window: query i sees all but the last n - 1 - i of them.
    Where the window has fewer, the first queries see the compressed tokens alone. Without any token, or with scores of
    -inf alone, out is 0 and lse is -inf. Keys may be stored transformed (docs/semantics §4.2): with ``hadamard_group``
    1 each row is the orthonormal Hadamard transform of the key, with G > 1 the rows are those of
    :func:`grouped_hadamard` over G adjacent K/V heads. The op transforms q to match, exactly in both cases; values are
    never transformed. On CUDA a row is read once for up to eight query heads of its K/V head, and once per eight where
    there are more.
    Source: docs/semantics/compressed_kv.md §4.6, design document [003] (``mustafar_attention``).

    Args:
        q: [B, H, D] or [B, H, n, D], D a multiple of 64 up to 512, rotated already; float32, float16 or bfloat16.
        k_bitmap, k_values, k_scales: compressed keys of S tokens, see :class:`CompressedKV`. With ``block_table``
            they are pools [num_pages, H_kv, page, ...].
            16-bit values are of the dtype of q, float16 for a float32 q.
        v_bitmap, v_values, v_scales: the values of the same tokens, whose D is any multiple of 64 up to 512.
        k_win, v_win: dense window [B, H_kv, W, D] in the dtype of q, the keys transformed like the compressed ones.
        comp_len: int32 [B], compressed tokens of each sequence that exist; None is all S.
        win_len: int32 [B], tokens of each window that exist; None is all W.
        scale: factor of the scores; None is D^-1/2.
        block_table: int32 [B, max_pages]; token t of sequence b is row t mod page of page block_table[b, t // page].
            Entries past comp_len are never read. One before it that the pool does not have is an IndexError on the CPU;
            on CUDA some page of the pool is read.
        k_keep, v_keep, k_bits, v_bits: as compressed.
        hadamard_group: 0, 1, or a divisor of H_kv; above 0 the D of keys is a power of two.
        split_size: compressed tokens per partial softmax, rounded up to a multiple of 16 on CUDA; 0 chooses by the
            size of the problem. With a fixed size the bits of a sequence do not depend on the others of its batch.

    Returns:
        out, of the shape and dtype of q but with the D of values; lse float32 [B, H] or [B, H, n]. No gradient.

    Raises:
        ShapeMismatchError: a rank or size that does not fit.
        UnsupportedDtypeError: another dtype.
        DeviceError: tensors on different devices.
        ValueError: keep, bits, group, split or scale out of range; lengths above the capacity, where they lie on the
            CPU (a kernel on CUDA clamps them).

    Example:
        >>> rows = kv_compress(torch.randn(1, 2, 100, 64), keep=32)
        >>> window = torch.randn(1, 2, 8, 64)  # the latest tokens, as they are
        >>> q = torch.randn(1, 8, 1, 64)
        >>> kv_decode_attention(q, *rows, *rows, window, window, k_keep=32, v_keep=32)[0].shape
        torch.Size([1, 8, 1, 64])
    """
    if k_win.dim() == k_bitmap.dim() == 4:  # the op refuses other ranks
        pages = 1 if block_table is None else block_table.shape[-1] if block_table.dim() else 0
        check_lengths("kv_decode_attention", "comp_len", comp_len, pages * k_bitmap.shape[2])
        check_lengths("kv_decode_attention", "win_len", win_len, k_win.shape[2])
    return torch.ops.htree.kv_decode_attention(
        q, k_bitmap, k_values, k_scales, v_bitmap, v_values, v_scales, k_win, v_win, comp_len, win_len, scale,
        block_table, k_keep=k_keep, v_keep=v_keep, k_bits=k_bits, v_bits=v_bits, hadamard_group=hadamard_group,
        split_size=split_size,
    )  # fmt: skip
