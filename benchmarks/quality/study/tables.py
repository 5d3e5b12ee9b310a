"""Tables of the study in Markdown, made from rows alone; an experiment without rows has no table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.harness.plots import place

from .record import DONE, FITTED_AT, LARGE, NEEDLES, SHORT, Row
from .settings import RATE

SWAPPED = ", evaluated: "  # in the name of a row whose model was trained with another attention

MOST_STEPS = 8  # that a table over steps shows, the last one among them
PARTS = 4  # of the 32 that a text is measured in, to a column
JUMP = 0.5  # share of copies from which on a model is said to copy


def label(row: Row) -> str:
    """The attention of a row in a few words, without the budget."""
    if row.kind == "dense":
        return "dense"
    if row.kind == "window":
        return f"window {row.window}"
    score = f"index {row.index_dim}" if row.index_dim else f"span {row.span}" if row.span else "mean"
    top = f", M={row.max_top_nodes}" if row.max_top_nodes > row.top_k * row.compression_rate else ""
    return f"tree, {score}, s={row.stride}{top}" + (", compact" if row.positions == "compact" else "")


def run_of(row: Row) -> tuple[str, str, int]:
    """What rows of one run of an experiment have in common: on two texts, or of two models, one name is two runs."""
    return row.run, row.text, row.seen


def by_run(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run, in the order of the runs."""
    runs: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        runs.setdefault(run_of(row), []).append(row)
    return list(runs.values())


