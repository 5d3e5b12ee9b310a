"""Trains a small byte-level language model with tree attention on real text, beside a dense one.

Run: ``python examples/train_lm.py`` (``--help`` lists the flags). On two CPU cores it takes about five minutes:
it trains both models on the same batches of the standard library's sources, then prints their losses and step
times side by side, the copies that a small model finds with each selection, the time of attention alone for growing
contexts and a generated sample, and leaves checkpoint, curves and history under ``runs/train_lm``. On a GPU it takes a
longer context and a larger model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

try:
    from lm import copies, report, settings, text, training

    from htree_ops.info import cuda_missing
except ImportError as error:
    remedy = {name: f"pip install {name}" for name in ("matplotlib", "tqdm")}
    remedy["htree_ops"] = "pip install --no-build-isolation --no-deps ."  # the torch that is here stays
    hint = f"; run 'make demo', or: {remedy[error.name]}" if error.name in remedy else ""
    print(f"train_lm.py: {error}{hint}", file=sys.stderr)
    sys.exit(2)

CPU_LENGTHS = (4096, 8192, 16384, 32768)
INTERRUPTED = 130  # as shells report a Ctrl-C
GPU_LENGTHS = (*CPU_LENGTHS, 65536, 131072)


def choose_device(name: str | None) -> str:
    """The device asked for, or the best there is."""
    missing = cuda_missing()
    if name is None:
        return "cpu" if missing else "cuda"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise settings.UserError(f"--device: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise settings.UserError(f"--device must be cpu or cuda, got {name}")
    if device.type == "cuda" and missing:
        raise settings.UserError(f"--device {name}: {missing}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise settings.UserError(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
    return name


def parse_lengths(words: str | None, device: str) -> list[int]:
    """Context lengths to time, from ``--time-lengths``."""
    if words is None:
        return list(CPU_LENGTHS if torch.device(device).type == "cpu" else GPU_LENGTHS)
    if words == "none":
        return []
    return settings.positive_numbers("--time-lengths", words, " or 'none'")


def prepare(arguments: argparse.Namespace) -> training.Run:
    """Everything that can fail because of a flag, before anything slow."""
    device = choose_device(arguments.device)
    stored = content = None
    if arguments.resume:
        stored, content = training.read_checkpoint(arguments.out / "checkpoint.pt", device)
    folder = arguments.text or (stored.text if stored else str(text.default_folder()))
    chosen = settings.resolve(arguments, device, folder, stored)
    if arguments.sample_bytes < 0:
        raise settings.UserError(f"--sample-bytes must not be negative, got {arguments.sample_bytes}")
    settings.check_size("--sample-bytes", arguments.sample_bytes, 0)
    settings.check_size("--copy-steps", arguments.copy_steps, 0)
    settings.make_folder(arguments.out)
    run = training.Run(chosen, text.load_text(Path(folder), chosen.context), arguments.out)
    if content is not None:
        run.load(content)
    return run


def introduce(run: training.Run, unigram_bits: float) -> None:
    """Says what is trained on what."""
    chosen, source = run.settings, run.text
    print(
        f"text: {chosen.text}, {source.num_train_files} files with {source.train.numel() / 1e6:.1f} MB to train, "
        f"{source.num_validation_files} with {source.validation.numel() / 1e6:.1f} MB to validate; "
        f"single bytes have {unigram_bits:.3f} bits"
    )
    print(report.tree_words(chosen))
    parameters = sum(p.numel() for p in run.tree.model.parameters())
    where = torch.cuda.get_device_name(chosen.device) if "cuda" in chosen.device else "CPU"
    print(
        f"model: {chosen.layers} layers, width {chosen.dim}, {chosen.heads} query and {chosen.kv_heads} key/value "
        f"heads, {parameters / 1e6:.2f} M parameters, on {where} with {torch.get_num_threads()} threads"
    )
    if run.steps_done:
        print(f"continuing after step {run.steps_done} of {chosen.steps}")


def finish(
    run: training.Run, lengths: Sequence[int], arguments: argparse.Namespace, unigram_bits: float
) -> None:
    """Comparison, copies, times, sample and files."""
    for learner in run.learners:
        if not learner.validation or learner.validation[-1][0] != run.steps_done:
            learner.validate(run.windows)
    print("\n" + report.comparison(run.learners, unigram_bits))
    found: dict[str, float] = {}
    if arguments.copy_steps:
        source = run.text
        found, table = copies.copies_table(
            source.train, source.validation, arguments.copy_steps, run.settings.seed
        )
        print("\n" + table)
    times = report.attention_times(run.settings, lengths, run.settings.dense)
    if times:
        print("\n" + report.times_table(times, run.settings))
    if arguments.sample_bytes:
        prompt, sample = report.generate(run.tree.model, run.text, run.settings, arguments.sample_bytes)
        print(f"\nsample of the tree model after {len(prompt)} characters of unseen text, which end in")
        print(f"{prompt[-60:]!r}\n--- it writes ---\n{sample}\n---")
        (run.folder / "sample.txt").write_text(prompt + sample)
    report.write_history(run.folder / "history.json", run, unigram_bits, times, found)
    report.draw_curves(run.folder / "curves.png", run, unigram_bits, times)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a wrong flag or too little memory (one line on stderr), 130 interrupted and saved."""
    try:
        return train_and_report(list(sys.argv[1:] if argv is None else argv))
    except settings.UserError as error:
        problem = str(error)
    except (MemoryError, RuntimeError) as error:
        if not settings.is_out_of_memory(error):
            raise
        problem = f"out of memory, choose smaller sizes: {str(error).splitlines()[0] if str(error) else 'on the host'}"
    print(f"train_lm.py: {problem}", file=sys.stderr)
    return 2


def train_and_report(words: list[str]) -> int:
    """The whole run for the flags; returns the exit status."""
    started = time.perf_counter()
    arguments = settings.make_parser().parse_args(words)
    lengths = parse_lengths(arguments.time_lengths, choose_device(arguments.device))
    run = prepare(arguments)
    again = " ".join(["python", "examples/train_lm.py", *(w for w in words if w != "--resume"), "--resume"])
    unigram_bits = run.text.unigram_bits()
    introduce(run, unigram_bits)
    try:
        finished = run.train()
        run.save()
        if finished:
            finish(run, lengths, arguments, unigram_bits)
    except KeyboardInterrupt:
        print(f"\nstopped at once; from the last checkpoint it goes on with\n  {again}")
        return INTERRUPTED
    if not finished:
        print(
            f"\nstopped after step {run.steps_done} of {run.settings.steps} and saved; it goes on with\n  {again}"
        )
        return INTERRUPTED
    minutes = (time.perf_counter() - started) / 60
    files = " ".join(sorted(path.name for path in run.folder.iterdir()))
    print(f"\n{minutes:.1f} minutes; in {run.folder}: {files}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
