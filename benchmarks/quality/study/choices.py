"""Other ways to choose the nodes that a query opens, for evaluations: attention of whole sequences, written out.

``tree_attention`` with own positions (docs/semantics/tree_attention.md §1.5) where every score of a sequence is a
tensor, so that any rule may choose from them. Memory is that of dense attention with stored scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import LanguageModel, dense_attention
from .session import Session
from .settings import RATE, Attention, Substitute, Training

__all__ = ["Choice", "Indexer", "attend_chosen", "fit_indexers", "make_indexers", "with_choice"]

SMALLEST = 2.0**-126  # weights below it count as 0


@dataclass(frozen=True)
class Choice:
    """A rule for the nodes that are opened.

    Attributes:
        span: nodes are scored by the log-sum-exp over means of ``span`` tokens, None for their stored mean.
        stride: queries that share a choice.
        open_next: as of ``tree_attention``: half of the nodes are the best ones, then come the candidates behind them.
        near, near_span: nodes that lie wholly among the last ``near`` tokens are scored by means of ``near_span``.
        upper: nodes opened in the layers above layer 1; 0 for as many as there.
        indexers: one for each layer of the model; they give the scores in place of queries and keys.
        name: of the rule, in rows and tables.
    """

    name: str
    span: int | None = None
    stride: int = 1
    open_next: bool = False
    near: int = 0
    near_span: int = 1
    upper: int = 0
    indexers: Sequence[Indexer] = ()

    def products(self, context: int, head_dim: int) -> float:
        """Products of numbers in the scores that choose among nodes of layer 1, in parts of those of dense attention.

        The last query of ``context`` tokens counts, which shares its choice with ``stride``.
        """
        if self.indexers:
            width, span = self.indexers[0].width, self.indexers[0].span
        else:
            width, span = head_dim, self.span or RATE
        near = min(self.near, context) / context
        rows = (1 - near) / span + (near / self.near_span if self.near else 0.0)
        return rows * width / head_dim / self.stride


class Indexer(nn.Module):
    """Projections of the queries and keys of one layer, for the choice alone.

    A key becomes W k + V silu(U k), without the second part where ``hidden`` is 0; a query becomes W' q. Means of
    ``span`` projected keys are scored. Where nothing is dropped and nothing is trained yet, it scores as
    ``selection_span`` does.

    Args:
        size: heads of the layer. width: of projected queries and keys. hidden: of the part with silu.
    """

    def __init__(self, size: Training, width: int, span: int, hidden: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.width, self.span = width, span
        heads, kv_heads, head_dim = size.heads, size.kv_heads, size.width // size.heads
        generator = torch.Generator().manual_seed(seed)
        rotated = torch.linalg.qr(torch.randn(kv_heads, head_dim, head_dim, generator=generator)).Q[
            ..., :width
        ]
        lengthened = rotated * (head_dim / width) ** 0.5  # products keep their size on average
        self.key = nn.Parameter(lengthened.clone())
        of_group = lengthened[:, None] * head_dim**-0.5
        self.query = nn.Parameter(of_group.repeat(1, heads // kv_heads, 1, 1))
        self.up = nn.Parameter(torch.randn(kv_heads, head_dim, hidden, generator=generator) * head_dim**-0.5)
        self.down = nn.Parameter(torch.zeros(kv_heads, hidden, width))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """q [..., S, G, n, D], k [..., S, T, D] -> scores [..., S, G, n, T / span]."""
        keys = k @ self.key
        if self.up.shape[-1]:
            keys = keys + F.silu(k @ self.up) @ self.down
        means = keys.unflatten(-2, (-1, self.span)).mean(-2)
        return q @ self.query @ means.transpose(-1, -2).unsqueeze(-3)


def make_indexers(size: Training, width: int, span: int, hidden: int = 0) -> list[Indexer]:
    """One for each layer of a model of ``size``."""
    return [Indexer(size, width, span, hidden, seed=layer) for layer in range(size.layers)]


def pooled(x: Tensor, count: int) -> Tensor:
    """Means of ``count`` rows of [..., T, D], rounded once as those of the tree are."""
    return x.float().unflatten(-2, (-1, count)).mean(-2).to(x.dtype)


def mass_of_spans(scores: Tensor, nodes: int) -> Tensor:
    """Log-mass [..., N] of nodes from the scores [..., J] of their spans, J a multiple of N."""
    parts = scores.unflatten(-1, (nodes, -1))
    return parts[..., 0] if parts.shape[-1] == 1 else torch.logsumexp(parts, -1)


def importances(mass: Tensor, counted: Tensor) -> Tensor:
    """Shares [S, n, N] of the log-masses [S, G, n, N] of the counted nodes, added over the heads of a group (§1.6)."""
    masked = mass.masked_fill(~counted.unsqueeze(-3), -torch.inf)
    shares = torch.exp(masked - torch.logsumexp(masked, -1, keepdim=True))
    return shares.where(shares >= SMALLEST, 0.0).sum(-3)


def best(key: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest entries of each row; of equal ones the first."""
    order = key.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(key, dtype=torch.bool).scatter_(-1, order, True)


