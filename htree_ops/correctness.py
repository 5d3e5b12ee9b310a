"""The ops of this installation against float64 references: ``python -m htree_ops correctness``.

Ten small cases of the other op families come first, then tree attention, forward and backward, on drawn inputs. A case
fails where an element is off by more than a few roundings of its dtype, relative to the largest one. Each seed of tree
attention is judged twice (docs/semantics §1.11). Under the lists that the op selected ("forced") every
element of the output and of the gradients must be finite and within --final-atol + --final-rtol * |reference|,
and the lists must be well formed, else FAIL. PASS_WITH_ALARM says that a stricter bound was exceeded: the
tolerances of §1.11 under forced lists, or, where the reference selects by itself ("free"), the 99th percentile of
the error of the output (--out-p99-atol) or of a gradient (--grad-p99-atol). Exit status: 0, 1 for FAIL (and for
an alarm with --fail-on-alarm), 2 for bad use.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import htree_ops
from htree_ops.cli import (
    SEED,
    Command,
    UsageError,
    add_sizes,
    at_least,
    counted,
    free_memory,
    show_progress,
)
from htree_ops.reference import (
    causal_softmax,
    compressed_kv,
    fp8,
    gated_mlp,
    hadamard,
    rmsnorm_rope,
)
from htree_ops.reference import tree_attention as reference
from htree_ops.tuning.verification import compare

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PASS, ALARM, FAIL = "PASS", "PASS_WITH_ALARM", "FAIL"
#: Elements of the gathered keys of one piece of query rows, in float64: 256 MiB.
PIECE_ELEMENTS = 1 << 25


#: (a, b) of |out - ref| <= a * max|v| + b * |ref|. float64 allows a few hundred roundings.
TOLERANCE = {
    torch.float32: (2e-5, 1e-4),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (8e-3, 8e-3),
    torch.float64: (1e-12, 1e-12),
}

GRADIENT_FACTOR = 5.0  # gradients may err this much more than outputs


def largest(*tensors: Tensor) -> float:
    """Largest finite magnitude; 0 for empty tensors."""
    parts = [x.detach().double().abs().nan_to_num(0.0, 0.0, 0.0) for x in tensors]
    return max((float(part.max()) for part in parts if part.numel()), default=0.0)


def fault_of_lists(
    parents: Sequence[Tensor], num_queries: int, length: int, options: dict[str, Any]
) -> str | None:
    """What is wrong with the structure of the lists of every layer (§1.3, §1.11); None where nothing is.

    Each is int32 [B,ceil(T_q/s),S,k]: ascending and unique, -1 only at the tail, the last one the parent
    that contains the query, min(k, n) entries, children of the layer above's entries. With M > k*r the lists of a
    row's own top layer and of those above are -1.
    """
    rate, top_k = options["compression_rate"], options["top_k_per_layer"]
    stride = options.get("selection_stride", 1)
    sizes = reference.layer_sizes(length, rate, options["max_top_nodes"])
    if len(parents) != len(sizes):
        return f"{len(parents)} lists for {len(sizes)} layers"
    t0 = length - num_queries
    times = torch.arange(t0, length, stride, device=parents[0].device)
    tops = torch.full_like(times, len(sizes) - 1)
    is_free = options["max_top_nodes"] > top_k * rate
    if is_free:
        tops = reference.OwnTops.of(times, rate, options["max_top_nodes"], top_k).tops
    for layer, lists in enumerate(parents):
        if lists.dtype != torch.int32:
            return f"layer {layer}: {lists.dtype}"
        got = (lists.shape[1], lists.shape[3])
        if got != (times.numel(), top_k):
            return f"layer {layer}: {tuple(lists.shape)}"
        above = parents[layer + 1] if layer + 1 < len(sizes) else lists
        here, top = times, tops
        if is_free:
            listed = tops > layer
            if (lists[:, ~listed] != -1).any():
                return f"layer {layer}: a list that the place implies"
            lists, above, here, top = lists[:, listed], above[:, listed], times[listed], tops[listed]
        num = reference.num_parents(lists)
        slots = torch.arange(top_k, device=lists.device)
        if ((lists == -1) != (slots >= num[..., None])).any():
            return f"layer {layer}: -1 inside a list"
        steps = lists.diff(dim=-1)
        inner = slots[1:] < num[..., None]
        if (steps[inner] <= 0).any():
            return f"layer {layer}: not ascending"
        last = lists.gather(-1, (num - 1).clamp(min=0)[..., None])[..., 0].long()
        own = (here // rate**layer // rate).view(1, -1, 1)
        if (last != own).any():
            return f"layer {layer}: the last parent does not contain the query"
        if layer == len(sizes) - 1:
            if is_free:
                continue
            shape = (lists.shape[0], num_queries, lists.shape[2])
            wanted = reference.top_parents(*shape, top_k, len(sizes), rate, t0, stride, device=lists.device)
            if not torch.equal(lists, wanted):
                return "the top list is not the virtual one"
            continue
        node = (here // rate ** (layer + 1)).view(1, -1, 1)
        from_top = is_free & (top == layer + 1).view(1, -1, 1)
        n_above = torch.where(from_top, node, (reference.num_parents(above) - 1) * rate + node % rate) + 1
        if (num != n_above.clamp(max=top_k)).any():
            return f"layer {layer}: wrong number of parents"
        families = torch.div(lists.long(), rate, rounding_mode="floor").masked_fill(lists == -1, -1)
        known = (families[..., :, None] == above.long()[..., None, :]).any(-1) | from_top[..., None]
        if not known[lists != -1].all():
            return f"layer {layer}: a parent that is no child of the list above"
    return None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and options of one comparison; letters as in docs/semantics/tree_attention.md §1.1."""

    batch: int = 1
    seq_len: int = 12_000
    hq: int = 16
    h_kv: int = 4
    k_dim: int = 32
    v_dim: int = 32
    compression_rate: int = 16
    top_k_per_layer: int = 512
    max_top_nodes: int = 8192
    rope_base: float = 10000.0
    selection_span: int | None = None
    open_next: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of ``attention``."""
        names = (
            "compression_rate",
            "max_top_nodes",
            "top_k_per_layer",
            "rope_base",
            "selection_span",
            "open_next",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def input_bytes(self) -> int:
        """The fewest bytes that q, k, v and dout take: drawn in float32, and in float64 for the reference."""
        return 12 * self.batch * self.seq_len * (self.hq + self.h_kv) * (self.k_dim + self.v_dim)

    def make(self, seed: int, device: str) -> tuple[Tensor, ...]:
        """q, k, v and the upstream gradient dout, standard normal."""
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (self.hq, self.k_dim),
            (self.h_kv, self.k_dim),
            (self.h_kv, self.v_dim),
            (self.hq, self.v_dim),
        )
        return tuple(
            torch.randn(self.batch, self.seq_len, *shape, generator=generator, device="cpu").to(
                device, self.dtype
            )
            for shape in shapes
        )


#: Tolerances of the command line: the default of each, and what it bounds.
BOUNDS = {
    "final_atol": (3e-2, "largest absolute error"),
    "final_rtol": (3e-2, "largest error relative to the reference"),
    "out_p99_atol": (5e-3, "99th percentile of the error of the output, reference selecting itself"),
    "grad_p99_atol": (1e-2, "the same of the gradients"),
}


@dataclass
class Judgement:
    """What one seed gave. The reasons say which bound was exceeded, and by what."""

    failures: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    p99: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """PASS, PASS_WITH_ALARM or FAIL."""
        return FAIL if self.failures else ALARM if self.alarms else PASS


def reference_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    problem: Problem,
    lists: Sequence[Tensor] | None,
    label: str = "reference",
) -> dict[str, Tensor]:
    """out, dq, dk, dv in float64, in pieces over the queries; ``label`` stands beside the progress."""
    rate = problem.compression_rate
    layers = [
        (keys.requires_grad_(), values.requires_grad_())
        for keys, values in reference.build_layers(k, v, rate, problem.max_top_nodes, torch.float64)
    ]
    leaves = [leaf for layer in layers for leaf in layer]
    span_k = None if problem.selection_span is None else reference.span_means(k, problem.selection_span)
    most = max(problem.top_k_per_layer * rate, problem.max_top_nodes + rate)
    capacity = min(most, max(layer[0].shape[1] for layer in layers) + rate)
    step = max(
        1, PIECE_ELEMENTS // (problem.batch * problem.h_kv * capacity * (problem.k_dim + problem.v_dim))
    )
    outs, dqs = [], []
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    for first in range(0, problem.seq_len, step):
        show_progress(label, first, problem.seq_len)
        rows, end = slice(first, first + step), min(first + step, problem.seq_len)
        query = q[:, rows].double().requires_grad_()
        out = reference.htree_forward_naive(
            query,
            k[:, :end],  # where the rows stand
            v[:, :end],
            **problem.options,
            tree=(layers, span_k),
            parents=None if lists is None else [one[:, rows] for one in lists],
            compute_dtype=torch.float64,
        ).out
        dq, *parts = torch.autograd.grad(out, [query, *leaves], dout[:, rows].double(), allow_unused=True)
        for total, part in zip(sums, parts, strict=True):
            if part is not None:
                total += part
        outs.append(out.detach())
        dqs.append(dq)
    show_progress(label, problem.seq_len, problem.seq_len)
    dk, dv = sums[-2:]
    for layer in reversed(range(len(layers) - 1)):
        below = reference.tree_build_backward(dk, dv, layers[layer][0].shape[1], rate)
        dk, dv = (total + part for total, part in zip(sums[2 * layer : 2 * layer + 2], below, strict=True))
    return {"out": torch.cat(outs, 1), "dq": torch.cat(dqs, 1), "dk": dk, "dv": dv}


def _p99(actual: Tensor, expected: Tensor) -> float:
    errors = (actual.double() - expected).abs().flatten()
    return float(errors.kthvalue(max(1, int(0.99 * errors.numel()))).values)


def judge(problem: Problem, bounds: Mapping[str, float], seed: int, device: str) -> Judgement:
    """Runs the op and the reference on one seed."""
    q, k, v, dout = problem.make(seed, device)
    ops, options = torch.ops.htree, problem.options
    out, gmax, gsum, parents = ops.attention_forward(q, k, v, **options)
    gradients = ops.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    found = Judgement()
    if fault := fault_of_lists(parents, problem.seq_len, problem.seq_len, options):
        found.failures.append(f"lists: {fault}")
        return found
    label = f"seed {seed}: reference under"
    forced = reference_results(q, k, v, dout, problem, parents, f"{label} the op's lists")
    for name, actual in results.items():
        report = compare(actual, forced[name], bounds["final_rtol"], bounds["final_atol"])
        if report.num_bad or not actual.isfinite().all():
            found.failures.append(f"{name}, forced lists: {report}")
    sizes = {"out": largest(v), "gradients": GRADIENT_FACTOR * largest(dout) * largest(q, k, v)}
    a, b = TOLERANCE[problem.dtype]
    for name, actual in results.items():
        atol = a * sizes["out" if name == "out" else "gradients"]
        rtol = b if name == "out" else GRADIENT_FACTOR * b
        report = compare(actual, forced[name], rtol, atol)
        if report.num_bad:
            found.alarms.append(f"{name}, forced lists, tolerance of the op: {report}")
    free = reference_results(q, k, v, dout, problem, None, f"{label} its own lists")
    for name, actual in results.items():
        found.p99[name] = _p99(actual, free[name])
        bound = bounds["out_p99_atol" if name == "out" else "grad_p99_atol"]
        if not found.p99[name] <= bound:
            found.alarms.append(
                f"{name}, free selection: 99th percentile {found.p99[name]:.3e} above {bound:g}"
            )
    return found


#: What a case may be off by, relative to the largest element of the reference: roundings to the dtype of the result,
#: and roundings of fp32 within its sums of at most 64 terms.
ROUNDINGS, SUM_ROUNDINGS = 4, 64


def make_cases(dtype: torch.dtype, device: str) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Small calls of the other op families, by op: each gives its result and the reference's in float64."""
    generator = torch.Generator("cpu").manual_seed(0)
    ops = torch.ops.htree

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    x, weight, angles = draw(2, 9, 64), draw(64), torch.arange(9.0, device=device)[:, None] * 0.1
    cos, sin = (f(angles * torch.arange(1, 17, device=device)).repeat(1, 2) for f in (torch.cos, torch.sin))
    heads, rows = x.unflatten(-1, (2, 32)), draw(2, 2, 40, 64)

    def same(
        op: Callable[..., Tensor], plain: Callable[..., Tensor], *arguments: Any
    ) -> tuple[Tensor, Tensor]:
        return op(*arguments), plain(*(a.double() if isinstance(a, Tensor) else a for a in arguments))

    def quantize() -> tuple[Tensor, Tensor]:
        codes, scale, _ = ops.fp8_quantize(x)
        wanted, wanted_scale, _ = fp8.quantize(x)
        return codes.double() / scale, fp8.dequantize(wanted, wanted_scale)

    def gemm() -> tuple[Tensor, Tensor]:
        (a, a_scale, _), (b, b_scale, _) = ops.fp8_quantize(x[0]), ops.fp8_quantize(draw(64, 32))
        return ops.fp8_gemm(a, b, a_scale, b_scale), fp8.gemm(a, b, a_scale, b_scale)

    def decode() -> tuple[Tensor, Tensor]:
        stored = (*ops.kv_compress(rows, 32), *ops.kv_compress(rows.flip(2), 32))
        options: dict[str, Any] = {"k_keep": 32, "v_keep": 32}
        arguments = (draw(2, 4, 64), *stored, draw(2, 2, 3, 64), draw(2, 2, 3, 64))
        wanted, _ = compressed_kv.kv_decode_attention(*arguments, **options)
        return ops.kv_decode_attention(*arguments, **options)[0], wanted

    def cached() -> tuple[Tensor, Tensor]:
        q, k, v = draw(2, 50, 4, 32), draw(2, 50, 2, 32), draw(2, 50, 2, 32)
        sizes: dict[str, Any] = {"compression_rate": 4, "max_top_nodes": 16}
        cache = htree_ops.TreeKVCache(2, 2, 32, 50, top_k=16, dtype=dtype, device=device, **sizes)
        cache.append(k, v)
        found = reference.htree_forward_naive(
            q, k, v, top_k_per_layer=16, compute_dtype=torch.float64, **sizes
        )
        out, _ = cache.attend(q[:, -1:], return_lse=True)
        return out, found.out[:, -1:]

    return {
        "causal_softmax": lambda: same(ops.causal_softmax, causal_softmax.causal_softmax, rows[0]),
        "hadamard_transform": lambda: same(ops.hadamard_transform, hadamard.hadamard_transform, x),
        "grouped_hadamard": lambda: same(ops.grouped_hadamard, hadamard.grouped_hadamard, rows, 2),
        "rmsnorm_rope": lambda: same(ops.rmsnorm_rope, rmsnorm_rope.rmsnorm_rope, x, weight, cos, sin),
        "head_rmsnorm_rope": lambda: same(
            ops.head_rmsnorm_rope, rmsnorm_rope.head_rmsnorm_rope, heads, weight[:32], cos, sin
        ),
        "gated_mlp": lambda: same(ops.gated_mlp, gated_mlp.gated_mlp, x, draw(48, 64), draw(48, 64)),
        "fp8_quantize": quantize,
        "fp8_gemm": gemm,
        "kv_decode_attention": decode,
        "tree_cache_attention": cached,
    }


