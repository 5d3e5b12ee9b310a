"""The gated MLP: two projections of x, one through an activation, multiplied (docs/semantics/gated_mlp.md §3.2)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from htree_ops.ops.arguments import FLOATING, autocast_dtype, tuning_config, validate_arguments
from htree_ops.tuning.select import configured

Activation = Literal["silu", "gelu"]
Side = Literal["up", "gate"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu")
SIDES: tuple[Side, ...] = ("up", "gate")
#: (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages) of the kernels a caller may ask for.
COMPILED_CONFIGS = ((128, 128, 64, 8, 4), (128, 64, 64, 8, 4), (64, 64, 64, 8, 4), (32, 64, 64, 8, 4))


@validate_arguments
def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: Activation = "silu",
    act_on: Side = "up",
    *,
    BLOCK_M: int | None = None,
    BLOCK_N: int | None = None,
    BLOCK_K: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Tensor:
    """``out = g · act(u)``, the activation on **up**; weights of Llama, Qwen, Mistral … need ``act_on="gate"``.

    ``g = x·Wg^T`` and ``u = x·Wu^T``, accumulated in fp32 (fp64 for fp64), neither rounded before the result is.
    With ``act_on="gate"`` it is ``act(g) · u``, the usual SwiGLU, as in nearly every current model; the default is the
    order of the design document, and with such a model's weights its result is wrong without an error.
    :meth:`FusedGatedMLP.from_module` finds out what a model's MLP computes. ``silu(z) = z·σ(z)``,
    ``gelu(z) = z·Φ(z)`` (the form with erf, not Gemma's with tanh). On sm_90 in fp16 and bf16 the forward is one
    kernel, which reads x once for both products; elsewhere on CUDA it is two products of cuBLAS in fp32, which follow
    ``torch.backends.cuda.matmul.allow_tf32``, and one elementwise kernel. On the CPU row-major weights of fp16, bf16
    and (up to 128 rows of x) fp32 are read as they are, with the same bits for any number of threads; other products,
    and those of the backward, come from the BLAS library, follow ``torch.set_float32_matmul_precision``, and keep
    their bits only for one number of threads (docs/semantics §3.2). Results beyond the range of fp16 are infinite; a
    NaN in a row of x makes that row NaN.
    Source: docs/semantics/gated_mlp.md §3.2, design document [002].

    Under autograd g and u are kept in the dtype of x for the backward, whose gradients therefore err by that
    rounding; in fp16 a product beyond 65504 is kept as an infinity, and its gradients are infinite or NaN even
    where the result is finite. ``torch.ops.htree.gated_mlp_backward`` computes g and u again instead.

    Args:
        x: [..., Hd], any strides; float32, float16, bfloat16, on the CPU also float64. Under autocast all three
            tensors are cast to its dtype, as those of a linear layer are.
        gate_weight: [I, Hd], Wg, of x's dtype.
        up_weight: [I, Hd], Wu, of x's dtype.
        activation: "silu" or "gelu".
        act_on: "up" or "gate", the projection that goes through the activation.
        BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: a configuration of the CUDA kernel for the tuner, all
            or none: rows and columns of the result per block, elements of Hd per stage, warps that multiply,
            stages. Checked on every device, ignored on the CPU and while gradients are recorded.

    Returns:
        A new contiguous tensor [..., I] of x's dtype, differentiable with respect to the three tensors.

    Raises:
        DeviceError: tensors on different devices.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 (float64 on the CPU), or tensors of
            different dtypes.
        ShapeMismatchError: a wrong rank or size.
        ValueError: an unknown activation or side, or a part of a configuration is missing.
        ArchitectureNotSupportedError: a configuration that is not compiled.
        NotImplementedError: a configuration where the kernels it chooses among do not run (fp32, not sm_90).

    Without a configuration ``HTREE_TUNE`` decides: see :mod:`htree_ops.tuning.select`.

    Example:
        >>> x, gate, up = torch.randn(3, 64), torch.randn(96, 64), torch.randn(96, 64)
        >>> gated_mlp(x, gate, up, act_on="gate").shape  # as Llama has it
        torch.Size([3, 96])
    """
    config = tuning_config(
        "gated_mlp",
        COMPILED_CONFIGS,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype in FLOATING:
        x = x.to(dtype)  # the op casts all three; a configuration is chosen by the dtype that it then has
    if config is None and x.dim() and gate_weight.dim():  # the op refuses scalars
        config = configured(
            "gated_mlp",
            (math.prod(x.shape[:-1]), x.shape[-1], gate_weight.shape[0]),
            x,
            lambda tried: torch.ops.htree.gated_mlp(x, gate_weight, up_weight, activation, act_on, tried),
        )
    return torch.ops.htree.gated_mlp(x, gate_weight, up_weight, activation, act_on, config)