def opened(importance: Tensor, candidates: Tensor, rightmost: Tensor, count: int, open_next: bool) -> Tensor:
    """Mask [S, n, N] of the nodes that are opened: ``count`` of the candidates, the rightmost among them."""
    nodes = torch.arange(importance.shape[-1], device=importance.device)
    key = importance.masked_fill(nodes == rightmost[:, None], torch.inf).masked_fill(~candidates, -1.0)
    if open_next:
        first = best(key, -(-count // 2)) & candidates
        latest = nodes.masked_fill(~candidates, -1).cummax(-1).values
        before = F.pad(latest, (1, 0), value=-1)[..., :-1].expand_as(first)  # the candidate before each node
        following = candidates & ~first & (before >= 0) & first.gather(-1, before.clamp(min=0))
        largest = torch.finfo(key.dtype).max
        key = key.masked_fill(first, torch.inf).masked_fill(following, largest)
    return best(key, count) & candidates


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, choice: Choice, layer: int = 0
) -> Tensor:
    """Tree attention of rotated q [B, T, H, D] on k, v [B, T, H_kv, D] that opens what ``choice`` says; as q.

    Args:
        attention: k and M; its other options are not looked at. layer: of the model, whose indexer is asked.

    Raises:
        ValueError: T is no multiple of the tokens of a node of the top.
    """
    context, layers = q.shape[1], attention.layers(q.shape[1])
    if context % RATE ** (layers - 1):
        raise ValueError(f"sequences must be whole nodes of {RATE ** (layers - 1)} tokens, got {context}")
    with torch.autocast(q.device.type, enabled=False):
        rows = [_one_sequence(*one, attention, choice, layers, layer) for one in zip(q, k, v, strict=True)]
    return torch.stack(rows).to(q.dtype)


def _one_sequence(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, choice: Choice, layers: int, layer: int
) -> Tensor:
    """q [T, H, D], k, v [T, H_kv, D] -> [T, H, D]; see :func:`attend_chosen`."""
    context, kv_heads = k.shape[:2]
    heads = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).float() * q.shape[-1] ** -0.5  # [S, G, T, D]
    keys, values = [k.transpose(0, 1)], [v.transpose(0, 1)]
    for _ in range(layers - 1):
        keys.append(pooled(keys[-1], RATE))
        values.append(pooled(values[-1], RATE))
    leaders = torch.arange(0, context, choice.stride, device=q.device)
    every = torch.arange(context, device=q.device)
    candidates = torch.ones(1, 1, 1, dtype=torch.bool, device=q.device)  # of the layer above, opened
    logits: list[Tensor] = []  # of the layers, from the top down
    for level in range(layers - 1, 0, -1):
        nodes = torch.arange(keys[level].shape[1], device=q.device)
        rightmost = leaders // RATE**level
        below = candidates.repeat_interleave(RATE, -1)[..., : len(nodes)] if logits else candidates
        candidates = below & (nodes <= rightmost[:, None])
        scores = heads @ keys[level].float().transpose(-1, -2).unsqueeze(-3)  # [S, G, T, N]
        mass = _mass(heads[:, :, leaders], keys, scores[:, :, leaders], leaders, level, choice, layer)
        importance = importances(mass, candidates & (nodes < rightmost[:, None]))
        count = choice.upper or attention.top_k if level > 1 else attention.top_k
        chosen = opened(importance, candidates, rightmost, count, choice.open_next)
        merged = (candidates & ~chosen).repeat_interleave(choice.stride, 1)[:, :context]
        logits.append(scores.masked_fill(~merged.unsqueeze(1), -torch.inf))
        candidates = chosen
    seen = candidates.repeat_interleave(choice.stride, 1)[:, :context]
    seen = seen.repeat_interleave(RATE, -1)[..., :context] & (every <= every[:, None])
    scores = heads @ keys[0].float().transpose(-1, -2).unsqueeze(-3)
    logits.append(scores.masked_fill(~seen.unsqueeze(1), -torch.inf))
    weights = torch.softmax(torch.cat(logits, -1), -1)
    merged_values = torch.cat([values[level] for level in range(layers - 1, -1, -1)], 1).float()
    return (weights @ merged_values.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)


