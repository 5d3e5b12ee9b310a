"""What a tree cache records on its device for :meth:`htree_ops.TreeKVCache.check`, a bit for each error."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TAIL_LOST", "WRONG_LENGTH", "in_words"]

#: A length that ``tree_cache_pages_`` or the cache refuses.
WRONG_LENGTH = 4
#: A refused truncation of packed tokens, which the op does not know.
TAIL_LOST = 128

#: The other bits are those of csrc/ops/tree_cache/page_layout.h alone.
_WORDS = {
    1: "was given tokens beyond the capacity",
    2: "found no free page",
    WRONG_LENGTH: "was given a negative length or one beyond the call's tokens, or truncated to more than it holds",
    8: "was truncated inside a stride whose leader's lists are gone",
    16: "has a query whose leader is neither in the call nor in the ring of lists",
    32: "was given a beam that is none",
    64: "has a page in its table that is none of the pool",
    TAIL_LOST: "was truncated inside a node whose tokens are left in fewer bits only",
    256: "has a length that its pages do not hold, or more pages than its row of the table",
    512: "has a page whose users are not those of the table: none, or others where it gets tokens",
    1024: "found a contradiction in the free pages: their number, or one that has users or is none of the pool",
}


def in_words(errors: Sequence[int]) -> str:
    """The errors of all sequences, by their numbers."""
    return "; ".join(
        f"sequence {b} {words}"
        for b, bits in enumerate(errors)
        for bit, words in _WORDS.items()
        if bits & bit
    )
