"""The example that generates from a tree cache, at a tiny size."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples"
TINY = {"context": 96, "batch": 2, "layers": 2, "dim": 64, "heads": 1, "kv_heads": 1}


@pytest.fixture(scope="module")
def example():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import generate

        patch.setattr(generate, "TRAINED_HERE", TINY | {"steps": 5})
        yield generate
    torch.set_num_threads(threads)


def test_the_cache_writes_what_a_rebuilt_tree_writes(example, tmp_path):
    flags = f"--device cpu --train-steps 5 --lengths 500,900 --bytes 6 --chunk 130 --out {tmp_path}"
    assert example.main(flags.split()) == 0
    rows = json.loads((tmp_path / "generate.json").read_text())["rows"]
    assert [row["cache"] for row in rows] == [*example.DECODERS] * 2
    for tree, rebuilt, dense in (rows[:3], rows[3:]):
        assert tree["written"] == rebuilt["written"]
        assert len(dense["written"]) == 6
        assert tree["bytes_per_second"] > 0
        assert tree["cache_bytes"] > 0


def test_a_passkey_is_hidden_and_asked_for(example, tmp_path, capsys):
    source = torch.arange(97, 123).repeat(7)
    shortest = len(example.SENTENCE) + len(example.QUESTION)
    for length in (shortest, shortest + 1, 500):
        prompt = bytes(example.make_prompt(source, length, passkey=True).tolist()).decode()
        assert len(prompt) == length
        assert prompt.count(example.PASSKEY) == 1
        assert prompt.index(example.SENTENCE) == (length - shortest) // 2
        assert prompt.endswith(example.QUESTION)
    flags = f"--device cpu --train-steps 2 --lengths 400 --bytes 5 --passkey --out {tmp_path}"
    assert example.main(flags.split()) == 0
    rows = json.loads((tmp_path / "generate.json").read_text())["rows"]
    assert not any(row["passkey_found"] for row in rows)  # two steps teach nobody to copy
    assert capsys.readouterr().out.count("passkey not found") == len(rows)
    assert example.main(f"--device cpu --train-steps 2 --lengths 30 --passkey --out {tmp_path}".split()) == 2


def test_caches_of_one_dtype_beside_each_other(example, tmp_path, monkeypatch, capsys):
    """In float32, and in bfloat16 under autocast as on a GPU; what does not fit is said and left out."""
    flags = f"--device cpu --train-steps 2 --lengths 300 --bytes 3 --chunk 70 --out {tmp_path}".split()
    sizes = []
    for bfloat16 in (False, True):
        if bfloat16:
            monkeypatch.setattr(example, "dtype_on", lambda device: torch.bfloat16)
            monkeypatch.setattr(
                example.training, "precision", lambda device: torch.autocast("cpu", torch.bfloat16)
            )
        assert example.main(flags) == 0
        rows = json.loads((tmp_path / "generate.json").read_text())["rows"]
        sizes.append([row["cache_bytes"] for row in rows])
        assert (
            sizes[-1][1] == sizes[-1][2]
        )  # a dense cache holds the keys and values that a rebuilt tree needs
    assert sizes[0][1:] == [2 * size for size in sizes[1][1:]]
    assert sizes[1][0] < sizes[0][0] < 2 * sizes[1][0]  # index keys have 16 bits in both

    def too_large(*arguments):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setitem(example.DECODERS, "rebuild", too_large)
    capsys.readouterr()
    assert example.main(flags) == 0
    assert "300 rebuild       out of memory" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "generate.json").read_text())["rows"]) == 2


def test_a_checkpoint_from_another_machine(example, tmp_path):
    """Whose text is not here: the prompts are of the standard library."""
    chosen = example.settings.Settings(**(TINY | {"heads": 2}), device="cpu", text="/not/here")
    path = tmp_path / "checkpoint.pt"
    learners = {"tree": {"model": example.ByteLM(chosen).state_dict()}}
    torch.save({"settings": asdict(chosen), "learners": learners}, path)
    flags = f"--device cpu --checkpoint {path} --lengths 100 --bytes 2 --out {tmp_path}"
    assert example.main(flags.split()) == 0
    rows = json.loads((tmp_path / "generate.json").read_text())["rows"]
    assert [row["cache"] for row in rows] == ["tree cache", "rebuild"]  # heads of 32 have no dense row


def test_wrong_flags_are_one_line(example, refusal_of):
    for flags, complaint in (
        ("--bytes 0", "--bytes must be at least 1"),
        ("--checkpoint absent.pt", "there is no absent.pt"),
        ("--device tpu", "--device"),
        ("--lengths none", "--lengths must be positive numbers, got 'none'"),
        ("--lengths 9,-3", "--lengths must be positive numbers"),
        ("--lengths 2147483640", "--lengths and --bytes together"),
        ("--lengths 30 --passkey", "a prompt with a passkey has at least"),
        ("--out /dev/null/folder", "--out: /dev/null/folder cannot be made"),
    ):
        assert complaint in refusal_of(example.main, flags.split())
