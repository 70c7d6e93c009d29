"""Faults that must stop an update, on every rank and with the name of the tensor; the next update works."""

from pathlib import Path

import pytest

from storage.errors import InputError, RatchetError, SyncMismatch
from tests.trainer_core.models import make_family, random_examples, random_sequences
from tests.trainer_core.ranks import run_ranks, run_trainers
from tests.trainer_core.weights.syncing import oracle, sync
from trainer_core.config import ExpertsConfig, OptimizerConfig, ParallelConfig, RankSpec, TrainerConfig
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan

FAMILY = "deepseek-v3"
BIAS, NORM = "router.expert_bias", "final_layernorm.weight"


def configuration(precision="bf16", **parallel):
    return TrainerConfig(
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        experts=ExpertsConfig(bias_update_rate=0.01),
        micro_batch_size=8,
        max_length=64,
        precision=precision,
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("deepseek"))
    run_ranks(1, make_family, folder, FAMILY)
    return folder


def told(function, *args):
    """The error's type and text on this rank."""
    try:
        function(*args)
    except RatchetError as error:
        return type(error), str(error)
    return None, ""


def modules(trainer):
    return [module for chunk in trainer._model.modules for module in chunk.modules()]


def live(trainer, ending):
    """The last module of this rank with a tensor of that name, and the tensor's name there."""
    chunk = trainer._model.modules[-1]
    named = [name for name, _ in (*chunk.named_parameters(), *chunk.named_buffers()) if name.endswith(ending)]
    path, _, attribute = named[-1].rpartition(".")
    return chunk.get_submodule(path), attribute


def moved_away(trainer):
    """Leave a tensor as Megatron's own offloading does."""
    module, attribute = live(trainer, NORM)
    tensor = getattr(module, attribute)
    kept = tensor.data
    tensor.data = kept.new_empty(0)

    def undo():
        tensor.data = kept

    return undo


def without_memory(trainer):
    """Leave a tensor as a memory pool does that has freed its memory."""
    module, attribute = live(trainer, NORM)
    tensor = getattr(module, attribute)
    kept = tensor.data
    tensor.data = kept.clone()
    tensor.data.untyped_storage().resize_(0)

    def undo():
        tensor.data = kept

    return undo


def replaced(trainer):
    """Leave a buffer as `Module.to` does."""
    module, attribute = live(trainer, BIAS)
    module._buffers[attribute] = module._buffers[attribute].clone()
    return lambda: None


def other_type(trainer):
    module, attribute = live(trainer, NORM)
    tensor = getattr(module, attribute)
    kept = tensor.data
    tensor.data = kept.float()

    def undo():
        tensor.data = kept

    return undo


def one_more(trainer):
    import torch

    module, _ = live(trainer, NORM)
    module.register_buffer("unheard_of", torch.ones(1))
    return lambda: module._buffers.pop("unheard_of")


def spoiled(trainer, folder, number, change, when):
    """Update while the last rank's model is changed as `change` says, before or after the plan; then a sound one."""
    last = trainer._mesh.rank == trainer._mesh.parallel.world_size - 1
    undo = change(trainer) if last and when == "before" else None
    between = change if last and when == "after" else None
    undone = []

    def spoil(of):
        undone.append(between(of))

    found = told(lambda: sync(trainer, folder, number, between=None if between is None else spoil))
    for back in [undo, *undone]:
        if back is not None:
            back()
    after = sync(trainer, folder, number + 1)["received"]
    return found, after == oracle(trainer, f"{folder}/oracle-{number}")


CHANGES = {
    "moved-away-before": (moved_away, "before", NORM),
    "moved-away-after": (moved_away, "after", NORM),
    "without-memory-before": (without_memory, "before", NORM),
    "without-memory-after": (without_memory, "after", NORM),
    "replaced-after": (replaced, "after", BIAS),
    "one-more-before": (one_more, "before", "unheard_of"),
}


def all_changes(trainer, folder):
    trainer.import_model()
    return {
        name: spoiled(trainer, folder, 10 * number, change, when)
        for number, (name, (change, when, _)) in enumerate(CHANGES.items())
    }


@pytest.mark.slow
def test_a_model_that_is_not_whole_stops_all_ranks_with_the_name(model_dir, tmp_path):
    ranks = run_trainers(model_dir, configuration(pipeline=2), all_changes, str(tmp_path))
    for name, (_, _, tensor) in CHANGES.items():
        (first, sound), (last, _) = ranks[0][name], ranks[1][name]
        assert first[0] is last[0] is SyncMismatch, name
        assert tensor in last[1], name
        assert tensor in first[1] or "another trainer rank" in first[1], name
        assert sound, name


