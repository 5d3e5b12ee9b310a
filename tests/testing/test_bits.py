"""The digests of `make bits`: which changes they notice, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import htree_ops  # noqa: F401
from htree_ops.testing import bits


def test_a_digest_sees_every_bit_shape_and_dtype() -> None:
    x = torch.randn(2, 3)
    nearby = x.clone()
    nearby[1, 2] = torch.nextafter(nearby[1, 2], torch.tensor(torch.inf))
    others = [nearby, x.view(3, 2), x.view(torch.int32), x[:1], [x, x], (x, None), torch.empty(0)]
    assert len({bits.digest(value) for value in [x, *others]}) == len(others) + 1
    assert bits.digest(x.t().contiguous().t()) == bits.digest(x)
    assert bits.digest((x, [nearby])) == bits.digest([x, (nearby,)])
    assert bits.digest(torch.tensor(0.0)) != bits.digest(torch.tensor(-0.0))
    assert bits.digest(torch.tensor([torch.nan])) == bits.digest(torch.tensor([torch.nan]))


def test_the_same_calls_give_the_same_digests() -> None:
    first, second = (bits.digests("cpu", ["hadamard"]) for _ in range(2))
    assert first == second
    assert len(first) > 50
    assert len(set(first.values())) > 50


def test_compare_names_what_differs_and_what_only_one_side_has() -> None:
    assert bits.compare({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"}) == ["b", "c", "d"]


@pytest.mark.parametrize("room", sorted(bits.ROOMS))
def test_every_room_has_calls_with_names_of_their_own(room: str) -> None:
    for device in ("cpu", "cuda"):
        names = [name for name, _ in bits.ROOMS[room](device)]
        assert len(names) == len(set(names)) > 20


def test_the_command_writes_compares_and_fails_on_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(device: str, rooms: list[str] | None = None) -> dict[str, str]:
        return {"hadamard/one": "11", "hadamard/two": "22"}

    monkeypatch.setattr(bits, "digests", few)
    monkeypatch.chdir(tmp_path)
    assert bits.main(["--device", "cpu"]) == 2
    assert "--out FILE makes one" in capsys.readouterr().out
    assert bits.main(["--device", "cpu", "--out", "tests/bits/here.json"]) == 0
    assert bits.main(["--device", "cpu"]) == 0  # finds the record of this machine
    assert "2 calls, 0 differ from tests/bits/here.json" in capsys.readouterr().out
    record: dict[str, Any] = json.loads(Path("tests/bits/here.json").read_text())
    record["digests"]["hadamard/two"] = "23"
    record["machine"]["torch"] = "0"
    Path("other.json").write_text(json.dumps(record))
    assert bits.main(["--device", "cpu", "--against", "other.json"]) == 1
    said = capsys.readouterr().out
    assert "other.json was made on another machine" in said
    assert "differs: hadamard/two" in said
    assert "differs: hadamard/one" not in said
