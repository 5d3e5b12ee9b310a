"""Flags of the example, their defaults per device, and the one line that a wrong value gets."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from htree_ops.ops.tree_attention import HTreeAttention
from htree_ops.ops.tree_attention.options import WITHOUT_INDEX


class UserError(Exception):
    """Something the caller can put right; shown as one line, exit status 2."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not get memory; the CPU's allocator says so by words alone."""
    words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or any(word in str(error) for word in words)


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run; stored in its checkpoint. The defaults are those of a CPU.

    Sizes are in bytes of text (context, sample), in bytes per step = batch * context, or plain counts. A
    ``selection_span`` of 0 stands for None, an ``index_dim`` of 0 for no index.
    """

    device: str
    text: str
    context: int = 4096
    batch: int = 1
    steps: int = 64
    layers: int = 3
    dim: int = 128
    heads: int = 4
    kv_heads: int = 1
    compression_rate: int = 16
    top_k: int = 32
    max_top_nodes: int = 256
    selection_stride: int = 1
    selection_span: int = 0
    learning_rate: float = 0.03
    seed: int = 0
    eval_every: int = 20
    eval_windows: int = 4
    dense: bool = True
    index_dim: int = 32


#: Largest size, count or seed of a flag.
MOST = 2**31 - 1
#: What a GPU gets where a flag is not given: a longer context and a larger model, in bfloat16.
ON_GPU: dict[str, Any] = {
    "context": 32768,
    "batch": 2,
    "steps": 400,
    "layers": 6,
    "dim": 512,
    "heads": 8,
    "kv_heads": 2,
    "eval_windows": 8,
}


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage block in front of an error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


#: What the flags of the settings mean, by their groups; :func:`add_settings` adds the defaults.
ABOUT: dict[str, dict[str, str]] = {
    "model": {
        "layers": "blocks of attention and MLP",
        "dim": "width of the model",
        "heads": "query heads, dim / heads even",
        "kv_heads": "key and value heads, a divisor of heads",
    },
    "tree": {
        "compression_rate": "r, children per node",
        "top_k": "k, nodes that a query refines per layer",
        "max_top_nodes": "M, most nodes of the top layer; decides the depth",
        "selection_stride": "s consecutive queries refine the set of their first one; a power of two that divides r",
        "index_dim": "numbers of an index that learns to select nodes, a multiple of 16, by default at most those of a "
        "head; 0 selects by the means of keys",
        "selection_span": "without an index: tokens of a mean by which nodes are selected, a divisor of r; 0 takes one "
        "mean of the whole node",
    },
    "training": {
        "context": "bytes per sequence; below M + 1 nothing is selected",
        "batch": "sequences per step",
        "steps": "optimizer steps",
        "learning_rate": "peak of Muon's",
        "seed": "of weights, batches and the sample",
        "eval_every": "steps between validations",
        "eval_windows": "validation sequences of context bytes",
    },
}


def add_settings(parser: argparse.ArgumentParser, **words: str) -> None:
    """Flags of the settings, with other ``words`` for some. One without a value given is None."""
    for title, flags in ABOUT.items():
        group = parser.add_argument_group(title)
        for name, about in flags.items():
            cpu = getattr(Settings, name)
            gpu = ON_GPU.get(name, cpu)
            if name == "selection_span":  # where there is no index
                cpu = gpu = WITHOUT_INDEX["quality"][name]
            default = f"default {cpu}" if cpu == gpu else f"default {cpu}, on a GPU {gpu}"
            group.add_argument(
                f"--{name.replace('_', '-')}",
                type=float if name == "learning_rate" else int,
                metavar="N",
                help=words.get(name, f"{about} ({default})"),
            )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(
        prog="train_lm.py",
        description="Trains a byte-level causal language model with tree attention on the sources of Python's "
        "standard library, and the same model with dense attention on the same batches beside it.",
    )
    parser.add_argument(
        "--text", metavar="DIR", help="folder with .py files to learn from; default: the standard library"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train_lm"),
        metavar="DIR",
        help="folder for checkpoint.pt, history.json, curves.png and sample.txt (default %(default)s); "
        "a run without --resume replaces what is there",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the checkpoint in --out; sizes come from it, and --steps may be raised",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:1; default: cuda where the GPU kernels can run"
    )
    parser.add_argument(
        "--no-dense",
        dest="dense",
        action="store_const",
        const=False,
        help="train only the tree model, without the dense one beside it",
    )
    add_settings(parser)
    after = parser.add_argument_group("after training")
    after.add_argument(
        "--sample-bytes",
        default=200,
        type=int,
        metavar="N",
        help="length of the generated sample (default %(default)s)",
    )
    after.add_argument(
        "--time-lengths",
        metavar="T,T,...",
        help="context lengths at which attention alone is timed, or 'none' "
        "(default 4096,8192,16384,32768, on a GPU up to 131072)",
    )
    after.add_argument(
        "--copy-steps",
        default=300,
        type=int,
        metavar="N",
        help="steps in which a model of one layer learns to copy, to see what each selection finds; 0 leaves it out "
        "(default %(default)s)",
    )
    return parser


def resolve(arguments: argparse.Namespace, device: str, text: str, stored: Settings | None) -> Settings:
    """The settings of a run: flags over the checkpoint's (``stored``) or the device's defaults.

    Raises:
        UserError: a flag contradicts the checkpoint, or a value is outside its range.
    """
    given = {f.name: getattr(arguments, f.name) for f in fields(Settings) if f.name not in ("device", "text")}
    given = {name: value for name, value in given.items() if value is not None}
    if stored is None:
        on_gpu = torch.device(device).type == "cuda"
        sizes = asdict(Settings(device, text)) | (ON_GPU if on_gpu else {}) | given
        if "index_dim" not in given:  # none beside spans, and none wider than a head
            most = sizes["dim"] // max(1, sizes["heads"]) // 16 * 16
            sizes["index_dim"] = 0 if sizes["selection_span"] else min(sizes["index_dim"], most)
        if not sizes["index_dim"] and "selection_span" not in given and sizes["compression_rate"] % 2 == 0:
            sizes |= {"selection_span": WITHOUT_INDEX["quality"]["selection_span"]}
        chosen = Settings(**sizes)
    else:
        kept = asdict(stored)
        for name, value in (given | ({"text": text} if arguments.text else {})).items():
            if name != "steps" and value != kept[name]:
                flag = "--no-dense" if name == "dense" else f"--{name.replace('_', '-')} {value}"
                raise UserError(f"{flag} contradicts the checkpoint, which has {name} = {kept[name]}")
        chosen = Settings(**(kept | {"device": device, "steps": given.get("steps", stored.steps)}))
    check(chosen)
    return chosen


def check_size(flag: str, value: int, least: int) -> None:
    """Raises UserError unless ``value`` lies between ``least`` and what the ops can count to."""
    if value < least:
        raise UserError(f"{flag} must be at least {least}, got {value}")
    if value > MOST:
        raise UserError(f"{flag} must be at most {MOST}, got {value}")


def positive_numbers(flag: str, words: str, other: str = "") -> list[int]:
    """Numbers between commas; ``other`` says what else the flag takes."""
    try:
        found = [int(word) for word in words.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UserError(f"{flag} must be positive numbers{other}, got {words!r}")
    check_size(flag, max(found), 1)
    return found


def make_folder(path: Path) -> None:
    """Makes the folder of ``--out``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {path} cannot be made: {error.strerror}") from error


