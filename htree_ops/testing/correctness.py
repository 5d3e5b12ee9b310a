"""Tree attention, forward and backward, against the float64 reference: ``python -m htree_ops correctness``.

Each seed is judged twice (docs/semantics §1.11). Under the lists that the op selected ("forced") every
element of the output and of the gradients must be finite and within --final-atol + --final-rtol * |reference|,
and the lists must be well formed, else FAIL. PASS_WITH_ALARM says that a stricter bound was exceeded: the
tolerances of §1.11 under forced lists, or, where the reference selects by itself ("free"), the 99th percentile of
the error of the output (--out-p99-atol) or of a gradient (--grad-p99-atol). Exit status: 0, 1 for FAIL (and for
an alarm with --fail-on-alarm), 2 for bad use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import htree_ops  # noqa: F401  registers torch.ops.htree
from htree_ops.bench.progress import progress
from htree_ops.command_line import SEED, Command, UsageError, add_sizes, at_least, free_memory
from htree_ops.reference import tree_attention as reference
from htree_ops.reference.tree_attention import selection, stages, state
from htree_ops.reference.tree_attention.attention import listed_candidates
from htree_ops.testing import tree_attention_checks as checks
from htree_ops.testing.compare import compare

__all__ = ["COMMAND", "Judgement", "Problem", "judge"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PASS, ALARM, FAIL = "PASS", "PASS_WITH_ALARM", "FAIL"
#: Elements of the gathered keys of one piece of query rows, in float64: 256 MiB.
PIECE_ELEMENTS = 1 << 25


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
        return {
            "compression_rate": self.compression_rate,
            "max_top_nodes": self.max_top_nodes,
            "top_k_per_layer": self.top_k_per_layer,
            "rope_base": self.rope_base,
            "selection_span": self.selection_span,
            "open_next": self.open_next,
        }

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
            torch.randn(self.batch, self.seq_len, *shape, generator=generator).to(device, self.dtype)
            for shape in shapes
        )


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Tolerances of the command line."""

    final_atol: float = 3e-2
    final_rtol: float = 3e-2
    out_p99_atol: float = 5e-3
    grad_p99_atol: float = 1e-2


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


def _rows(
    q: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    span_k: Tensor | None,
    table: Tensor,
    problem: Problem,
    t0: int,
    lists: Sequence[Tensor] | None,
) -> Tensor:
    """Reference output [B,rows,H,V] of the query rows t0 ...; `lists` replace its own selection."""
    rate, top_k = problem.compression_rate, problem.top_k_per_layer
    parents = reference.top_parents(
        q.shape[0], q.shape[1], problem.h_kv, top_k, len(layers), rate, t0, device=q.device
    )
    total = state.empty_state(q.shape[0], q.shape[1], q.shape[2], problem.v_dim, q)
    for layer in reversed(range(len(layers))):
        keys, values = layers[layer]
        parents = parents if lists is None else lists[layer]
        busy = parents[..., : int(reference.num_parents(parents).max())]
        found = reference.candidates(busy, layer, keys.shape[1], rate, t0)
        scores = stages.score_candidates(q, keys, found, table[0], table[1], None)
        kept = found.present
        if layer and lists is not None:
            kept = kept & ~listed_candidates(found, lists[layer - 1])
        elif layer:
            if span_k is None or problem.selection_span is None:
                value = selection.importance_of(scores.detach(), found.num)
            else:
                per_node = rate**layer // problem.selection_span
                value = stages.span_importance(
                    q.detach(), span_k, found, per_node, table[0], table[1], None, "lse_causal"
                )
            positions = selection.select_important(value, found.num, top_k, open_next=problem.open_next)
            parents = selection.compute_next_parents(busy, positions, rate)
            kept = kept & ~selection.positions_mask(positions, scores.shape[-2])
        part = state.accumulate(scores, state.gather_nodes(values, found.nodes), kept)
        total = state.merge_to_global(*total, *part)
    return state.final_normalize(total[2], total[1])


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
    capacity = min(problem.top_k_per_layer * rate, max(layer[0].shape[1] for layer in layers) + rate)
    table = reference.rope_cache(
        problem.top_k_per_layer * rate, problem.k_dim, problem.rope_base, device=q.device
    ).double()
    step = max(
        1, PIECE_ELEMENTS // (problem.batch * problem.h_kv * capacity * (problem.k_dim + problem.v_dim))
    )
    outs, dqs = [], []
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    for first in progress(range(0, problem.seq_len, step), lambda _: label):
        rows = slice(first, first + step)
        query = q[:, rows].double().requires_grad_()
        own = None if lists is None else [one[:, rows] for one in lists]
        out = _rows(query, layers, span_k, table, problem, first, own)
        dq, *parts = torch.autograd.grad(out, [query, *leaves], dout[:, rows].double(), allow_unused=True)
        for total, part in zip(sums, parts, strict=True):
            if part is not None:
                total += part
        outs.append(out.detach())
        dqs.append(dq)
    dk, dv = sums[-2:]
    for layer in reversed(range(len(layers) - 1)):
        below = reference.tree_build_backward(dk, dv, layers[layer][0].shape[1], rate)
        dk, dv = (total + part for total, part in zip(sums[2 * layer : 2 * layer + 2], below, strict=True))
    return {"out": torch.cat(outs, 1), "dq": torch.cat(dqs, 1), "dk": dk, "dv": dv}


