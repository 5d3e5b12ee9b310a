"""Rows of a K/V cache with few channels and few bits, and attention on them (docs/semantics §4.2-4.6).

The functions here are the ops; :mod:`htree_ops.ops.compressed_kv_cache` has the cache that a model keeps, and
:mod:`htree_ops.ops.compressed_kv_attention` the module around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.arguments import (
    FLOATING,
    check_dtype,
    check_int,
    check_int_type,
    check_number,
    check_tensors,
)
from htree_ops.ops.compressed_kv_format import (
    WORD,
    CompressedKV,
    check_compressed,
    check_hadamard_group,
    check_lengths,
    check_rows,
    num_kept,
    row_bytes,
)
from htree_ops.ops.hadamard import grouped_hadamard
from htree_ops.ops.tree_attention_stages import rope

__all__ = [
    "CompressedKV",
    "apply_grouped_hadamard",
    "apply_rotary_pos_emb_k",
    "apply_rotary_pos_emb_q",
    "convert_key_batched_quant",
    "kv_compress",
    "kv_decode_attention",
    "kv_decompress",
    "kv_prune",
    "mustafar_attention",
    "num_kept",
    "row_bytes",
]


def kv_prune(x: Tensor, keep: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Zeros all but the ``keep`` largest channels of each row, by |x_d| * weight_d.

    The product is taken in fp32. Of equals the lower channel stays, NaN counts as larger than infinity, and exactly
    ``keep`` bits are set even where a kept value is 0.
    Source: docs/semantics/compressed_kv.md §4.4, design document [003].

    Args:
        x: [B, H_kv, S, D], D 64, 128 or 256, any strides; float32, float16 or bfloat16.
        keep: channels that stay, 1 ... D; :func:`num_kept` gives it for a sparsity.
        weight: [B, H_kv, D] >= 0, any floating dtype, or None for ones.

    Returns:
        The pruned rows [B, H_kv, S, D] in the dtype of x, and their bitmap int64 [B, H_kv, S, D/64]. No gradient.

    Raises:
        ShapeMismatchError: a rank or size that does not fit, or another D.
        UnsupportedDtypeError: another dtype.
        ValueError: keep outside 1 ... D, or a negative weight (seen on the CPU only).
    """
    check_rows("kv_prune", x, keep, 8, weight)
    return torch.ops.htree.kv_prune(x, keep, weight)


def kv_compress(x: Tensor, keep: int, bits: int = 8, weight: Tensor | None = None) -> CompressedKV:
    """Prunes rows as :func:`kv_prune` does, quantises what is kept and packs it. Keys and values alike.

    With a = max|kept| and qmax = 127 (8 bits) or 7 (4 bits)::

        scale = fp16(a / qmax);  code = clamp(round(x / scale), -qmax, qmax)

    Eight bits are two's complement, four bits are code + 8 with the lower nibble first; 16 bits are the values as they
    are. A row with a NaN or an infinity gets the scale NaN and decodes to NaN where it is kept.
    Source: docs/semantics/compressed_kv.md §4.5, design document [003] (``convert_key_batched_quant``).

    Args:
        x: [B, H_kv, S, D], D 64, 128 or 256, any strides; float32, float16 or bfloat16. Not float32 for 16 bits.
        keep: channels that stay, 1 ... D.
        bits: 16, 8 or 4 per kept value.
        weight: as in :func:`kv_prune`.

    Returns:
        (bitmap, values, scales), see :class:`CompressedKV`. No gradient.

    Raises:
        As :func:`kv_prune`; ValueError also for other bits, UnsupportedDtypeError for float32 with 16 bits.
    """
    check_rows("kv_compress", x, keep, bits, weight)
    if bits == 16 and x.dtype == torch.float32:
        raise UnsupportedDtypeError(
            "kv_compress: 16 bits hold float16 or bfloat16, got x of torch.float32: convert it first",
            dtype=x.dtype,
            supported_dtypes=(torch.float16, torch.bfloat16),
            tensor_name="x",
        )
    return CompressedKV(*torch.ops.htree.kv_compress(x, keep, bits, weight))