def check_families(dtype: torch.dtype, device: str) -> list[str]:
    """Runs the ten cases, prints a line for each, and returns the names of those that are wrong."""
    wrong = []
    for name, case in make_cases(dtype, device).items():
        actual, expected = case()
        kind = actual.dtype if actual.is_floating_point() else torch.float32
        roundings = ROUNDINGS * torch.finfo(kind).eps + SUM_ROUNDINGS * torch.finfo(torch.float32).eps
        bound = roundings * largest(expected)
        report = compare(actual, expected, atol=bound)
        print(f"{name}: {FAIL if report.num_bad else PASS}  {report if report.num_bad else ''}".rstrip())
        if report.num_bad:
            wrong.append(name)
    return wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command (docs/semantics §6)."""
    parser.add_argument("--seed", type=SEED, default=42, metavar="N", help="seed of the inputs")
    parser.add_argument("--seeds", type=SEED, nargs="+", metavar="N", help="several seeds, instead of --seed")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of q, k and v")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where the op runs; default: cuda where there is a GPU"
    )
    add_sizes(parser, Problem)
    parser.add_argument(
        "--rope-base",
        type=float,
        default=Problem.rope_base,
        metavar="X",
        help="base of the rotary frequencies",
    )
    parser.add_argument(
        "--selection-span", type=at_least(1), metavar="N", help="tokens of a mean that the selection scores"
    )
    parser.add_argument(
        "--open-next", action="store_true", help="half of the selected stand behind the others"
    )
    for name, (default, about) in BOUNDS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=default, metavar="X", help=about)
    parser.add_argument("--fail-on-alarm", action="store_true", help="exit status 1 for PASS_WITH_ALARM too")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per case and per seed, reasons below it, and a last line with the worst status; returns that."""
    bounds = {name: getattr(arguments, name) for name in BOUNDS}
    if not all(0 <= bound < float("inf") for bound in bounds.values()):
        raise UsageError("tolerances must be finite and at least 0")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {name: getattr(arguments, name) for name in Problem.__dataclass_fields__ if name != "dtype"}
    problem = Problem(**sizes, dtype=DTYPES[arguments.dtype])
    free = free_memory(device)
    if problem.input_bytes > free:
        needed = f"the inputs of --batch and --seq-len take {problem.input_bytes / 1e9:.1f} GB"
        raise UsageError(f"not enough memory: {needed}, {free / 1e9:.1f} GB are free")
    statuses = [FAIL] if check_families(problem.dtype, device) else []
    for seed in arguments.seeds or [arguments.seed]:
        try:
            found = judge(problem, bounds, seed, device)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UsageError(str(error).splitlines()[0]) from error
        percentiles = " ".join(f"p99 {name} {value:.2e}" for name, value in found.p99.items())
        print(f"seed {seed}: {found.status}  {percentiles}".rstrip(), flush=True)
        for reason in (*found.failures, *found.alarms):
            print(f"  {reason}")
        statuses.append(found.status)
    worst = FAIL if FAIL in statuses else ALARM if ALARM in statuses else PASS
    seeds = counted(len(arguments.seeds or [arguments.seed]), "seed")
    print(f"{worst} ({seeds}, {arguments.dtype}, {device})")
    return int(worst == FAIL or (worst == ALARM and arguments.fail_on_alarm))


COMMAND = Command(
    "correctness",
    """Runs a small case of each of ten ops of the other families, then compares tree attention and its gradients with a
reference in float64, once per seed. A seed is judged twice:

* With the lists that the op selected. Every element of the output and of the gradients must be finite and within
  --final-atol + --final-rtol * |reference|, else FAIL.
* With the lists that the reference selects itself. PASS_WITH_ALARM says that the 99th percentile of an error exceeds
  --out-p99-atol or --grad-p99-atol, or that a stricter bound with the op's lists was missed.

Status 1 for FAIL; 2 for wrong use.""",
    add_arguments,
    run,
)
