"""Tuning results on disk: one JSON file that any number of processes may read and write at once.

A writer holds a lock, reads the file again, adds its record, writes a new file beside it and renames that over the
old one, so a reader sees the old or the new one and no record is lost. Each record carries a checksum of its contents.
A file that cannot be read is moved aside with a warning and counts as empty; a record whose checksum is wrong is
ignored with a warning.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from htree_ops._load import build_info
from htree_ops.tuning.space import Config
from htree_ops.version import __version__

__all__ = ["BUNDLED", "CacheKey", "TuningCache", "cache_dir", "device_facts", "source_hash"]

FORMAT = 1
FILE_NAME = "tuning.json"
#: Results that come with the package, in the format of the cache file.
BUNDLED = Path(__file__).resolve().parent / "results"
#: The folder of csrc/ops whose kernels an op runs, where it is not named like the op.
ROOM_OF = {"fp8_gemm": "fp8"}


def cache_dir() -> Path:
    """``HTREE_CACHE_DIR``, else ``$XDG_CACHE_HOME/htree_ops``, else ``~/.cache/htree_ops``."""
    chosen = os.environ.get("HTREE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "htree_ops"


def source_hash(kernel: str) -> str:
    """Hash of the sources that the kernels of an op were built from; "unknown" for a function of another library."""
    hashes = build_info().get("source_hashes", {})
    return str(hashes.get(ROOM_OF.get(kernel, kernel), "unknown"))


def device_facts(device: torch.device | str) -> tuple[str, str]:
    """(name, compute capability) of a device: ("NVIDIA H200", "9.0"); ("cpu", "") for a CPU.

    A device that is no torch device, such as the name of a GPU elsewhere, is its own name.
    """
    try:
        place = torch.device(device)
    except RuntimeError:
        return str(device), ""
    if place.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(place)
        return torch.cuda.get_device_name(place), f"{major}.{minor}"
    return place.type, ""


@dataclass(frozen=True)
class CacheKey:
    """Everything that a configuration's speed depends on.

    Attributes:
        kernel: name of the op.
        problem: sizes.
        dtype: dtype of the first floating argument, such as "bfloat16".
        layout: how the operands lie, such as "contiguous".
        device: name of the device.
        capability: compute capability, "" for a CPU.
        version: version of the library.
        source: hash of the kernels' sources.
    """

    kernel: str
    problem: tuple[int, ...]
    dtype: str
    layout: str
    device: str
    capability: str
    version: str = __version__
    source: str = ""

    @classmethod
    def of(
        cls,
        kernel: str,
        problem: tuple[int, ...],
        dtype: str,
        layout: str,
        device: torch.device | str,
    ) -> CacheKey:
        """The key on this installation."""
        name, capability = device_facts(device)
        return cls(kernel, problem, dtype, layout, name, capability, __version__, source_hash(kernel))

    def text(self) -> str:
        """The key as one line, in which no two keys are equal."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> CacheKey:
        """The inverse of :meth:`text`."""
        facts = json.loads(text)
        return cls(**{**facts, "problem": tuple(facts["problem"])})

    def of_any_build(self) -> CacheKey:
        """The key without version and source."""
        return replace(self, version="", source="")


def _checksum(record: Mapping[str, Any]) -> str:
    content = {name: record[name] for name in ("key", "config", "metrics")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _of_any_dtype(key: CacheKey, records: Mapping[str, dict[str, Any]]) -> list[Config]:
    """Configurations of the records, which go by their keys' text, that are for ``key`` but for the dtype."""
    return [
        record["config"]
        for text, record in records.items()
        if replace(CacheKey.parse(text), dtype=key.dtype) == key
    ]


def _check_scalars(what: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, (bool, int, float, str))):
            raise TypeError(f"TuningCache: {what} must map names to JSON scalars, got {name!r}: {value!r}")


