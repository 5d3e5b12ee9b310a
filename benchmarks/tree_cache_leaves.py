"""What it costs to keep the tokens of a tree cache in 8 or 4 bits while its nodes stay in 16 (docs/quality.md).

Run: ``python -m benchmarks.tree_cache_leaves errors --csv PATH``, then ``model`` and ``time``. ``errors`` compares
attention from a cache with ``leaf_bits`` with that from one of 16 bits on random data, ``model`` evaluates small models
(some minutes on a CPU), ``time`` takes the time of a step.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import timing
from benchmarks.harness.calls import medians_ms, relative_error, replayed_us
from benchmarks.harness.plain_rows import Row, parse_for_gpu, print_rows
from benchmarks.quality.study import corpus, evaluation, pieces
from benchmarks.quality.study.session import Session, Setup
from benchmarks.quality.study.settings import SCALES, Attention, Substitute, Training
from htree_ops import TreeKVCache
from tests.support.cases import normal
from tests.support.compressed_kv_cases import rows_with_outliers

RATE = 16
BITS = (16, 8, 4)


def leaf_bits(bits: int) -> int | None:
    """Of a cache whose tokens have so many."""
    return None if bits == 16 else bits


def attend(q: Tensor, k: Tensor, v: Tensor, bits: int, **options: Any) -> Tensor:
    """Attention of q [B, n, H, D], the last n tokens, from a cache of k, v [B, T, H_kv, D] with tokens of ``bits``."""
    batch, tokens, heads, width = k.shape
    place: dict[str, Any] = {"dtype": k.dtype, "device": k.device}
    cache = TreeKVCache(batch, heads, width, tokens, leaf_bits=leaf_bits(bits), **place, **options)
    cache.append(k, v)
    out = cache.attend(q)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


def attend_in_bfloat16(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """:func:`attend` for float32 tensors."""
    return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), **arguments).to(q.dtype)


# ---- errors on random data


def errors(tokens: int, device: str) -> Iterator[Row]:
    """Relative L2 errors of the outputs on two kinds of keys against the cache of 16-bit tokens.

    Two sequences, 8 query heads on 2 K/V heads of 128 channels, float16; r = 16, k = 64, M = 1024; the last 64 rows.

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
            expected = attend(q, k, v, 16, **options)
            for bits in BITS:
                error = relative_error(attend(q, k, v, bits, **options), expected)
                yield {"keys": keys, "scores": scores, "bits": bits, "output_error": error}


# ---- trained models


def models(scale: str, device: str) -> Iterator[Row]:
    """Trains two models of the piece "search" of benchmarks/quality and a language model, and evaluates them.

    The search trains twice as long as the piece, so that both scores have learned it. The language model has 2 layers
    of width 256, 4 query heads and 1 K/V head of 64; 300 steps of 8 texts of 512 bytes, k = 4, M = 32.

    The row with 32 bits is the model as it was trained, in float32 and without a cache. ``copies_bits`` is the loss of
    the repeated letters and ``copies_found`` the share of those found; ``bits_per_byte`` that of natural text.
    ``text`` names the texts, which are the Python sources of the machine: compare only rows of one text.
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
            for bits in (32, *BITS):
                used = attention
                if bits < 32:
                    cached = partial(
                        attend_in_bfloat16, bits=bits, compression_rate=RATE, top_k=attention.top_k, rope_base=None,
                        max_top_nodes=attention.max_top_nodes, selection_span=attention.span,
                    )  # fmt: skip
                    used = Substitute(**asdict(attention), function=cached)
                found = evaluation.measure_texts(session, model, used, texts)  # type: ignore[arg-type]
                yield {
                    "model": name,
                    "attention": attention.label,
                    "bits": bits,
                    "bits_per_byte": found["bits_per_byte"] if name == "language" else None,
                    "copies_bits": found["copies_bits"],
                    "copies_found": found["copies_found"],
                    "text": session.corpus.name,
                }


# ---- time


def times(tokens: int, device: str, rounds: int = 30) -> Iterator[Row]:
    """The attention of one token of one sequence; caches of ``tokens`` tokens take turns, on a GPU as graphs.

    On a GPU 32 heads of 128 on 4 K/V heads in bfloat16, k = 512, M = 8192; on a CPU 4 heads of 64 on one in float32,
    k = 64, M = 1024.
    """
    cuda = torch.device(device).type == "cuda"
    heads, kv_heads, width, dtype = (32, 4, 128, torch.bfloat16) if cuda else (4, 1, 64, torch.float32)
    top_k = 512 if cuda else 64
    q = normal((1, 1, heads, width), dtype, device, seed=1)
    steps: dict[str, list[Callable[[], object]]] = {}
    for bits in BITS:
        cache = TreeKVCache(
            1, kv_heads, width, tokens, top_k=top_k, dtype=dtype, device=device, leaf_bits=leaf_bits(bits)
        )
        for first in range(0, tokens, 1 << 16):
            shape = (1, min(1 << 16, tokens - first), kv_heads, width)
            cache.append(*(normal(shape, dtype, device, seed=first + i) for i in (2, 3)))
        steps[str(bits)] = [partial(cache.attend, q)]
    effort = timing.Effort(rounds=rounds)
    if cuda:
        found = replayed_us(steps, effort)
    else:
        found = {bits: 1e3 * ms for bits, ms in medians_ms(steps, device, effort).items()}
    name = (
        torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    for kept, time in found.items():
        yield {
            "device": name,
            "tokens": tokens,
            "bits": int(kept),
            "microseconds": time,
            "ratio": time / found["16"],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and writes it where ``--csv`` says."""
    parser = argparse.ArgumentParser(description="tokens of a tree cache in 8 and 4 bits")
    parser.add_argument("part", choices=("errors", "model", "time"))
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="tokens of a sequence of `errors` and `time`"
    )
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="size of `model`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    arguments = parse_for_gpu(parser, argv)
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "errors": lambda: errors(arguments.tokens, arguments.device),
        "model": lambda: models(arguments.scale, arguments.device),
        "time": lambda: times(arguments.tokens, arguments.device),
    }
    print_rows(parts[arguments.part](), arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
