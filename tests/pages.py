"""The Python examples of a page, as a test runs them: under the names of a stored run."""

import re
from collections.abc import Mapping

from tasks.config.code_version import PROJECT_ROOT


def examples(page: str, heading: str, names: Mapping[str, str]) -> str:
    """The code of all blocks below a heading, with some texts replaced."""
    text = (PROJECT_ROOT / "docs" / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    assert code, f"docs/{page} has no example below {heading!r}"
    for old, new in names.items():
        code = code.replace(f'"{old}', f'"{new}')
    return code
