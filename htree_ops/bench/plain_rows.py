"""Tables of measurements that are not times: any dataclass, one row each."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["print_rows"]


def print_rows(rows: Sequence[DataclassInstance], path: Path | None = None) -> None:
    """Prints the rows as CSV with three digits and writes them whole to ``path``, if given.

    Raises:
        ValueError: there are no rows.
        OSError: ``path`` cannot be written.
    """
    if not rows:
        raise ValueError("rows: at least one is required, got none")
    records = [asdict(row) for row in rows]
    screen = csv.DictWriter(sys.stdout, records[0], lineterminator="\n")
    screen.writeheader()
    screen.writerows(
        {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in record.items()}
        for record in records
    )
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
