"""Generates text with a byte-level language model from a tree cache, beside a dense cache and beside no tree kept.

Run: ``python examples/generate.py`` (``--help`` lists the flags). It takes the tree model of a checkpoint of
``examples/train_lm.py`` (``--checkpoint``), or trains a small one first. For each length of prompt it reads the prompt
in chunks, writes on byte by byte, and prints how long both take and what the caches hold. "rebuild" keeps the keys
and values alone and builds the tree again for every byte; "dense" runs the same weights with dense attention, for its
speed, where heads have a multiple of 64 channels up to 512. All caches are float32 on the CPU and bfloat16 on a GPU.
``--passkey`` hides five digits in the middle of each prompt, asks for them at its end, and says whether they
were found: a model finds them only if it was trained to copy over such distances.
Two idle CPU cores take under three minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

try:
    import train_lm
    from lm import generation, settings, text, training
    from lm.model import Block, ByteLM, rotate
    from tqdm import tqdm

    from htree_ops import HTreeAttention, tree_attention
    from htree_ops.ops.compressed_kv.format import WIDTHS
except ImportError as error:
    print(f"generate.py: {error}; run 'make demo' once", file=sys.stderr)
    sys.exit(2)

CPU_LENGTHS, GPU_LENGTHS = (4096, 16384), (4096, 32768, 131072, 1048576)
#: Dense attention reads its prompt in one piece: beyond this its quadratic time is nobody's choice.
LONGEST_DENSE = {"cpu": 16384, "cuda": 131072}
TRAINED_HERE: dict[str, Any] = {
    "context": 1024,
    "batch": 4,
    "steps": 150,
    "layers": 2,
    "dim": 128,
    "heads": 2,
    "kv_heads": 1,
}


#: A passkey test (Mohtashami and Jaggi, "Landmark Attention", 2023): the sentence stands in the middle of the prompt,
#: the question at its end.
PASSKEY = "71432"
SENTENCE, QUESTION = (
    f"\nThe pass key is {PASSKEY}. Remember it.\n",
    "\nWhat is the pass key? The pass key is ",
)


def dtype_on(device: torch.device) -> torch.dtype:
    """What caches hold."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Decoder(Protocol):
    """Reads text and says what comes next."""

    def read(self, tokens: Tensor) -> Tensor:
        """tokens int64 [S] behind what was read; logits [256] of the next byte."""
        ...

    def num_bytes(self) -> float:
        """Bytes of the caches."""
        ...


class FromCache:
    """A tree cache for every layer."""

    def __init__(self, model: ByteLM, capacity: int) -> None:
        self.model = model
        dtype = dtype_on(model.embedding.weight.device)
        blocks = (block for block in model.blocks if isinstance(block, Block))
        self.caches = [block.attention.make_cache(1, capacity, dtype=dtype) for block in blocks]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[None], self.caches)[0, -1].float()

    def num_bytes(self) -> int:
        return sum(cache.num_bytes().used for cache in self.caches)


class Rebuild:
    """Rotated keys and values of a layer; each call builds the tree over all of them."""

    def __init__(self, layer: HTreeAttention, capacity: int, place: torch.device) -> None:
        self.layer, self.length = layer, 0
        shape = (2, 1, capacity, layer.num_kv_heads, layer.head_dim)
        self.rows = torch.empty(shape, dtype=dtype_on(place), device=place)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, self.length = self.length, self.length + q.shape[1]
        self.rows[0, :, first : self.length] = rotate(k, start=first)
        self.rows[1, :, first : self.length] = v
        q, (keys, values) = rotate(q, start=first), self.rows[:, :, : self.length]
        # Its own positions are rotated above; a stride would forbid a single byte.
        options = replace(self.layer.options, rope_base=None, selection_stride=1)
        index = self.layer.index_of(q, keys) if self.layer.index_dim else None
        out = tree_attention(q, keys, values, index=index, options=options)
        assert isinstance(out, Tensor)
        return out

    def num_bytes(self) -> float:
        return self.rows[:, :, : self.length].numel() * self.rows.element_size()


def rebuilding(model: ByteLM, capacity: int) -> generation.Decoder:
    place = model.embedding.weight.device
    return generation.Decoder(model, lambda layer: Rebuild(layer, capacity, place), dtype_on(place))


def dense(model: ByteLM, capacity: int) -> generation.Decoder:
    """The same weights with dense attention from a dense cache."""
    dtype = dtype_on(model.embedding.weight.device)
    return generation.make_decoder(model, None, capacity, window=32, chunk=64, dtype=dtype)


DECODERS: dict[str, Callable[[ByteLM, int], Decoder]] = {
    "tree cache": FromCache,
    "rebuild": rebuilding,
    "dense": dense,
}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = settings.OneLineParser(
        prog="generate.py", description="Generates with a tree cache, a dense cache and no tree kept."
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="checkpoint.pt of train_lm.py")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/generate"),
        metavar="DIR",
        help="for generate.json (%(default)s)",
    )
    parser.add_argument(
        "--train-steps", type=int, default=TRAINED_HERE["steps"], metavar="N", help="(default %(default)s)"
    )
    parser.add_argument("--lengths", metavar="N,N", help="bytes of the prompts (default: by device)")
    parser.add_argument(
        "--passkey", action="store_true", help="hide five digits in the prompts and ask for them"
    )
    parser.add_argument("--bytes", type=int, default=32, metavar="N", help="to write (default %(default)s)")
    parser.add_argument(
        "--chunk", type=int, default=2048, metavar="N", help="of a prompt (default %(default)s)"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:1; default: cuda where it can run"
    )
    return parser


