"""How Sphinx builds the pages: ``make docs``, with every warning an error.

The API pages import the package, so the library has to be built. Semantics, pages and docstrings are the only sources.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from htree_ops.version import __version__

HERE = Path(__file__).parent

project = "htree_ops"
author = "htree_ops developers"
project_copyright = f"{author}, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["images"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and dtypes, which say more than Tensor
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # several names in front of one text are no directives

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"htree_ops {release}"
html_theme_options = {
    "source_repository": "https://github.com/htree-ops/htree_ops",
    "source_branch": "HEAD",
    "source_directory": "docs/",
}
html_show_sphinx = False


def copy_pictures(app: Any, error: Exception | None) -> None:
    """Pictures with a light and a dark form stand in HTML, whose files Sphinx does not collect."""
    if error is None and app.builder.format == "html":
        shutil.copytree(
            HERE / "images",
            Path(app.outdir) / "images",
            ignore=shutil.ignore_patterns("*.py", "__pycache__"),
            dirs_exist_ok=True,
        )


def setup(app: Any) -> None:
    app.connect("build-finished", copy_pictures)
