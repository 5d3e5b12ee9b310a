"""The common base of case lists: a family's list feeds its tests, opcheck and benchmarks."""

import abc
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from htree_ops.ops.arguments import dtype_name


@dataclass(frozen=True, kw_only=True)
class Case(abc.ABC):
    """One problem for one op.

    Attributes:
        name: short and unique within its list.
        dtype: dtype of the floating inputs.
        reads_a_part: whether the op reads only what ``bytes`` counts of much larger inputs.
    """

    name: str
    dtype: torch.dtype
    reads_a_part: ClassVar[bool] = False

    @abc.abstractmethod
    def make_inputs(self, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Positional arguments of the op, tensors on ``device``; equal for equal seed and device."""

    @abc.abstractmethod
    def bytes(self) -> int:
        """Bytes between memory and chip that no implementation avoids: each operand and result once."""

    @abc.abstractmethod
    def flops(self) -> int:
        """Arithmetic operations that the result needs, exponentials and divisions counted as one each."""

    @property
    def id(self) -> str:
        """Name in a test report: ``name-dtype``."""
        return f"{self.name}-{dtype_name(self.dtype)}"

    @property
    def shapes(self) -> str:
        """Sizes for a results table; a family says more where one word is not enough."""
        return self.name


def case_id(case: Case) -> str:
    """For ``pytest.mark.parametrize("case", CASES, ids=case_id)``."""
    return case.id


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, seed: int, scale: float = 1.0
) -> torch.Tensor:
    """Contiguous standard normal values times ``scale``, drawn on ``device`` in fp32 (fp64 for fp64)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn_as = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.randn(shape, dtype=drawn_as, device=device, generator=generator)
    return values.mul_(scale).to(dtype)


#: The scale with which :func:`one_step_apart` gives scores of 2^27 + 16 n, in powers of two.
STEP_SCALE = 16 / math.log2(math.e)


def one_step_apart(q: torch.Tensor, k: torch.Tensor, dim: int, run: int) -> None:
    """Fills q and k so that every ``run`` of tokens, along ``dim`` of k, scores one float above the run before."""
    q[:], k[:] = 0, 0
    q[..., 0], q[..., 1], k[..., 0] = 4096, 1, 2048
    steps = torch.arange(k.shape[dim], device=k.device) // run
    k[..., 1] = steps.view([-1 if i == dim else 1 for i in range(k.dim() - 1)])
