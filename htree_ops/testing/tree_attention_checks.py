"""How results of tree attention are judged (docs/semantics/tree_attention.md §1.11).

Selections are checked for structure and ε-optimality; outputs, states and gradients against the reference
under the very lists that were selected ("teacher forcing").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from htree_ops.reference import tree_attention as reference
from htree_ops.testing.compare import assert_close_spec

__all__ = [
    "GRADIENT_FACTOR",
    "STATE_TOLERANCE",
    "TOLERANCE",
    "assert_epsilon_optimal",
    "assert_gradients",
    "assert_lists",
    "assert_output",
    "assert_state",
    "forced",
    "reference_gradients",
]

#: (a, b) of |out - ref| <= a * max|v| + b * |ref|. float64 leaves room for a few hundred roundings.
TOLERANCE = {
    torch.float32: (2e-5, 1e-4),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (8e-3, 8e-3),
    torch.float64: (1e-12, 1e-12),
}

#: The same for states, which are fp32 whatever the inputs (fp64 for fp64).
STATE_TOLERANCE = {
    torch.float32: TOLERANCE[torch.float32],
    torch.float16: TOLERANCE[torch.float32],
    torch.bfloat16: TOLERANCE[torch.float32],
    torch.float64: TOLERANCE[torch.float64],
}

GRADIENT_FACTOR = 5.0  # gradients may err this much more than outputs
SCORE_DELTA = 1e-4  # importances within this relative distance count as equal for fp32 scores
#: The share of rows that may hold an element which int8 rounds the other way, as its rotation ends in other digits.
ROUNDED_OTHERWISE = 0.01

Triple = tuple[Tensor, Tensor, Tensor]


def _largest(*tensors: Tensor) -> float:
    """Largest finite magnitude; 0 for empty tensors."""
    parts = [x.detach().double().abs().nan_to_num(0.0, 0.0, 0.0) for x in tensors]
    return max((float(part.max()) for part in parts if part.numel()), default=0.0)


def forced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Sequence[Tensor],
    options: dict[str, Any],
    with_importance: bool = False,
) -> reference.Forward:
    """Reference in float64 arithmetic that uses the given lists, one per layer; on the inputs' device."""
    return reference.htree_forward_naive(
        q,
        k,
        v,
        **options,
        parents=list(parents),
        with_importance=with_importance,
        compute_dtype=torch.float64,
    )