def _valid_records(path: Path, content: Any) -> dict[str, dict[str, Any]]:
    """Records with a right checksum; ValueError where the file is none of ours."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"no tuning file of format {FORMAT}")
    records = content.get("records")
    if not isinstance(records, dict):
        raise ValueError("no records")
    valid = {}
    for key, record in records.items():
        try:
            good = record["checksum"] == _checksum(record) and isinstance(record["config"], dict)
        except (KeyError, TypeError):
            good = False
        if good:
            valid[key] = record
        else:
            warnings.warn(
                f"htree_ops: ignoring a damaged tuning record in {path}", RuntimeWarning, stacklevel=5
            )
    return valid


class TuningCache:
    """A cache in ``folder`` (default :func:`cache_dir`), above the results that come with the package.

    What is on disk counts for the very build that measured it. What comes with the package is a default for every
    build: its configurations run in all of them, which the tests check on a GPU, and a search supersedes it. Values
    that come out are copies: changing one changes no record.
    """

    def __init__(self, folder: Path | str | None = None, bundled: Path | None = BUNDLED) -> None:
        self.folder = Path(folder) if folder is not None else cache_dir()
        self.path = self.folder / FILE_NAME
        self._bundled = bundled
        self._stamp: tuple[int, int, int] | None = None
        self._records: dict[str, dict[str, Any]] = {}
        self._bundled_records: dict[str, dict[str, Any]] | None = None

    def get(self, key: CacheKey) -> Config | None:
        """The configuration of ``key``, or None; the file is read again when another process has changed it."""
        record = self._current().get(key.text()) or self._from_package().get(key.of_any_build().text())
        return copy.deepcopy(record["config"]) if record else None

    def get_any_dtype(self, key: CacheKey) -> Config | None:
        """The configuration for ``key`` with any dtype; None where there is none, or where dtypes disagree."""
        found = _of_any_dtype(key, self._current())
        found = found or _of_any_dtype(key.of_any_build(), self._from_package())
        agree = found and all(config == found[0] for config in found)
        return copy.deepcopy(found[0]) if agree else None

    def set(self, key: CacheKey, config: Config, metrics: Mapping[str, Any] | None = None) -> None:
        """Stores one configuration of JSON scalars, with its measurement, on disk.

        Raises:
            TypeError: a value is not a JSON scalar. OSError: the folder cannot be written.
        """
        _check_scalars("config", config)
        _check_scalars("metrics", metrics or {})
        record: dict[str, Any] = {"key": asdict(key), "config": dict(config), "metrics": dict(metrics or {})}
        record = json.loads(json.dumps(record))
        record["checksum"] = _checksum(record)
        with self._locked():
            records = dict(self._read())
            records[key.text()] = record
            self._write(records)
            self._records, self._stamp = records, self._signature()

    def clear(self) -> None:
        """Forgets what is on disk; the results of the package stay."""
        with self._locked():
            self.path.unlink(missing_ok=True)
            self._records, self._stamp = {}, None

    def export(self, path: Path) -> int:
        """Writes the records on disk to ``path``, in the format of the package's own; returns their number."""
        records = self._current()
        self._write(records, path)
        return len(records)

    def _current(self) -> dict[str, dict[str, Any]]:
        signature = self._signature()
        if signature != self._stamp:
            self._records = self._read()
            self._stamp = self._signature()
        return self._records

    def _from_package(self) -> dict[str, dict[str, Any]]:
        if self._bundled_records is None:
            self._bundled_records = {}
            for path in sorted(self._bundled.glob("*.json")) if self._bundled else ():
                for text, record in _valid_records(path, json.loads(path.read_text())).items():
                    self._bundled_records[CacheKey.parse(text).of_any_build().text()] = record
        return self._bundled_records

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return _valid_records(self.path, json.loads(self.path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            self._quarantine(error)
            return {}

    def _quarantine(self, error: Exception) -> None:
        """Moves the file aside, so that the next writer starts anew and the contents can be looked at."""
        aside = self.path.with_name(f"{FILE_NAME}.damaged-{os.getpid()}-{id(error):x}")
        try:
            os.replace(self.path, aside)
            moved = f"; it is now {aside.name}"
        except OSError as other:
            moved = f", and it could not be moved aside: {other}"
        warnings.warn(
            f"htree_ops: the tuning cache {self.path} cannot be read ({error}){moved}",
            RuntimeWarning,
            stacklevel=4,
        )

    def _write(self, records: Mapping[str, Any], path: Path | None = None) -> None:
        path = path or self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "records": records}, indent=1, sort_keys=True) + "\n"
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{FILE_NAME}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield  # closing the file releases the lock
