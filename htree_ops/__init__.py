"""htree_ops: hierarchical tree attention and fused operators for long-context Transformers.

Importing the package loads the compiled library and registers ``torch.ops.htree.*``.
"""

from htree_ops import _load

_load.load_library()

from htree_ops.errors import (  # noqa: E402
    ArchitectureNotSupportedError,
    DeviceError,
    HTreeKernelError,
    NumericalOverflowError,
    ShapeMismatchError,
    TuningFailedError,
    UnsupportedDtypeError,
)
from htree_ops.ops.causal_softmax import causal_softmax  # noqa: E402
from htree_ops.ops.compressed_kv import (  # noqa: E402
    CompressedKV,
    apply_grouped_hadamard,
    apply_rotary_pos_emb_k,
    apply_rotary_pos_emb_q,
    convert_key_batched_quant,
    kv_compress,
    kv_decode_attention,
    kv_decompress,
    kv_prune,
    mustafar_attention,
)
from htree_ops.ops.compressed_kv_attention import MustafarAttention  # noqa: E402
from htree_ops.ops.compressed_kv_cache import CompressedKVCache  # noqa: E402
from htree_ops.ops.hadamard import (  # noqa: E402
    HadamardTransform,
    grouped_hadamard,
    hadamard_transform,
    hadamard_transform_,
)
from htree_ops.ops.rmsnorm_rope import (  # noqa: E402
    FusedRMSNormRoPE,
    RMSNormRoPEInput,
    head_rmsnorm_rope,
    rmsnorm_rope,
    validate_rmsnorm_rope_inputs,
)
from htree_ops.ops.tree_attention import HTreeAttention, tree_attention  # noqa: E402
from htree_ops.version import __version__  # noqa: E402

__all__ = [
    "ArchitectureNotSupportedError",
    "CompressedKV",
    "CompressedKVCache",
    "DeviceError",
    "FusedRMSNormRoPE",
    "HTreeAttention",
    "HTreeKernelError",
    "HadamardTransform",
    "MustafarAttention",
    "NumericalOverflowError",
    "RMSNormRoPEInput",
    "ShapeMismatchError",
    "TuningFailedError",
    "UnsupportedDtypeError",
    "__version__",
    "apply_grouped_hadamard",
    "apply_rotary_pos_emb_k",
    "apply_rotary_pos_emb_q",
    "causal_softmax",
    "convert_key_batched_quant",
    "grouped_hadamard",
    "hadamard_transform",
    "hadamard_transform_",
    "head_rmsnorm_rope",
    "kv_compress",
    "kv_decode_attention",
    "kv_decompress",
    "kv_prune",
    "mustafar_attention",
    "rmsnorm_rope",
    "tree_attention",
    "validate_rmsnorm_rope_inputs",
]
