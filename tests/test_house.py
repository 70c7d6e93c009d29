"""The house rules that a machine can check."""

import ast
import functools
import importlib.metadata
import importlib.util
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer_core.collector import paused

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "trainer_core", "storage")
SOURCES = [PROJECT / "ratchet.py"] + [
    path for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))
]
OTHERS = [path for folder in ("tests", "infra") for path in sorted((PROJECT / folder).rglob("*.py"))]
FUNCTION_KINDS = (ast.FunctionDef, ast.AsyncFunctionDef)
LONG = {
    "flows/deployments/retrain.py:retrain": "one parameter for each field of the form",
    "trainer_core/weights/digest_kernel.py:_add_words": "a Triton kernel",
}
"""Functions of more than 40 lines of code, with the reason."""
CLAUSE_WORDS = {"What", "Whether", "How", "Where", "Which", "Who", "Whoever", "So"}
AT_A_BEGINNING = re.compile(rf"[\"'](?:\s|\\n)*(?:{'|'.join(CLAUSE_WORDS)})\b")
"""The beginning of a string that may be such a docstring; files without one need no syntax."""


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax, read once for all rules."""
    with paused():
        return tuple(ast.walk(ast.parse(path.read_text())))


def bare_strings(path: Path) -> Iterator[tuple[range, str]]:
    """Lines and text of each docstring, those under fields and constants too."""
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1), node.value.value


def function_sizes() -> dict[tuple[str, int], int]:
    """Lines of each function that hold code: no docstrings, comments or blank lines."""
    sizes = {}
    for path in SOURCES:
        lines = path.read_text().splitlines()
        docs = {n for where, _ in bare_strings(path) for n in where}
        code = {n for n, line in enumerate(lines, 1) if n not in docs and (text := line.strip()) and text[0] != "#"}
        for node in nodes_of(path):
            if isinstance(node, FUNCTION_KINDS):
                body = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                sizes[f"{path.relative_to(PROJECT)}:{node.name}", node.lineno] = len(code.intersection(body))
    return sizes


def test_functions_are_short():
    sizes = function_sizes()
    assert statistics.median(sizes.values()) <= 6
    assert statistics.quantiles(sizes.values(), n=10)[-1] <= 16
    assert {name for (name, _), size in sizes.items() if size > 40} == set(LONG)
    assert max(sizes.values()) <= 60


def test_files_are_short():
    sizes = {str(path.relative_to(PROJECT)): len(path.read_text().splitlines()) for path in (*SOURCES, *OTHERS)}
    assert not {name: size for name, size in sizes.items() if size > 400}


def test_docstrings_begin_with_the_noun_or_the_verb():
    found = [
        f"{path.relative_to(PROJECT)}:{where.start}: {text.strip().splitlines()[0]}"
        for path in (*SOURCES, *OTHERS)
        if AT_A_BEGINNING.search(path.read_text())
        for where, text in bare_strings(path)
        if re.split(r"\W", text.strip(), maxsplit=1)[0] in CLAUSE_WORDS
    ]
    assert not found, "\n".join(["begin these docstrings with the noun or the verb:", *found])


def broken_rules(path: Path) -> Iterator[str]:
    """The words of a file that it must not have."""
    text = path.read_text()
    calls = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    yield from names & {"print", "hasattr", "breakpoint"}
    if path != PROJECT / "tasks" / "config" / "environment.py":
        yield from (word for word in ("os.environ", "getenv") if word in text)


def test_each_file_keeps_the_rules():
    assert [f"{path.relative_to(PROJECT)}: {word}" for path in SOURCES for word in broken_rules(path)] == []


def test_our_packages_are_the_ones_imported():
    # plain top-level names: another distribution that ships one of them would shadow ours
    distributions = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin == str(PROJECT / package / "__init__.py")
        assert set(distributions.get(package, ["ratchet"])) == {"ratchet"}


LIGHT = (  # imported in this order by one process: none imports what a later one must not
    ("tasks.rewards.worker", {"numpy", "pyarrow", "pydantic"}),  # it forks, which their threads forbid
    ("tasks.environments.host", {"numpy", "pyarrow", "pydantic"}),  # the same; and each run starts some
    ("trainer_core.config", {"torch", "numpy", "megatron"}),
    ("ratchet", {"torch", "ray", "vllm", "megatron", "prefect", "transformers", "pyarrow", "pydantic_settings"}),
    ("storage.parts", {"torch", "ray", "vllm", "prefect"}),
    ("tasks.config.run", {"torch", "ray", "vllm", "prefect", "transformers"}),
    ("flows.viewer.server", {"torch", "ray", "vllm", "prefect", "transformers", "fastapi"}),
    ("flows.views.status", {"torch", "ray", "vllm", "prefect"}),
    ("flows.cli.reward", {"torch", "ray", "vllm", "prefect", "transformers"}),
)


def test_modules_are_light():
    code = "import importlib, sys\nfor name, heavy in " + repr(LIGHT) + ":\n"
    code += "    importlib.import_module(name)\n    print(name, *sorted(heavy & set(sys.modules)))\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert found.stdout.split("\n") == [*(name for name, _ in LIGHT), ""]
