"""Training with AdamW, over steps or over seconds; a training that is interrupted goes on from its last state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from . import record
from .model import Model
from .session import Interrupted, NoTime, Progress, Session, Setup
from .settings import Training

CLIP_NORM = 1.0
WARMUP_STEPS = 100
LAST_RATE = 0.1  # share of the learning rate at the end
#: Steps before the clock, which compile and allocate, and steps that are timed to foresee the rest.
UNTIMED, TIMED = 3, 8
RESERVE_S = 15.0  # for the evaluation and the checkpoint after the last step
STATE_S = 30.0  # of training between two states, for every second that one takes where it takes more
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
    """AdamW; matrices decay, embeddings and norms do not."""
    embeddings = ("embedding", "body.embedding", "before.")
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith(embeddings)]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": size.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=size.learning_rate,
        betas=(0.9, 0.95),
        fused=torch.device(device).type == "cuda",
    )


def fit(session: Session, setup: Setup, schedule: Schedule, progress: Progress) -> None:
    """Compares what is left to do with what is left of the limit.

    Raises:
        NoTime: there is too little time, and a run was trained in this call already. The first run of a call goes as
            far as the limit allows.
    """
    step_s = (progress.step_ms or 0.0) / 1e3
    left = session.remaining() - RESERVE_S
    need = (
        schedule.seconds - progress.seconds if schedule.seconds else step_s * (schedule.steps - progress.step)
    )
    planned = f"{need:.0f} s" if schedule.seconds else f"{schedule.steps - progress.step} steps, {need:.0f} s"
    limit = "" if session.limit_s is None else f", the limit leaves {left:.0f} s"
    session.say(f"{setup.piece}: {setup.run}: {step_s * 1e3:.1f} ms a step, {planned} to go{limit}")
    if need > left and session.ran:
        raise NoTime


def first_step(session: Session, model: Model, loss_of: Callable[[int], Tensor], step: int) -> Tensor:
    """The loss of a call's first step after its backward. Where compiling fails, the model goes on without."""
    try:
        with session.precision():
            loss = loss_of(step)
        loss.backward()
        return loss
    except Exception as error:
        if not model.fused:
            raise
        session.say(f"not compiled, because: {type(error).__name__}: {str(error).splitlines()[0]}")
        model.fused = session.fused = False
        model.zero_grad(set_to_none=True)
    return first_step(session, model, loss_of, step)


def resume(
    states: record.States, model: Model, optimizer: torch.optim.Optimizer, session: Session
) -> Progress | None:
    """Goes back to the last state of an earlier call; None where there is none."""
    found = states.load()
    if found is None:
        return None
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    progress = Progress(**found["progress"])
    session.say(f"{states.run}: goes on after step {progress.step}")
    return progress


def train(
    session: Session,
    setup: Setup,
    model: Model,
    loss_of: Callable[[int], Tensor],
    measure: Callable[[str, Progress], None],
) -> Progress:
    """Trains ``model`` and measures it on the way and at the end.

    Args:
        loss_of: the loss of a step, differentiable; called under the precision of the session.
        measure: evaluates and writes rows with the status that it is given.

    Raises:
        NoTime: the limit is near; see :func:`fit`. What was trained is kept as a state.
        Interrupted: after a signal; the state is kept, and what was reached is written as "partial".
    """
    size = setup.size
    schedule = Schedule(size.steps, size.seconds, size.learning_rate)
    optimizer = make_optimizer(model, size, session.device)
    of_model = [p for name, p in model.named_parameters() if "index" not in name]  # which learns by itself
    states = session.states(setup)
    progress = resume(states, model, optimizer, session) or Progress(steps=size.steps)
    earlier, first, kept = progress.seconds, progress.step, time.monotonic()
    begin = timed_from = kept
    took_s = 0.0  # the last state
    session.memory_gib()  # from here on it is that of this training
    model.train()

    def keep() -> None:
        nonlocal kept, took_s
        from_here = time.monotonic()
        states.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
        )
        kept = time.monotonic()
        took_s = kept - from_here

    def aside(work: Callable[[], None]) -> None:
        """Does something between two steps that does not count as training."""
        nonlocal begin, timed_from
        session.wait()
        paused = time.monotonic()
        work()
        model.train()
        took = time.monotonic() - paused
        begin, timed_from = begin + took, timed_from + took

    while schedule.progress(progress.step, progress.seconds) < 1.0 or progress.step == 0:
        late = progress.step > first + UNTIMED and session.remaining() < RESERVE_S
        if session.stopped or late:
            keep()
            if late:
                raise NoTime
            session.stopped = False  # a second signal ends the evaluation too
            measure("partial", progress)
            raise Interrupted
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(progress.step, progress.seconds)
        if progress.step == first:
            loss = first_step(session, model, loss_of, first)
        else:
            with session.precision():
                loss = loss_of(progress.step)
            loss.backward()
        nn.utils.clip_grad_norm_(of_model, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += size.batch * size.context
        here = progress.step - first  # steps of this call
        if size.seconds or here in (UNTIMED, UNTIMED + TIMED):
            session.wait()
        now = time.monotonic()
        if here == UNTIMED:
            begin = timed_from = now
        elif here == UNTIMED + TIMED:
            progress.step_ms = round((now - timed_from) / TIMED * 1e3, 3)
            fit(session, setup, schedule, progress)
        if here > UNTIMED:
            progress.seconds = earlier + now - begin
        if progress.step % LINES == 0:
            session.say(
                f"{setup.run}: step {progress.step} of {schedule.steps or '?'}, loss {float(loss.detach()):.3f}"
            )
        if (
            size.evaluate_every
            and progress.step % size.evaluate_every == 0
            and progress.step < schedule.steps
        ):
            aside(lambda: measure("step", progress))
        if time.monotonic() - kept >= STATE_S * max(1.0, took_s):
            aside(keep)
    session.wait()
    if progress.step > first + UNTIMED:
        progress.seconds = earlier + time.monotonic() - begin
    progress.memory_gib = session.memory_gib()
    session.ran += 1
    keep()  # the evaluation at the end may take longer than the limit allows
    measure("final", progress)
    states.clear()
    return progress