def one_replica_differs(trainer, folder):
    trainer.import_model()
    return spoiled(trainer, folder, 1, other_type, "before")


@pytest.mark.slow
def test_a_replica_with_another_type_stops_the_update_before_a_byte_moves(model_dir, tmp_path):
    ranks = run_trainers(model_dir, configuration(data=2), one_replica_differs, str(tmp_path))
    for found, _ in ranks:
        assert found[0] is SyncMismatch
        assert "ranks 0 and 1" in found[1]
        assert NORM in found[1]
    assert ranks[0][1]


def without_a_plan(trainer, folder):
    channel = Channel(transport="memory", folder=folder, receivers=1, deadline_s=5)
    trainer.import_model()
    found = {"none": told(trainer.send_weights, "0" * 32, channel)}
    planned = trainer.plan_weights(1, 1 << 20)
    found["other"] = told(trainer.send_weights, "0" * 32, channel)
    found["used"] = told(trainer.send_weights, planned.digest, channel)
    planned = trainer.plan_weights(1, 1 << 20)
    trainer.train_supervised(random_examples(), 1, 8)
    Path(folder, "new").mkdir()  # the previous folder says why the first sends failed
    elsewhere = channel.model_copy(update={"folder": f"{folder}/new"})
    found["trained"] = told(trainer.send_weights, planned.digest, elsewhere)
    return found


def test_nothing_is_sent_without_a_plan_of_the_weights_of_now(model_dir, tmp_path):
    for found in run_trainers(model_dir, configuration(), without_a_plan, str(tmp_path)):
        assert found["none"][0] is found["other"][0] is found["used"][0] is found["trained"][0] is SyncMismatch
        assert "no plan is held" in found["trained"][1]


def biases_cast(trainer, folder):
    trainer.import_model()
    for module in modules(trainer):
        if module._buffers.get("expert_bias") is not None:
            module.expert_bias.data = module.expert_bias.data.bfloat16()  # a wrapper of low precision leaves it so
    planned = trainer.plan_weights(1, 1 << 20)
    plan = WeightPlan.model_validate_json(planned.plan)
    return {tensor.dtype for tensor in plan.tensors if "e_score_correction_bias" in tensor.name}


def test_biases_of_routers_are_sent_in_the_type_in_which_they_are_used(model_dir, tmp_path):
    assert run_trainers(model_dir, configuration(), biases_cast, str(tmp_path)) == [{"float32"}]


def gives_up(trainer, folder):
    trainer.import_model()
    found = told(lambda: sync(trainer, folder, 1, spoil=lambda bucket, receiver: receiver.fail("the engine broke")))
    return found, sync(trainer, folder, 2)["received"], oracle(trainer, f"{folder}/oracle")


@pytest.mark.slow
def test_receivers_that_give_up_stop_the_senders_and_leave_their_groups_usable(model_dir, tmp_path):
    given = configuration("fp32", tensor=2, sequence=True, data=2, expert=2)
    ranks = run_trainers(model_dir, given, gives_up, str(tmp_path))
    assert {found[0] for found, _, _ in ranks} == {SyncMismatch, None}  # a rank that only gives shards has no failure
    assert all("the engine broke" in found[1] for found, _, _ in ranks if found[0] is not None)
    assert ranks[0][0][0] is SyncMismatch
    assert ranks[0][1] == ranks[0][2]


def send_stored(trainer, folder):
    trainer.import_model()
    trainer.save(f"{folder}/state")
    stored = oracle(trainer, f"{folder}/of-the-state")
    trainer.train_supervised(random_examples(), 1, 8)
    trainer.adopt("later")
    before = oracle(trainer, f"{folder}/before")
    asked = []

    def look(bucket, receiver):
        if bucket.sender == trainer._mesh.rank:  # a rank whose buckets have been read is done
            asked.append(trainer.identity())

    found = {
        "sent": sync(trainer, folder, 1, stored=f"{folder}/state", spoil=look)["received"] == stored != before,
        "meanwhile": set(asked),
        "back": oracle(trainer, f"{folder}/after") == before and trainer.identity() == "later",
    }
    fail = lambda bucket, receiver: receiver.fail("the engine broke")  # noqa: E731
    found["failed"] = told(lambda: sync(trainer, folder, 2, stored=f"{folder}/state", spoil=fail))
    found["back-again"] = oracle(trainer, f"{folder}/again") == before and trainer.identity() == "later"
    found["nowhere"] = told(lambda: sync(trainer, folder, 3, stored=f"{folder}/nowhere"))
    found["receivers"] = Path(folder, "update-3", "failed").exists()
    found["still"] = oracle(trainer, f"{folder}/still") == before and trainer.identity() == "later"
    return found