def kv_decompress(
    bitmap: Tensor,
    values: Tensor,
    scales: Tensor,
    D: int,
    keep: int,
    bits: int,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Dense rows again: code * scale where the bit is set, 0 elsewhere, rounded once to ``dtype``.

    A kept value is off by at most scale * (0.5 + qmax * 2^-11). Source: docs/semantics/compressed_kv.md §4.5.

    Args:
        bitmap, values, scales: of :func:`kv_compress` with ``keep`` and ``bits``.
        D: width of a row, 64 times the words of the bitmap.
        dtype: float16, bfloat16 or, for 8 and 4 bits, float32. 16-bit values must be of this dtype: they are
            stored without it.

    Returns:
        [B, H_kv, S, D] in ``dtype``. No gradient.

    Raises:
        ShapeMismatchError: a rank or size that does not fit keep, bits and D.
        UnsupportedDtypeError: tensors or ``dtype`` of another dtype.
        ValueError: keep outside 1 ... D, or other bits. TypeError: keep, bits or D is no int.
    """
    rows = CompressedKV(bitmap, values, scales)
    check_compressed("kv_decompress", "B H_kv S", rows, keep, bits)
    check_int_type("kv_decompress", "D", D)
    if bitmap.shape[-1] * WORD != D:
        raise ShapeMismatchError(
            f"kv_decompress: D must be {WORD} times the words of bitmap = {bitmap.shape[-1] * WORD}, got {D}",
            expected=bitmap.shape[-1] * WORD,
            actual=D,
            tensor_name="bitmap",
        )
    supported = FLOATING[1:] if bits == 16 else FLOATING
    if dtype not in supported:
        raise UnsupportedDtypeError(
            f"kv_decompress: dtype must be {' or '.join(map(str, supported))} for {bits} bits, got {dtype}",
            dtype=dtype,
            supported_dtypes=supported,
        )
    return torch.ops.htree.kv_decompress(bitmap, values, scales, D, keep, bits, dtype)


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
    """Attention of one new query per head over compressed tokens and a dense window of the latest ones.

    One fp32 softmax over both parts, query head h on K/V head h // (H / H_kv)::

        s_j = scale * <q, K_j>;  out = sum_j exp(s_j - lse) V_j;  lse = log sum_j exp(s_j)

    Without any token, or with scores of -inf alone, out is 0 and lse is -inf. Keys may be stored transformed
    (docs/semantics §4.2): with ``hadamard_group`` 1 each row is the orthonormal Hadamard transform of the key, with
    G > 1 the rows are those of :func:`grouped_hadamard` over G adjacent K/V heads. The op transforms q to match,
    exactly in both cases; values are never transformed. On CUDA a row is read once for up to eight query heads of its
    K/V head, and once per eight where there are more.
    Source: docs/semantics/compressed_kv.md §4.6, design document [003] (``mustafar_attention``).

    Args:
        q: [B, H, D] or [B, H, 1, D], D 64, 128 or 256, rotated already; float32, float16 or bfloat16.
        k_bitmap, k_values, k_scales: compressed keys of S tokens, see :class:`CompressedKV`. With ``block_table``
            they are pools [num_pages, H_kv, page, ...].
            16-bit values are of the dtype of q, float16 for a float32 q.
        v_bitmap, v_values, v_scales: the values of the same tokens.
        k_win, v_win: dense window [B, H_kv, W, D] in the dtype of q, the keys transformed like the compressed ones.
        comp_len: int32 [B], compressed tokens of each sequence that exist; None is all S.
        win_len: int32 [B], tokens of each window that exist; None is all W.
        scale: factor of the scores; None is D^-1/2.
        block_table: int32 [B, max_pages]; token t of sequence b is row t mod page of page block_table[b, t // page].
            Entries past comp_len are never read; one before it that is no page is an IndexError on the CPU, and
            some page of the pool on CUDA.
        k_keep, v_keep, k_bits, v_bits: as compressed.
        hadamard_group: 0, 1, or a divisor of H_kv.
        split_size: compressed tokens per partial softmax, on CUDA rounded up to a multiple of 16; 0 chooses by the
            size of the problem. With a fixed size the bits of a sequence do not depend on the others of its batch.

    Returns:
        out, of the shape and dtype of q; lse float32 [B, H] or [B, H, 1]. No gradient.

    Raises:
        ShapeMismatchError: a rank or size that does not fit.
        UnsupportedDtypeError: another dtype.
        DeviceError: tensors on different devices.
        ValueError: keep, bits, group, split or scale out of range; lengths above the capacity, where they lie on the
            CPU (a kernel on CUDA clamps them).
    """
    op = "kv_decode_attention"
    pooled = block_table is not None
    lead = "num_pages H_kv page" if pooled else "B H_kv S"
    words: dict[str, tuple[Tensor, str]] = {
        "q": (q, "B H one D" if isinstance(q, Tensor) and q.dim() == 4 else "B H D")
    }
    words |= check_compressed(op, lead, CompressedKV(k_bitmap, k_values, k_scales), k_keep, k_bits, "k_")
    words |= check_compressed(op, lead, CompressedKV(v_bitmap, v_values, v_scales), v_keep, v_bits, "v_")
    words |= {"k_win": (k_win, "B H_kv W D"), "v_win": (v_win, "B H_kv W D")}
    words |= {} if comp_len is None else {"comp_len": (comp_len, "B")}
    words |= {} if win_len is None else {"win_len": (win_len, "B")}
    words |= {} if block_table is None else {"block_table": (block_table, "B max_pages")}
    check_tensors(op, **words)
    check_dtype(op, FLOATING, q=q, k_win=k_win, v_win=v_win)
    batch, heads, width = q.shape[0], q.shape[1], q.shape[-1]
    kv_heads = k_win.shape[1]
    for name, size, wanted in (
        ("q", q.shape[2] if q.dim() == 4 else 1, 1),
        ("k_bitmap", k_bitmap.shape[-1] * WORD, width),
        ("v_bitmap", v_bitmap.shape[-1] * WORD, width),
    ):
        if size != wanted:
            what = (
                "dim 2 of q must be" if name == "q" else f"{WORD} times the words of {name} must be the width"
            )
            raise ShapeMismatchError(
                f"{op}: {what} {wanted}, got {size}", expected=wanted, actual=size, tensor_name=name
            )
    if kv_heads < 1 or heads % kv_heads:
        raise ShapeMismatchError(
            f"{op}: H of q must be a multiple of H_kv = {kv_heads}, got {heads}",
            expected=f"a multiple of {kv_heads}",
            actual=heads,
            tensor_name="q",
        )
    check_int(op, "split_size", split_size, 0)
    check_int(op, "hadamard_group", hadamard_group, 0)
    check_hadamard_group(op, hadamard_group, kv_heads, width)
    if scale is not None:
        check_number(op, "scale", scale)
    page = k_bitmap.shape[2]
    capacity = page if block_table is None else block_table.shape[1] * page
    check_lengths(op, "comp_len", comp_len, capacity, batch)
    check_lengths(op, "win_len", win_len, k_win.shape[2], batch)
    if block_table is not None:
        check_dtype(op, (torch.int32,), block_table=block_table)
    return torch.ops.htree.kv_decode_attention(
        q, k_bitmap, k_values, k_scales, v_bitmap, v_values, v_scales, k_win, v_win, comp_len, win_len, scale,
        block_table, k_keep=k_keep, v_keep=v_keep, k_bits=k_bits, v_bits=v_bits, hadamard_group=hadamard_group,
        split_size=split_size,
    )  # fmt: skip


def apply_rotary_pos_emb_q(q: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
    """Half-split rotary positions on q [B, H, S, D] in the layout of heads first, as design document [003] has it.

    Args:
        q: queries, D even.
        cos, sin: float32 [size, D/2], the two halves of ``htree_ops.ops.tree_attention_stages.rope_cache``.
        position_ids: int32 or int64, [S] or [B, S], in [0, size).

    Returns:
        [B, H, S, D] in the dtype of q, differentiable. Rotation comes before any Hadamard transform: the two do not
        commute (docs/semantics/hadamard.md §4.2, §4.3).

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError: as ``rope``.
    """
    check_tensors("apply_rotary_pos_emb_q", q=(q, "B H S D"))
    return rope(q.transpose(1, 2), cos, sin, position_ids).transpose(1, 2)


def apply_rotary_pos_emb_k(k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
    """:func:`apply_rotary_pos_emb_q` of keys k [B, H_kv, S, D]."""
    check_tensors("apply_rotary_pos_emb_k", k=(k, "B H_kv S D"))
    return rope(k.transpose(1, 2), cos, sin, position_ids).transpose(1, 2)


# The names that design document [003] uses.
apply_grouped_hadamard = grouped_hadamard
convert_key_batched_quant = kv_compress
mustafar_attention = kv_decode_attention
