"""The study of quality at a tiny size: what it measures, that it goes on where it ended, its report.

One file, because most tests look at the same study that ran whole, which takes a while.
"""

import csv
import json
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quality_study import loaded_study, session_of, small_text

from htree_ops.ops.tree_attention.options import WITHOUT_INDEX

ROOT = Path(__file__).resolve().parents[2]
study = pytest.fixture(scope="module")(loaded_study)
text = pytest.fixture(scope="module")(small_text)


@pytest.fixture(scope="module")
def whole(study, text, tmp_path_factory):
    """Every piece, once."""
    out = tmp_path_factory.mktemp("whole")
    assert study.main(["--tiny", "--device", "cpu", "--out", str(out), "--text", str(text)]) == 0
    return out


def test_every_run_ends_with_its_row(study, whole):
    rows = study.record.read_rows(whole)
    runs = {
        (piece.experiment, r.name) for piece in study.pieces.PIECES for r in piece.runs(study.settings.TINY)
    }
    done = {(row.piece, row.run) for row in rows if row.status == "final"}
    assert runs <= done
    assert {row.status for row in rows} == {"final", "step"}
    for row in rows:
        assert row.gpu == "none"
        assert row.torch == torch.__version__
        assert row.commit
        assert row.baseline
        assert (row.accuracy, row.copies_found, row.series) != (None, None, None)
        assert (row.text == "random tokens") == (row.piece == "recall")
    kinds = Counter((row.kind, row.span, row.positions) for row in rows)
    assert {
        ("tree", None, "own"),
        ("tree", 2, "own"),
        ("tree", 2, "compact"),
        ("window", None, "own"),
    } <= set(kinds)
    trained = [row for row in rows if (row.piece, row.run) == ("scratch", "dense, seed 1")]
    assert [row.step for row in trained] == [6, 12]
    assert trained[1].bits_per_byte < trained[0].bits_per_byte
    swapped = [row for row in rows if row.run.startswith("mean, s=1, k=2, own, seed 0, evaluated: ")]
    assert [(row.kind, row.span) for row in swapped] == [("tree", 2), ("tree", 1), ("dense", None)]
    assert len({row.bits_per_byte for row in swapped}) == 3
    long = [row for row in rows if row.piece == "long-128k" and row.status == "final"]
    assert {row.steps for row in long} == {0}
    assert all(row.train_seconds >= 0.3 and row.step > 3 and len(row.series) == 32 for row in long)


def test_a_dense_model_gets_an_index(study, whole):
    """The first is that of (a); the index is no part of the dense one, and its lists are kept."""
    rows = {row.run: row for row in study.record.read_rows(whole) if row.piece == "index"}
    of_conversion = {row.run: row for row in study.record.read_rows(whole) if row.piece == "conversion"}
    dense, fitted = rows["evaluated: dense, seed 0"], rows["evaluated: index 16, s=1, k=2, own, seed 0"]
    assert dense.bits_per_byte == of_conversion["evaluated: dense"].bits_per_byte
    assert rows["train: dense, seed 0"].note == "the weights of (a)"
    assert fitted.bits_per_byte not in (dense.bits_per_byte, of_conversion["evaluated: mean, s=1, k=2, own"])
    assert (fitted.index_dim, fitted.step, fitted.steps) == (16, 3, 3)
    assert "nats from the masses of the blocks" in fitted.note
    others = {name: row for name, row in rows.items() if ", learning rate " in name}
    assert [*others] == [
        f"evaluated: index 16, s=1, k=2, own, learning rate {rate}, seed 0"
        for rate in ("0.001", "0.01", "0.03")
    ]
    assert len({row.bits_per_byte for row in (fitted, *others.values())}) == 4
    shown = study.tables.index([*rows.values()])
    assert "| tree, index 16, s=1, learning rate 0.01 | 32 | 0 |" in shown
    unions = rows["lists"].series
    assert len(unions) == 6
    assert 1.0 <= unions[0] <= min(2.0, *unions[1:])
    kept = np.load(whole / "lists.npz")
    assert kept["lists"].shape == (2, 4, 64, 1, 2)
    assert kept["lists"].dtype == np.int16
    assert kept["starts"].tolist() == [0, 64, 128, 192]
    diagonal = (kept["starts"][:, None] + np.arange(64)) // 16
    assert (
        kept["lists"][..., 0, :].max(-1) == diagonal
    ).all()  # the block of the query itself is the last one
    assert study.lists.read(whole / "lists.npz").tolist() == (
        kept["lists"].transpose(0, 3, 1, 2, 4).reshape(2, 256, 2).tolist()
    )


