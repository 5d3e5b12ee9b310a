"""Names that only the design documents ask for.

* ``TensorSpec``: what a tensor must look like.
* ``RMSNormRoPEInput``, ``GatedMLPInput``, ``FP8GEMMInput``: the arguments of a call as one value;
  ``validate_rmsnorm_rope_inputs``, ``validate_gated_mlp_inputs``, ``validate_fp8_gemm_inputs`` and
  ``validate_fp8_quantize_inputs`` check a call without making it. They call it on meta tensors, so that there is one
  owner of every rule; what meta tensors cannot show, devices and the values of scales, is checked here.
* ``FP8Format`` and ``handle_fp8_overflow``: the numbers of E4M3FN, and a scale under which none overflows.
* ``apply_rotary_pos_emb_q`` and ``apply_rotary_pos_emb_k``: rotary positions in the layout of heads first.
* ``apply_grouped_hadamard``, ``convert_key_batched_quant`` and ``mustafar_attention``: other names of
  ``grouped_hadamard``, ``kv_compress`` and ``kv_decode_attention``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.arguments import (
    FLOATING,
    check_devices,
    check_tensors,
    refuse_shape,
    validate_arguments_as,
)
from htree_ops.ops.compressed_kv.functions import kv_compress, kv_decode_attention
from htree_ops.ops.fp8 import FP8Format, handle_fp8_overflow
from htree_ops.ops.gated_mlp import gated_mlp
from htree_ops.ops.gated_mlp.function import Activation, Side
from htree_ops.ops.hadamard.transform import grouped_hadamard
from htree_ops.ops.rmsnorm_rope import rmsnorm_rope

__all__ = [
    "FP8Format",
    "FP8GEMMInput",
    "GatedMLPInput",
    "RMSNormRoPEInput",
    "TensorSpec",
    "apply_grouped_hadamard",
    "apply_rotary_pos_emb_k",
    "apply_rotary_pos_emb_q",
    "convert_key_batched_quant",
    "handle_fp8_overflow",
    "mustafar_attention",
    "validate_fp8_gemm_inputs",
    "validate_fp8_quantize_inputs",
    "validate_gated_mlp_inputs",
    "validate_rmsnorm_rope_inputs",
]

# ---- design document [002]: what a tensor must look like


@dataclass
class TensorSpec:
    """Shape, dtype, device and layout of one tensor.

    Attributes:
        shape: sizes.
        dtype: element type.
        device: the device; without an index it stands for any of its kind.
        contiguous: whether the elements must lie in row-major order without gaps.

    Raises:
        TypeError: shape is not a sequence of ints, or dtype not a torch.dtype. ValueError: a size below 0, or not a
            device.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: str | torch.device = "cuda"
    contiguous: bool = True

    def __post_init__(self) -> None:
        try:
            sizes = [operator.index(size) for size in self.shape]
        except TypeError as error:
            raise TypeError(f"TensorSpec: shape must be a sequence of ints, got {self.shape!r}") from error
        if any(size < 0 for size in sizes):
            raise ValueError(f"TensorSpec: shape must have sizes of at least 0, got {self.shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"TensorSpec: dtype must be a torch.dtype, got {self.dtype!r}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"TensorSpec: device must be one of torch, got {self.device!r}") from error

    def validate(self, tensor: Tensor, name: str = "tensor") -> None:
        """Checks ``tensor``: device, then dtype, rank, sizes and layout.

        Raises:
            DeviceError, UnsupportedDtypeError, ShapeMismatchError: with the facts as attributes.
            ValueError: the tensor is not contiguous, where that is wanted.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        wanted = torch.device(self.device)
        if tensor.device.type != wanted.type or wanted.index not in (None, tensor.device.index):
            raise DeviceError(
                f"{name} must be on {wanted}, got {tensor.device}",
                expected_device=wanted,
                actual_device=tensor.device,
                tensor_name=name,
            )
        if tensor.dtype != self.dtype:
            raise UnsupportedDtypeError(
                f"{name} must have dtype {self.dtype}, got {tensor.dtype}",
                dtype=tensor.dtype,
                supported_dtypes=(self.dtype,),
                tensor_name=name,
            )
        if tuple(tensor.shape) != tuple(self.shape):
            raise ShapeMismatchError(
                f"{name} must have shape {tuple(self.shape)}, got {tuple(tensor.shape)}",
                expected=tuple(self.shape),
                actual=tuple(tensor.shape),
                tensor_name=name,
            )
        if self.contiguous and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")

    def create_tensor(self) -> Tensor:
        """A tensor of this spec: standard normal values for a floating dtype, zeros for the others.

        Where ``contiguous`` is False the last two dims are stored exchanged.
        """
        shape = tuple(self.shape)
        is_strided = not self.contiguous and len(shape) > 1
        stored = (*shape[:-2], shape[-1], shape[-2]) if is_strided else shape
        if self.dtype.is_floating_point:
            tensor = torch.randn(stored, device=self.device).to(self.dtype)
        else:
            tensor = torch.zeros(stored, dtype=self.dtype, device=self.device)
        return tensor.transpose(-1, -2) if is_strided else tensor


# ---- design document [002]: the arguments of a call as one value, and their checks (docs/semantics/python.md §3.4):
# devices first, then dtypes, ranks, shapes and values. Layout is not checked: tensors that the kernels cannot read in
# place are copied.


def _check_place(op: str, tensors: Mapping[str, Tensor], require_cuda: bool) -> None:
    """Raises unless all are dense tensors on one device, on CUDA where that is required."""
    check_devices(op, tensors)
    name, first = next(iter(tensors.items()))
    if require_cuda and first.device.type != "cuda":
        raise DeviceError(
            f"{op}: {name} must be on a CUDA device, got {first.device}",
            expected_device="cuda",
            actual_device=first.device,
            tensor_name=name,
        )


def _meta(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().to("meta") for x in tensors]


def _check_scale_values(op: str, scales: Mapping[str, Tensor]) -> None:
    """Checks that scales are positive and finite, where looking costs no synchronisation: real values on the CPU."""
    for name, scale in scales.items():
        if scale.device.type == "cpu" and type(scale) is Tensor:
            bad = ~(scale.isfinite() & (scale > 0))
            if bool(bad.any()):
                raise ValueError(f"{op}: {name} must be positive and finite, got {float(scale[bad][0])}")


def _wrong_rank(x: Tensor) -> ShapeMismatchError:
    return ShapeMismatchError(
        f"Expected 3D input, got {x.dim()}D", expected=3, actual=x.dim(), tensor_name="x"
    )


def _wrong_weight(
    expected: tuple[int | str, ...], words: str, weight: Tensor, name: str
) -> ShapeMismatchError:
    what = words or " expected"
    shape = expected if not words else "[" + ", ".join(map(str, expected)) + "]"
    return ShapeMismatchError(
        f"Weight shape mismatch:{what} {shape}, got {tuple(weight.shape)}",
        expected=expected,
        actual=tuple(weight.shape),
        tensor_name=name,
    )


@dataclass
class RMSNormRoPEInput:
    """The arguments of :func:`rmsnorm_rope` as one value: x [B, S, Hd], weight [Hd], tables [1 or B, S, hd]."""

    x: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    eps: float = 1e-6

    def validate(self, *, require_cuda: bool = False) -> None:
        """See :func:`validate_rmsnorm_rope_inputs`."""
        validate_rmsnorm_rope_inputs(
            self.x, self.weight, self.cos, self.sin, self.eps, require_cuda=require_cuda
        )


def validate_rmsnorm_rope_inputs(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    num_heads: int | None = None,
    *,
    require_cuda: bool = False,
) -> None:
    """Raises what :func:`rmsnorm_rope` raises for these arguments, with x [B, S, Hd].

    ``require_cuda`` also refuses tensors that are not on a CUDA device, by DeviceError.
    """
    _check_place("rmsnorm_rope", {"x": x, "weight": weight, "cos": cos, "sin": sin}, require_cuda)
    try:
        rows, scales, *tables = _meta(x, weight, cos, sin)
        rmsnorm_rope(rows, scales, tables[0], tables[1], eps, num_heads)
    except ShapeMismatchError as error:
        if error.tensor_name == "x" and x.dim() != 3:
            raise _wrong_rank(x) from None
        if error.tensor_name == "weight":
            raise _wrong_weight((x.shape[2],), "", weight, "weight") from None
        raise


@dataclass
class GatedMLPInput:
    """The arguments of :func:`gated_mlp` as one value: x [B, S, Hd], gate_weight and up_weight [I, Hd]."""

    x: Tensor
    gate_weight: Tensor
    up_weight: Tensor
    activation: Activation = "silu"

    def validate(self, *, require_cuda: bool = False) -> None:
        """See :func:`validate_gated_mlp_inputs`."""
        validate_gated_mlp_inputs(
            self.x, self.gate_weight, self.up_weight, self.activation, require_cuda=require_cuda
        )


def validate_gated_mlp_inputs(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: Activation = "silu",
    act_on: Side = "up",
    *,
    require_cuda: bool = False,
) -> None:
    """Raises what :func:`gated_mlp` raises for these arguments, with x [B, S, Hd].

    ``require_cuda`` also refuses tensors that are not on a CUDA device, by DeviceError.
    """
    _check_place("gated_mlp", {"x": x, "gate_weight": gate_weight, "up_weight": up_weight}, require_cuda)
    if x.is_cuda and x.dtype == torch.float64:  # the op takes it on the CPU, and hence on meta
        raise UnsupportedDtypeError(
            f"gated_mlp: x must not have dtype {x.dtype} on CUDA",
            dtype=x.dtype,
            supported_dtypes=FLOATING,
            tensor_name="x",
        )
    try:
        rows, gate, up = _meta(x, gate_weight, up_weight)
        gated_mlp(rows, gate, up, activation, act_on)
    except ShapeMismatchError as error:
        if x.dim() == 3 and error.tensor_name in ("gate_weight", "up_weight"):
            weight = gate_weight if error.tensor_name == "gate_weight" else up_weight
            inner = "I" if weight is gate_weight else gate_weight.shape[0]
            name = error.tensor_name
            raise _wrong_weight((inner, x.shape[2]), f" {name} must be", weight, name) from None
        if x.dim() == 3:
            raise
    if x.dim() != 3:
        raise _wrong_rank(x)


@dataclass
class FP8GEMMInput:
    """The arguments of :func:`htree_ops.fp8_gemm` as one value: a [M, K] and b [K, N] in FP8, with their scales."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    output_dtype: torch.dtype = torch.float16

    def validate(self, *, require_cuda: bool = False) -> None:
        """See :func:`validate_fp8_gemm_inputs`."""
        validate_fp8_gemm_inputs(
            self.a, self.b, self.a_scale, self.b_scale, self.output_dtype, require_cuda=require_cuda
        )


