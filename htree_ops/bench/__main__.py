"""``python -m htree_ops.bench``: the older name of ``python -m htree_ops bench`` and of three more commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from htree_ops import __main__ as program

OTHERS = ("compare", "io-only", "report")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``bench``, or the command that the first word names."""
    words = list(sys.argv[1:] if argv is None else argv)
    return program.main(words if words and words[0] in OTHERS else ["bench", *words])


if __name__ == "__main__":
    sys.exit(main())
