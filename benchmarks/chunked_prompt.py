"""A prompt that enters a tree cache in chunks, as a multiple of one call of tree attention over it.

Run: ``python -m benchmarks.chunked_prompt --csv PATH`` on a GPU with 40 GB; ``--quick`` leaves out a million tokens.
B = 1, H = 32, H_kv = 4, K = V = 128, k = 512, M = 8192, bf16, random normal inputs. A chunk is appended and attended;
the time of all chunks of a sequence is added up. ``peak_bytes`` is the most that the allocator held during the chunks
beyond the inputs and the cache. Figures are reported, never asserted. ``--profile`` prints instead what each kernel
takes of the chunks and of the call, and how long the host takes to launch them.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness import timing
from benchmarks.harness.calls import kernels_of, medians_ms, peak_of
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from htree_ops import TreeKVCache, tree_attention
from tests.support.cases import normal

HEADS, KV_HEADS, WIDTH = 32, 4, 128
EFFORT = timing.Effort(rounds=5, burst=1, candidate_ms=4000.0)
#: T, chunk, selection_stride, selection_span.
Setting = tuple[int, int, int, int | None]
QUICK: list[Setting] = [
    (131_072, 4096, 16, None),
    (131_072, 4096, 4, 2),
    (131_072, 4096, 1, None),
    (131_072, 1024, 16, None),
]
WHOLE: list[Setting] = [*QUICK, (1_048_576, 16_384, 16, None)]


def read_prompt(cache: TreeKVCache, chunk: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """All chunks from an empty cache; their rows are thrown away, as a model's next layer would take them."""
    cache.truncate(0)
    for begin in range(0, q.shape[1], chunk):
        rows = slice(begin, begin + chunk)
        cache.append(k[:, rows], v[:, rows])
        cache.attend(q[:, rows])


def prepared(
    length: int, chunk: int, stride: int, span: int | None
) -> tuple[TreeKVCache, Callable[[], object], Callable[[], object]]:
    """A cache, all chunks of a sequence, and one call over it."""
    q, k, v = (
        normal((1, length, heads, WIDTH), torch.bfloat16, "cuda", i)
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    cache = TreeKVCache(
        1, KV_HEADS, WIDTH, length, selection_stride=stride, selection_span=span, device="cuda"
    )
    chunks = functools.partial(read_prompt, cache, chunk, q, k, v)
    whole = functools.partial(
        tree_attention, q, k, v, selection_stride=stride, selection_span=span, store_parents=False
    )
    return cache, chunks, whole


def measure(length: int, chunk: int, stride: int, span: int | None) -> Row:
    """``multiple`` is the time of the chunks by the call's."""
    cache, chunks, whole = prepared(length, chunk, stride, span)
    _, peak = peak_of(chunks)
    times = medians_ms({"chunks": [chunks], "one call": [whole]}, "cuda", EFFORT)
    cache.check()
    return {
        **where(),
        "T": length,
        "chunk": chunk,
        "selection_stride": stride,
        "selection_span": span,
        "chunks_ms": times["chunks"],
        "one_call_ms": times["one call"],
        "multiple": times["chunks"] / times["one call"],
        "cache_bytes": cache.num_bytes().used,
        "peak_bytes": peak,
    }


def profile(length: int, chunk: int, stride: int, span: int | None) -> str:
    """What each kernel takes in milliseconds of the chunks and of the call, those that differ most first."""
    _, chunks, whole = prepared(length, chunk, stride, span)
    spent: list[dict[str, tuple[float, int]]] = []
    lines = [f"T={length}, chunks of {chunk}, stride {stride}, span {span}"]
    for name, call in (("chunks", chunks), ("one call", whole)):
        for _ in range(2):  # the second one finds everything prepared
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            launched = time.perf_counter() - begin
        lines.append(f"{name}: the host launches it in {1e3 * launched:.2f} ms")
        by_name: dict[str, tuple[float, int]] = {}
        for kernel, ms in kernels_of(call):
            total, count = by_name.get(kernel, (0.0, 0))
            by_name[kernel] = total + ms, count + 1
        spent.append(by_name)
    of_chunks, of_call = spent

    def beyond(key: str) -> float:
        return of_chunks.get(key, (0.0, 0))[0] - of_call.get(key, (0.0, 0))[0]

    lines.append(f"{'chunks ms':>10} {'calls':>6} {'whole ms':>10} {'calls':>6}  kernel")
    for key in sorted(of_chunks.keys() | of_call.keys(), key=beyond, reverse=True):
        columns = (f"{ms:10.3f} {count:6}" for ms, count in (x.get(key, (0.0, 0)) for x in spent))
        lines.append(f"{' '.join(columns)}  {key[:120]}")
    lines.append(" ".join(f"{sum(ms for ms, _ in x.values()):10.3f}       " for x in spent) + " all")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser("a prompt in chunks beside one call", quick="128k tokens alone")
    parser.add_argument("--profile", action="store_true", help="what each kernel takes instead of the table")
    arguments = parse_for_gpu(parser, argv)
    settings = QUICK if arguments.quick else WHOLE
    if arguments.profile:
        for setting in settings:
            print(profile(*setting), flush=True)
        return 0
    return measure_each(settings, lambda x: f"T={x[0]} stride {x[2]}", lambda x: [measure(*x)], arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
