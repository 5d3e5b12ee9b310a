"""Training of one or two models on the same batches, its history and its checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from htree_ops import HTreeAttention, index_losses

from .model import ByteLM, DenseAttention
from .settings import Settings, UserError
from .text import Text, load_text, training_batch, validation_windows

CLIP_NORM = 1.0
WARMUP_STEPS = 10
EMBEDDING_RATE = 0.2  # AdamW's learning rate as a share of Muon's
INDEX_ROWS = 128  # positions of a sequence at which an index learns


def precision(device: str) -> contextlib.AbstractContextManager[object]:
    """bfloat16 autocast on a GPU, float32 on the CPU."""
    if torch.device(device).type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def wait_for(device: str) -> None:
    """Lets the GPU finish, so that a clock on the host measures it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def bits_per_byte(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte in bits. sequences: int64 [B, context + 1]."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten()) / math.log(2)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine from the peak to a tenth of it at the last step."""
    warmup = min(WARMUP_STEPS, max(settings.steps // 5, 1))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(settings.steps - warmup, 1))
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class History:
    """What a training measures.

    ``train``: bits per byte per step. ``validation``: [steps done, bits per byte]. ``seconds``: per step.
    """

    def __init__(self) -> None:
        self.train: list[float] = []
        self.validation: list[list[float]] = []
        self.seconds: list[float] = []

    def recent_bits(self, count: int = 10) -> float:
        """Training bits per byte over the last ``count`` steps."""
        return statistics.fmean(self.train[-count:])

    def median_seconds(self) -> float:
        """Per step, without the first, which allocates and warms up."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def history(self) -> dict[str, Any]:
        """For history.json and the plot."""
        return {
            "train_bits_per_byte": self.train,
            "validation_bits_per_byte": self.validation,
            "seconds_per_step": self.seconds,
        }


class Learner(History):
    """A model with its optimizer and what was measured about it."""

    def __init__(self, name: str, model: ByteLM, settings: Settings) -> None:
        super().__init__()
        self.name = name
        self.model = model.to(settings.device)
        self.settings = settings
        # Muon learns in fewer steps than AdamW, which keeps the embedding, the norms and the index.
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=settings.learning_rate, weight_decay=0.1),
            torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, sequences: Tensor) -> None:
        """One update on int64 [batch, context + 1]."""
        started = time.perf_counter()
        rate = learning_rate(len(self.train), self.settings)
        for optimizer, factor in zip(self.optimizers, (1.0, EMBEDDING_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.zero_grad(set_to_none=True)
        self.model.train()
        torch.manual_seed(
            self.settings.seed + len(self.train)
        )  # of the positions: a resumed run goes on exactly
        with precision(self.settings.device), index_losses(INDEX_ROWS) as losses:
            loss = bits_per_byte(self.model, sequences)
        (loss + losses.mean() if len(losses) else loss).backward()
        # The index learns by itself: its gradients do not count for those of the model.
        of_model = [p for name, p in self.model.named_parameters() if "index" not in name]
        nn.utils.clip_grad_norm_(of_model, CLIP_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
        self.train.append(float(loss.detach()))
        self.seconds.append(time.perf_counter() - started)  # reading the loss has waited for the device

    @torch.no_grad()
    def validate(self, windows: Tensor) -> None:
        """Mean over the windows, int64 [n, context + 1], one at a time."""
        self.model.eval()
        with precision(self.settings.device):
            bits = [float(bits_per_byte(self.model, window[None])) for window in windows]
        self.validation.append([len(self.train), statistics.fmean(bits)])

    @property
    def num_bytes_per_step(self) -> int:
        return self.settings.batch * self.settings.context

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "train": self.train,
            "validation": self.validation,
            "seconds": self.seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state`."""
        self.model.load_state_dict(state["model"])
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.train, self.validation = list(state["train"]), [list(pair) for pair in state["validation"]]
        self.seconds = list(state["seconds"])


def train_briefly(name: str, settings: Settings, attention: type[HTreeAttention] = HTreeAttention) -> Learner:
    """A model for an example that was given no checkpoint."""
    source = load_text(Path(settings.text), settings.context)
    torch.manual_seed(settings.seed)
    learner = Learner(name, ByteLM(settings, attention), settings)
    for step in (bar := tqdm(range(settings.steps), desc="training", unit="step")):
        batch = training_batch(source, step, settings.context, settings.batch, settings.seed)
        learner.step(batch.to(settings.device))
        bar.set_postfix_str(f"{learner.recent_bits():.2f} bits per byte")
    return learner


class Run:
    """The models of one run, in step: the tree's and, unless switched off, the dense one's."""

    def __init__(self, settings: Settings, text: Text, folder: Path) -> None:
        self.settings, self.text, self.folder = settings, text, folder
        torch.manual_seed(settings.seed)
        tree = ByteLM(settings)
        self.learners = [Learner("tree", tree, settings)]
        if settings.dense:
            dense = ByteLM(settings, DenseAttention)
            dense.load_state_dict(tree.state_dict())  # the same start
            self.learners.append(Learner("dense", dense, settings))
        self.windows = validation_windows(text, settings.context, settings.eval_windows).to(settings.device)

    @property
    def tree(self) -> Learner:
        return self.learners[0]

    @property
    def steps_done(self) -> int:
        return len(self.tree.train)

    def train(self) -> bool:
        """Steps up to ``settings.steps`` under a progress bar; False if Ctrl-C ended it early.

        Ctrl-C finishes the current step, so that the models stay in step; a second one stops at once.
        """
        settings = self.settings
        with stop_flag(signal.SIGINT) as interrupted, progress_bar(self.steps_done, settings.steps) as bar:
            while self.steps_done < settings.steps and not interrupted():
                batch = training_batch(
                    self.text, self.steps_done, settings.context, settings.batch, settings.seed
                ).to(settings.device)
                for learner in self.learners:
                    learner.step(batch)
                if self.steps_done % settings.eval_every == 0 or self.steps_done == settings.steps:
                    for learner in self.learners:
                        learner.validate(self.windows)
                    self.save()
                bar.update()
                bar.set_postfix_str(", ".join(map(progress_words, self.learners)))
        return self.steps_done >= settings.steps

    def save(self) -> None:
        """Writes checkpoint.pt, replacing the old one only when the new one is whole."""
        content = {
            "settings": asdict(self.settings),
            "learners": {learner.name: learner.state() for learner in self.learners},
        }
        path = self.folder / "checkpoint.pt"
        temporary = path.with_suffix(".tmp")
        torch.save(content, temporary)
        os.replace(temporary, path)

    def load(self, content: dict[str, Any]) -> None:
        """Continues from what :func:`read_checkpoint` returned."""
        for learner in self.learners:
            learner.load(content["learners"][learner.name])


def read_checkpoint(path: Path, device: str, flag: str = "--resume") -> tuple[Settings, dict[str, Any]]:
    """The settings and the rest of a checkpoint that ``flag`` asked for.

    Raises:
        UserError: no such file, or not one of this script.
    """
    if not path.is_file():
        raise UserError(f"{flag}: there is no {path}")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        return Settings(**content["settings"]), content
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{flag}: {path} is not a checkpoint of this script ({reason})") from error


def progress_words(learner: Learner) -> str:
    rate = learner.num_bytes_per_step / learner.seconds[-1]
    return f"{learner.name} {learner.recent_bits():.2f} bits {rate / 1e3:.1f}k tokens/s"


def progress_bar(done: int, total: int) -> tqdm[Any]:
    return tqdm(total=total, initial=done, unit="step", desc="training", dynamic_ncols=True)


@contextlib.contextmanager
def stop_flag(*signals: int) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether one of the signals came; the second one acts as usual."""
    came: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, before[number])
        if number == signal.SIGINT:
            tqdm.write("stopping after this step; Ctrl-C again stops at once")

    for number in signals:
        signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, action in before.items():
            signal.signal(number, action)