def test_a_larger_model(study, whole):
    """Both runs see the same bytes of a corpus of their own; a run that is missing has a line that says so."""
    rows = [row for row in study.record.read_rows(whole) if row.piece == "large"]
    last = {row.run: row for row in rows if row.status == "final"}
    names = [f"index 16, s={stride}, k=4, own" for stride in (1, 4)]
    fitted = [
        f"dense, seed 0, evaluated: {name}{at}" for at in ("", ", learning rate 0.01") for name in names
    ]
    short = {run: row for run, row in last.items() if ", texts of 256 bytes" in run}
    last = {run: row for run, row in last.items() if run not in short}
    assert set(last) == {"dense, seed 0", f"{names[0]}, seed 0", *fitted}
    assert {run.partition(", texts of")[0] for run in short} == set(last)
    assert {(row.context, row.max_top_nodes) for row in short.values()} == {(256, 0), (256, 16)}
    assert {last[run].tokens for run in ("dense, seed 0", f"{names[0]}, seed 0")} == {12 * 2 * 512}
    assert {row.step for row in rows if row.run in fitted} == {3}
    assert len({row.bits_per_byte for row in (*last.values(), *short.values())}) == 12
    for run in last:
        needles = [row for row in rows if row.run == run and row.series_of == study.record.NEEDLES]
        assert [row.context for row in needles] == [512, 1024]
    (text,) = {row.text for row in rows}
    assert text not in {row.text for row in study.record.read_rows(whole) if row.piece != "large"}
    page = study.tables.large(rows)
    lines = [line for line in page.splitlines() if line.startswith(("| dense", "| tree"))]
    assert [line.split(" | ")[0] for line in lines[:6]] == [
        "| dense",
        "| tree, index 16, s=1, by fit_index",
        "| tree, index 16, s=4, by fit_index",
        "| tree, index 16, s=1, by fit_index, learning rate 0.01",
        "| tree, index 16, s=4, by fit_index, learning rate 0.01",
        "| tree, index 16, s=1",
    ]
    assert len(lines) == 12
    assert text in page
    assert "has not been run" not in page
    alone = study.tables.large([row for row in rows if row.run.startswith("dense")])
    assert "| tree with an index | has not been run |" in alone
    assert "| dense | has not been run |" not in alone
    assert study.tables.large([row for row in rows if row.run in fitted]) == ""
    assert study.report.section("large", "") == "This has not been run."


def test_steps_of_shorter_texts_have_as_many_bytes(study):
    """And their own budget: a sixteenth of the text, as that of the long ones."""
    size = study.settings.FULL.large
    short = study.pieces.shorter(size, study.settings.FULL.conversion)
    assert short.batch * short.context == size.batch * size.context == 65_536
    assert short.budget / short.context == size.budget / size.context == 1 / 16
    assert (short.width, short.layers, short.steps) == (size.width, size.layers, size.steps)


def test_lists_between_windows(study, tmp_path):
    """They are those of the window before, moved; not those of the first one."""
    starts = np.array([0, 64, 192])
    diagonal = (starts[:, None] + np.arange(64)) // 16
    lists = np.stack((diagonal, diagonal - 2), -1)[None, :, :, None].clip(-1).astype(np.int16)
    np.savez(tmp_path / "lists.npz", lists=lists, starts=starts, context=320)
    expected = np.arange(320) // 16
    found = study.lists.read(tmp_path / "lists.npz")
    assert found.dtype == torch.int32
    assert found.tolist() == [np.stack((expected, expected - 2), -1).clip(-1).tolist()]


def test_unions_of_neighbours(study):
    """Rows that share one of two blocks, then nothing of another head."""
    lists = torch.tensor([[[0, 1]], [[0, 2]], [[0, 3]], [[0, 4]]])
    assert study.lists.union_sizes(lists, [1, 2, 4]) == [1.0, 1.5, 2.5]
    heads = torch.cat((lists, lists.flip(0) + 10), 1)
    assert study.lists.union_sizes(heads, [2]) == [1.5]
    short = torch.tensor([[[0, -1]], [[0, 1]]])
    assert study.lists.union_sizes(short, [2]) == [2 / 1.5]


