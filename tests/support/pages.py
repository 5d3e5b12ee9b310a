"""The README and the pages of docs, and the blocks of code in them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

__all__ = ["PAGES", "ROOT", "blocks_of"]

ROOT = Path(__file__).resolve().parents[2]
#: The README and every page of the site; semantics is a specification, with sentences of its own.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.*"))]
    if path.suffix in (".md", ".rst") and "semantics" not in path.parts
}


def blocks_of(name: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    if name.endswith(".rst"):
        found = re.findall(rf"^\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)", PAGES[name], re.M)
        return [textwrap.dedent(block) for block in found]
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[name], re.M | re.S)