def _p99(actual: Tensor, expected: Tensor) -> float:
    errors = (actual.double() - expected).abs().flatten()
    return float(errors.kthvalue(max(1, int(0.99 * errors.numel()))).values)


def judge(problem: Problem, bounds: Bounds, seed: int, device: str) -> Judgement:
    """Runs the op and the reference on one seed."""
    q, k, v, dout = problem.make(seed, device)
    ops, options = torch.ops.htree, problem.options
    out, gmax, gsum, parents = ops.attention_forward(q, k, v, **options)
    gradients = ops.attention_backward(dout, q, k, v, out, gmax, gsum, parents, **options)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    found = Judgement()
    try:
        checks.assert_lists(parents, problem.seq_len, problem.seq_len, options)
    except AssertionError as error:
        found.failures.append(f"lists: {error}")
        return found
    label = f"seed {seed}: reference under"
    forced = reference_results(q, k, v, dout, problem, parents, f"{label} the op's lists")
    for name, actual in results.items():
        report = compare(actual, forced[name], bounds.final_rtol, bounds.final_atol)
        if report.num_bad or not actual.isfinite().all():
            found.failures.append(f"{name}, forced lists: {report}")
    try:
        checks.assert_output(out, forced["out"], v)
        checks.assert_gradients(gradients, [forced[name] for name in ("dq", "dk", "dv")], dout, q, k, v)
    except AssertionError as error:
        found.alarms.append(f"forced lists: {error}")
    free = reference_results(q, k, v, dout, problem, None, f"{label} its own lists")
    for name, actual in results.items():
        found.p99[name] = _p99(actual, free[name])
        bound = bounds.out_p99_atol if name == "out" else bounds.grad_p99_atol
        if not found.p99[name] <= bound:
            found.alarms.append(
                f"{name}, free selection: 99th percentile {found.p99[name]:.3e} above {bound:g}"
            )
    return found


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
    bounds = {
        "final-atol": "largest absolute error",
        "final-rtol": "largest error relative to the reference",
        "out-p99-atol": "99th percentile of the error of the output, reference selecting itself",
        "grad-p99-atol": "the same of the gradients",
    }
    for name, about in bounds.items():
        default = getattr(Bounds, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, default=default, metavar="X", help=about)
    parser.add_argument("--fail-on-alarm", action="store_true", help="exit status 1 for PASS_WITH_ALARM too")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per seed with its reasons below it, and a last line with the worst status.

    Returns:
        1 for FAIL, and with ``--fail-on-alarm`` for PASS_WITH_ALARM, else 0.

    Raises:
        UsageError: impossible sizes or tolerances, no GPU, not enough memory.
    """
    names = ("final_atol", "final_rtol", "out_p99_atol", "grad_p99_atol")
    bounds = Bounds(**{name: getattr(arguments, name) for name in names})
    if not all(0 <= getattr(bounds, name) < float("inf") for name in names):
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
    statuses = []
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
    print(f"{worst} ({len(statuses)} seed{'s' if len(statuses) > 1 else ''}, {arguments.dtype}, {device})")
    return int(worst == FAIL or (worst == ALARM and arguments.fail_on_alarm))


COMMAND = Command(
    "correctness",
    "check tree attention and its gradients against a float64 reference",
    """Compares tree attention and its gradients with a reference in float64, once per seed. A seed is judged twice:

* With the lists that the op selected. Every element of the output and of the gradients must be finite and within
  --final-atol + --final-rtol * |reference|, else FAIL.
* With the lists that the reference selects itself. PASS_WITH_ALARM says that the 99th percentile of an error exceeds
  --out-p99-atol or --grad-p99-atol, or that a stricter bound with the op's lists was missed.

Status 1 for FAIL; 2 for wrong use.""",
    add_arguments,
    run,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
