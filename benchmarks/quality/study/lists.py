"""The lists of blocks that a learned index chooses, and how many blocks neighbouring queries read together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from htree_ops import select_blocks

from .corpus import Texts
from .model import LanguageModel, attend
from .session import Progress, Session, Setup
from .settings import RATE, Attention, Substitute

NEIGHBOURS = 64  # queries of a window
COUNTS = [2**n for n in range(1, NEIGHBOURS.bit_length())]
MOST = 2**20  # entries of a file


@torch.no_grad()
def lists_of(session: Session, model: LanguageModel, attention: Attention, tokens: Tensor) -> list[Tensor]:
    """Of each layer the lists int32 [T, H_kv, k] of one text, tokens int64 [1, T]; blocks of 16, -1 at the end."""
    blocks: Any = model.body.blocks
    layers = [block.attention for block in blocks]
    found: list[Tensor] = []

    def watch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = layers[len(found)]
        index_query, index_key = layer.index_of(q, k)
        found.append(select_blocks(index_query, index_key, attention.top_k, block_size=RATE)[0][0])
        return attend(q, k, v, attention, layer)

    model.eval()
    with session.precision():
        model(tokens, Substitute(**vars(attention), function=watch))
    return found


def union_sizes(lists: Tensor, counts: Sequence[int]) -> list[float]:
    """Mean number of blocks that so many neighbours read together, over those of one list; lists [T, heads, k]."""
    one = (lists >= 0).sum(-1).double().mean()
    sizes = []
    for count in counts:
        rows = lists[: len(lists) // count * count].unflatten(0, (-1, count)).transpose(1, 2).flatten(2)
        ordered = rows.sort(-1).values
        is_new = torch.cat((torch.ones_like(ordered[..., :1], dtype=torch.bool), ordered.diff() != 0), -1)
        sizes.append(float((is_new & (ordered >= 0)).sum(-1).double().mean() / one))
    return sizes


def read(path: Path) -> Tensor:
    """What :func:`write` left, as lists int32 [layers * H_kv, T, k] of the whole text.

    Queries between two windows have the lists of the window before, as far before their own block. The first window,
    whose lists are short, serves its own queries alone where there are others.
    """
    with np.load(path) as file:
        lists, starts, context = file["lists"].astype(np.int32), file["starts"], int(file["context"])
    windows = torch.from_numpy(lists).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [layers * H_kv, windows, 64, k]
    firsts = torch.arange(0, context, NEIGHBOURS)
    of = torch.searchsorted(torch.from_numpy(starts), firsts, right=True) - 1
    of = of.clamp(min=min(1, len(starts) - 1)).masked_fill(firsts < NEIGHBOURS, 0)
    behind = ((firsts - torch.from_numpy(starts)[of]) // RATE)[:, None, None]
    moved = (windows[:, of] + behind).masked_fill(windows[:, of] < 0, -1).clamp(min=-1)
    return moved.int().flatten(1, 2)[:, :context]


def write(session: Session, setup: Setup, model: LanguageModel, texts: Texts) -> None:
    """lists.npz with the lists of a text, or of windows of 64 neighbours in it, and a row with their unions.

    ``lists`` is int16 [layers, windows, 64, H_kv, k], ``starts`` the first token of each window.
    """
    attention, context = setup.attention, texts.tokens.shape[1] - 1
    found = torch.stack(lists_of(session, model, attention, texts.tokens[:1, :-1])).cpu()
    layers, _, heads, k = found.shape
    windows = min(context // NEIGHBOURS, max(1, MOST // (layers * NEIGHBOURS * heads * k)))
    starts = torch.arange(windows) * (context // windows) // NEIGHBOURS * NEIGHBOURS
    kept = torch.stack([found[:, start : start + NEIGHBOURS] for start in starts.tolist()], 1)
    path = session.out / "lists.npz"
    np.savez_compressed(path, lists=kept.short().numpy(), starts=starts.numpy(), context=context)
    late = found[:, context // 2 :]  # whose lists are full
    unions = [sum(part) / layers for part in zip(*(union_sizes(x, COUNTS) for x in late), strict=True)]
    session.write(
        setup, "final", Progress(), texts=1, series=unions,
        series_of="Blocks that 2, 4, ..., 64 neighbouring queries read together, in lists",
    )  # fmt: skip
