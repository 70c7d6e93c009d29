"""Every command of every page is executed: here on a stored run, or by the test that `ELSEWHERE` names."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import MissingArgumentError

from flows.cli.app import app, execute
from storage.backends.root import Root, open_root
from storage.manifest import need
from tasks.config.code_version import PROJECT_ROOT
from tasks.forking import begin_retraining, retrain_config
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import driver
from tests.test_documents import DOCUMENTS, SKILLS

DOCS = PROJECT_ROOT / "docs"
PAGES = [*DOCUMENTS, *SKILLS, *sorted((PROJECT_ROOT / "infra").glob("*/**/*.md"))]
PAGES.remove(DOCS / "tutorial.md")  # has a test of its own
FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"(?:\w+=\S+ )*((?:ratchet|python|pip|make|ray|prefect) .*)")
INLINE = re.compile(r"`((?:ratchet|python -m) [^`]+)`")
TUTORIAL, PROVEN = "tests/integration/test_tutorial.py", "tests/integration/test_faults.py"
REAL = "tests/test_commands.py"  # the last test of this file, over the real stack
ELSEWHERE = {
    "pip": "tests/test_packaging.py",
    "prefect deployment run": "tests/flows/deployments/test_flows.py",
    "python -m hatchling": "tests/test_packaging.py",
    "python -m infra.bench.eight_cards": "tests/infra/bench/test_eight_cards.py",
    "python -m infra.fuzz": "tests/test_fuzz.py",
    "python -m infra.fuzz_stack": PROVEN,
    "python -m infra.bench.scale": "docs/cluster.md",
    "python -m infra.bench.search": "docs/view.md",
    "python -m infra.bench.counting": "tests/infra/bench/test_counting.py",
    "python -m infra.examples.tools.make": "tests/test_examples.py",
    "python -m infra.mutants": "tests/test_mutants.py",
    "python -m ratchet": "tests/test_ratchet.py",
    "python -m storage.backends.conformance": "tests/storage/backends/test_conformance.py",
    "python -m tests.integration.golden.make": "tests/integration/test_golden.py",
    "python -m zipfile": "tests/test_packaging.py",
    "python infra/examples/chat/make.py": "tests/test_recipes.py",
    "ray start": "tests/integration/test_several_hosts.py",
    "ratchet bench": "tests/infra/bench/test_commands.py",
    "ratchet check-sync": REAL,
    "ratchet check infra/examples/chat/": TUTORIAL,
    "ratchet check infra/examples/tools/": TUTORIAL,
    "ratchet check tools/": TUTORIAL,
    "ratchet demo": TUTORIAL,
    "ratchet doctor": REAL,
    "ratchet down": "tests/flows/site/test_site.py",
    "ratchet evaluate": REAL,
    "ratchet export": REAL,
    "ratchet export --adapter": TUTORIAL,
    "ratchet export RUN@ITERATION --critic": "tests/tasks/export/test_critic.py",
    **dict.fromkeys(("ratchet export again", "ratchet export chat-lora", "ratchet export teacher"), TUTORIAL),
    "ratchet export warm": TUTORIAL,
    "ratchet prove-resume": PROVEN,
    "ratchet register": "tests/flows/site/test_entries.py",
    "ratchet rerun": REAL,
    "ratchet retrain NEW --from RUN@N --select RUN --set train.policy.distill": "tests/flows/test_distilling.py",
    "ratchet reward my-run@40 --last 20": "tests/tasks/rewards/test_judge.py",
    "ratchet rm": "tests/flows/cli/test_upkeep.py",
    "ratchet run": TUTORIAL,
    "ratchet up": "tests/flows/site/test_site.py",
    "ratchet view": "tests/flows/viewer/test_viewer.py",
}
"""Commands that need the real stack, a site, a card, a judge or a person, by their first words, and the test that
executes them or, for a site and several hosts, what they do; of a bench the page with its figures. A setting of
`ratchet run` is checked here as `ratchet check` does."""


def plain(line: str) -> list[str]:
    """The words of a command: of alternatives the first, without what is optional or goes on."""
    line = re.sub(r" (\|\| true|> \S+)$", "", line.replace("\n", " "))
    return shlex.split(re.sub(r"\\?\|[^\s\]]+|\[[^]]*\]+|,? \.\.\.$", "", line), comments=True)


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Each command of a page; True if it has a line of its own, False if a sentence has it."""
    text = page.read_text().replace("\\\n", " ")
    for language, block in FENCED.findall(text):
        lines = block.splitlines() if language in ("", "bash", "console") else ()
        yield from ((found[1], True) for line in lines if (found := PROGRAM.fullmatch(line.lstrip("$ "))))
    yield from ((inline, False) for inline in INLINE.findall(FENCED.sub("", text)))


def elsewhere(line: str) -> str | None:
    """The entry of `ELSEWHERE` for a command."""
    return max((begin for begin in ELSEWHERE if f"{line} ".startswith(begin)), key=len, default=None)


