"""The tokens of a tree cache in 8 or 4 bits, beside its 16-bit nodes (docs/semantics/tree_cache.md §7.5)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.arguments import FLOATING, check_option_dtype
from htree_ops.ops.compressed_kv.format import WIDTHS, row_bytes
from htree_ops.ops.compressed_kv.functions import kv_decompress

#: What ``leaf_bits`` may be besides None.
LEAF_BITS = (8, 4)


def check_bits(op: str, bits: int) -> None:
    """Raises ValueError for bits that tokens cannot be packed in."""
    if type(bits) is not int or bits not in LEAF_BITS:
        raise ValueError(f"{op}: leaf_bits must be None, 8 or 4, got {bits!r}")


def check_leaf_bits(op: str, bits: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Raises ValueError, ShapeMismatchError or UnsupportedDtypeError unless the tokens of a cache can be packed."""
    check_bits(op, bits)
    for name, width in (("head_dim", head_dim), ("value_dim", value_dim)):
        if width not in WIDTHS:
            refuse(
                ShapeMismatchError,
                f"{op}: {name} must be a multiple of 64 up to 512 with leaf_bits, got {width}",
                expected="a multiple of 64 up to 512",
                actual=width,
                tensor_name=name,
            )
    check_option_dtype(op, dtype, FLOATING)


class PackedLeaves:
    """Codes and scales of all tokens in pages, and the last ``page_size`` tokens of each sequence as they came.

    A token's row is that of ``kv_compress`` with all channels kept, without its bitmap. The tail serves the nodes that
    are not finished yet, which are means of tokens as they came.

    Attributes:
        k_codes, v_codes: uint8 [num_pages, H_kv, P, row bytes]. k_scales, v_scales: float16 [num_pages, H_kv, P].
        k_tail, v_tail: [B, H_kv, P, K] and [B, H_kv, P, V]; token t is row t mod P.
        tail_begin: int32 [B]: the first token whose row the tail still has.
    """

    PAGED = ("k_codes", "k_scales", "v_codes", "v_scales")
    OF_SEQUENCES = ("k_tail", "v_tail", "tail_begin")

    def __init__(
        self,
        bits: int,
        batch: int,
        pages: tuple[int, int, int],
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            pages: num_pages, H_kv and P. widths: K and V.
        """
        self.bits = bits
        tail = (batch, *pages[1:])
        self.k_codes, self.v_codes = (
            torch.empty(*pages, row_bytes(width, bits), dtype=torch.uint8, device=device) for width in widths
        )
        self.k_scales, self.v_scales = (
            torch.empty(pages, dtype=torch.float16, device=device) for _ in range(2)
        )
        self.k_tail, self.v_tail = (torch.zeros(*tail, width, dtype=dtype, device=device) for width in widths)
        self.tail_begin = torch.zeros(batch, dtype=torch.int32, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name, in the order of the ``leaves`` of ``_tree_cache_step_``."""
        return self.paged() | self.of_sequences()

    def paged(self) -> dict[str, Tensor]:
        """Those in pages by name, as ``tree_cache_attention`` takes them."""
        return {name: getattr(self, name) for name in self.PAGED}

    def of_sequences(self) -> dict[str, Tensor]:
        """Those with a row for each sequence by name."""
        return {name: getattr(self, name) for name in self.OF_SEQUENCES}

    def tails(self, lengths: Tensor) -> dict[str, Tensor]:
        """What sequences of these lengths have beside pages, by name, as copies; rows that hold nothing are 0."""
        row = torch.arange(self.k_tail.shape[2], dtype=torch.int32, device=lengths.device)
        begin, stop = self.tail_begin[:, None], lengths[:, None]
        empty = (row - begin) % len(row) >= stop - begin  # [B, P]
        tails = {
            name: getattr(self, name).masked_fill(empty[:, None, :, None], 0) for name in ("k_tail", "v_tail")
        }
        return tails | {"tail_begin": self.tail_begin.clone()}

    def tokens(self, page: Tensor, row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, H_kv, K] and values [N, H_kv, V] of the tokens at ``row`` of ``page``, as attention reads them."""

        def expanded(codes: Tensor, scales: Tensor, width: int) -> Tensor:
            rows = codes[page, :, row].transpose(0, 1)[None].contiguous()
            bitmap = rows.new_full((*rows.shape[:3], width // 64), -1, dtype=torch.int64)
            factors = scales[page, :, row].transpose(0, 1)[None].contiguous()
            return kv_decompress(bitmap, rows, factors, width, width, self.bits, dtype)[0].transpose(0, 1)

        return (
            expanded(self.k_codes, self.k_scales, self.k_tail.shape[3]),
            expanded(self.v_codes, self.v_scales, self.v_tail.shape[3]),
        )

    def tail(self, sequence: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys [N, H_kv, K] and values of the first ``length`` tokens as they came, all of which the tail has."""
        return self.k_tail[sequence, :, :length].transpose(0, 1), self.v_tail[sequence, :, :length].transpose(
            0, 1
        )

    def check_state(self, name: str, state: Mapping[str, Tensor], *, builds: bool) -> None:
        """Raises ValueError for a state whose tails do not fit its lengths, or lack tokens of which it builds nodes."""
        begins, lengths = state["tail_begin"].tolist(), state["lengths"].tolist()
        if any(
            not max(0, length - self.k_tail.shape[2]) <= begin <= length
            for begin, length in zip(begins, lengths, strict=True)
        ):
            raise ValueError(f"{name}: tail_begin and lengths do not fit: {begins} and {lengths}")
        if builds and any(begins):
            raise ValueError(
                f"{name}: with leaf_bits the state must come from a cache whose capacity is above max_top_nodes, as "
                "that of this one is: it has no nodes, and tokens in fewer bits give no others; got tokens from "
                f"{begins} on as they came"
            )
