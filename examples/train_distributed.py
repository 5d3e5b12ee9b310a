"""Trains the byte-level language model of train_lm.py on several GPUs or processes.

Run: ``torchrun --nproc-per-node 2 examples/train_distributed.py --context-parallel 2`` (``--help`` lists the flags).
The ranks form a mesh of data, context and tensor parallelism: sequences, the tokens of a sequence, and heads and
columns are shared out; FSDP2 cuts parameters and optimizer among all ranks of the first two. But for the order of
sums, and the positions at which an index learns, the losses do not depend on the mesh. A checkpoint under
``runs/train_distributed`` goes on under any mesh with ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

try:
    import matplotlib as mpl
    from lm import parallel, settings, text

    from htree_ops.info import cuda_missing
except ImportError as error:
    print(
        f"train_distributed.py: {error}; run 'make demo' once, which installs what is missing",
        file=sys.stderr,
    )
    sys.exit(2)

INTERRUPTED = 130  # as shells report a Ctrl-C
LEARNING_RATE = 0.003  # AdamW's; the default of train_lm.py is Muon's


def make_parser() -> argparse.ArgumentParser:
    """The command line. A flag without a value given has the default of train_lm.py, but for the learning rate."""
    parser = settings.OneLineParser(
        prog="train_distributed.py", description="Trains a byte-level language model on a mesh of ranks."
    )
    for name, what in (
        ("data", "sequences are shared among N groups of ranks"),
        ("context", "the tokens of a sequence are shared among N ranks"),
        ("tensor", "heads and columns are shared among N ranks, a divisor of kv-heads"),
    ):
        least = None if name == "data" else 1
        words = "default: the ranks that are left" if name == "data" else "default 1"
        parser.add_argument(
            f"--{name}-parallel", type=int, default=least, metavar="N", help=f"{what} ({words})"
        )
    parser.add_argument("--text", metavar="DIR", help="folder with .py files; default: the standard library")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train_distributed"),
        metavar="DIR",
        help="folder that all ranks see, for checkpoints, history.json and curves.png (default %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the newest checkpoint in --out")
    parser.add_argument("--save-every", type=int, default=50, metavar="N", help="steps between checkpoints")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where the GPU kernels can run"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="seconds that a rank waits for another (default 600)",
    )
    settings.add_settings(
        parser,
        batch="sequences per step, of all ranks together",
        learning_rate=f"peak of AdamW's (default {LEARNING_RATE})",
    )
    parser.set_defaults(dense=False)
    return parser


def join_ranks(device: str, wait: timedelta) -> None:
    """Makes this process a rank of the group that torchrun describes, or the only one."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=wait)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)


def prepare(arguments: argparse.Namespace) -> parallel.Trainer:
    """Everything that can fail because of a flag, the same way on every rank, before anything slow."""
    missing = cuda_missing()
    device = arguments.device or ("cpu" if missing else "cuda")
    if device == "cuda" and missing:
        raise settings.UserError(f"--device cuda: {missing}")
    settings.check_size("--save-every", arguments.save_every, 1)
    if not 1 <= arguments.timeout <= settings.MOST:
        raise settings.UserError(
            f"--timeout must be between 1 and {settings.MOST} seconds, got {arguments.timeout}"
        )
    path, progress = parallel.read_latest(arguments.out) if arguments.resume else (None, {})
    stored = settings.Settings(**progress["settings"]) if path else None
    if stored is None and arguments.learning_rate is None:
        arguments.learning_rate = LEARNING_RATE
    folder = arguments.text or (stored.text if stored else str(text.default_folder()))
    chosen = settings.resolve(arguments, device, folder, stored)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if not dist.is_initialized() else dist.get_world_size()
    sizes = {name: getattr(arguments, f"{name}_parallel") for name in parallel.DIMENSIONS}
    for name in ("context", "tensor"):
        settings.check_size(f"--{name}-parallel", sizes[name], 1)
    if sizes["data"] is None:
        sizes["data"] = max(1, ranks // (sizes["context"] * sizes["tensor"]))
    parallel.check_mesh(chosen, sizes, ranks)
    settings.make_folder(arguments.out)
    loaded = text.load_text(Path(folder), chosen.context)
    wait = timedelta(seconds=arguments.timeout)
    join_ranks(device, wait)
    trainer = parallel.Trainer(chosen, loaded, arguments.out, parallel.make_mesh(device, sizes, wait))
    if path:
        trainer.load(path, progress)
    return trainer


def introduce(trainer: parallel.Trainer) -> None:
    """Says what is trained on what."""
    chosen, mesh = trainer.settings, trainer.mesh
    parameters = sum(p.numel() for p in trainer.model.parameters())
    where = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    words = ", ".join(f"{name} {mesh[name].size()}" for name in parallel.DIMENSIONS)
    print(
        f"model: {chosen.layers} layers, width {chosen.dim}, {chosen.heads} query and {chosen.kv_heads} key/value "
        f"heads, {parameters / 1e6:.2f} M parameters\nmesh: {words}; each rank on a {where}, with "
        f"{chosen.context // mesh['context'].size()} of the {chosen.context} tokens of a sequence"
    )
    if trainer.steps_done:
        print(f"continuing after step {trainer.steps_done} of {chosen.steps}")


def draw(trainer: parallel.Trainer) -> None:
    """Bits per byte over the steps, and tokens per second, as curves.png; the numbers as history.json."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    chosen = trainer.settings
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    steps = range(1, trainer.steps_done + 1)
    left.plot(steps, trainer.train, color="tab:green", alpha=0.35, linewidth=0.8, label="training")
    left.plot(*zip(*trainer.validation, strict=True), color="tab:green", marker="o", label="validation")
    left.set(xlabel="step", ylabel="bits per byte")
    left.legend()
    rates = [chosen.batch * chosen.context / seconds for seconds in trainer.seconds]
    right.plot(steps, rates, color="tab:green", linewidth=0.8)
    right.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(trainer.folder / "curves.png", dpi=120)
    plt.close(figure)
    content = {"settings": vars(chosen), **trainer.history()}
    (trainer.folder / "history.json").write_text(json.dumps(content, indent=1) + "\n")


def finish(trainer: parallel.Trainer, started: float) -> None:
    """What was reached, and the files."""
    draw(trainer)
    median = trainer.median_seconds()
    rate = trainer.settings.batch * trainer.settings.context / median
    print(
        f"validation {trainer.validation[-1][1]:.4f} bits per byte after {trainer.steps_done} steps; "
        f"{1e3 * median:.1f} ms per step, {rate / 1e3:.1f}k tokens per second"
    )
    if trainer.mesh.device_type == "cuda":
        print(f"most memory on this GPU: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    files = " ".join(sorted(path.name for path in trainer.folder.iterdir()))
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes; in {trainer.folder}: {files}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a wrong flag (one line on stderr), 130 interrupted and saved."""
    started = time.perf_counter()
    try:
        arguments = make_parser().parse_args(argv)
        trainer = prepare(arguments)
    except settings.UserError as error:
        print(f"train_distributed.py: {error}", file=sys.stderr)
        return 2
    leads = dist.get_rank() == 0
    if leads:
        introduce(trainer)
    finished = trainer.run(arguments.save_every)
    if leads and finished:
        finish(trainer, started)
    elif leads:
        print(
            f"stopped after step {trainer.steps_done} of {trainer.settings.steps} and saved; --resume goes on"
        )
    return 0 if finished else INTERRUPTED


if __name__ == "__main__":
    parallel.leave(main())
