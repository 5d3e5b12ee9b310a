"""How far losses of training drift apart by rounding alone, beside those of two ranks, on the CPU.

Run: ``python -m benchmarks.training_rounding --csv PATH``: half an hour on two cores. A model as that of
``examples/train_distributed.py``, but small, is trained by one process. Then it is trained again, by one process with
other roundings and by two that share sequences, tokens or heads. A row has the largest differences of the losses from
the first run. Figures are reported, never asserted; docs/distributed.md has the table.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lm import parallel
from lm.settings import Settings
from lm.text import Text, default_folder, load_text
from torch import Tensor

from benchmarks.harness.plain_rows import Row, make_parser, print_rows
from htree_ops.info import source_commit
from tests.support.gloo import use_one_worker

#: As a run on two GPUs, at sizes of a CPU.
SETTINGS = Settings(
    device="cpu",
    text="",
    context=1024,
    batch=2,
    steps=40,
    layers=3,
    dim=64,
    heads=4,
    kv_heads=2,
    top_k=8,
    max_top_nodes=32,
    selection_span=2,
    index_dim=0,
    learning_rate=0.003,
    eval_windows=1,
)
AS_IT_IS = "as it is"
#: What runs in one process; all but the first change nothing but roundings.
ALONE = (AS_IT_IS, "one ulp in each weight", "texts in another order", "texts one by one")
#: What two ranks share.
SHARED = parallel.DIMENSIONS


@dataclass(frozen=True)
class Job:
    """A run: ``name`` is one of ALONE or SHARED."""

    name: str
    bf16: bool
    learning_rate: float
    seed: int


class Rounded(parallel.Trainer):
    """A run with other roundings."""

    name = AS_IT_IS

    def disturb(self) -> None:
        """Moves each weight to a neighbour in float32, up or down."""
        generator = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters():
            weight = parameter.detach()
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            up = torch.rand(local.shape, generator=generator) < 0.5
            local.copy_(torch.nextafter(local, torch.where(up, math.inf, -math.inf)))

    def learn(self, sequences: Tensor) -> Tensor:
        """The same gradients, but for the order of sums."""
        if self.name != "texts one by one":
            return super().learn(sequences.flip(0) if self.name == "texts in another order" else sequences)
        total = torch.zeros(())
        for text in sequences.split(1):
            loss = self.bits(text) / len(sequences)
            loss.backward()
            total += loss.detach()
        return total


def run(job: Job, text: Text, settings: Settings) -> list[float]:
    """The losses of a run."""
    settings = replace(settings, learning_rate=job.learning_rate, seed=job.seed)
    sizes = {name: 2 if name == job.name else 1 for name in parallel.DIMENSIONS}
    mesh = parallel.make_mesh("cpu", sizes, timedelta(minutes=5))
    trainer = Rounded(settings, text, Path(), mesh, job.bf16)
    trainer.name = job.name
    if job.name == "one ulp in each weight":
        trainer.disturb()
    while trainer.steps_done < settings.steps:
        trainer.step(False)
    return trainer.train


def work(rank: int, ranks: int, folder: str, jobs: Sequence[Job], settings: Settings) -> None:
    """One of the processes: all jobs, one behind the other."""
    torch.set_num_threads(1)
    use_one_worker()
    store = dist.FileStore(f"{folder}/store{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    text = load_text(default_folder(), settings.context)
    for place, job in enumerate(jobs):
        losses = run(job, text, settings)
        if rank == 0:
            torch.save(losses, f"{folder}/{ranks}-{place}.pt")
    parallel.leave(0)


def losses_of(jobs: Sequence[Job], ranks: int, settings: Settings) -> list[list[float]]:
    """The losses of all jobs."""
    with TemporaryDirectory() as folder:
        mp.spawn(work, (ranks, folder, jobs, settings), nprocs=ranks)
        return [torch.load(f"{folder}/{ranks}-{place}.pt") for place in range(len(jobs))]


def rows(
    settings: Settings, dtypes: Sequence[str], rates: Sequence[float], seeds: Sequence[int]
) -> Iterator[Row]:
    """Of each dtype, learning rate and seed the largest differences of the bits per byte from the run as it is."""
    commit = source_commit()
    for dtype, rate, seed in itertools.product(dtypes, rates, seeds):
        found: dict[str, list[float]] = {}
        for names, ranks in ((ALONE, 1), (SHARED, 2)):
            jobs = [Job(name, dtype == "bf16", rate, seed) for name in names]
            found |= zip(names, losses_of(jobs, ranks, settings), strict=True)
        for name, losses in found.items():
            differences = [abs(a - b) for a, b in zip(losses, found[AS_IT_IS], strict=True)]
            yield {
                "commit": commit,
                "dtype": dtype,
                "selects": settings.top_k == SETTINGS.top_k,
                "learning_rate": rate,
                "seed": seed,
                "run": f"two ranks share {name}" if name in SHARED else name,
                "last_bits_per_byte": losses[-1],
                "difference_of_10_steps": max(differences[:10]),
                "difference_of_20_steps": max(differences[:20]),
                "difference_of_40_steps": max(differences[:40]),
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows."""
    parser = make_parser("how far rounding lets losses of training drift apart")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="steps of a run (default 40)")
    parser.add_argument(
        "--context", type=int, default=SETTINGS.context, help="tokens of a sequence (default 1024)"
    )
    parser.add_argument(
        "--open-all", action="store_true", help="open every node, so that nothing is selected"
    )
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"))
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.003, 0.0003], metavar="X")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], metavar="N")
    chosen = parser.parse_args(argv)
    settings = replace(SETTINGS, steps=chosen.steps, context=chosen.context)
    if chosen.open_all:
        settings = replace(settings, top_k=64, max_top_nodes=settings.context, selection_span=0)
    print_rows(rows(settings, chosen.dtypes, chosen.learning_rates, chosen.seeds), chosen.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
