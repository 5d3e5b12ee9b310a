"""htree_ops: hierarchical tree attention and fused operators for long-context Transformers.

Importing the package loads the compiled library and registers ``torch.ops.htree.*``.
"""

from htree_ops import _load

_load.load_library()

from htree_ops.version import __version__  # noqa: E402

__all__ = ["__version__"]