def assert_output(out: Tensor, expected: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert out [B,T,H,V] against the float64 reference with the tolerance of its dtype."""
    __tracebackhide__ = True
    a, b = TOLERANCE[dtype or out.dtype]
    assert_close_spec(out, expected, rtol=b, atol=a * _largest(v), dtype=out.dtype, name="out")


def assert_state(state: Triple, expected: Triple, v: Tensor) -> None:
    """Assert a state (max [B,T,H], sum [B,T,H], out [B,T,H,V]) after re-basing to the larger max.

    An empty state must be exactly (-inf, 0, 0) on both sides.
    """
    __tracebackhide__ = True
    a, b = STATE_TOLERANCE[v.dtype]
    top, total, out = (x.double() for x in state)
    ref_top, ref_total, ref_out = (x.double() for x in expected)
    common = torch.maximum(top, ref_top)
    base = torch.where(common == -torch.inf, 0.0, common)
    ours, theirs = torch.exp(top - base), torch.exp(ref_top - base)
    weight = ref_total * theirs
    assert_close_spec(total * ours, weight, rtol=a + b, atol=0.0, name="sum")
    atol = (a * _largest(v) * weight).nan_to_num(0.0)[..., None]
    assert_close_spec(out * ours[..., None], ref_out * theirs[..., None], rtol=b, atol=atol, name="state out")
    empty = ref_total == 0
    assert_close_spec(top[empty], ref_top[empty], rtol=0.0, atol=0.0, name="max of an empty state")


def assert_gradients(
    gradients: Sequence[Tensor | None],
    expected: Sequence[Tensor],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dlse: Tensor | None = None,
) -> None:
    """Assert (dq, dk, dv), any of them None, against float64 ones: 5 times the tolerance of outputs."""
    __tracebackhide__ = True
    for name, gradient, wanted in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        if gradient is None:
            continue
        a, b = TOLERANCE[gradient.dtype]
        atol = GRADIENT_FACTOR * a * _largest(dout, *([] if dlse is None else [dlse])) * _largest(q, k, v)
        assert_close_spec(
            gradient, wanted, rtol=GRADIENT_FACTOR * b, atol=atol, dtype=gradient.dtype, name=name
        )


#: Query elements times keys, above which the tape of a reference takes more than about a gigabyte.
LARGE_TAPE = 1 << 26


def reference_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    parents: Sequence[Tensor],
    options: dict[str, Any],
    dlse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv in float64 by autograd through the reference under the given lists, from gradients of out and lse.

    Large problems go one K/V head of one batch after the other: the tape of all would take gigabytes.
    """
    if q.numel() * k.shape[1] < LARGE_TAPE:
        return _gradients_of_a_part(q, k, v, dout, parents, options, dlse)
    gradients = tuple(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    group = q.shape[2] // max(k.shape[2], 1)
    for batch in range(k.shape[0]):
        for head in range(k.shape[2]):
            queries = (slice(batch, batch + 1), slice(None), slice(head * group, (head + 1) * group))
            keys = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
            lists = [x[keys] for x in parents]
            of_lse = None if dlse is None else dlse[queries]
            found = _gradients_of_a_part(q[queries], k[keys], v[keys], dout[queries], lists, options, of_lse)
            for gradient, place, part in zip(gradients, (queries, keys, keys), found, strict=True):
                gradient[place] = part
    return gradients


def _gradients_of_a_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    parents: Sequence[Tensor],
    options: dict[str, Any],
    dlse: Tensor | None,
) -> tuple[Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    # The tree holds values rounded to the storage dtype: differentiate at exactly those values.
    typed = [x.detach().to(y.dtype) for x, y in zip(leaves, (q, k, v), strict=True)]
    taped = [_identity(x, leaf) for x, leaf in zip(typed, leaves, strict=True)]
    forward = reference.htree_forward_naive(
        *taped, **options, parents=list(parents), compute_dtype=torch.float64
    )
    if not forward.out.requires_grad:  # without a query nothing depends on the keys
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    if dlse is None:
        return torch.autograd.grad(forward.out, leaves, dout.double())
    return torch.autograd.grad((forward.out, forward.lse), leaves, (dout.double(), dlse.double()))


class _Widen(torch.autograd.Function):
    """x in its storage dtype whose gradient goes, unrounded, to a float64 leaf."""

    @staticmethod
    def forward(ctx: Any, typed: Tensor, leaf: Tensor) -> Tensor:
        return typed.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _identity(typed: Tensor, leaf: Tensor) -> Tensor:
    return _Widen.apply(typed, leaf)


def assert_lists(parents: Sequence[Tensor], num_queries: int, length: int, options: dict[str, Any]) -> None:
    """Assert the exact structure of the lists of every layer (§1.3, §1.11).

    Each is int32 [B,ceil(T_q/s),S,k]: ascending and unique, -1 only at the tail, the last one the parent
    that contains the query, min(k, n) entries, children of the layer above's entries.
    """
    __tracebackhide__ = True
    rate, top_k = options["compression_rate"], options["top_k_per_layer"]
    stride = options.get("selection_stride", 1)
    sizes = reference.layer_sizes(length, rate, options["max_top_nodes"])
    assert len(parents) == len(sizes), f"{len(parents)} lists for {len(sizes)} layers"
    t0 = length - num_queries
    times = torch.arange(t0, length, stride, device=parents[0].device)
    for layer, lists in enumerate(parents):
        assert lists.dtype == torch.int32
        got = (lists.shape[1], lists.shape[3])
        assert got == (times.numel(), top_k), f"layer {layer}: {tuple(lists.shape)}"
        num = reference.num_parents(lists)
        slots = torch.arange(top_k, device=lists.device)
        assert ((lists == -1) == (slots >= num[..., None])).all(), f"layer {layer}: -1 inside a list"
        steps = lists.diff(dim=-1)
        inner = slots[1:] < num[..., None]
        assert (steps[inner] > 0).all(), f"layer {layer}: not ascending"
        last = lists.gather(-1, (num - 1).clamp(min=0)[..., None])[..., 0].long()
        own = (times // rate**layer // rate).view(1, -1, 1)
        assert (last == own).all(), f"layer {layer}: the last parent does not contain the query"
        if layer == len(sizes) - 1:
            wanted = reference.top_parents(
                lists.shape[0],
                num_queries,
                lists.shape[2],
                top_k,
                len(sizes),
                rate,
                t0,
                stride,
                device=lists.device,
            )
            assert torch.equal(lists, wanted), "the top list is not the virtual one"
            continue
        n_above = (
            (reference.num_parents(parents[layer + 1]) - 1) * rate
            + (times // rate ** (layer + 1) % rate).view(1, -1, 1)
            + 1
        )
        assert (num == n_above.clamp(max=top_k)).all(), f"layer {layer}: wrong number of parents"
        families = torch.div(lists.long(), rate, rounding_mode="floor").masked_fill(lists == -1, -1)
        known = (families[..., :, None] == parents[layer + 1].long()[..., None, :]).any(-1)
        assert known[lists != -1].all(), f"layer {layer}: a parent that is no child of the list above"


def assert_epsilon_optimal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Sequence[Tensor],
    options: dict[str, Any],
    delta: float = SCORE_DELTA,
) -> None:
    """Assert that no dropped candidate beats a selected one by more than a factor 1 - delta (§1.11 (i)).

    Importances are recomputed in float64 from the lists themselves. Rows with a NaN importance are skipped. With
    scores in int8 one row in a hundred may miss that factor by what a step of two elements of each row is worth.
    With open_next the same holds of the ceil(k/2) best and of the rest, and what stands behind the best is selected.
    """
    __tracebackhide__ = True
    stride = options.get("selection_stride", 1)
    steps = 0.0
    if options.get("selection_dtype") is not None:
        scale = q.shape[-1] ** -0.5 if options.get("scale") is None else abs(options["scale"])
        steps = (
            8 * scale * _largest(q) * _largest(k) / 127
        )  # rotation makes an element sqrt(2) times as large
    for step in forced(q, k, v, parents, options, with_importance=True).trace:
        importance = step.importance
        if importance is None or not step.scores.numel():
            continue
        num = step.candidates.num[:, ::stride]
        positions = torch.arange(importance.shape[-1], device=importance.device)
        free = positions < num[..., None] - 1
        selected = step.selected[:, ::stride]
        worst = importance.masked_fill(~(selected & free), torch.inf).amin(-1)
        best = importance.masked_fill(selected | ~free, -torch.inf).amax(-1)
        sound = ~(importance.isnan() & free).any(-1)
        if options.get("open_next"):
            slack = delta if not steps else 1 - math.exp(-steps) * (1 - delta)
            must, may = _best_and_behind(importance, free, num, options["top_k_per_layer"], slack)
            lacking = sound & (must & free & ~selected).any(-1)
            assert not lacking.any(), (
                f"layer {step.layer}: at {lacking.nonzero()[0].tolist()} one of the best candidates, or one behind "
                "them, is not selected"
            )
            worst = importance.masked_fill(~(selected & free) | may, torch.inf).amin(-1)
        broken = sound & (worst < best * (1 - delta))
        if steps and broken.sum() <= max(1, ROUNDED_OTHERWISE * broken.numel()):
            broken = broken & (worst < best * math.exp(-steps) * (1 - delta))
        assert not broken.any(), (
            f"layer {step.layer}: at {broken.nonzero()[0].tolist()} a selected candidate has importance "
            f"{worst[broken][0]:.6e}, a dropped one {best[broken][0]:.6e}"
        )


def _best_and_behind(
    importance: Tensor, free: Tensor, num: Tensor, top_k: int, slack: float
) -> tuple[Tensor, Tensor]:
    """Candidates [B,T,S,C] that open_next selects as the best or behind them: those that are sure, those that may be.

    A candidate is surely one of the best if it is so by more than the factor 1 - ``slack``.
    """
    count = -(-top_k // 2) - 1  # beside the rightmost
    if count < 1 or importance.shape[-1] <= count:
        nothing = torch.zeros_like(free)
        return nothing, nothing
    known = importance.masked_fill(~free, -1.0).nan_to_num(-1.0)
    ranked = known.sort(dim=-1, descending=True).values
    last, following = ranked[..., count - 1, None], ranked[..., count, None]
    selects = (num > top_k)[..., None] & free
    sure = selects & (known * (1 - slack) > following)
    possible = selects & (known >= last * (1 - slack))

    def and_behind(best: Tensor) -> Tensor:
        return (best | torch.nn.functional.pad(best, (1, 0))[..., :-1]) & selects

    return and_behind(sure), and_behind(possible)
