"""The methods of docs/own_selection.md beside plain attention under a mask."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import normal
from tests.support.pages import blocks_of

SHAPES = [(1, 96, 4, 2), (2, 150, 4, 4), (2, 70, 6, 1), (1, 9, 2, 2)]  # B, T, H, H_kv
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda x: "x".join(map(str, x)))
BLOCK, COUNT, DIM = 16, 3, 32


@functools.cache
def of_the_page(name: str) -> Callable[..., Tensor]:
    names: dict[str, Any] = {}
    for block in blocks_of("docs/own_selection.md", "python"):
        if f"def {name}(" in block:
            exec(block, names)
    return names[name]


def masked(q: Tensor, k: Tensor, v: Tensor, lists: list[list[list[set[int]]]]) -> Tensor:
    """Attention in float64 of a query on the tokens up to its own of the blocks ``lists[b][t][h]``, h a query head."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bjhd->bhtj", q, k) * q.shape[-1] ** -0.5
    seen = torch.zeros(scores.shape, dtype=torch.bool)
    for b, rows in enumerate(lists):
        for t, heads in enumerate(rows):
            for h, blocks in enumerate(heads):
                for block in blocks:
                    seen[b, h, t, block * BLOCK : min((block + 1) * BLOCK, t + 1)] = True
    scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
    return torch.einsum("bhtj,bjhd->bthd", scores.softmax(-1), v)


def problem(shape: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    B, T, H, H_kv = shape
    return tuple(normal((B, T, h, DIM), torch.float32, device, i) for i, h in enumerate((H, H_kv, H_kv)))


def with_gradients(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, normal(tuple(out.shape), out.dtype, out.device, 9))]


def best(scores: list[float], count: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda n: (-scores[n], n))[: max(count, 0)])


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=2e-5)


@by_shape
def test_moba(shape, device):
    tensors = problem(shape, device)
    q, k, _ = (x.cpu().double() for x in tensors)
    group = q.shape[2] // k.shape[2]

    def blocks(b, t, h):
        own = t // BLOCK
        means = [k[b, n * BLOCK : (n + 1) * BLOCK, h // group].mean(0) for n in range(own)]
        return {own} | best([float(q[b, t, h] @ mean) for mean in means], COUNT - 1)

    lists = [[[blocks(b, t, h) for h in range(shape[2])] for t in range(shape[1])] for b in range(shape[0])]
    found = with_gradients(lambda q, k, v: of_the_page("moba")(q, k, v, COUNT, BLOCK), tensors)
    assert_equal(found, with_gradients(lambda q, k, v: masked(q, k, v, lists).float(), tensors))


@by_shape
def test_nsa(shape, device):
    B, T, H, H_kv = shape
    local, count, group = 2, 4, H // H_kv
    tensors = (*problem(shape, device), torch.rand(B, T, H, 3, generator=torch.manual_seed(3)).to(device))

    def compressed(q, k, v):
        """The branch of means and its weights [B, T, H, blocks], a row at a time."""
        weights, rows = torch.zeros(B, T, H, T // BLOCK, dtype=torch.float64), []
        for t in range(T):
            own = t // BLOCK
            if own == 0:
                rows.append(q[:, t] * 0)
                continue
            means, values = (
                torch.stack([x[:, n * BLOCK : (n + 1) * BLOCK].mean(1) for n in range(own)], 1)
                .repeat_interleave(group, 2)
                .double()
                for x in (k, v)
            )
            p = (torch.einsum("bhd,bnhd->bhn", q[:, t].double(), means) * DIM**-0.5).softmax(-1)
            weights[:, t, :, :own] = p.detach().cpu()
            rows.append(torch.einsum("bhn,bnhd->bhd", p, values).float())
        return torch.stack(rows, 1), weights

    _, weights = compressed(*tensors[:3])
    importance = weights.unflatten(2, (H_kv, group)).sum(3)

    def blocks(b, t, h):
        own = t // BLOCK
        always = {0, *range(max(own - local + 1, 0), own + 1)}
        rest = [n for n in range(own) if n not in always]
        scores = [float(importance[b, t, h // group, n]) for n in rest]
        return always | {rest[i] for i in best(scores, count - len(always))}

    every = [(b, t, h) for b in range(B) for t in range(T) for h in range(H)]
    selected = [[[blocks(b, t, h) for h in range(H)] for t in range(T)] for b in range(B)]
    newest = [
        [[set(range(max(t // BLOCK - local + 1, 0), t // BLOCK + 1))] * H for t in range(T)] for _ in range(B)
    ]
    assert all(len(selected[b][t][h]) <= count for b, t, h in every)

    def wanted(q, k, v, gates):
        branches = compressed(q, k, v)[0], masked(q, k, v, selected), masked(q, k, v, newest)
        return sum(x.float() * gates[..., i : i + 1] for i, x in enumerate(branches))

    found = with_gradients(lambda *x: of_the_page("nsa")(*x, count, BLOCK, local), tensors)
    assert_equal(found, with_gradients(wanted, tensors))


@pytest.mark.parametrize("queries", [None, 1], ids=["all", "one"])
@by_shape
def test_quest(shape, queries, device):
    B, T, H, H_kv = shape
    tensors = problem(shape, device)
    q, k, _ = (x.cpu().double() for x in tensors)
    group = H // H_kv

    def bound(b, t, h, n):
        """The largest product with a key whose every channel is one of the page's, summed over the heads of a group."""
        page = k[b, n * BLOCK : (n + 1) * BLOCK, h]
        return float((q[b, t, h * group : (h + 1) * group, None] * page).amax(1).sum())

    def blocks(b, t, h):
        own = t // BLOCK
        return {own} | best([bound(b, t, h // group, n) for n in range(own)], COUNT - 1)

    lists = [[[blocks(b, t, h) for h in range(H)] for t in range(T)] for b in range(B)]
    found = of_the_page("quest")(tensors[0][:, -queries if queries else 0 :], *tensors[1:], COUNT, BLOCK)
    wanted = masked(*tensors, lists)
    assert_equal([found], [wanted[:, -queries if queries else 0 :]])