def make_model(arguments: argparse.Namespace, device: str) -> tuple[settings.Settings, ByteLM]:
    """The tree model of the checkpoint, or a small one that is trained here."""
    if arguments.checkpoint:
        stored, content = training.read_checkpoint(arguments.checkpoint, device, "--checkpoint")
        model = ByteLM(stored).to(device)
        model.load_state_dict(content["learners"]["tree"]["model"])
        return stored, model.eval()
    settings.check_size("--train-steps", arguments.train_steps, 1)
    chosen = settings.Settings(
        device, str(text.default_folder()), **(TRAINED_HERE | {"steps": arguments.train_steps})
    )
    return chosen, training.train_briefly("tree", chosen).model.eval()


def parse_lengths(arguments: argparse.Namespace, device: str) -> Sequence[int]:
    """Bytes of the prompts, from ``--lengths``.

    Raises:
        UserError: no positive numbers, too large ones, or a prompt that is too short for the passkey.
    """
    words = arguments.lengths
    if words is None:
        return CPU_LENGTHS if torch.device(device).type == "cpu" else GPU_LENGTHS
    lengths = settings.positive_numbers("--lengths", words)
    settings.check_size("--lengths and --bytes together", max(lengths) + arguments.bytes, 1)
    least = len(SENTENCE) + len(QUESTION)
    if arguments.passkey and min(lengths) < least:
        raise settings.UserError(
            f"--lengths: a prompt with a passkey has at least {least} bytes, got {words!r}"
        )
    return lengths


def make_prompt(source: Tensor, length: int, passkey: bool) -> Tensor:
    """``length`` bytes of the text, from its beginning again where it ends; with the passkey in the middle."""
    if not passkey:
        return source.repeat(-(-length // len(source)))[:length]
    sentence, question = (torch.tensor(list(part.encode())) for part in (SENTENCE, QUESTION))
    rest = length - len(sentence) - len(question)
    filler = make_prompt(source, rest, passkey=False)
    return torch.cat((filler[: rest // 2], sentence, filler[rest // 2 :], question))


def write_on(decoder: Decoder, prompt: Tensor, arguments: argparse.Namespace, label: str) -> dict[str, Any]:
    """Reads the prompt and writes the most likely bytes: times, bytes of the caches, and what was written."""
    device = str(prompt.device)
    with training.precision(device):
        started = time.perf_counter()
        for piece in tqdm(
            prompt.split(len(prompt) if label == "dense" else arguments.chunk), desc=label, leave=False
        ):
            logits = decoder.read(piece)
        training.wait_for(device)
        read_seconds = time.perf_counter() - started
        written: list[int] = []
        started = time.perf_counter()
        for _ in range(arguments.bytes):
            token = logits.argmax()
            written.append(int(token))
            logits = decoder.read(token[None])
        training.wait_for(device)
    return {
        "prompt_bytes": len(prompt),
        "cache": label,
        "read_seconds": read_seconds,
        "bytes_per_second": arguments.bytes / (time.perf_counter() - started),
        "cache_bytes": round(decoder.num_bytes()),
        "written": written,
    }


def run(arguments: argparse.Namespace) -> None:
    """Everything after the command line."""
    device = train_lm.choose_device(arguments.device)
    kind = torch.device(device).type
    for name in ("bytes", "chunk"):
        settings.check_size(f"--{name}", getattr(arguments, name), 1)
    lengths = parse_lengths(arguments, device)
    settings.make_folder(arguments.out)
    chosen, model = make_model(arguments, device)
    folder = Path(chosen.text)
    if not folder.is_dir():  # of a checkpoint from another machine
        folder = text.default_folder()
    source = text.load_text(folder, chosen.context).validation.long()
    print(f"{'prompt':>9} {'cache':12}{'prompt, s':>11}{'bytes/s':>10}{'MB':>9}  it writes")
    rows: list[dict[str, Any]] = []
    for length in lengths:
        prompt = make_prompt(source, length, arguments.passkey).to(device)
        for label, make in DECODERS.items():
            if label == "dense" and (
                chosen.dim // chosen.heads not in WIDTHS or length > LONGEST_DENSE[kind]
            ):
                continue
            try:
                row = write_on(make(model, length + arguments.bytes), prompt, arguments, label)
            except (MemoryError, RuntimeError) as error:
                if not settings.is_out_of_memory(error):
                    raise
                print(f"{length:>9} {label:12}  out of memory")
                continue
            found = ""
            if arguments.passkey:
                row["passkey_found"] = bytes(row["written"]).startswith(PASSKEY.encode())
                found = "  passkey found" if row["passkey_found"] else "  passkey not found"
            rows.append(row)
            start = bytes(row["written"][:24]).decode(errors="replace")
            print(
                f"{length:>9} {label:12}{row['read_seconds']:>11.2f}{row['bytes_per_second']:>10.1f}"
                f"{row['cache_bytes'] / 1e6:>9.2f}  {start!r}{found}"
            )
    try:
        (arguments.out / "generate.json").write_text(json.dumps({"settings": asdict(chosen), "rows": rows}))
    except OSError as error:
        raise settings.UserError(f"--out: {arguments.out} cannot be written: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a wrong flag (one line on stderr)."""
    try:
        run(make_parser().parse_args(argv))
    except settings.UserError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
