"""How results of tree attention are judged (docs/semantics/tree_attention.md §1.11).

Selections are checked for structure and ε-optimality; outputs, states and gradients against the reference
under the very lists that were selected ("teacher forcing").
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from htree_ops.correctness import GRADIENT_FACTOR, TOLERANCE, fault_of_lists, largest
from htree_ops.reference import tree_attention as reference
from tests.support.compare import assert_close_spec

#: The same for states, which are fp32 whatever the inputs (fp64 for fp64).
STATE_TOLERANCE = {
    torch.float32: TOLERANCE[torch.float32],
    torch.float16: TOLERANCE[torch.float32],
    torch.bfloat16: TOLERANCE[torch.float32],
    torch.float64: TOLERANCE[torch.float64],
}

SCORE_DELTA = 1e-4  # importances within this relative distance count as equal for fp32 scores

Triple = tuple[Tensor, Tensor, Tensor]


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
    assert_close_spec(out, expected, rtol=b, atol=a * largest(v), dtype=out.dtype, name="out")


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
    atol = (a * largest(v) * weight).nan_to_num(0.0)[..., None]
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
        atol = GRADIENT_FACTOR * a * largest(dout, *([] if dlse is None else [dlse])) * largest(q, k, v)
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
    """Assert the exact structure of the lists of every layer: :func:`htree_ops.correctness.fault_of_lists`."""
    __tracebackhide__ = True
    fault = fault_of_lists(parents, num_queries, length, options)
    assert fault is None, fault


def assert_epsilon_optimal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Sequence[Tensor],
    options: dict[str, Any],
    delta: float = SCORE_DELTA,
) -> None:
    """Assert that no dropped candidate beats a selected one by more than a factor 1 - delta (§1.11 (i)).

    Importances are recomputed in float64 from the lists themselves. Rows with a NaN importance are skipped.
    With open_next the same holds of the ceil(k/2) best and of the rest, and what stands behind the best is selected.
    """
    __tracebackhide__ = True
    stride = options.get("selection_stride", 1)
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
            must, may = _best_and_behind(importance, free, num, options["top_k_per_layer"], delta)
            lacking = sound & (must & free & ~selected).any(-1)
            assert not lacking.any(), (
                f"layer {step.layer}: at {lacking.nonzero()[0].tolist()} one of the best candidates, or one behind "
                "them, is not selected"
            )
            worst = importance.masked_fill(~(selected & free) | may, torch.inf).amin(-1)
        broken = sound & (worst < best * (1 - delta))
        assert not broken.any(), (
            f"layer {step.layer}: at {broken.nonzero()[0].tolist()} a selected candidate has importance "
            f"{worst[broken][0]:.6e}, a dropped one {best[broken][0]:.6e}"
        )


def _best_and_behind(
    importance: Tensor, free: Tensor, num: Tensor, top_k: int, delta: float
) -> tuple[Tensor, Tensor]:
    """Candidates [B,T,S,C] that open_next selects as the best or behind them: those that are sure, those that may be.

    A candidate is surely one of the best if it is so by more than the factor 1 - ``delta``.
    """
    count = -(-top_k // 2) - 1  # beside the rightmost
    if count < 1 or importance.shape[-1] <= count:
        nothing = torch.zeros_like(free)
        return nothing, nothing
    known = importance.masked_fill(~free, -1.0).nan_to_num(-1.0)
    ranked = known.sort(dim=-1, descending=True).values
    last, following = ranked[..., count - 1, None], ranked[..., count, None]
    selects = (num > top_k)[..., None] & free
    sure = selects & (known * (1 - delta) > following)
    possible = selects & (known >= last * (1 - delta))

    def and_behind(best: Tensor) -> Tensor:
        return (best | torch.nn.functional.pad(best, (1, 0))[..., :-1]) & selects

    return and_behind(sure), and_behind(possible)
