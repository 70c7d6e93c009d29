"""Each recipe of docs/recipes.md is checked as `ratchet check` does, and its loop runs over workers of a few lines."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from flows.cli.app import app
from infra.examples.chat import make as chat
from infra.examples.tools import make as tools
from storage.backends.root import open_root
from storage.manifest import need
from tasks.checks import check_config
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.document import load_config
from tasks.config.model import GeneratedModel, ModelSection
from tasks.data.models import fill_model_directory
from tasks.retraining import begin_retraining, retrain_config
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import RUN, driver

EXAMPLES = PROJECT_ROOT / "infra" / "examples"
COMMANDS = re.findall(r"^(ratchet .*)$", (PROJECT_ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
SMALL = (
    "run.iterations=1", "rollout.prompts=2", "rollout.samples=2", "evaluate.prompts=2", "train.policy.mini_batches=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of each recipe."""
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        for name, maker in (("chat", chat), ("tools", tools)):
            patch.setattr(sys, "argv", ["make.py", str(folder / name)])
            maker.main()
    for file in folder.rglob("*.jsonl"):
        file.write_text("".join(file.open().readlines()[:32]))
    shutil.copytree(folder / "chat" / "model", folder / "chat" / "base")
    (folder / "distill").mkdir()
    shutil.copy(EXAMPLES / "distill.toml", folder / "distill")
    for seed, name in enumerate(("base", "expert")):
        (folder / "distill" / name).mkdir()
        sizes = GeneratedModel.model_validate({"layers": 2, "hidden": 16, "intermediate": 16, "heads": 2})
        fill_model_directory(folder / "distill" / name, ModelSection(generate=sizes), seed)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [("chat/lora", ["reward.processes=1"]), ("tools/tools", ["environment.processes=2"]), ("distill/distill", [])],
)
def test_a_recipe_passes_the_checks_and_its_loop_goes_round(made: Path, tmp_path: Path, name: str, more: list[str]):
    root, config = open_root(str(tmp_path / "runs")), load_config(str(made / f"{name}.toml"), [*SMALL, *more])
    check_config(config, root)
    driver(root, config, tmp_path / "scratch").drive()
    assert need(root, RUN, 1, Stage.WEIGHT_SYNC)


def test_the_nightly_retraining_selects_and_trains(tmp_path: Path):
    root = open_root(str(tmp_path / "runs"))
    driver(root, small_config(), tmp_path / "scratch").drive()
    (line,) = [one for one in COMMANDS if one.startswith("ratchet retrain")]
    words = [{"demo@5": f"{RUN}@1", "demo@6-": f"{RUN}@2-"}.get(word, word) for word in shlex.split(line)[1:]]
    _, given, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    selection, settings = given.arguments["selection"], given.arguments["settings"]
    keys = {"start": selection.start, "select": list(selection.select), "where": selection.where}
    config = retrain_config(root, "again", keys, None, settings)
    begin_retraining(root, "again", config)
    driver(root, config, tmp_path / "again", run="again").drive()
    assert need(root, "again", 1, Stage.TRAIN)
