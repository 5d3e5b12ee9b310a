"""What a run leaves behind: rows, one JSON object per line, and checkpoints in files of a few megabytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = "rows.jsonl"
LARGEST_PART = 14 * 2**20  # bytes of a file of a checkpoint, unless the command line says otherwise
AROUND = 4096  # bytes of a file beside its part of the content
#: Status of a run that needs no repetition.
DONE = "final"
#: The experiment with the larger model, which has a smaller corpus.
LARGE = "large"
SHORT = ", texts of "  # in the name of a row of it that is measured on shorter ones
FITTED_AT = (
    ", learning rate "  # in the name of a run whose index was fitted with another one than RATE_OF_FITS
)
#: What the series of a row with needles is.
NEEDLES = "letters found by depth"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One evaluation.

    Attributes:
        gpu, cpu, torch, cuda, driver, commit: as in ``benchmarks.harness.Environment``. text: the corpus.
        piece, run: which experiment, and which of its runs.
        status: "step" on the way, "final", "partial" (interrupted) or "error".
        scale: sizes of the run: full, quick or tiny. baseline: what the row is to be compared with.
        kind, positions, top_k, compression_rate, max_top_nodes, tree_layers, stride, span, window, index_dim: of the
            attention.
        context: tokens of a text of the evaluation. trained_context, batch, width, layers, seen, parameters: of the
            model.
        seed: of weights and texts. step, steps: done and planned. tokens: trained on. learning_rate: the highest.
        train_seconds: spent on the steps, evaluations and compilation not counted. step_ms: of a step at the beginning.
        memory_gib: the most that tensors took on the device in the training; None on a CPU, and of earlier rows.
        texts: evaluated. bits_per_byte: of natural text, planted bytes left out.
        copies_found: share of the repeated letters whose probability is above one half. copies_error: its standard
            error over texts. copies_bits: per repeated letter. copies_whole: share of the strings of which every letter
            from the fifth on is found.
        pairs, accuracy: of the recall task.
        choice: another rule for the nodes that are opened. products: of its scores, in parts of dense attention's.
        series: a list of measurements, None where there is nothing to measure; series_of: what they are.
        note: anything a reader must know.
    """

    piece: str
    run: str
    status: str
    scale: str
    gpu: str
    cpu: str
    torch: str
    cuda: str
    driver: str
    commit: str
    text: str
    baseline: str
    kind: str
    positions: str
    top_k: int
    compression_rate: int
    max_top_nodes: int
    tree_layers: int
    stride: int
    span: int | None
    window: int
    context: int
    trained_context: int
    batch: int
    width: int
    layers: int
    seen: int = 1  # also of rows that were written before there was a choice
    parameters: int
    seed: int
    step: int
    steps: int
    tokens: int
    learning_rate: float
    train_seconds: float
    step_ms: float | None
    memory_gib: float | None = None
    texts: int | None = None
    bits_per_byte: float | None = None
    copies_found: float | None = None
    copies_error: float | None = None
    copies_bits: float | None = None
    copies_whole: float | None = None
    pairs: int | None = None
    accuracy: float | None = None
    series: list[float | None] | None = None
    series_of: str | None = None
    choice: str = ""
    products: float | None = None
    index_dim: int = 0
    note: str = ""


