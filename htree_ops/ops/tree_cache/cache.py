"""The K/V cache of one tree attention layer (docs/semantics/tree_cache.md §7.4).

Longer than 700 lines because it is one class: what fills a cache, attends from it, cuts it back, saves and loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from htree_ops.errors import ShapeMismatchError, refuse
from htree_ops.ops.arguments import (
    FLOATING,
    FLOATING_AND_DOUBLE,
    check_data,
    check_dtype,
    check_int,
    check_option_dtype,
    check_tensors,
    option_device,
)
from htree_ops.ops.tree_attention.options import TreeKeywords, TreeOptions, check_frequencies
from htree_ops.ops.tree_attention.stages import rope_cache
from htree_ops.ops.tree_cache.errors import TAIL_LOST, WRONG_LENGTH, in_words
from htree_ops.ops.tree_cache.functions import (
    cache_layers,
    cache_options,
    page_rows,
    tree_cache_append_,
    tree_cache_append_packed_,
    tree_cache_attention,
)
from htree_ops.ops.tree_cache.leaves import PackedLeaves, check_leaf_bits
from htree_ops.ops.tree_cache.prompts import (
    PROMPT_ROWS,
    HostLengths,
    PromptCopies,
    attend_prompts,
    host_counts,
    is_recorded,
    read_lengths,
)
from htree_ops.ops.tree_cache.state import (
    OF_NO_CACHE,
    check_leaders,
    check_state,
    free_stack,
    options_as_tensors,
)

__all__ = ["TreeCacheBytes", "TreeKVCache"]

OP = "TreeKVCache"
#: How many leaders' lists are kept, so that up to 3 strides of speculative tokens can be taken back.
RING = 4
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


class TreeKVCache:
    """Keys, values and finished tree nodes of one tree attention layer, in pages, for ``batch`` sequences.

    ``cache.append(k, v); out = cache.attend(q)`` gives the rows of :func:`htree_ops.tree_attention` over all tokens so
    far. A step's cost follows from what it reads, not from the sequence's length. Only finished nodes are stored, so
    tokens can be taken back by a new length. Sequences share full pages and own the page that is still open:
    :meth:`fork` and :meth:`reorder_` copy that one alone. On CUDA, ``append``, ``attend``, ``truncate``, ``reorder_``
    and ``reserve`` can be captured in a graph, whose cost follows the lengths at replay, and do not wait for the
    device. One thing does: a prompt, 256 or more rows of a sequence in one ``attend``, reads the lengths where the host
    does not know them (after ``truncate``, ``reorder_`` or a captured step), because the kernels of ``tree_attention``
    compute it. What only the device can see is left undone and reported by :meth:`check`. On the CPU the call raises
    before it changes anything. No gradient flows through a cache.
    Source: docs/semantics/tree_cache.md §7.

    Args:
        batch: B, sequences. num_kv_heads: H_kv. head_dim: K, even. value_dim: V; None is K.
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
        dtype: float32, float16 or bfloat16, float64 on the CPU. device: where the cache lies.

    Attributes:
        lengths: int32 [B] on the device, tokens of each sequence.
        k_pool, v_pool, block_table: the pages; their addresses never change.

    Raises:
        UnsupportedDtypeError: another dtype. DeviceError: a device that torch does not know.
        TypeError, ValueError: an option of the wrong kind or out of range.
    """

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
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        **keywords: Unpack[TreeKeywords],
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        for name, size in (
            ("batch", batch),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
            ("capacity", capacity),
        ):
            check_int(OP, name, size, 1)
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
        max_pages = -(-capacity // page_size)
        check_int(OP, "capacity rounded up to whole pages", max_pages * page_size, 1)
        num_pages = batch * max_pages if num_pages is None else num_pages
        check_int(OP, "num_pages", num_pages, 1)
        place = option_device(OP, device)
        check_option_dtype(OP, dtype, FLOATING_AND_DOUBLE if place.type == "cpu" else FLOATING)
        if leaf_bits is not None:
            check_leaf_bits(OP, leaf_bits, head_dim, value_dim, dtype)
        if prompt_bytes is not None:
            check_int(OP, "prompt_bytes", prompt_bytes, 0, 2**63 - 1)
        self.leaf_bits = leaf_bits
        self.prompt_copies = PromptCopies(prompt_bytes)
        self.batch, self.num_kv_heads = batch, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.capacity, self.page_size, self.num_pages = capacity, page_size, num_pages
        self.dtype, self.device = dtype, place
        self.num_layers, (key_rows, value_rows) = self.sizes_of(max_pages)
        with torch.inference_mode(False):  # what is made in it could not be changed outside of it
            self._make_tensors(max_pages, key_rows, value_rows)

    def sizes_of(self, max_pages: int) -> tuple[int, tuple[int, int]]:
        """Layers of a cache of ``max_pages`` pages a sequence, and the rows of a page: (of keys, of values)."""
        options, size = self.options, self.page_size
        rate = options.compression_rate
        layers = cache_layers(max_pages * size, rate, options.top_nodes)
        packed = self.leaf_bits is not None
        return layers, page_rows(size, layers, rate, options.selection_span, packed_tokens=packed)

    def _make_tensors(self, max_pages: int, key_rows: int, value_rows: int) -> None:
        """Pages, their table and the ring of lists, all of them empty."""
        options, batch, heads, num_pages = self.options, self.batch, self.num_kv_heads, self.num_pages
        as_pages: dict[str, Any] = {"dtype": self.dtype, "device": self.device}

        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=self.device)

        self.k_pool = torch.empty(num_pages, heads, key_rows, self.head_dim, **as_pages)
        self.v_pool = torch.empty(num_pages, heads, value_rows, self.value_dim, **as_pages)
        self._leaves = None if self.leaf_bits is None else PackedLeaves(self, self.leaf_bits)
        self.block_table = integers(batch, max_pages, fill=-1)
        self.lengths = integers(batch)
        self.host_lengths = HostLengths(batch)
        self._held = integers(batch)
        self._users = integers(num_pages)
        # free_stack() of no users, which has no numbers to read on the device meta
        self._free = torch.arange(num_pages, -1, -1, dtype=torch.int32, device=self.device)
        self._errors = integers(batch)
        self._plan = integers(4, batch)
        self._constants: dict[str, tuple[tuple[int, int], Tensor]] = {}
        ring = RING if options.selection_stride > 1 else 0
        self._list_pos = integers(batch, ring, fill=-1)
        self._lists = integers(batch, ring, self.num_layers, heads, options.top_k, fill=-1)
        # The CPU keeps the table of tree_attention between calls.
        self._rope_table = (
            rope_cache(
                options.top_k * options.compression_rate,
                self.head_dim,
                options.rope_base,
                device=self.device,
                inv_freq=options.inv_freq,
            )
            if options.rope_base is not None and self.device.type != "cpu"
            else None
        )

    # ---- tokens

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, lengths: Tensor | Sequence[int] | None = None) -> None:
        """Adds n tokens to every sequence, or the first ``lengths[b]`` of them to sequence b.

        Args:
            k: [B, n, H_kv, K], not rotated; v: [B, n, H_kv, V]; in the dtype of the cache.
            lengths: tokens of each sequence that count, 0 ... n; None is n.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
            ValueError: on the CPU, if the capacity or the pages do not suffice. On CUDA such a sequence does not change
                and the others get their tokens; :meth:`check` reports it.
        """
        name = f"{OP}.append"
        check_tensors(name, cache=(self.lengths, "B"), k=(k, "B n H_kv K"), v=(v, "B n H_kv V"))
        check_dtype(name, (self.dtype,), k=k, v=v)
        counts = self._counts(name, lengths, k.shape[1])
        self._check_sizes(name, k=k, v=v)
        if k.shape[1] == 0:
            return
        self._step("append", counts, "append")
        new: dict[str, Any] = {
            "k": k.detach().flatten(0, 1),
            "v": v.detach().flatten(0, 1),
            "block_table": self.block_table,
            "lengths": self._plan[0],
            "cu_new": self._cu(k.shape[1]),
            "new_lengths": self._plan[1],
            "max_new": k.shape[1],
            "page_size": self.page_size,
            "options": self.options,
        }
        try:
            if self._leaves is None:
                tree_cache_append_(self.k_pool, self.v_pool, **new)
            else:
                tree_cache_append_packed_(self.k_pool, self.v_pool, **self._leaves.written(), **new)
        except Exception:
            self.lengths.copy_(self._plan[0])  # nothing was written
            raise
        if self._leaves is not None:
            self._leaves.note_append(self.lengths)
        self._note_append(host_counts(lengths, self.batch, k.shape[1]))

    def attend(
        self, q: Tensor, lengths: Tensor | Sequence[int] | None = None, *, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the last n tokens of each sequence, or of the last ``lengths[b]`` of sequence b.

        Args:
            q: [B, n, H, K], not rotated, H a multiple of H_kv: row i of a sequence stands at its token
                length - n + i, or length - lengths[b] + i.
            lengths: rows of each sequence that count, 0 ... n; None is n.
            return_lse: also return the log-sum-exp of each row's scores.

        Returns:
            out [B, n, H, V] in the dtype of the cache, with ``return_lse`` also lse [B, n, H] in float32 (float64 for
            float64). Rows at or behind ``lengths[b]``, and rows that a shorter sequence lacks, have 0 and -inf. With
            selection_stride > 1 a row whose leader was never attended is NaN, and :meth:`check` reports it.

        Raises:
            ShapeMismatchError, UnsupportedDtypeError, DeviceError: a tensor that does not fit.
        """
        name = f"{OP}.attend"
        check_tensors(name, cache=(self.lengths, "B"), q=(q, "B n H K"))
        check_dtype(name, (self.dtype,), q=q)
        self._check_sizes(name, q=q)
        n = q.shape[1]
        counts = self._counts(name, lengths, n)
        gathers = (
            self._leaves is None and self.device.type == "cuda"
        )  # a tree of packed tokens would be another one
        if n >= PROMPT_ROWS and gathers and not is_recorded(self.device):
            on_host = host_counts(lengths, self.batch, n)
            return attend_prompts(self, q, counts.tolist() if on_host is None else on_host, return_lse)
        self._end_prompts(None if lengths is None else host_counts(lengths, self.batch, n))
        self.report_leaders(counts)
        out, lse = self.attend_pages(q, self.lengths, None if lengths is None else counts)
        return (out, lse) if return_lse else out

    @property
    def ring(self) -> tuple[Tensor, Tensor]:
        """The lists of the last leaders [B, ring, layers, H_kv, k], and which leaders they are [B, ring] (§7.3)."""
        return self._lists, self._list_pos

    def report_leaders(self, counts: Tensor) -> None:
        """Reports a sequence whose last ``counts[b]`` rows need the lists of a leader that nobody has."""
        if self.options.selection_stride > 1:
            self._step("attend", counts, "attend")

    def constant(self, name: str, key: int, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of a name that ``key`` determines, kept until another key needs it; it must not be written.

        While a graph is captured or a call compiled it is made anew: the graph owns what its capture makes. So it is
        on another stream, because its memory may be used again as soon as the work of its own stream allows.
        """
        if is_recorded(self.device):
            return make()
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        held = self._constants.get(name)
        if held is None or held[0] != (key, stream):
            held = ((key, stream), make())
            if type(held[1]) is Tensor:  # not one of a tracer
                self._constants[name] = held
        return held[1]

    def attend_pages(self, q: Tensor, lengths: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of q, the last ``counts[b]`` of the first ``lengths[b]`` tokens, by ``tree_cache_attention``.

        Returns:
            out [B, n, H, V] and lse [B, n, H].
        """
        n, options = q.shape[1], self.options
        strided = options.selection_stride > 1
        out, lse, lists, list_pos = tree_cache_attention(
            q.flatten(0, 1),
            self.k_pool,
            self.v_pool,
            self.block_table,
            lengths,
            self._cu(n),
            self._lists if strided else None,
            self._list_pos if strided else None,
            counts,
            self._rope_table,
            page_size=self.page_size,
            options=options,
            **({} if self._leaves is None else self._leaves.paged()),
        )
        if strided:
            self._lists.copy_(lists)
            self._list_pos.copy_(list_pos)
        return out.unflatten(0, (self.batch, n)), lse.unflatten(0, (self.batch, n))

    # ---- sequences

    @torch.no_grad()
    def truncate(self, lengths: int | Tensor | Sequence[int]) -> None:
        """Takes tokens back: sequence b keeps its first ``lengths[b]`` tokens, or all of them where that is -1.

        With selection_stride s > 1 the new length is a multiple of s, or the lists of the last token's leader are in
        the ring of the last 4. With leaf_bits it is a multiple of compression_rate, or the tokens of the node that it
        opens are still kept as they came: those of the last page_size tokens are (docs/semantics/tree_cache.md §7.5).

        Raises:
            ValueError: on the CPU, for another length or more than the sequence holds. On CUDA the sequence does not
                change and :meth:`check` reports it.
        """
        if isinstance(lengths, int):
            lengths = [lengths] * self.batch
        request = self._integers(f"{OP}.truncate", "lengths", lengths)
        self._end_prompts(None if isinstance(lengths, Tensor) else [length + 1 for length in lengths])
        if self._leaves is not None:
            request = self._without_lost(request)
        self._step("truncate", request, "truncate")
        self.host_lengths.forget(self.device)
        self._copy_pages()
        if self._leaves is not None:
            self._leaves.note_truncate(self.lengths)

    @torch.no_grad()
    def reorder_(self, beams: Tensor | Sequence[int]) -> None:
        """Sequence b becomes what sequence ``beams[b]`` was. Full pages are shared, open ones copied.

        Raises:
            ValueError: on the CPU, for a beam that does not exist or too few pages for the copies. On CUDA nothing
                moves then, and :meth:`check` reports it.
        """
        request = self._integers(f"{OP}.reorder_", "beams", beams)
        moves = None if isinstance(beams, Tensor) else [int(beam != b) for b, beam in enumerate(beams)]
        self._end_prompts(moves)
        self._step("reorder_", request, "reorder")
        self.host_lengths.forget(self.device)
        self._copy_pages()
        self._lists.copy_(self._lists.index_select(0, self._plan[1]))
        if self._leaves is not None:
            self._leaves.reorder(self._plan[1])

    def fork(self, source: int, target: int) -> None:
        """Sequence ``target`` becomes a copy of ``source``, whose full pages it shares. The old ``target`` is freed."""
        for name, sequence in (("source", source), ("target", target)):
            check_int(f"{OP}.fork", name, sequence, 0, self.batch - 1)
        beams = list(range(self.batch))
        beams[target] = source
        self.reorder_(beams)

    def free(self, sequence: int) -> None:
        """Empties a sequence and gives back the pages that nobody else uses."""
        check_int(f"{OP}.free", "sequence", sequence, 0, self.batch - 1)
        self.truncate([0 if b == sequence else -1 for b in range(self.batch)])

    @torch.no_grad()
    def reserve(self, tokens: int) -> None:
        """Takes the pages for the next ``tokens`` tokens of every sequence now, so that they cannot run out later.

        Raises:
            ValueError: on the CPU, if the capacity or the pages do not suffice; on CUDA :meth:`check` reports it.
        """
        check_int(f"{OP}.reserve", "tokens", tokens, 0)
        counts = torch.full((self.batch,), tokens, dtype=torch.int32, device=self.device)
        self._step("reserve", counts, "reserve")

    def check(self) -> None:
        """Raises the errors that the device has recorded since the last call, and clears them. Waits for the device.

        Raises:
            ValueError: an error was recorded; the message names the sequences.
            DeviceError: the cache is on the device meta, which records none.
        """
        check_data(f"{OP}.check", "cache", self._errors)
        found = self._errors.tolist()
        if not any(found):
            return
        self._errors.zero_()
        raise ValueError(f"{OP}.check: {in_words(found)}")

    # ---- what it holds

    def layer(self, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of keys [N, H_kv, K] and values [N, H_kv, V] of a layer's finished nodes; layer 0 is the tokens.

        With leaf_bits these are the tokens as attention reads them.
        """
        check_int(f"{OP}.layer", "sequence", sequence, 0, self.batch - 1)
        check_int(f"{OP}.layer", "layer", layer, 0, self.num_layers - 1)
        check_data(f"{OP}.layer", "cache", self.lengths)
        place, row = self._rows_of(sequence, layer)
        if self._leaves is not None and layer == 0:
            return self._leaves.tokens(place, row, self.dtype)
        return self.k_pool[place, :, row], self.v_pool[place, :, row]

    def _rows_of(self, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
        """(pages of the pool, their rows), int64: where a layer's finished nodes lie (§7.1)."""
        rate, size = self.options.compression_rate, self.page_size
        tokens = rate**layer
        node = torch.arange(int(self.lengths[sequence]) // tokens, device=self.device)
        page = ((node + 1) * tokens - 1) // size
        row = node - page * size // tokens
        if layer:
            row += page_rows(size, layer, rate, packed_tokens=self._leaves is not None)[1]
        return self.block_table[sequence].long()[page], row

    def num_bytes(self) -> TreeCacheBytes:
        """The memory that is in use and allocated. Waits for the device.

        On the device meta and of fake tensors nothing can be counted but what is allocated; the rest is 0.
        """
        tensors = [x for x in vars(self).values() if isinstance(x, Tensor)]
        page = self.k_pool[0].nbytes + self.v_pool[0].nbytes
        if self._leaves is not None:
            tensors.extend(self._leaves.tensors().values())
            page += self._leaves.page_bytes()
        counts = type(self.lengths) is Tensor and not self.lengths.is_meta
        used = int((self._users > 0).sum()) if counts else 0
        return TreeCacheBytes(
            tokens=int(self.lengths.sum()) if counts else 0,
            used=used * page,
            allocated=sum(x.nbytes for x in tensors) + self.prompt_copies.num_bytes(),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Everything the cache holds, as copies; pages that nobody uses are left out."""
        check_data(f"{OP}.state_dict", "cache", self.lengths)
        return self._state_of(torch.nonzero(self._users > 0).flatten())

    def _state_of(self, pages: Tensor) -> dict[str, Tensor]:
        """The state with these pages alone."""
        return {
            "pages": pages.int(),
            "keys": self.k_pool[pages],
            "values": self.v_pool[pages],
            "block_table": self.block_table.clone(),
            "lengths": self.lengths.clone(),
            "lists": self._lists.clone(),
            "list_pos": self._list_pos.clone(),
            **options_as_tensors(self.options, self.page_size, self.leaf_bits),
        } | self._leaves_of_state(pages)

    def _leaves_of_state(self, pages: Tensor) -> dict[str, Tensor]:
        if self._leaves is None:
            return {}
        paged = {name: x[pages] for name, x in self._leaves.paged().items()}
        return paged | {name: getattr(self._leaves, name).clone() for name in PackedLeaves.OF_SEQUENCES}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the state of a cache of the same batch, heads and options; capacity and pages may be others.

        The bytes are those that this cache would have, had it got the tokens itself. Nodes that a smaller capacity does
        not keep are built. Pages keep their numbers where the pool has them all.

        Raises:
            ValueError, TypeError, DeviceError: an entry is missing, has another shape, dtype or option, or no numbers;
                the capacity or the pool is too small for what the state holds; or the pages contradict each other, or
                leaders their sequence. With leaf_bits also where nodes are to be built of tokens that are left in fewer
                bits only. The cache is left as it was.
        """
        op = f"{OP}.load_state_dict"
        check_data(op, "cache", self.lengths)
        placed = check_state(op, state, self._state_of(self.lengths[:0].long()), self)
        check_leaders(op, state, self.options.selection_stride)
        layers, _ = self.sizes_of(state["block_table"].shape[1])
        if self._leaves is not None:
            self._leaves.check_state(op, state, builds=layers == 1 < self.num_layers)
        self._end_prompts(None)
        self._load_pages(state, placed.pages.to(self.device).long())
        for target, source in (
            (self.block_table, placed.block_table),
            (self.lengths, state["lengths"]),
            (self._list_pos, state["list_pos"]),
            (self._users, placed.users),
            (self._held, placed.held),
            (self._free, free_stack(placed.users)),
        ):
            target.copy_(source)
        self._errors.zero_()
        self.host_lengths.forget(self.device)
        self._lists[:, :, :layers] = state["lists"][:, :, : self.num_layers].to(self.device)
        for layer in range(layers, self.num_layers):
            self._lists[:, :, layer] = self._opened_lists(layer)
            for sequence in range(self.batch):
                self._build_layer(sequence, layer)

    def _load_pages(self, state: Mapping[str, Tensor], pages: Tensor) -> None:
        """Takes what a state has in pages, and its tails; of the layers those that both have."""
        keys, values = state["keys"].to(self.device), state["values"].to(self.device)
        theirs, ours = values.shape[2], self.v_pool.shape[2]
        both = min(theirs, ours)
        self.k_pool[pages, :, :both] = keys[:, :, :both]
        self.v_pool[pages, :, :both] = values[:, :, :both]
        self.k_pool[pages, :, ours:] = keys[:, :, theirs:]  # span means
        if self._leaves is not None:
            for name, tensor in self._leaves.tensors().items():
                if name in PackedLeaves.PAGED:
                    tensor[pages] = state[name].to(self.device)
                else:
                    tensor.copy_(state[name])

    def _opened_lists(self, layer: int) -> Tensor:
        """The lists [B, ring, 1, k] of the ring's leaders in a layer where everything is opened (§7.3)."""
        own = self._list_pos.long() // self.options.compression_rate ** (layer + 1)  # -1 stays
        nodes = torch.arange(self.options.top_k, dtype=torch.int32, device=self.device)
        return nodes.where(nodes <= own[..., None, None], -1)

    def _build_layer(self, sequence: int, layer: int) -> None:
        """Writes a layer's finished nodes, those of the layer below being there."""
        rate, length = self.options.compression_rate, int(self.lengths[sequence])
        if length < rate**layer:
            return
        if layer == 1 and self._leaves is not None:
            below = self._leaves.tail(sequence, length)
        else:
            below = self.layer(sequence, layer - 1)
        place, row = self._rows_of(sequence, layer)
        nodes = torch.ops.htree.tree_build(*(x[None, : len(row) * rate] for x in below), rate)
        for pool, x in zip((self.k_pool, self.v_pool), nodes, strict=True):
            pool[place, :, row] = x[0]

    def __repr__(self) -> str:
        options = {name: value for name, value in self.options.to_dict().items() if name not in OF_NO_CACHE}
        names = "batch num_kv_heads head_dim value_dim capacity page_size num_pages leaf_bits"
        sizes = {name: getattr(self, name) for name in names.split()}
        listed = ", ".join(f"{name}={value!r}" for name, value in (sizes | options).items())
        return f"{OP}({listed}, dtype={self.dtype}, device='{self.device}')"

    # ---- steps

    def _end_prompts(self, counts: list[int] | None) -> None:
        """Frees what chunks of prompts left, of the sequences with ``counts[b]`` > 0; None is all of them."""
        known = counts is not None and not is_recorded(self.device)
        self.prompt_copies.drop(
            [b for b, count in enumerate(counts) if count > 0] if known and counts else None
        )

    def _note_append(self, counts: list[int] | None) -> None:
        """Tells the host's lengths of an append, whose outcome only the device knows where pages may be lacking."""
        enough = self.num_pages >= self.batch * self.block_table.shape[1]
        self.host_lengths.append(counts if enough else None, self.capacity, self.device)

    def _cu(self, n: int) -> Tensor:
        """Where the rows of each sequence begin in [B * n]."""
        if n == 0:
            return torch.zeros(self.batch + 1, dtype=torch.int32, device=self.device)
        end = (self.batch + 1) * n
        return self.constant("cu", n, lambda: torch.arange(0, end, n, dtype=torch.int32, device=self.device))

    def _integers(self, name: str, argument: str, values: Tensor | Sequence[int]) -> Tensor:
        """``values`` as int32 [B] on the device."""
        if not isinstance(values, Tensor):
            if not isinstance(values, Sequence):
                raise TypeError(
                    f"{name}: {argument} must be {self.batch} integers, got {type(values).__name__}"
                )
            values = list(values)
            for value in values:
                check_int(name, argument, value, -1)
            values = torch.tensor(values, dtype=torch.int32, device="cpu")
        check_data(name, argument, values)
        if values.shape != (self.batch,) or values.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: {argument} must be {self.batch} integers, got {values.dtype} {tuple(values.shape)}"
            )
        if values.dtype == torch.int64:
            values = values.clamp(-(2**31), 2**31 - 1)  # a number that int32 cannot hold is refused as one
        return values.to(self.device, torch.int32).contiguous()

    def _counts(self, name: str, lengths: Tensor | Sequence[int] | None, n: int) -> Tensor:
        """How many of the n rows of each sequence count, [B]."""
        if lengths is None:
            return self.constant(
                "counts", n, lambda: torch.full((self.batch,), n, dtype=torch.int32, device=self.device)
            )
        counts = self._integers(name, "lengths", lengths)
        given = read_lengths(lengths)
        if given is not None:
            if any(not 0 <= count <= n for count in given):
                raise ValueError(f"{name}: lengths must lie between 0 and n = {n}, got {given}")
            return counts
        wrong = (counts < 0) | (counts > n)
        self._errors.bitwise_or_(wrong.int() * WRONG_LENGTH)
        return counts.masked_fill(wrong, 0)

    def _check_sizes(self, name: str, **tensors: Tensor) -> None:
        heads = None if "q" in tensors else self.num_kv_heads
        for argument, tensor in tensors.items():
            width = self.value_dim if argument == "v" else self.head_dim
            if tensor.shape[3] != width or (heads is not None and tensor.shape[2] != heads):
                refuse(
                    ShapeMismatchError,
                    f"{name}: {argument} must be [{self.batch}, n, {heads or 'H'}, {width}], got {tuple(tensor.shape)}",
                    expected=(self.batch, "n", heads or "H", width),
                    actual=tuple(tensor.shape),
                    tensor_name=argument,
                )
            if heads is None and (tensor.shape[2] == 0 or tensor.shape[2] % self.num_kv_heads != 0):
                refuse(
                    ShapeMismatchError,
                    f"{name}: H of {argument} must be a positive multiple of H_kv = {self.num_kv_heads}, got "
                    f"{tuple(tensor.shape)}",
                    expected=f"a multiple of {self.num_kv_heads}",
                    actual=tuple(tensor.shape),
                    tensor_name=argument,
                )

    def _step(self, method: str, request: Tensor, step: str) -> None:
        try:
            torch.ops.htree.tree_cache_pages_(
                self.block_table,
                self.lengths,
                self._held,
                self._users,
                self._free,
                self._errors,
                self._list_pos,
                self._plan,
                request,
                step,
                capacity=self.capacity,
                page_size=self.page_size,
                selection_stride=self.options.selection_stride,
            )
        except ValueError as error:
            raise ValueError(str(error).replace("tree_cache_pages_", f"{OP}.{method}")) from None

    def _copy_pages(self) -> None:
        torch.ops.htree.tree_cache_copy_(self.k_pool, self.v_pool, self._plan[2:])
        if self._leaves is not None:
            self._leaves.copy_pages(self._plan[2:])

    def _without_lost(self, request: Tensor) -> Tensor:
        """A request to truncate without what the tails of packed tokens do not allow."""
        assert self._leaves is not None
        rate = self.options.compression_rate
        lost = self._leaves.lost(request, self.lengths, rate)
        if self.device.type == "cpu" and not torch.compiler.is_compiling():
            for b in torch.nonzero(lost).flatten().tolist():
                raise ValueError(
                    f"{OP}.truncate: with leaf_bits sequence {b} can be truncated to a multiple of compression_rate = "
                    f"{rate}, or to {int(self._leaves.tail_begin[b])} and more within a node of which all tokens are "
                    f"still kept as they came, got {int(request[b])}"
                )
        self._errors.bitwise_or_(lost.int() * TAIL_LOST)
        return request.masked_fill(lost, -1)
