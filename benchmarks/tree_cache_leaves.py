"""What it costs to keep the tokens of a tree cache in 8 or 4 bits while its nodes stay in 16 (docs/quality.md).

Run: ``python -m benchmarks.tree_cache_leaves errors --csv PATH``, then ``model``, ``memory`` and ``time``. The first
two fill a cache with 16-bit tokens, so that its nodes are those of the tokens as they were, and then put in the place
of the tokens what rows of ``kv_compress`` give back. ``errors`` compares attention from such a cache with that of the
untouched one on random data, ``model`` evaluates small models (some minutes on a CPU), ``memory`` counts bytes of
pages and of a decoding step, ``time`` takes the time of a step from caches with ``leaf_bits``.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.plain_rows import parse_for_gpu, print_rows
from benchmarks.quality.study import corpus, evaluation, pieces
from benchmarks.quality.study.session import Session, Setup
from benchmarks.quality.study.settings import SCALES, Attention, Substitute, Training
from htree_ops import TreeKVCache
from htree_ops.ops.compressed_kv import kv_compress, kv_decompress
from htree_ops.ops.tree_cache import cache_layers, page_rows
from htree_ops.reference import compressed_kv as reference
from htree_ops.reference.hadamard import grouped_hadamard
from tests.support.cases import normal
from tests.support.compressed_kv_cases import rows_with_outliers

RATE = 16
PAGE = 256


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """How the tokens of a cache are stored.

    Attributes:
        bits: of a kept channel. sparsity: share of the channels that are dropped. transformed: "no", "keys", or "both"
            where values are transformed too. dense_tokens: so many of the last tokens stay as they were.
    """

    bits: int
    sparsity: float = 0.0
    transformed: str = "no"
    dense_tokens: int = 0


SETTINGS = [
    *(Leaves(bits=bits) for bits in (16, 8, 4)),
    *(Leaves(bits=bits, transformed=rows) for bits in (8, 4) for rows in ("keys", "both")),
    *(Leaves(bits=bits, dense_tokens=PAGE) for bits in (8, 4)),
    *(Leaves(bits=bits, sparsity=0.5) for bits in (16, 8, 4)),
]


def restored(x: Tensor, leaves: Leaves, transformed: bool) -> Tensor:
    """What rows of x [B, H_kv, T, D] are after they were pruned, quantised and packed."""
    width = x.shape[-1]
    stored = grouped_hadamard(x, 1).to(x.dtype) if transformed else x
    keep = reference.num_kept(width, leaves.sparsity)
    rows = kv_compress(stored, keep, leaves.bits)
    found = kv_decompress(*rows, width, keep, leaves.bits, x.dtype)
    return grouped_hadamard(found, 1).to(x.dtype) if transformed else found


def attend(q: Tensor, k: Tensor, v: Tensor, leaves: Leaves, **options: object) -> Tensor:
    """Attention of q [B, n, H, D], the last n tokens, from a cache of k, v [B, T, H_kv, D] with such leaves."""
    batch, tokens, heads, width = k.shape
    cache = TreeKVCache(
        batch, heads, width, tokens, page_size=PAGE, dtype=k.dtype, device=k.device, **options  # type: ignore[arg-type]
    )  # fmt: skip
    cache.append(k, v)
    table = cache.block_table.long()
    for pool, x, names in ((cache.k_pool, k, ("keys", "both")), (cache.v_pool, v, ("both",))):
        changed = restored(x.transpose(1, 2), leaves, leaves.transformed in names)
        for first in range(0, tokens - leaves.dense_tokens, PAGE):
            end = min(first + PAGE, tokens - leaves.dense_tokens)
            pool[table[:, first // PAGE], :, : end - first] = changed[:, :, first:end]
    out = cache.attend(q)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


def attend_in_bfloat16(q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> Tensor:
    """:func:`attend` for float32 tensors."""
    return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), **arguments).to(q.dtype)  # type: ignore[arg-type]


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# ---- errors on random data


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """One kind of leaves on one kind of keys: relative L2 error of the outputs against the cache of 16-bit tokens."""

    keys: str
    scores: float
    bits: int
    sparsity: float
    transformed: str
    dense_tokens: int
    output_error: float


def errors(tokens: int, device: str) -> Iterator[ErrorRow]:
    """Two sequences, 8 query heads on 2 K/V heads of 128 channels, float16; r = 16, k = 64, M = 1024; the last 64 rows.

    Of 16 384 tokens a row sees 1024 one by one and the rest as 960 nodes. ``scores`` is the factor of the queries: with
    1 the scores of normal keys have a deviation of 1 and weights are spread over all tokens, with 4 few tokens have
    most of the weight.
    """
    shape = (2, tokens, 2, 128)
    v = normal(shape, torch.float16, device, seed=3)
    for keys, make in (("normal", normal), ("outliers", rows_with_outliers)):
        k = make(shape, torch.float16, device, seed=2)
        for scores in (1.0, 4.0):
            q = normal((2, 64, 8, 128), torch.float32, device, seed=1).mul(scores).half()
            options = {"compression_rate": RATE, "top_k": 64, "max_top_nodes": 1024}
            expected = attend(q, k, v, Leaves(bits=16), **options)
            for leaves in SETTINGS:
                out = attend(q, k, v, leaves, **options)
                yield ErrorRow(
                    keys=keys, scores=scores, **asdict(leaves), output_error=relative(out, expected)
                )


# ---- trained models


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A trained model with one kind of leaves, on held-out texts.

    The row with 32 bits is the model as it was trained, in float32 and without a cache. ``copies_bits`` is the loss of
    the repeated letters and ``copies_found`` the share of those found; ``bits_per_byte`` that of natural text.
    ``text`` names the texts, which are the Python sources of the machine: compare only rows of one text.
    """

    model: str
    attention: str
    bits: int
    sparsity: float
    transformed: str
    bits_per_byte: float | None
    copies_bits: float
    copies_found: float
    text: str


