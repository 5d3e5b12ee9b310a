"""Packed documents: where they lie in a batch, calls with the gradients of their rows, and calls for each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import normal


def offsets(lengths: tuple[int, ...], device: str | torch.device) -> Tensor:
    """int32 [0, n_1, n_1 + n_2, ...]."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


@dataclass(frozen=True, kw_only=True)
class DocumentFields:
    """Documents of ``lengths`` keys, of which the last ``queries`` ask (None: all), and ``spare`` rows behind them."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    spare: int = 0

    @property
    def queries_of(self) -> tuple[int, ...]:
        """Queries of each document."""
        return self.lengths if self.queries is None else self.queries

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of queries and of keys."""
        return sum(self.queries_of) + self.spare, sum(self.lengths) + self.spare

    def make_offsets(self, device: str | torch.device) -> tuple[Tensor, Tensor]:
        """cu_seq_q and cu_seq_k: the same tensor where all tokens are queries."""
        keys = offsets(self.lengths, device)
        return (keys if self.queries is None else offsets(self.queries, device)), keys

    @property
    def bounds(self) -> tuple[int, int]:
        """max_q and max_k."""
        return max(self.queries_of, default=0), max(self.lengths, default=0)

    def places(self, device: str | torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Both offsets and both bounds."""
        return *self.make_offsets(device), *self.bounds

    def rows(self) -> list[tuple[slice, slice]]:
        """The rows of each document among the queries and among the keys."""
        ends = [
            torch.tensor(x, dtype=torch.int64).cumsum(0).tolist() for x in (self.queries_of, self.lengths)
        ]
        return [
            (slice(q - n_q, q), slice(k - n_k, k))
            for q, k, n_q, n_k in zip(*ends, self.queries_of, self.lengths, strict=True)
        ]


def one_by_one(case: Any, like: Tensor, call: Callable[..., Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``call(queries, keys)`` for each document that has queries; behind the last one 0 and -inf."""
    size = (1, case.spare, case.H, case.V)
    state = torch.promote_types(case.dtype, torch.float32)
    parts = [call(*rows) for rows, queries in zip(case.rows(), case.queries_of, strict=True) if queries]
    parts.append((like.new_zeros(size), like.new_full(size[:3], -torch.inf, dtype=state)))
    out, lse = (torch.cat(x, 1)[0] for x in zip(*parts, strict=True))
    return out, lse


def with_gradients(
    call: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Any], seed: int = 99, of: str = "both"
) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv, dsinks or nothing) for fixed gradients of out and of lse; ``of`` names those that count.

    A dead row's lse is -inf, and a loss that reads it is not finite, but its gradient is that of a constant.
    """
    leaves = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    ]
    out, lse = call(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    pairs = [(x, normal(tuple(x.shape), x.dtype, x.device, seed + i)) for i, x in enumerate((out, lse))]
    chosen = {"both": pairs, "out": pairs[:1], "lse": pairs[1:]}[of]
    counted = [pair for pair in chosen if pair[0].requires_grad]  # none of calls for no document
    gradients = torch.autograd.grad(
        [x for x, _ in counted], wanted, [g for _, g in counted], materialize_grads=True
    )
    return (out.detach(), lse.detach(), *gradients)


def assert_others_keep_their_bits(
    case: DocumentFields,
    call: Callable[..., Any],
    inputs: Sequence[Any],
    broken: int,
    which: int,
    value: float,
) -> None:
    """``value`` in input ``which`` of a document and behind all: other rows and their gradients keep their bits."""
    clean = with_gradients(call, inputs)
    rows = case.rows()
    queries, keys = rows[broken]
    own, last = (keys, rows[-1][1]) if which else (queries, rows[-1][0])
    inputs[which][own] = value
    inputs[which][last.stop :] = value
    places = (queries, queries, queries, keys, keys)
    for ours, theirs, lost in zip(with_gradients(call, inputs), clean, places, strict=True):
        kept = torch.ones(len(ours), dtype=torch.bool)
        kept[lost] = False
        assert torch.equal(ours[kept], theirs[kept])
