"""What the tests of modules that start on meta run on every rank."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.module_makers import NAMED


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, whole, by the names of the module that the model is made of."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name.rpartition("0.")[2]: (x.full_tensor() if isinstance(x, DTensor) else x).detach().float()
        for name, x in found.items()
    }


def start_on_meta(name: str, way: str) -> dict[str, Tensor]:
    """The tensors of a module after the start that the documents of FSDP2 or FSDP1 prescribe."""
    model: nn.Module = nn.Sequential(NAMED[name]("meta"))
    if way == "FSDP1":  # it materialises and resets what is on meta by itself
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: x.clone() for name, x in tensors_of(model).items()}
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            (x.to_local() if isinstance(x, DTensor) else x).fill_(torch.nan)
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return tensors_of(model)


def start_alone(name: str) -> dict[str, Tensor]:
    """The tensors of a fresh module."""
    return tensors_of(nn.Sequential(NAMED[name]("cpu")))
