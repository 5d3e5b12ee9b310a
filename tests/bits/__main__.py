"""Digests of what every op computes, to show that a change of the code left every bit alone.

``make bits`` or ``python -m tests.bits`` runs the case lists of all families, makes one digest of outputs and
gradients per call, and names the calls that differ from an earlier record: that of ``--against FILE``, or the one in
``tests/bits`` that was made on this kind of device with this torch. ``--out FILE`` writes a record. A change of the
arithmetic on purpose replaces the records; any other change leaves them as they are.
"""

import argparse
import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from htree_ops import TreeKVCache
from htree_ops.cli import run_program
from htree_ops.ops.tree_cache.functions import tree_cache_attention
from tests.support import (
    causal_softmax_cases,
    compressed_kv_cases,
    fp8_cases,
    fp8_gemm_cases,
    gated_mlp_cases,
    hadamard_cases,
    rmsnorm_rope_cases,
    select_blocks_cases,
    sparse_attention_cases,
    tree_attention_cases,
    tree_cache_cases,
)
from tests.support.cases import Case, normal
from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import TreeAttentionCase
from tests.support.tree_cache_cases import TreeCacheCase

__all__ = ["FAMILIES", "compare", "digest", "digests", "main"]

op = torch.ops.htree
Call = tuple[str, Callable[[], Any]]


def digest(result: Any) -> str:
    """Hash of shapes, dtypes and bytes of every tensor in a result, undefined ones included."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                add(item)
        elif isinstance(value, Tensor):
            sha.update(f"{tuple(value.shape)} {value.dtype} ".encode())
            flat = value.detach().contiguous().view(-1)
            sha.update(flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b"")
        else:
            sha.update(repr(value).encode())

    add(result)
    return sha.hexdigest()[:20]


def apply(function: Callable[..., Any], case: Case, device: str, *more: Any) -> Any:
    """The op on a case's inputs."""
    return function(*case.make_inputs(device), *more)


def causal_softmax(device: str) -> Iterator[Call]:
    lists = causal_softmax_cases
    for case in (*lists.CASES, *lists.LAYOUT_CASES):
        yield case.id, partial(apply, op.causal_softmax, case, device)
    for backward_case in lists.BACKWARD_CASES:
        yield (
            f"backward-{backward_case.id}",
            partial(apply, op.causal_softmax_backward, backward_case, device),
        )


def rmsnorm_rope(device: str) -> Iterator[Call]:
    lists = rmsnorm_rope_cases

    def backward(case: Any) -> Any:
        name = "head_rmsnorm_rope_backward" if case.forward.per_head else "rmsnorm_rope_backward"
        return getattr(op, name)(*case.make_inputs(device))

    for case in lists.CASES:
        name = "head_rmsnorm_rope" if case.per_head else "rmsnorm_rope"
        yield case.id, partial(apply, getattr(op, name), case, device)
    for backward_case in lists.BACKWARD_CASES:
        yield f"backward-{backward_case.id}", partial(backward, backward_case)


def hadamard(device: str) -> Iterator[Call]:
    lists = hadamard_cases
    for case in (*lists.CASES, *lists.LAYOUT_CASES):
        yield case.id, partial(apply, op.hadamard_transform, case, device)
    for grouped in lists.GROUPED_CASES:
        yield f"grouped-{grouped.id}", partial(apply, op.grouped_hadamard, grouped, device)


def gated_mlp(device: str) -> Iterator[Call]:
    lists = gated_mlp_cases

    def every(case: Any) -> Any:
        inputs = case.make_inputs(device)
        dy = case.make_dy(device, seed=9)
        kept = op._gated_mlp_forward(*inputs)
        return [
            op.gated_mlp(*inputs),
            kept,
            op._gated_mlp_saved_backward(dy, *kept[1:], *inputs),
            op.gated_mlp_backward(dy, *inputs),
        ]

    for case in (*lists.CASES, *lists.LAYOUT_CASES):
        yield case.id, partial(every, case)
    if device == "cuda":
        for case in (*lists.TILE_CASES, *lists.GRADIENT_CASES):
            yield f"kernel-{case.id}", partial(every, case)
        wide = list(lists.WIDE_CONFIG)
        for case in lists.WIDE_CASES:
            yield f"wide-{case.id}", partial(apply, op.gated_mlp, case, device, wide)


