"""The README and the pages of docs, the blocks of code in them, and the signatures that docs/semantics gives."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The README and every page of the site; semantics is a specification, with sentences of its own.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.*"))]
    if path.suffix in (".md", ".rst") and "semantics" not in path.parts
}
#: The pages of the specification by their names.
SEMANTICS = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "semantics").glob("*.md"))}
SIGNATURE = re.compile(r"`(\w+(?:\.\w+)?\((?:Tensor|SymInt)[^`]*\)\s+->\s+[^`]+)`")


def op_signatures() -> list[tuple[str, str]]:
    """Name and signature of the ops of the specification; some leave arguments out, with "…"."""
    found = [" ".join(x.split()) for text in SEMANTICS.values() for x in SIGNATURE.findall(text)]
    return [(x.partition("(")[0], x) for x in found]


def blocks_of(name: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    if name.endswith(".rst"):
        found = re.findall(rf"^\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)", PAGES[name], re.M)
        return [textwrap.dedent(block) for block in found]
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[name], re.M | re.S)
