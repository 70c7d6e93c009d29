"""The documents as a site: `make docs`. Pages stay as the forge shows them; what only the site has is added here."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

_PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(_PROJECT))  # for the docstrings of ratchet.py

project = "Ratchet"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "infra/**.md"]
exclude_patterns = [".*", "build", "runs", "flows", "storage", "tasks", "tests", "trainer_core"]  # folders not to walk
html_theme = "furo"
html_title = "Ratchet"
html_copy_source = False
html_show_search_summary = False  # a browser reads no other page of a site of files
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
myst_heading_anchors = 3
_FIRST = ("tutorial", "recipes", "prompts", "rewards", "environments", "view")
_LAST = ("infra/examples/*/README", "infra/bench/*", "CONTRIBUTING", "AGENTS", "CHANGELOG")
_CONTENTS = """
```{{toctree}}
:hidden:
:glob:
{pages}
```
"""
_REFERENCE = """
## Reference
```{{eval-rst}}
{members}
```
"""


def setup(app: Sphinx) -> None:
    """See Sphinx."""
    app.add_lexer("mermaid", TextLexer)  # drawn by the forge; here its text
    app.connect("source-read", _add)


def _add(_app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        known = [path.stem for path in sorted(Path(__file__).parent.glob("*.md"))]
        pages = [f"docs/{name}" for name in dict.fromkeys([*_FIRST, *known])]
        source[0] += _CONTENTS.format(pages="\n".join([*pages, *_LAST]))
    if page == "docs/python":
        source[0] += _REFERENCE.format(members="\n".join(_own()))


def _own() -> Iterator[str]:
    """Directives for what ratchet.py defines itself; `automodule` would import all that it imports on its first use."""
    for one in ast.parse((_PROJECT / "ratchet.py").read_text()).body:
        if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name != "main" and not one.name.startswith("_"):
            kind = "class" if isinstance(one, ast.ClassDef) else "function"
            yield f".. auto{kind}:: ratchet.{one.name}\n" + ("   :members:\n" if kind == "class" else "")