def by_model(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each text and kind of model, in the order of the rows."""
    kinds = dict.fromkeys((row.text, row.seen) for row in rows)
    return [[row for row in rows if (row.text, row.seen) == kind] for kind in kinds]


def digest(row: Row) -> str:
    """Names the text of a row in a few letters."""
    return row.text.rpartition(" ")[2]


def last_rows(rows: Sequence[Row], piece: str) -> list[Row]:
    """The rows that finished runs of an experiment ended with, in the order of the runs."""
    return [row for row in rows if row.piece == piece and row.status == DONE and SWAPPED not in row.run]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first are aligned right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def found(row: Row) -> str:
    """Copies found with the standard error."""
    error = "" if row.copies_error is None else f" ± {100 * row.copies_error:.1f}"
    return f"{100 * (row.copies_found or 0.0):.1f}{error} %"


def bits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def converted(rows: Sequence[Row], piece: str) -> list[list[Row]]:
    """The evaluations of (a), those of one text and so of one model together; most copies of the dense model first."""
    used = [row for row in last_rows(rows, piece) if row.run.startswith("evaluated")]
    return sorted(
        by_model(used),
        key=lambda mine: -max((r.copies_found or 0.0 for r in mine if r.kind == "dense"), default=0.0),
    )


def conversion(rows: Sequence[Row], piece: str = "conversion") -> str:
    """(a) Every attention on the same weights, a table for each text that a model was trained on."""
    return "\n\n".join(conversion_of(used) for used in converted(rows, piece))


def conversion_of(used: Sequence[Row]) -> str:
    """The table of one text."""
    dense = next((row for row in used if row.kind == "dense"), None)
    lines = []
    for row in used:
        share = (
            ""
            if not dense or not dense.copies_found
            else percent((row.copies_found or 0) / dense.copies_found)
        )
        budget = str(row.top_k * row.compression_rate or row.window or row.context)
        lines.append(
            [label(row), budget, str(row.tree_layers or ""), bits(row.bits_per_byte), found(row), share]
        )
    head = ("attention", "tokens per query", "layers", "bits per byte", "copies found", "of the dense ones")
    texts = f"{used[0].context} bytes, `seen` {used[0].seen}, {used[0].texts} texts from {used[0].text}"
    return f"{texts}; {place(used)}.\n\n{table(head, lines)}"


def conversion_long(rows: Sequence[Row]) -> str:
    """(a) The same on longer texts."""
    return conversion(rows, "conversion-32k")


def choices(rows: Sequence[Row]) -> str:
    """(a) Other rules for the nodes that are opened, a table for each text."""
    used = [row for row in last_rows(rows, "choices") if row.run.startswith("evaluated")]
    return "\n\n".join(choices_of(mine) for mine in by_model(used))


def choices_of(used: Sequence[Row]) -> str:
    """The table of one text."""
    whole = next((row.copies_found for row in used if row.kind == "dense"), None)
    lines = []
    for row in used:
        products = row.products
        if products is None and row.kind == "tree":
            products = 1 / (row.span or RATE) / row.stride  # of the last query, which shares its choice
        share = percent((row.copies_found or 0) / whole) if whole else ""
        cost = "" if products is None else f"{products:.3f}"
        budget = str(row.top_k * row.compression_rate or row.context)
        name = row.choice or label(row).removeprefix("tree, ")
        lines.append([name, budget, cost, bits(row.bits_per_byte), found(row), share])
    head = (
        "nodes chosen by",
        "tokens per query",
        "products",
        "bits per byte",
        "copies found",
        "of the dense ones",
    )
    texts = f"{used[0].context} bytes, `seen` {used[0].seen}, {used[0].texts} texts from {used[0].text}"
    return f"{texts}; {place(used)}.\n\n{table(head, lines)}"


def index(rows: Sequence[Row]) -> str:
    """(a) Dense models that got an index, a table for each text."""
    used = [row for row in last_rows(rows, "index") if not row.run.startswith("train")]
    return "\n\n".join(index_of(mine) for mine in by_model(used))


def index_of(used: Sequence[Row]) -> str:
    """The table of one text, and what neighbouring queries read together."""
    evaluated = [row for row in used if row.copies_found is not None]
    dense = {row.seed: row for row in evaluated if row.kind == "dense"}
    lines = []
    for row in evaluated:
        other = dense[row.seed]
        share = percent((row.copies_found or 0) / other.copies_found) if other.copies_found else ""
        beyond = f"{(row.bits_per_byte or 0.0) - (other.bits_per_byte or 0.0):+.4f}"
        budget, took = str(row.top_k * row.compression_rate or row.context), f"{row.train_seconds:.0f}"
        cells = [budget, str(row.seed), bits(row.bits_per_byte), beyond, found(row), share]
        rate = "".join(row.run.partition(FITTED_AT)[1:]).rpartition(",")[0]
        lines.append([label(row) + rate, *cells, took if row.index_dim else ""])
    head = (
        "attention", "tokens per query", "model", "bits per byte", "beyond dense", "copies found", "of the dense ones",
        "fit, s",
    )  # fmt: skip
    texts = f"{used[0].context} bytes, `seen` {used[0].seen}, {used[0].texts} texts from {used[0].text}"
    words = [f"{texts}; {place(used)}.", table(head, lines)]
    for row in used:
        if row.copies_found is None and row.series:
            numbers = ", ".join(f"{x or 0.0:.2f}" for x in row.series)
            words.append(f"{row.series_of} of {row.top_k} blocks: {numbers}.")
    return "\n\n".join(words)


def jump(rows: Sequence[Row], last: Row) -> str:
    """The first evaluated step from which on a run finds half of the letters."""
    steps = sorted(
        (row for row in rows if row.piece == last.piece and run_of(row) == run_of(last)), key=lambda r: r.step
    )
    for row in steps:
        if all((later.copies_found or 0.0) > JUMP for later in steps if later.step >= row.step):
            return str(row.step)
    return "–"


def with_dense(rows: Sequence[Row]) -> list[Row]:
    """The rows of (b), and those of the dense training of (a), which is the dense model of seed 0 on the same text."""
    own = [row for row in rows if row.piece == "scratch"]
    shared = [row for row in rows if row.piece == "conversion" and row.run.startswith("train")]
    alike = {alike_of(row) for row in own}
    return [
        *(replace(row, piece="scratch", run="dense, seed 0") for row in shared if alike_of(row) in alike),
        *own,
    ]


def alike_of(row: Row) -> tuple[object, ...]:
    """What trainings that may be compared have in common."""
    return row.text, row.trained_context, row.batch, row.layers, row.width, row.seen, row.steps, row.seed


def trained(rows: Sequence[Row], piece: str) -> str:
    """(b), (d) A model per attention, trained alike."""
    used = last_rows(rows, piece)
    if not used:
        return ""
    dense = {alike_of(row): row.bits_per_byte or 0.0 for row in used if row.kind == "dense"}
    lines = []
    for row in used:
        other = dense.get(alike_of(row))
        apart = "" if other is None else f"{(row.bits_per_byte or 0.0) - other:+.4f}"
        measured = [bits(row.bits_per_byte), apart, found(row), f"{row.copies_bits:.2f}", jump(rows, row)]
        budget = str(row.top_k * row.compression_rate or row.window or row.context)
        place_of = [str(row.context), budget, str(row.seen), str(row.seed), str(row.step)]
        lines.append([label(row), *place_of, f"{row.tokens / 1e6:.1f}", *measured, digest(row)])
    head = (
        "attention", "bytes of a text", "tokens per query", "seen", "seed", "steps", "million bytes", "bits per byte",
        "beyond dense", "copies found", "bits a letter", "half of them from step", "text, sha256",
    )  # fmt: skip
    words = f"{used[0].texts} texts of the evaluation; {place(used)}."
    return f"{words}\n\n{table(head, lines)}"


def scratch(rows: Sequence[Row]) -> str:
    """(b) The models, then those of stride 1 with another selection at the evaluation than in the training."""
    rows = with_dense(rows)
    first = trained(rows, "scratch")
    trained_runs = {run_of(row): row for row in last_rows(rows, "scratch")}
    lines = []
    for row in rows:
        run, swapped, _ = row.run.partition(SWAPPED)
        as_trained = trained_runs.get(run_of(replace(row, run=run)))
        if row.piece == "scratch" and row.status == DONE and swapped and as_trained is not None:
            cells = [str(row.seen), label(row), bits(row.bits_per_byte), found(row), digest(row)]
            lines.append([f"{label(as_trained)}, seed {row.seed}", *cells])
    if not lines:
        return first
    head = ("trained with", "seen", "evaluated with", "bits per byte", "copies found", "text, sha256")
    return f"{first}\n\nThe same weights with another attention:\n\n{table(head, lines)}"


def search(rows: Sequence[Row]) -> str:
    """(f) Copies over steps of one layer of attention, a table for each text."""
    finished = {run_of(row) for row in last_rows(rows, "search")}
    used = [row for row in rows if row.piece == "search" and run_of(row) in finished]
    return "\n\n".join(search_of(mine) for mine in by_model(used))


def search_of(used: Sequence[Row]) -> str:
    """The table of one text."""
    steps = sorted({row.step for row in used})
    shown = steps[::-1][:: -(-len(steps) // MOST_STEPS)][::-1]
    lines = []
    for run in by_run(used):
        mine = {row.step: row for row in run}
        cells = [percent(mine[step].copies_found) if step in mine else "" for step in shown]
        lines.append([label(run[0]), *cells])
    words = f"{used[0].context} bytes, {used[0].texts} texts from {used[0].text}; {place(used)}."
    return f"{words}\n\n{table(('attention', *(f'step {step}' for step in shown)), lines)}"


def long_steps(rows: Sequence[Row]) -> str:
    return trained(rows, "long-32k")


def long_clock(rows: Sequence[Row]) -> str:
    return trained(rows, "long-128k")


def recall(rows: Sequence[Row]) -> str:
    """(c) Accuracy by the number of pairs, a table for each kind of model, the latest first."""
    used = last_rows(rows, "recall")
    kinds = sorted({row.seen for row in used}, reverse=True)
    return "\n\n".join(recall_of([row for row in used if row.seen == seen]) for seen in kinds)


def recall_of(used: Sequence[Row]) -> str:
    """The table of one kind of model."""
    pairs = sorted({row.pairs for row in used if row.pairs is not None})
    lines = []
    for run in by_run(used):
        mine = {row.pairs: row for row in run}
        cells = [percent(mine[n].accuracy) if n in mine else "" for n in pairs]
        lines.append([label(run[0]), f"{run[0].step}", *cells])
    texts = f"{used[0].context} tokens, {used[0].texts} texts for each number of pairs"
    words = f"{texts}, `seen` {used[0].seen}; {place(used)}."
    return f"{words}\n\n{table(('attention', 'steps', *(f'{n} pairs' for n in pairs)), lines)}"


def needle_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the grid whose runs are finished."""
    finished = {run_of(row) for row in last_rows(rows, "needle")}
    return [
        row for row in rows if row.piece == "needle" and row.series_of == NEEDLES and run_of(row) in finished
    ]


def needle(rows: Sequence[Row]) -> str:
    """(e) The worst depth of each length, a table for each text."""
    return "\n\n".join(needle_of(mine) for mine in by_model(needle_rows(rows)))


def needle_of(used: Sequence[Row]) -> str:
    """The table of one text."""
    lengths = sorted({row.context for row in used})
    lines = []
    for run in by_run(used):
        lines.append([label(run[0]), *by_length(run, lengths)])
    head = ("attention", *(f"{n // 1024}k" for n in lengths))
    words = (
        f"Letters found over all depths, in brackets at the worst one; trained at {used[0].trained_context} bytes of "
        f"{used[0].text}; {place(used)}."
    )
    return f"{words}\n\n{table(head, lines)}"


def by_length(run: Sequence[Row], lengths: Sequence[int]) -> list[str]:
    """Needles found in sequences of each length, and at the worst depth; of the rows of one run."""
    mine = {row.context: row for row in run if row.series_of == NEEDLES}
    return [
        f"{percent(mine[n].copies_found, 0)} ({percent(min(x or 0.0 for x in mine[n].series or [None]), 0)})"
        if n in mine
        else ""
        for n in lengths
    ]


def large(rows: Sequence[Row]) -> str:
    """(h) The larger model, tables for each text, with a line for a run that has not been made beside the other."""
    done = {run_of(row) for row in last_rows(rows, LARGE)}
    mine = [row for row in rows if row.piece == LARGE]
    trained = (replace(row, run=row.run.partition(SWAPPED)[0].partition(SHORT)[0]) for row in mine)
    used = [row for row, of in zip(mine, trained, strict=True) if run_of(of) in done]
    return "\n\n".join(large_of(mine) for mine in by_model(used))


def large_of(used: Sequence[Row]) -> str:
    """The tables of one text: what each run found and took, then its loss by position."""
    lengths = sorted({row.context for row in used if row.series_of == NEEDLES})
    copies = {row.run.partition(SHORT)[0]: found(row) for row in used if SHORT in row.run}
    lines, positions, missing = [], [], {"dense": "dense", "tree": "tree with an index"}
    for run in by_run([row for row in used if SHORT not in row.run]):
        last = next(row for row in run if row.status == DONE)
        is_trained = SWAPPED not in last.run
        if is_trained:
            missing.pop(last.kind, None)
        rate = f"{last.tokens / last.train_seconds / 1e3:.0f}" if is_trained and last.train_seconds else ""
        memory = "" if last.memory_gib is None else f"{last.memory_gib:.1f}"
        rate_words = "".join(last.run.partition(FITTED_AT)[1:])
        name = label(last) + ("" if is_trained else f", by fit_index{rate_words}")
        took = [str(last.steps), f"{last.train_seconds:.0f}", rate, memory]
        counted = [found(last), copies.get(last.run, "–")]
        lines.append([name, *took, bits(last.bits_per_byte), *counted, *by_length(run, lengths)])
        series = last.series or []
        parts = [series[i : i + PARTS] for i in range(0, len(series), PARTS)]
        means = [[x for x in part if x is not None] for part in parts]
        positions.append(
            [name, str(last.steps), *(bits(sum(part) / len(part)) if part else "" for part in means)]
        )
    lines += [[name, "has not been run", *[""] * (6 + len(lengths))] for name in missing.values()]
    head = (
        "attention",
        "steps",
        "training or fit, s",
        "thousand bytes a second",
        "GiB",
        "bits per byte",
        "copies found",
        "in short sequences",
    )
    first = next(row for row in last_rows(used, LARGE) if SHORT not in row.run)
    size = f"{first.parameters / 1e6:.0f} million parameters, {first.context} bytes"
    words = f"{size}, {first.texts} texts from {first.text}; {place(used)}."
    found_table = table((*head, *(f"needles, {n // 1024}k" for n in lengths)), lines)
    columns = len(positions[0]) - 2
    ends = (f"to {first.context * (i + 1) // columns}" for i in range(columns))
    by_position = table(("attention", "steps", *ends), positions)
    return f"{words}\n\n{found_table}\n\nBits per byte by position:\n\n{by_position}"


#: The sections of docs/quality.md with what writes them.
SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "conversion": conversion,
    "conversion-32k": conversion_long,
    "choices": choices,
    "index": index,
    "search": search,
    "scratch": scratch,
    "recall": recall,
    "long-32k": long_steps,
    "long-128k": long_clock,
    "needle": needle,
    "large": large,
}


def render(rows: Sequence[Row]) -> dict[str, str]:
    """The tables by section; empty where nothing was measured."""
    return {name: write(rows) for name, write in SECTIONS.items()}
