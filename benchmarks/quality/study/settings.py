"""What is trained and compared: attentions, the sizes of each experiment, and those of a quick and a tiny run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from htree_ops.ops.tree_cache.functions import cache_layers

RATE = 16  # tokens per node, r
INDEX_DIM = 32  # numbers of a learned index, where heads have as many


@dataclass(frozen=True)
class Attention:
    """One way to attend; the same parameters serve all of them.

    Attributes:
        kind: "dense", "window" (each query sees the last ``window`` tokens, itself among them) or "tree".
        positions: "own": queries and keys are rotated at their positions in the text before the attention.
            "compact": the tree rotates them at their positions in the list of candidates.
        top_k, max_top_nodes, stride, span: k, M, ``selection_stride`` and ``selection_span`` of the tree.
        index_dim: numbers of the learned index by which it selects, 0 for none.
    """

    kind: str
    positions: str = "own"
    window: int = 0
    top_k: int = 0
    max_top_nodes: int = 0
    stride: int = 1
    span: int | None = None
    index_dim: int = 0

    @property
    def label(self) -> str:
        """Names the attention in rows, tables and legends."""
        if self.kind == "dense":
            return "dense"
        if self.kind == "window":
            return f"window {self.window}"
        score = f"index {self.index_dim}" if self.index_dim else f"span {self.span}" if self.span else "mean"
        top = f", M={self.max_top_nodes}" if self.max_top_nodes > self.top_k * RATE else ""
        return f"{score}, s={self.stride}, k={self.top_k}{top}, {self.positions}"

    def layers(self, context: int) -> int:
        """Layers of the tree over ``context`` tokens (docs/semantics/tree_attention.md §1.2); 0 without a tree."""
        return cache_layers(context, RATE, self.max_top_nodes) if self.kind == "tree" else 0


@dataclass(frozen=True)
class Substitute(Attention):
    """Something else in the place of an attention, for the evaluation of models: ``function`` of q, k and v."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor] = field(kw_only=True)


def dense() -> Attention:
    """Every query sees every earlier token."""
    return Attention("dense")


def window(width: int) -> Attention:
    """Every query sees the last ``width`` tokens."""
    return Attention("window", window=width)


def tree(
    top_k: int,
    max_top_nodes: int,
    span: int | None = None,
    stride: int = 1,
    positions: str = "own",
    index_dim: int = 0,
) -> Attention:
    """Every query sees ``top_k`` nodes of 16 tokens one by one and the rest as means."""
    return Attention("tree", positions, 0, top_k, max_top_nodes, stride, span, index_dim)


