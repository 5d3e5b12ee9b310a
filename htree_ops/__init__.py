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
from htree_ops.ops.gated_mlp import (  # noqa: E402
    FusedGatedMLP,
    GatedMLPInput,
    gated_mlp,
    validate_gated_mlp_inputs,
)
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
    "DeviceError",
    "FusedGatedMLP",
    "FusedRMSNormRoPE",
    "GatedMLPInput",
    "HTreeAttention",
    "HTreeKernelError",
    "HadamardTransform",
    "NumericalOverflowError",
    "RMSNormRoPEInput",
    "ShapeMismatchError",
    "TuningFailedError",
    "UnsupportedDtypeError",
    "__version__",
    "causal_softmax",
    "gated_mlp",
    "grouped_hadamard",
    "hadamard_transform",
    "hadamard_transform_",
    "head_rmsnorm_rope",
    "rmsnorm_rope",
    "tree_attention",
    "validate_gated_mlp_inputs",
    "validate_rmsnorm_rope_inputs",
]