def fp8(device: str) -> Iterator[Call]:
    def every(case: Any) -> Any:
        x, scale, *grouping = case.make_inputs(device)
        codes, scales, overflows = op.fp8_quantize(x, scale, *grouping)
        return [
            codes.view(torch.uint8),
            scales,
            overflows,
            op.fp8_compute_scale(x, *grouping),
            op.fp8_dequantize(codes, scales, x.dtype, grouping[-1]),
            op.fp8_fake_quant(x, scale, *grouping),
            op._fp8_fake_quant_backward(torch.ones_like(x), x, scales, *grouping),
        ]

    for case in (*fp8_cases.CASES, *fp8_cases.LAYOUT_CASES):
        yield f"quantize-{case.id}", partial(every, case)
    gemm = fp8_gemm_cases
    for product in gemm.CASES:
        yield f"gemm_exact-{product.id}", partial(apply, op.fp8_gemm_exact, product, device)
    for case in (*gemm.CASES, *(gemm.KERNEL_CASES if device == "cuda" else ())):
        yield f"gemm-{case.id}", partial(apply, op.fp8_gemm, case, device)


def compressed_kv(device: str) -> Iterator[Call]:
    lists = compressed_kv_cases

    def every(case: Any) -> Any:
        x, keep, bits, weight = case.make_inputs(device)
        rows = op.kv_compress(x, keep, bits, weight)
        return [rows, op.kv_decompress(*rows, x.shape[-1], keep, bits, x.dtype), op.kv_prune(x, keep, weight)]

    def decode(case: Any) -> Any:
        return op.kv_decode_attention(*case.make_inputs(device), **case.options())

    for case in (*lists.COMPRESS_CASES, *lists.LAYOUT_CASES):
        yield f"compress-{case.id}", partial(every, case)
    for attended in lists.DECODE_CASES:
        yield (f"decode-{attended.id}", partial(decode, attended))


def _model(name: str, **sizes: Any) -> TreeAttentionCase:
    defaults = {"H": 8, "H_kv": 1, "K": 128, "V": 128, "r": 16, "top_k": 32, "M": 512}
    return TreeAttentionCase(name=name, dtype=torch.bfloat16, **{**defaults, "T": 3000, **sizes})


#: Besides the list of the family: every tensor-core kernel, at lengths that take several layers and thread blocks.
MODEL_CASES = [
    _model(f"d{dim}_g{group}_s{stride}", K=dim, V=dim, H=group, selection_stride=stride)
    for dim in (32, 64, 128)
    for group in (1, 2, 3, 4, 8, 16)
    for stride in (1, 2, 4, 8, 16)
] + [
    _model("heads", B=2, H=16, H_kv=4, T=5000, top_k=64, M=1024),
    _model("heads_s16", B=2, H=16, H_kv=4, T=5000, top_k=64, M=1024, selection_stride=16),
    _model("three_layers", T=9000, top_k=8, M=128),
    _model("three_layers_s4", T=9000, top_k=8, M=128, selection_stride=4),
    _model("three_layers_s16", T=9000, top_k=8, M=128, selection_stride=16),
    _model("wide_lists", T=20000, H=4, top_k=512, M=1024, K=64, V=64),
    _model("wide_lists_s16", T=20000, H=4, top_k=512, M=1024, K=64, V=64, selection_stride=16),
    _model("suffix", T=4000, num_queries=700, K=64, V=64),
    _model("suffix_s4", T=4000, num_queries=1200, K=64, V=64, selection_stride=4),
    _model("decode", T=4000, num_queries=1),
    _model("importance_lse", importance="lse", K=64, V=64),
    _model("importance_joint", importance="exp_joint", K=64, V=64),
    _model("own_positions", rope_base=None, K=64, V=64),
    _model("rate_8", r=8, K=64, V=64, top_k=64),
    _model("uneven_widths", K=64, V=32),
]


#: Ops that the records do not know: tests compare the bits of one with those of tree_build; the other is `attention`.
YOUNGER = {"span_means", "tree_attention"}


