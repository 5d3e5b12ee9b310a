"""What a run leaves behind: rows, one JSON object per line, and checkpoints in files of a few megabytes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["DONE", "Row", "append_row", "load_checkpoint", "mend", "read_rows", "save_checkpoint"]

ROWS = "rows.jsonl"
LARGEST_PART = 14 * 2**20  # bytes of a file of a checkpoint
#: Status of a run that needs no repetition; "cut" had fewer steps than planned, because of the time limit.
DONE = ("final", "cut")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One evaluation.

    Attributes:
        gpu, cpu, torch, cuda, driver, commit: as in ``htree_ops.bench.results.Environment``. text: the corpus.
        piece, run: which experiment, and which of its runs.
        status: "step" on the way, "final", "cut" (fewer steps than planned), "partial" (interrupted) or "error".
        scale: sizes of the run: full, quick or tiny. baseline: what the row is to be compared with.
        kind, positions, top_k, compression_rate, max_top_nodes, tree_layers, stride, span, window: of the attention.
        context: tokens of a text of the evaluation. trained_context, batch, width, layers, parameters: of the model.
        seed: of weights and texts. step, steps: done and planned. tokens: trained on. learning_rate: the highest.
        train_seconds: spent on the steps, evaluations and compilation not counted. step_ms: of a step at the beginning.
        texts: evaluated. bits_per_byte: of natural text, planted bytes left out.
        copies_found: share of the repeated letters whose probability is above one half. copies_error: its standard
            error over texts. copies_bits: per repeated letter. copies_whole: share of the strings of which every letter
            from the fifth on is found.
        pairs, accuracy: of the recall task.
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
    parameters: int
    seed: int
    step: int
    steps: int
    tokens: int
    learning_rate: float
    train_seconds: float
    step_ms: float | None
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
    note: str = ""


def append_row(folder: Path, row: Row) -> None:
    """Writes the row behind the others, at once."""
    with (folder / ROWS).open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


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
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        os.replace(temporary, path)


def save_checkpoint(folder: Path, name: str, state: dict[str, Tensor]) -> list[Path]:
    """Weights in bfloat16, as NAME.0.pt, NAME.1.pt, ...; the number of files stands in each of them.

    Raises:
        ValueError: one tensor alone is larger than a file may be.
    """
    parts: list[dict[str, Tensor]] = [{}]
    room = LARGEST_PART
    for key, tensor in state.items():
        small = tensor.detach().to("cpu", torch.bfloat16)
        size = small.numel() * small.element_size()
        if size > LARGEST_PART:
            raise ValueError(f"{key} has {size} bytes, a file of a checkpoint holds {LARGEST_PART}")
        if size > room:
            parts.append({})
            room = LARGEST_PART
        parts[-1][key] = small
        room -= size
    paths = []
    for number, part in enumerate(parts):
        path = folder / f"{name}.{number}.pt"
        temporary = path.with_suffix(".tmp")
        torch.save({"parts": len(parts), "weights": part}, temporary)
        os.replace(temporary, path)
        paths.append(path)
    return paths


def load_checkpoint(folders: list[Path], name: str) -> dict[str, Tensor]:
    """What :func:`save_checkpoint` wrote to the first of the folders that holds all of it.

    Raises:
        FileNotFoundError: none does.
    """
    for folder in folders:
        first = folder / f"{name}.0.pt"
        if not first.is_file():
            continue
        count = torch.load(first, weights_only=True)["parts"]
        paths = [folder / f"{name}.{number}.pt" for number in range(count)]
        if all(path.is_file() for path in paths):
            state: dict[str, Tensor] = {}
            for path in paths:
                state |= torch.load(path, weights_only=True)["weights"]
            return state
    raise FileNotFoundError(f"no checkpoint {name} in {', '.join(map(str, folders))}: train it first")
