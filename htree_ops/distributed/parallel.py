"""Styles of ``parallelize_module`` that know the modules of this package (docs/distributed.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.placement_types import Placement

from htree_ops.ops.fp8 import FP8Linear
from htree_ops.ops.gated_mlp import FusedGatedMLP
from htree_ops.ops.index_loss.layers import WEIGHTS
from htree_ops.ops.rmsnorm_rope import FusedRMSNormRoPE


def _placed(x: Any, mesh: DeviceMesh, given: Sequence[Placement], wanted: Sequence[Placement]) -> Any:
    """A tensor as a DTensor with the ``wanted`` placements; a local one has those that were ``given``."""
    if not isinstance(x, Tensor):
        return x
    whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, given, run_check=False)
    return whole.redistribute(placements=wanted)


def _shard(module: nn.Module, mesh: DeviceMesh, source: int | None, dims: dict[str, int | None]) -> None:
    """Turns parameters and buffers into DTensors, sharded along a dimension or, for None, whole on every rank."""
    for name, dim in dims.items():
        x = getattr(module, name)
        if x is None:
            continue
        placement = [Replicate() if dim is None else Shard(dim)]
        codes = x.dtype == torch.float8_e4m3fn  # no backend sends FP8: its bytes go as what they are
        sent = distribute_tensor(
            x.detach().view(torch.uint8) if codes else x, mesh, placement, src_data_rank=source
        )
        if codes:
            sent = DTensor.from_local(
                sent.to_local().view(x.dtype),
                mesh,
                placement,
                run_check=False,
                shape=x.shape,
                stride=x.stride(),
            )
        if isinstance(x, nn.Parameter):
            module.register_parameter(name, nn.Parameter(sent, requires_grad=x.requires_grad))
        else:
            module.register_buffer(name, sent)


def _distributed(
    module: nn.Module,
    mesh: DeviceMesh,
    given: Sequence[Placement],
    wanted: Placement,
    output: Sequence[Placement],
    local: bool,
) -> nn.Module:
    """``module`` with its first argument placed as ``wanted``, all others whole, and its output as ``output``."""

    def prepare(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        whole = [Replicate()]
        return (
            _placed(inputs[0], mesh, given, [wanted]),
            *(_placed(x, mesh, whole, whole) for x in inputs[1:]),
        )

    def finish(_: nn.Module, result: Any, mesh: DeviceMesh) -> Any:
        placed = result.redistribute(placements=output)
        return placed.to_local() if local else placed

    return distribute_module(module, mesh, None, prepare, finish)


class ColwiseParallel(styles.ColwiseParallel):
    """torch's style for :class:`FusedGatedMLP` and :class:`FP8Linear` too: each rank has some of the output's columns.

    Its keywords are torch's: input_layouts (whole by default), output_layouts (sharded along the last dimension),
    use_local_output (True). Of an :class:`HTreeAttention` it shards the index alone, by heads, with no keyword: the
    projections have styles of their own.

    Raises:
        NotImplementedError: another module than these, ``nn.Linear`` and ``nn.Embedding``.
        ValueError: an :class:`FP8Linear` with fewer columns than ranks, or K/V heads of an index that the ranks do not
            divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if all(hasattr(module, name) for name in WEIGHTS):
            return self._share_index(module, device_mesh)
        if isinstance(module, FusedGatedMLP):
            dims: dict[str, int | None] = {"gate_weight": 0, "up_weight": 0}
        elif isinstance(module, FP8Linear):
            columns, ranks = module.weight.shape[0], device_mesh.size()
            if columns < ranks:
                raise ValueError(
                    f"ColwiseParallel: FP8Linear must have a column for each of {ranks} ranks, got {columns}"
                )
            dims = {"weight": 0, "weight_scale": 0, "bias": 0, "activation_scale": None}
        else:
            return super()._apply(module, device_mesh)
        _shard(module, device_mesh, self.src_data_rank, dims)
        return _distributed(
            module, device_mesh, self.input_layouts, Replicate(), self.output_layouts, self.use_local_output
        )

    def _share_index(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Gives each rank the index of its K/V heads and of their query heads."""
        weight, ranks = getattr(module, WEIGHTS[1]), device_mesh.size()
        if weight is not None and len(weight) % ranks:
            raise ValueError(
                f"ColwiseParallel: the index of {type(module).__name__} must have K/V heads that {ranks} ranks divide, "
                f"got {len(weight)}"
            )
        _shard(module, device_mesh, self.src_data_rank, dict.fromkeys(WEIGHTS, 0))
        return module


class RowwiseParallel(styles.RowwiseParallel):
    """torch's style for :class:`FP8Linear` too: each rank has some columns of x, and the ranks add their results.

    Its keywords are torch's: input_layouts (sharded along the last dimension), output_layouts (whole),
    use_local_output (True). With dynamic scales each rank gets the whole x, because a scale is that of a whole row.

    Raises:
        NotImplementedError: another module than these, ``nn.Linear`` and ``nn.Embedding``; :class:`FusedGatedMLP` is
            not linear in the columns of x.
        ValueError: in_features of an :class:`FP8Linear` is no multiple of 16 for each rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FP8Linear):
            return super()._apply(module, device_mesh)
        ranks, features = device_mesh.size(), module.weight.shape[1]
        step = 16 * ranks
        if (
            ranks > 1 and features % step
        ):  # the weight would move at every call, and not every backend sends FP8
            raise ValueError(
                f"RowwiseParallel: in_features of FP8Linear must be a multiple of 16 for each rank = {step}, got "
                f"{features}"
            )
        dims = {"weight": 1, "weight_scale": None, "bias": None, "activation_scale": None}
        _shard(module, device_mesh, self.src_data_rank, dims)
        return _distributed(
            module, device_mesh, self.input_layouts, Shard(-1), self.output_layouts, self.use_local_output
        )


class SequenceParallel(styles.SequenceParallel):
    """torch's style for :class:`FusedRMSNormRoPE` too: each rank has some of the tokens of x [B, S, Hd].

    Its keywords are torch's: sequence_dim (1), use_local_output (False). cos and sin are whole on every rank, with one
    row for each of the S tokens.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FusedRMSNormRoPE):
            return super()._apply(module, device_mesh)
        _shard(module, device_mesh, self.src_data_rank, {"weight": None})
        tokens = self.sequence_sharding
        return _distributed(module, device_mesh, tokens, tokens[0], tokens, self.use_local_output)
