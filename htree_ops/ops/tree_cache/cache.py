"""The K/V cache of one tree attention layer (docs/semantics/tree_cache.md §7.4).

One class, with all that a cache does with tokens, sequences, pages and states; a quarter of the lines are its
documentation. What it is made of stands in the files beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from htree_ops.errors import DeviceError, in_words_of, refuse
from htree_ops.ops.arguments import (
    FLOATING,
    FLOATING_AND_DOUBLE,
    check_data,
    check_devices,
    check_dtype,
    check_int,
    check_kind,
    check_option_dtype,
    check_shape,
    check_tensor,
    check_tensors,
    option_device,
)
from htree_ops.ops.paging import Change, PagedCache, Pages, host_integers, is_recorded, on_device, stream_of
from htree_ops.ops.tree_attention.attention import Index, pair_words
from htree_ops.ops.tree_attention.options import TreeKeywords, TreeOptions, check_frequencies
from htree_ops.ops.tree_attention.stages import rope_cache
from htree_ops.ops.tree_cache.functions import cache_options, rope_positions
from htree_ops.ops.tree_cache.index import IndexPages, index_sizes
from htree_ops.ops.tree_cache.leaves import check_leaf_bits
from htree_ops.ops.tree_cache.lengths import WRONG_LENGTH, HostLengths, counts_of, in_words
from htree_ops.ops.tree_cache.pools import Pools, Sizes
from htree_ops.ops.tree_cache.prompts import PROMPT_ROWS, Prompts
from htree_ops.ops.tree_cache.ring import Ring
from htree_ops.ops.tree_cache.state import OF_NO_CACHE, check_state, options_as_tensors

OP = "TreeKVCache"
#: The default page is the smallest one of at least so many tokens.
LEAST_PAGE = 256


class TreeCacheBytes(NamedTuple):
    """The memory of a cache.

    Attributes:
        tokens: of all sequences together; tokens of a shared page count for each sequence.
        used: bytes of the pages that hold something; a shared page counts once.
        allocated: bytes of everything the cache has taken, empty pages included.
    """

    tokens: int
    used: int
    allocated: int


#: Of its ops for what a caller does not pass.
_WORDS = {"k_pool": "the cache", "v_pool": "the cache's values", "index_pool": "the cache's index keys"}


def _num_rows(name: str, argument: str, rows: Tensor) -> int:
    """n of rows [B, n, heads, channels]; the op checks the rest."""
    if type(rows) is not Tensor or rows.dim() != 4:
        check_tensors(name, **{argument: (rows, "B n heads channels")})
    try:
        return rows.shape[1]
    except RuntimeError:  # a nested tensor has no shape
        check_tensor(name, argument, rows)
        raise


class TreeKVCache(PagedCache):
    """Keys, values and finished tree nodes of one tree attention layer, in pages, for ``batch`` sequences.

    ``cache.append(k, v); out = cache.attend(q)`` gives the rows of :func:`htree_ops.tree_attention` over all tokens so
    far. A step's cost follows from what it reads, not from the sequence's length. Only finished nodes are stored, so
    tokens can be taken back by a new length. Sequences share full pages and own the page that is still open:
    :meth:`fork` and :meth:`reorder_` copy that one alone. On CUDA, ``append``, ``attend``, ``decode`` and ``truncate``
    can be captured in a graph, whose cost follows the lengths at replay, and do not wait for the device. One thing
    does: a prompt, 256 or more rows of a sequence in one ``attend``, reads the lengths where the host does not know
    them (after ``truncate``, ``reorder_`` or a captured step), because the kernels of ``tree_attention``
    compute it. What only the device can see is left undone and reported by :meth:`check`. On the CPU the call raises
    before it changes anything. No gradient flows through a cache.
    Source: docs/semantics/tree_cache.md §7.

    Args:
        batch: B, sequences, 0 or more. num_kv_heads: H_kv. head_dim: K, even. value_dim: V; None is K.
        capacity: most tokens of a sequence.
        options, keywords: as in :func:`htree_ops.tree_attention`; importance="lse", which needs unfinished nodes, and
            scope="q_head" are refused.
        page_size: P, tokens of a page, a multiple of compression_rate; None is the smallest one of at least 256.
        num_pages: pages of the pool; None is enough for the capacity of all sequences.
        leaf_bits: 8 or 4 to keep tokens in so many bits a channel, with a scale for each row; nodes, and with them the
            selection, stay those of the tokens as they came. None keeps tokens in ``dtype``. head_dim and value_dim
            are then multiples of 64 up to 512. docs/quality.md says what it costs, docs/performance.md how fast it is.
        prompt_bytes: most bytes of the copies that a prompt in chunks leaves on a GPU for its next chunk, until a step
            of few rows; they take as much as the pages of the prompt, at most half as much again. None is no bound, 0
            keeps none, so that every chunk copies the whole sequence again (docs/semantics/tree_cache.md §7.6).
        index_dim: d of an index, a multiple of 16 up to 128: nodes are chosen by it in place of scores, as with
            ``index`` of :func:`htree_ops.tree_attention`, and the pages keep the index keys of all tokens. 0 is no
            index. index_heads: H_i, num_kv_heads or 1; None is num_kv_heads. index_dtype: of the index keys, float32,
            float16, bfloat16 or float8_e4m3fn; None is ``dtype`` where that has 16 bits, else bfloat16. Index keys and
            index queries of another dtype are rounded to it. float8_e4m3fn keeps a key in a byte a channel, with a
            power of two as its scale, and rounds index queries to bfloat16. docs/performance.md says how fast it is; no
            row measures what such keys cost a model.
        dtype: float32, float16 or bfloat16, float64 on the CPU. device: where the cache lies.

    Attributes:
        lengths: int32 [B] on the device, tokens of each sequence.
        k_pool, v_pool, block_table: the pages; their addresses never change.

    Raises:
        UnsupportedDtypeError: another dtype. DeviceError: a device that torch does not know.
        TypeError, ValueError: an option of the wrong kind or out of range.

    Example:
        >>> cache = TreeKVCache(2, 2, 64, capacity=4096, top_k=8, max_top_nodes=128, dtype=torch.float32)
        >>> q, k, v = (torch.randn(2, 1000, heads, 64) for heads in (8, 2, 2))
        >>> cache.append(k, v)
        >>> cache.attend(q[:, -1:]).shape, cache.lengths.tolist()
        (torch.Size([2, 1, 8, 64]), [1000, 1000])
    """

    OP = OP

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        value_dim: int | None = None,
        options: TreeOptions | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        leaf_bits: int | None = None,
        prompt_bytes: int | None = None,
        index_dim: int = 0,
        index_heads: int | None = None,
        index_dtype: torch.dtype | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        **keywords: Unpack[TreeKeywords],
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        for name, size, least in (
            ("batch", batch, 0),
            ("num_kv_heads", num_kv_heads, 1),
            ("head_dim", head_dim, 1),
            ("value_dim", value_dim, 1),
            ("capacity", capacity, 1),
        ):
            check_int(OP, name, size, least)
        if head_dim % 2:
            raise ValueError(f"{OP}: head_dim must be even, got {head_dim}")
        self.options = cache_options(OP, options, keywords)
        check_frequencies(OP, self.options, head_dim)
        if self.options.importance == "lse":
            raise ValueError(
                f'{OP}: importance must be "lse_causal" or "exp_joint", got "lse": it weighs nodes that are not '
                "finished, which a cache does not hold"
            )
        compression_rate = self.options.compression_rate
        if page_size is None:
            page_size = -(-LEAST_PAGE // compression_rate) * compression_rate
        check_int(OP, "page_size", page_size, compression_rate)
        if page_size % compression_rate:
            raise ValueError(
                f"{OP}: page_size must be a multiple of compression_rate = {compression_rate}, got {page_size}"
            )
        check_int(OP, "capacity rounded up to whole pages", -(-capacity // page_size) * page_size, 1)
        num_pages = max(1, batch * -(-capacity // page_size)) if num_pages is None else num_pages
        check_int(OP, "num_pages", num_pages, 1)
        place = option_device(OP, device)
        check_option_dtype(OP, dtype, FLOATING_AND_DOUBLE if place.type == "cpu" else FLOATING)
        if leaf_bits is not None:
            check_leaf_bits(OP, leaf_bits, head_dim, value_dim, dtype)
        if prompt_bytes is not None:
            check_int(OP, "prompt_bytes", prompt_bytes, 0, 2**63 - 1)
        self.index_dim = index_dim
        self.index_heads, self.index_dtype = index_sizes(
            OP, self.options, num_kv_heads, index_dim, index_heads, index_dtype, dtype
        )
        if index_dim:
            self.options = self.options.beside_index()
        self.leaf_bits = leaf_bits
        self.batch, self.num_kv_heads = batch, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.capacity, self.page_size, self.num_pages = capacity, page_size, num_pages
        self.dtype, self.device = dtype, place
        with torch.inference_mode(False):  # what is made in it could not be changed outside of it
            self._make_tensors(prompt_bytes)

    def _make_tensors(self, prompt_bytes: int | None) -> None:
        """Pages, their table, lengths and the ring of lists, all of them empty."""
        options, batch, device = self.options, self.batch, self.device

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.pages = Pages(OP, batch, self.capacity, self.page_size, self.num_pages, device)
        self.pools = Pools(
            Sizes(options, self.page_size, packed=self.leaf_bits is not None),
            batch,
            self.num_pages,
            self.pages.max_pages,
            self.num_kv_heads,
            (self.head_dim, self.value_dim),
            self.leaf_bits,
            self.dtype,
            device,
            IndexPages(
                self.num_pages, self.index_heads, self.page_size, self.index_dim, self.index_dtype, device
            )
            if self.index_dim
            else None,
        )
        self.num_layers = self.pools.layers
        self.ring = Ring(batch, self.num_layers, self.num_kv_heads, options, device)
        self.lengths = integers(batch)
        self.host = HostLengths(self.lengths)
        self.prompts = Prompts(
            self.pools, self.pages.block_table, self.ring, options, self.capacity, prompt_bytes
        )
        self._errors = integers(batch)
        self._own_from = integers(batch)  # tokens before this one stand in pages that others have too
        self._state = [self.lengths, self._errors, integers(2, batch), self.ring.list_pos, self.ring.lists]
        self._packed_options = options.packed()
        self._uniform: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None
        # The CPU keeps the table of tree_attention between calls.
        self._rope_table = (
            rope_cache(
                rope_positions(options, self.pages.max_pages * self.page_size),
                self.head_dim,
                options.rope_base,
                device=device,
                inv_freq=options.inv_freq,
            )
            if options.rope_base is not None and device.type != "cpu"
            else None
        )

    @property
    def block_table(self) -> Tensor:
        """int32 [B, max_pages]: page i of a sequence holds its tokens i * page_size and following."""
        return self.pages.block_table

    @property
    def k_pool(self) -> Tensor:
        """Keys in pages, [num_pages, H_kv, rows, K]."""
        return self.pools.keys

    @property
    def v_pool(self) -> Tensor:
        """Values in pages, [num_pages, H_kv, rows, V]."""
        return self.pools.values

    # ---- tokens

    def append(
        self,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        index_key: Tensor | None = None,
    ) -> None:
        """Adds n tokens to every sequence, or the first ``lengths[b]`` of them to sequence b.

        Args:
            k: [B, n, H_kv, K], not rotated; v: [B, n, H_kv, V]; in the dtype of the cache.
            lengths: tokens of each sequence that count, 0 ... n; None is n.
            index_key: [B, n, H_i, d] where the cache has an index, else None.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            OutOfPagesError, ValueError: the pages or the capacity do not suffice, as far as the host knows the
                lengths; nothing has changed. Where only a GPU knows them, such a sequence does not change, the others
                get their tokens, and :meth:`check` reports it.
            ValueError: index_key is missing, or there is no index.
        """
        name = f"{OP}.append"
        n = _num_rows(name, "k", k)
        check_kind(name, "v", v, "Tensor")
        key = self._index_rows(name, "index_key", index_key)
        self._step_of(name, (None, k, v, None, key), n, lengths)

    def attend(
        self,
        q: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        index_query: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the last n tokens of each sequence, or of the last ``lengths[b]`` of sequence b.

        Args:
            q: [B, n, H, K], not rotated, H a multiple of H_kv: row i of a sequence stands at its token
                length - n + i, or length - lengths[b] + i.
            lengths: rows of each sequence that count, 0 ... n; None is n.
            index_query: [B, n, H_i, d] where the cache has an index, else None.
            return_lse: also return the log-sum-exp of each row's scores.

        Returns:
            out [B, n, H, V] in the dtype of the cache, with ``return_lse`` also lse [B, n, H] in float32 (float64 for
            float64). Rows at or behind ``lengths[b]``, and rows that a shorter sequence lacks, have 0 and -inf. With
            selection_stride > 1 a row whose leader was never attended is NaN, and :meth:`check` reports it.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            ValueError: index_query is missing, or there is no index.
        """
        name = f"{OP}.attend"
        n = _num_rows(name, "q", q)
        if type(return_lse) is not bool:
            check_kind(name, "return_lse", return_lse, "bool")
        query = self._index_rows(name, "index_query", index_query)
        if self._is_prompt(n):
            self._check_query(name, q, query)
            of_call = [n] * self.batch
            if lengths is not None:
                counts, on_host = self._counts(name, lengths, n)
                of_call = counts.tolist() if on_host is None else on_host
            return self.prompts.attend(q, query, self.host.read(), of_call, return_lse, self._rows_at)
        found = self._step_of(name, (q, None, None, query, None), n, lengths)
        return found if return_lse else found[0]

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        index: Index | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:meth:`append` of n tokens and :meth:`attend` of their queries, in one call of one op.

        Args:
            q: [B, n, H, K]; k, v, lengths: as in :meth:`append`. lengths are those of q too.
            index: (index_query, index_key), [B, n, H_i, d] each, where the cache has an index, else None.
            return_lse: as in :meth:`attend`.

        Returns:
            As :meth:`attend`.

        Raises:
            As :meth:`append`.
        """
        name = f"{OP}.decode"
        n = _num_rows(name, "q", q)
        if type(return_lse) is not bool:
            check_kind(name, "return_lse", return_lse, "bool")
        query = key = None
        if self._has_index(name, "index", index):
            if not (isinstance(index, (tuple, list)) and len(index) == 2):
                raise TypeError(f"{name}: index must be (index_query, index_key), got {pair_words(index)}")
            query, key = (
                self._index_rows(name, argument, x)
                for argument, x in zip(("index_query", "index_key"), index, strict=True)
            )
        if self._is_prompt(n):
            self._check_query(name, q, query)
            self.append(k, v, lengths, index_key=key)
            return self.attend(q, lengths, index_query=query, return_lse=return_lse)
        for argument, x in (("k", k), ("v", v)):
            if type(x) is not Tensor:
                check_kind(name, argument, x, "Tensor")
        found = self._step_of(name, (q, k, v, query, key), n, lengths)
        return found if return_lse else found[0]

    def _index_rows(self, name: str, argument: str, rows: Tensor | None) -> Tensor | None:
        """A part of an index as the op takes it, None where the cache has no index."""
        if not self._has_index(name, argument, rows):
            return None
        pages = self.pools.index
        assert pages is not None
        assert rows is not None
        return pages.rows(name, argument, rows)

    def _has_index(self, name: str, argument: str, given: object) -> bool:
        """Whether the cache has an index, of which ``given`` is what a call brings.

        Raises:
            ValueError: the one has an index and the other has none.
        """
        has = self.pools.index is not None
        if has == (given is not None):
            return has
        if has:
            sizes = f"[{self.batch}, n, {self.index_heads}, {self.index_dim}]"
            wanted = f"(index_query, index_key), {sizes} each," if argument == "index" else sizes
            raise ValueError(
                f"{name}: {argument} must be {wanted} where the cache has index_dim = {self.index_dim}, got None: a "
                "cache with index_dim=0 chooses by scores"
            )
        raise ValueError(
            f"{name}: {argument} must be None where the cache has index_dim = 0, got {pair_words(given)}: make the "
            "cache with the index_dim of the index"
        )

    def _is_prompt(self, n: int) -> bool:
        """Whether the kernels of ``tree_attention`` take n rows of a call (§7.4)."""
        # A tree of packed tokens would be another one.
        gathers = n >= PROMPT_ROWS and self.leaf_bits is None and self.device.type == "cuda"
        return gathers and not is_recorded(self.device)

    def _check_query(self, name: str, q: Tensor, index_query: Tensor | None) -> None:
        """Checks the queries of a prompt, which no op sees before the tokens are appended."""
        check_tensors(name, cache=(self.lengths, "B"), q=(q, "B n H K"))
        check_dtype(name, (self.dtype,), q=q)
        kv_heads, heads = self.num_kv_heads, q.shape[2]
        heads = heads if heads and heads % kv_heads == 0 else kv_heads
        words = f"[{self.batch}, n, H, {self.head_dim}] with H a positive multiple of H_kv = {kv_heads}"
        check_shape(name, "q", q, (*q.shape[:2], heads, self.head_dim), words)
        if index_query is not None:
            check_devices(name, {"q": q, "index_query": index_query})
            wanted = (*q.shape[:2], self.index_heads, self.index_dim)
            check_shape(name, "index_query", index_query, wanted, str(wanted))

    def step_arguments(
        self, counts: Tensor | None, n: int, recorded: bool | None = None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of ``_tree_cache_step_`` before q, k, v, index_query and index_key, and those behind them.

        They are for rows [B, n, ...].

        Args:
            counts: int32 [B], how many of them count; None is all.
            recorded: whether the call is compiled or captured; None asks.
        """
        pools, sizes = self.pools, (self.capacity, self.page_size)
        every, cu = self._constants(n, is_recorded(self.device) if recorded is None else recorded)
        before = (
            pools.keys,
            pools.values,
            pools.written,
            pools.index_pool,
            self._state,
            self.pages.block_table,
        )
        rows = (every, False, cu) if counts is None else (counts, True, cu)
        return before, (*rows, self._rope_table, *sizes, *self._packed_options)

    def _step_of(
        self,
        name: str,
        rows: tuple[Tensor | None, ...],
        n: int,
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[Tensor, Tensor]:
        """``_tree_cache_step_``: appends k and v where they are given, and attends with q where it is given.

        Args:
            rows: q, k, v, index_query and index_key.
        """
        q, k, *_ = rows
        counts: Tensor | None = None
        on_host: list[int] | None = [n] * self.batch
        if lengths is not None:
            counts, on_host = self._counts(name, lengths, n)
        if q is not None and self.prompts.kept:
            self._end_prompts(on_host)
        recorded = is_recorded(self.device)
        if k is not None and not recorded:  # else who records has reserved them
            self._take_pages(name, on_host, n)
        before, behind = self.step_arguments(counts, n, recorded)
        try:
            found: tuple[Tensor, Tensor] = torch.ops.htree._tree_cache_step_(*before, *rows, *behind)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            given = dict(zip(("q", "k", "v", "index_query", "index_key"), rows, strict=True))
            raise self._refusal(name, given, error) from None
        if k is not None and not recorded:
            self.host.grow(on_host or [n] * self.batch, self.capacity, exact=on_host is not None)
        elif k is not None and torch.compiler.is_compiling():  # of a capture advance() counts the replays
            self.host.lose()
        return found

    def _refusal(self, name: str, arguments: Mapping[str, Any], error: Exception) -> Exception:
        """What the op has refused, in the words of a method."""
        given = {argument: x for argument, x in arguments.items() if x is not None}
        for argument, x in given.items():
            check_tensor(name, argument, x)
        return in_words_of(name, given, error, _WORDS) or error

    @torch.no_grad()
    def _rows_at(
        self, q: Tensor, index_query: Tensor | None, lengths: list[int], counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Rows of q, the last ``counts[b]`` of the first ``lengths[b]`` tokens; a missing leader is reported."""
        (*pools, state, table), behind = self.step_arguments(
            on_device(counts, self.device), q.shape[1], recorded=False
        )
        state = [on_device(lengths, self.device), *state[1:]]
        found: tuple[Tensor, Tensor] = torch.ops.htree._tree_cache_step_(
            *pools, state, table, q, None, None, index_query, None, *behind
        )
        return found

    # ---- sequences

    def host_lengths(self) -> list[int]:
        """The lengths as numbers. Waits for the device where only it knows them."""
        return list(self.host.read())

    @torch.no_grad()
    def truncate(self, lengths: int | Tensor | Sequence[int]) -> None:
        """Takes tokens back: sequence b keeps its first ``lengths[b]`` tokens, or all of them where that is -1.

        With selection_stride s > 1 the new length is a multiple of s, or the lists of the last token's leader are in
        the ring of the last 4. With leaf_bits it is a multiple of compression_rate, or the tokens of the node that it
        opens are still kept as they came: those of the last page_size tokens are (docs/semantics/tree_cache.md §7.5).
        Lengths on a GPU are not read: there, and in a graph, a sequence can be cut back to the end of the pages that it
        shares with others. For a cut inside a stride of shared pages the host waits for the ring. Length 0 gives back
        the pages that :meth:`reserve` has taken, a length below the old one those behind it.

        Raises:
            ValueError: another length or more than the sequence holds, as far as the host knows. What only the device
                sees leaves the sequence as it was, and :meth:`check` reports it.
            OutOfPagesError: no page for the copy of an open one.
        """
        name = f"{OP}.truncate"
        given = self._of_all(name, lengths)
        request, wanted = counts_of(name, given, self.batch, -1, 2**31 - 1, self.device)
        if request is self.lengths:
            request = request.clone()  # the op writes them
        if is_recorded(self.device):
            wanted = None
        left = wanted is None or self._is_left_to_the_device(wanted)
        if wanted is not None and left:
            # A cut into pages that others share takes new pages, which is the host's to do. It can be refused, so it is
            # first: nothing has changed then.
            shared = self._cuts_shared_pages(wanted)
            if any(shared):
                self.truncate([m if cut else -1 for m, cut in zip(wanted, shared, strict=True)])
                self.truncate([-1 if cut else m for m, cut in zip(wanted, shared, strict=True)])
                return
        self._end_prompts(None if wanted is None else [length + 1 for length in wanted])
        change = None
        if wanted is not None and not left:
            held = self.host.read()
            self._check_truncation(name, wanted, held)
            change = self.pages.cut(held, wanted)
            self.pages.check("truncate", change)
        own_from = torch.zeros_like(self._own_from) if change is not None else self._own_from
        torch.ops.htree._tree_cache_truncate_(
            self.pools.written,
            self._state,
            self.pages.block_table,
            request,
            own_from,
            self.page_size,
            *self._packed_options,
        )
        if change is not None and wanted is not None:
            self._move(change, "truncate")
            self.host.set([n if m < 0 else m for n, m in zip(self.host.read(), wanted, strict=True)])
        elif torch.compiler.is_compiling():
            self.host.lose()
        elif not is_recorded(self.device):
            self.host.exact = False

    def _cuts_shared_pages(self, wanted: list[int]) -> list[bool]:
        """For each sequence whether a truncation keeps a part of the pages that it shares with others."""
        return [0 <= m < self.pages.shared(b) * self.page_size for b, m in enumerate(wanted)]

    def _is_left_to_the_device(self, wanted: list[int]) -> bool:
        """Whether only the device knows if a truncation is possible: the host would have to wait for it."""
        if self.device.type != "cuda":
            return False
        if max(wanted, default=0) == 0 and (not any(wanted) or not self.pages.is_whole):
            return False  # nothing is left of all sequences, whatever they hold, or pages go back to the pool
        own = [-1 if cut else m for m, cut in zip(wanted, self._cuts_shared_pages(wanted), strict=True)]
        if not self.host.exact:
            return own == wanted or any(m >= 0 for m in own)
        unit = self.options.compression_rate if self.leaf_bits else self.options.selection_stride
        return any(m > 0 and m != n and m % unit for m, n in zip(own, self.host.read(), strict=True))

    def _check_truncation(self, name: str, wanted: list[int], held: list[int]) -> None:
        """Raises ValueError for a truncation that the op would refuse; ring and tails are read if it turns on them."""
        stride, rate, leaves = self.options.selection_stride, self.options.compression_rate, self.pools.leaves

        def turns_on(unit: int) -> bool:
            inside = any(m not in (-1, n) and m % unit for m, n in zip(wanted, held, strict=True))
            return inside and type(self.lengths) is Tensor and not self.lengths.is_meta

        leaders = self.ring.list_pos.tolist() if turns_on(stride) else None
        begins = leaves.tail_begin.tolist() if leaves is not None and turns_on(rate) else None
        for b, (length, holds) in enumerate(zip(wanted, held, strict=True)):
            if length > holds:
                raise ValueError(
                    f"{name}: a sequence can be truncated to at most what it holds, sequence {b} holds {holds} tokens, "
                    f"got {length}"
                )
            if length in (-1, holds):
                continue
            leader = length - 1 - (length - 1) % stride
            if leaders is not None and length % stride and leader not in leaders[b]:
                raise ValueError(
                    f"{name}: sequence {b} can be truncated to a multiple of selection_stride = {stride}, or where the "
                    f"lists of the last token's leader are in the ring, got {length}"
                )
            if begins is not None and length % rate and length - length % rate < begins[b]:
                raise ValueError(
                    f"{name}: with leaf_bits sequence {b} can be truncated to a multiple of compression_rate = {rate}, "
                    f"or to {begins[b]} and more within a node of which all tokens are still kept as they came, got "
                    f"{length}"
                )

    def _move(self, change: Change, method: str) -> None:
        """Makes a change of pages, with its copies."""
        if not change.rows:
            return
        self.pools.copy_pages(self.pages.make(method, change))
        self._mark_shared_pages()

    def _mark_shared_pages(self) -> None:
        """Tells the device where the pages of each sequence begin that are its own."""
        own_from = [self.pages.shared(b) * self.page_size for b in range(self.batch)]
        self._own_from.copy_(on_device(own_from, self.device))

    @torch.no_grad()
    def _reorder(self, method: str, beams: Tensor | Sequence[int]) -> None:
        name = f"{OP}.{method}"
        if is_recorded(self.device):
            raise NotImplementedError(
                f"{name}: cannot be compiled or captured, because pages are moved by the host: call it between two "
                "runs, which read the block table and the lengths where they are"
            )
        numbers = host_integers(name, "beams", beams, self.batch, 0, self.batch - 1)
        request = on_device(numbers, self.device)
        self._end_prompts([int(beam != b) for b, beam in enumerate(numbers)])
        held = self.host.read()
        self._move(self.pages.reorder(numbers, held), method)
        of_sequences = [self.lengths, self.ring.lists, self.ring.list_pos]
        if self.pools.leaves is not None:
            of_sequences += self.pools.leaves.of_sequences().values()
        for x in of_sequences:
            x.copy_(x.index_select(0, request))
        self.host.set([held[beam] for beam in numbers])

    def reset(self) -> None:
        """Empties every sequence; the memory stays."""
        self.truncate(0)

    def reserve(self, tokens: int) -> None:
        """Takes the pages for the next ``tokens`` tokens of every sequence now, so that they cannot run out later.

        A pool with pages for the capacity of all sequences has nothing to reserve. For another one, call it before a
        graph is captured or replayed: what runs on the device alone takes no page.

        Raises:
            ValueError: the capacity does not suffice. OutOfPagesError: the pages do not suffice.
        """
        name = f"{OP}.reserve"
        check_int(name, "tokens", tokens, 0)
        if is_recorded(self.device):
            if self.pages.is_whole:
                return
            raise NotImplementedError(
                f"{name}: call it before what is compiled or captured: the host takes the pages"
            )
        if self.host.most is None or (not self.host.exact and not self.pages.is_whole):
            self.host.read()
        self._take_pages(name, [tokens] * self.batch, tokens)

    def check(self) -> None:
        """Raises the errors that the device has recorded since the last call, and clears them. Waits for the device.

        Raises:
            ValueError: an error was recorded; the message names the sequences. Or the host has counted other lengths,
                because :meth:`advance` was not called after each replay of a graph; it takes those of the device. Or
                ``lengths`` was written to, and has a number below 0 or beyond the pages of its sequence; it becomes the
                nearest one that is possible.
            DeviceError: the cache is on the device meta, which records none.
        """
        check_data(f"{OP}.check", "cache", self._errors)
        found, lengths = self._errors.tolist(), self.lengths.tolist()
        counted = self.host.read()
        possible = [min(max(n, 0), self.pages.tokens(b)) for b, n in enumerate(lengths)]
        self.host.set(possible)
        if possible != lengths:
            self.lengths.copy_(on_device(possible, self.device))
            raise ValueError(
                f"{OP}.check: lengths on the device must lie between 0 and what the pages of each sequence hold, got "
                f"{lengths}: they are {possible} now"
            )
        if any(found):
            self._errors.zero_()
            raise ValueError(f"{OP}.check: {in_words(found)}")
        if counted != lengths:
            raise ValueError(
                f"{OP}.check: the host has counted {counted} tokens where the device has {lengths}: call advance() "
                "after every replay of a graph"
            )

    # ---- counts

    def advance(self, tokens: int | Sequence[int] | None = 1) -> None:
        """Follows a replay of a graph, in which the device has counted tokens that the host has not.

        Call it after every replay: what the host does with pages, lengths and prompts follows from its count.

        Args:
            tokens: what each sequence got and kept, or one number for all, below 0 where more was taken back; None
                where only the device knows, so that the host reads the lengths when it needs them.

        Raises:
            TypeError: tokens are no ints. ValueError: another number of them; more tokens than the capacity or than
                were there to be taken back, as far as the host knows the lengths. Nothing has changed.
        """
        name = f"{OP}.advance"
        if tokens is not None:
            numbers = tokens if isinstance(tokens, Sequence) else [tokens] * self.batch
            counts = host_integers(name, "tokens", numbers, self.batch, -self.capacity, 2**31 - 1)
            most = self.host.most or [self.capacity] * self.batch
            after = [n + count for n, count in zip(most, counts, strict=True)]
            if any(x < 0 or (self.host.exact and x > self.capacity) for x in after):
                raise ValueError(
                    f"{name}: tokens must leave each sequence between 0 and capacity = {self.capacity}, got {counts} "
                    f"beside {most}"
                )
        self.prompts.drop(None)
        if tokens is None:
            self.host.lose()
        else:
            self.host.grow(counts, self.capacity, exact=True)

    def _take_pages(self, name: str, counts: list[int] | None, n: int) -> None:
        """Takes the pages of an append as far as the host knows what they are; the device looks at its own lengths."""
        pages, host, most = self.pages, self.host, self.host.most
        if host.exact and most is not None and pages.is_whole and max(most, default=0) + n <= self.capacity:
            return  # most calls
        fits = most is not None and all(m + n <= pages.tokens(b) for b, m in enumerate(most))
        if not host.exact and (self.device.type == "cpu" or not (pages.is_whole or fits)):
            host.read()
        if host.most is None:
            return
        new = [n] * self.batch if counts is None else counts
        after = [m + x for m, x in zip(host.most, new, strict=True)]
        if counts is not None and host.exact:
            for b, x in enumerate(after):
                if x > self.capacity:
                    raise ValueError(
                        f"{name}: sequence {b} holds {host.most[b]} tokens; {new[b]} more exceed the capacity of "
                        f"{self.capacity}"
                    )
        if not pages.is_whole:
            pages.make(name.removeprefix(f"{OP}."), pages.growth([min(x, self.capacity) for x in after]))

    def _end_prompts(self, counts: list[int] | None) -> None:
        """Frees what chunks of prompts left, of the sequences with ``counts[b]`` > 0; None is all of them."""
        known = counts is not None and not is_recorded(self.device)
        self.prompts.drop([b for b, count in enumerate(counts) if count > 0] if known and counts else None)

    def _counts(self, name: str, lengths: Tensor | Sequence[int], n: int) -> tuple[Tensor, list[int] | None]:
        """How many of the n rows of each sequence count, [B], and the same on the host if it knows."""
        counts, given = counts_of(name, lengths, self.batch, 0, n, self.device)
        if given is not None:
            return counts, given
        wrong = (counts < 0) | (counts > n)
        self._errors.bitwise_or_(wrong.int() * WRONG_LENGTH)
        return counts.masked_fill(wrong, 0), None

    # ---- what it holds

    def layer(self, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of keys [N, H_kv, K] and values [N, H_kv, V] of a layer's finished nodes; layer 0 is the tokens.

        With leaf_bits these are the tokens as attention reads them.
        """
        check_int(f"{OP}.layer", "sequence", sequence, 0, self.batch - 1)
        check_int(f"{OP}.layer", "layer", layer, 0, self.num_layers - 1)
        check_data(f"{OP}.layer", "cache", self.lengths)
        return self.pools.layer(self.block_table[sequence], layer, self.host.read()[sequence])

    def _used_rows(self) -> list[list[int]]:
        """The pages of each sequence that hold something."""
        pages, lengths = self.pages, self.host.read()
        return [row[: pages.pages_for(n)] for row, n in zip(pages.rows, lengths, strict=True)]

    def num_bytes(self) -> TreeCacheBytes:
        """The memory that is in use and allocated. Waits for the device where only it knows the lengths.

        On the device meta and of fake tensors nothing can be counted but what is allocated; the rest is 0.
        """
        counts = type(self.lengths) is Tensor and not self.lengths.is_meta
        used = len({page for row in self._used_rows() for page in row}) if counts else 0
        tensors = [*self.pools.tensors(), *self._state, self.block_table, self._own_from]
        tensors += [] if self._rope_table is None else [self._rope_table]
        return TreeCacheBytes(
            tokens=sum(self.host.read()) if counts else 0,
            used=used * self.pools.page_bytes(),
            allocated=sum(x.nbytes for x in tensors) + self.prompts.num_bytes(),
        )

    def to(self, device: torch.device | str) -> TreeKVCache:
        """This cache where it is there already, else a copy on that device.

        The dtype stays: nodes are means of tokens as they came, which another dtype would round anew.

        Raises:
            DeviceError: a device that torch does not know, or one of both is meta. TypeError: something else.
        """
        place = option_device(f"{OP}.to", device)
        if place == self.device:
            return self
        check_data(f"{OP}.to", "cache", self.lengths)
        if place.type == "meta":
            refuse(
                DeviceError,
                f"{OP}.to: device must be one that holds numbers, got meta",
                expected_device=self.device,
                actual_device=place,
            )
        other = TreeKVCache(
            **self._sizes(),
            options=self.options,
            prompt_bytes=self.prompts.most_bytes,
            dtype=self.dtype,
            device=place,
        )
        other.load_state_dict(self.state_dict())
        return other

    # ---- states

    def state_dict(self) -> dict[str, Tensor]:
        """Everything the cache holds, as copies: pages that are in use, with zeros in rows that hold nothing."""
        check_data(f"{OP}.state_dict", "cache", self.lengths)
        return self._state_of(self._used_rows())

    def _state_of(self, rows: list[list[int]]) -> dict[str, Tensor]:
        """The state with these pages of the sequences alone."""
        begins = {page: i * self.page_size for row in rows for i, page in enumerate(row)}
        stops = {page: n for row, n in zip(rows, self.host.read(), strict=True) for page in row}
        pages, tokens = sorted(begins), [(begins[page], stops[page]) for page in sorted(begins)]
        return {
            **self.pools.state_of(pages, tokens, self.lengths),
            "block_table": self.pages.table_of(rows).to(self.device),
            "lengths": self.lengths.clone(),
            "lists": self.ring.lists.masked_fill((self.ring.list_pos < 0)[..., None, None, None], -1),
            "list_pos": self.ring.list_pos.clone(),
            **options_as_tensors(self.options, self.page_size, self.leaf_bits),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the state of a cache of the same batch, sizes, dtypes and options; capacity and pages may be others.

        The bytes are those that this cache would have, had it got the tokens itself. Nodes that a smaller capacity does
        not keep are built. Pages keep their numbers where the pool has them all.

        Raises:
            ValueError, TypeError, DeviceError: an entry is missing, has another shape, dtype or option, or no numbers;
                the capacity is too small for what the state holds; or the pages contradict each other, or leaders their
                sequence. With leaf_bits also where nodes are to be built of tokens that are left in fewer bits only.
            OutOfPagesError: the pool is too small. The cache is left as it was.
        """
        op = f"{OP}.load_state_dict"
        check_data(op, "cache", self.lengths)
        own = self._state_of([[] for _ in range(self.batch)])
        pages, rows, lengths = check_state(op, state, own, self.pools.sizes, self.pages)
        self.ring.check_leaders(op, state["list_pos"].tolist(), lengths)
        layers, _ = self.pools.sizes.of(state["block_table"].shape[1])
        if self.pools.leaves is not None:
            self.pools.leaves.check_state(op, state, builds=layers == 1 < self.num_layers)
        self._end_prompts(None)
        self.pools.load(state, torch.tensor(pages, dtype=torch.int64, device=self.device))
        self.pages.load(rows)
        self._mark_shared_pages()
        self.lengths.copy_(state["lengths"])
        self.ring.list_pos.copy_(state["list_pos"])
        self._errors.zero_()
        self.host.set(lengths)
        self.ring.lists[:, :, :layers] = state["lists"][:, :, : self.num_layers].to(self.device)
        for layer in range(layers, self.num_layers):
            self.ring.lists[:, :, layer] = self.ring.opened(layer)
            for b, length in enumerate(lengths):
                self.pools.build_layer(b, self.block_table[b], layer, length)

    def _sizes(self) -> dict[str, Any]:
        """The arguments that this cache was made with, but options, prompt_bytes, dtype and device."""
        names = "batch num_kv_heads head_dim value_dim capacity page_size num_pages leaf_bits index_dim"
        names += " index_heads index_dtype" if self.index_dim else ""
        return {name: getattr(self, name) for name in names.split()}

    def __repr__(self) -> str:
        options = {name: value for name, value in self.options.to_dict().items() if name not in OF_NO_CACHE}
        listed = ", ".join(f"{name}={value!r}" for name, value in (self._sizes() | options).items())
        return f"{OP}({listed}, dtype={self.dtype}, device='{self.device}')"

    def _constants(self, n: int, recorded: bool) -> tuple[Tensor, Tensor]:
        """n for every sequence [B], and where the rows of each begin in [B * n]: [B + 1]. They must not be written.

        They are kept until a call has another n. While a graph is captured or a call compiled they are made anew: the
        graph owns what its capture makes. So it is on another stream, because their memory may be used again as soon as
        the work of their own stream allows.
        """
        device = self.device
        key = (n, 0 if recorded else stream_of(self.lengths))
        if not recorded and self._uniform is not None and self._uniform[0] == key:
            return self._uniform[1]
        every = torch.full((self.batch,), n, dtype=torch.int32, device=device)
        if n == 0:
            made = every, torch.zeros(self.batch + 1, dtype=torch.int32, device=device)
        else:
            made = every, torch.arange(0, (self.batch + 1) * n, n, dtype=torch.int32, device=device)
        if not recorded and type(every) is Tensor:  # not one of a tracer
            self._uniform = key, made
        return made
