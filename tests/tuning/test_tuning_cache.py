"""The tuner's cache: keys, damage, many writers, the results of the package (docs/semantics/python.md §3.4, §3.5)."""

import errno
import json
import math
import multiprocessing
import os
import stat
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import htree_ops
from htree_ops._load import build_info
from htree_ops.tuning import SPACES, CacheKey, TuningCache, problems
from htree_ops.tuning import cache as cache_module
from htree_ops.tuning.cache import BUNDLED, cache_dir

KEY = CacheKey(
    "rmsnorm_rope", (8, 2048, 4096, 128), "bfloat16", "contiguous", "NVIDIA H200", "9.0", "1", "ab"
)


names = st.text('abz_,:"{}é ', min_size=1, max_size=8)
keys = st.builds(
    CacheKey,
    kernel=names,
    problem=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    dtype=names,
    layout=names,
    device=names,
    capability=names,
    version=names,
    source=names,
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
configs = st.dictionaries(names, scalars, max_size=4)


@given(entries=st.dictionaries(keys, configs, min_size=1, max_size=5), other=keys)
def test_property_7_what_was_stored_comes_back(tmp_path_factory, entries, other):
    """Feature: tuner, Property 7: set and get agree, also after a reload; keys are isolated; copies come out."""
    folder = tmp_path_factory.mktemp("cache")
    cache = TuningCache(folder, bundled=None)
    for key, config in entries.items():
        cache.set(key, config)
    for reader in (cache, TuningCache(folder, bundled=None)):
        for key, config in entries.items():
            got = reader.get(key)
            assert got == config
            got["changed"] = 1
            assert reader.get(key) == config
        if other not in entries:
            assert reader.get(other) is None


@pytest.mark.parametrize("field", [f.name for f in fields(CacheKey)])
def test_every_field_of_the_key_counts(field, tmp_path):
    cache = TuningCache(tmp_path, bundled=None)
    cache.set(KEY, {"a": 1})
    changed = replace(KEY, **{field: (1,) if field == "problem" else "other"})
    assert cache.get(changed) is None
    assert cache.get(replace(KEY)) == {"a": 1}


def test_a_stored_config_is_not_the_callers(tmp_path):
    cache = TuningCache(tmp_path, bundled=None)
    config = {"a": 1}
    cache.set(KEY, config)
    config["a"] = 2
    assert cache.get(KEY) == {"a": 1}
    wrongs = (
        {"a": [1]},
        {"a": {}},
        {1: 2},
        {"a": torch.zeros(1)},
        {"a": math.nan},
        {"a": -math.inf},
        [1],
        None,
    )
    for wrong in wrongs:
        with pytest.raises(TypeError, match="JSON scalars"):
            cache.set(KEY, wrong)
    for call in (lambda: cache.set("key", {}), lambda: cache.get("key"), lambda: cache.get_any_dtype("key")):
        with pytest.raises(TypeError, match="key must be a CacheKey, got str"):
            call()
    cache.clear()
    assert cache.get(KEY) is None


DAMAGE = [b"", b"{", b"[]", b"\xff\x00", b'{"format": "2", "records": {}}', b'{"format": 1}', b"[" * 100_000]


@pytest.mark.parametrize("content", DAMAGE, ids=lambda content: repr(content[:12]))
def test_a_damaged_file_is_moved_aside(content, tmp_path):
    cache = TuningCache(tmp_path, bundled=None)
    cache.path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert cache.get(KEY) is None
    aside = list(tmp_path.glob("tuning.json.damaged-*"))
    assert [path.read_bytes() for path in aside] == [content]
    cache.set(KEY, {"a": 1})
    assert TuningCache(tmp_path, bundled=None).get(KEY) == {"a": 1}


def test_the_same_damage_is_kept_once_and_other_damage_beside_it(tmp_path):
    for content in (b"{", b"[", b"{"):
        (tmp_path / "tuning.json").write_bytes(content)
        with pytest.warns(RuntimeWarning, match=r"it is now tuning\.json\.damaged-"):
            TuningCache(tmp_path, bundled=None).get(KEY)
    assert sorted(path.read_bytes() for path in tmp_path.glob("*.damaged-*")) == [b"[", b"{"]


def test_only_what_was_read_is_moved_aside(tmp_path, monkeypatch):
    """Between the reading of damaged content and its move another process stores a result."""
    writer, reader = (TuningCache(tmp_path, bundled=None) for _ in range(2))
    reader.path.write_bytes(b"{")
    true = cache_module.locked

    def late(target):
        monkeypatch.setattr(cache_module, "locked", true)
        reader.path.unlink()
        writer.set(KEY, {"a": 1})
        return true(target)

    monkeypatch.setattr(cache_module, "locked", late)
    assert reader.get(KEY) == {"a": 1}
    assert not list(tmp_path.glob("*.damaged-*"))


def _fail(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_file_that_cannot_be_read_stays(number, tmp_path, monkeypatch, recwarn):
    cache = TuningCache(tmp_path, bundled=None)
    cache.set(KEY, {"a": 1})
    before = cache.path.read_bytes()
    other = TuningCache(tmp_path, bundled=None)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", _fail(number))
        assert other.get(KEY) is None
        assert other.get(KEY) is None
        with pytest.raises(OSError, match=os.strerror(number)):
            other.set(KEY, {"a": 2})
    above_the_package = TuningCache(tmp_path / "none")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", _fail(number))
        with pytest.warns(RuntimeWarning, match="results of the package cannot be read"):
            assert above_the_package.get(KEY) is None
    assert [str(warning.message) for warning in recwarn] == [
        f"htree_ops: the tuning cache {cache.path} cannot be read: [Errno {number}] {os.strerror(number)}"
    ]
    assert cache.path.read_bytes() == before
    assert other.get(KEY) == {"a": 1}, "read again once it can be"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_a_miss(kind, tmp_path):
    """Runs in a process of its own, because one that opened a pipe would wait for a writer for ever."""
    path = tmp_path / "tuning.json"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda to: os.symlink("/dev/zero", to)}[kind](path)
    script = f"""
import warnings
import test_tuning_cache as t
cache = t.TuningCache({str(tmp_path)!r}, bundled=None)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert cache.get(t.KEY) is cache.get(t.KEY) is None
    assert not cache.try_set(t.KEY, {{"a": 1}})
for warning, word in zip(caught, ("cannot be read", "is not stored"), strict=True):
    assert word in str(warning.message) and "no regular file" in str(warning.message), warning.message
"""
    folders = [str(Path(__file__).parent), str(Path(htree_ops.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_file_of_a_newer_version_stays(tmp_path):
    cache = TuningCache(tmp_path, bundled=None)
    content = b'{"format": 2, "entries": []}'
    cache.path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="has format 2 of a newer version, this one has format 1"):
        assert cache.get(KEY) is None
    for write in (lambda: cache.set(KEY, {}), cache.check_writable, lambda: cache.export(tmp_path / "out")):
        with pytest.raises(OSError, match="format 2 of a newer version"):
            write()
    assert cache.path.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


@pytest.mark.parametrize("folder", ["file/below", "x" * 300], ids=["below a file", "long"])
def test_an_unusable_folder_is_a_miss(folder, tmp_path):
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / folder, bundled=None)
    with pytest.warns(RuntimeWarning, match="cannot be read") as caught:
        assert cache.get(KEY) is cache.get(KEY) is cache.get_any_dtype(KEY) is None
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="of rmsnorm_rope is not stored"):
        assert not cache.try_set(KEY, {"a": 1})
    with pytest.raises(OSError):
        cache.check_writable()


def test_a_folder_can_be_shared(tmp_path):
    cache = TuningCache(tmp_path, bundled=None)
    before = os.umask(0o002)
    try:
        cache.set(KEY, {"a": 1})
        cache.export(tmp_path / "out.json")
    finally:
        os.umask(before)
    for name in ("tuning.json", "tuning.json.lock", "out.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o664
    (tmp_path / "tuning.json.lock").chmod(0o444)  # as another user sees it, unless tests run as root
    cache.set(KEY, {"a": 2})
    assert TuningCache(tmp_path, bundled=None).get(KEY) == {"a": 2}


def test_a_link_is_written_through(tmp_path):
    real = tmp_path / "real" / "results.json"
    cache = TuningCache(tmp_path / "own", bundled=None)
    cache.folder.mkdir()
    cache.path.symlink_to(real)
    assert cache.get(KEY) is None
    cache.set(KEY, {"a": 1})
    assert cache.path.is_symlink()
    assert json.loads(real.read_text())["records"]
    assert TuningCache(tmp_path / "own", bundled=None).get(KEY) == {"a": 1}
    real.write_text("{")
    with pytest.warns(RuntimeWarning, match=r"it is now results\.json\.damaged-"):
        assert cache.get(KEY) is None
    assert cache.path.is_symlink()
    cache.set(KEY, {"a": 2})
    assert json.loads(real.read_text())["records"]


@pytest.mark.parametrize(
    "key", ["junk", "3", "null", "{}", '{"problem": 1}', "[" * 100_000], ids=lambda k: k[:9]
)
def test_a_record_under_a_key_that_is_none_is_a_miss(key, tmp_path):
    cache = TuningCache(tmp_path, bundled=None)
    cache.set(KEY, {"a": 1})
    content = json.loads(cache.path.read_text())
    content["records"][key] = content["records"][KEY.text()]
    cache.path.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match="damaged tuning record"):
        assert cache.get_any_dtype(replace(KEY, dtype="")) == {"a": 1}


def test_a_damaged_record_is_a_miss_and_the_others_stay(tmp_path):
    cache = TuningCache(tmp_path, bundled=None)
    other = replace(KEY, kernel="gated_mlp")
    cache.set(KEY, {"a": 1})
    cache.set(other, {"a": 2})
    content = json.loads(cache.path.read_text())
    content["records"][KEY.text()]["config"]["a"] = 3
    cache.path.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match="damaged tuning record"):
        assert cache.get(KEY) is None
    assert cache.get(other) == {"a": 2}


