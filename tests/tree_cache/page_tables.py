"""Random tables of pages, steps for them, and integers in them that contradict the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.tree_cache_cases import state_of

STATE = ("block_table", "lengths", "held", "users", "free_pages", "errors", "list_pos", "plan")
STEPS = ("append", "append", "append", "reserve", "truncate", "truncate", "reorder", "attend")
#: The entries of STATE, the request behind them, that decide what a step reads and writes.
DECIDING = ("block_table", "lengths", "held", "users", "free_pages", "list_pos", "request")
#: What stands between two tensors, and how many integers of it.
FENCE, FENCE_SIZE = 0x5EED, 32


@dataclass(frozen=True)
class Sizes:
    """Sizes and options of one table."""

    batch: int
    max_pages: int
    num_pages: int
    page_size: int
    capacity: int
    stride: int

    @staticmethod
    def draw(draw: random.Random) -> Sizes:
        batch, max_pages, page_size = draw.randint(1, 5), draw.randint(1, 6), draw.randint(1, 4)
        return Sizes(
            batch=batch,
            max_pages=max_pages,
            num_pages=draw.randint(1, batch * max_pages),
            page_size=page_size,
            capacity=max_pages * page_size - draw.randint(0, page_size - 1),
            stride=draw.randint(1, 2),
        )

    def options(self) -> dict[str, int]:
        return {"capacity": self.capacity, "page_size": self.page_size, "selection_stride": self.stride}

    def table(self) -> list[Tensor]:
        """An empty one, on the CPU."""
        return state_of("cpu", self.batch, self.max_pages, self.num_pages, ring=2)

    def request(self, draw: random.Random, step: str, lengths: Tensor) -> Tensor:
        """Mostly one that is possible."""
        wanted = {
            "append": lambda _: draw.randint(0, 2 * self.page_size),
            "reserve": lambda _: draw.randint(0, 9),
            "truncate": lambda length: draw.choice((-1, draw.randint(0, length))),
            "reorder": lambda _: draw.randrange(self.batch),
            "attend": lambda _: draw.randint(0, 3),
        }[step]
        return torch.tensor([wanted(length) for length in lengths.tolist()], dtype=torch.int32)

    def corrupt(self, draw: random.Random, tensors: dict[str, Tensor]) -> None:
        """Overwrites a few integers with others, of which many are near a bound."""
        for _ in range(draw.choice((1, 1, 2, 5, 20))):
            numbers = tensors[draw.choice(DECIDING)].view(-1)
            if len(numbers) == 0:
                continue
            near = (-1, 0, 1, 2, self.max_pages, self.num_pages, self.capacity, self.capacity + 1)
            anywhere = (draw.randint(-3, self.num_pages + 3), draw.randint(-(2**31), 2**31 - 1))
            numbers[draw.randrange(len(numbers))] = draw.choice((*near, *anywhere, 2**31 - 1, -(2**31)))


def fenced(tensors: list[Tensor], device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Copies on a device, side by side in one buffer, and the fences before, between and behind them."""
    total = sum(x.numel() for x in tensors) + FENCE_SIZE * (len(tensors) + 1)
    buffer = torch.full((total,), FENCE, dtype=torch.int32, device=device)
    copies, fences, begin = [], [buffer[:FENCE_SIZE]], FENCE_SIZE
    for tensor in tensors:
        end = begin + tensor.numel()
        copies.append(buffer[begin:end].view(tensor.shape))
        copies[-1].copy_(tensor)
        fences.append(buffer[end : end + FENCE_SIZE])
        begin = end + FENCE_SIZE
    return copies, fences
