"""htree_ops: hierarchical tree attention and fused operators for long-context Transformers.

Importing the package loads the compiled library and registers ``torch.ops.htree.*``.
"""

from htree_ops import _load

_load.load_library()

from htree_ops import flops as flops  # noqa: E402
from htree_ops import parallel_io_only as parallel_io_only  # noqa: E402
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
    CompressedKVCache,
    MustafarAttention,
    kv_compress,
    kv_decode_attention,
    kv_decompress,
    kv_prune,
)
from htree_ops.ops.fp8 import (  # noqa: E402
    FP8Format,
    FP8Linear,
    calibrate_activation_scales,
    fp8_compute_scale,
    fp8_dequantize,
    fp8_fake_quant,
    fp8_gemm,
    fp8_gemm_exact,
    fp8_quantize,
    fp8_scale_inv,
    handle_fp8_overflow,
    quantize_model_,
)
from htree_ops.ops.gated_mlp import FusedGatedMLP, gated_mlp  # noqa: E402
from htree_ops.ops.hadamard import (  # noqa: E402
    HadamardTransform,
    grouped_hadamard,
    hadamard_transform,
    hadamard_transform_,
)
from htree_ops.ops.rmsnorm_rope import FusedRMSNormRoPE, head_rmsnorm_rope, rmsnorm_rope  # noqa: E402
from htree_ops.ops.tree_attention import (  # noqa: E402
    HTreeAttention,
    TreeOptions,
    tree_attention,
    tree_attention_varlen,
)
from htree_ops.ops.tree_cache import (  # noqa: E402
    TreeKVCache,
    tree_cache_append_,
    tree_cache_append_packed_,
    tree_cache_attention,
)
from htree_ops.seed_api import (  # noqa: E402
    FP8GEMMInput,
    GatedMLPInput,
    RMSNormRoPEInput,
    TensorSpec,
    apply_grouped_hadamard,
    apply_rotary_pos_emb_k,
    apply_rotary_pos_emb_q,
    convert_key_batched_quant,
    mustafar_attention,
    validate_fp8_gemm_inputs,
    validate_fp8_quantize_inputs,
    validate_gated_mlp_inputs,
    validate_rmsnorm_rope_inputs,
)
from htree_ops.version import __version__  # noqa: E402

__all__ = [
    "ArchitectureNotSupportedError",
    "CompressedKV",
    "CompressedKVCache",
    "DeviceError",
    "FP8Format",
    "FP8GEMMInput",
    "FP8Linear",
    "FusedGatedMLP",
    "FusedRMSNormRoPE",
    "GatedMLPInput",
    "HTreeAttention",
    "HTreeKernelError",
    "HadamardTransform",
    "MustafarAttention",
    "NumericalOverflowError",
    "RMSNormRoPEInput",
    "ShapeMismatchError",
    "TensorSpec",
    "TreeKVCache",
    "TreeOptions",
    "TuningFailedError",
    "UnsupportedDtypeError",
    "__version__",
    "apply_grouped_hadamard",
    "apply_rotary_pos_emb_k",
    "apply_rotary_pos_emb_q",
    "calibrate_activation_scales",
    "causal_softmax",
    "convert_key_batched_quant",
    "fp8_compute_scale",
    "fp8_dequantize",
    "fp8_fake_quant",
    "fp8_gemm",
    "fp8_gemm_exact",
    "fp8_quantize",
    "fp8_scale_inv",
    "gated_mlp",
    "grouped_hadamard",
    "hadamard_transform",
    "hadamard_transform_",
    "handle_fp8_overflow",
    "head_rmsnorm_rope",
    "kv_compress",
    "kv_decode_attention",
    "kv_decompress",
    "kv_prune",
    "mustafar_attention",
    "quantize_model_",
    "rmsnorm_rope",
    "tree_attention",
    "tree_attention_varlen",
    "tree_cache_append_",
    "tree_cache_append_packed_",
    "tree_cache_attention",
    "validate_fp8_gemm_inputs",
    "validate_fp8_quantize_inputs",
    "validate_gated_mlp_inputs",
    "validate_rmsnorm_rope_inputs",
]
