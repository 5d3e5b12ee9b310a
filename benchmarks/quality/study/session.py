"""One call of the program: its folder, device, text, clock and rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from htree_ops.info import collect_environment

from . import record
from .corpus import Corpus, read_corpus
from .model import LanguageModel
from .settings import RATE, Attention, Scale, Training

#: The experiment that needs no text, and what its rows name in place of one.
WITHOUT_TEXT, RANDOM_TOKENS = "recall", "random tokens"


class NoTime(Exception):
    """What is left of the time limit does not hold the run; it is left for a later call."""


class Interrupted(Exception):
    """A signal asked the program to stop."""


@dataclass(frozen=True)
class Setup:
    """What a row says about a run besides its measurements."""

    piece: str
    run: str
    attention: Attention
    size: Training
    seed: int = 0
    parameters: int = 0
    note: str = ""
    baseline: str = "dense, same training"
    context: int = 0  # of the evaluation, where it is not that of the training


@dataclass
class Progress:
    """Of a training: steps done and planned, seconds on them, milliseconds of one, the most memory of tensors."""

    step: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_ms: float | None = None
    memory_gib: float | None = None


@dataclass
class Session:
    """Everything the pieces share.

    Attributes:
        out: folder for rows and checkpoints. previous: folder of an earlier call, whose finished runs are not repeated
            and whose checkpoints are used; not written to. state: folder for the training that is under way, None for
            ``out``. text_folders: where .py files are looked for. part_bytes: that a file of a checkpoint holds.
        limit_s: seconds from the beginning of the call, None for no limit. fused: compile the models.
        stopped: set by a signal. experiment: the one at work, by which the corpus is chosen. said: shows a line.
    """

    out: Path
    scale: Scale
    device: str
    text_folders: list[Path]
    previous: Path | None = None
    state: Path | None = None
    part_bytes: int = record.LARGEST_PART
    limit_s: float | None = None
    fused: bool = False
    stopped: bool = False
    said: Callable[[str], None] = print
    begin: float = field(default_factory=time.monotonic)
    experiment: str = ""
    ran: int = 0  # runs that this call has trained

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows = [row for folder in self.folders for row in record.read_rows(folder)]
        facts = asdict(collect_environment(self.device, 0.0))
        facts.pop("ceiling_gb_per_s")  # nothing here is a time to compare
        self.facts: dict[str, Any] = facts
        self._corpora: dict[bool, Corpus] = {}

    @property
    def folders(self) -> list[Path]:
        """Where rows and checkpoints are."""
        return [self.out] + ([self.previous] if self.previous else [])

    @property
    def corpus(self) -> Corpus:
        """The text of the experiment at work, on the device; read at its first use."""
        is_large, scale = self.experiment == record.LARGE, self.scale
        if is_large not in self._corpora:
            most, lengths = scale.corpus_bytes, (*scale.needle_lengths, scale.longest.context)
            if is_large:
                most, lengths = scale.large_bytes, scale.large_lengths
            begin = time.monotonic()
            # the longest text of an evaluation must fit into what is held out
            found = read_corpus(self.text_folders, most, 2 + max(lengths))
            self._corpora[is_large] = replace(
                found, train=found.train.to(self.device), held_out=found.held_out.to(self.device)
            )
            self.say(f"text: {found.name}; read in {time.monotonic() - begin:.1f} s")
            alike = {row.text for row in self.rows if (row.piece == record.LARGE) == is_large}
            others = alike - {found.name, RANDOM_TOKENS}
            if others:
                self.say(f"rows of another text are kept and not continued: {'; '.join(sorted(others))}")
        return self._corpora[is_large]

    def text_of(self, piece: str) -> str:
        """What rows of an experiment say about its text, which is read where it has one."""
        return RANDOM_TOKENS if piece == WITHOUT_TEXT else self.corpus.name

    @property
    def checkpoint(self) -> str:
        """Name of the weights of (a): those of another scale or text are other weights."""
        return f"dense-{self.scale.name}-{self.corpus.digest}"

    def say(self, line: str) -> None:
        """Shows a line with the time since the beginning."""
        self.said(f"[{time.monotonic() - self.begin:5.0f} s] {line}")

    def remaining(self) -> float:
        """Seconds until the limit."""
        return float("inf") if self.limit_s is None else self.limit_s - (time.monotonic() - self.begin)

    def check(self) -> None:
        """Raises :class:`Interrupted` after a signal and :class:`NoTime` past the limit."""
        if self.stopped:
            raise Interrupted
        if self.remaining() <= 0:
            raise NoTime

    def is_done(self, piece: str, run: str) -> bool:
        """Whether a run of this scale and on this text needs no repetition."""
        wanted = (piece, run, self.scale.name, self.text_of(piece), record.DONE)
        return any((row.piece, row.run, row.scale, row.text, row.status) == wanted for row in self.rows)

    def states(self, setup: Setup) -> record.States:
        """Where the training of a run keeps its state."""
        run = f"{setup.piece}: {setup.run}, {self.scale.name}, {self.text_of(setup.piece)}"
        return record.States(self.state or self.out, run, self.part_bytes)

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """bfloat16 autocast on a GPU, float32 on the CPU."""
        if torch.device(self.device).type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Lets the device finish, so that the clock of the host measures it."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()

    def memory_gib(self) -> float | None:
        """The most that tensors took on the device since the last call; None on the CPU."""
        if torch.device(self.device).type != "cuda":
            return None
        most = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return most

    def make_model(
        self, size: Training, seed: int = 0, vocabulary: int = 256, index_dim: int = 0
    ) -> LanguageModel:
        """A new model on the device."""
        return LanguageModel(size, vocabulary, seed, self.fused, index_dim).to(self.device)

    def load_model(self, size: Training, name: str, index_dim: int = 0) -> LanguageModel:
        """A model with the weights of a checkpoint; an index is new."""
        model = self.make_model(size, index_dim=index_dim)
        state = record.load_checkpoint(self.folders, name)
        model.load_state_dict({key: tensor.float() for key, tensor in state.items()})
        return model

    def write(self, setup: Setup, status: str, progress: Progress, **measured: Any) -> record.Row:
        """Writes a row and shows its measurements."""
        attention, size = setup.attention, setup.size
        context = setup.context or size.context
        row = record.Row(
            piece=setup.piece,
            run=setup.run,
            status=status,
            scale=self.scale.name,
            **self.facts,
            text=self.text_of(setup.piece),
            baseline=setup.baseline,
            kind=attention.kind,
            positions=attention.positions,
            top_k=attention.top_k,
            compression_rate=RATE if attention.kind == "tree" else 0,
            max_top_nodes=attention.max_top_nodes,
            tree_layers=attention.layers(context),
            stride=attention.stride,
            span=attention.span,
            index_dim=attention.index_dim,
            window=attention.window,
            context=context,
            trained_context=size.context,
            batch=size.batch,
            width=size.width,
            layers=size.layers,
            seen=size.seen,
            parameters=setup.parameters,
            seed=setup.seed,
            step=progress.step,
            steps=progress.steps,
            tokens=progress.tokens,
            learning_rate=size.learning_rate,
            train_seconds=round(progress.seconds, 3),
            step_ms=progress.step_ms,
            memory_gib=_rounded(progress.memory_gib),
            note=setup.note,
            **{name: _rounded(value) for name, value in measured.items()},
        )
        record.append_row(self.out, row)
        self.rows.append(row)
        words = ", ".join(filter(None, (_words(measured), setup.note)))
        self.say(f"{setup.piece}: {setup.run}: step {progress.step}, {status}: {words}")
        return row


def _rounded(value: Any) -> Any:
    """Six digits of a number or of a list of numbers."""
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _words(measured: dict[str, Any]) -> str:
    """Measurements for the terminal."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in measured.items()
        if name not in ("series", "series_of", "texts")
    )
