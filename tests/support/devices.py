"""Which devices the tests and benchmarks can use, what devices are like, and the NaN-filled memory they run on."""

import contextlib
import os
from collections.abc import Iterator

import torch

#: Clusters of 0 to 16 blocks that run at once, where a block has a multiprocessor to itself: on a card whose parts have
#: 16 or 18 multiprocessors, and on H100s.
EVEN_CLUSTERS = [0, 0, *(6 * (16 // blocks) + 2 * (18 // blocks) for blocks in range(2, 17))]
H100_CLUSTERS = [0, 0, 66, 39, 30, 22, 17, 15, 15, 9, *[7] * 7]


def require_cuda() -> bool:
    """Whether ``HTREE_REQUIRE_CUDA=1`` turns every GPU skip into a failure.

    Raises:
        ValueError: the variable is neither 0, 1, empty nor unset.
    """
    value = os.environ.get("HTREE_REQUIRE_CUDA", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"HTREE_REQUIRE_CUDA must be 0, 1 or unset, got {value!r}")
    return value == "1"


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors, also those of ``at::empty`` in C++, start as NaN (the largest value for integers).

    An output element that a kernel forgets then fails, instead of holding an earlier right answer.
    Ops without a deterministic variant only warn inside. Usable around one Hypothesis example.
    """
    previous = torch.are_deterministic_algorithms_enabled()
    previous_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    previous_fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = previous_fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(previous, warn_only=previous_warn_only)