def check(settings: Settings) -> None:
    """Raises UserError for the first value outside its range; tree options are checked by the package."""
    smallest = {"context": 2, "batch": 1, "steps": 1, "layers": 1, "dim": 2, "heads": 1, "kv_heads": 1}
    smallest |= {"seed": 0, "eval_every": 1, "eval_windows": 1, "compression_rate": 2, "top_k": 1}
    smallest |= {"max_top_nodes": 1, "selection_stride": 1, "selection_span": 0, "index_dim": 0}
    for name, least in smallest.items():
        check_size(f"--{name.replace('_', '-')}", getattr(settings, name), least)
    check_size("--batch * --context", settings.batch * settings.context, 2)
    if not 0 < settings.learning_rate < float("inf"):
        raise UserError(f"--learning-rate must be positive and finite, got {settings.learning_rate}")
    r, s = settings.compression_rate, settings.selection_stride
    if s & (s - 1) or r % s:
        raise UserError(f"--selection-stride must be a power of two that divides {r}, got {s}")
    if settings.selection_span and r % settings.selection_span:
        raise UserError(f"--selection-span must be 0 or a divisor of {r}, got {settings.selection_span}")
    sizes = {name: getattr(settings, name) for name in ("dim", "heads", "kv_heads", "index_dim")}
    try:
        HTreeAttention(
            *list(sizes.values())[:3],
            index_dim=settings.index_dim,
            selection_span=settings.selection_span or None,
            compression_rate=r,
            device="meta",
        )
    except ValueError as error:
        words = ", ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
        raise UserError(f"{words}: {error}") from error
