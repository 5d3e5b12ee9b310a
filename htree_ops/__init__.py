"""htree_ops: hierarchical tree attention and fused operators for long-context Transformers.

Importing the package loads the compiled library and registers ``torch.ops.htree.*``. These are the names that a model
needs; ``htree_ops.ops.<family>`` has every function of a family, ``htree_ops.compat`` the names that only the design
documents use.
"""

from htree_ops import _load

_load.load_library()

from htree_ops import flops as flops  # noqa: E402
from htree_ops.errors import (  # noqa: E402
    ArchitectureNotSupportedError,
    DeviceError,
    HTreeKernelError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)
from htree_ops.ops.causal_softmax import causal_softmax  # noqa: E402
from htree_ops.ops.compressed_kv import (  # noqa: E402
    CompressedKV,
    CompressedKVCache,
    MustafarAttention,
    kv_compress,
    kv_decode_attention,
    kv_decompress,
)
from htree_ops.ops.fp8 import (  # noqa: E402
    FP8Linear,
    fp8_compute_scale,
    fp8_dequantize,
    fp8_fake_quant,
    fp8_gemm,
    fp8_quantize,
    quantize_model_,
)
from htree_ops.ops.gated_mlp import FusedGatedMLP, gated_mlp  # noqa: E402
from htree_ops.ops.hadamard import (  # noqa: E402
    HadamardTransform,
    grouped_hadamard,
    hadamard_transform,
)
from htree_ops.ops.index_loss import fit_index, index_loss, index_losses  # noqa: E402
from htree_ops.ops.rmsnorm_rope import FusedRMSNormRoPE, head_rmsnorm_rope, rmsnorm_rope  # noqa: E402
from htree_ops.ops.selection import select_blocks, select_blocks_varlen  # noqa: E402
from htree_ops.ops.sparse_attention import sparse_attention, sparse_attention_varlen  # noqa: E402
from htree_ops.ops.tree_attention import (  # noqa: E402
    HTreeAttention,
    TreeOptions,
    tree_attention,
    tree_attention_varlen,
)
from htree_ops.ops.tree_cache import (  # noqa: E402
    TreeKVCache,
)
from htree_ops.version import __version__  # noqa: E402

__all__ = [
    "ArchitectureNotSupportedError",
    "CompressedKV",
    "CompressedKVCache",
    "DeviceError",
    "FP8Linear",
    "FusedGatedMLP",
    "FusedRMSNormRoPE",
    "HTreeAttention",
    "HTreeKernelError",
    "HadamardTransform",
    "MustafarAttention",
    "ShapeMismatchError",
    "TreeKVCache",
    "TreeOptions",
    "UnsupportedDtypeError",
    "__version__",
    "causal_softmax",
    "fit_index",
    "fp8_compute_scale",
    "fp8_dequantize",
    "fp8_fake_quant",
    "fp8_gemm",
    "fp8_quantize",
    "gated_mlp",
    "grouped_hadamard",
    "hadamard_transform",
    "head_rmsnorm_rope",
    "index_loss",
    "index_losses",
    "kv_compress",
    "kv_decode_attention",
    "kv_decompress",
    "quantize_model_",
    "rmsnorm_rope",
    "select_blocks",
    "select_blocks_varlen",
    "sparse_attention",
    "sparse_attention_varlen",
    "tree_attention",
    "tree_attention_varlen",
]