@dataclass(frozen=True)
class Training:
    """Sizes of a model, its texts and its training.

    Attributes:
        context: bytes (or tokens) of a text. batch: texts per step. strings, letters: planted per text.
        seconds: 0, or the training time on the clock instead of ``steps``. texts: of an evaluation.
        evaluate_every: steps between two evaluations. seen: tokens that enter a position before the first layer, itself
            and those before it. weight_decay: of matrices. rotary_base: of own positions.
    """

    context: int
    batch: int
    steps: int
    layers: int
    strings: int = 0
    letters: int = 0
    top_k: int = 0
    max_top_nodes: int = 0
    evaluate_every: int = 250
    texts: int = 64
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    learning_rate: float = 1.5e-3
    seconds: float = 0.0
    seen: int = 1
    weight_decay: float = 0.1
    rotary_base: float = 10_000.0

    @property
    def budget(self) -> int:
        """Tokens that a query of the tree sees one by one."""
        return self.top_k * RATE

    def tree(self, span: int | None = None, stride: int = 1, positions: str = "own") -> Attention:
        """The tree of this experiment."""
        return tree(self.top_k, self.max_top_nodes, span, stride, positions)

    def by_index(self, stride: int = 1, positions: str = "own", top_k: int = 0, nodes: int = 0) -> Attention:
        """The tree of this experiment with a learned index, with another k or M where one is given."""
        width = min(INDEX_DIM, self.width // self.heads)
        k, M = top_k or self.top_k, nodes or self.max_top_nodes
        return tree(k, M, None, stride, positions, width)


@dataclass(frozen=True)
class Scale:
    """Sizes of all experiments; ``name`` is "full", "quick" or "tiny".

    Attributes:
        corpus_bytes: of text, at most. pairs: of the recall task. needle_lengths: of the texts with needles.
        large_bytes, large_lengths: the same for the larger model.
        long_settings: span and stride of the trees of the long texts.
        wide: an upper layer more in every other step of the needle's training: its ``max_top_nodes``.
        indexer_steps, indexer_queries: of ``fit_index``, the latter of each text.
        index_rows: positions of a text at which an index learns beside its model.
        dense_models: that get an index.
    """

    name: str
    corpus_bytes: int
    conversion: Training
    search: Training
    scratch: Training
    recall: Training
    conversion_long: Training
    long: Training
    longest: Training
    needle: Training
    large: Training
    pairs: tuple[int, ...]
    needle_lengths: tuple[int, ...]
    depths: int
    vocabulary: int
    long_settings: tuple[tuple[int | None, int], ...] = ((2, 1), (2, 4))
    wide: int = 64
    indexer_steps: int = 400
    indexer_queries: int = 256
    index_rows: int = 128
    dense_models: int = 3
    large_bytes: int = 39_000_000
    large_lengths: tuple[int, ...] = tuple(2**n for n in range(14, 19))


FULL = Scale(
    name="full",
    corpus_bytes=131_072_000,
    conversion=Training(
        4096, 16, 3000, 6, strings=12, letters=48, top_k=16, max_top_nodes=256, evaluate_every=250, seen=4
    ),
    search=Training(
        512, 8, 300, 1, strings=8, letters=24, top_k=4, max_top_nodes=32, evaluate_every=25, texts=32, width=128,
        heads=2, kv_heads=1, learning_rate=1e-2, seen=4, weight_decay=0.0,
    ),
    scratch=Training(
        4096, 16, 3000, 6, strings=12, letters=48, top_k=16, max_top_nodes=256, evaluate_every=250, seen=4
    ),
    recall=Training(
        1024, 64, 4000, 2, width=256, heads=4, kv_heads=4, top_k=8, max_top_nodes=64, evaluate_every=500, texts=128,
        learning_rate=5e-3, seen=2,
    ),
    conversion_long=Training(
        32_768, 4, 800, 6, strings=96, letters=48, top_k=128, max_top_nodes=2048, evaluate_every=200, texts=16,
        learning_rate=5e-4, seen=4, rotary_base=85_000.0,
    ),
    long=Training(
        32_768, 4, 600, 6, strings=96, letters=48, top_k=128, max_top_nodes=2048, evaluate_every=100, texts=16,
        seen=4,
    ),
    longest=Training(
        131_072, 1, 0, 6, strings=384, letters=48, top_k=128, max_top_nodes=2048, evaluate_every=0, texts=8,
        seconds=140.0, seen=4,
    ),
    needle=Training(
        16_384, 4, 1500, 6, strings=48, letters=48, top_k=64, max_top_nodes=1024, evaluate_every=500, texts=16,
        learning_rate=5e-4, seen=4,
    ),
    large=Training(
        16_384, 4, 2000, 10, strings=48, letters=48, top_k=64, max_top_nodes=1024, evaluate_every=250, texts=16,
        width=1024, heads=16, kv_heads=4, learning_rate=1e-3, seen=4,
    ),
    pairs=(4, 8, 16, 32, 64, 128, 256),
    needle_lengths=tuple(2**n for n in range(14, 21)),
    depths=10,
    vocabulary=8192,
)  # fmt: skip

QUICK = replace(
    FULL,
    name="quick",
    conversion=replace(FULL.conversion, steps=2400, texts=32),
    recall=replace(FULL.recall, steps=2000),
)


def _tiny(full: Training, **changes: object) -> Training:
    """A size that two CPU cores train in a moment."""
    small = {
        "context": 256, "batch": 2, "steps": 12, "layers": 2, "top_k": 2, "max_top_nodes": 16, "texts": 2,
        "evaluate_every": 6, "width": 32, "heads": 2, "kv_heads": 1,
    }  # fmt: skip
    if full.strings:
        small |= {"strings": 3, "letters": 12}
    return replace(full, **(small | changes))  # type: ignore[arg-type]


TINY = replace(
    FULL,
    name="tiny",
    corpus_bytes=600_000,
    conversion=_tiny(FULL.conversion),
    search=_tiny(FULL.search),
    scratch=_tiny(FULL.scratch),
    recall=_tiny(FULL.recall, kv_heads=2),
    conversion_long=_tiny(FULL.conversion_long, context=512, top_k=4),
    long=_tiny(FULL.long, context=512),
    longest=_tiny(FULL.longest, context=512, seconds=0.3, batch=1, steps=0, evaluate_every=0),
    needle=_tiny(FULL.needle, context=512),
    large=_tiny(FULL.large, context=512, top_k=4, max_top_nodes=32),
    pairs=(4, 16),
    needle_lengths=(512, 1024),
    depths=3,
    vocabulary=512,
    wide=8,
    indexer_steps=3,
    indexer_queries=8,
    index_rows=8,
    dense_models=1,
    large_bytes=300_000,
    large_lengths=(512, 1024),
)

SCALES = {scale.name: scale for scale in (FULL, QUICK, TINY)}
