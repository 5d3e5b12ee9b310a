"""What is measured: bits per byte, planted copies, answers of the recall task, needles by depth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .corpus import TEXT, Texts
from .model import Model
from .recall import draw_recall
from .record import NEEDLES
from .session import Session
from .settings import Attention, Training

FOUND = math.log(0.5)  # a byte is found where its log-probability is above this
#: Letters that say which string is repeated. They are counted in ``copies_found`` as all others are.
CUE = 4
NEEDLE_CUE = 8
BUCKETS = 32  # of positions in a text
TOKENS_AT_ONCE = 2**17


def byte_losses(model: Model, attention: Attention, tokens: Tensor) -> Tensor:
    """Natural logarithms of the inverse probabilities of bytes 1 ... T, float32 [B, T]; tokens int64 [B, T + 1]."""
    logits = model.logits(model(tokens[:, :-1], attention))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
        tokens.shape[0], -1
    )


def _parts(texts: Texts) -> Iterator[Texts]:
    """A few texts at a time."""
    count, length = texts.tokens.shape
    at_once = max(1, TOKENS_AT_ONCE // (length - 1))
    return (texts.rows(first, at_once) for first in range(0, count, at_once))


def copies(losses: Tensor, texts: Texts) -> Tensor:
    """Losses of the repeated letters, float32 [B, n, letters]."""
    return losses.gather(1, texts.repeated()).unflatten(1, (-1, texts.letters))


@torch.no_grad()
def measure_texts(session: Session, model: Model, attention: Attention, texts: Texts) -> dict[str, Any]:
    """Bits per byte of natural text, copies found and, of 32 parts of the text by position, the bits per byte."""
    model.eval()
    losses = []
    for part in _parts(texts):
        session.check()
        with session.precision():
            losses.append(byte_losses(model, attention, part.tokens))
    loss = torch.cat(losses).double()
    natural = texts.kinds[:, 1:] == TEXT
    spans = [x.chunk(BUCKETS, dim=1) for x in (loss * natural, natural)]
    by_position = [
        float(a.sum() / b.sum() / math.log(2)) if b.any() else None for a, b in zip(*spans, strict=True)
    ]
    repeated = copies(loss, texts)
    found = repeated < -FOUND
    by_text = found.double().mean((1, 2))
    return {
        "texts": loss.shape[0],
        "bits_per_byte": float(loss[natural].mean() / math.log(2)),
        "copies_found": float(by_text.mean()),
        "copies_error": float(by_text.std() / len(by_text) ** 0.5) if len(by_text) > 1 else None,
        "copies_bits": float(repeated.mean() / math.log(2)),
        "copies_whole": float(found[..., CUE:].all(2).double().mean()),
        "series": by_position,
        "series_of": "bits per byte by position",
    }


@torch.no_grad()
def needles(session: Session, model: Model, attention: Attention, texts: Texts) -> dict[str, Any]:
    """Share of the letters found by depth, without the first 8 of a string; the strings stand at even places."""
    model.eval()
    found = []
    for part in _parts(texts):
        session.check()
        with session.precision():
            losses = byte_losses(model, attention, part.tokens)
        found.append((copies(losses, part) < -FOUND)[..., NEEDLE_CUE:].double())
    every = torch.cat(found)
    return {
        "texts": every.shape[0],
        "copies_found": float(every.mean()),
        "copies_whole": float(every.bool().all(2).double().mean()),
        "series": every.mean((0, 2)).tolist(),
        "series_of": NEEDLES,
    }


@torch.no_grad()
def measure_recall(
    session: Session, model: Model, attention: Attention, size: Training, pairs: int, seed: int
) -> float:
    """Share of the questions whose answer has the highest probability."""
    model.eval()
    task = draw_recall(size.texts, size.context, pairs, model.vocabulary, seed, session.device)
    with session.precision():
        hidden = model(task.tokens, attention)
        places = task.questions[..., None].expand(-1, -1, hidden.shape[2])
        answers = model.logits(hidden.gather(1, places)).argmax(2)
    return float((answers == task.answers).double().mean())