@pytest.mark.slow
def test_the_weights_of_a_stored_state_are_sent_and_the_live_ones_come_back(model_dir, tmp_path):
    ranks = run_trainers(model_dir, configuration(pipeline=2), send_stored, str(tmp_path))
    assert ranks[0]["sent"]
    assert ranks[0]["meanwhile"] == {None}
    for found in ranks:
        assert found["back"]
        assert found["failed"][0] is SyncMismatch
        assert found["back-again"]
        assert found["nowhere"][0] is not None
        assert found["receivers"]  # they were told, and need not wait for the deadline
        assert found["still"]


def send_stored_of_nothing(trainer, folder):
    before = trainer.identity()
    found = sync(trainer, folder, 9, stored=f"{folder}/state")["received"]
    return before, trainer.identity(), found


def save_and_export(trainer, folder):
    trainer.import_model()
    trainer.train_supervised(random_examples(), 1, 8)
    trainer.save(f"{folder}/state")
    return oracle(trainer, f"{folder}/exported")


@pytest.mark.slow
def test_a_trainer_that_holds_nothing_sends_a_stored_state_without_its_optimizer(model_dir, tmp_path):
    expected = run_trainers(model_dir, configuration(), save_and_export, str(tmp_path))[0]
    for path in (tmp_path / "state").glob("optimizer*"):
        path.unlink()
    before, after, found = run_trainers(model_dir, configuration(pipeline=2), send_stored_of_nothing, str(tmp_path))[0]
    assert before is after is None
    assert found == expected


def send_stored_of_other_precision(trainer, folder):
    return told(lambda: sync(trainer, folder, 9, stored=f"{folder}/state"))


@pytest.mark.slow
def test_a_stored_state_of_another_precision_is_refused(model_dir, tmp_path):
    run_trainers(model_dir, configuration(), save_and_export, str(tmp_path))
    found = run_trainers(model_dir, configuration("fp32"), send_stored_of_other_precision, str(tmp_path))[0]
    assert found[0] is InputError
    assert "bf16" in found[1]


def joined_again(trainer, folder, model_dir, config, rank_folder):
    from trainer_core.start import start_trainer

    trainer.import_model()
    first = sync(trainer, folder, 1)["received"]
    rank = trainer._mesh.rank
    trainer.close()
    again = start_trainer(model_dir, config, RankSpec(rank=rank, world_size=2, store=f"{rank_folder}/store-2"))
    again.import_model()
    found = first, sync(again, folder, 2)["received"]
    again.close()
    start_trainer(model_dir, config, RankSpec(rank=rank, world_size=2, store=f"{rank_folder}/store-3"))
    return found


@pytest.mark.slow
def test_groups_that_were_made_again_in_the_same_process(model_dir, tmp_path):
    given = configuration(pipeline=2)
    first, second = run_trainers(model_dir, given, joined_again, str(tmp_path), model_dir, given, str(tmp_path))[0]
    assert first == second


def export_with_kept_tasks(trainer, folder, kept):
    import torch

    from trainer_core.weights.digest import tensor_digest

    def exported(tasks):
        with torch.no_grad():
            found = trainer._model.bridge.export_hf_weights(
                list(trainer._model.chunks), cpu=False, show_progress=False, conversion_tasks=tasks
            )
            return {name: tensor_digest(tensor) for name, tensor in found}

    with trainer._model.weights("writable"):
        trainer._model.bridge.load_hf_weights(list(trainer._model.chunks))
    for module in modules(trainer):
        if "expert_bias" in module._buffers:
            module.expert_bias.data = module.expert_bias.data.bfloat16()  # the wrapper leaves it so
    tasks = trainer._model.bridge.get_conversion_tasks(list(trainer._model.chunks))
    exported(tasks)
    trainer.logprobs(random_sequences())  # Megatron restores the biases to float32
    return exported(tasks if kept else None), {name: one[0] for name, one in sync_all(trainer, folder).items()}


def sync_all(trainer, folder):
    return sync(trainer, folder, 1)["received"] or {}


@pytest.mark.slow
def test_why_nothing_is_kept_from_one_update_to_the_next(model_dir, tmp_path):
    given = configuration(pipeline=2)
    (tmp_path / "fresh").mkdir()
    (tmp_path / "kept").mkdir()
    fresh = run_trainers(model_dir, given, export_with_kept_tasks, str(tmp_path / "fresh"), False)[0]
    assert fresh[0] == fresh[1]
    # gloo sees that the sizes differ and ends the process; NCCL would deliver garbage
    with pytest.raises((AssertionError, EOFError)):
        run_trainers(model_dir, given, export_with_kept_tasks, str(tmp_path / "kept"), True)