def test_conversion_keeps_the_weights(study, whole):
    """The model of the checkpoint, in bfloat16, is evaluated as it was trained, to rounding.

    Weights of 8 bits move the bits per byte by up to 0.002 here, steps and attentions by 0.03 and more.
    """
    rows = [row for row in study.record.read_rows(whole) if row.piece == "conversion"]
    earlier, trained = (row.bits_per_byte for row in rows if row.run == "train: dense")
    converted = {row.run: row for row in rows if row.run.startswith("evaluated")}
    assert converted["evaluated: dense"].bits_per_byte == pytest.approx(trained, abs=1e-2)
    assert trained < earlier - 3e-2  # so that weights of an earlier step are told apart
    bits = [converted[f"evaluated: {name}, s=1, k=2, own"].bits_per_byte for name in ("mean", "span 2")]
    assert bits[0] != bits[1]  # the span reaches the op


def test_a_finished_folder_stays_as_it_is(study, whole, text, tmp_path, capsys):
    before = (whole / "rows.jsonl").read_text()
    flags = ["--tiny", "--device", "cpu", "--text", str(text), "--out"]
    assert study.main([*flags, str(whole), "--resume"]) == 0
    assert (whole / "rows.jsonl").read_text() == before
    assert study.main([*flags, str(tmp_path / "next"), "--previous", str(whole)]) == 0
    assert not (tmp_path / "next" / "rows.jsonl").exists()
    assert study.main([*flags, str(whole)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_signal_leaves_a_partial_row_and_the_rest_for_later(study, text, tmp_path, monkeypatch):
    made = study.pieces.draw_texts

    def press(*arguments, **keywords):
        if len(drawn) == 8:
            signal.raise_signal(signal.SIGTERM)
        drawn.append(1)
        return made(*arguments, **keywords)

    drawn = []
    flags = f"--tiny --device cpu --piece needle-others --text {text} --out {tmp_path}".split()
    weights = study.model.LanguageModel(study.settings.TINY.conversion).state_dict()
    study.record.save_checkpoint(tmp_path, session_of(study, tmp_path, text).checkpoint, weights)
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(study.pieces, "draw_texts", press)
        assert study.main(flags) == 3
    assert signal.getsignal(signal.SIGTERM) == handler
    assert [(row.status, row.step) for row in study.record.read_rows(tmp_path)][-1] == ("partial", 8)
    assert len(list(tmp_path.glob("state-*"))) == 1
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"piece": "needle", "ru')  # killed while it wrote
    assert study.main([*flags, "--resume"]) == 0
    assert not list(tmp_path.glob("state-*"))
    rows = study.record.read_rows(tmp_path)
    assert [row.status for row in rows].count("final") == 2
    assert [row.step for row in rows if row.run == rows[0].run and row.context == 512] == [6, 8, 12, 12]
    assert study.report.merge([], rows) == [row for row in rows if row.status != "partial"]


def test_a_failure_is_a_row(study, text, tmp_path, capsys):
    flags = ["--tiny", "--device", "cpu", "--text", str(text), "--out", str(tmp_path), "--piece", "needle"]
    assert study.main(flags) == 1
    (row,) = study.record.read_rows(tmp_path)
    assert row.status == "error"
    assert "no checkpoint dense" in row.note
    assert study.publish([str(tmp_path)]) == 0
    assert "failed: needle" in capsys.readouterr().out


class Killed(BaseException):
    """What no handler of the program sees, as SIGKILL."""


def steps_of_trainings(study, patch, most=1000):
    """The steps that trainings make from now on, as they make them; they are killed behind ``most``."""
    made, steps = study.pieces.text_loss, []

    def text_loss(*arguments, **keywords):
        loss_of = made(*arguments, **keywords)

        def work(step):
            if len(steps) == most:
                raise Killed
            steps.append(step)
            return loss_of(step)

        return work

    patch.setattr(study.pieces, "text_loss", text_loss)
    return steps


@pytest.mark.parametrize(("when", "state_s"), [(5, 1e9), (9, 0.0), (12, 0.0)])
def test_a_killed_training_goes_on_from_its_last_state(
    study, whole, text, tmp_path, monkeypatch, when, state_s
):
    """After steps before the first state, between two, and in the evaluation at the end: the same rows to the bit."""
    monkeypatch.setattr(study.training, "STATE_S", state_s)
    flags = f"--tiny --device cpu --piece scratch --text {text} --out {tmp_path}"

    def write(*arguments, **keywords):
        if arguments[2] == "final" and when == 12:
            raise Killed
        return written(*arguments, **keywords)

    written = study.session.Session.write
    with monkeypatch.context() as patch:
        steps_of_trainings(study, patch, when)
        patch.setattr(study.session.Session, "write", write)
        with pytest.raises(Killed):
            study.main(flags.split())
    assert study.main([*flags.split(), "--resume"]) == 0
    ours, theirs = (
        {
            (row.run, row.step): (row.bits_per_byte, row.copies_bits, row.tokens)
            for row in study.report.merge([], study.record.read_rows(folder))
            if row.piece == "scratch"
        }
        for folder in (tmp_path, whole)
    )
    assert ours
    assert ours.items() <= theirs.items()
    first = [
        row for row in study.record.read_rows(tmp_path) if row.step == 6 and row.run.startswith("span 2")
    ]
    assert len(first) == 1  # a training that had a state did not begin again
    assert not list(tmp_path.glob("state-*"))


def test_the_limit_pauses_the_first_run_and_leaves_the_others(study, text, tmp_path, monkeypatch):
    said = []
    state = tmp_path / "state"
    session = session_of(study, tmp_path / "out", text, limit_s=1e6, state=state)
    session.said = said.append
    (piece,) = (piece for piece in study.pieces.PIECES if piece.name == "scratch")
    runs = piece.runs(study.settings.TINY)
    left = iter([1e6] * 6 + [0.0] * 100)
    monkeypatch.setattr(study.session.Session, "remaining", lambda self: next(left))
    with pytest.raises(study.session.NoTime):
        runs[0].work(session)
    assert study.record.read_rows(session.out)[-1].status == "step"
    paused = max(int(row.step) for row in study.record.read_rows(session.out))
    assert [path.suffixes for path in state.iterdir()] == [[".0", ".pt"]]
    monkeypatch.undo()
    session.limit_s = None
    runs[0].work(session)
    assert any("goes on after step" in line for line in said)
    last = study.record.read_rows(session.out)[-1]
    assert (last.status, last.step, last.tokens) == ("final", 12, 12 * 2 * 256)
    assert paused < 12
    assert not list(state.iterdir())
    # the next run of this call finds too little time at its first look
    setup = study.session.Setup("scratch", "dense", study.settings.dense(), study.settings.TINY.scratch)
    session.limit_s, progress = 100.0, study.session.Progress(step=11, steps=1000, step_ms=1000.0)
    for schedule in (study.training.Schedule(1000, 0.0, 1e-3), study.training.Schedule(0, 500.0, 1e-3)):
        with pytest.raises(study.session.NoTime):
            study.training.fit(session, setup, schedule, progress)
        session.ran = 0
        study.training.fit(session, setup, schedule, progress)
        session.ran = 1


def test_a_training_without_evaluations_has_states_too(study, text, tmp_path, monkeypatch):
    monkeypatch.setattr(study.training, "STATE_S", 0.0)
    session = session_of(study, tmp_path, text)
    size = replace(study.settings.TINY.longest, seconds=1e6)
    (run, *_) = study.pieces.long_texts("long-128k", size, study.settings.TINY)
    with monkeypatch.context() as patch:
        steps_of_trainings(study, patch, 5)
        with pytest.raises(Killed):
            run.work(session)
    setup = study.session.Setup("long-128k", run.name, study.settings.dense(), size)
    assert session.states(setup).load()["progress"]["step"] == 5


def test_an_evaluation_ends_at_the_limit_and_keeps_the_training(study, text, tmp_path, monkeypatch):
    """The evaluations behind the last step are left for the next call, which does not train again."""
    session = session_of(study, tmp_path, text, limit_s=1e6)
    (run,) = study.pieces.conversion_long(study.settings.TINY)
    weights = study.model.LanguageModel(study.settings.TINY.conversion).state_dict()
    study.record.save_checkpoint(tmp_path, session.checkpoint, weights)
    write = study.session.Session.write
    steps = steps_of_trainings(study, monkeypatch)

    def written(self, setup, status, *arguments, **measured):
        if setup.run.startswith("evaluated"):
            self.limit_s = 0.0  # the first evaluation took all that was left
        return write(self, setup, status, *arguments, **measured)

    with monkeypatch.context() as patch:
        patch.setattr(study.session.Session, "write", written)
        with pytest.raises(study.session.NoTime):
            run.work(session)
    assert [row.run for row in session.rows if row.run.startswith("evaluated")] == ["evaluated: dense"]
    session.limit_s = None
    run.work(session)
    assert steps == list(range(12))
    assert session.is_done("conversion-32k", run.name)


def test_rows_weights_and_states_belong_to_one_text(study, whole, text, tmp_path):
    """On another text a run is another run: nothing is taken for done, and no other weights are evaluated on it."""
    other = tmp_path / "other"
    shutil.copytree(text, other)
    (other / "package_0" / "more.py").write_text("# one line more\n")
    said = []
    old, new = session_of(study, whole, text), session_of(study, whole, other)
    new.said = said.append
    assert old.is_done("conversion", "train: dense")
    assert not new.is_done("conversion", "train: dense")
    assert any(f"rows of another text are kept and not continued: {old.corpus.name}" in line for line in said)
    assert old.is_done("recall", "dense")
    assert new.is_done("recall", "dense")
    old.load_model(study.settings.TINY.conversion, old.checkpoint)
    with pytest.raises(FileNotFoundError, match="no checkpoint dense-tiny-"):
        new.load_model(study.settings.TINY.conversion, new.checkpoint)
    quick = replace(study.settings.TINY, name="quick")
    assert replace(old, scale=quick, out=tmp_path / "quick").checkpoint != old.checkpoint
    setup = study.session.Setup("scratch", "dense", study.settings.dense(), study.settings.TINY.scratch)
    assert old.states(setup).run != new.states(setup).run


def test_folders_of_one_name_are_both_read(study, tmp_path):
    for number in range(40):
        for root in ("one", "two"):
            folder = tmp_path / root / "src" / f"package_{number}"
            folder.mkdir(parents=True)
            (folder / "code.py").write_text(f"{root} {number}\n" * 20)
    roots = [tmp_path / root / "src" for root in ("one", "two")]
    corpus = study.corpus.read_corpus(roots, 10**6, 20)
    assert corpus.name.startswith("80 Python files")
    assert corpus.name.endswith(corpus.digest)


def test_planted_strings_are_repeated_and_counted(study):
    source = torch.arange(4096).remainder(90).to(torch.uint8)
    for reach, even in ((0.5, False), (1.0, True)):
        texts = study.corpus.draw_texts(source, 3, 400, 5, 12, seed=4, reach=reach, even=even)
        again = study.corpus.draw_texts(source, 3, 400, 5, 12, seed=4, reach=reach, even=even)
        assert torch.equal(texts.tokens, again.tokens)
        for row, kinds, places, repeats in zip(
            texts.tokens, texts.kinds, texts.places, texts.repeats, strict=True
        ):
            for place, repeat in zip(places.tolist(), repeats.tolist(), strict=True):
                assert torch.equal(row[place : place + 12], row[repeat : repeat + 12])
                assert (kinds[place : place + 12] == study.corpus.PLANTED).all()
                assert (kinds[repeat : repeat + 12] == study.corpus.REPEATED).all()
                assert row[place - 1] == row[place + 12] == row[repeat - 1] == row[repeat + 12] == 10
            assert (kinds == study.corpus.TEXT).sum() == 401 - 5 * 14 - (5 * 13 + 1)
        # where the model gives the repeated letters, and nothing else, a high probability
        losses = torch.full((3, 400), 3.0)
        losses.scatter_(1, texts.repeated(), 0.1)
        assert (study.evaluation.copies(losses, texts) == 0.1).all()
        assert (losses[texts.kinds[:, 1:] == study.corpus.REPEATED] == 0.1).all()
        assert (losses == 3.0).sum() == 3 * (400 - 60)
    with pytest.raises(ValueError, match="5 strings of 40 letters need a longer text"):
        study.corpus.draw_texts(source, 3, 400, 5, 40, seed=4)


def test_half_of_the_letters_found(study, text, tmp_path, monkeypatch):
    """A model that knows every other string exactly, in bits and shares."""
    session = session_of(study, tmp_path, text)
    size = study.settings.TINY.scratch
    texts = study.pieces.held_out_texts(session, replace(size, strings=4))
    losses = torch.full((2, size.context), 8.0).log2().mul(torch.tensor(2.0).log())  # three bits a byte
    where = texts.repeated().unflatten(1, (4, size.letters))[:, ::2].flatten(1)
    losses.scatter_(1, where, 0.0)
    monkeypatch.setattr(study.evaluation, "byte_losses", lambda model, attention, tokens: losses)
    found = study.evaluation.measure_texts(session, torch.nn.Module(), study.settings.dense(), texts)
    assert found["copies_found"] == found["copies_whole"] == 0.5
    assert found["copies_error"] == 0.0
    assert found["copies_bits"] == pytest.approx(1.5)
    assert found["bits_per_byte"] == pytest.approx(3.0)


def test_recall_begins_with_short_texts(study):
    """And ends with all numbers of pairs at the whole length; every lesson can be drawn."""
    lessons = [study.recall.lesson(step, 100, 1024, (4, 8, 16, 32, 64, 128, 256)) for step in range(100)]
    assert set(lessons[:40]) == {(64, 4), (64, 8)}
    assert set(lessons[40:60]) == {(128, 4), (128, 8), (128, 16)}
    assert set(lessons[60:]) == {(1024, n) for n in (4, 8, 16, 32, 64, 128, 256)}
    for context, pairs in {*lessons, study.recall.lesson(0, 10, 64, (4,))}:
        assert study.recall.draw_recall(1, context, pairs, 600, 0, "cpu").questions.shape == (1, pairs)


def test_recall_asks_for_values_of_its_keys(study):
    task = study.recall.draw_recall(5, 64, 16, 100, 3, "cpu")
    keys, values = task.tokens[:, :32:2], task.tokens[:, 1:32:2]
    assert ((keys > 0) & (keys < 50)).all()
    assert (values >= 50).all()
    assert all(len(set(row)) == 16 for row in (*keys.tolist(), *values.tolist(), *task.questions.tolist()))
    assert torch.equal(task.tokens.gather(1, task.questions), keys)
    assert torch.equal(task.answers, values)
    assert ((task.questions >= 32) & (task.questions % 2 == 0)).all()
    assert torch.equal(task.tokens, study.recall.draw_recall(5, 64, 16, 100, 3, "cpu").tokens)


def test_the_window_is_a_window(study):
    q, k, v = (torch.randn(2, 48, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    t = torch.arange(48)
    seen = (t <= t[:, None]) & (t > t[:, None] - 16)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(study.model.sliding_window(q, k, v, 16), expected)
    whole = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(study.model.sliding_window(q, k, v, 64), whole)
    with pytest.raises(ValueError, match="window, 32, must divide the sequence, 48"):
        study.model.sliding_window(q, k, v, 32)


def test_compiled_parts_are_made_once(study, monkeypatch):
    """One graph for all layers, seeds and models of a shape: the weights are arguments."""
    made = []
    monkeypatch.setattr(study.model, "_COMPILED", {})
    monkeypatch.setattr(torch, "compile", lambda f, **_: made.append(f) or f)
    for seed in (0, 1):
        model = study.model.LanguageModel(study.settings.TINY.scratch, seed=seed, fused=True)
        hidden = model(torch.zeros(1, 256, dtype=torch.int64), study.settings.dense())
    assert made == [study.model.before_attention, study.model.after_attention]
    with torch.no_grad():
        model.fused = False
        assert torch.equal(hidden, model(torch.zeros(1, 256, dtype=torch.int64), study.settings.dense()))


def test_a_checkpoint_in_small_files(study, tmp_path):
    state = {f"w{i}": torch.randn(50, 60) for i in range(5)}
    paths = study.record.save_checkpoint(tmp_path, "some", state, 16384)
    assert len(paths) == 3
    assert all(path.stat().st_size <= 16384 for path in paths)
    loaded = study.record.load_checkpoint([tmp_path / "none", tmp_path], "some")
    assert all(torch.equal(loaded[name], state[name].bfloat16()) for name in state)
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint some"):
        study.record.load_checkpoint([tmp_path], "some")
    (tmp_path / "none").mkdir()
    other = study.record.save_checkpoint(tmp_path / "none", "some", {"w": torch.zeros(9000)}, 16384)
    shutil.copy(other[1], paths[1])  # a file of other weights
    with pytest.raises(FileNotFoundError, match="no checkpoint some"):
        study.record.load_checkpoint([tmp_path], "some")


def test_of_states_the_last_whole_one_counts(study, tmp_path):
    states, other = (study.record.States(tmp_path / "states", name, 8192) for name in ("one", "another"))
    assert states.load() is None
    for step in range(3):
        states.save({"step": step, "weights": torch.full((3000,), float(step))})
    other.save({"step": 7})
    assert states.load()["step"] == 2
    assert len(list(states.folder.iterdir())) == 4 + 1
    save = states._remove
    object.__setattr__(
        states, "_remove", lambda names: None
    )  # killed before the earlier state was taken away
    states.save({"step": 3, "weights": torch.full((3000,), 3.0)})
    object.__setattr__(states, "_remove", save)
    assert states.load()["step"] == 3
    sorted(states.folder.glob("*04.*"))[2].unlink()  # killed while it wrote
    assert states.load()["step"] == 2
    states.clear()
    assert states.load() is None
    assert other.load() == {"step": 7}


def test_the_report_publishes_every_finished_run(study, whole, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    light = {
        "light": study.pictures.plots.THEMES["light"]
    }  # the dark pictures take as long and differ in colours
    monkeypatch.setattr(study.pictures.plots, "THEMES", light)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "quality.md", tmp_path / "docs")
    full = tmp_path / "measured"
    full.mkdir()
    lines = (whole / "rows.jsonl").read_text().replace('"scale": "tiny"', '"scale": "full"')
    (full / "rows.jsonl").write_text(lines)
    flags = ["--publish", "--root", str(tmp_path)]
    assert study.publish([str(full), *flags]) == 0
    page = (tmp_path / "docs" / "quality.md").read_text()
    shown = capsys.readouterr().out
    for name in set(study.tables.SECTIONS) - {"choices"}:  # whose rows stay, and whose runs are over
        assert f"## {name}" in shown
        assert "| dense |" in page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    rows = study.record.read_rows(tmp_path / "benchmarks" / "results" / "quality")
    assert len(rows) == len(lines.splitlines())
    assert "| tree, mean, s=1, seed 0 | 4 | tree, span 1, s=1 |" in page
    for name in study.report.SHOWN.values():
        assert f"images/{name}_dark.png" in page
        assert (tmp_path / "docs" / "images" / f"{name}_light.png").is_file()
    again = study.report.merge(rows, [replace(row, note="again") for row in rows if row.piece == "recall"])
    assert Counter(row.note == "again" for row in again) == {False: len(rows) - 32, True: 32}
    assert study.publish(flags) == 0
    assert (tmp_path / "docs" / "quality.md").read_text() == page


def test_runs_of_one_name_on_two_texts_are_two_runs(study, whole):
    """In every table rows of another text add lines or a table, and change none of those that are there."""
    rows = study.report.merge([], study.record.read_rows(whole))
    text = "9 Python files, 0.6 MB, sha256 0123456789ab"
    others = [
        replace(row, text=text, copies_found=1.0 - 0.01 * row.step) for row in rows if row.piece != "recall"
    ]
    for name, write in study.tables.SECTIONS.items():
        if name == "choices":  # without rows here
            continue
        alone = write(rows).splitlines()
        both = study.report.merge(rows, others)
        assert set(alone) <= set(write(both).splitlines()), name
        in_full = ("conversion", "conversion-32k", "index", "search", "needle", "large")
        again = text if name in in_full else "0123456789ab"
        assert (again in write(both)) == (name != "recall"), name
    last = study.tables.last_rows(both, "scratch")
    assert {study.tables.jump(both, row) for row in last if row.text == text} == {"6"}
    assert {study.tables.jump(both, row) for row in last if row.text != text} == {"–"}


def test_scales_are_shown_apart(study, whole, tmp_path, capsys):
    rows = [row for row in study.record.read_rows(whole) if row.piece == "conversion"]
    for scale in ("full", "quick"):
        for row in rows:
            study.record.append_row(tmp_path, replace(row, scale=scale))
    assert study.publish([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("## conversion\n") == shown.count("## conversion, quick\n") == 1
    assert shown.count("| dense |") == 2


def test_the_page_shows_the_published_rows(study):
    page = (ROOT / "docs" / "quality.md").read_text()
    rows = study.record.read_rows(ROOT / "benchmarks" / "results" / "quality")
    assert study.report.page_with(page, rows) == page, "run python -m benchmarks.quality.report --publish"
    named = {f"{name}_{theme}.png" for name in study.report.SHOWN.values() for theme in ("light", "dark")}
    assert {path.name for path in (ROOT / "docs" / "images").glob("quality_*.png")} <= named


def test_a_picture_has_a_panel_for_every_model_that_its_table_has(study, tmp_path, monkeypatch):
    """And a line is of one model: its points are rows of one text, kind of model and commit."""
    pytest.importorskip("matplotlib")
    rows = study.record.read_rows(ROOT / "benchmarks" / "results" / "quality")
    plt = study.pictures.plots.load_matplotlib("light")
    panels = {}

    def look(figure):
        for axes in figure.axes:
            lines = {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.lines}
            if lines:
                panels[axes.get_xlabel().split("\n")[1]] = lines

    monkeypatch.setattr(plt, "close", look)
    for draw, piece, models in (
        (study.pictures.copies_by_stride, "conversion", 3),
        (study.pictures.copies_over_steps, "scratch", 3),
        (study.pictures.loss_by_position, "long-128k", 1),
    ):
        panels.clear()
        assert draw(rows, tmp_path / "picture.png", "light")
        used = study.tables.by_model(study.tables.last_rows(rows, piece))
        assert len(panels) == len(used) == models
        assert set(panels) == {study.pictures.model_of(mine[0]) for mine in used}
    panels.clear()
    study.pictures.copies_by_stride(rows, tmp_path / "picture.png", "light")
    for used in study.tables.converted(rows, "conversion"):
        lines = panels[study.pictures.model_of(used[0])]
        for span in (None, 4, 2, 1):
            mine = [r for r in used if (r.kind, r.span, r.positions, r.top_k) == ("tree", span, "own", 16)]
            found = [100 * r.copies_found for r in sorted(mine, key=lambda r: r.stride)]
            assert lines["mean" if span is None else f"span {span}"] == found
    again = [replace(row, commit="f" * 40) for row in rows if row.piece == "conversion" and row.stride == 4]
    panels.clear()
    mixed = [row for row in rows if row.piece == "conversion" and row.stride != 4]
    study.pictures.copies_by_stride([*mixed, *again], tmp_path / "picture.png", "light")
    assert {len(lines["span 2, 95348d7"]) for lines in panels.values() if "span 2, 95348d7" in lines} == {4}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("", "--out is required"),
        ("--out {out} --piece all", "--piece must be one of conversion, search"),
        ("--out {out} --device tpu", "--device must be cpu, cuda or auto, got tpu"),
        ("--out {out} --previous {out}/none", "is not a folder"),
        ("--tiny --device cpu --out {out} --text {out} --piece search", "run.py: --text: the text below"),
        ("--out {out} --resume", "line 1 is no row"),
    ],
)
def test_wrong_flags_are_one_line(study, tmp_path, capsys, flags, complaint):
    if "--resume" in flags:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"piece": "x"}) + "\n")
    assert study.main(flags.format(out=tmp_path).split()) == 2
    assert complaint in capsys.readouterr().err


def test_no_page_is_published_without_rows_or_a_checkout(study, tmp_path, capsys):
    none = str(tmp_path / "none")
    assert study.publish([none]) == 2
    assert "no rows of finished runs" in capsys.readouterr().err
    assert study.publish(["--publish", "--root", none]) == 2
    assert "--root must be a checkout" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_has_the_chosen_pieces(study, capsys):
    assert study.main(["--list"]) == 0
    assert "conversion-32k" in capsys.readouterr().out
    assert study.main(["--list", "--piece", "recall"]) == 0
    listed = capsys.readouterr().out
    assert "recall" in listed
    assert "conversion" not in listed


def test_the_recommended_settings_are_those_of_the_rows(study):
    """What the page says of them are shares of the published rows; that for quality keeps its promise."""
    rows = study.record.read_rows(ROOT / "benchmarks" / "results" / "quality")
    size = study.settings.FULL.conversion
    models = [
        copies
        for used in study.tables.converted(rows, "conversion")
        if (copies := {row.run: row.copies_found for row in used})["evaluated: dense"] > 0.5
    ]
    assert len(models) >= 2

    def in_words(share):
        return f"{share:.1f}" if share > 99 else f"{share:.0f}"

    def kept(attention):
        run = f"evaluated: {attention.label}"
        return " and ".join(in_words(100 * model[run] / model["evaluated: dense"]) for model in models) + " %"

    said = [kept(size.tree(None))]
    said += [kept(size.tree(o["selection_span"], o["selection_stride"])) for o in WITHOUT_INDEX.values()]
    assert kept(size.tree(1)) == "99.9 and 99.9 %"
    of_seed_0 = {
        row.run: row for row in study.tables.last_rows(rows, "scratch") if row.seed == 0 and row.seen == 4
    }
    dense = next(
        row
        for row in study.tables.last_rows(rows, "conversion")
        if row.run == "train: dense" and row.seen == 4
    )
    options = WITHOUT_INDEX["quality"]
    best = size.tree(options["selection_span"], options["selection_stride"], "compact")
    trained = of_seed_0[f"{best.label}, seed 0"]
    by_default = of_seed_0[f"{size.tree(None, 1, 'compact').label}, seed 0"]
    assert trained.copies_found >= 0.95 * dense.copies_found
    assert trained.bits_per_byte <= dense.bits_per_byte + 0.005
    said += [f"{100 * by_default.copies_found:.0f} %"]
    page = " ".join((ROOT / "docs" / "quality.md").read_text().split())
    for words in said:
        assert words.removesuffix(" %") in page, words
    for digits in (0, 1):
        assert f"{100 * trained.copies_found:.{digits}f} % of the copies" in page
    with (ROOT / "benchmarks" / "results" / "quality" / "conversion_again.csv").open() as file:
        again = [
            row for row in csv.DictReader(file) if row["run"] == dense.run and row["step"] == row["steps"]
        ]
    assert {int(row["seen"]) for row in again} == {dense.seen}
    copies = [100 * dense.copies_found, *(100 * float(row["copies_found"]) for row in again)]
    assert f"finds {min(copies):.0f} to {max(copies):.0f} %, at the same bits per byte" in page
