"""The experiments, those that decide first: lists of runs, so that another call can go on where one ended."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from htree_ops import fit_index, index_losses

from . import evaluation, lists, record
from .corpus import Texts, draw_texts
from .model import LanguageModel, SearchModel
from .recall import draw_recall, lesson
from .session import Progress, Session, Setup
from .settings import RATE, Attention, Scale, Training, dense, tree, window
from .training import train

HELD_OUT_SEED = 10**9  # of the texts that models are evaluated on
STEP_SEEDS = 1_000_003  # seeds of steps of two trainings are apart
INDEXER_BYTES = 2**15  # of a step of ``fit_index``, at most
RATE_OF_FITS = 3e-3  # of ``fit_index``, in rows that name none
OTHER_RATES = (1e-3, 1e-2, 3e-2)
LARGE_RATE = 1e-2  # the other one of a larger model
SPANS = (None, 4, 2, 1)  # of ``selection_span``; 1 selects by the true mass of the tokens


@dataclass(frozen=True)
class Run:
    """Something that is done whole or repeated. ``work`` writes the rows; the last has the status "final"."""

    name: str
    work: Callable[[Session], object]


@dataclass(frozen=True)
class Piece:
    """A part of an experiment that one call holds.

    Attributes:
        minutes: expected on one H200 at full scale. runs: of a scale. part_of: the experiment that its rows name, where
            it has another name. quick: whether a quick run has it.
    """

    name: str
    about: str
    minutes: float
    runs: Callable[[Scale], list[Run]]
    part_of: str = ""
    quick: bool = False

    @property
    def experiment(self) -> str:
        """What the rows call it."""
        return self.part_of or self.name


def held_out_texts(session: Session, size: Training, context: int = 0, **changes: object) -> Texts:
    """The texts of an evaluation: the same for every model."""
    options = {"reach": 0.5, "even": False, "strings": size.strings, "count": size.texts} | changes
    return draw_texts(
        session.corpus.held_out,
        context=context or size.context,
        letters=size.letters,
        seed=HELD_OUT_SEED,
        **options,  # type: ignore[arg-type]
    )


def text_loss(
    session: Session,
    model: LanguageModel,
    size: Training,
    seed: int,
    attention_of: Callable[[int], Attention],
    reach: float = 0.5,
) -> Callable[[int], Tensor]:
    """The mean loss of all bytes of a step's texts, a function of ``seed`` and the step."""

    def loss_of(step: int) -> Tensor:
        texts = draw_texts(
            session.corpus.train, size.batch, size.context, size.strings, size.letters, seed * STEP_SEEDS + step, reach
        )  # fmt: skip
        attention = attention_of(step)
        return learning(
            session, attention, lambda: evaluation.byte_losses(model, attention, texts.tokens).mean()
        )

    return loss_of


def learning(session: Session, attention: Attention, loss_of: Callable[[], Tensor]) -> Tensor:
    """A loss of a model, with those of its indexes where the attention has one."""
    if not attention.index_dim:
        return loss_of()
    with index_losses(session.scale.index_rows) as losses:
        loss = loss_of()
    return loss + losses.mean()


def train_on_text(
    session: Session,
    setup: Setup,
    model: LanguageModel,
    after: Callable[[Progress, str], None] | None = None,
    between: Training | None = None,
    first: int = 0,
) -> None:
    """Trains with one attention on texts with planted strings and evaluates it on the way.

    Args:
        after: called before the row of the end is written. between: the texts of every other step, and the budget of a
            tree there; None for the same. first: so many steps at the beginning have the texts of ``between`` too.
    """
    texts = held_out_texts(session, setup.size)

    def measure(status: str, progress: Progress) -> None:
        found = evaluation.measure_texts(session, model, setup.attention, texts)
        if status != record.DONE:
            found |= {"series": None, "series_of": None}  # the curves of the end are enough
        elif after is not None:
            after(progress, status)
        session.write(setup, status, progress, **found)

    there = setup.attention
    if between is not None and there.kind == "tree":
        there = replace(there, top_k=between.top_k, max_top_nodes=between.max_top_nodes)
    losses = [
        text_loss(session, model, setup.size, setup.seed, lambda _: setup.attention),
        text_loss(session, model, between or setup.size, setup.seed, lambda _: there),
    ]
    train(session, setup, model, lambda step: losses[1 if step < first else step % 2](step), measure)


