"""The functions and modules of the rooms, a package for each.

The order of the imports matters: :mod:`htree_ops.seed_api`, which some packages re-export, needs the functions of
compressed_kv first.
"""

import importlib
import sys

from htree_ops.ops import (
    causal_softmax,
    compressed_kv,
    fp8,
    gated_mlp,
    hadamard,
    rmsnorm_rope,
    tree_attention,
    tree_cache,
)

__all__ = [
    "causal_softmax",
    "compressed_kv",
    "fp8",
    "gated_mlp",
    "hadamard",
    "rmsnorm_rope",
    "tree_attention",
    "tree_cache",
]

#: Modules of earlier versions and where their names stand now; both can be imported.
MOVED = {
    "compressed_kv_attention": "htree_ops.ops.compressed_kv.attention",
    "compressed_kv_cache": "htree_ops.ops.compressed_kv.cache",
    "compressed_kv_checks": "htree_ops.ops.compressed_kv.checks",
    "compressed_kv_format": "htree_ops.ops.compressed_kv.format",
    "compressed_kv_state": "htree_ops.ops.compressed_kv.state",
    "compressed_kv_storage": "htree_ops.ops.compressed_kv.storage",
    "compressed_kv_tokens": "htree_ops.ops.compressed_kv.cache",
    "fp8_gemm": "htree_ops.ops.fp8.gemm",
    "fp8_inputs": "htree_ops.seed_api",
    "fp8_linear": "htree_ops.ops.fp8.linear",
    "tensor_spec": "htree_ops.seed_api",
    "tree_attention_stages": "htree_ops.ops.tree_attention.stages",
}
for _old, _new in MOVED.items():
    _module = importlib.import_module(_new)
    sys.modules[f"{__name__}.{_old}"] = _module
    globals()[_old] = _module
