"""Multi-query associative recall: pairs of key and value, then the keys again, each to be answered by its value.

The task of Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv:2312.04927.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POWER = 0.01  # of the law that the places of the questions follow
#: Shares of a training until which sequences have a sixteenth, then an eighth of their length.
SHORT, MIDDLE = 0.4, 0.6


@dataclass(frozen=True)
class Recall:
    """tokens: int64 [B, T]. questions: int64 [B, n], the places of the questions. answers: int64 [B, n]."""

    tokens: Tensor
    questions: Tensor
    answers: Tensor


def lesson(step: int, steps: int, context: int, pairs: Sequence[int]) -> tuple[int, int]:
    """(tokens of a sequence, pairs) of a step.

    Models of two layers learn to look for a key in short sequences first, as Zoology's are trained; the last part of a
    training has sequences of ``context`` tokens and all numbers of ``pairs`` in turn.
    """
    if step >= MIDDLE * steps:
        per_pair = 4  # tokens for each pair
    else:
        per_pair = 8
        context //= 16 if step < SHORT * steps else 8
    fitting = [n for n in pairs if per_pair * n <= context] or [max(1, context // per_pair)]
    return context, fitting[step % len(fitting)]


def draw_recall(
    count: int, context: int, pairs: int, vocabulary: int, seed: int, device: torch.device | str
) -> Recall:
    """``count`` sequences: ``pairs`` keys, each followed by its value, then each key once more somewhere.

    Keys come from the lower half of the vocabulary and values from the upper half, without repetition in a sequence.
    The questions stand at every other place behind the pairs, drawn without repetition with the probabilities of a
    power law, and random tokens stand at all other places.

    Raises:
        ValueError: ``context`` is below 4 * ``pairs``, or the vocabulary too small.
    """
    half = vocabulary // 2
    if context < 4 * pairs or half <= pairs:
        raise ValueError(
            f"{pairs} pairs need a sequence of {4 * pairs} tokens and more than {2 * pairs} words, "
            f"got {context} and {vocabulary}"
        )
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(size: int) -> Tensor:
        return torch.rand(count, size, generator=generator, device=device)

    keys = uniform(half - 1).topk(pairs, dim=1).indices + 1
    values = uniform(half).topk(pairs, dim=1).indices + half
    space = (context - 2 * pairs) // 2
    law = torch.arange(1, space + 1, device=device).pow(POWER - 1).log()
    # the largest of log p + Gumbel noise are a sample without repetition
    gaps = (law - (-uniform(space).log()).log()).topk(pairs, dim=1).indices
    tokens = torch.randint(vocabulary, (count, context), generator=generator, device=device)
    tokens[:, : 2 * pairs] = torch.stack((keys, values), dim=2).flatten(1)
    questions = 2 * pairs + 2 * gaps
    tokens.scatter_(1, questions, keys)
    return Recall(tokens, questions, values)
