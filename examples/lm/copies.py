"""Which strings are found again: a small model learns to copy on short texts, then every selection looks in long ones.

The model is one layer of attention without rotary positions. A byte is seen together with the three before it, so that
one layer is enough to find where a string stood before and to read on from there. On texts of at most
``max_top_nodes`` bytes tree attention is dense attention (docs/semantics/tree_attention.md §1.5), so that one training
serves all selections; on longer texts they differ only in what they find. An index learns afterwards, from the dense
attention of the model in long texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from htree_ops import HTreeAttention, fit_index

SEEN = 4  # a byte and those before it
WIDTH = 32  # of the embedding of a byte
LETTERS = 24  # of a planted string
CUE = 4  # letters of a repeated string that only say which one it is
NUM_CONTEXT, NUM_STRINGS, NUM_TEXTS = 256, 4, 8  # of a training step
LONG_CONTEXT, LONG_STRINGS, LONG_TEXTS = 4096, 16, 8  # of the evaluation
LEARNING_RATE = 1e-2
LEARNED, ATTEMPTS = 0.1, 4  # loss of a letter behind the cue, ln 26 = 3.3 where it is guessed
NEWLINE, FIRST_LETTER, LAST_LETTER = 10, 97, 122
#: Tree options of the evaluation by the name of their row. k = 16 nodes of 16 bytes are 256 of the 4096.
BUDGET = {"top_k": 16, "max_top_nodes": 256}
BY_INDEX: dict[str, dict[str, Any]] = {
    "tree, index, stride 1 (recommended)": BUDGET,
    "tree, index, stride 4": BUDGET | {"selection_stride": 4},
}
BY_KEYS: dict[str, dict[str, Any]] = {
    "tree, span 2": BUDGET | {"selection_span": 2},
    "tree, nodes scored by their mean": BUDGET,
}
DENSE: dict[str, Any] = {"top_k": LONG_CONTEXT // 16, "max_top_nodes": LONG_CONTEXT}
INDEX_STEPS, INDEX_ROWS = 60, 128


@dataclass(frozen=True)
class PlantedTexts:
    """tokens: int64 [n, context + 1]. repeated: int64 [n, strings, letters], the places of repeated letters in them."""

    tokens: Tensor
    repeated: Tensor

    def losses(self, model: nn.Module) -> Tensor:
        """Natural logarithms of the inverse probabilities of the repeated letters, float32 [n, strings, letters]."""
        logits = model(self.tokens[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten(), reduction="none")
        return (
            losses.view(len(self.tokens), -1)
            .gather(1, self.repeated.flatten(1) - 1)
            .view(self.repeated.shape)
        )


def draw_planted(
    source: Tensor, count: int, context: int, strings: int, generator: torch.Generator
) -> PlantedTexts:
    """Windows of ``source``, uint8 [num_bytes], with lines of random letters in the first half.

    The last lines of a window repeat them in a random order.
    """
    share, tail = context // 2 // strings, strings * (LETTERS + 1)
    tokens, repeated = [], []
    for start in torch.randint(source.numel() - context, (count,), generator=generator).tolist():
        window = source[start : start + context + 1].long()
        words = torch.randint(FIRST_LETTER, LAST_LETTER + 1, (strings, LETTERS), generator=generator)
        places = torch.randint(share - LETTERS - 1, (strings,), generator=generator) + share * torch.arange(
            strings
        )
        for place, word in zip(places.tolist(), words, strict=True):
            window[place] = window[place + LETTERS + 1] = NEWLINE
            window[place + 1 : place + 1 + LETTERS] = word
        order = torch.randperm(strings, generator=generator)
        window[-tail - 1] = NEWLINE
        window[-tail:] = F.pad(words[order], (0, 1), value=NEWLINE).flatten()
        tokens.append(window)
        first = context + 1 - tail + (LETTERS + 1) * torch.arange(strings)
        repeated.append(first[:, None] + torch.arange(LETTERS))
    return PlantedTexts(torch.stack(tokens), torch.stack(repeated))


class CopyModel(nn.Module):
    """tokens int64 [B, T] -> logits [B, T, 256]."""

    def __init__(self) -> None:
        super().__init__()
        width = SEEN * WIDTH
        self.embedding = nn.Embedding(256, WIDTH)
        self.norm = nn.RMSNorm(width)
        self.attention = HTreeAttention(
            width, 2, 1, rope_base=None, top_k=16, max_top_nodes=NUM_CONTEXT, index_dim=0
        )
        self.output = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        seen = [F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in range(SEEN)]
        return self.output(self.attention(self.norm(torch.cat(seen, dim=-1))))


def train_copies(source: Tensor, steps: int, seed: int) -> CopyModel:
    """A model that was asked for the repeated letters alone, on the CPU: texts so short that nothing is selected.

    It learns to copy all at once, if it does: whether within ``steps`` depends on the text and the seed. So it starts
    again from another seed where the last tenth of the steps shows that it has not.
    """
    for attempt in range(ATTEMPTS):
        model, loss = _train_once(source, steps, seed + attempt)
        if loss < LEARNED:
            break
    return model


def _train_once(source: Tensor, steps: int, seed: int) -> tuple[CopyModel, float]:
    """The model, and the mean loss of the letters behind the cue in the last tenth of the steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, recent = CopyModel(), deque[float](maxlen=max(1, steps // 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.1)
    for _ in tqdm(range(steps), desc="learning to copy", unit="step"):
        texts = draw_planted(source, NUM_TEXTS, NUM_CONTEXT, NUM_STRINGS, generator)
        losses = texts.losses(model)
        losses.mean().backward()
        recent.append(float(losses.detach()[..., CUE:].mean()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return model, sum(recent) / len(recent)


@torch.no_grad()
def copies_found(model: CopyModel, texts: PlantedTexts, options: dict[str, Any]) -> float:
    """Share of the repeated letters that get a probability above one half, without the first four of a string."""
    kept = model.attention.options
    model.attention.options = replace(kept, **({"selection_span": None} | options))
    losses = texts.losses(model)
    model.attention.options = kept
    return float((losses[..., CUE:] < torch.tensor(2.0).log()).double().mean())


def learn_index(model: CopyModel, source: Tensor, steps: int, seed: int) -> float:
    """Gives the model an index, which learns on long texts; returns its loss in nats."""
    generator = torch.Generator().manual_seed(seed)

    def texts() -> Iterator[Tensor]:
        for _ in tqdm(range(steps), desc="learning an index", unit="step"):
            yield draw_planted(source, 2, LONG_CONTEXT, LONG_STRINGS, generator).tokens[:, :-1]

    torch.manual_seed(seed)
    (nats,) = fit_index(model, texts(), steps=steps, rows=INDEX_ROWS)
    return nats


def copies_table(train: Tensor, validation: Tensor, steps: int, seed: int) -> tuple[dict[str, float], str]:
    """Trains the model and looks for copies in unseen text: the shares by selection, and the table to print."""
    model = train_copies(train, steps, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    texts = draw_planted(validation, LONG_TEXTS, LONG_CONTEXT, LONG_STRINGS, generator)
    found = {
        name: copies_found(model, texts, options) for name, options in ({"dense": DENSE} | BY_KEYS).items()
    }
    learn_index(model, train, min(steps, INDEX_STEPS), seed)
    by_index = {name: copies_found(model, texts, options) for name, options in BY_INDEX.items()}
    found = {"dense": found.pop("dense"), **by_index, **found}
    lines = [
        f"copies found by one layer of attention that learned to copy in texts of {NUM_CONTEXT} bytes, in texts of "
        f"{LONG_CONTEXT}",
        f"({LONG_STRINGS} strings in each of {LONG_TEXTS}; each query sees {16 * BUDGET['top_k']} bytes of the tree):",
        *(f"{name:36}{100 * share:6.1f} %" for name, share in found.items()),
    ]
    return found, "\n".join(lines)
