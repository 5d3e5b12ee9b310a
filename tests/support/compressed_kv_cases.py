"""Problems of the compressed K/V ops (docs/semantics §4.2-4.6), with their least bytes and tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from htree_ops.reference import compressed_kv as reference
from htree_ops.reference.hadamard import grouped_hadamard
from tests.support.cases import Case, normal
from tests.support.compare import assert_close_spec
from tests.support.layouts import LAYOUTS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: What packs the rows of a decode case: the reference, or the op where the rows are many.
Packer = Callable[[Tensor, int, int], tuple[Tensor, Tensor, Tensor]]


def rows_with_outliers(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, seed: int
) -> Tensor:
    """Normal rows [..., D] whose channels 3, 17, ... are ten times as large, as keys of language models are."""
    x = normal(shape, torch.float32, device, seed)
    x[..., 3::29] *= 10
    return x.to(dtype)


def assert_rows_within_bounds(x: Tensor, decoded: Tensor, bitmap: Tensor, scales: Tensor, bits: int) -> None:
    """The bounds of §4.5: kept |decoded - x| <= scale * (0.5 + qmax * 2^-11), pruned 0 and no larger than any kept.

    x and decoded [B, H_kv, S, D] are finite, decoded is float32; the caller must leave out rows whose scale saturates.
    """
    kept = reference.unpack_bits(bitmap)
    error = (decoded.double() - x.double()).abs()
    limit = torch.zeros_like(error)
    if bits != 16:
        scale, largest_code = scales.double()[..., None], reference.LARGEST_CODE[bits]
        # A subnormal scale is off by half of 2^-24.
        limit += scale * 0.5 + largest_code * (scale * 2.0**-11).clamp(min=2.0**-25)
    assert bool((error <= limit)[kept].all()), "a kept value is off by more than its bound"
    assert not bool(decoded[~kept].any()), "a pruned channel decodes to something else than 0"
    smallest = x.abs().masked_fill(~kept, math.inf).amin(dim=-1, keepdim=True)
    assert bool((x.abs() <= smallest)[~kept].all()), "a pruned channel is larger than a kept one"


def decode_tolerance(q: Tensor, largest_value: float) -> tuple[float, float]:
    """(rtol, atol) of the output of decode attention (§4.6); bfloat16 has eight times the unit of float16."""
    if q.dtype == torch.float32:
        return 1e-4, 1e-5 * max(largest_value, 1.0)
    unit = 2e-3 if q.dtype == torch.float16 else 1.6e-2
    return unit, unit * largest_value


def assert_decode(case: DecodeCase, actual: tuple[Tensor, Tensor], inputs: tuple[Any, ...]) -> None:
    """out and lse of the op against float64 attention on the decompressed rows of the same inputs."""
    pairs = case.dtype if case.dtype != torch.float32 else torch.float16
    out, lse = reference.kv_decode_attention(*inputs, **case.options(), pairs=pairs)
    window = inputs[8]
    largest = (
        float(window.abs().nan_to_num(0.0).max()) if window.numel() else 1.0
    )  # all values are standard normal
    rtol, atol = decode_tolerance(inputs[0], max(largest, 1.0))
    assert_close_spec(actual[0], out, rtol, atol, dtype=case.dtype, name="out")
    assert_close_spec(
        actual[1], lse, 1e-4, 1e-4 if case.dtype == torch.float32 else 2e-3, dtype=torch.float32, name="lse"
    )


@dataclass(frozen=True, kw_only=True)
class CompressCase(Case):
    """x ``shape`` = [B, H_kv, S, D] in the named layout.

    Attributes:
        weight: dtype of the weight [B, H_kv, D], or None for none.
        magnitude: factor of the values.
        coarse: round the values to few different ones, so that ties decide.
    """

    shape: tuple[int, int, int, int]
    keep: int
    bits: int = 8
    layout: str = "contiguous"
    weight: torch.dtype | None = None
    magnitude: float = 1.0
    coarse: bool = False

    def make_inputs(
        self, device: str | torch.device, seed: int = 0
    ) -> tuple[Tensor, int, int, Tensor | None]:
        """(x, keep, bits, weight) of ``torch.ops.htree.kv_compress``."""
        x = rows_with_outliers(self.shape, torch.float32, device, seed) * self.magnitude
        x = (x * 2).round() / 2 if self.coarse else x
        weight = None
        if self.weight is not None:
            batch, heads, _, width = self.shape
            weight = normal((batch, heads, width), torch.float32, device, seed + 1).abs().to(self.weight)
            weight[..., 1::7] = 0.0
        return LAYOUTS[self.layout](x.to(self.dtype)), self.keep, self.bits, weight

    def bytes(self) -> int:
        """x read, compressed rows written."""
        batch, heads, length, width = self.shape
        scale = 0 if self.bits == 16 else 2
        row = width // 8 + reference.row_bytes(self.keep, self.bits) + scale
        return batch * heads * length * (width * self.dtype.itemsize + row)

    def flops(self) -> int:
        """A product, a comparison with the threshold and a rounding per element."""
        return 3 * math.prod(self.shape)

    @property
    def shapes(self) -> str:
        """x[B,H_kv,S,D], keep, bits."""
        return f"x{list(self.shape)} keep={self.keep} bits={self.bits}"


def in_pages(rows: Tensor, page: int, block_table: Tensor, num_pages: int, poison: float | int) -> Tensor:
    """Rows [B, H_kv, S, ...] as a pool [num_pages, H_kv, page, ...] under ``block_table``; the rest is ``poison``."""
    batch, heads, length = rows.shape[:3]
    pool = torch.full((num_pages, heads, page, *rows.shape[3:]), poison, dtype=rows.dtype, device=rows.device)
    for b in range(batch):
        for start in range(0, length, page):
            part = rows[b, :, start : start + page]
            pool[int(block_table[b, start // page]), :, : part.shape[1]] = part
    return pool


@dataclass(frozen=True, kw_only=True)
class DecodeCase(Case):
    """Queries of the newest tokens over S compressed and W dense tokens.

    Attributes:
        B, H, H_kv, D, S, W: sizes.
        queries: n of each head; q is [B, H, n, D] where they are several.
        V: D of values; 0 is that of keys.
        comp_len, win_len: lengths per sequence, or None for all of S and W.
        page: tokens per page; 0 stores the rows without pages.
        four_d: q is [B, H, 1, D].
    """

    B: int = 2
    H: int = 4
    H_kv: int = 2
    D: int = 128
    S: int = 70
    W: int = 9
    queries: int = 1
    V: int = 0
    k_keep: int = 39
    v_keep: int = 64
    k_bits: int = 8
    v_bits: int = 8
    comp_len: tuple[int, ...] | None = None
    win_len: tuple[int, ...] | None = None
    scale: float | None = None
    hadamard_group: int = 0
    split_size: int = 0
    page: int = 0
    four_d: bool = False
    packer: Packer | None = None

    def dense(self, device: str | torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, D] (or [B, H, n, D]), all keys [B, H_kv, S + W, D] and values, as a model makes them."""
        several = (self.queries,) if self.queries != 1 else ()
        q = normal((self.B, self.H, *several, self.D), self.dtype, device, seed)
        tokens = self.S + self.W
        k = rows_with_outliers((self.B, self.H_kv, tokens, self.D), self.dtype, device, seed + 1)
        v = normal((self.B, self.H_kv, tokens, self.V or self.D), self.dtype, device, seed + 2)
        return q[:, :, None] if self.four_d else q, k, v

    def stored_keys(self, k: Tensor) -> Tensor:
        """Keys as the cache stores them with ``hadamard_group``."""
        return grouped_hadamard(k, self.hadamard_group).to(k.dtype) if self.hadamard_group else k

    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """The positional arguments of ``torch.ops.htree.kv_decode_attention``; the others are :meth:`options`."""
        q, k, v = self.dense(device, seed)
        k = self.stored_keys(k)
        packer: Packer = self.packer or reference.kv_compress
        rows: list[Tensor] = []
        for x, keep, bits in ((k, self.k_keep, self.k_bits), (v, self.v_keep, self.v_bits)):
            x = x[:, :, : self.S]
            rows += packer(x.half() if bits == 16 and x.dtype == torch.float32 else x, keep, bits)
        table = None
        if self.page:
            max_pages = -(-self.S // self.page) + 1  # no sequence uses the last column
            num_pages = self.B * max_pages + 2
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(num_pages, generator=generator, device="cpu")[: self.B * max_pages]
            table = order.view(self.B, max_pages).int().to(device)
            for part, x in enumerate(rows):
                if part % 3 == 2 and (self.k_bits, self.v_bits)[part // 3] == 16:
                    rows[part] = x.new_zeros(num_pages, self.H_kv, 0)
                    continue
                poison = math.nan if x.is_floating_point() else 0x5A
                rows[part] = in_pages(x, self.page, table, num_pages, poison)
            table[:, -1] = -1
        lengths = [
            None if x is None else torch.tensor(x, dtype=torch.int32, device=device)
            for x in (self.comp_len, self.win_len)
        ]
        if self.page and lengths[0] is None:
            lengths[0] = torch.full((self.B,), self.S, dtype=torch.int32, device=device)
        # A clone, because contiguous() leaves an empty view with the strides that it had.
        k_win, v_win = (x[:, :, self.S :].clone(memory_format=torch.contiguous_format) for x in (k, v))
        return (q, *rows, k_win, v_win, *lengths, self.scale, table)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the op."""
        names = ("k_keep", "v_keep", "k_bits", "v_bits", "hadamard_group", "split_size")
        return {name: getattr(self, name) for name in names}

    def bytes(self) -> int:
        """Compressed rows and window read once per K/V head, queries read, out written."""
        widths = (self.D, self.V or self.D)
        row = sum(
            width // 8 + reference.row_bytes(keep, bits) + (0 if bits == 16 else 2)
            for width, keep, bits in zip(
                widths, (self.k_keep, self.v_keep), (self.k_bits, self.v_bits), strict=True
            )
        )
        dense = sum(widths) * self.dtype.itemsize
        return self.B * (self.H_kv * (self.S * row + self.W * dense) + self.H * self.queries * dense)

    def flops(self) -> int:
        """Two products per kept channel and query, and an exponential."""
        kept = self.S * (self.k_keep + self.v_keep) + self.W * (self.D + (self.V or self.D))
        return self.B * self.H * self.queries * (2 * kept + self.S + self.W)

    @property
    def shapes(self) -> str:
        """Sizes in one line."""
        return (
            f"B={self.B} S={self.S} W={self.W} H={self.H} H_kv={self.H_kv} D={self.D} "
            f"keep={self.k_keep},{self.v_keep} bits={self.k_bits},{self.v_bits} page={self.page}"
            + ("" if self.queries == 1 else f" n={self.queries}")
            + (f" V={self.V}" if self.V else "")
        )


def _compress(name: str, **fields: Any) -> list[CompressCase]:
    """The case in every dtype, except float32 with 16 bits."""
    return [
        CompressCase(name=name, dtype=dtype, **fields)
        for dtype in DTYPES
        if not (fields.get("bits") == 16 and dtype == torch.float32)
    ]


#: Three widths with every number of bits at 0, 50 and 70 % sparsity and one kept channel, the other widths with some
#: of these, and the edges of the format.
COMPRESS_CASES = [
    case
    for width in (64, 128, 256)
    for bits in (16, 8, 4)
    for keep in (1, reference.num_kept(width, 0.7), width // 2, width - 1, width)
    for case in _compress(f"d{width}_k{keep}_b{bits}", shape=(2, 2, 5, width), keep=keep, bits=bits)
] + [
    case
    for i, width in enumerate((192, 320, 384, 448, 512))
    for keep, bits in ((reference.num_kept(width, 0.7), (16, 8, 4)[i % 3]), (width, (4, 16)[i % 2]), (width - 1, 8))
    for case in _compress(f"d{width}_k{keep}_b{bits}", shape=(2, 2, 3, width), keep=keep, bits=bits)
] + [
    case
    for name, fields in (
        ("one_row", {"shape": (1, 1, 1, 64), "keep": 7}),
        ("no_tokens", {"shape": (2, 3, 0, 128), "keep": 64}),
        ("no_batch", {"shape": (0, 3, 4, 128), "keep": 64, "bits": 4}),
        ("no_tokens_16", {"shape": (2, 3, 0, 128), "keep": 64, "bits": 16}),
        ("many_rows", {"shape": (3, 5, 67, 128), "keep": 39, "bits": 4}),
        ("ties", {"shape": (2, 2, 33, 128), "keep": 50, "coarse": True}),
        ("ties_4", {"shape": (2, 2, 33, 64), "keep": 13, "bits": 4, "coarse": True}),
        ("ties_192", {"shape": (2, 2, 33, 192), "keep": 77, "coarse": True}),
        ("ties_weighted_320", {"shape": (2, 2, 9, 320), "keep": 300, "coarse": True, "weight": torch.float32}),
        ("zero_448", {"shape": (1, 2, 3, 448), "keep": 447, "magnitude": 0.0}),
        ("many_rows_384", {"shape": (3, 5, 7, 384), "keep": 39, "bits": 4}),
        ("ties_weighted", {"shape": (2, 2, 9, 128), "keep": 50, "coarse": True, "weight": torch.float32}),
        ("weight_half", {"shape": (2, 3, 9, 128), "keep": 39, "weight": torch.float16}),
        ("weight_bfloat16", {"shape": (2, 3, 9, 64), "keep": 20, "bits": 4, "weight": torch.bfloat16}),
        ("weight_double", {"shape": (1, 2, 9, 256), "keep": 77, "bits": 16, "weight": torch.float64}),
        ("tiny", {"shape": (1, 2, 9, 128), "keep": 64, "magnitude": 2.0**-22}),
        ("tiny_4", {"shape": (1, 2, 9, 128), "keep": 64, "bits": 4, "magnitude": 2.0**-22}),
        ("large", {"shape": (1, 2, 9, 128), "keep": 64, "magnitude": 1000.0}),
        ("zero", {"shape": (1, 2, 3, 128), "keep": 64, "magnitude": 0.0}),
    )
    for case in _compress(name, **fields)
]  # fmt: skip

LAYOUT_CASES = [
    case
    for layout in LAYOUTS
    for shape, keep, bits in (((2, 3, 7, 64), 20, 4), ((2, 2, 5, 128), 64, 8), ((1, 2, 3, 128), 33, 16))
    for case in _compress(f"{layout}_b{bits}", shape=shape, keep=keep, bits=bits, layout=layout)
]

_DECODE_FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "d64": {"D": 64, "k_keep": 20, "v_keep": 32},
    "d256": {"D": 256, "k_keep": 77, "v_keep": 128},
    "d192": {"D": 192, "k_keep": 58, "v_keep": 97},
    "d192_4": {"D": 192, "k_keep": 192, "v_keep": 191, "k_bits": 4, "v_bits": 4},
    "d192_v128": {"D": 192, "V": 128, "k_keep": 96, "v_keep": 128, "k_bits": 8, "v_bits": 16, "queries": 2},
    "d64_v512": {"D": 64, "V": 512, "k_keep": 20, "v_keep": 300, "v_bits": 4},
    "d512_v64": {"D": 512, "V": 64, "k_keep": 512, "v_keep": 1, "k_bits": 16, "win_len": (9, 4)},
    "d512": {"D": 512, "k_keep": 200, "v_keep": 512, "v_bits": 16, "W": 3, "queries": 3},
    "d320": {"D": 320, "k_keep": 100, "v_keep": 160, "k_bits": 4},
    "d384_paged": {"D": 384, "k_keep": 301, "v_keep": 384, "page": 16, "H": 6},
    "d448_v320": {"D": 448, "V": 320, "k_keep": 448, "v_keep": 319, "k_bits": 16, "v_bits": 4},
    "d512_hadamard": {"D": 512, "V": 192, "k_keep": 512, "v_keep": 60, "hadamard_group": 2},
    "bits_4": {"k_bits": 4, "v_bits": 4, "v_keep": 39},
    "bits_4_odd_keep": {"k_bits": 4, "v_bits": 4, "k_keep": 37, "v_keep": 1},
    "bits_16": {"k_bits": 16, "v_bits": 16},
    "bits_4_16": {"k_bits": 4, "v_bits": 16},
    "bits_16_8": {"k_bits": 16, "v_bits": 8},
    "dense_16": {"k_bits": 16, "v_bits": 16, "k_keep": 128, "v_keep": 128},
    "one_head": {"H": 1, "H_kv": 1},
    "no_groups": {"H": 4, "H_kv": 4},
    "group_of_8": {"H": 16, "H_kv": 2, "S": 130},
    "group_of_3": {"H": 6, "H_kv": 2},
    "group_of_32": {"H": 32, "H_kv": 1, "B": 1},
    "one_token": {"S": 1, "W": 1},
    "no_window": {"W": 0},
    "empty_window": {"win_len": (0, 0)},
    "no_compressed": {"S": 0},
    "empty_compressed": {"comp_len": (0, 0)},
    "both_empty": {"comp_len": (0, 70), "win_len": (0, 0)},
    "nothing_at_all": {"S": 0, "W": 0},
    "no_batch": {"B": 0, "comp_len": (), "win_len": ()},
    "ragged": {"B": 4, "comp_len": (0, 1, 64, 70), "win_len": (9, 0, 1, 5)},
    "four_d": {"four_d": True},
    "queries": {"queries": 3},
    "queries_ragged": {"queries": 5, "B": 4, "comp_len": (0, 1, 64, 70), "win_len": (9, 5, 4, 0)},
    "queries_of_the_window": {"queries": 9, "k_bits": 4, "v_bits": 4, "v_keep": 39},
    "queries_without_a_window": {"queries": 2, "W": 0},
    "queries_alone": {"queries": 4, "S": 0, "B": 1},
    "no_queries": {"queries": 0},
    "queries_wide_window": {"queries": 40, "W": 300, "win_len": (300, 280), "S": 130, "B": 2, "H": 2, "H_kv": 1},
    "queries_splits": {"queries": 3, "S": 128, "split_size": 16, "W": 20, "comp_len": (128, 40), "win_len": (20, 7)},
    "queries_hadamard_2": {"queries": 3, "hadamard_group": 2, "H": 8, "H_kv": 4, "k_bits": 16, "v_bits": 16},
    "queries_paged": {"queries": 6, "page": 24, "S": 100, "B": 3, "comp_len": (0, 33, 100), "win_len": (1, 9, 0)},
    "scale": {"scale": 0.25},
    "scale_zero": {"scale": 0.0},
    "long": {"S": 700, "B": 1, "k_bits": 4},
    "nine_splits": {"S": 2100, "B": 1},
    "eight_long_splits": {"S": 2000, "B": 1, "D": 64, "k_keep": 20, "v_keep": 32, "k_bits": 4, "W": 40},
    "long_split": {"S": 1700, "B": 1, "split_size": 2048, "k_keep": 39, "v_keep": 39},
    "long_split_4": {"S": 1700, "B": 1, "split_size": 2048, "k_bits": 4, "v_bits": 4, "v_keep": 39},
    "long_split_16": {"S": 1700, "B": 1, "split_size": 2048, "k_bits": 16, "v_bits": 16, "k_keep": 64},
    "split_16": {"S": 130, "split_size": 16},
    "split_64": {"S": 200, "split_size": 64, "comp_len": (200, 3)},
    "split_beyond": {"split_size": 4096},
    "eight_splits": {"S": 128, "split_size": 16, "W": 20, "comp_len": (128, 40), "win_len": (20, 7)},
    "window_of_few_splits": {"S": 200, "split_size": 16, "W": 3},
    "wide_window": {"W": 300, "win_len": (300, 280), "k_bits": 4},
    "hadamard_1": {"hadamard_group": 1},
    "hadamard_1_dense_4": {"hadamard_group": 1, "k_keep": 128, "k_bits": 4},
    "hadamard_2": {"hadamard_group": 2, "H": 8, "H_kv": 4},
    "hadamard_4": {"hadamard_group": 4, "H": 8, "H_kv": 4, "D": 64, "k_keep": 64, "v_keep": 20},
    "hadamard_2_ragged": {"hadamard_group": 2, "comp_len": (3, 70), "win_len": (0, 9)},
    "paged": {"page": 16},
    "paged_ragged": {"page": 32, "B": 3, "comp_len": (0, 33, 70), "win_len": (1, 9, 0)},
    "paged_64_split": {"page": 64, "S": 256, "split_size": 64, "k_bits": 4, "v_bits": 4},
    "paged_odd": {"page": 24, "S": 100, "k_bits": 16, "v_bits": 4},
    "paged_one_token": {"page": 1, "S": 5, "comp_len": (5, 2)},
    "paged_hadamard": {"page": 16, "hadamard_group": 2, "k_bits": 4, "comp_len": (70, 17)},
}  # fmt: skip

DECODE_CASES = [
    DecodeCase(name=name, dtype=dtype, **fields)
    for name, fields in _DECODE_FIELDS.items()
    for dtype in DTYPES
]

_BAR = DecodeCase(
    name="bar", dtype=torch.bfloat16, B=8, H=32, H_kv=8, S=32768 - 32, W=32, k_keep=39, v_keep=39
)

#: Sizes of the results table by device type; 70 % sparsity at 4 and 8 bits, 50 % at 16.
BENCHMARK_DECODE_CASES: dict[str, list[DecodeCase]] = {
    device: [
        replace(
            _BAR, name=f"{name}_b{batch}_{tokens // 1024}k", B=batch, S=tokens - 32,
            k_keep=keep, v_keep=keep, k_bits=bits, v_bits=bits, dtype=dtype,
        )
        for name, keep, bits in (("s70_4bit", 39, 4), ("s70_8bit", 39, 8), ("s50_16bit", 64, 16))
        for batch, tokens in sizes
    ]
    for device, dtype, sizes in (
        ("cuda", torch.bfloat16, [(b, t) for b in (8, 1, 4, 64) for t in (32768, 4096, 131072)]),
        ("cpu", torch.bfloat16, [(1, 4096)]),
    )
}  # fmt: skip

BENCHMARK_COMPRESS_CASES: dict[str, list[CompressCase]] = {
    device: [
        CompressCase(name=name, dtype=torch.bfloat16, shape=shape, keep=keep, bits=bits)
        for name, keep, bits in (("s70_4bit", 39, 4), ("s70_8bit", 39, 8), ("s50_16bit", 64, 16))
    ]
    for device, shape in (("cuda", (8, 8, 32768, 128)), ("cpu", (1, 8, 4096, 128)))
}
