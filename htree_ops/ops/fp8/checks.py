"""Checks of the FP8 functions' arguments, and the arguments of a product as one value (docs/semantics §3.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_ops.errors import ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.arguments import FLOATING, check_devices, check_dtype, check_int_type

__all__ = [
    "FP8GEMMInput",
    "check_block",
    "check_codes",
    "check_product",
    "check_scale_shape",
    "check_scale_values",
    "validate_fp8_gemm_inputs",
    "validate_fp8_quantize_inputs",
]

FP8 = torch.float8_e4m3fn
GRANULARITIES = ("tensor", "channel", "block")


def check_scale_values(op: str, name: str, scale: Tensor) -> None:
    """Positive and finite, where looking costs no synchronisation: real values on the CPU."""
    if scale.device.type != "cpu" or torch.compiler.is_compiling() or type(scale) is not Tensor:
        return
    bad = ~(scale.isfinite() & (scale > 0))
    if bool(bad.any()):
        raise ValueError(f"{op}: {name} must be positive and finite, got {float(scale[bad][0])}")


def _shape_error(op: str, name: str, wanted: object, tensor: Tensor) -> ShapeMismatchError:
    return ShapeMismatchError(
        f"{op}: {name} must have shape {wanted}, got {tuple(tensor.shape)}",
        expected=wanted,
        actual=tuple(tensor.shape),
        tensor_name=name,
    )


def _is_scale_of(scale: Tensor, q: Tensor, block: int) -> bool:
    """Whether the shape is [] or that of q with one dim reduced."""
    if scale.dim() == 0:
        return True
    if scale.dim() != q.dim():
        return False
    differing = [dim for dim in range(q.dim()) if scale.shape[dim] != q.shape[dim]]
    if not differing:
        return block == 1 or q.numel() == 0 or 1 in q.shape
    n = q.shape[differing[0]]
    return len(differing) == 1 and scale.shape[differing[0]] in (1, -(-n // block))


def check_block(op: str, block: int) -> None:
    """Raises TypeError unless ``block`` is an int, ValueError unless it is a positive one of 64 bits."""
    check_int_type(op, "block", block)
    if block < 1:
        raise ValueError(f"{op}: block must be at least 1, got {block}")
    if block >= 2**63:
        raise ValueError(f"{op}: block must be below 2^63, got {block}")


def check_codes(op: str, q: Tensor, scale: Tensor, block: int) -> None:
    """Checks codes and their scale, which may belong to any grouping.

    Raises:
        TypeError, UnsupportedDtypeError, DeviceError, ShapeMismatchError, ValueError: naming q, scale or block.
    """
    check_devices(op, {"q": q, "scale": scale})
    check_dtype(op, (FP8,), q=q)
    check_dtype(op, (torch.float32,), scale=scale)
    check_block(op, block)
    if not _is_scale_of(scale, q, block):
        wanted = f"[] or that of q {tuple(q.shape)} with one dim of n reduced to 1 or ceil(n / {block})"
        raise _shape_error(op, "scale", wanted, scale)
    check_scale_values(op, "scale", scale)


def check_scale_shape(
    op: str, x: Tensor, scale: Tensor | None, granularity: str, dim: int, block: int, name: str = "x"
) -> list[int]:
    """Checks the scale of x, which messages call ``name``, and returns the shape that it must have.

    Raises:
        TypeError, UnsupportedDtypeError, DeviceError, ShapeMismatchError, IndexError, ValueError: see
            :func:`validate_fp8_quantize_inputs`.
    """
    check_devices(op, {name: x} if scale is None else {name: x, "scale": scale})
    if scale is not None:
        check_dtype(op, (torch.float32,), scale=scale)
    if granularity not in GRANULARITIES:
        raise ValueError(f"{op}: granularity must be 'tensor', 'channel' or 'block', got {granularity!r}")
    check_int_type(op, "dim", dim)
    check_block(op, block)
    sizes = list(x.shape)
    if granularity == "tensor" or not sizes:
        sizes = []
    elif not -len(sizes) <= dim < len(sizes):
        raise IndexError(f"{op}: dim must be between {-len(sizes)} and {len(sizes) - 1}, got {dim}")
    else:
        sizes[dim] = 1 if granularity == "channel" else (sizes[dim] + block - 1) // block
    if scale is not None and list(scale.shape) != sizes:
        raise _shape_error(op, "scale", tuple(sizes), scale)
    if scale is not None:
        check_scale_values(op, "scale", scale)
    return sizes


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
    """Checks the arguments of ``fp8_quantize``: devices, then dtypes, ranks, shapes and values.

    Args:
        x, scale, granularity, dim, block: see ``fp8_quantize``.
        require_cuda: refuse tensors that are not on a CUDA device.
        op, name: names of the function and of x in the messages.

    Raises:
        TypeError: x or scale is not a dense tensor, dim or block not an int.
        DeviceError: tensors on different devices, or not on CUDA where that is required.
        UnsupportedDtypeError: x is not float32, float16 or bfloat16, or scale is not float32.
        IndexError: x has no such dim.
        ShapeMismatchError: scale has not the shape that the granularity implies.
        ValueError: unknown granularity, block below 1, or a scale on the CPU that is not positive and finite.
    """
    check_devices(op, {name: x} if scale is None else {name: x, "scale": scale}, require_cuda)
    check_dtype(op, FLOATING, **{name: x})
    check_scale_shape(op, x, scale, granularity, dim, block, name)


@dataclass
class FP8GEMMInput:
    """The arguments of ``fp8_gemm`` as one value.

    Attributes:
        a: [M, K] float8_e4m3fn.
        b: [K, N] float8_e4m3fn, row- or column-major.
        a_scale: fp32 [] or [M, 1].
        b_scale: fp32 [] or [1, N].
        output_dtype: float16, bfloat16 or float32.
    """

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


def validate_fp8_gemm_inputs(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    output_dtype: torch.dtype = torch.float16,
    *,
    require_cuda: bool = False,
) -> None:
    """Checks the arguments of ``fp8_gemm``: devices, then dtypes, ranks, shapes and values.

    Args:
        a, b, a_scale, b_scale, output_dtype: see :class:`FP8GEMMInput`.
        require_cuda: refuse tensors that are not on a CUDA device.

    Raises:
        DeviceError: tensors on different devices, or not on CUDA where that is required.
        UnsupportedDtypeError: a or b is not float8_e4m3fn, a scale is not float32, or another output dtype.
        ShapeMismatchError: a or b is not 2-D, K differs, or a scale is neither [] nor constant along K.
        ValueError: a scale on the CPU that is not positive and finite.
    """
    check_product(
        "fp8_gemm", {"a": a, "b": b}, {"a": a_scale, "b": b_scale}, output_dtype, require_cuda=require_cuda
    )


def check_product(
    op: str,
    operands: Mapping[str, Tensor],
    given: Mapping[str, Tensor | None],
    output_dtype: torch.dtype,
    *,
    supported: Sequence[torch.dtype] = (FP8,),
    require_cuda: bool = False,
) -> None:
    """What :func:`validate_fp8_gemm_inputs` checks, for operands a and b of the ``supported`` dtypes.

    Only operands in FP8 need a scale: ``given`` has it, or None, under the name of its operand.
    """
    scales = {f"{name}_scale": scale for name, scale in given.items() if scale is not None}
    check_devices(op, {**operands, **scales}, require_cuda)
    for name, tensor in operands.items():
        check_dtype(op, supported, **{name: tensor})
        if given[name] is None and tensor.dtype == FP8:
            raise ValueError(f"{op}: {name}_scale is required where {name} is quantised already")
    check_dtype(op, (torch.float32,), **scales)
    a, b = operands["a"], operands["b"]
    if output_dtype not in FLOATING:
        raise UnsupportedDtypeError(
            f"{op}: output_dtype must be {' or '.join(map(str, FLOATING))}, got {output_dtype}",
            dtype=output_dtype,
            supported_dtypes=FLOATING,
            tensor_name="output",
        )
    for name, tensor, words in (("a", a, "[M, K]"), ("b", b, "[K, N]")):
        if tensor.dim() != 2:
            raise ShapeMismatchError(
                f"{op}: {name} must be 2-D {words}, got {tensor.dim()}-D {tuple(tensor.shape)}",
                expected=2,
                actual=tensor.dim(),
                tensor_name=name,
            )
    if b.shape[0] != a.shape[1]:
        raise ShapeMismatchError(
            f"{op}: size 0 of b must be K of a = {a.shape[1]}, got {tuple(b.shape)}",
            expected=a.shape[1],
            actual=b.shape[0],
            tensor_name="b",
        )
    shapes = {"a_scale": (a.shape[0], 1), "b_scale": (1, b.shape[1])}
    for name, scale in scales.items():
        wanted = shapes[name]
        if scale.dim() and tuple(scale.shape) != wanted:
            raise ShapeMismatchError(
                f"{op}: {name} must be [] or {list(wanted)}, constant along K, got {list(scale.shape)}",
                expected=wanted,
                actual=tuple(scale.shape),
                tensor_name=name,
            )
        check_scale_values(op, name, scale)
