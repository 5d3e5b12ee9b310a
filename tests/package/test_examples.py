"""The example of the README at a tiny size: it learns, continues exactly, and refuses wrong flags in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import htree_ops

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_lm.py"
MODEL = "--layers 2 --dim 48 --heads 2 --kv-heads 1 --compression-rate 4 --top-k 8 --max-top-nodes 24"
TINY = f"--device cpu {MODEL} --context 256 --batch 4 --eval-windows 2 --time-lengths none --sample-bytes 0"
TINY += " --copy-steps 0"


@pytest.fixture(scope="module")
def lm():
    """The script and its parts as modules, on one thread: at this size more of them only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        import train_lm
        from lm import copies, model, report, settings, text, training

        yield SimpleNamespace(
            main=train_lm.main, model=model, report=report, settings=settings, text=text, training=training,
            copies=copies,
        )  # fmt: skip
    torch.set_num_threads(threads)


def settings_of(lm, flags: str):
    return lm.settings.resolve(lm.settings.make_parser().parse_args(flags.split()), "cpu", "", None)


def history(folder: Path) -> dict:
    return json.loads((folder / "history.json").read_text())


def test_it_learns_real_text(lm, tmp_path, capsys):
    flags = f"{TINY} --batch 8 --steps 70 --eval-every 35 --eval-windows 24 --time-lengths 64,128 --sample-bytes 8"
    flags += f" --copy-steps 2 --out {tmp_path}"
    assert lm.main(flags.split()) == 0
    shown = capsys.readouterr().out
    found = history(tmp_path)
    unigram = found["unigram_bits_per_byte"]
    assert 4 < unigram < 5.5  # Python sources
    for name in ("tree", "dense"):
        curves = found["models"][name]
        assert len(curves["train_bits_per_byte"]) == 70
        assert curves["train_bits_per_byte"][0] > unigram + 1
        assert curves["validation_bits_per_byte"][-1][1] < unigram - 0.8, name
        assert name in shown
    # equal weights and batches: the first losses differ only by what the tree leaves out
    first = [found["models"][name]["train_bits_per_byte"][0] for name in ("tree", "dense")]
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], abs=0.2)
    assert [row["T"] for row in found["attention_seconds"]] == [64, 128]
    assert all(
        row[f"{kind}_training"] > 0 for row in found["attention_seconds"] for kind in ("tree", "dense")
    )
    assert "tree over 256 tokens: 3 layers of 256, 64, 16 nodes" in shown
    assert list(found["copies_found"].values()) == [0.0] * 5  # two steps teach nothing
    assert "tree, index, stride 1 (recommended)    0.0 %" in shown
    assert "an index of 16 numbers with every token" in shown
    assert "validation, bits per byte" in shown
    assert "tokens per second" in shown
    assert (tmp_path / "sample.txt").read_text()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_an_interrupted_run_continues_exactly(lm, tmp_path, capsys, monkeypatch):
    flags = f"{TINY} --steps 7 --eval-every 3"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert lm.main([*flags.split(), "--out", str(whole)]) == 0

    made = lm.training.training_batch

    def press_control_c(text, step, *rest):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return made(text, step, *rest)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(lm.training, "training_batch", press_control_c)
        assert lm.main([*flags.split(), "--out", str(parts)]) == 130
    assert signal.getsignal(signal.SIGINT) == handler
    shown = capsys.readouterr().out
    assert "stopped after step 4 of 7" in shown
    command = shown.strip().splitlines()[-1].split()
    assert command[:2] == ["python", "examples/train_lm.py"]
    assert command[-1] == "--resume"
    assert not (parts / "history.json").exists()

    assert lm.main(command[2:]) == 0
    assert "continuing after step 4 of 7" in capsys.readouterr().out
    for name in ("tree", "dense"):
        for curve in ("train_bits_per_byte", "validation_bits_per_byte"):
            expected = history(whole)["models"][name][curve]
            assert history(parts)["models"][name][curve] == expected, (name, curve)
    states = [
        torch.load(folder / "checkpoint.pt", weights_only=True)["learners"]["tree"]["model"]
        for folder in (whole, parts)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    assert lm.main(["--resume", "--out", str(parts), "--dim", "64", "--device", "cpu"]) == 2
    assert "--dim 64 contradicts the checkpoint, which has dim = 48" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--text /nonexistent/folder", "--text: /nonexistent/folder is not a folder"),
        ("--text {empty}", "0 bytes of training text in 0 .py files"),
        ("--context 100000000", "--context 100000000 needs 100000001"),
        ("--context 1", "--context must be at least 2, got 1"),
        ("--context many", "--context: invalid int value: 'many'"),
        ("--batch 0", "--batch must be at least 1, got 0"),
        ("--dim 30 --heads 4", "--dim 30, --heads 4"),
        ("--heads 4 --kv-heads 3", "--kv-heads 3"),
        ("--max-top-nodes 0", "--max-top-nodes must be at least 1, got 0"),
        ("--selection-span 3", "--selection-span must be 0 or a divisor of 16, got 3"),
        ("--selection-span 2 --index-dim 16", "index_dim must be 0 beside selection_span = 2, got 16"),
        ("--index-dim 24", "--index-dim 24: HTreeAttention: index_dim must be a multiple of 16 up to 128"),
        ("--copy-steps -1", "--copy-steps must be at least 0, got -1"),
        ("--selection-stride 3", "--selection-stride must be a power of two that divides 16, got 3"),
        ("--learning-rate nan", "--learning-rate must be positive and finite, got nan"),
        (
            "--compression-rate 99999999999999999999",
            "--compression-rate must be at most 2147483647, got 9999",
        ),
        ("--seed 99999999999999999999", "--seed must be at most 2147483647, got 9999"),
        ("--batch 99999999999", "--batch must be at most 2147483647, got 9999"),
        ("--batch 2147483647", "--batch * --context must be at most 2147483647, got"),
        ("--time-lengths 64,99999999999999", "--time-lengths must be at most 2147483647, got 9999"),
        ("--sample-bytes 99999999999999999999", "--sample-bytes must be at most 2147483647, got 9999"),
        ("--dim 2000000000 --heads 2", "out of memory, choose smaller sizes: "),
        ("--seed -1", "--seed must be at least 0, got -1"),
        ("--sample-bytes -1", "--sample-bytes must not be negative, got -1"),
        ("--time-lengths 4k", "--time-lengths must be positive numbers or 'none', got '4k'"),
        ("--device tpu", "--device"),
        ("--device cuda:99", "--device cuda:99"),
        ("--out {file}", "cannot be made"),
        ("--resume", "--resume: there is no"),
        ("--resume --out {damaged}", "is not a checkpoint of this script"),
        ("--colour", "unrecognized arguments: --colour"),
    ],
)
def test_a_wrong_flag_gets_one_line(lm, tmp_path, refusal_of, flags, complaint):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "checkpoint.pt").write_text("not a checkpoint")
    flags = flags.format(**{name: tmp_path / name for name in ("empty", "file", "damaged")})
    out = [] if "--out" in flags else ["--out", str(tmp_path / "out")]
    said = refusal_of(lm.main, [*flags.split(), *out])
    assert said.startswith("train_lm.py: ")
    assert complaint in said