def models(scale: str, device: str) -> Iterator[ModelRow]:
    """Trains two models of the piece "search" of benchmarks/quality and a language model, and evaluates them.

    The search trains twice as long as the piece, so that both scores have learned it. The language model has 2 layers
    of width 256, 4 query heads and 1 K/V head of 64; 300 steps of 8 texts of 512 bytes, k = 4, M = 32.
    """
    steps = 600 if scale == "full" else 6
    search = replace(SCALES[scale].search, steps=steps, evaluate_every=0, width=128, heads=2, kv_heads=1)
    language = Training(
        512, 8, steps // 2, 2, strings=3, letters=24, top_k=4, max_top_nodes=32, evaluate_every=0, texts=32,
        width=256, heads=4, kv_heads=1, learning_rate=3e-3,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            out=Path(folder),
            scale=SCALES[scale],
            device=device,
            text_folders=corpus.default_folders(),
            said=lambda line: print(line, file=sys.stderr),
        )

        def trained(name: str, size: Training, attention: Attention) -> torch.nn.Module:
            if name == "search":
                return pieces.trained_search(session, size, attention)
            model = session.make_model(size)
            pieces.train_on_text(session, Setup("leaves", name, attention, size), model)
            return model

        for name, size, attention in (
            ("search", search, search.tree(2)),
            ("search", search, search.tree(None)),
            ("language", language, language.tree(2)),
        ):
            model, texts = trained(name, size, attention), pieces.held_out_texts(session, size)
            for leaves in (None, *SETTINGS):
                if leaves is not None and leaves.dense_tokens:
                    continue  # here every token has a row, so none can stay as it was
                used = attention
                if leaves is not None:
                    cached = partial(
                        attend_in_bfloat16, leaves=leaves, compression_rate=RATE, top_k=attention.top_k,
                        rope_base=None, max_top_nodes=attention.max_top_nodes, selection_span=attention.span,
                    )  # fmt: skip
                    used = Substitute(**asdict(attention), function=cached)
                found = evaluation.measure_texts(session, model, used, texts)  # type: ignore[arg-type]
                stored = leaves or Leaves(bits=32)
                yield ModelRow(
                    model=name,
                    attention=attention.label,
                    bits=stored.bits,
                    sparsity=stored.sparsity,
                    transformed=stored.transformed,
                    bits_per_byte=found["bits_per_byte"] if name == "language" else None,
                    copies_bits=found["copies_bits"],
                    copies_found=found["copies_found"],
                    text=session.corpus.name,
                )


