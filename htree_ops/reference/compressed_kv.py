"""Plain PyTorch reference of the compressed K/V cache: pruning, packing, decode attention (docs/semantics §4.2-4.6).

A row is one token of one K/V head. The packer works on whole tensors but spells out every step of the format; it
shares nothing with the kernels. Attention runs in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from htree_ops.reference.hadamard import grouped_hadamard, hadamard_matrix, hadamard_transform

#: Largest code per number of bits.
LARGEST_CODE = {8: 127, 4: 7}
LARGEST_HALF = 65504.0
SMALLEST_HALF = 2.0**-24
WORD = 64


def num_kept(width: int, sparsity: float) -> int:
    """How many channels of ``width`` are kept at a sparsity in [0, 1]: max(1, D - floor(sparsity * D))."""
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"sparsity must be between 0 and 1, got {sparsity}")
    return max(1, width - math.floor(sparsity * width))


def row_bytes(keep: int, bits: int) -> int:
    """Bytes of the values of a row: ceil(keep * bits / 8), rounded up to a multiple of 4."""
    return -(-keep * bits // 32) * 4


def key_weight_from_queries(q: Tensor, num_kv_heads: int, last: int = 32) -> Tensor:
    """Weight of the channels of the keys, float64 [B, H_kv, D], from the queries q [B, H, S, D] that meet them.

    w_d is the sum over the query heads of a K/V head of the mean of |q_d| over the last ``last`` queries.
    """
    heads = q.double()[:, :, -last:].abs().mean(dim=2)
    return heads.unflatten(1, (num_kv_heads, -1)).sum(dim=2)


def kept_channels(x: Tensor, keep: int, weight: Tensor | None = None) -> Tensor:
    """bool [..., S, D]: the ``keep`` channels of each row with the largest |x| * weight (product in fp32).

    NaN is larger than infinity, and of equal channels the lower one stays, as in a stable descending sort.
    """
    importance = x.float().abs()
    if weight is not None:
        importance = importance * weight.float()[:, :, None]
    order = importance.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(importance, dtype=torch.bool).scatter(-1, order[..., :keep], True)


def pack_bits(kept: Tensor) -> Tensor:
    """bool [..., D] as int64 [..., D/64]: bit d mod 64 of word d // 64."""
    words = kept.unflatten(-1, (kept.shape[-1] // WORD, WORD)).long()
    return (words << torch.arange(WORD, device=kept.device)).sum(dim=-1)


def unpack_bits(bitmap: Tensor) -> Tensor:
    """The reverse of :func:`pack_bits`."""
    return ((bitmap[..., None] >> torch.arange(WORD, device=bitmap.device)) & 1).bool().flatten(-2)


def kv_prune(x: Tensor, keep: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [B, H_kv, S, D] with zeros in the channels that are dropped, and the bitmap of the others."""
    kept = kept_channels(x, keep, weight)
    return torch.where(kept, x, torch.zeros_like(x)), pack_bits(kept)


def quantise(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integer codes of fp32 rows [..., keep] and their fp16 scales [...].

    A row with a NaN or an infinity gets the scale NaN and codes 0: all of it decodes to NaN.
    """
    largest_code = LARGEST_CODE[bits]
    largest = values.abs().amax(dim=-1)
    # Divided by a tensor: torch on CUDA multiplies by the rounded inverse of a number, which is off by a bit.
    scale = (largest / torch.full_like(largest, largest_code)).clamp(max=LARGEST_HALF).half()
    scale = scale.masked_fill((largest > 0) & (scale == 0), SMALLEST_HALF)
    scale = scale.masked_fill(~largest.isfinite(), math.nan)
    codes = (values / scale.float()[..., None]).round().clamp(-largest_code, largest_code)
    return codes.masked_fill(~(scale > 0)[..., None], 0.0).long(), scale


def kv_compress(
    x: Tensor, keep: int, bits: int = 8, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Prunes, quantises and packs x [B, H_kv, S, D].

    Returns bitmap int64 [B, H_kv, S, D/64], values uint8 [B, H_kv, S, row_bytes], scales fp16 [B, H_kv, S] (or 0 rows).
    """
    kept = kept_channels(x, keep, weight)
    bitmap = pack_bits(kept)
    values = x[kept].unflatten(0, (*x.shape[:-1], keep))  # in the order of channels
    size = row_bytes(keep, bits)
    if bits == 16:
        raw = values.contiguous().view(torch.uint8)
        padded = torch.nn.functional.pad(raw, (0, size - raw.shape[-1]))
        return bitmap, padded, torch.empty(*x.shape[:2], 0, dtype=torch.float16, device=x.device)
    codes, scales = quantise(values.float(), bits)
    if bits == 8:
        codes = torch.nn.functional.pad(codes, (0, size - keep))
        return bitmap, (codes & 0xFF).to(torch.uint8), scales
    nibbles = torch.nn.functional.pad(codes, (0, 2 * size - keep)) + 8  # padding is code 0
    return bitmap, (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8), scales


def kv_decompress(
    bitmap: Tensor,
    values: Tensor,
    scales: Tensor,
    D: int,
    keep: int,
    bits: int,
    dtype: torch.dtype = torch.float16,
    pairs: torch.dtype | None = None,
) -> Tensor:
    """Rows [B, H_kv, S, D] in ``dtype``. ``pairs``: the dtype of 16-bit values, by default ``dtype``."""
    kept = unpack_bits(bitmap)[..., :D]
    if bits == 16:
        numbers = values[..., : 2 * keep].contiguous().view(pairs or dtype).double()
    else:
        if bits == 8:
            codes = values[..., :keep].view(torch.int8).double()
        else:
            codes = torch.stack((values & 0xF, values >> 4), dim=-1).flatten(-2)[..., :keep].double() - 8
        numbers = codes * scales.double()[..., None]
    rank = (kept.long().cumsum(dim=-1) - 1).clamp(0, keep - 1)
    return torch.where(kept, numbers.gather(-1, rank), 0.0).to(dtype)


def gather_pages(pool: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Rows 0 ... length-1 of every sequence from a pool [num_pages, H_kv, page, ...]: [B, H_kv, length, ...].

    Row t of sequence b is row t mod page of page block_table[b, t // page]; the table is read up to ``length`` only.
    """
    page = pool.shape[2]
    tokens = torch.arange(length, device=pool.device)
    pages = block_table.long()[:, tokens // page].clamp(
        0, max(pool.shape[0] - 1, 0)
    )  # entries that are not read
    return pool[pages, :, tokens % page].transpose(1, 2)


def expanded_query(q: Tensor, num_kv_heads: int, group: int) -> Tensor:
    """q [B, H, D] for keys that are stored as :func:`grouped_hadamard` of ``group`` K/V heads: [B, H, group, D].

    It is the transform of a row of group * D zeros with q_h in the slot of its K/V head. Its part g meets the stored
    row of head g of the group, and the sum over g is the score of the keys as they were.
    """
    batch, heads, width = q.shape
    slots = torch.arange(heads, device=q.device) // (heads // num_kv_heads) % group
    rows = torch.zeros(batch, heads, group, width, dtype=torch.float64, device=q.device)
    rows[:, torch.arange(heads, device=q.device), slots] = q.double()
    signs = hadamard_matrix(group, q.device) * group**-0.5
    return torch.einsum("gf,bhfd->bhgd", signs, hadamard_transform(rows))


def attention(
    q: Tensor, k: Tensor, v: Tensor, present: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One query per head over the tokens that are present, in float64.

    q [B, H, Dk]; k [B, H_kv, S, Dk]; v [B, H_kv, S, Dv]; present bool [B, S]. Returns out [B, H, Dv] and the natural
    log-sum-exp [B, H]; without any token, and where every score is -inf, 0 and -inf. A score of +inf makes both NaN.
    What an absent token holds does not matter.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    hidden = ~present[:, None, :, None]
    keys, values = (x.double().masked_fill(hidden, 0.0).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhd,bhsd->bhs", q.double(), keys) * scale
    scores = scores.masked_fill(~present[:, None], -math.inf)
    lse = scores.logsumexp(dim=-1)
    lse = lse.masked_fill(lse == math.inf, math.nan)
    empty = (lse == -math.inf)[..., None] | ~present[:, None]
    weights = (scores - lse[..., None]).exp().masked_fill(empty, 0.0)
    return torch.einsum("bhs,bhsd->bhd", weights, values), lse


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
    pairs: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor]:
    """The op's arguments; (out, lse) in float64. ``pairs`` is the dtype of 16-bit values, ``split_size`` is ignored.

    Transformed keys are transformed back before the dot product, the other exact recipe of §4.2.
    """
    length = k_bitmap.shape[2] if block_table is None else block_table.shape[1] * k_bitmap.shape[2]

    def rows(bitmap: Tensor, values: Tensor, scales: Tensor, keep: int, bits: int) -> Tensor:
        parts = [bitmap, values, *([] if bits == 16 else [scales])]
        if block_table is not None:
            parts = [gather_pages(part, block_table, length) for part in parts]
        width = parts[0].shape[-1] * WORD
        return kv_decompress(parts[0], parts[1], parts[-1], width, keep, bits, torch.float64, pairs)

    keys = torch.cat((rows(k_bitmap, k_values, k_scales, k_keep, k_bits), k_win.double()), dim=2)
    values = torch.cat((rows(v_bitmap, v_values, v_scales, v_keep, v_bits), v_win.double()), dim=2)

    def visible(lengths: Tensor | None, size: int) -> Tensor:
        tokens = torch.arange(size, device=q.device)
        limit = torch.full((q.shape[0],), size, device=q.device) if lengths is None else lengths
        return tokens < limit[:, None]

    compressed, window = visible(comp_len, length), visible(win_len, k_win.shape[2])
    present = torch.cat((compressed, window), dim=1)
    if hadamard_group:
        keys = keys.masked_fill(~present[:, None, :, None], 0.0)  # what is absent may hold anything
        keys = grouped_hadamard(keys, hadamard_group)
    if q.dim() == 3:
        return attention(q, keys, values, present, scale)
    out = torch.zeros(*q.shape[:-1], v_win.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:-1], dtype=torch.float64, device=q.device)
    newer = window.sum(dim=1, keepdim=True) - torch.arange(k_win.shape[2], device=q.device)  # and itself
    for i in range(q.shape[2]):
        seen = torch.cat((compressed, window & (newer > q.shape[2] - 1 - i)), dim=1)
        out[:, :, i], lse[:, :, i] = attention(q[:, :, i], keys, values, seen, scale)
    return out, lse
