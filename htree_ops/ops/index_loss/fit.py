"""An index for a dense model, which learns from what the model attends to (docs/semantics/index_loss.md §9.6)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from htree_ops.ops.arguments import check_data, check_int, check_kind
from htree_ops.ops.index_loss.collector import fitting
from htree_ops.ops.index_loss.layers import WEIGHTS, draw_index, index_dim_of, query_scale

if TYPE_CHECKING:  # which imports this family
    from htree_ops.ops.tree_attention.fitted import FittedLayer

#: The last steps whose mean loss is returned.
REPORTED = 10


@torch.inference_mode(False)  # which enables gradients too, wherever the caller stands
def fit_index(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]],
    *,
    steps: int = 400,
    rows: int = 256,
    learning_rate: float = 1e-2,
    index_dim: int | None = None,
) -> list[float]:
    """Gives a dense model the index by which it then selects; everything else stays as it is.

    In each step the model attends densely to a batch, and every layer's index moves by the gradient of
    :func:`htree_ops.index_loss` at ``rows`` positions of each sequence: Adam, whose learning rate falls to 0 as a
    cosine. The model's own parameters get no gradient, and no activation is kept for a backward.

    Layers are every :class:`htree_ops.HTreeAttention`, and in a model of transformers every causal attention with
    ``q_proj`` and ``k_proj``, whatever its ``attn_implementation`` is. A layer that has an index of this width goes on
    from it. Afterwards an :class:`htree_ops.HTreeAttention` selects by its index, in the place of a
    ``selection_span``. A model of transformers does with ``attn_implementation="htree"``; ``config.htree`` gets the
    ``"index_dim"``. The weights of the index are in the state dict, ``save_pretrained`` and ``from_pretrained`` keep
    them, and they require grad.
    Source: docs/semantics/index_loss.md §9.6.

    Args:
        model: with weights that were trained densely.
        batches: at least ``steps`` batches, each a tensor of tokens for ``model(batch)`` or a dict for
            ``model(**batch)``. Tensors go to the device of the model's first parameter. Sequences should be as long as
            those that it will serve, and longer than a block.
        steps: of Adam.
        rows: positions of a sequence, drawn by torch's default generator.
        learning_rate: in the first step.
        index_dim: d, a multiple of 16 up to 128 and up to the width of a head. None is that of the index that a layer
            has, else 32, or 16 where a head is narrower.

    Returns:
        For each layer, in the order of ``model.modules()``, its loss in nats: the mean over the last 10 steps.

    Where it raises, the model is as before.

    Raises:
        TypeError: an argument of a wrong type; a batch that is neither a tensor nor a mapping.
        ValueError: a number out of range, an index of another width, options that choose in another way (importance,
            scope); a model without such layers, or a layer that it does not call; fewer batches than ``steps``; a loss
            that is not finite.
        NotImplementedError: weights that are sharded over ranks.

    Example:
        >>> import htree_ops
        >>> layer = htree_ops.HTreeAttention(64, num_heads=2, top_k=4, max_top_nodes=64)
        >>> nats = htree_ops.fit_index(layer, (torch.randn(2, 300, 64) for _ in range(20)), steps=20, rows=16)
        >>> len(nats), layer.index_dim, layer.options.selection_span
        (1, 32, None)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fit_index: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, number in (
        ("steps", steps),
        ("rows", rows),
        ("index_dim", 1 if index_dim is None else index_dim),
    ):
        check_int("fit_index", name, number, 1)
    check_kind("fit_index", "learning_rate", learning_rate, "float")
    if not 0 < learning_rate < 1e30:  # Adam steps in float32, at first ten times as far
        raise ValueError(f"fit_index: learning_rate must be positive and below 1e30, got {learning_rate}")
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"fit_index: batches must be tensors of tokens or dicts, one for each step, got {type(batches).__name__}"
        )
    fitted = _layers(model, index_dim)
    scales = [query_scale(one.sizes[2], one.sizes[0] // one.sizes[1]) for one in fitted]
    weights = [_start(one, scale, _width(one, index_dim)) for one, scale in zip(fitted, scales, strict=True)]
    adam = torch.optim.Adam([w for pair in weights for w in pair], lr=learning_rate)
    latest: list[list[Tensor]] = []
    with _dense(model), _Progress(steps) as progress:
        for step, batch in enumerate(_taken(batches, steps)):
            for group in adam.param_groups:
                group["lr"] = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
            # A query's weight is held at the size of its key's, so that one learning rate suits both.
            pairs = [(w[0] / scale, w[1]) for w, scale in zip(weights, scales, strict=True)]
            by_layer = {id(one.layer): pair for one, pair in zip(fitted, pairs, strict=True)}
            with fitting(rows, by_layer) as losses, torch.no_grad():
                _call(model, batch)
            found = [losses.of(one.layer) for one in fitted]
            if None in found:
                kind = type(fitted[found.index(None)].layer).__name__
                raise ValueError(
                    f"fit_index: model must call each of its layers, got a {kind} that it does not call"
                )
            adam.zero_grad()
            for one, loss, pair in zip(fitted, found, weights, strict=True):
                assert loss is not None
                loss.backward()
                for weight in pair:
                    assert weight.grad is not None
                    weight.grad = one.over_ranks(weight.grad, summed=True)
            with torch.device("cpu"):  # it counts its steps on the default device
                adam.step()
            latest = [*latest[1 - REPORTED :], [x.detach() for x in found if x is not None]]
            progress.show(step + 1, latest[-1])
    nats = [float(torch.stack(losses).mean()) for losses in zip(*latest, strict=True)]
    if not all(map(math.isfinite, nats)):
        raise ValueError(f"fit_index: model must attend with finite queries and keys, got losses of {nats}")
    for one, pair, scale in zip(fitted, weights, scales, strict=True):
        one.take(pair[0].detach() / scale, pair[1].detach())
    return nats


def _width(one: FittedLayer, index_dim: int | None) -> int:
    """Of the index that a layer gets, or goes on from."""
    if index_dim is not None:
        return index_dim
    return index_dim_of(one.layer) or (32 if one.sizes[2] >= 32 else 16)


def _layers(model: nn.Module, index_dim: int | None) -> list[FittedLayer]:
    """The layers that get an index, in the order of ``model.modules()``."""
    from htree_ops.ops.tree_attention.fitted import fitted_layers  # which imports this family

    found: list[FittedLayer] = [*fitted_layers(model)]
    if _is_of_transformers(model):
        from htree_ops.integrations import index

        found += index.fitted_layers(model)
    if not found:
        raise ValueError(
            "fit_index: model must have layers of HTreeAttention, or be a model of transformers whose causal "
            f"attentions have q_proj and k_proj, got {type(model).__name__}"
        )
    for one in found:
        has = index_dim_of(one.layer)
        if index_dim is not None and has not in (0, index_dim):
            raise ValueError(
                f"fit_index: index_dim must be {has}, that of the index that the model has, got {index_dim}"
            )
        if any(hasattr(p, "device_mesh") for p in one.layer.parameters()):
            raise NotImplementedError(
                "fit_index: a model whose weights are sharded over ranks is not supported"
            )
        if has and getattr(one.layer, WEIGHTS[0]).is_inference():
            raise ValueError("fit_index: model must be made outside of inference_mode, got an index of it")
        one.check(_width(one, index_dim))
    order = {id(layer): i for i, layer in enumerate(model.modules())}
    return sorted(found, key=lambda one: order[id(one.layer)])


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether a part of the model is one of transformers, which is not imported for the question."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return any(isinstance(part, PreTrainedModel) for part in model.modules())


def _start(one: FittedLayer, scale: float, index_dim: int) -> tuple[Tensor, Tensor]:
    """The weights that Adam moves, in float32 or wider; that of the queries times ``scale``."""
    device = next(one.layer.parameters()).device
    if index_dim_of(one.layer):
        found = (getattr(one.layer, name).detach() for name in WEIGHTS)
        of_queries, of_keys = (w.to(torch.promote_types(w.dtype, torch.float32)) for w in found)
    else:
        drawn = draw_index(*one.sizes, index_dim, device, torch.float32)
        of_queries, of_keys = (one.over_ranks(w, summed=False) for w in drawn)
    return (of_queries * scale).requires_grad_(), of_keys.clone().requires_grad_()


@contextmanager
def _dense(model: nn.Module) -> Iterator[None]:
    """The model as it is while it is fitted: eager, without dropout, its attention ours."""
    modes = [(part, part.training) for part in model.modules()]
    eager: Any = nullcontext()
    if "torch._dynamo" in sys.modules:
        eager = torch.compiler.set_stance("force_eager")
    attends: Any = nullcontext()
    if _is_of_transformers(model):
        from htree_ops.integrations import index

        attends = index.our_attention(model)
    with eager, attends:
        model.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training


def _taken(batches: Iterable[Tensor | Mapping[str, Any]], steps: int) -> Iterator[Tensor | Mapping[str, Any]]:
    """The first ``steps`` of the batches."""
    taken = 0
    for batch in batches:
        if not isinstance(batch, (Tensor, Mapping)):
            raise TypeError(
                f"fit_index: batches[{taken}] must be a Tensor or a dict, got {type(batch).__name__}"
            )
        tensors = (
            {"": batch} if isinstance(batch, Tensor) else {f"[{name!r}]": x for name, x in batch.items()}
        )
        for place, x in tensors.items():
            if isinstance(x, Tensor) and x.is_meta:
                check_data("fit_index", f"batches[{taken}]{place}", x)
        yield batch
        taken += 1
        if taken == steps:
            return
    raise ValueError(f"fit_index: batches must be at least steps = {steps}, got {taken}")


def _call(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> None:
    device = next(model.parameters()).device
    if isinstance(batch, Tensor):
        model(batch.to(device))
        return
    model(**{name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()})


class _Progress:
    """A line on a terminal that says how far a fit is; elsewhere nothing."""

    def __init__(self, steps: int) -> None:
        self.steps, self.begun, self.shown = steps, time.monotonic(), 0.0
        self.visible = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.visible and self.shown:
            print(file=sys.stderr)

    def show(self, step: int, losses: list[Tensor]) -> None:
        """At most twice a second, for it waits for the device."""
        now = time.monotonic()
        if not self.visible or (now < self.shown + 0.5 and step < self.steps):
            return
        self.shown = now
        done = "#" * (30 * step // self.steps)
        nats = sum(x.item() for x in losses) / len(losses)
        line = f"fit_index [{done:<30}] {step}/{self.steps}  {nats:.4f} nats  {now - self.begun:.0f} s"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
