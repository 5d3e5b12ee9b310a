"""The pages of docs/semantics give every registered op's schema, and every § that is cited exists."""

import re
from pathlib import Path

import pytest
import torch

from htree_ops.info import op_names
from tests.support.pages import ROOT, op_signatures
from tests.support.pages import SEMANTICS as PAGES
from tests.test_registration import SCHEMAS

#: Numbers of the sections by page; a chapter counts as present where one of its sections is.
SECTIONS = {
    name: {
        number
        for section in re.findall(r"^## (\d(?:\.\d+)?) ", text, re.M)
        for number in (section, section[0])
    }
    for name, text in PAGES.items()
}
#: "§1.6", "§1.5-§1.8", "§4.4 to §4.6": the first number and, of a range, the last one.
CITED = re.compile(r"§(\d(?:\.\d+)?)(?:(?: to |-|–)§?(\d\.\d+))?")
#: The same behind the name of its page; a comment or a docstring may break the line between them.
CITED_OF_PAGE = re.compile(rf"docs/semantics/(\w+)\.md[\s/#]*((?:{CITED.pattern}(?:,\s*[/#]*\s*| and )?)+)")


def cited(text: str) -> set[str]:
    return {number for match in CITED.finditer(text) for number in match.groups() if number}


def files_with(text: str) -> list[Path]:
    """Files of the checkout that contain ``text``; the folders of a source distribution where git is absent."""
    folders = ["csrc", "htree_ops", "tests", "benchmarks", "examples", "docs"]
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    suffixes = {".py", ".cpp", ".cu", ".cuh", ".h", ".md"}
    paths = [path for path in [*ROOT.glob("*.md"), *paths] if path.suffix in suffixes]
    return [path for path in paths if path.is_file() and text in path.read_text()]


def test_every_registered_op_is_described():
    text = "\n".join(PAGES.values())
    described = set(re.findall(r"`(\w+(?:\.\w+)?)[`(]", text))
    assert set(op_names()) - described == set(), "registered, but on no page of docs/semantics"


def test_every_signature_is_that_of_the_op():
    signatures = op_signatures()
    assert len(signatures) > 40
    for name, signature in signatures:
        assert name in op_names(), "described, but not registered"
        if "…" not in signature:  # "…the same arguments…"
            op, _, overload = name.partition(".")
            registered = getattr(getattr(torch.ops.htree, op), overload or "default")._schema
            assert torch._C.parse_schema(f"htree::{signature}") == registered


def test_every_op_has_one_written_schema():
    """On a page, or in the table of tests/test_registration.py, which runs without pages."""
    on_pages = {name for name, signature in op_signatures() if "…" not in signature}
    assert on_pages | SCHEMAS.keys() == set(op_names())
    assert not on_pages & SCHEMAS.keys()


def test_every_section_that_is_cited_exists():
    everywhere = set().union(*SECTIONS.values())
    files = files_with("§")
    assert len(files) > 100
    for path in files:
        text = path.read_text()
        assert cited(text) <= everywhere, path
        for page, sections, *_ in CITED_OF_PAGE.findall(text):
            assert cited(sections) <= SECTIONS[page], f"{path}: docs/semantics/{page}.md"


@pytest.mark.parametrize(("name", "text"), PAGES.items(), ids=list(PAGES))
def test_the_links_of_a_page_lead_to_pages(name, text):
    for target in re.findall(r"\]\((\w+)\.md\)", text):
        assert target in PAGES
    assert name == "README" or f"({name}.md)" in PAGES["README"]


def test_a_citation_is_found_across_lines():
    text = "// of docs/semantics/fp8.md\n// §3.3, §3.5. And 9."
    ((page, sections, *_),) = CITED_OF_PAGE.findall(text)
    assert page == "fp8"
    assert cited(sections) == {"3.3", "3.5"}
    assert cited("§1.5-§1.8, §4.4 to §4.6 and §2") == {"1.5", "1.8", "4.4", "4.6", "2"}