def test_too_little_memory_while_training_gets_one_line(lm, tmp_path, capsys, monkeypatch):
    def too_many(*rest):
        return torch.empty(2**50)

    monkeypatch.setattr(lm.training, "training_batch", too_many)
    assert lm.main([*TINY.split(), "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("train_lm.py: out of memory, choose smaller sizes: ")
    assert "Traceback" not in "\n".join(lines)

    def broken(*rest):
        raise RuntimeError("another error")

    monkeypatch.setattr(lm.training, "training_batch", broken)
    with pytest.raises(RuntimeError, match="another error"):
        lm.main([*TINY.split(), "--out", str(tmp_path)])


def test_the_command_line():
    # the package that is tested, wherever it lies
    environment = os.environ | {"PYTHONPATH": str(Path(htree_ops.__file__).parents[1])}

    def run(*flags):
        command = [sys.executable, str(SCRIPT), *flags]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    wrong = run("--context", "1")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    shown = run("--help")
    assert shown.returncode == 0
    assert "--selection-stride" in shown.stdout


def test_help_explains_every_flag(lm):
    actions = lm.settings.make_parser()._actions
    assert len(actions) > 20
    assert [action.option_strings for action in actions if not action.help] == []


def test_both_models_agree_while_nothing_is_selected(lm):
    """Up to M tokens the tree is dense attention (docs/semantics/tree_attention.md §1.5)."""
    settings = settings_of(lm, f"{MODEL} --context 24 --device cpu")
    assert len(lm.model.candidates_by_layer(24, settings)) == 1
    torch.manual_seed(0)
    tree = lm.model.ByteLM(settings)
    dense = lm.model.ByteLM(settings, lm.model.DenseAttention)
    dense.load_state_dict(tree.state_dict())
    tokens = torch.randint(256, (2, 24))
    torch.testing.assert_close(tree(tokens), dense(tokens), rtol=1e-4, atol=1e-4)
    assert "nothing is selected" in lm.report.tree_words(settings)


@pytest.mark.parametrize("top_nodes", [24, 40])
@pytest.mark.parametrize("context", [24, 25, 97, 200])
def test_the_printed_candidates_are_those_of_the_algorithm(lm, context, top_nodes):
    from htree_ops.reference.tree_attention import htree_forward_naive

    flags = f"{MODEL} --max-top-nodes {top_nodes} --context {context} --index-dim 0 --device cpu"
    settings = settings_of(lm, flags)
    assert settings.selection_span == 2
    q, k = torch.randn(1, context, 1, 4), torch.randn(1, context, 1, 4)
    trace = htree_forward_naive(q, k, k, compression_rate=4, top_k_per_layer=8, max_top_nodes=top_nodes).trace
    expected = sum(layer.candidates.present.sum(-1).flatten() for layer in trace)
    torch.testing.assert_close(lm.model.candidates_per_query(context, settings), expected)
    assert len(lm.model.candidates_by_layer(context, settings)) == len(trace)
    # every whole candidate above the tokens has a mean of two for each pair of its tokens
    whole = [int(layer.candidates.present[0, -1].sum()) - 1 for layer in trace][-2::-1]
    means = sum(count * 4 ** (layer + 1) // 2 for layer, count in enumerate(whole))
    assert lm.model.span_means_of_last_query(context, settings) == means


def test_the_text_is_split_by_file(lm, tmp_path):
    for i in range(60):
        (tmp_path / f"module_{i}.py").write_text(f"x_{i} = {i}\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text("never\n")
    first, second = (lm.text.load_text(tmp_path, 8) for _ in range(2))
    assert torch.equal(first.train, second.train)
    assert first.num_train_files + first.num_validation_files == 60
    assert 1 <= first.num_validation_files <= 20
    lines = [set(bytes(part.tolist()).split(b"\0")[1:]) for part in (first.train, first.validation)]
    assert not lines[0] & lines[1]
    assert lines[0] | lines[1] == {f"x_{i} = {i}\n".encode() for i in range(60)}
    batch = lm.text.training_batch(first, 5, 8, 3, seed=0)
    assert batch.shape == (3, 9)
    assert torch.equal(batch, lm.text.training_batch(first, 5, 8, 3, seed=0))
    assert not torch.equal(batch, lm.text.training_batch(first, 6, 8, 3, seed=0))


def test_the_demo_finds_copies_as_it_says(lm):
    """A model that learned to copy where nothing is selected loses copies to the mean, and none to an index.

    How many it finds depends on the text, which is another one with each version of Python.
    """
    text = lm.text.load_text(lm.text.default_folder(), lm.copies.LONG_CONTEXT)
    found, table = lm.copies.copies_table(text.train, text.validation, 300, seed=0)
    dense, index, by_four, span, mean = found.values()
    assert dense > 0.7
    assert index > 0.95 * dense
    assert index + 0.01 > by_four > mean + 0.2
    assert index + 0.01 > span > 0.75 * dense
    assert f"{100 * index:.1f} %" in table


def test_a_training_that_did_not_learn_to_copy_begins_again(lm, monkeypatch):
    losses, seeds = [3.2, 3.3, 0.05, 0.01], []

    def train_once(source, steps, seed):
        seeds.append(seed)
        return f"model {seed}", losses[len(seeds) - 1]

    monkeypatch.setattr(lm.copies, "_train_once", train_once)
    assert lm.copies.train_copies(torch.zeros(9, dtype=torch.uint8), 5, seed=7) == "model 9"
    assert seeds == [7, 8, 9]


def test_planted_strings_are_repeated_at_the_end(lm):
    source = torch.arange(3000).remainder(90).to(torch.uint8)
    texts = lm.copies.draw_planted(source, 3, 300, 4, torch.Generator().manual_seed(3))
    for tokens, places in zip(texts.tokens.tolist(), texts.repeated.tolist(), strict=True):
        first_half = bytes(tokens[:151])
        lines = [bytes(tokens[i] for i in place) for place in places]
        assert all(b"\n" + line + b"\n" in first_half for line in lines)
        assert bytes(tokens).endswith(b"\n" + b"\n".join(lines) + b"\n")
        assert all(97 <= letter <= 122 for line in lines for letter in line)

    class Knows(torch.nn.Module):
        """Gives the next byte of the first text a high score, of the others none."""

        def forward(self, tokens):
            return 20.0 * F.one_hot(texts.tokens[:, 1:], 256) * torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)

    losses = texts.losses(Knows())
    assert losses.shape == (3, 4, lm.copies.LETTERS)
    assert (losses[0] < 1e-3).all()
    assert (losses[1:] > 5).all()
