"""Packed documents of different lengths, beside what each would take in a full batch, and beside dense attention.

Run: ``python -m benchmarks.varlen_batches --csv PATH`` on a GPU with 40 GB; ``--quick`` for a look at fewer documents.
Three questions, forward and backward, each with a yardstick that ``multiple`` divides by:

* ``spread``, documents of very different lengths: the sum over documents of the time of a batch of that length that
  fills the GPU, divided by its size. What is above 1 is padding, copies and launches.
* ``equal``, documents of one length: ``tree_attention`` of the same tensors as a batch.
* ``dense``, documents of which no key is left out: ``torch.nn.attention.varlen.varlen_attn``, causal, without rotation;
  on the CPU ``scaled_dot_product_attention``, one document after the other.

Figures are reported, never asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import htree_ops  # noqa: F401 - registers the ops
from benchmarks.harness import timing
from benchmarks.harness.calls import backward_of, medians_ms
from benchmarks.harness.plain_rows import Row, make_parser, measure_each, parse_for_gpu, where
from benchmarks.harness.progress import progress
from htree_ops.tuning.clock import Call
from tests.support.tree_attention_varlen_cases import BENCHMARK_CASES, VarlenCase

#: Tokens of a batch that fills the GPU.
FULL_BATCH = 65_536


def calls_of(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, list[Call]]:
    """The call of each direction."""
    return {"forward": [partial(attend, *inputs)], "backward": [backward_of(attend, inputs)]}


def attend_packed(
    case: VarlenCase, cu: Tensor, longest: int, grouping: str, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    sizes = (cu, cu, longest, longest)
    return torch.ops.htree._attention_varlen(q, k, v, None, None, *sizes, grouping, *case.packed())[0]


def attend_batch(case: VarlenCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equal documents as a batch; the backward selects again, as that of packed documents does."""
    batch = (x.unflatten(0, (len(case.lengths), case.lengths[0])) for x in (q, k, v))
    return torch.ops.htree._attention(*batch, False, *case.packed()).flatten(0, 1)


def attend_densely(case: VarlenCase, cu: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """varlen_attn on a GPU; it has no kernel for the CPU, where documents run one by one."""
    from torch.nn.attention.varlen import varlen_attn

    if not q.is_cuda:
        documents = zip(*(x.transpose(0, 1).split(case.lengths, 1) for x in (q, k, v)), strict=True)
        rows = [
            scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True) for a, b, c in documents
        ]
        return torch.cat(rows, 1).transpose(0, 1)
    longest = max(case.lengths)
    out = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))
    assert isinstance(out, Tensor)  # a pair only where more is asked for
    return out


def full_batches(case: VarlenCase, device: str, effort: timing.Effort) -> dict[str, float]:
    """For each direction the sum over documents of their share of a full batch."""
    total = {"forward": 0.0, "backward": 0.0}
    for length in progress(case.lengths, lambda length: f"full batch of {length}"):
        count = max(1, -(-FULL_BATCH // length)) if device == "cuda" else 1
        batch = replace(case, lengths=(length,) * count)
        calls = calls_of(partial(attend_batch, batch), batch.make_qkv(device))
        for direction, time in medians_ms(calls, device, effort).items():
            total[direction] += time / count
    return total


def measure(case: VarlenCase, grouping: str, bounded: bool, device: str, effort: timing.Effort) -> list[Row]:
    """A row for each direction. ``bounded``: with offsets for as many documents as tokens."""
    inputs, cu = case.make_qkv(device), case.make_offsets(device)[0]
    given, longest = cu, max(case.lengths)
    if bounded:
        longest = sum(case.lengths)
        given = torch.cat((cu, cu.new_full((longest + 1 - len(cu),), longest)))
    calls = calls_of(partial(attend_packed, case, given, longest, grouping), inputs)
    if case.name == "spread":
        yardstick, theirs = "sum of full batches", full_batches(case, device, effort)
        ours = medians_ms(calls, device, effort)
    else:
        equal = case.name == "equal"
        dense = "varlen_attn" if device == "cuda" else "SDPA by document"
        yardstick = "tree_attention" if equal else dense
        other = calls_of(partial(attend_batch, case) if equal else partial(attend_densely, case, cu), inputs)
        ours, theirs = {}, {}
        for direction, call in calls.items():
            both = medians_ms({"ours": call, "theirs": other[direction]}, device, effort)
            ours[direction], theirs[direction] = both["ours"], both["theirs"]
    return [
        {
            **where(device),
            "batch": case.name,
            "grouping": f"{grouping}, as many offsets as tokens" if bounded else grouping,
            "direction": direction,
            "documents": len(case.lengths),
            "tokens": sum(case.lengths),
            "selection_stride": case.selection_stride,
            "median_ms": time,
            "yardstick": yardstick,
            "yardstick_ms": theirs[direction],
            "multiple": time / theirs[direction],
        }
        for direction, time in ours.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it where ``--csv`` says."""
    parser = make_parser(
        "time of packed documents", rounds=5, quick="every fourth document, few repetitions", cpu=True
    )
    parser.add_argument("--batch", choices=("spread", "equal", "dense"), help="this one alone")
    parser.add_argument(
        "--grouping", default="auto", help="as of _attention_varlen (default %(default)s); rank never waits"
    )
    parser.add_argument(
        "--bounded",
        action="store_true",
        help="offsets for as many documents as tokens, as a compiled model gives them that finds documents itself",
    )
    arguments = parse_for_gpu(parser, argv)
    cases, effort = BENCHMARK_CASES[arguments.device], timing.Effort(rounds=arguments.rounds)
    if arguments.quick:
        cases, effort = [replace(case, lengths=case.lengths[::4]) for case in cases], timing.QUICK
    if arguments.batch:
        cases = [case for case in cases if case.name == arguments.batch]
    return measure_each(
        cases,
        lambda case: f"{case.name} stride {case.selection_stride}",
        lambda case: measure(case, arguments.grouping, arguments.bounded, arguments.device, effort),
        arguments.csv,
    )


if __name__ == "__main__":
    sys.exit(main())
