"""Checks of `rollout.updates` before a run starts."""

import pytest

from storage.backends.root import open_root
from storage.errors import InputError
from tasks.checks import check_config
from tests.tasks.test_checks import config_with

IN_FLIGHT = ["train.policy.old_policy=behaviour", "rollout.updates=in-flight", "rollout.pause_tokens=4"]


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (["rollout.updates=between", "rollout.pause_tokens=256", "rollout.max_staleness=0"], "leaves out every sample"),
        (["rollout.max_staleness=0"], "leaves out every sample"),
        (["rollout.max_staleness=1"], "by which no response may go on"),
        (["rollout.ahead=0"], "under which weights never change beside a rollout"),
        (["rollout.pause_tokens=16"], "as no response is longer than rollout.max_tokens = 16"),
        (["rollout.open_prompts=32"], "which leaves none open: raise it above rollout.prompts = 32"),
        (
            ["rollout.most_prompts=64", "train.policy.leave_out_equal_groups=true"],
            "the number of groups of a rollout is fixed",
        ),
        (["train.policy={loss={type='dpo'}}"], "cannot correct for"),
    ],
    ids=str,
)
def test_updates_in_flight_need_something_that_goes_on_and_a_bound_that_leaves_something(tmp_path, settings, fact):
    store, given = open_root(str(tmp_path / "runs")), [*IN_FLIGHT, "rollout.ahead=1"]
    with pytest.raises(InputError, match=fact):
        check_config(config_with(tmp_path, *given, *settings), store)
    check_config(config_with(tmp_path, *given, "rollout.max_staleness=2", "rollout.open_prompts=33"), store)