@validate_arguments_as("fp8_gemm")
def _check_fp8_gemm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, output_dtype: torch.dtype
) -> None:
    torch.ops.htree.fp8_gemm(*_meta(a, b, a_scale, b_scale), output_dtype)


def validate_fp8_gemm_inputs(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    output_dtype: torch.dtype = torch.float16,
    *,
    require_cuda: bool = False,
) -> None:
    """Raises what ``fp8_gemm`` raises for these arguments, and ValueError where a scale on the CPU is not positive
    and finite.

    ``require_cuda`` also refuses tensors that are not on a CUDA device, by DeviceError.
    """
    tensors = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    _check_place("fp8_gemm", tensors, require_cuda)
    _check_fp8_gemm(a, b, a_scale, b_scale, output_dtype)
    _check_scale_values("fp8_gemm", {"a_scale": a_scale, "b_scale": b_scale})


def _check_fp8_quantize(x: Tensor, scale: Tensor | None, granularity: str, dim: int, block: int) -> None:
    torch.ops.htree.fp8_quantize(
        *_meta(x), None if scale is None else _meta(scale)[0], granularity, dim, block
    )


def validate_fp8_quantize_inputs(
    x: Tensor,
    scale: Tensor | None = None,
    granularity: str = "tensor",
    dim: int = -1,
    block: int = 128,
    *,
    require_cuda: bool = False,
    op: str = "fp8_quantize",
    name: str = "x",
) -> None:
    """Raises what ``fp8_quantize`` raises for these arguments, and ValueError where a scale on the CPU is not positive
    and finite.

    ``require_cuda`` also refuses tensors that are not on a CUDA device, by DeviceError.
    ``op`` and ``name`` are those of the function and of x in the messages.
    """
    scales = {} if scale is None else {"scale": scale}
    _check_place(op, {name: x, **scales}, require_cuda)
    validate_arguments_as(op, x=name)(_check_fp8_quantize)(x, scale, granularity, dim, block)
    _check_scale_values(op, scales)


