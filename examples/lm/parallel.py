"""Training of the language model on a mesh of ranks: FSDP2, tensor parallelism and one sequence on several ranks."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from tqdm import tqdm

from htree_ops import HTreeAttention, index_losses
from htree_ops.distributed import ColwiseParallel, RowwiseParallel, shard_sequence

from .model import ByteLM
from .settings import Settings, UserError
from .text import Text, training_batch, validation_windows
from .training import CLIP_NORM, INDEX_ROWS, History, learning_rate, stop_flag

#: Dimensions of the mesh: ranks with sequences of their own, with tokens of one sequence, and with heads and columns.
DIMENSIONS = ("data", "context", "tensor")


def check_mesh(settings: Settings, sizes: dict[str, int], ranks: int) -> None:
    """Raises UserError where the model or the batch cannot be shared out like this."""
    product = sizes["data"] * sizes["context"] * sizes["tensor"]
    if product != ranks:
        words = " * ".join(str(sizes[name]) for name in DIMENSIONS)
        raise UserError(
            f"--data-parallel * --context-parallel * --tensor-parallel must be the {ranks} ranks, "
            f"got {words} = {product}"
        )
    if settings.batch % sizes["data"]:
        raise UserError(
            f"--batch must be a multiple of --data-parallel = {sizes['data']}, got {settings.batch}"
        )
    step = 2 * sizes["context"] * settings.compression_rate
    if sizes["context"] > 1 and settings.context % step:
        raise UserError(
            f"--context must be a multiple of 2 * context-parallel * compression-rate = {step}, got {settings.context}"
        )
    if settings.kv_heads % sizes["tensor"]:
        raise UserError(
            f"--kv-heads must be a multiple of --tensor-parallel = {sizes['tensor']}, got {settings.kv_heads}"
        )


def make_mesh(kind: str, sizes: dict[str, int], wait: timedelta) -> DeviceMesh:
    """A mesh [data, context, tensor] of all ranks; neighbours share heads, which they exchange most often.

    torch gives the groups of a mesh its own time-out, not that of the default group, so they get ``wait`` here.
    """
    mesh = init_device_mesh(kind, tuple(sizes[name] for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)
    for part in (*(mesh[name] for name in DIMENSIONS), replicas_of(mesh)):
        if part.get_group() is not dist.group.WORLD:
            part.get_group().set_timeout(wait)
    return mesh


def leave(status: int) -> NoReturn:
    """Leaves the group and ends this process, without the interpreter's own end.

    Threads of gloo outlive ``destroy_process_group``. One that drops the last tensor of a sum while the interpreter
    ends can no longer have its lock, which aborts the process after all work is done (pytorch/pytorch#190489).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def replicas_of(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that have the same parameters, with other sequences or with other tokens of one."""
    return mesh["data", "context"]._flatten("replicas")


def build_model(settings: Settings, mesh: DeviceMesh, bf16: bool) -> ByteLM:
    """The model with its heads and columns on the tensor ranks and every parameter cut among all others.

    With ``bf16`` products and their gradients are in bfloat16, parameters and sums over ranks in float32.
    """
    torch.manual_seed(settings.seed)  # the same numbers on every rank, whatever the mesh
    attention = functools.partial(HTreeAttention, cp_group=mesh["context"])
    model = ByteLM(settings, attention).to(mesh.device_type)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "index" in name:
            parameter.requires_grad_(True)  # FSDP looks once at what does
    plan: dict[str, ParallelStyle] = {f"attention.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.o_proj": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    if settings.index_dim:
        plan["attention"] = ColwiseParallel()
    replicas = replicas_of(mesh)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        if mesh["tensor"].size() > 1:
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=replicas, mp_policy=policy)
    fully_shard(model, mesh=replicas, mp_policy=policy)
    return model


def clip_gradients(model: ByteLM, mesh: DeviceMesh, most: float) -> None:
    """Scales all gradients so that their norm is at most ``most``; parameters lie on one or two mesh dimensions."""
    whole = torch.zeros((), device=mesh.device_type)  # of parameters that every tensor rank has
    parts = torch.zeros((), device=mesh.device_type)
    of_model = [
        p.grad for name, p in model.named_parameters() if "index" not in name
    ]  # which learns by itself
    gradients = [gradient for gradient in of_model if isinstance(gradient, DTensor)]
    for gradient in gradients:
        squares = gradient.to_local().float().square().sum()
        if gradient.device_mesh.ndim > 1:
            parts += squares
        else:
            whole += squares
    dist.all_reduce(parts, group=mesh.get_group("tensor"))
    total = whole + parts
    for name in ("data", "context"):
        dist.all_reduce(total, group=mesh.get_group(name))
    scale = (most / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.to_local().mul_(scale)


def named(folder: Path) -> str | None:
    """The checkpoint that ``latest`` names, None where there is no such file."""
    note = folder / "latest"
    return note.read_text().strip() if note.is_file() else None


def read_latest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint below ``folder`` and what stands in it beside the tensors.

    Raises:
        UserError: there is none.
    """
    name = named(folder)
    if name is None:
        raise UserError(f"--resume: there is no {folder / 'latest'}")
    path = folder / name
    try:
        return path, json.loads((path / "progress.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {path} is not a checkpoint of this script ({error})") from error


class Trainer(History):
    """A run on a mesh, in bfloat16 on GPUs unless ``bf16`` says otherwise."""

    def __init__(
        self, settings: Settings, text: Text, folder: Path, mesh: DeviceMesh, bf16: bool | None = None
    ) -> None:
        super().__init__()
        self.settings, self.text, self.folder, self.mesh = settings, text, folder, mesh
        self.model = build_model(settings, mesh, mesh.device_type == "cuda" if bf16 is None else bf16)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.windows = validation_windows(text, settings.context, settings.eval_windows)
        self.stopped = False

    @property
    def steps_done(self) -> int:
        return len(self.train)

    def bits(self, sequences: Tensor) -> Tensor:
        """Mean bits per byte over this rank's tokens of int64 [B, context + 1]."""
        group = self.mesh["context"]
        tokens, targets = (
            shard_sequence(x, group).to(self.mesh.device_type) for x in (sequences[:, :-1], sequences[:, 1:])
        )
        logits = self.model(tokens)
        nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return nats / torch.log(torch.tensor(2.0))

    def learn(self, sequences: Tensor) -> Tensor:
        """The gradients of this rank's sequences, and what :meth:`bits` says of them."""
        torch.manual_seed(self.settings.seed + self.steps_done)  # of the positions at which the index learns
        with index_losses(INDEX_ROWS) as losses:
            loss = self.bits(sequences)
        # FSDP averages over the ranks that share a sequence, whose parts of this gradient are to be added.
        of_index = self.mesh["context"].size() * losses.mean() if len(losses) else 0.0
        (loss + of_index).backward()
        return loss.detach()

    def over_ranks(self, *numbers: Tensor | float) -> list[float]:
        """The mean of each number over all ranks."""
        mine = torch.stack([torch.as_tensor(x, device=self.mesh.device_type).float() for x in numbers])
        dist.all_reduce(mine)
        return (mine / dist.get_world_size()).tolist()

    def step(self, stops: bool) -> None:
        """One update. Every rank learns whether one of them is to stop."""
        started = time.perf_counter()
        settings, data = self.settings, self.mesh["data"]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, settings)
        self.optimizer.zero_grad(set_to_none=True)
        batch = training_batch(self.text, self.steps_done, settings.context, settings.batch, settings.seed)
        loss = self.learn(batch.chunk(data.size())[data.get_local_rank()])
        clip_gradients(self.model, self.mesh, CLIP_NORM)
        self.optimizer.step()
        mean, stopping = self.over_ranks(loss, float(stops))
        self.train.append(mean)
        self.seconds.append(time.perf_counter() - started)  # reading the mean has waited for the device
        self.stopped = stopping > 0

    @torch.no_grad()
    def validate(self) -> None:
        """Mean over the windows, one at a time."""
        bits = [self.over_ranks(self.bits(window[None]))[0] for window in self.windows]
        self.validation.append([self.steps_done, statistics.fmean(bits)])

    def run(self, save_every: int) -> bool:
        """Steps up to ``settings.steps``; False if a signal to any rank ended it early."""
        settings = self.settings
        leads = dist.get_rank() == 0
        with (
            stop_flag(signal.SIGINT, signal.SIGTERM) as stops,
            tqdm(
                total=settings.steps, initial=self.steps_done, unit="step", desc="training", disable=not leads
            ) as bar,
        ):
            while self.steps_done < settings.steps and not self.stopped:
                self.step(stops())
                done = self.steps_done
                if done % settings.eval_every == 0 or done == settings.steps:
                    self.validate()
                if done % save_every == 0 or done == settings.steps or self.stopped:
                    self.save()
                bar.update()
                rate = settings.batch * settings.context / self.seconds[-1]
                bar.set_postfix_str(f"{self.recent_bits():.2f} bits {rate / 1e3:.1f}k tokens/s")
        return self.steps_done >= settings.steps

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Tensors as DTensors by the names of parameters, so that another mesh can read them."""
        return {
            "model": states.get_model_state_dict(self.model),
            "optimizer": states.get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self) -> None:
        """Writes a folder of its own, then names it in ``latest``: what is named is always whole."""
        path = self.folder / f"step-{self.steps_done:06d}"
        if dist.get_rank() == 0 and named(self.folder) == path.name:
            (
                self.folder / "latest"
            ).unlink()  # it names a run before this one, whose files are written over now
        dcp.save(self.state(), checkpoint_id=path)
        if dist.get_rank() == 0:
            progress = {"settings": asdict(self.settings), **self.history()}
            (path / "progress.json").write_text(json.dumps(progress))
            note = self.folder / "latest.tmp"
            note.write_text(path.name)
            os.replace(note, self.folder / "latest")
            for old in self.folder.glob("step-*"):
                if old != path:
                    shutil.rmtree(old)
        dist.barrier()

    def load(self, path: Path, progress: dict[str, Any]) -> None:
        """Continues from what :func:`read_latest` gave, which a run on another mesh may have written."""
        content = self.state()
        dcp.load(content, checkpoint_id=path)
        states.set_model_state_dict(self.model, content["model"])
        states.set_optimizer_state_dict(self.model, self.optimizer, content["optimizer"])
        self.train, self.seconds = progress["train_bits_per_byte"], progress["seconds_per_step"]
        self.validation = progress["validation_bits_per_byte"]
