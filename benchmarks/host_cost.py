"""What a call costs on the host: microseconds from Python until the call returns, for ops, caches and layers.

Run: ``python -m benchmarks.host_cost --csv PATH`` on a GPU; ``--bursts 5`` for a look, ``--device cpu`` on a CPU, where
the time is that of dispatch and kernels together. Tensors are small, and nothing
waits for the device while a burst is queued. An op that launches more kernels takes longer for each of them, so the
time of as many launches of an empty kernel is taken away from both sides. An op is compared with an ATen op of as
many tensors, arguments and results together: ``neg`` has two, ``add`` three, ``addcmul`` four, ``cat`` any number. A
step of a cache or a layer, one token for each sequence, is compared with the ops that it cannot do without, called as
a loop would that knows all arguments. Figures are reported, never asserted.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.calls import kernels_of
from benchmarks.harness.plain_rows import Row, make_parser, parse_for_gpu, print_rows, where
from benchmarks.harness.progress import progress
from htree_ops import HTreeAttention, TreeKVCache
from htree_ops.tuning.clock import percentile
from tests.support import compressed_kv_cases, rmsnorm_rope_cases
from tests.support.row_calls import row_calls
from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import TreeAttentionCase

Call = Callable[[], Any]
BURST = 50
EMPTY_KERNEL = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n\0"


def ops(device: str) -> dict[str, Call]:
    """A small call of every op, by the op's name: first those that a model calls, in 16 bits on a GPU."""
    op = torch.ops.htree
    half = torch.float32 if device == "cpu" else torch.bfloat16

    def normal(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x = normal(1, 16, 256)
    cos_sin = op.rope_cache(16, 64, device=torch.device(device))
    positions = torch.arange(16, device=device, dtype=torch.int32)
    gate, down = normal(256, 256), normal(64, 64)
    codes, scale, _ = op.fp8_quantize(down, None, "tensor", -1, 128)
    found: dict[str, Call] = {
        "causal_softmax": partial(op.causal_softmax, normal(2, 32, 32)),
        "hadamard_transform": partial(op.hadamard_transform, normal(16, 128)),
        "rope": partial(op.rope, normal(1, 16, 4, 64), *cos_sin.unbind(0), positions),
        "gated_mlp": partial(op.gated_mlp, x[0], gate, gate, "silu", "gate"),
        "fp8_quantize": partial(op.fp8_quantize, down, None, "tensor", -1, 128),
        "fp8_dequantize": partial(op.fp8_dequantize, codes, scale, half, 128),
        "fp8_gemm": partial(op.fp8_gemm, codes, codes, scale, scale, half),
    }
    norm = next(case for case in rmsnorm_rope_cases.CASES if case.dtype == half and not case.per_head)
    found["rmsnorm_rope"] = partial(op.rmsnorm_rope, *norm.make_inputs(device))
    rows = next(case for case in compressed_kv_cases.COMPRESS_CASES if case.dtype == half)
    found["kv_compress"] = partial(op.kv_compress, *rows.make_inputs(device))
    decode = next(case for case in compressed_kv_cases.DECODE_CASES if case.dtype == half)
    found["kv_decode_attention"] = partial(
        op.kv_decode_attention, *decode.make_inputs(device), **decode.options()
    )
    case = TreeAttentionCase(
        name="host", dtype=half, T=64, H=4, H_kv=1, r=16, top_k=8, M=32, K=64, V=64, selection_stride=1
    )
    for call in (*calls(case, device), *row_calls(device)):
        if call.op == "_tree_cache_step_":  # tokens would fill the cache after some calls
            *before, counts, _, cu_rows, table, capacity = call.args
            call = replace(call, args=(*before, torch.zeros_like(counts), True, cu_rows, table, capacity))
        found.setdefault(call.op, call)
    return found


@dataclass(frozen=True)
class Step:
    """A call, what it is compared with, and the name of that; ``begin`` takes back what a burst has added.

    ``tensors`` are those of an op, its results among them.
    """

    call: Call
    raw: Call
    names: str
    begin: Call | None = None
    tensors: int = 0


def _filled(cache: TreeKVCache, tokens: int) -> Call:
    """Fills a cache, and gives what takes later tokens back."""
    shape = (cache.batch, tokens, cache.num_kv_heads)
    k, v = (
        torch.randn(*shape, w, device=cache.device).to(cache.dtype) for w in (cache.head_dim, cache.value_dim)
    )
    heads = 4 * cache.num_kv_heads
    q = torch.randn(cache.batch, tokens, heads, cache.head_dim, device=cache.device).to(cache.dtype)
    cache.append(k, v)
    cache.attend(q)
    return partial(cache.truncate, [tokens] * cache.batch)


def raw_step(cache: TreeKVCache) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The op of :meth:`TreeKVCache.decode` for one token of each sequence, all other arguments at hand."""
    step, (before, behind) = torch.ops.htree._tree_cache_step_.default, cache.step_arguments(None, 1)
    return lambda q, k, v: step(*before, q, k, v, None, None, *behind)


def steps(device: str) -> dict[str, Step]:
    """Decode steps of caches and layers, by name."""
    half = torch.float32 if device == "cpu" else torch.bfloat16
    options: dict[str, Any] = {"top_k": 8, "max_top_nodes": 128}
    sizes: dict[str, Any] = {"dtype": half, "device": device}
    found = {}
    for stride in (1, 4):
        caches = [TreeKVCache(2, 1, 64, 1024, selection_stride=stride, **options, **sizes) for _ in range(2)]
        begins = [_filled(cache, 64) for cache in caches]
        q, k, v = (torch.randn(2, 1, heads, 64, **sizes) for heads in (4, 1, 1))
        found[f"TreeKVCache.decode, stride {stride}"] = Step(
            partial(caches[0].decode, q, k, v),
            partial(raw_step(caches[1]), q, k, v),
            "the op",
            partial(_all, begins),
        )
    for positions in ("compact", "own"):
        layer = HTreeAttention(
            128, 4, 1, 64, positions=positions, selection_span=None, index_dim=0, **options, **sizes
        ).requires_grad_(False)
        caches = [layer.make_cache(2, 1024) for _ in range(2)]
        begins = [_filled(cache, 64) for cache in caches]
        x = torch.randn(2, 1, 128, **sizes)
        found[f"HTreeAttention, {positions} positions"] = Step(
            partial(layer, x, cache=caches[0]),
            partial(_raw_layer, layer, raw_step(caches[1]), caches[1].lengths, x),
            "its ops",
            partial(_all, begins),
        )
    return found


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _raw_layer(
    layer: HTreeAttention, step: Callable[..., tuple[Tensor, Tensor]], lengths: Tensor, x: Tensor
) -> Tensor:
    """Projections, rotations where the layer has them, and the step."""
    q, k, v = (proj(x) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k, v = (y.view(2, 1, -1, 64) for y in (q, k, v))
    if layer.positions == "own":
        frequencies = layer._rotation_frequencies(x.device)
        angles = lengths[:, None] * frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        rows = torch.arange(2, device=x.device).view(2, 1)
        q, k = torch.ops.htree.rope(q, cos, sin, rows), torch.ops.htree.rope(k, cos, sin, rows)
    return layer.o_proj(step(q, k, v)[0].flatten(2))


def plain(tensors: int, device: str) -> tuple[str, Call]:
    """An ATen op that has so many tensors, arguments and results together."""
    aten = torch.ops.aten
    rows = [torch.randn(16, 64, device=device) for _ in range(max(1, tensors - 1))]
    if tensors <= 2:
        return "neg", partial(aten.neg.default, rows[0])
    if tensors == 3:
        return "add", partial(aten.add.Tensor, *rows)
    if tensors == 4:
        return "addcmul", partial(aten.addcmul.default, *rows)
    return "cat", partial(aten.cat.default, rows)


def count_tensors(value: Any) -> int:
    """Tensors in arguments or results, those in lists too."""
    if isinstance(value, Tensor):
        return 1
    if isinstance(value, (tuple, list)):
        return sum(count_tensors(item) for item in value)
    return sum(count_tensors(item) for item in value.values()) if isinstance(value, dict) else 0


def tensors_of(call: Any) -> int:
    """Tensors of a call, arguments and results together."""
    keywords = call.keywords if isinstance(call, partial) else call.kwargs
    return count_tensors(call.args) + count_tensors(keywords) + count_tensors(call())


def count_kernels(call: Call, device: str) -> int:
    """Kernels that one call launches, copies and fills among them."""
    return 0 if device == "cpu" else len(kernels_of(call))


def host_us(call: Call, device: str, bursts: int, begin: Call | None = None) -> float:
    """Median over bursts of the time until the call returns. A burst begins with ``begin``, on an idle device."""
    samples = []
    for _ in range(bursts):
        if begin is not None:
            begin()
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        samples.append((time.perf_counter() - start) / BURST * 1e6)
    return percentile(samples, 50)


def launch_us(device: str, bursts: int) -> float:
    """Microseconds in which the driver queues an empty kernel, called from here as an op would call it."""
    if device == "cpu":
        return 0.0
    torch.zeros(1, device=device)  # makes the context current
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel, version = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"the CUDA driver answered {code}")

    check(driver.cuModuleLoadData(ctypes.byref(module), EMPTY_KERNEL))
    check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"empty"))
    launch = partial(driver.cuLaunchKernel, kernel, 1, 1, 1, 32, 1, 1, 0, None, None, None)
    check(launch())
    nothing = partial(
        driver.cuDriverGetVersion, ctypes.byref(version)
    )  # as cheap as a call through ctypes can be
    return max(0.0, host_us(launch, device, bursts) - host_us(nothing, device, bursts))


def beside_aten(device: str) -> dict[str, Step]:
    """Every op beside an ATen op of as many tensors."""
    found = {}
    for name, call in ops(device).items():
        tensors = tensors_of(call)
        aten, baseline = plain(tensors, device)
        found[name] = Step(call, baseline, aten, tensors=tensors)
    return found


def measure(todo: dict[str, Step], device: str, bursts: int) -> Iterator[Row]:
    """A row for each; ``own_us`` and ``aten_us`` are without the launches of their kernels."""
    launch = launch_us(device, bursts)
    for name, step in progress(list(todo.items()), lambda item: item[0]):
        times: list[list[float]] = [[], []]
        for _ in range(3):  # one beside the other, so that both meet the same machine
            for call, samples in zip((step.call, step.raw), times, strict=True):
                host_us(call, device, 2, step.begin)
                samples.append(host_us(call, device, bursts, step.begin))
        total, raw = (percentile(samples, 50) for samples in times)
        kernels, of_raw = (count_kernels(call, device) for call in (step.call, step.raw))
        own, plain_us = total - kernels * launch, raw - of_raw * launch
        yield {
            **where(device),
            "op": name,
            "tensors": step.tensors,
            "kernels": kernels,
            "host_us": total,
            "own_us": own,
            "aten": step.names,
            "aten_us": plain_us,
            "ratio": own / plain_us,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser("host time of every op beside ATen ops of as many tensors", cpu=True)
    parser.add_argument("--bursts", type=int, default=40, help=f"bursts of {BURST} calls per op")
    parser.add_argument(
        "--only", choices=("ops", "steps"), help="ops alone, or steps of caches and layers alone"
    )
    arguments = parse_for_gpu(parser, argv)
    todo: dict[str, Step] = {}
    if arguments.only != "steps":
        todo |= beside_aten(arguments.device)
    if arguments.only != "ops":
        todo |= steps(arguments.device)
    print_rows(measure(todo, arguments.device, arguments.bursts), arguments.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
