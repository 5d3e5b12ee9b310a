"""Every test of the tuner has a cache of its own."""

import pytest

from htree_ops.tuning import forget


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HTREE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HTREE_TUNE", raising=False)
    forget()
    yield
    forget()