def append_row(folder: Path, row: Row) -> None:
    """Writes the row behind the others, at once."""
    with (folder / ROWS).open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Makes them the rows of the folder, in place of those that were there."""
    temporary = (folder / ROWS).with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    os.replace(temporary, folder / ROWS)


def read_rows(folder: Path) -> list[Row]:
    """The rows of a folder; none where there is no file.

    Raises:
        ValueError: a line is no row; the message names file and line. A last line without its end is left out: the run
            was killed while it wrote.
    """
    path = folder / ROWS
    if not path.is_file():
        return []
    names = {field.name for field in fields(Row)}
    rows = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            entry = json.loads(line)
            rows.append(Row(**entry))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is no row of {len(names)} fields: {error}") from error
    return rows


def mend(folder: Path) -> None:
    """Takes away a last line without its end, so that rows can follow."""
    rows, path = read_rows(folder), folder / ROWS
    if path.is_file() and not path.read_bytes().endswith(b"\n"):
        write_rows(folder, rows)


def _save(folder: Path, name: str, content: dict[str, Any], largest: int) -> list[Path]:
    """``content`` as NAME.0.pt, NAME.1.pt, ... of at most ``largest`` bytes each.

    Every file says how many there are and the digest of the whole, so that files of two contents are not mixed.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    whole = buffer.getbuffer()
    size = largest - AROUND
    digest, count = hashlib.sha256(whole).hexdigest(), -(-len(whole) // size)
    paths = []
    for number in range(count):
        path = folder / f"{name}.{number}.pt"
        temporary = path.with_suffix(".tmp")
        part = torch.frombuffer(whole, dtype=torch.uint8)[number * size : (number + 1) * size]
        torch.save({"parts": count, "digest": digest, "part": part.clone()}, temporary)
        os.replace(temporary, path)
        paths.append(path)
    return paths


def _load(folder: Path, name: str) -> dict[str, Any] | None:
    """What :func:`_save` wrote; None where a file is missing, damaged or of another content."""
    parts: list[dict[str, Any]] = []
    try:
        while not parts or len(parts) < parts[0]["parts"]:
            parts.append(torch.load(folder / f"{name}.{len(parts)}.pt", weights_only=True))
        whole = b"".join(part["part"].numpy().tobytes() for part in parts)
        if hashlib.sha256(whole).hexdigest() != parts[0]["digest"]:
            return None
        found: dict[str, Any] = torch.load(io.BytesIO(whole), weights_only=True)
        return found
    except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError):
        return None


def save_checkpoint(
    folder: Path, name: str, state: dict[str, Tensor], largest: int = LARGEST_PART
) -> list[Path]:
    """Weights in bfloat16, as NAME.0.pt, NAME.1.pt, ...; returns the files."""
    small = {key: tensor.detach().to("cpu", torch.bfloat16) for key, tensor in state.items()}
    return _save(folder, name, small, largest)


def load_checkpoint(folders: Sequence[Path], name: str) -> dict[str, Tensor]:
    """What :func:`save_checkpoint` wrote to the first of the folders that holds all of it.

    Raises:
        FileNotFoundError: none does.
    """
    for folder in folders:
        found = _load(folder, name)
        if found is not None:
            return found
    raise FileNotFoundError(f"no checkpoint {name} in {', '.join(map(str, folders))}: train it first")


@dataclass(frozen=True)
class States:
    """States of one training on its way, in ``folder``: the last whole one is never overwritten, only followed."""

    folder: Path
    run: str
    largest: int = LARGEST_PART

    def _names(self) -> list[str]:
        """Of all states of the run, the latest first."""
        prefix = f"state-{hashlib.sha256(self.run.encode()).hexdigest()[:12]}-"
        found = {path.name.partition(".")[0] for path in self.folder.glob(f"{prefix}*.*")}
        return sorted(found, reverse=True) or [f"{prefix}{0:08}"]

    def save(self, content: dict[str, Any]) -> None:
        """Writes a state and takes the earlier ones away."""
        self.folder.mkdir(parents=True, exist_ok=True)
        earlier = self._names()
        prefix, _, number = earlier[0].rpartition("-")
        _save(self.folder, f"{prefix}-{int(number) + 1:08}", content, self.largest)
        self._remove(earlier)

    def load(self) -> dict[str, Any] | None:
        """The last whole state, if there is one."""
        return next((found for name in self._names() if (found := _load(self.folder, name))), None)

    def clear(self) -> None:
        """Takes all away: the run is done."""
        self._remove(self._names())

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            for path in self.folder.glob(f"{name}.*"):
                path.unlink(missing_ok=True)