def shorter(size: Training, short: Training) -> Training:
    """Texts and budget of an experiment with shorter texts, as many bytes of them in a step."""
    names = ("context", "strings", "letters", "top_k", "max_top_nodes")
    batch = size.batch * size.context // short.context
    return replace(size, batch=batch, **{name: getattr(short, name) for name in names})


def evaluate_runs(
    piece: str, size: Training, settings: Sequence[Attention], load: Callable[[Session], LanguageModel]
) -> list[Run]:
    """One run per attention, all with the weights that ``load`` gives."""

    def work(session: Session, attention: Attention) -> None:
        model = load(session)
        setup = Setup(
            piece,
            name(attention),
            attention,
            size,
            parameters=model.num_parameters(),
            baseline="dense, same weights",
        )
        found = evaluation.measure_texts(session, model, attention, held_out_texts(session, size))
        session.write(setup, "final", Progress(), **found)

    def name(attention: Attention) -> str:
        return f"evaluated: {attention.label}"

    return [Run(name(a), lambda session, a=a: work(session, a)) for a in settings]  # type: ignore[misc]


def conversion_settings(size: Training, scale: Scale) -> list[Attention]:
    """Score, stride and kind of positions at the budget of the experiment, then other budgets."""
    strides = (1, 4) if scale.name == "tiny" else (1, 16) if scale.name == "quick" else (1, 2, 4, 8, 16)
    found = [dense(), window(size.budget)]
    found += [size.tree(span, stride) for stride in strides for span in SPANS]
    some = (1, 4) if scale.name == "full" else (1,)
    found += [size.tree(span, stride, "compact") for stride in some for span in SPANS]
    if scale.name == "full":
        for top_k in (size.top_k // 2, 2 * size.top_k, 4 * size.top_k):
            nodes = min(top_k * RATE, size.context // RATE)  # the most that leave two layers
            found += [tree(top_k, nodes, span) for span in (None, 4, 2)]
    return found


def loader(size: Training) -> Callable[[Session], LanguageModel]:
    """The weights of (a), read at the first call."""
    loaded: list[LanguageModel] = []

    def load(session: Session) -> LanguageModel:
        if not loaded:
            loaded.append(session.load_model(size, session.checkpoint))
        return loaded[0]

    return load


def conversion(scale: Scale) -> list[Run]:
    """(a) A model trained with dense attention, evaluated with all others."""
    size = scale.conversion
    load = loader(size)

    def work(session: Session) -> None:
        model = session.make_model(size)
        setup = Setup(
            "conversion", "train: dense", dense(), size, parameters=model.num_parameters(), baseline="itself"
        )

        def save(progress: Progress, status: str) -> None:
            paths = record.save_checkpoint(
                session.out, session.checkpoint, model.state_dict(), session.part_bytes
            )
            session.say(f"weights in {', '.join(path.name for path in paths)}")

        train_on_text(session, setup, model, save)

    settings = conversion_settings(size, scale)
    return [Run("train: dense", work), *evaluate_runs("conversion", size, settings, load)]


def conversion_long(scale: Scale) -> list[Run]:
    """(a) The same at 32 768 tokens, after some more dense training on texts of that length and of the earlier one.

    The weights are not kept: training and evaluations are one run.
    """
    size = scale.conversion_long
    strides = (1, 4) if scale.name == "tiny" else (1, 4, 16)
    settings = [dense()] + [size.tree(span, stride) for stride in strides for span in (None, 4, 2)]
    settings += [size.tree(span, 1, "compact") for span in (None, 2)]
    for top_k in (size.top_k // 4, size.top_k // 2):
        settings += [tree(top_k, top_k * RATE, span) for span in (None, 4, 2)]

    def work(session: Session) -> None:
        model = session.load_model(scale.conversion, session.checkpoint)
        name = "train: dense, longer texts"
        parameters = model.num_parameters()
        setup = Setup("conversion-32k", name, dense(), size, parameters=parameters, baseline="itself")

        def evaluate(progress: Progress, status: str) -> None:
            for run in evaluate_runs("conversion-32k", size, settings, lambda _: model):
                run.work(session)

        train_on_text(session, setup, model, evaluate, shorter(size, scale.conversion))

    return [Run("train: dense, longer texts", work)]


def give_index(
    session: Session, model: LanguageModel, size: Training, attention: Attention, seed: int, rate: float
) -> tuple[Progress, str]:
    """Fits the index of a dense model: what it took, a note."""
    steps = session.scale.indexer_steps
    batch = min(4, size.batch, INDEXER_BYTES // size.context)

    def batches() -> Iterator[dict[str, object]]:
        for step in range(steps):
            session.check()
            texts = draw_texts(
                session.corpus.train, batch, size.context, size.strings, size.letters, STEP_SEEDS + step
            )
            yield {"tokens": texts.tokens[:, :-1], "attention": attention}

    torch.manual_seed(seed)
    begin, rows = time.monotonic(), session.scale.indexer_queries
    with session.precision():
        nats = fit_index(
            model, batches(), steps=steps, rows=rows, learning_rate=rate, index_dim=attention.index_dim
        )
    seconds = time.monotonic() - begin
    note = f"{sum(nats) / len(nats):.4f} nats from the masses of the blocks"
    return Progress(steps, steps, steps * batch * size.context, seconds), note


def index_run(scale: Scale, seed: int) -> Run:
    """(a) A dense model gets an index by ``fit_index`` and is evaluated with it.

    The first is that of (a), whose weights are read where they are kept.
    """
    size, name = scale.conversion, f"train: dense, seed {seed}"
    half = size.top_k // 2
    settings = [size.by_index(), size.by_index(top_k=half), size.by_index(4)]
    settings += [size.tree(span) for span in (2, 1)]

    def setup_of(model: LanguageModel, run: str, attention: Attention, note: str = "") -> Setup:
        parameters, same = model.num_parameters(), "dense, same weights"
        return Setup("index", run, attention, size, seed, parameters, note, same)

    def evaluate(session: Session, model: LanguageModel) -> dict[str, Any]:
        """What the dense model has."""
        texts, fitted = held_out_texts(session, size), size.by_index()

        def measure(
            attention: Attention,
            progress: Progress,
            note: str = "",
            of: LanguageModel = model,
            rate: str = "",
        ) -> dict[str, Any]:
            found = evaluation.measure_texts(session, of, attention, texts)
            run = f"evaluated: {attention.label}{rate}, seed {seed}"
            session.write(setup_of(of, run, attention, note), "final", progress, **found)
            return found

        of_dense = measure(dense(), Progress())  # as it was, without an index
        without = copy.deepcopy(model)
        progress, note = give_index(session, model, size, fitted, seed, RATE_OF_FITS)
        for attention in settings:
            measure(attention, *((progress, note) if attention.index_dim else (Progress(), "")))
        if seed == 0:
            lists.write(session, setup_of(model, "lists", fitted), model, texts)
        for rate in OTHER_RATES:
            other = copy.deepcopy(without)
            fit = give_index(session, other, size, fitted, seed, rate)
            measure(fitted, *fit, other, f"{record.FITTED_AT}{rate:g}")
        return of_dense

    def work(session: Session) -> None:
        if seed == 0:
            try:
                model = session.load_model(size, session.checkpoint)
            except FileNotFoundError:
                session.say("no weights of the dense model: it is trained here")
            else:
                found = evaluate(session, model)
                session.write(
                    setup_of(model, name, dense(), "the weights of (a)"), "final", Progress(), **found
                )
                return
        model = session.make_model(size, seed)

        def after(progress: Progress, status: str) -> None:
            if seed == 0:
                record.save_checkpoint(
                    session.out, session.checkpoint, model.state_dict(), session.part_bytes
                )
            evaluate(session, model)

        train_on_text(session, replace(setup_of(model, name, dense()), baseline="itself"), model, after)

    return Run(name, work)


def scratch_run(piece: str, size: Training, attention: Attention, seed: int = 0) -> Run:
    """(b) One model trained from the beginning with ``attention``."""
    name = f"{attention.label}, seed {seed}"

    def work(session: Session) -> None:
        model = session.make_model(size, seed, index_dim=attention.index_dim)
        baseline = "itself" if attention.kind == "dense" else "dense, same training"
        setup = Setup(
            piece, name, attention, size, seed=seed, parameters=model.num_parameters(), baseline=baseline
        )

        def swap(progress: Progress, status: str) -> None:
            texts = held_out_texts(session, size)
            for other in others:
                found = evaluation.measure_texts(session, model, other, texts)
                swapped = replace(setup, run=f"{name}, evaluated: {other.label}", attention=other)
                session.write(replace(swapped, baseline="as trained"), status, progress, **found)

        others = [size.tree(span) for span in (None, 2, 1) if span != attention.span] + [dense()]
        swaps = piece == "scratch" and attention.kind == "tree" and attention.positions == "own"
        train_on_text(session, setup, model, swap if swaps and attention.stride == 1 else None)

    return Run(name, work)


def search(scale: Scale) -> list[Run]:
    """(f) One layer of attention learns to copy: nothing but the search is left to learn."""
    size = scale.search
    settings = [size.tree(2), dense(), size.tree(None), window(size.budget)]
    settings += [size.tree(2, 4), size.tree(2, 1, "compact"), size.tree(None, 1, "compact")]
    return [Run(x.label, lambda session, x=x: trained_search(session, size, x)) for x in settings]  # type: ignore[misc]


def trained_search(session: Session, size: Training, attention: Attention) -> SearchModel:
    """The model of such a run, trained and measured; it is asked for the repeated letters alone."""
    model = SearchModel(size).to(session.device)
    setup = Setup("search", attention.label, attention, size, parameters=model.num_parameters())
    held_out = held_out_texts(session, size)

    def loss_of(step: int) -> Tensor:
        texts = draw_texts(session.corpus.train, size.batch, size.context, size.strings, size.letters, step)
        return evaluation.copies(evaluation.byte_losses(model, attention, texts.tokens), texts).mean()

    def measure(status: str, progress: Progress) -> None:
        found = evaluation.measure_texts(session, model, attention, held_out)
        nothing = {"bits_per_byte": None, "series": None, "series_of": None}  # not trained on the text
        session.write(setup, status, progress, **(found | nothing))

    train(session, setup, model, loss_of, measure)
    return model


#: The attentions of a piece, by the sizes of its experiment.
Settings = Callable[[Training], Sequence[Attention]]


def scratch(settings: Settings, seed: int = 0) -> Callable[[Scale], list[Run]]:
    """(b) A model for each attention. The dense model of seed 0 is that of (a), which is trained alike."""
    return lambda scale: [
        scratch_run("scratch", scale.scratch, attention, seed) for attention in settings(scale.scratch)
    ]


def recall(scale: Scale) -> list[Run]:
    """(c) Multi-query associative recall."""
    size = scale.recall
    settings = [dense(), size.tree(2), size.tree(None), window(size.budget)]
    if scale.name != "quick":
        settings += [size.tree(4), size.tree(2, 4), size.tree(2, 16)]
    return [recall_run(size, scale, attention) for attention in settings]


def recall_run(size: Training, scale: Scale, attention: Attention) -> Run:
    """One model, trained on texts of all numbers of pairs, short ones first, and evaluated on each number."""

    def work(session: Session) -> None:
        model = session.make_model(size, vocabulary=scale.vocabulary, index_dim=attention.index_dim)
        setup = Setup("recall", attention.label, attention, size, parameters=model.num_parameters())

        def loss_of(step: int) -> Tensor:
            context, pairs = lesson(step, size.steps, size.context, scale.pairs)
            texts = size.batch * size.context // context
            task = draw_recall(texts, context, pairs, scale.vocabulary, step, session.device)

            def loss() -> Tensor:
                hidden = model(task.tokens, attention)
                places = task.questions[..., None].expand(-1, -1, hidden.shape[2])
                logits = model.logits(hidden.gather(1, places))
                return F.cross_entropy(logits.flatten(0, 1), task.answers.flatten())

            return learning(session, attention, loss)

        def measure(status: str, progress: Progress) -> None:
            found = {
                pairs: evaluation.measure_recall(session, model, attention, size, pairs, HELD_OUT_SEED)
                for pairs in scale.pairs
            }
            for pairs, accuracy in found.items():
                session.write(setup, status, progress, texts=size.texts, pairs=pairs, accuracy=accuracy)

        train(session, setup, model, loss_of, measure)

    return Run(attention.label, work)


def long_texts(piece: str, size: Training, scale: Scale) -> list[Run]:
    """(d) Dense attention and two trees on long texts: at equal steps, or for equal seconds."""
    settings = [dense()] + [size.tree(span, stride) for span, stride in scale.long_settings]
    return [scratch_run(piece, size, attention) for attention in settings]


def long_index(scale: Scale) -> list[Run]:
    """(d) The tree with an index for as many seconds, with M as it is recommended."""
    size = scale.longest
    nodes = min(8192, size.context)
    return [scratch_run("long-128k", size, size.by_index(stride, nodes=nodes)) for stride in (1, 4)]


def look_for_needles(
    session: Session, setup: Setup, model: LanguageModel, progress: Progress, lengths: Sequence[int]
) -> None:
    """A row for each length of texts with strings at equal depths."""
    for length in lengths:
        count = max(1, min(8, 2**19 // length))
        planted = held_out_texts(
            session, setup.size, length, reach=1.0, even=True, strings=session.scale.depths, count=count
        )
        found = evaluation.needles(session, model, setup.attention, planted)
        session.write(replace(setup, context=length), "step", progress, **found)


def needle_run(size: Training, scale: Scale, attention: Attention) -> Run:
    """(e) The weights of (a) trained further on texts of one length, then strings looked for in longer texts.

    Every other step has an upper layer more than the shortest texts need, as longer ones do.
    """

    def attention_of(step: int) -> Attention:
        if attention.kind != "tree" or step % 2 == 0:
            return attention
        return replace(attention, max_top_nodes=scale.wide)

    def work(session: Session) -> None:
        model = session.load_model(scale.conversion, session.checkpoint, attention.index_dim)
        setup = Setup("needle", attention.label, attention, size, parameters=model.num_parameters())
        texts = held_out_texts(session, size, reach=1.0)

        def measure(status: str, progress: Progress) -> None:
            found = evaluation.measure_texts(session, model, attention, texts)
            if status == record.DONE:
                look_for_needles(session, setup, model, progress, scale.needle_lengths)
            session.write(setup, status, progress, **found)

        loss_of = text_loss(session, model, size, 0, attention_of, reach=1.0)
        train(session, setup, model, loss_of, measure)

    return Run(attention.label, work)


def needle(settings: Settings) -> Callable[[Scale], list[Run]]:
    """(e) A model for each attention. Own positions and dense attention do not extrapolate by themselves."""
    return lambda scale: [needle_run(scale.needle, scale, attention) for attention in settings(scale.needle)]


def large_run(scale: Scale, attention: Attention) -> Run:
    """(h) A larger model, first on shorter texts, then every other step; the dense one gets an index at the end.

    Copies are counted in shorter texts too, where a model learns them first.
    """
    size, name = scale.large, f"{attention.label}, seed 0"
    short = shorter(size, scale.conversion)

    def work(session: Session) -> None:
        model = session.make_model(size, index_dim=attention.index_dim)
        setup = Setup(record.LARGE, name, attention, size, parameters=model.num_parameters())

        def measure_short(of: Setup, model: LanguageModel, progress: Progress) -> None:
            there = of.attention
            if there.kind == "tree":
                there = replace(there, top_k=short.top_k, max_top_nodes=short.max_top_nodes)
            run = f"{of.run}{record.SHORT}{short.context} bytes"
            found = evaluation.measure_texts(session, model, there, held_out_texts(session, short))
            session.write(replace(of, run=run, attention=there, size=short), "final", progress, **found)

        def after(progress: Progress, status: str) -> None:
            look_for_needles(session, setup, model, progress, scale.large_lengths)
            measure_short(setup, model, progress)
            if attention.kind != "dense":
                return
            for rate in (RATE_OF_FITS, LARGE_RATE):
                fitted = copy.deepcopy(model)
                fitting, note = give_index(session, fitted, size, size.by_index(), setup.seed, rate)
                words = f"{record.FITTED_AT}{rate:g}" if rate != RATE_OF_FITS else ""
                for stride in (1, 4):
                    other = size.by_index(stride)
                    converted = replace(
                        setup, run=f"{name}, evaluated: {other.label}{words}", attention=other, note=note,
                        parameters=fitted.num_parameters(), baseline="dense, same weights",
                    )  # fmt: skip
                    look_for_needles(session, converted, fitted, fitting, scale.large_lengths)
                    found = evaluation.measure_texts(session, fitted, other, held_out_texts(session, size))
                    session.write(converted, status, fitting, **found)
                    measure_short(converted, fitted, fitting)

        train_on_text(session, setup, model, after, short, first=size.steps * 3 // 5)

    return Run(name, work)


#: What decides comes first.
PIECES = (
    Piece(
        "conversion", "a dense model evaluated with every attention, 4096 bytes", 4.5, conversion, quick=True
    ),
    Piece("search", "one layer that learns to copy: minutes on a CPU too", 1, search, quick=True),
    Piece("scratch", "from scratch: span 2, mean", 7, scratch(lambda x: [x.tree(2), x.tree()])),
    Piece("recall", "multi-query associative recall", 5, recall, quick=True),
    Piece(
        "scratch-compact",
        "from scratch: compact positions, a window",
        9,
        scratch(lambda x: [x.tree(2, 1, "compact"), x.tree(None, 1, "compact"), window(x.budget)]),
        "scratch",
    ),
    Piece(
        "scratch-strides",
        "from scratch: shared selections",
        9,
        scratch(lambda x: [x.tree(2, 4), x.tree(2, 16), x.tree(4, 4)]),
        "scratch",
    ),
    Piece("scratch-fine", "from scratch: the true mass", 3.5, scratch(lambda x: [x.tree(1)]), "scratch"),
    Piece("conversion-32k", "the dense model at 32 768 bytes", 6, conversion_long),
    Piece(
        "needle",
        "needles by depth up to 1M bytes: compact positions",
        5,
        needle(lambda x: [x.tree(2, 1, "compact")]),
    ),
    Piece("long-128k", "131 072 bytes, equal time", 9, lambda s: long_texts("long-128k", s.longest, s)),
    Piece(
        "scratch-more",
        "from scratch: second seeds",
        8.5,
        scratch(lambda x: [x.tree(2), dense(), x.tree()], seed=1),
        "scratch",
    ),
    Piece(
        "scratch-seed",
        "from scratch: a second seed with compact positions",
        3,
        scratch(lambda x: [x.tree(2, 1, "compact")], seed=1),
        "scratch",
    ),
    Piece("needle-fine", "the same: the true mass", 5, needle(lambda x: [x.tree(1, 1, "compact")]), "needle"),
    Piece(
        "needle-others", "the same: own positions, dense", 8, needle(lambda x: [x.tree(2), dense()]), "needle"
    ),
    Piece("index", "the dense model gets an index, and its lists", 3, lambda s: [index_run(s, 0)]),
    Piece(
        "index-more",
        "the same with two more dense models",
        6,
        lambda s: [index_run(s, seed) for seed in range(1, s.dense_models)],
        "index",
    ),
    Piece(
        "scratch-index",
        "from scratch: an index that learns beside the model",
        14,
        lambda s: [
            *scratch(lambda x: [x.by_index(), x.by_index(4), x.by_index(1, "compact")])(s),
            *scratch(lambda x: [x.by_index()], seed=1)(s),
        ],
        "scratch",
    ),
    Piece(
        "recall-index",
        "multi-query associative recall by an index",
        1.5,
        lambda s: [recall_run(s.recall, s, s.recall.by_index())],
        "recall",
    ),
    Piece(
        "needle-index",
        "the same by an index",
        12,
        # M as it is recommended, and that of the other runs.
        needle(lambda x: [x.by_index(1, "compact", nodes=nodes) for nodes in (8192, 0)]),
        "needle",
    ),
    Piece("long-128k-index", "131 072 bytes, equal time, by an index", 6, long_index, "long-128k"),
    Piece("long-32k", "32 768 bytes, equal steps", 9, lambda s: long_texts("long-32k", s.long, s)),
    Piece(
        "large-dense",
        "111 million parameters, dense, then with an index",
        9,
        lambda s: [large_run(s, dense())],
        record.LARGE,
    ),
    Piece(
        "large-index",
        "the same with an index from scratch",
        9,
        lambda s: [large_run(s, s.large.by_index())],
        record.LARGE,
    ),
)
