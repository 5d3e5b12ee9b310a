"""Tree attention and the fused ops in models of other libraries.

:mod:`htree_ops.integrations.transformers` adds ``attn_implementation="htree"`` to Hugging Face transformers 5, and
:func:`patch_model_` swaps parts of its models. They import transformers; the rest of the package does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they import transformers
    from htree_ops.integrations.patch import patch_model_, unpatch_model_

__all__ = ["patch_model_", "unpatch_model_"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from htree_ops.integrations import patch

    return getattr(patch, name)
