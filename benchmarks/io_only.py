"""Tree attention against its IO-only twin; the same as ``python -m htree_ops io-only``."""

from __future__ import annotations

import sys

from htree_ops.bench.io_only import COMMAND

if __name__ == "__main__":
    sys.exit(COMMAND.main())
