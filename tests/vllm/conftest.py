"""Tests in a real engine, in an environment that has vLLM: `make test-vllm`. Elsewhere there is nothing to collect."""

import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py", "engines.py"]
#: Before vLLM is imported: one process, no look at hubs, and cores as they come.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Where small models are saved."""
    return tmp_path_factory.mktemp("models")
