"""Real text that every machine with Python has: the standard library's sources, as bytes, split by file."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .settings import UserError

#: Not the library itself, and not on every machine.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
}
VALIDATION_SHARE = 10  # one file in ten
SEPARATOR = b"\0"  # begins every file; does not occur inside one


@dataclass(frozen=True)
class Text:
    """Training and validation bytes, uint8 [num_bytes] each, and how many files they came from."""

    train: Tensor
    validation: Tensor
    num_train_files: int
    num_validation_files: int

    def unigram_bits(self) -> float:
        """Entropy of the byte frequencies of the training text: what a model without context can reach."""
        share = torch.bincount(self.train.int(), minlength=256).double() / self.train.numel()
        return float(-(share[share > 0] * share[share > 0].log2()).sum())


def default_folder() -> Path:
    """The standard library of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def _is_validation(name: str) -> bool:
    """By the hash of the name, so that the split is the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % VALIDATION_SHARE == 0


def load_text(folder: Path, context: int) -> Text:
    """Reads every .py file under ``folder`` in the order of names.

    Raises:
        UserError: no such folder, no files, or a part shorter than one sequence of ``context`` + 1 bytes.
    """
    if not folder.is_dir():
        raise UserError(f"--text: {folder} is not a folder")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if path.is_file() and not SKIPPED.intersection(name.parts):
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"--text: {path} cannot be read: {error.strerror}") from error
            parts[_is_validation(name.as_posix())].append(SEPARATOR + content)
    joined = {held_out: b"".join(files) for held_out, files in parts.items()}
    for held_out, word in ((False, "training"), (True, "validation")):
        if len(joined[held_out]) <= context:
            raise UserError(
                f"--text: {folder} has {len(joined[held_out])} bytes of {word} text in "
                f"{len(parts[held_out])} .py files, --context {context} needs {context + 1}"
            )
    train, validation = (
        torch.frombuffer(bytearray(joined[held_out]), dtype=torch.uint8) for held_out in (False, True)
    )
    return Text(train, validation, len(parts[False]), len(parts[True]))


def training_batch(text: Text, step: int, context: int, batch: int, seed: int) -> Tensor:
    """The bytes of one step, int64 [batch, context + 1]: a function of ``seed`` and ``step`` alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(text.train.numel() - context, (batch,), generator=generator)
    return torch.stack([text.train[start : start + context + 1] for start in starts.tolist()]).long()


def validation_windows(text: Text, context: int, count: int) -> Tensor:
    """Up to ``count`` sequences spread evenly over the validation text, int64 [n, context + 1]."""
    last = text.validation.numel() - context - 1
    count = max(1, min(count, last // context + 1))
    starts = [last * i // max(count - 1, 1) for i in range(count)]
    return torch.stack([text.validation[start : start + context + 1] for start in starts]).long()
