"""What the tests of the quality study share: its modules, a text and a session on it."""

from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.quality import report, run
from benchmarks.quality.study import (
    corpus,
    evaluation,
    lists,
    model,
    pictures,
    pieces,
    recall,
    record,
    session,
    settings,
    tables,
    training,
)

ROOT = Path(__file__).resolve().parents[2]


def loaded_study():
    """The scripts and their parts as modules, on one thread: at this size more of them only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(
        main=run.main, publish=report.main, report=report, corpus=corpus, evaluation=evaluation, lists=lists,
        model=model, pictures=pictures, pieces=pieces, recall=recall, record=record, session=session,
        settings=settings, tables=tables, training=training,
    )  # fmt: skip
    torch.set_num_threads(threads)


def small_text(tmp_path_factory):
    """A folder of sources, small enough to read in no time: 60 folders, some of which are held out."""
    folder = tmp_path_factory.mktemp("text")
    content = "".join(path.read_text() for path in sorted((ROOT / "htree_ops").rglob("*.py")))
    for number in range(60):
        part = folder / f"package_{number}"
        part.mkdir()
        (part / "code.py").write_text(content[number * 4000 :][:8000])
    return folder


def session_of(study, out, text, **changes):
    return study.session.Session(
        out=out,
        scale=study.settings.TINY,
        device="cpu",
        text_folders=[text],
        said=lambda line: None,
        **changes,
    )