def _write_many(folder: str, worker: int, count: int) -> None:
    cache = TuningCache(folder, bundled=None)
    for i in range(count):
        cache.set(replace(KEY, problem=(worker, i)), {"worker": worker, "i": i})


def test_eight_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(str(tmp_path), w, 12)) for w in range(8)]
    reader = TuningCache(tmp_path, bundled=None)
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        got = reader.get(replace(KEY, problem=(3, 5)))  # never half a file
        assert got in (None, {"worker": 3, "i": 5})
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    fresh = TuningCache(tmp_path, bundled=None)
    for worker_idx in range(8):
        for i in range(12):
            assert fresh.get(replace(KEY, problem=(worker_idx, i))) == {"worker": worker_idx, "i": i}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    cache = TuningCache(tmp_path, bundled=None)
    cache.set(KEY, {"a": 1})
    before = cache.path.read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        cache.set(KEY, {"a": 2})
    assert cache.path.read_bytes() == before
    assert not list(tmp_path.glob(".tuning*"))


def test_a_write_makes_a_new_file_and_renames_it(tmp_path, monkeypatch):
    """A reader that has the old file open can still read all of it."""
    cache = TuningCache(tmp_path, bundled=None)
    cache.set(KEY, {"a": 1})
    before = cache.path.read_bytes()
    with cache.path.open("rb") as reader:
        cache.set(KEY, {"a": 2})
        assert os.fstat(reader.fileno()).st_ino != cache.path.stat().st_ino
        assert reader.read() == before
    before = cache.path.read_bytes()

    def refuse(*_):
        raise OSError("no rename")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no rename"):
        cache.set(KEY, {"a": 3})
    assert cache.path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_where_the_cache_lies(tmp_path, monkeypatch):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("HTREE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "htree_ops"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "htree_ops"
    monkeypatch.setenv("HTREE_CACHE_DIR", "~/results")
    assert cache_dir() == Path.home() / "results"
    monkeypatch.delenv("HTREE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "htree_ops"


def test_results_that_come_with_the_package(tmp_path):
    """They serve every build, and a build's own results go before them."""
    shipped, own = tmp_path / "shipped", TuningCache(tmp_path / "own", bundled=tmp_path / "shipped")
    source = TuningCache(tmp_path / "source", bundled=None)
    source.set(KEY, {"a": 1})
    source.set(replace(KEY, problem=(7,)), {})  # the kernel's own choice
    assert source.export(shipped / "h200.json") == 1
    assert own.get(replace(KEY, problem=(7,))) is None
    later = replace(KEY, version="2", source="cd")
    assert own.get(KEY) == own.get(later) == {"a": 1}
    assert own.get(replace(KEY, capability="8.0")) is None
    own.set(later, {"a": 2})
    assert (own.get(later), own.get(KEY)) == ({"a": 2}, {"a": 1})


def test_any_dtype(tmp_path):
    shipped = TuningCache(tmp_path / "source", bundled=None)
    shipped.set(KEY, {"a": 1})
    shipped.export(tmp_path / "shipped" / "h200.json")
    cache = TuningCache(tmp_path / "own", bundled=tmp_path / "shipped")
    unknown = replace(KEY, dtype="", version="2")
    assert cache.get_any_dtype(unknown) == {"a": 1}
    assert cache.get_any_dtype(replace(unknown, kernel="other")) is None
    cache.set(replace(KEY, version="2"), {"a": 2})
    assert cache.get_any_dtype(unknown) == {"a": 2}
    cache.set(replace(KEY, version="2", dtype="float16"), {"a": 3})
    assert cache.get_any_dtype(unknown) is None, "dtypes disagree"


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.json")), ids=lambda path: path.stem)
def test_the_packages_own_results(path, tmp_path):
    cache = TuningCache(tmp_path / "none")
    records = json.loads(path.read_text())["records"]
    assert records
    for text, record in records.items():
        key = CacheKey.parse(text)
        assert cache.get(key) == cache.get(replace(key, source="of another build")) == record["config"]
        assert set(record["config"]) == set(SPACES[key.kernel])
        assert key.problem in problems.PROBLEMS[key.kernel]
        assert record["metrics"]["latency_ms"] > 0


@pytest.mark.gpu
def test_every_configuration_of_the_package_is_compiled(tmp_path):
    wanted = {
        (record["key"]["kernel"], tuple(record["key"]["problem"]), tuple(record["config"].items()))
        for path in BUNDLED.glob("*.json")
        for record in json.loads(path.read_text())["records"].values()
    }
    for kernel, sizes, config in sorted(wanted):
        small = (min(sizes[0], 64), *sizes[1:])
        problem = problems.make_problem(kernel, small, problems.DTYPES[kernel][0], "cuda")
        assert bool(problem.call(**dict(config)).isfinite().all())


def test_the_build_says_what_its_kernels_are():
    hashes = build_info()["source_hashes"]
    assert {"rmsnorm_rope", "fp8"} <= set(hashes)
    assert CacheKey.of("fp8_gemm", (1,), "", "", "cpu").source == hashes["fp8"]
    assert CacheKey.of("somebody_elses", (1,), "", "", "cpu").source == "unknown"
