"""Training with AdamW: a schedule over steps or over seconds, cut to the time limit if need be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .model import LanguageModel
from .session import Interrupted, NoTime, Progress, Session, Setup
from .settings import Training

__all__ = ["train"]

CLIP_NORM = 1.0
WARMUP_STEPS = 100
LAST_RATE = 0.1  # share of the learning rate at the end
#: Steps before the clock, which compile and allocate, and steps that are timed to foresee the rest.
UNTIMED, TIMED = 3, 8
RESERVE_S = 15.0  # for the evaluation and the checkpoint after the last step
LINES = 250  # steps between two lines on the terminal


@dataclass
class Schedule:
    """How far a training is, by steps or by seconds."""

    steps: int
    seconds: float
    learning_rate: float

    def progress(self, step: int, elapsed: float) -> float:
        """From 0 to 1."""
        return min(1.0, elapsed / self.seconds if self.seconds else step / max(self.steps, 1))

    def rate(self, step: int, elapsed: float) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warmup = min(WARMUP_STEPS, self.steps // 5) if self.steps else WARMUP_STEPS // 5
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        cosine = 0.5 + 0.5 * math.cos(math.pi * self.progress(step, elapsed))
        return self.learning_rate * (LAST_RATE + (1 - LAST_RATE) * cosine)


def make_optimizer(model: nn.Module, size: Training, device: str) -> torch.optim.Optimizer:
    """AdamW; matrices decay, embedding and norms do not."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name != "embedding"]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=size.learning_rate,
        betas=(0.9, 0.95),
        fused=torch.device(device).type == "cuda",
    )


def fit(session: Session, setup: Setup, schedule: Schedule, step_s: float, done: int) -> bool:
    """Compares what is left to do with what is left of the limit; cuts the schedule of the first run of a call.

    Returns:
        Whether steps were cut.

    Raises:
        NoTime: there is too little time, and a run was trained in this call already.
    """
    left, need = session.remaining() - RESERVE_S, schedule.seconds or step_s * (schedule.steps - done)
    planned = f"{schedule.seconds:.0f} s" if schedule.seconds else f"{schedule.steps} steps, {need:.0f} s"
    limit = "" if session.limit_s is None else f", the limit leaves {left:.0f} s"
    session.say(f"{setup.piece}: {setup.run}: {step_s * 1e3:.1f} ms a step, {planned} to go{limit}")
    if need <= left:
        return False
    if session.ran:
        raise NoTime
    if schedule.seconds:
        schedule.seconds = max(left, step_s)
    else:
        schedule.steps = max(done + 1, done + int(left / step_s))
    return True


def first_step(session: Session, model: LanguageModel, loss_of: Callable[[int], Tensor]) -> Tensor:
    """The loss of step 0 after its backward. Where compiling fails, the model goes on without, and says so."""
    try:
        with session.precision():
            loss = loss_of(0)
        loss.backward()
        return loss
    except Exception as error:
        if not model.fused:
            raise
        session.say(f"not compiled, because: {type(error).__name__}: {str(error).splitlines()[0]}")
        model.fused = session.fused = False
        model.zero_grad(set_to_none=True)
    return first_step(session, model, loss_of)


def train(
    session: Session,
    setup: Setup,
    model: LanguageModel,
    loss_of: Callable[[int], Tensor],
    measure: Callable[[str, Progress], None],
) -> Progress:
    """Trains ``model`` and measures it on the way and at the end.

    Args:
        loss_of: the loss of a step, differentiable; called under the precision of the session.
        measure: evaluates and writes rows with the status that it is given.

    Raises:
        NoTime: see :func:`fit`; nothing but rows of the status "step" has been written.
        Interrupted: after a signal; what was reached is written as "partial".
    """
    size = setup.size
    schedule = Schedule(size.steps, size.seconds, size.learning_rate)
    optimizer = make_optimizer(model, size, session.device)
    progress = Progress(steps=size.steps)
    cut, begin, timed_from = False, time.monotonic(), 0.0
    model.train()
    while schedule.progress(progress.step, progress.seconds) < 1.0 or progress.step == 0:
        if session.stopped:
            session.stopped = False  # a second signal ends the evaluation too
            measure("partial", progress)
            raise Interrupted
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(progress.step, progress.seconds)
        if progress.step == 0:
            loss = first_step(session, model, loss_of)
        else:
            with session.precision():
                loss = loss_of(progress.step)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += size.batch * size.context
        if size.seconds or progress.step in (UNTIMED, UNTIMED + TIMED):
            session.wait()
        now = time.monotonic()
        if progress.step == UNTIMED:
            begin = timed_from = now
        elif progress.step == UNTIMED + TIMED:
            step_s = (now - timed_from) / TIMED
            progress.step_ms = round(step_s * 1e3, 3)
            cut = fit(session, setup, schedule, step_s, progress.step)
            progress.steps = schedule.steps
        if progress.step > UNTIMED:
            progress.seconds = now - begin
        if progress.step % LINES == 0:
            session.say(
                f"{setup.run}: step {progress.step} of {schedule.steps or '?'}, loss {float(loss.detach()):.3f}"
            )
        if (
            size.evaluate_every
            and progress.step % size.evaluate_every == 0
            and progress.step < schedule.steps
        ):
            session.wait()
            paused = time.monotonic()
            measure("step", progress)
            model.train()
            begin += time.monotonic() - paused
    session.wait()
    progress.seconds = time.monotonic() - begin
    session.ran += 1
    measure("cut" if cut else "final", progress)
    return progress
