"""Each recipe of docs/recipes.md is checked as `ratchet check` does, and its loop runs over workers of a few lines."""

import shutil
import sys
from pathlib import Path

import pytest

from infra.examples.chat import make as chat
from infra.examples.tools import make as tools
from storage.backends.root import open_root
from storage.manifest import need
from tasks.checks import check_config
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.document import load_config
from tasks.config.model import GeneratedModel, ModelSection
from tasks.data.models import fill_model_directory
from tasks.stages.names import Stage
from tests.small.driving import RUN, driver

EXAMPLES = PROJECT_ROOT / "infra" / "examples"
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
