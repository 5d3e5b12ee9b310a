"""The problems that ``python -m htree_ops tune`` searches, and how each op is called with a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import htree_ops
from htree_ops.tuning.metrics import gated_mlp_flops, gemm_flops
from htree_ops.tuning.space import SPACES

#: Sizes of each op: (B, S, Hd, hd) · (rows, Hd, I) · (M, N, K).
PROBLEMS: dict[str, tuple[tuple[int, ...], ...]] = {
    "rmsnorm_rope": tuple(
        (batch, seq_len, hidden, 128)
        for hidden in (2048, 4096, 8192)
        for batch, seq_len in ((1, 1), (32, 1), (1, 2048), (8, 2048))
    ),
    "gated_mlp": tuple(
        (rows, hidden, inner)
        for hidden, inner in ((2048, 5632), (4096, 11264), (8192, 22528))
        for rows in (1, 64, 512, 4096)
    ),
    "fp8_gemm": tuple(
        (m, n, k)
        for n, k in ((4096, 4096), (8192, 8192), (2112, 7168), (7168, 1536), (24576, 1536))
        for m in (1, 16, 64, 256, 4096)
    ),
}
#: dtypes that are searched; the key of a product has the dtype of its codes, so one output dtype stands for all.
DTYPES = {
    "rmsnorm_rope": (torch.bfloat16, torch.float16),
    "gated_mlp": (torch.bfloat16, torch.float16),
    "fp8_gemm": (torch.bfloat16,),
}


@dataclass(frozen=True)
class Problem:
    """One call of an op on fixed inputs.

    Attributes:
        kernel: name of the op.
        sizes: see :data:`PROBLEMS`.
        dtype: of the first floating argument, for the cache's key.
        arguments: of the op, without a configuration.
        call: runs the op with the keys of a configuration as keywords.
        device: where the inputs lie.
        flops, num_bytes: work of one call.
        layout: of the operands, for the cache's key.
    """

    kernel: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    arguments: tuple[Any, ...]
    call: Callable[..., Any]
    device: torch.device
    flops: int
    num_bytes: int
    layout: str = "contiguous"


def tunable_kernels() -> list[str]:
    """Ops of :data:`SPACES` that this library has."""
    return [name for name in SPACES if hasattr(torch.ops.htree, name)]


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_sizes(kernel: str, sizes: tuple[int, ...]) -> None:
    """Raises ValueError unless ``kernel`` is an op of :data:`PROBLEMS` that takes so many sizes."""
    if kernel not in SPACES:
        raise ValueError(f"make_problem: kernel must be one of {', '.join(SPACES)}, got {kernel!r}")
    wanted = len(PROBLEMS[kernel][0])
    if len(sizes) != wanted:
        raise ValueError(f"make_problem: {kernel} takes {wanted} sizes, got {sizes}")


def input_bytes(kernel: str, sizes: tuple[int, ...]) -> int:
    """The fewest bytes that inputs and result take: each is drawn in fp32, then kept in 2 bytes per element."""
    if kernel == "rmsnorm_rope":
        batch, seq_len, hidden, head_dim = sizes
        return 6 * (2 * batch * seq_len * hidden + hidden + seq_len * head_dim)
    rows, one, other = sizes
    matrices = 2 if kernel == "gated_mlp" else 1
    inner, outer = (one, other) if kernel == "gated_mlp" else (other, one)
    return 6 * (rows * inner + matrices * inner * outer + rows * outer)


def make_problem(
    kernel: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Problem:
    """Random inputs of the sizes, which are checked, and the call on them."""
    check_sizes(kernel, sizes)
    place = torch.device(device)
    op = getattr(torch.ops.htree, kernel)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place).to(dtype)

    if kernel == "rmsnorm_rope":
        batch, seq_len, hidden, head_dim = sizes
        x, weight, table = randn(batch, seq_len, hidden), randn(hidden), randn(seq_len, head_dim)
        arguments: tuple[Any, ...] = (x, weight, table, table, 1e-6, None)
        flops, num_bytes, result = 10 * x.numel(), _bytes(x, x, weight, table, table), dtype
    elif kernel == "gated_mlp":
        rows, hidden, inner = sizes
        x, gate, up = randn(rows, hidden), randn(inner, hidden) * 0.02, randn(inner, hidden) * 0.02
        arguments = (x, gate, up, "silu", "up")
        flops = gated_mlp_flops(1, rows, hidden, inner)
        num_bytes, result = _bytes(x, gate, up) + rows * inner * dtype.itemsize, dtype
    else:
        m, n, k = sizes
        a, a_scale, _ = htree_ops.fp8_quantize(randn(m, k), granularity="channel")
        b, b_scale, _ = htree_ops.fp8_quantize(randn(n, k), granularity="channel")
        arguments = (a, b.t(), a_scale, b_scale.t(), dtype)
        flops, num_bytes, result = gemm_flops(m, n, k), _bytes(a, b) + m * n * dtype.itemsize, a.dtype
    return Problem(
        kernel=kernel,
        sizes=sizes,
        dtype=result,
        arguments=arguments,
        call=lambda **config: op(*arguments, [config[name] for name in SPACES[kernel]] if config else None),
        device=place,
        flops=flops,
        num_bytes=num_bytes,
        layout="column-major b" if kernel == "fp8_gemm" else "contiguous",
    )


def all_problems(
    kernels: list[str], device: torch.device | str, sizes: tuple[int, ...] | None = None
) -> Iterator[Problem]:
    """The problems of the ops one after another, or those of the given sizes; only one holds memory at a time."""
    for kernel in kernels:
        for chosen in (sizes,) if sizes else PROBLEMS[kernel]:
            for dtype in DTYPES[kernel]:
                yield make_problem(kernel, chosen, dtype, device)