def _mass(
    heads: Tensor,
    keys: Sequence[Tensor],
    scores: Tensor,
    leaders: Tensor,
    level: int,
    choice: Choice,
    layer: int,
) -> Tensor:
    """Log-mass [S, G, n, N] of the nodes of a level for the queries that choose."""
    nodes = keys[level].shape[1]
    if choice.indexers:
        return mass_of_spans(choice.indexers[layer](heads * heads.shape[-1] ** 0.5, keys[0].float()), nodes)

    def of_span(span: int | None) -> Tensor:
        if span is None:
            return scores
        means = pooled(keys[0], span).float()
        return mass_of_spans(heads @ means.transpose(-1, -2).unsqueeze(-3), nodes)

    mass = of_span(choice.span)
    if choice.near:
        begins = torch.arange(nodes, device=scores.device) * RATE**level
        mass = torch.where(begins > leaders[:, None] - choice.near, of_span(choice.near_span), mass)
    return mass


def with_choice(size: Training, attention: Attention, choice: Choice) -> Substitute:
    """``attention`` that opens what ``choice`` says, in the place of an attention of a model of ``size``."""
    calls = 0

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        layer, calls = calls % size.layers, calls + 1  # a model calls its layers in turn
        return attend_chosen(q, k, v, attention, choice, layer)

    same = replace(attention, span=choice.span, stride=choice.stride)
    return Substitute(**vars(same), function=function)


def choice_loss(indexer: Indexer, q: Tensor, k: Tensor, target: Tensor, counted: Tensor) -> Tensor:
    """Kullback-Leibler divergence in nats of the indexer's shares of nodes from the true ones, a mean over rows.

    Args:
        q: [B, S, G, n, D]. k: [B, S, T, D]. target: logarithms of the true shares [B, S, G, n, N], -inf where
            not counted. counted: [B, 1, 1, n, N].
    """
    mass = mass_of_spans(indexer(q, k), target.shape[-1]).masked_fill(~counted, -torch.inf)
    guess = torch.log_softmax(mass, -1)
    apart = (target - guess).masked_fill(~counted, 0.0)
    return (target.exp() * apart).sum(-1).mean()


def fit_indexers(
    session: Session,
    model: LanguageModel,
    indexers: Sequence[Indexer],
    draw: Callable[[int], Tensor],
    steps: int,
    queries: int,
    learning_rate: float = 3e-3,
) -> float:
    """Trains indexers to tell the true masses of the nodes of layer 1, while the model stays as it is.

    Args:
        indexers: one per layer of the model; they go to the session's device. draw: tokens [B, T] of a step. queries:
            of each sequence, at random places, that learn in a step. learning_rate: of Adam, a cosine down to 0.

    Returns:
        The divergence in nats over the last tenth of the steps, a mean over layers.
    """
    device = torch.device(session.device)
    optimizer = torch.optim.Adam(
        [p for indexer in indexers for p in indexer.to(device).parameters()],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps)
    )
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k))
        return dense_attention(q, k, v)

    generator = torch.Generator(device).manual_seed(0)
    last: list[Tensor] = []
    for step in range(steps):
        session.check()
        seen.clear()
        tokens = draw(step)
        with torch.no_grad(), session.precision():
            model(tokens, Substitute("dense", function=watch))
        count, context = tokens.shape
        places = torch.randint(2 * RATE, context, (count, queries), generator=generator, device=device)
        nodes = torch.arange(context // RATE, device=device)
        counted = (nodes < places[..., None] // RATE)[:, None, None]
        losses = []
        for indexer, (q, k) in zip(indexers, seen, strict=True):
            of_sequences = torch.arange(count, device=device)[:, None]
            asked = q[of_sequences, places].unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4).float()
            keys = k.transpose(1, 2).float()
            scores = asked @ keys.transpose(-1, -2).unsqueeze(2) * q.shape[-1] ** -0.5
            mass = mass_of_spans(scores, len(nodes)).masked_fill(~counted, -torch.inf)
            losses.append(choice_loss(indexer, asked, keys, torch.log_softmax(mass, -1), counted))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step >= steps - max(1, steps // 10):
            last.append(torch.stack(losses).detach().mean())
    return float(torch.stack(last).mean())
