"""The K/V cache of one attention layer: compressed rows and a dense window of the latest tokens (§4.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from htree_ops.ops.compressed_kv_checks import check_query, integers
from htree_ops.ops.compressed_kv_format import CompressedKV
from htree_ops.ops.compressed_kv_state import check_state
from htree_ops.ops.compressed_kv_tokens import OP, CompressedTokens

__all__ = ["CacheBytes", "CompressedKVCache"]


class CacheBytes(NamedTuple):
    """What a cache holds, in bytes.

    Attributes:
        tokens: of all sequences together.
        compressed: rows of the compressed tokens, without empty room; shared pages count once per sequence.
        window: dense tokens of the windows, without empty room.
        dense: the same tokens in a dense cache.
        allocated: everything the cache has taken, empty room included.
    """

    tokens: int
    compressed: int
    window: int
    dense: int
    allocated: int

    @property
    def per_token(self) -> float:
        """Bytes in use per token of one sequence; 0 for an empty cache."""
        return (self.compressed + self.window) / self.tokens if self.tokens else 0.0

    @property
    def of_dense(self) -> float:
        """Bytes in use as a part of those of a dense cache; 1 for an empty cache."""
        return (self.compressed + self.window) / self.dense if self.dense else 1.0


class CompressedKVCache(CompressedTokens):
    """Keys and values of one attention layer, the older ones pruned and quantised.

    The last tokens stay dense in a window. When it holds window + chunk tokens, its oldest ``chunk`` are compressed,
    *after* the attention of that step: the next :meth:`append` does it, or :meth:`settle`. Once settled, L tokens have
    ``chunk * max(0, (L - window) // chunk)`` compressed ones, however they came. Rows are compressed one by one, so
    the bytes do not depend on it either (with ``key_weight`` None). Keys are given rotated.

    In a loop: ``cache.prefill(k, v)`` with the prompt, then per token ``cache.append(k, v); out = cache.attend(q)``.
    A cache made inside ``torch.inference_mode()`` can only be filled there, as torch has it for its tensors.
    For a CUDA graph, capture :meth:`write_token` and :meth:`attend`, and call :meth:`advance` after each replay.
    Source: docs/semantics/compressed_kv.md §4.5, §4.6, design document [003].

    Args:
        batch: B, sequences; num_kv_heads: H_kv.
        head_dim: D, 64, 128 or 256.
        capacity: most tokens of a sequence.
        keep, bits: of the rows, 1 ... D and 16, 8 or 4; one number, or (keys, values).
        window: R, tokens that always stay dense. chunk: C, tokens that are compressed at a time.
        hadamard_group: 0 stores keys as they are; 1 the transform of each; G > 1 of groups of G adjacent heads.
        page_size: tokens of a page, a divisor of chunk; None stores rows without pages.
        num_pages: of the pool; by default enough for every sequence to be full.
        split_size: of :func:`htree_ops.kv_decode_attention`.
        dtype: of keys, values and queries: float32, float16 or bfloat16. 16 bits need one of the latter two.
        device: where the cache lies.

    Attributes:
        key_weight: [B, H_kv, D] >= 0 or None: weight of the channels for keys that are compressed from now on;
            checked when it is set.
        comp_len, win_len: int32 [B] on the device, compressed and dense tokens.

    Raises:
        ShapeMismatchError: another head_dim.
        UnsupportedDtypeError: another dtype, or float32 with 16 bits.
        TypeError, ValueError: a number of the wrong kind or out of range.
    """

    def attend(self, q: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """:func:`htree_ops.kv_decode_attention` of q over everything that the cache holds.

        Args:
            q: [B, H, D] or [B, H, 1, D] in the dtype of the cache, rotated, not transformed.
            scale: factor of the scores; None is D^-1/2.

        Returns:
            out, of the shape and dtype of q, and lse float32 [B, H] or [B, H, 1]. No gradient: where q requires
            one, a backward through them raises RuntimeError.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a q that does not fit.
            TypeError, ValueError: scale is no finite number.
        """
        place = (self.batch, self.num_kv_heads, self.formats[0].head_dim)
        check_query(f"{OP}.attend", q, scale, place, self.dtype, self.device)
        keys, values = self.formats
        k, v = self.storage.parts
        return torch.ops.htree.kv_decode_attention(
            q, *k, *v, self.k_win, self.v_win, self.comp_len, self.win_len, scale, self.storage.block_table,
            k_keep=keys.keep, v_keep=values.keep, k_bits=keys.bits, v_bits=values.bits,
            hadamard_group=self.hadamard_group, split_size=self.split_size,
        )  # fmt: skip

    @torch.no_grad()
    def to_dense(self) -> tuple[Tensor, Tensor]:
        """Keys [B, H_kv, L, D] and values [B, H_kv, L, D] as attention sees them, L the longest sequence.

        In the dtype of the cache; keys are transformed back (one more rounding), and rows past a sequence are 0.
        """
        longest = max(self.lengths, default=0)
        dense: list[Tensor] = []
        for row_format, window in zip(self.formats, (self.k_win, self.v_win), strict=True):
            shape = (self.batch, self.num_kv_heads, longest, row_format.head_dim)
            dense.append(torch.zeros(shape, dtype=self.dtype, device=window.device))
        for i, (compressed, length) in enumerate(zip(self._compressed, self.lengths, strict=True)):
            rows = self.storage.read(i, compressed)
            for target, part, f, window in zip(
                dense, rows, self.formats, (self.k_win, self.v_win), strict=True
            ):
                target[i, :, :compressed] = torch.ops.htree.kv_decompress(
                    *(x[None] for x in part), f.head_dim, f.keep, f.bits, self.dtype
                )[0]
                target[i, :, compressed:length] = window[i, :, : length - compressed]
        keys, values = dense
        return self._stored(keys), values  # the transform is its own inverse

    def num_bytes(self) -> CacheBytes:
        """The byte report; no device is asked."""
        row = sum(f.num_bytes() for f in self.formats)
        dense_row = sum(f.head_dim for f in self.formats) * self.dtype.itemsize
        tensors = [x for part in self.storage.parts for x in part]
        tensors += [self.k_win, self.v_win, self.comp_len, self.win_len]
        tensors += [] if self.storage.block_table is None else [self.storage.block_table]
        return CacheBytes(
            tokens=sum(self.lengths),
            compressed=sum(self._compressed) * self.num_kv_heads * row,
            window=sum(self._dense) * self.num_kv_heads * dense_row,
            dense=sum(self.lengths) * self.num_kv_heads * dense_row,
            allocated=sum(x.numel() * x.element_size() for x in tensors),
        )

    # ---- states and beams

    def config(self) -> dict[str, Any]:
        """What decides the bytes of a token, as :meth:`load_state_dict` compares it."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.formats[0].head_dim,
            "keep": tuple(f.keep for f in self.formats),
            "bits": tuple(f.bits for f in self.formats),
            "window": self.window,
            "chunk": self.chunk,
            "hadamard_group": self.hadamard_group,
            "dtype": str(self.dtype),
        }

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The tokens and what they need to be understood; the same with and without pages.

        Keys: config; compressed and dense, lists of B lengths; k_bitmap ... v_scales [B, H_kv, S, ...] with S the
        longest compressed part, and k_win, v_win [B, H_kv, W, ...], zeros behind each sequence; key_weight or None.
        """
        state: dict[str, Any] = {
            "config": self.config(),
            "compressed": list(self._compressed),
            "dense": list(self._dense),
            "key_weight": None if self.key_weight is None else self.key_weight.clone(),
        }
        most = max(self._compressed, default=0)
        for f, prefix in zip(self.formats, "kv", strict=True):
            rows = f.allocate(self.batch, self.num_kv_heads, most, self.device)
            state |= {f"{prefix}_{name}": x for name, x in rows._asdict().items()}
        for name, window in (("k_win", self.k_win), ("v_win", self.v_win)):
            state[name] = torch.zeros_like(window[:, :, : max(self._dense, default=0)])
            for i, length in enumerate(self._dense):
                state[name][i, :, :length] = window[i, :, :length]
        for i, length in enumerate(self._compressed):
            for part, prefix in zip(self.storage.read(i, length), "kv", strict=True):
                for name, x in part._asdict().items():
                    state[f"{prefix}_{name}"][i, :, : x.shape[1]] = x
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces what the cache holds by :meth:`state_dict` of a cache with the same :meth:`config` and batch.

        Everything is copied. The bytes of the rows are taken as they are.

        Raises:
            TypeError: the state is no dict, or key_weight no floating tensor.
            ValueError: an entry is missing or does not fit: another configuration or batch, more tokens than the
                capacity, lengths that no cache has, a tensor of another shape or dtype. The cache is left as it was.
            RuntimeError: pages are lacking; the cache is empty then.
        """
        op = f"{OP}.load_state_dict"
        check_state(op, state, self.config(), self.formats, self.batch, self.capacity, self.dtype)
        weight = state["key_weight"]
        self.key_weight = weight.to(self.device, copy=True) if isinstance(weight, Tensor) else weight
        compressed, dense = list(state["compressed"]), list(state["dense"])
        self.reset()
        self._check_room("load_state_dict", [], compressed)
        parts = [
            CompressedKV(*(state[f"{prefix}_{name}"].to(self.device) for name in CompressedKV._fields))
            for prefix in "kv"
        ]
        for i, length in enumerate(compressed):
            rows = [CompressedKV(*(x[i : i + 1, :, :length] for x in part)) for part in parts]
            self.storage.write([i], [0], rows)
        for target, name in ((self.k_win, "k_win"), (self.v_win, "v_win")):
            most = max(dense, default=0)
            target[:, :, :most] = state[name][:, :, :most].to(self.device)
        self._count(compressed, dense)

    def _indices(self, name: str, index: Tensor | Sequence[int]) -> list[int]:
        numbers = integers(f"{OP}.{name}", "index", index)
        if not all(0 <= i < self.batch for i in numbers):
            raise IndexError(f"{OP}.{name}: index must lie in [0, {self.batch}), got {numbers}")
        return numbers

    @torch.no_grad()
    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Beam search: sequence i becomes what sequence index[i] was. With pages, compressed tokens are shared.

        The lengths are known on the host, so an index on a device is waited for.

        Raises:
            TypeError: no ints. ValueError: index has not B entries. IndexError: an entry outside [0, B).
        """
        numbers = self._indices("reorder", index)
        if len(numbers) != self.batch:
            raise ValueError(f"{OP}.reorder: index must have {self.batch} entries, got {len(numbers)}")
        self.storage.reorder(numbers, max(self._compressed, default=0))
        places = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        for window in (self.k_win, self.v_win):
            window.copy_(window.index_select(0, places))
        if self.key_weight is not None:
            self.key_weight = self.key_weight.index_select(0, places)
        self._count([self._compressed[i] for i in numbers], [self._dense[i] for i in numbers])

    @torch.no_grad()
    def select(self, index: Tensor | Sequence[int]) -> CompressedKVCache:
        """A new cache whose sequence i is a copy of sequence index[i]; any number of them, repeats allowed."""
        numbers = self._indices("select", index)
        config = self.config() | {"dtype": self.dtype}
        chosen = CompressedKVCache(
            len(numbers), **config, capacity=self.capacity, page_size=self.page_size, split_size=self.split_size,
            device=self.device,
        )  # fmt: skip
        state = self.state_dict()
        for name, value in state.items():
            if isinstance(value, list):
                state[name] = [value[i] for i in numbers]
            elif isinstance(value, Tensor):
                state[name] = value[torch.tensor(numbers, dtype=torch.int64, device=self.device)]
        chosen.load_state_dict(state)
        return chosen

    def reset(self) -> None:
        """Forgets every token; the memory stays, and pages are free again."""
        self.storage.clear()
        self._count([0] * self.batch, [0] * self.batch)
