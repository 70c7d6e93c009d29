"""Room for a trainer rank and engines on one card, with rollouts beside a training."""

import ctypes

import pytest

from storage.errors import InputError
from tasks.checks import check_content
from tasks.workers import peers
from tasks.workers.placement import Parameters, Placement, check_room
from tests.small.config import small_config

GIB = 1 << 30
CARD = 80 * GIB
BF16 = ["train.precision=bf16", "engine.precision=bf16", "train.policy.kl_coefficient=0", "train.parallel.pipeline=1"]
BOTH = Placement(device="cuda", ranks=("0",), engines=(("0",),))
APART = Placement(device="cuda", ranks=("0",), engines=(("1",),))
TWICE = Placement(device="cuda", ranks=("0",), engines=(("1",), ("0",), ("0",)))
WEIGHTS = GIB  # a rank holds 18 bytes of each in bf16, an engine 2
MODEL = Parameters(WEIGHTS)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        (["engine.kv_cache_mib=61440"], BOTH),
        (["engine.kv_cache_mib=79000"], APART),
        (["engine.gpu_memory_utilization=0.77"], BOTH),
        (["engine.kv_cache_mib=29696"], TWICE),
    ],
)
def test_what_fits_is_let_pass(settings, place):
    check_room(small_config([*BF16, *settings, "rollout.ahead=1"]), MODEL, place, (), CARD)


@pytest.mark.parametrize(
    ("settings", "place", "said"),
    [
        (
            ["engine.kv_cache_mib=61441"],
            BOTH,
            ["18.0 GiB", "62.0 GiB", "engine.kv_cache_mib = 61441", "card 0 of 80.0"],
        ),
        (["engine.gpu_memory_utilization=0.78"], BOTH, ["62.4 GiB", "engine.gpu_memory_utilization = 0.78"]),
        (["engine.kv_cache_mib=29697"], TWICE, ["62.0 GiB", 'engine.cards = "own"', "rollout.ahead to 0"]),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers_and_the_repair(settings, place, said):
    with pytest.raises(InputError) as refused:
        check_room(small_config([*BF16, *settings, "rollout.ahead=1"]), MODEL, place, (), CARD)
    assert [one for one in ["rollout.ahead = 1", *said] if one not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("settings", "teacher", "taken"),
    [(["train.policy.advantage.type=gae", "train.critic.learning_rate=1e-4"], 0, 36), ([], 3 * GIB, 24)],
    ids=["critic", "teacher"],
)
def test_a_critic_and_a_teacher_take_room(settings, teacher, taken):
    config = small_config([*BF16, *settings, "rollout.ahead=1", f"engine.kv_cache_mib={(78 - taken) << 10}"])
    held = MODEL._replace(teacher=teacher)
    check_room(config, held, BOTH, (), CARD)
    smaller = CARD - (CARD >> 4) * (config.train.critic is not None)
    check_room(config, held._replace(critic=WEIGHTS // 2), BOTH, (), smaller)
    with pytest.raises(InputError, match=f"{taken}.0 GiB for a rank"):
        check_room(config, held, BOTH, (), CARD - 1)


JUDGE = ["reward.function=judge", "reward.arguments.rubric=short", "engines.judge.source=judge"]


@pytest.mark.parametrize(
    ("settings", "place", "judge", "said"),
    [
        (
            ["rollout.ahead=1", "engine.kv_cache_mib=37888"],
            BOTH,
            "0",
            ["18.0 GiB", "39.0 GiB", "24.0 GiB", "ahead to 0"],
        ),
        (["engine.gpu_memory_utilization=0.71"], APART, "1", ["engine.gpu_memory_utilization = 0.71", "more cards"]),
        (
            ["engine.gpu_memory_utilization=0.5", "engines.judge.kv_cache_mib=40960"],
            BOTH,
            "0",
            ["engines.judge.kv_cache_mib = 40960", "44.0 GiB for the engine that judges with"],
        ),
        (["rollout.ahead=1", "engine.cards=own", "engines.judge.kv_cache_mib=59393"], APART, "0", ["a rank", "judges"]),
    ],
)
def test_the_engine_that_judges_takes_room(settings, place, judge, said):
    held = MODEL._replace(judge=WEIGHTS)
    config = small_config([*BF16, *JUDGE, *settings])
    with pytest.raises(InputError) as refused:
        check_room(config, held, place, (judge,), CARD)
    assert [one for one in said if one not in str(refused.value)] == []
    check_room(config, held, place, ("2",), CARD)
    if not config.rollout.ahead:  # while it scores they sleep
        check_room(small_config([*BF16, *JUDGE, *settings, "engine.sleep=true"]), held, place, (judge,), CARD)


def test_shares_of_experts_and_of_the_optimizer_count_once():
    settings = [*BF16, "train.parallel.data=2", "train.parallel.expert=2", "engine.kv_cache_mib=73728"]
    place = Placement(device="cuda", ranks=("0", "1"), engines=(("0",),))
    check_room(small_config([*settings, "rollout.ahead=1"]), MODEL, place, (), CARD)  # 6 + 2 + 72


class Driver:
    """Two cards of 1 and 2 MiB."""

    def cuInit(self, flags):  # noqa: N802
        return 0

    def cuDeviceGet(self, found, place):  # noqa: N802
        found._obj.value = place
        return 0

    def cuDeviceTotalMem_v2(self, found, device):  # noqa: N802
        found._obj.value = (device.value + 1) << 20
        return 0 if device.value < 2 else 101


@pytest.mark.parametrize(("cards", "expected"), [(1, 1 << 20), (2, 1 << 20), (3, None)])
def test_the_smallest_card_counts(cards, expected):
    assert peers.card_bytes(cards, Driver()) == expected


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_is_refused_before_its_start(monkeypatch, ahead):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    peers.card_bytes.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    config = small_config(
        [*BF16, "train.policy.old_policy=behaviour", "engine.kv_cache_mib=1", f"rollout.ahead={ahead}"]
    )
    try:
        if ahead:
            with pytest.raises(InputError, match="cannot hold at once"):
                check_content(config)
        else:
            check_content(config)
    finally:
        peers.card_bytes.cache_clear()
