"""What a tree cache records on its device for :meth:`htree_ops.TreeKVCache.check`, a bit for each error."""

from __future__ import annotations

from collections.abc import Sequence

#: A length that a cache refuses itself, without the op.
WRONG_LENGTH = 4

#: The bits of csrc/ops/tree_cache/lengths.h.
_WORDS = {
    1: "was given tokens beyond the capacity",
    2: "has no page for tokens that it was given: reserve() takes them before a graph runs",
    WRONG_LENGTH: "was given a negative length or one beyond the call's tokens, or truncated to more than it holds",
    8: "was truncated inside a stride whose leader's lists are gone",
    16: "has a query whose leader is neither in the call nor in the ring of lists",
    32: "was truncated on the device into pages that it shares with others",
    64: "has a page in its table that is none of the pool",
    128: "was truncated inside a node whose tokens are left in fewer bits only",
}


def in_words(errors: Sequence[int]) -> str:
    """The errors of all sequences, by their numbers."""
    return "; ".join(
        f"sequence {b} {words}"
        for b, bits in enumerate(errors)
        for bit, words in _WORDS.items()
        if bits & bit
    )
