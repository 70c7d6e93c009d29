"""The run on eight cards: its parts, layouts and lines, without a rank."""

import json

import pytest

from infra.bench import eight_cards
from infra.bench.eight_cards import FULL, LAYOUTS, SMALL, Order, Report, apart, chosen, fitting, loop_settings, tables
from infra.bench.experts import ExpertModel, write_random
from infra.bench.loop import default_tables
from storage.errors import StageFailed
from tasks.config.document import completed
from tasks.config.environment import Settings
from trainer_core.config import check_layout


def order(tmp_path, cards, small=False):
    return Order(cards, small, Report(tmp_path / "figures.jsonl"))


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("cards", "run"), [(8, 8), (4, 5), (1, 1)])
def test_layouts_that_do_not_fit_are_named_and_the_others_run(tmp_path, cards, run):
    names = [name for name, _ in chosen(order(tmp_path, cards), "layouts-qwen3-moe")]
    assert len(names) == run
    left = [one["case"] for one in (lines(tmp_path) if run < len(LAYOUTS) else [])]
    assert sorted([*names, *left]) == sorted(LAYOUTS)


@pytest.mark.parametrize("small", [False, True])
def test_every_layout_divides_its_models(small):
    size = SMALL if small else FULL
    for layout in (eight_cards.SMALL_LAYOUTS if small else LAYOUTS).values():
        check_layout(layout, size.experts.config())
        check_layout(layout, size.latent.config())


@pytest.mark.parametrize("cards", [2, 4, 8])
@pytest.mark.parametrize("own", [False, True])
def test_the_loop_takes_all_cards_or_halves_of_them(tmp_path, monkeypatch, cards, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cards))))
    assert len(Settings.from_environment().gpus) == cards
    config = completed(tables(FULL, "model", 4112), loop_settings(order(tmp_path, cards), own), None, "the test")
    used = config.train.parallel.world_size, config.engine.count * config.engine.tensor
    assert used == ((cards // 2, cards // 2) if own else (cards, cards))
    check_layout(config.train.parallel, FULL.experts.config())
    assert config.rollout.ahead == own


def test_a_part_that_is_done_is_not_run_again_and_one_that_fails_says_why(tmp_path, monkeypatch):
    def fails(_):
        raise StageFailed("no room")

    for part, outcome in (("colocated", lambda _: True), ("ahead", fails), ("killed-rank", lambda _: False)):
        monkeypatch.setitem(eight_cards.PARTS, part, outcome)
    codes = [eight_cards.run_part(order(tmp_path, 2), part) for part in ("colocated", "ahead", "killed-rank")]
    assert codes == [0, 1, 1]
    assert lines(tmp_path) == [{"part": "colocated", "done": True}, {"part": "ahead", "failed": "no room"}]
    assert [order(tmp_path, 2).report.done(part) for part in ("colocated", "ahead", "killed-rank")] == [
        True,
        False,
        False,
    ]


def test_figures_of_before_are_known(tmp_path):
    order(tmp_path, 2).report.figures("ahead", "cards", {"loss": 0.5, "grad_norm": 2.0})
    known = order(tmp_path, 2).report.of("ahead", "cards")
    assert known == {"loss": 0.5, "grad_norm": 2.0}
    assert apart({"loss": 0.55, "grad_norm": 2.0}, known) == {
        "loss, relative to one card": pytest.approx(0.1),
        "grad_norm, relative to one card": 0,
    }


def test_layers_are_as_many_as_fit_on_the_disk():
    assert fitting(FULL, 10**13) == 8
    needed = 32 * (5 * FULL.experts.layer_parameters + 2 * FULL.experts.vocabulary * FULL.experts.hidden) / 0.9
    assert (fitting(FULL, int(needed * 1.01)), fitting(FULL, int(needed * 0.99))) == (5, 4)


@pytest.mark.slow
def test_the_shapes_are_those_of_qwen3_30b_a3b():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    spec = SMALL.experts
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig.from_dict(spec.config()))
    there = {name: tuple(one.shape) for name, one in model.named_parameters() if "experts.gate_up" not in name}
    ours = dict(spec.shapes())
    assert {name: shape for name, shape in there.items() if ".mlp.experts." not in name} == {
        name: shape for name, shape in ours.items() if ".mlp.experts." not in name
    }
    assert FULL.experts.model_copy(update={"layers": 48}).layer_parameters * 48 == pytest.approx(29.9e9, rel=0.01)


def test_random_weights_are_files_that_an_index_names(tmp_path, monkeypatch):
    monkeypatch.setattr("infra.bench.experts._SHARD", 40_000)
    spec = ExpertModel(
        layers=2, hidden=32, expert=16, experts=4, chosen=2, heads=2, kv_heads=1, head_dim=16, vocabulary=64
    )
    write_random(tmp_path, spec)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == dict(spec.shapes()).keys()
    assert len(set(index.values())) > 1
    assert all((tmp_path / name).exists() for name in index.values())


def test_tables_keep_the_settings_of_the_loop():
    made = tables(SMALL, "model", 72)
    assert made["train"]["policy"] == default_tables("tiny")["train"]["policy"]
    assert made["rollout"]["stop_tokens"][-1] == SMALL.experts.vocabulary - 1
