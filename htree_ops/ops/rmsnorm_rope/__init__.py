"""RMSNorm followed by RoPE in one kernel, and its module (docs/semantics/rmsnorm_rope.md §3.1)."""

from htree_ops.ops.rmsnorm_rope.function import COMPILED_CONFIGS, head_rmsnorm_rope, rmsnorm_rope
from htree_ops.ops.rmsnorm_rope.module import FusedRMSNormRoPE

__all__ = [
    "COMPILED_CONFIGS",
    "FusedRMSNormRoPE",
    "head_rmsnorm_rope",
    "rmsnorm_rope",
]