def is_whole(words: list[str], own_line: bool) -> bool:
    """True if the command line reads the command; one that a sentence only names may lack arguments."""
    if words == ["verify"]:  # of a run, or --all
        return False
    try:
        app.parse_args(words, exit_on_error=False, print_error=False)
    except MissingArgumentError:
        assert not own_line, words
        return False
    return True


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a configuration, a reward and samples under the names that pages give them."""
    folder = tmp_path_factory.mktemp("stored")
    driver(open_root(str(folder / "runs")), small_config(), folder / "scratch", run="my-run").drive()
    shutil.rmtree(folder / "scratch")
    demo = (PROJECT_ROOT / "infra" / "examples" / "demo.toml").read_text()
    long = re.sub(r"^(max_(?:tokens|length|model_len|positions)) = \d+", r"\1 = 2048", demo, flags=re.MULTILINE)
    (folder / "my.toml").write_text(long.replace("max_tokens = 2048", "max_tokens = 1024"))
    (reward,) = re.findall(r"```python\n(# my_reward.py\n.*?)```", (DOCS / "rewards.md").read_text(), re.DOTALL)
    (folder / "my_reward.py").write_text(reward)
    sample = {"input_ids": [1, 2], "response_tokens": [3, 4], "logprobs": [-1.0, -2.0], "temperature": 1.0}
    rows = ({**sample, "prompt_tokens": [1, 2], "score": score} for score in (0.0, 1.0))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "infra").symlink_to(PROJECT_ROOT / "infra")
    return folder


NAMES = {
    **dict.fromkeys(["RUN", "base", "chat", "demo", "tools"], "my-run"), **dict.fromkeys("KMNS", "1"),
    **dict.fromkeys("PR", "0"),
    "CONFIG.toml": "my.toml", "FILE": "my.toml", "FILE:NAME": "my_reward.py:score", "FILE...": "samples.jsonl",
    "FOLDER": "model", "FOLDER-OR-URL": "model", "LAYOUT": "own",
    "NAME": "new", "PROMPT/SAMPLE": "5+2/0", "TEXT": "why",
}  # fmt: skip
"""Words of pages, and those that name the same in the stored run."""


def as_stored(word: str, folder: Path) -> str:
    """A word of a page as the stored run needs it: its names, its two iterations, its root."""
    name, *place = word.split("@", 1)
    new = f"new-{len(list((folder / 'runs').iterdir()))}"
    word = "@".join([new if name == "NEW" else NAMES.get(name, name), *place])
    word = re.sub(r"@(\d+|N|ITERATION)(?=$|:)", "@1", word).replace(":///folder", f"://{folder}")
    return re.sub(r"@\d+-(\d+)?$", "@1-2", word).replace(":STAGE", ":reward").replace(">= 30", ">= 0")


def retrained(words: list[str], root: Root, folder: Path) -> None:
    """`ratchet retrain` over small workers."""
    _, given, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    selection = {key: value for key, value in vars(given.arguments["selection"]).items() if value not in (None, ())}
    config = retrain_config(root, words[1], selection, None, given.arguments.get("settings", ()))
    begin_retraining(root, words[1], config)
    driver(root, config, folder / f"scratch-{words[1]}", run=words[1]).drive()
    assert need(root, words[1], 1, Stage.TRAIN)


def carried_out(words: list[str], folder: Path) -> int:
    if words[0] == "make":
        return subprocess.run(["make", "-n", *words[1:]], cwd=PROJECT_ROOT, capture_output=True, check=False).returncode
    assert words[0] == "ratchet", "name the test that executes it in ELSEWHERE"
    if words[1] == "retrain":
        retrained(words[1:], open_root("file://./runs"), folder)
        return 0
    return execute(words[1:])


def without(words: list[str], option: str) -> list[str]:
    """A command without an option and its value."""
    place = words.index(option) if option in words else len(words)
    return [*words[:place], *words[place + 2 :]]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: "-".join(path.relative_to(PROJECT_ROOT).parts[-2:]))
def test_every_command_of_a_page_works(page: Path, stored: Path, tmp_path: Path, monkeypatch, capfd):
    folder = shutil.copytree(stored, tmp_path / "page", symlinks=True)
    monkeypatch.chdir(folder)
    for line, own_line in commands(page):
        program, name, *others = plain(line)
        words = [program, name, *(as_stored(word, folder) for word in others)]
        if words[0] == "ratchet" and not is_whole(words[1:], own_line):
            continue
        if words[:3] == ["ratchet", "run", "my.toml"] and "device.kind=cuda" not in words:
            words = without(["ratchet", "check", *words[2:]], "--run")
        elif elsewhere(line) is not None:
            continue
        if any(word.startswith("s3:") for word in words):
            words = without(words, "--root")
        assert carried_out(words, folder) == 0, (line, capfd.readouterr().err)
    if page in SKILLS:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            exec(code, {})


def test_each_command_that_is_executed_elsewhere_is_on_a_page_and_its_test_exists():
    used = {elsewhere(line) for page in PAGES for line, _ in commands(page)}
    assert used - {None} == set(ELSEWHERE)
    assert [path for path in ELSEWHERE.values() if not (PROJECT_ROOT / path).exists()] == []


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_commands_over_the_real_stack_work_on_a_stored_run(tmp_path: Path):
    with tarfile.open(PROJECT_ROOT / "tests" / "integration" / "golden" / "run.tar.gz") as archive:
        archive.extractall(tmp_path / "runs", filter="data")
    found = [line for page in PAGES for line, _ in commands(page) if ELSEWHERE.get(elsewhere(line) or "") == REAL]
    words = {tuple(as_stored(word, tmp_path) for word in plain(line)[1:]) for line in found}
    for command in sorted(one for one in words if is_whole(list(one), own_line=False)):
        named = [re.sub("^my-run", "golden", word).replace("@best", "@best.reward") for word in command]
        if named[0] == "export":
            named[named.index("--to") + 1] += f"-{named[1]}"  # two pages may name one folder
        done = subprocess.run(
            [sys.executable, "-m", "flows", *named], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (named, done.stderr)
