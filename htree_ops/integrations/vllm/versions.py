"""Which versions of vLLM the backend is made for: its interface has no version of its own."""

from __future__ import annotations

import re

#: (from, below), as (major, minor). The engine tests run on the first one.
SUPPORTED = ((0, 26), (0, 27))


def is_supported(version: str) -> bool:
    """Whether the backend serves in a vLLM of this version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and SUPPORTED[0] <= (int(found[1]), int(found[2])) < SUPPORTED[1]


def check_version(version: str) -> None:
    """Raises RuntimeError for a version that the backend is not made for.

    No ImportError: vLLM would hide its words when it chooses a backend.
    """
    if not is_supported(version):
        first, end = (".".join(map(str, x)) for x in SUPPORTED)
        raise RuntimeError(
            f"htree: the attention backend CUSTOM needs vllm>={first},<{end}, got {version}: install such a version, "
            "or leave --attention-backend out"
        )
