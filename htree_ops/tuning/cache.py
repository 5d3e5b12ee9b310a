"""Tuning results on disk: one JSON file that any number of processes may read and write at once.

A writer takes a lock, reads the file, adds its record, writes a new file beside it and renames that over the old one.
So a reader sees the old file or the new one, and no record is lost. Each record carries a checksum of its contents.

What cannot be used counts as not found, with a warning, and is never thrown away:

* a damaged file is moved aside, under the lock; its new name ends in a hash of its content;
* a damaged record is ignored;
* a file of a newer format, or one that cannot be read, such as a pipe, stays as it is and is not written over.

The files' modes follow the umask, so that a folder can be shared; a file that is a link is written through it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from htree_ops.tuning.files import locked, new_file, read_regular, replace_text
from htree_ops.tuning.key import CacheKey
from htree_ops.tuning.space import Config, same_config

FORMAT = 1
FILE_NAME = "tuning.json"
#: Results that come with the package, in the format of the cache file.
BUNDLED = Path(__file__).resolve().parent / "results"

Records = dict[str, dict[str, Any]]


def cache_dir() -> Path:
    """``HTREE_CACHE_DIR``, else ``$XDG_CACHE_HOME/htree_ops``, else ``~/.cache/htree_ops``.

    A leading ``~`` of the first is the home folder; the second counts where it is absolute, as its standard says.
    """
    chosen = os.environ.get("HTREE_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "htree_ops"


def _checksum(record: Mapping[str, Any]) -> str:
    content = {name: record[name] for name in ("key", "config", "metrics")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _of_any_dtype(key: CacheKey, records: Records) -> list[Config]:
    """The configurations of those records (by their keys' text) that agree with ``key`` in all but the dtype."""
    return [
        record["config"]
        for text, record in records.items()
        if replace(CacheKey.parse(text), dtype=key.dtype) == key
    ]


def _check_key(key: object) -> None:
    if not isinstance(key, CacheKey):
        raise TypeError(f"TuningCache: key must be a CacheKey, got {type(key).__name__}")


def _check_scalars(what: str, values: object) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(f"TuningCache: {what} must map names to JSON scalars, got {type(values).__name__}")
    for name, value in values.items():
        scalar = value is None or isinstance(value, (bool, int, str))
        scalar = scalar or (isinstance(value, float) and math.isfinite(value))
        if not isinstance(name, str) or not scalar:
            raise TypeError(f"TuningCache: {what} must map names to JSON scalars, got {name!r}: {value!r}")


def _is_valid(text: str, record: Any) -> bool:
    """Whether the record is whole and is filed under its own key."""
    try:
        same = CacheKey.parse(text) == CacheKey.parse(json.dumps(record["key"]))
        return same and record["checksum"] == _checksum(record) and isinstance(record["config"], dict)
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def _valid_records(path: Path, content: bytes) -> Records:
    """Records with a right checksum.

    Raises:
        ValueError: the content is damaged. OSError: it was written by a newer version.
    """
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    number = found.get("format") if isinstance(found, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise OSError(f"{path} has format {number} of a newer version, this one has format {FORMAT}")
    if number != FORMAT:
        raise ValueError(f"no tuning file of format {FORMAT}")
    records = found.get("records")
    if not isinstance(records, dict):
        raise ValueError("no records")
    valid = {text: record for text, record in records.items() if _is_valid(text, record)}
    if len(valid) < len(records):
        warnings.warn(f"htree_ops: ignoring a damaged tuning record in {path}", RuntimeWarning, stacklevel=6)
    return valid


def _content(records: Records) -> str:
    return json.dumps({"format": FORMAT, "records": records}, indent=1, sort_keys=True) + "\n"


class TuningCache:
    """A cache in ``folder`` (default :func:`cache_dir`); its results come before those of the package.

    A result on disk counts only for the build that measured it. The results of the package are defaults for every
    build: their configurations run in all of them, which the tests check on a GPU, and a search replaces them. Every
    value that is returned is a copy, so that changing it changes no record.
    """

    def __init__(self, folder: Path | str | None = None, bundled: Path | None = BUNDLED) -> None:
        self.folder = Path(folder) if folder is not None else cache_dir()
        self.path = self.folder / FILE_NAME
        self._bundled = bundled
        self._stamp: tuple[int, int, int] | None = None
        self._records: Records = {}
        self._bundled_records: Records | None = None
        self._has_warned = False

    def get(self, key: CacheKey) -> Config | None:
        """The configuration of ``key``, or None; the file is read again when another process has changed it.

        A file that cannot be read is a miss, with a warning the first time.
        """
        _check_key(key)
        record = self._current().get(key.text()) or self._from_package().get(key.of_any_build().text())
        return copy.deepcopy(record["config"]) if record else None

    def get_any_dtype(self, key: CacheKey) -> Config | None:
        """The configuration for ``key`` with any dtype; None where there is none, or where dtypes disagree."""
        _check_key(key)
        found = _of_any_dtype(key, self._current())
        found = found or _of_any_dtype(key.of_any_build(), self._from_package())
        agree = found and all(same_config(config, found[0]) for config in found)
        return copy.deepcopy(found[0]) if agree else None

    def set(self, key: CacheKey, config: Config, metrics: Mapping[str, Any] | None = None) -> None:
        """Stores one configuration of JSON scalars, with its measurement, on disk.

        Raises:
            TypeError: a value is not a JSON scalar; NaN and infinities are not JSON scalars.
            OSError: the folder cannot be written, or its file cannot be read or is of a newer format.
        """
        _check_key(key)
        _check_scalars("config", config)
        _check_scalars("metrics", metrics or {})
        record: dict[str, Any] = {"key": asdict(key), "config": dict(config), "metrics": dict(metrics or {})}
        record = json.loads(json.dumps(record))
        record["checksum"] = _checksum(record)
        with locked(self._target()):
            records = self._read_locked()
            records[key.text()] = record
            replace_text(self.path, _content(records))
            self._records, self._stamp = records, self._signature()

    def try_set(self, key: CacheKey, config: Config, metrics: Mapping[str, Any] | None = None) -> bool:
        """:meth:`set`, and a warning where it fails: a finished search is worth more than its place on disk."""
        try:
            self.set(key, config, metrics)
        except (OSError, TypeError) as error:
            text = f"htree_ops: the result of the search of {key.kernel} is not stored: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            return False
        return True

    def check_writable(self) -> None:
        """Raises OSError where :meth:`set` would, so that it is known before a long search."""
        with locked(self._target()):
            self._read_locked()
            with new_file(self._target()):
                pass

    def clear(self) -> None:
        """Forgets what is on disk, whatever it is; the results of the package stay."""
        with locked(self._target()):
            self._target().unlink(missing_ok=True)
            self._records, self._stamp = {}, None

    def export(self, path: Path) -> int:
        """Writes the configurations on disk to ``path``, in the format of the package's own; returns their number.

        Searches that found nothing better than a kernel's own choice are left out: elsewhere they say nothing.

        Raises:
            OSError: the file of the cache cannot be read, or ``path`` not written.
        """
        records = {text: record for text, record in self._read().items() if record["config"]}
        replace_text(path, _content(records))
        return len(records)

    def _current(self) -> Records:
        try:
            signature = self._signature()
            if signature != self._stamp:
                self._records = self._read()
                self._stamp = signature
        except OSError as error:
            self._warn_once(f"htree_ops: the tuning cache {self.path} cannot be read: {error}")
            return {}
        return self._records

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _from_package(self) -> Records:
        if self._bundled_records is None:
            found: Records = {}
            try:
                for path in sorted(self._bundled.glob("*.json")) if self._bundled else ():
                    for text, record in _valid_records(path, path.read_bytes()).items():
                        found[CacheKey.parse(text).of_any_build().text()] = record
            except OSError as error:  # such as too many open files
                self._warn_once(f"htree_ops: the results of the package cannot be read: {error}")
                return {}
            self._bundled_records = found
        return self._bundled_records

    def _target(self) -> Path:
        """The file itself; where that is a link, its target."""
        return Path(os.path.realpath(self.path))

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size

    def _read(self) -> Records:
        """The records on disk; damaged content is moved aside."""
        try:
            return _valid_records(self.path, read_regular(self.path))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            damage = error
        try:
            with locked(self._target()):
                return self._read_locked()  # read again: another process may have replaced the file by now
        except OSError as error:
            text = f"cannot be read ({damage}), and it could not be moved aside: {error}"
            self._warn_once(f"htree_ops: the tuning cache {self.path} {text}")
            return {}

    def _read_locked(self) -> Records:
        """:meth:`_read` under the lock, so that the file that was read is the one that is moved aside."""
        target = self._target()
        try:
            content = read_regular(target)
        except FileNotFoundError:
            return {}
        try:
            return _valid_records(self.path, content)
        except ValueError as error:
            # The name contains a hash of the content, so that other content never has the same name.
            aside = target.with_name(f"{target.name}.damaged-{hashlib.sha256(content).hexdigest()[:16]}")
            target.replace(aside)
            text = f"the tuning cache {self.path} cannot be read ({error}); it is now {aside.name}"
            warnings.warn(f"htree_ops: {text}", RuntimeWarning, stacklevel=6)
            return {}
