"""Which reports of racecheck ``tests/racecheck_reports.py`` sets aside."""

from __future__ import annotations

import pytest
import racecheck_reports
from racecheck_reports import Access, judge, plain, reports

KERNEL = "void htree::ring<__half, (int)64>(Params)"
OPCODES = {0x9C30: "UBLKCP.S.G", 0x2980: "LDS.64", 0x2990: "LDSM.16.M88.4", 0x40: "STS.128", 0x50: "LDG.E"}


def log(
    first: str, *others: str, displayed: int = 1, result: str = "17 passed, 67 deselected in 4.10s"
) -> str:
    return "\n".join(
        [
            "========= COMPUTE-SANITIZER",
            f".....========= Error: Race reported between {first}",
            *(f"=========     and {other} [64 hazards]" for other in others),
            "========= ",
            "............                                   [100%]",
            result,
            f"========= RACECHECK SUMMARY: {displayed} hazards displayed ({displayed} errors, 0 warnings)",
        ]
    )


COPY = f"Write access at {KERNEL}+0x9c30"
LOADS = (f"Read access at {KERNEL}+0x2980", f"Read access at {KERNEL}+0x2990")


def wrong(text: str) -> list[str]:
    return judge(text, lambda kernel: OPCODES if kernel == KERNEL else {})[1]


def test_a_report_has_all_its_sides() -> None:
    assert reports(log(COPY, *LOADS)) == [
        [
            Access("Write", KERNEL, 0x9C30),
            Access("Read", KERNEL, 0x2980),
            Access("Read", KERNEL, 0x2990),
        ]
    ]


def test_bulk_copies_against_loads_are_set_aside() -> None:
    for text in (log(COPY, *LOADS), log(LOADS[0], COPY)):
        aside, lines = judge(text, lambda _: OPCODES)
        assert aside == {KERNEL: 1}
        assert lines == []


@pytest.mark.parametrize(
    "sides",
    [
        (f"Write access at {KERNEL}+0x40", *LOADS),  # an ordinary store
        (COPY, LOADS[0], f"Write access at {KERNEL}+0x40"),
        (COPY, COPY),  # two copies to one place
        (COPY, f"Read access at {KERNEL}+0x50"),  # no load from shared memory
        (COPY, f"Read access at {KERNEL}+0x70"),  # an unknown instruction
        (COPY, "Read access at other_kernel+0x2980"),
        (COPY,),
    ],
)
def test_everything_else_is_a_race(sides: tuple[str, ...]) -> None:
    (line,) = wrong(log(*sides))
    assert line.startswith("race: ")


def test_a_log_must_be_whole_and_its_tests_must_pass() -> None:
    assert wrong(log(COPY, *LOADS, displayed=2)) == ["the summary counts 2 reports, the log holds 1"]
    cut = log(COPY, *LOADS).split("17 passed")[0]
    assert wrong(cut) == ["the summary counts 0 reports, the log holds 1", "not every test passed"]
    for result in ("1 failed, 16 passed in 4.10s", "16 passed, 1 error in 4.10s", "1 error in 0.20s"):
        assert wrong(log(COPY, *LOADS, result=result)) == ["not every test passed"]


def test_names_are_those_of_the_symbols() -> None:
    assert plain("void f<__half, (int)64, (bool)1>(P)") == plain("void f<__half, 64, true>(P)")
    dependent = plain("void f<(bool)1>(std::conditional<T1, A, B (*)(int)>::type)")
    assert dependent == plain("void f<true>(std::conditional<(bool)1, A, B (*)(int)>::type)") == "void f<1>"


def test_instructions_come_from_the_disassembly(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """As cuobjdump prints them."""
    listing = """
        /*0040*/              @!P0 BRA 0x4af0 ;        /* 0x1 */
        /*9c30*/                   UBLKCP.S.G [UR10], [UR6], UR5 ;   /* 0x2 */
        /*2980*/                   LDS.64 R56, [R0+UR21+0x30000] ;   /* 0x3 */
    """

    class Done:
        stdout = listing

    monkeypatch.setattr(racecheck_reports, "tool", lambda: "cuobjdump")
    monkeypatch.setattr(racecheck_reports.subprocess, "run", lambda *_, **__: Done())
    found = racecheck_reports.opcodes_of(tmp_path)("_Z4ring")  # type: ignore[arg-type]
    assert found == {0x40: "BRA", 0x9C30: "UBLKCP.S.G", 0x2980: "LDS.64"}
