"""The example that decodes from compressed caches, at a tiny size: exact outputs and true byte counts."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SMALL = {"context": 192, "batch": 2, "layers": 2, "dim": 64, "heads": 1, "kv_heads": 1}
FLAGS = "--device cpu --train-steps 25 --prompt-bytes 100 --bytes 80 --write-bytes 12 --window 8 --chunk 16"


@pytest.fixture(scope="module")
def example():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import compressed_generation
        from lm import generation, model, settings, training

        patch.setattr(compressed_generation, "TRAINED_HERE", SMALL | {"steps": 25})
        yield SimpleNamespace(
            script=compressed_generation,
            generation=generation,
            model=model,
            settings=settings,
            training=training,
        )
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    assert example.script.main([*FLAGS.split(), "--out", str(folder)]) == 0
    return folder


def test_the_report(example, trained):
    found = json.loads((trained / "generation.json").read_text())
    rows = {row["cache"]: row for row in found["rows"]}
    assert list(rows) == list(example.generation.CACHES)
    dense, exact = rows["dense"], rows["16 bits, all channels"]
    assert dense["bytes_per_token"] == 2 * 2 * 64 * 2  # two layers, keys and values, 64 channels of two bytes
    # 179 bytes of text were read: 160 in rows, 19 in the window
    for name, row_bytes in (
        ("16 bits, all channels", 2 * (8 + 128)),
        ("8 bits, all channels", 2 * (8 + 64 + 2)),
        ("8 bits, half of them", 2 * (8 + 32 + 2)),
        ("4 bits, 30 % of them", 2 * (8 + 12 + 2)),
        ("4 bits, keys transformed", (8 + 32 + 2) + (8 + 16 + 2)),
    ):
        assert rows[name]["bytes_per_token"] == pytest.approx(2 * (160 * row_bytes + 19 * 256) / 179)
    assert dense["agreement"] == 1
    assert dense["divergence_bits"] == 0
    assert exact["agreement"] > 0.95
    assert -1e-12 < exact["divergence_bits"] < 1e-3
    assert exact["bits_per_byte"] == pytest.approx(dense["bits_per_byte"], abs=1e-3)
    assert rows["8 bits, all channels"]["divergence_bits"] < 1e-2
    assert rows["4 bits, 30 % of them"]["divergence_bits"] > exact["divergence_bits"]
    for row in found["rows"]:
        assert row["seconds_per_byte"] > 0
        assert len(row["written"]) == 12
        assert 0 <= row["same_bytes_written"] <= 12


def test_a_second_run_takes_the_model_of_the_first(example, trained, capsys, monkeypatch):
    def refuse(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(example.training, "Learner", refuse)
    flags = FLAGS.replace("--bytes 80", "--bytes 3").split()
    assert example.script.main([*flags, "--out", str(trained)]) == 0
    shown = capsys.readouterr().out
    assert "8 bits, half of them" in shown
    assert "a prompt of 100 unseen bytes, then 3 one by one" in shown
    path = trained / "checkpoint.pt"
    assert example.script.main([*flags, "--out", str(trained / "other"), "--checkpoint", str(path)]) == 0
    with pytest.raises(AssertionError, match="trained again"):
        example.script.main([*flags, "--out", str(trained), "--train-steps", "26"])


@pytest.mark.parametrize("name", ["dense", "16 bits, all channels"])
def test_decoding_is_the_model_run_as_a_whole(example, trained, name):
    _, model = example.script.read_model(trained / "checkpoint.pt", "cpu")
    tokens = torch.randint(256, (60,), generator=torch.Generator().manual_seed(0))
    decoder = example.generation.make_decoder(model, example.generation.CACHES[name], 60, 4, 8)
    with torch.no_grad():
        expected = model(tokens[None])[0]
    actual = [decoder.read(tokens[:20]), *(decoder.read(token[None]) for token in tokens[20:])]
    torch.testing.assert_close(torch.stack(actual), expected[19:], rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--checkpoint {absent}", "--checkpoint: there is no"),
        ("--checkpoint {damaged}", "--checkpoint: {damaged} is not a checkpoint of this script"),
        (
            "--checkpoint {narrow}",
            "has heads of 32 channels; these caches take 64, 128, 256 or 512 (train_lm.py --heads 2)",
        ),
        ("--checkpoint {tree}", "has no dense model"),
        ("--prompt-bytes 0", "--prompt-bytes must be at least 1, got 0"),
        ("--bytes 0", "--bytes must be at least 1, got 0"),
        ("--prompt-bytes 192", "together must be at most the model's context of 192, got 192 and 1"),
        (
            "--prompt-bytes 100 --bytes 93",
            "together must be at most the model's context of 192, got 100 and 93",
        ),
        ("--write-bytes -1", "--write-bytes must not be negative, got -1"),
        ("--window -1", "--window must not be negative, got -1"),
        ("--chunk 0", "--chunk must be at least 1, got 0"),
        ("--train-steps 0", "--train-steps must be at least 1, got 0"),
        ("--text /nonexistent", "--text: /nonexistent is not a folder"),
        ("--device tpu", "--device"),
        ("--colour", "unrecognized arguments: --colour"),
    ],
)
def test_a_wrong_flag_gets_one_line(example, tmp_path, refusal_of, flags, complaint):
    (tmp_path / "damaged").write_text("not a checkpoint")
    for name, changes, kind in (("narrow", {"dim": 128, "heads": 4}, "dense"), ("tree", {}, "tree")):
        chosen = example.settings.Settings(**(SMALL | {"steps": 1} | changes), device="cpu", text="")
        state = {"settings": vars(chosen), "learners": {kind: {}}}
        torch.save(state, tmp_path / name)
    names = ("absent", "damaged", "narrow", "tree")
    places = {name: tmp_path / name for name in names}
    words = flags.format(**places).split()
    said = refusal_of(example.script.main, [*words, "--out", str(tmp_path / "out")])
    assert said.startswith("compressed_generation.py: ")
    assert complaint.format(**places) in said


def test_help_explains_every_flag(example):
    actions = example.script.make_parser()._actions
    assert len(actions) > 10
    assert [action.option_strings for action in actions if not action.help] == []