# ---- memory


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes of a cache, and those that a step reads of it; H_kv = 4, K = V = 128, k = 512, M = 8192.

    Attributes:
        format: "rows" without a bitmap, as every channel is kept, or "pruned rows" with half of the channels.
        leaf_bytes, node_bytes, mean_bytes: per token, of all K/V heads, keys and values together.
        gib: of the cache. share: of one with 16-bit tokens.
        step_mb: what a decoding step reads of nodes, means and tokens. step_share: of one with 16-bit tokens.
    """

    tokens: int
    span: int
    bits: int
    format: str
    leaf_bytes: float
    node_bytes: float
    mean_bytes: float
    gib: float
    share: float
    step_mb: float
    step_share: float


def memory_row(tokens: int, span: int, bits: int, keep: int) -> MemoryRow:
    """Counts one setting; the shares are filled in by :func:`memory`."""
    heads, width, top_k, most = 4, 128, 512, 8192
    layers = cache_layers(tokens, RATE, most)
    key_rows, value_rows = page_rows(PAGE, layers, RATE, span or None)
    both = 2 * heads  # keys and values
    leaf = reference.row_bytes(keep, bits) if bits < 16 else 2 * width
    leaf += (2 if bits < 16 else 0) + (width // 8 if keep < width else 0)
    nodes = (value_rows - PAGE) / PAGE * both * 2 * width
    means = (key_rows - value_rows) / PAGE * heads * 2 * width
    counted = [tokens]  # candidates of each layer, tokens first
    for _ in range(layers - 1):
        counted.append(-(-counted[-1] // RATE))
    candidates = [min(count, top_k * RATE) for count in counted[:-1]] + counted[-1:]
    read = candidates[0] * both * leaf + sum(candidates[1:]) * both * 2 * width
    # Means of a candidate of layer l: r^l / c of them, where the layer has to choose.
    chosen = [count for count in candidates[1:] if count > top_k]
    read_means = sum(
        count * RATE**layer // span * heads * 2 * width for layer, count in enumerate(chosen, start=1) if span
    )
    return MemoryRow(
        tokens=tokens,
        span=span,
        bits=bits,
        format="rows" if keep == width else "pruned rows",
        leaf_bytes=both * leaf,
        node_bytes=nodes,
        mean_bytes=means,
        gib=tokens * (both * leaf + nodes + means) / 2**30,
        share=1.0,
        step_mb=(read + read_means) / 1e6,
        step_share=1.0,
    )


def memory() -> Iterator[MemoryRow]:
    """Every format at 131 072 and 1 048 576 tokens, without span means and with those of 4 and 2 tokens."""
    for tokens in (131_072, 1_048_576):
        for span in (0, 4, 2):
            plain = memory_row(tokens, span, 16, 128)
            for bits, keep in ((16, 128), (8, 128), (4, 128), (8, 64), (4, 64)):
                row = memory_row(tokens, span, bits, keep)
                shares = {"share": row.gib / plain.gib, "step_share": row.step_mb / plain.step_mb}
                yield MemoryRow(**(asdict(row) | shares))


# ---- time


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """Time of ``attend`` for one token of one sequence.

    Attributes:
        device: its name. microseconds: median over all rounds; on a GPU of a captured graph. ratio: to 16 bits.
    """

    device: str
    tokens: int
    bits: int
    microseconds: float
    ratio: float


def times(tokens: int, device: str, rounds: int = 30) -> Iterator[TimeRow]:
    """Caches of ``tokens`` tokens take turns, so that whatever else the machine does meets all of them.

    On a GPU 32 heads of 128 on 4 K/V heads in bfloat16, k = 512, M = 8192; on a CPU 4 heads of 64 on one in float32,
    k = 64, M = 1024.
    """
    cuda = torch.device(device).type == "cuda"
    heads, kv_heads, width, dtype = (32, 4, 128, torch.bfloat16) if cuda else (4, 1, 64, torch.float32)
    top_k = 512 if cuda else 64
    q = normal((1, 1, heads, width), dtype, device, seed=1)
    steps: dict[int, Callable[[], object]] = {}
    caches = []  # a captured graph holds none of the tensors that it reads
    for bits in (16, 8, 4):
        cache = TreeKVCache(
            1, kv_heads, width, tokens, top_k=top_k, dtype=dtype, device=device,
            leaf_bits=None if bits == 16 else bits,
        )  # fmt: skip
        for first in range(0, tokens, 1 << 16):
            shape = (1, min(1 << 16, tokens - first), kv_heads, width)
            cache.append(*(normal(shape, dtype, device, seed=first + i) for i in (2, 3)))
        caches.append(cache)
        cache.attend(q)
        steps[bits] = partial(cache.attend, q)
        if cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                cache.attend(q)
            steps[bits] = graph.replay
    found: dict[int, list[float]] = {bits: [] for bits in steps}
    for _ in range(rounds):
        for bits, step in steps.items():
            begin = time.perf_counter()
            for _ in range(10):
                step()
            if cuda:
                torch.cuda.synchronize()
            found[bits].append((time.perf_counter() - begin) * 1e5)
    name = (
        torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    plain = statistics.median(found[16])
    for bits, each in found.items():
        median = statistics.median(each)
        yield TimeRow(device=name, tokens=tokens, bits=bits, microseconds=median, ratio=median / plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="tokens of a tree cache in 8 and 4 bits")
    parser.add_argument("part", choices=("errors", "model", "memory", "time"))
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="tokens of a sequence of `errors` and `time`"
    )
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="size of `model`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    arguments = parse_for_gpu(parser, argv)
    rows: Iterator[ErrorRow] | Iterator[ModelRow] | Iterator[MemoryRow] | Iterator[TimeRow]
    if arguments.part == "errors":
        rows = errors(arguments.tokens, arguments.device)
    elif arguments.part == "model":
        rows = models(arguments.scale, arguments.device)
    elif arguments.part == "memory":
        rows = memory()
    else:
        rows = times(arguments.tokens, arguments.device)
    print_rows(rows, arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
