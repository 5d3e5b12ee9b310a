"""Generates text with a byte-level language model from dense and from compressed K/V caches, side by side.

Run: ``python examples/compressed_generation.py`` (``--help`` lists the flags). It takes the dense model of a
checkpoint of ``examples/train_lm.py`` (``--checkpoint``), or trains a small one first, about three minutes on two idle
CPU cores. Then it reads unseen text byte by byte with each kind of cache and prints the bytes that a token takes, the
time per byte, how well the text is predicted and how often the most likely byte is that of the dense cache; and it lets
each of them write on its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

try:
    import train_lm
    from lm import generation, settings, text, training
    from lm.model import ByteLM, DenseAttention
except ImportError as error:
    print(f"compressed_generation.py: {error}; run 'make demo' once", file=sys.stderr)
    sys.exit(2)

WIDTHS = (64, 128, 256, 512)  # one of the caches transforms keys, which takes a power of two
TRAINED_HERE: dict[str, Any] = {
    "context": 1024,
    "batch": 4,
    "steps": 200,
    "layers": 3,
    "dim": 128,
    "heads": 2,
    "kv_heads": 1,
}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = settings.OneLineParser(
        prog="compressed_generation.py",
        description="Decodes a byte-level language model from dense and compressed K/V caches and compares them.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="checkpoint.pt of train_lm.py with heads of 64, 128, 256 or 512 channels (train_lm.py --heads 2 makes "
        "one); default: a model that is trained first and kept in --out",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compressed_generation"),
        metavar="DIR",
        help="folder for generation.json and the model that is trained here (default %(default)s)",
    )
    parser.add_argument(
        "--train-steps",
        type=int,
        default=TRAINED_HERE["steps"],
        metavar="N",
        help="steps of that model (default %(default)s)",
    )
    parser.add_argument("--prompt-bytes", type=int, metavar="N", help="default: half of the model's context")
    parser.add_argument(
        "--bytes",
        type=int,
        metavar="N",
        help="to read after the prompt (default: up to the context, at most 400)",
    )
    parser.add_argument(
        "--write-bytes", type=int, default=80, metavar="N", help="to write freely (default %(default)s)"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=32,
        metavar="N",
        help="newest bytes that stay dense (default %(default)s)",
    )
    parser.add_argument(
        "--chunk", type=int, default=64, metavar="N", help="bytes compressed at a time (default %(default)s)"
    )
    parser.add_argument(
        "--text",
        metavar="DIR",
        help="folder with .py files; default: that of the checkpoint, or the standard library",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:1; default: cuda where it can run"
    )
    return parser


def read_model(path: Path, device: str) -> tuple[settings.Settings, ByteLM]:
    """The dense model of a checkpoint and its settings."""
    stored, content = training.read_checkpoint(path, device, "--checkpoint")
    if "dense" not in content["learners"]:
        raise settings.UserError(f"--checkpoint: {path} has no dense model (train_lm.py without --no-dense)")
    width = stored.dim // stored.heads
    if width not in WIDTHS:
        raise settings.UserError(
            f"--checkpoint: {path} has heads of {width} channels; these caches take 64, 128, 256 or 512 "
            f"(train_lm.py --heads {max(stored.dim // 64, 1)})"
        )
    model = ByteLM(stored, DenseAttention).to(device)
    model.load_state_dict(content["learners"]["dense"]["model"])
    return stored, model


def train_model(arguments: argparse.Namespace, device: str) -> tuple[settings.Settings, ByteLM]:
    """Trains a small dense model, or takes the one that an earlier run left in ``--out``."""
    if arguments.train_steps < 1:
        raise settings.UserError(f"--train-steps must be at least 1, got {arguments.train_steps}")
    chosen = settings.Settings(
        device,
        arguments.text or str(text.default_folder()),
        **(TRAINED_HERE | {"steps": arguments.train_steps}),
    )
    path = arguments.out / "checkpoint.pt"
    if path.is_file():
        stored, model = read_model(path, device)
        if asdict(stored) | {"device": device} == asdict(chosen):
            return stored, model
    learner = training.train_briefly("dense", chosen, DenseAttention)
    torch.save({"settings": asdict(chosen), "learners": {"dense": learner.state()}}, path)
    return chosen, learner.model


def sizes(arguments: argparse.Namespace, context: int) -> tuple[int, int]:
    """Bytes of the prompt and bytes to read after it."""
    prompt = context // 2 if arguments.prompt_bytes is None else arguments.prompt_bytes
    count = max(1, min(context - prompt, 400)) if arguments.bytes is None else arguments.bytes
    for name, value in (("--prompt-bytes", prompt), ("--bytes", count), ("--chunk", arguments.chunk)):
        if value < 1:
            raise settings.UserError(f"{name} must be at least 1, got {value}")
    for name in ("window", "write_bytes"):
        if getattr(arguments, name) < 0:
            flag = name.replace("_", "-")
            raise settings.UserError(f"--{flag} must not be negative, got {getattr(arguments, name)}")
    if prompt + count > context:
        raise settings.UserError(
            f"--prompt-bytes and --bytes together must be at most the model's context of {context}, got {prompt} "
            f"and {count}"
        )
    return prompt, count


def compare(
    arguments: argparse.Namespace, model: ByteLM, sample: torch.Tensor, num_prompt: int
) -> list[dict[str, Any]]:
    """One row per cache: sizes, times, predictions and what it writes. sample: int64 [prompt + bytes]."""
    prompt, rest = sample[:num_prompt], sample[num_prompt:]
    capacity = sample.numel() + arguments.write_bytes
    rows: list[dict[str, Any]] = []
    dense: generation.Trace | None = None
    for name, options in generation.CACHES.items():
        make = partial(generation.make_decoder, model, options, capacity, arguments.window, arguments.chunk)
        trace = generation.read_along(make, prompt, rest, name)
        dense = dense or trace
        written = generation.continuation(make, prompt, arguments.write_bytes, seed=0)
        pairs = zip(written, rows[0]["written"] if rows else written, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(written))
        rows.append(
            {
                "cache": name,
                "bytes_per_token": trace.bytes_per_token,
                "seconds_per_byte": trace.seconds,
                "bits_per_byte": trace.bits_per_byte(rest),
                "agreement": trace.agreement(dense),
                "divergence_bits": trace.divergence(dense),
                "same_bytes_written": same,
                "written": written,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a reader."""
    lines = [
        f"{'cache':26}{'bytes/token':>12}{'of dense':>9}{'ms/byte':>9}{'bits/byte':>10}{'same byte':>10}"
        f"{'KL, bits':>10}{'writes the same':>17}"
    ]
    for row in rows:
        lines.append(
            f"{row['cache']:26}{row['bytes_per_token']:>12.0f}"
            f"{row['bytes_per_token'] / rows[0]['bytes_per_token']:>9.0%}{1e3 * row['seconds_per_byte']:>9.2f}"
            f"{row['bits_per_byte']:>10.3f}{row['agreement']:>10.1%}{row['divergence_bits']:>10.4f}"
            f"{row['same_bytes_written']:>9} of {len(row['written']):>4}"
        )
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> None:
    """Everything after the command line."""
    device = train_lm.choose_device(arguments.device)
    if not arguments.checkpoint:
        sizes(arguments, TRAINED_HERE["context"])  # wrong numbers are named before anything slow
    settings.make_folder(arguments.out)
    if arguments.checkpoint:
        chosen, model = read_model(arguments.checkpoint, device)
    else:
        chosen, model = train_model(arguments, device)
    num_prompt, count = sizes(arguments, chosen.context)
    source = text.load_text(Path(arguments.text or chosen.text), num_prompt + count)
    sample = source.validation[: num_prompt + count].long().to(device)
    print(
        f"model: {chosen.layers} layers, {chosen.heads} query and {chosen.kv_heads} key/value heads of "
        f"{chosen.dim // chosen.heads} channels; a prompt of {num_prompt} unseen bytes, then {count} one by one; "
        f"caches of {str(generation.cache_dtype(device)).removeprefix('torch.')} with {arguments.window} dense "
        f"bytes and chunks of {arguments.chunk}"
    )
    rows = compare(arguments, model, sample, num_prompt)
    print(table(rows))
    for row in rows[:: len(rows) - 1]:
        print(f"--- {row['cache']} writes ---\n{bytes(row['written']).decode(errors='replace')}")
    content = {"settings": asdict(chosen), "prompt_bytes": num_prompt, "bytes": count, "rows": rows}
    (arguments.out / "generation.json").write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a wrong flag (one line on stderr), 130 interrupted."""
    try:
        run(make_parser().parse_args(argv))
    except settings.UserError as error:
        print(f"compressed_generation.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return train_lm.INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