# ---- design document [003]


@validate_arguments_as(x="q", positions="position_ids")
def apply_rotary_pos_emb_q(q: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Half-split rotary positions on q [B, H, S, D] in the layout of heads first, as design document [003] has it.

    Args:
        q: queries, D even.
        cos, sin: with ``position_ids`` float32 [size, D/2], the two halves of
            ``htree_ops.ops.tree_attention.stages.rope_cache``. Without them a row for each token, as models of
            transformers make them: [1 or B, S, D/2], or [1 or B, S, D] with equal halves, of which the first is read;
            any floating dtype.
        position_ids: int32 or int64, [S] or [B, S], in [0, size).

    Returns:
        [B, H, S, D] in the dtype of q, differentiable. Rotation comes before any Hadamard transform: the two do not
        commute (docs/semantics/hadamard.md §4.2, §4.3).

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError: as ``rope``.
    """
    check_tensors("apply_rotary_pos_emb_q", q=(q, "B H S D"))
    return _rotated("apply_rotary_pos_emb_q", q, cos, sin, position_ids)


@validate_arguments_as(x="k", positions="position_ids")
def apply_rotary_pos_emb_k(k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """:func:`apply_rotary_pos_emb_q` of keys k [B, H_kv, S, D]."""
    check_tensors("apply_rotary_pos_emb_k", k=(k, "B H_kv S D"))
    return _rotated("apply_rotary_pos_emb_k", k, cos, sin, position_ids)


def _rotated(function: str, x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> Tensor:
    """x [B, heads, S, D] rotated by the rows of the tables that ``position_ids`` name, or by one for each token."""
    if position_ids is None:
        batch, _, length, width = x.shape
        for name, table in (("cos", cos), ("sin", sin)):
            sizes = tuple(table.shape)
            is_row_per_token = len(sizes) == 3 and sizes[0] in (1, batch) and sizes[1] == length
            if not is_row_per_token or sizes[2] not in (width, width // 2):
                words = f"[1 or {batch}, {length}, {width} or {width // 2}] where position_ids is None"
                refuse_shape(function, name, table, words, (batch, length, width))
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = torch.arange(cos.shape[:2].numel(), device=x.device, dtype=torch.int32)
        position_ids = rows.view(cos.shape[:2]).expand(batch, length)
        cos, sin = (table[..., : width // 2].to(dtype).flatten(0, 1) for table in (cos, sin))
    return torch.ops.htree.rope(x.transpose(1, 2), cos, sin, position_ids).transpose(1, 2)


# The names that design document [003] uses.
apply_grouped_hadamard = grouped_hadamard
convert_key_batched_quant = kv_compress
mustafar_attention = kv_decode_attention
