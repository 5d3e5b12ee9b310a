"""Plain PyTorch reference of causal softmax and its gradient (docs/semantics/causal_softmax.md §5)."""

from __future__ import annotations

import torch


def _visible(scores: torch.Tensor) -> torch.Tensor:
    """Bool [h, w]: row i sees the columns j <= i + (w - h)."""
    h, w = scores.shape[-2:]
    row = torch.arange(h, device=scores.device)[:, None]
    return torch.arange(w, device=scores.device)[None, :] <= row + (w - h)


def causal_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of each row's visible prefix in float64, 0 behind it; x [..., h, w] with w >= h.

    Works on the prefix alone, so nothing behind it can leak, not even a NaN.
    """
    x = x.double()
    visible = _visible(x)
    scores = torch.where(visible, x, -torch.inf)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True)) if x.numel() else scores
    weights = torch.where(visible, weights, 0.0)
    return torch.where(visible, weights / weights.sum(dim=-1, keepdim=True), 0.0)


def causal_softmax_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dx = y (dy - sum over the visible prefix of dy y) in float64, 0 behind the prefix."""
    visible = _visible(y)
    dy, y = torch.where(visible, dy.double(), 0.0), torch.where(visible, y.double(), 0.0)
    return torch.where(visible, y * (dy - (dy * y).sum(dim=-1, keepdim=True)), 0.0)