def tree_attention(device: str) -> Iterator[Call]:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, *((torch.float64,) if device == "cpu" else ()))

    def staged(case: TreeAttentionCase) -> Any:
        found = []
        for call in calls(case, device):
            if call.op in YOUNGER or call.op.startswith(
                "_"
            ):  # the ops by name call those with packed options
                continue
            written = [
                arg
                for arg, declared in zip(call.args, call.overload._schema.arguments, strict=False)
                if declared.alias_info is not None and declared.alias_info.is_write
            ]
            found.append((call.op, call(), written))
        return found

    def whole(case: TreeAttentionCase, store_parents: bool) -> Any:
        q, k, v = (x.requires_grad_() for x in case.make_qkv(device))
        forward = op.attention_forward(q.detach(), k.detach(), v.detach(), *case.op_options(), store_parents)
        out = op.attention(q, k, v, *case.op_options(), store_parents)
        dout = normal(tuple(out.shape), out.dtype, device, seed=5)
        return [forward, out, torch.autograd.grad(out, (q, k, v), dout)]

    for shape in tree_attention_cases.SHAPES:
        for dtype in dtypes:
            case = shape.with_dtype(dtype)
            yield f"stages-{case.id}", partial(staged, case)
            yield f"whole-{case.id}", partial(whole, case, True)
            yield f"again-{case.id}", partial(whole, case, False)
    if device == "cuda":
        models = [*MODEL_CASES, *(replace(case, dtype=torch.float16) for case in MODEL_CASES[::3])]
    else:
        models = [replace(case, T=case.T // 4, num_queries=None) for case in MODEL_CASES[::17]]
    for case in models:
        for stored in (True, False):
            yield f"model-{case.id}-{stored}", partial(whole, case, stored)


def _prompt(name: str, dtype: torch.dtype, **others: Any) -> TreeCacheCase:
    sizes: dict[str, Any] = {"lengths": (900, 900), "queries": (600, 600), "heads": 4, "kv_heads": 1}
    widths: dict[str, Any] = {
        "key_dim": 64,
        "value_dim": 64,
        "page_size": 64,
        "max_top_nodes": 64,
        "top_k": 8,
    }
    return TreeCacheCase(name=f"prompt {name}", dtype=dtype, **(sizes | widths | others))


#: Long enough that on CUDA the kernels of tree attention take them from a :class:`TreeKVCache`.
PROMPTS = [
    _prompt(name, dtype, **others)
    for dtype in (torch.float32, torch.bfloat16)
    for name, others in (("plain", {}), ("stride", {"selection_stride": 4}), ("span", {"selection_span": 4}))
]


def tree_cache(device: str) -> Iterator[Call]:
    lists = tree_cache_cases

    def append(case: TreeCacheCase) -> Any:
        return lists.filled_pools(case, *case.tokens(device))

    def attend(case: TreeCacheCase) -> Any:
        out, lse, kept, leaders = tree_cache_attention(*case.make_inputs(device), **case.options())
        unknown = (leaders < 0)[:, :, None, None, None]
        return [out, lse, kept.masked_fill(unknown, -1), leaders]

    def prompt(case: TreeCacheCase) -> Any:
        batch, length, last = len(case.lengths), case.lengths[0], case.queries[0]
        sizes = (batch, case.kv_heads, case.key_dim, length)
        options = case.options() | {"value_dim": case.value_dim, "dtype": case.dtype, "device": device}
        cache = TreeKVCache(*sizes, **options)
        q, k, v = (x.unflatten(0, (batch, length)) for x in case.sequences(device))
        found = []
        for begin, end in ((0, length - last), (length - last, length - 1), (length - 1, length)):
            cache.append(k[:, begin:end], v[:, begin:end])
            found.append(cache.attend(q[:, begin:end], return_lse=True))
        return found

    dtypes = (torch.float64,) if device == "cpu" else ()
    listed = [*lists.CASES, *(lists.DECODE_CASES if device == "cuda" else lists.DECODE_CASES[:4])]
    others = [replace(case, dtype=dtype) for dtype in dtypes for case in lists.CASES if case.name != "model"]
    for case in (*listed, *others):
        name = f"{case.id}-decode" if case in lists.DECODE_CASES else case.id
        yield f"append-{name}", partial(append, case)
        yield f"attend-{name}", partial(attend, case)
    for case in PROMPTS:
        yield case.id, partial(prompt, case)


def sparse_attention(device: str) -> Iterator[Call]:
    lists = sparse_attention_cases

    def gradients(call: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        leaves = [x.requires_grad_() if _floating(x) else x for x in inputs]
        results = call(*leaves)
        if not results[0].requires_grad:  # no document
            return results
        upstream = [normal(tuple(x.shape), x.dtype, device, seed=5) for x in results]
        wanted = [x for x in leaves if _floating(x)]
        return [results, torch.autograd.grad(results, wanted, upstream, allow_unused=True)]

    def attend(case: Any) -> Any:
        return gradients(partial(op.sparse_attention, **case.options()), case.make_inputs(device))

    def documents(case: Any) -> Any:
        return gradients(partial(op.sparse_attention_varlen, **case.options()), case.make_inputs(device))

    for case in (*lists.CASES, *lists.FAST_CASES):
        yield f"{case.id}-{case.K}", partial(attend, case)
    for case in lists.VARLEN_CASES:
        yield f"documents-{case.id}", partial(documents, case)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def select_blocks(device: str) -> Iterator[Call]:
    lists = select_blocks_cases
    for case in lists.CASES:
        yield case.id, partial(apply, op.select_blocks, case, device)


#: Family to the calls that it is judged by.
FAMILIES: dict[str, Callable[[str], Iterator[Call]]] = {
    family.__name__: family
    for family in (
        causal_softmax,
        compressed_kv,
        fp8,
        gated_mlp,
        hadamard,
        rmsnorm_rope,
        select_blocks,
        sparse_attention,
        tree_attention,
        tree_cache,
    )
}


def digests(device: str, families: list[str] | None = None) -> dict[str, str]:
    """The digest of every call, or the class of its exception where the device has no kernel for it."""
    found: dict[str, str] = {}
    for family in families or FAMILIES:
        started = time.perf_counter()
        for name, call in FAMILIES[family](device):
            key = f"{family}/{name}"
            if key in found:
                raise ValueError(f"two calls are named {key}")
            try:
                found[key] = digest(call())
            except (TypeError, NotImplementedError) as error:
                found[key] = type(error).__name__
        count = sum(key.startswith(f"{family}/") for key in found)
        print(f"{family}: {count} calls in {time.perf_counter() - started:.0f} s", flush=True)
    return found


def compare(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The calls that differ, or that only one side has."""
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def machine(device: str) -> dict[str, Any]:
    """What the digests depend on besides the code."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def cpu_name() -> str:
    """Model of the CPU and the widest vectors that torch uses on it."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{found.group(1) if found else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def record_of(machine: dict[str, Any], folder: Path) -> Path | None:
    """The record in ``folder`` that was made on such a machine, if there is one."""
    return next(
        (p for p in sorted(folder.glob("*.json")) if json.loads(p.read_text())["machine"] == machine), None
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line. Status 1: something differs; 2: there is nothing to compare with or to write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description=__doc__)
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=available)
    parser.add_argument(
        "--family", action="append", choices=sorted(FAMILIES), help="only this family; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument(
        "--against", type=Path, help="an earlier record (default: the fitting one in tests/bits)"
    )
    chosen = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(2)  # small fp32 products of torch's own library depend on the number of threads
    here = machine(chosen.device)
    against = chosen.against or record_of(here, Path("tests/bits"))
    if not against and not chosen.out:
        print(f"no record in tests/bits was made on such a machine: {here}; --out FILE makes one")
        return 2
    after = digests(chosen.device, chosen.family)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": here, "digests": after}, indent=0, sort_keys=True)
        chosen.out.write_text(text + "\n")
    if not against:
        return 0
    record = json.loads(against.read_text())
    if record["machine"] != here:
        print(f"{against} was made on another machine: {record['machine']}, this is {here}")
    families = tuple(f"{family}/" for family in chosen.family or FAMILIES)
    different = compare({k: v for k, v in record["digests"].items() if k.startswith(families)}, after)
    for key in different:
        print(f"differs: {key}")
    print(f"{len(after)} calls, {len(different)} differ from {against}")
    return int(bool(different))


if __name__ == "__main__":
    run_program(main)
