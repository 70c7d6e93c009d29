import pickle
import random
import zlib

import pytest

from storage.errors import SyncMismatch
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import ParallelConfig, RankSpec
from trainer_core.weights.plan import ALIGNMENT, Named, Place, Row, Table, decode, encode, plan_of, text_digest

ARENA = 1 << 14


def named(name, *shape, dtype="bfloat16"):
    return Named(name=name, dtype=dtype, shape=shape)


def row(name, *tensors, expert=False):
    return Row(name=name, expert=expert, tensors=tensors)


def layer_rows(layer):
    start, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    return [
        row(f"{start}self_attention.linear_qkv.weight", *(named(f"{target}{part}", 16, 32) for part in "qkv")),
        row(f"{start}mlp.linear_fc1.weight", named(f"{target}gate", 24, 32), named(f"{target}up", 24, 32)),
    ]


def expert_rows(layer, expert):
    name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
    return [row(name, named(f"model.layers.{layer}.experts.{expert}.down", 8, 8), expert=True)]


EMBEDDING = row("embedding.word_embeddings.weight", named("embed", 40, 32))
OUTPUT = row("output_layer.weight", named("lm_head", 40, 32))
STAGES = (
    [EMBEDDING, *layer_rows(0), *layer_rows(1)],
    [*layer_rows(2), *layer_rows(10), OUTPUT],
)


def place(rank, **given):
    standing = dict.fromkeys(("stage", "tensor", "replica", "expert", "expert_tensor", "expert_replica"), 0)
    asked = {"version": 3, "arena_bytes": ARENA, "config": "c", "problem": None}
    return Place.model_validate({"rank": rank, **standing, **asked, **given})


def table(rank, rows, **given):
    return Table(place=place(rank, **given), rows=tuple(rows))


def tables():
    """Two stages of two replicas each."""
    return [
        table(2 * stage + replica, STAGES[stage], stage=stage, replica=replica)
        for stage in (0, 1)
        for replica in (0, 1)
    ]


def test_each_tensor_is_sent_once_by_the_first_replica_of_its_stage():
    plan = plan_of(tables())
    senders = {tensor.name: plan.buckets[tensor.bucket].sender for tensor in plan.tensors}
    assert senders == {tensor.name: 2 * stage for stage in (0, 1) for one in STAGES[stage] for tensor in one.tensors}
    assert (plan.version, plan.config) == (3, "c")


def test_layers_come_in_the_order_of_their_numbers_and_what_is_fused_stands_together():
    plan = plan_of(tables())
    sent = {
        sender: [tensor.name for tensor in plan.tensors if plan.buckets[tensor.bucket].sender == sender]
        for sender in (0, 2)
    }
    names = sent[0] + sent[2]
    assert names[0] == "embed"
    assert names[-1] == "lm_head"
    layers = [int(name.split(".")[2]) for name in names[1:-1]]
    assert layers == sorted(layers)
    assert names.index("model.layers.2.k") == names.index("model.layers.2.q") + 1 == names.index("model.layers.2.v") - 1
    assert names.index("model.layers.2.up") == names.index("model.layers.2.gate") + 1


@pytest.mark.parametrize("arena", [1 << 11, 1 << 13, ARENA, 1 << 20])
def test_buckets_hold_no_more_than_an_arena_and_no_overlap(arena):
    given = [one.model_copy(update={"place": one.place.model_copy(update={"arena_bytes": arena})}) for one in tables()]
    plan = plan_of(given)
    ends = dict.fromkeys(range(len(plan.buckets)), 0)
    for tensor in plan.tensors:
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.offset >= ends[tensor.bucket]
        ends[tensor.bucket] = tensor.offset + tensor.nbytes
    for bucket in plan.buckets:
        alone = sum(tensor.bucket == bucket.number for tensor in plan.tensors) == 1
        assert ends[bucket.number] <= bucket.nbytes
        assert bucket.nbytes <= arena or alone
    assert plan.arena_bytes == max(bucket.nbytes for bucket in plan.buckets)


def test_senders_take_turns_as_long_as_each_has_something_to_send():
    small = {"arena_bytes": 1 << 11}
    given = [one.model_copy(update={"place": one.place.model_copy(update=small)}) for one in tables()]
    plan = plan_of(given, [named("late", 4, 4)])
    *senders, last = [bucket.sender for bucket in plan.buckets]
    most = 2 * min(senders.count(0), senders.count(2))
    assert most > 4
    assert senders[:most] == [0, 2] * (most // 2)
    assert len(set(senders[most:])) < 2
    assert last == 0


def test_a_layer_that_fits_is_not_divided():
    plan = plan_of(tables())
    for layer in (0, 1, 2, 10):
        assert len({tensor.bucket for tensor in plan.tensors if f"layers.{layer}." in tensor.name}) == 1


def test_every_rank_makes_the_same_plan_whatever_the_order_of_its_modules():
    shuffled = [list(stage) for stage in STAGES]
    for rows in shuffled:
        random.Random(0).shuffle(rows)
    given = [one.model_copy(update={"rows": tuple(shuffled[one.place.stage])}) for one in tables()]
    assert text_digest(plan_of(given).model_dump_json()) == text_digest(plan_of(tables()).model_dump_json())


def test_of_two_stages_that_hold_the_same_the_lower_sends():
    doubled = [*tables()[:2], *(table(rank, [*STAGES[1], EMBEDDING], stage=1, replica=rank - 2) for rank in (2, 3))]
    assert plan_of(doubled).tensors == plan_of(tables()).tensors


def test_each_rank_sends_its_own_experts():
    ranks = [
        table(rank, [EMBEDDING, *expert_rows(0, 2 * rank + 1), *expert_rows(0, 2 * rank)], expert=rank, replica=rank)
        for rank in (0, 1)
    ]
    plan = plan_of(ranks)
    senders = {tensor.name: plan.buckets[tensor.bucket].sender for tensor in plan.tensors}
    assert senders == {"embed": 0, **{f"model.layers.0.experts.{one}.down": one // 2 for one in range(4)}}
    for sender in (0, 1):
        numbers = [
            tensor.name for tensor in plan.tensors if senders[tensor.name] == sender and "experts" in tensor.name
        ]
        assert numbers == sorted(numbers)


def without(rows, name):
    return [one for one in rows if one.name != name]


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
WIDER = row(QKV, named("model.layers.0.q", 16, 33))
SINGLE = row(QKV, *(named(f"model.layers.0.{part}", 16, 32, dtype="float32") for part in "qkv"))


@pytest.mark.parametrize(
    "rows",
    [
        without(STAGES[0], QKV),
        [*STAGES[0], OUTPUT],
        [*without(STAGES[0], QKV), WIDER],
        [*without(STAGES[0], QKV), SINGLE],
    ],
    ids=["lacks-one", "has-one-more", "other-shape", "other-type"],
)
def test_replicas_that_differ_stop_the_update_with_the_name(rows):
    given = tables()
    given[1] = table(1, rows, replica=1)
    with pytest.raises(SyncMismatch, match=r"ranks 0 and 1 .*(linear_qkv|output_layer)"):
        plan_of(given)


def test_stages_that_hold_the_same_name_otherwise_stop_the_update():
    other = row(EMBEDDING.name, named("embed", 41, 32))
    given = [table(0, STAGES[0]), table(1, [*STAGES[1], other], stage=1)]
    with pytest.raises(SyncMismatch, match=r"pipeline stages .*word_embeddings"):
        plan_of(given)


def test_two_weights_of_one_name_stop_the_update():
    given = [table(0, [EMBEDDING, row("output_layer.weight", named("embed", 40, 32))])]
    with pytest.raises(SyncMismatch, match="embed is the Hugging Face name of two weights"):
        plan_of(given)


@pytest.mark.parametrize("other", [{"version": 4}, {"arena_bytes": 1}, {"config": "d"}])
def test_ranks_that_were_asked_for_different_updates_stop(other):
    given = [table(0, STAGES[0]), table(1, STAGES[0], replica=1, **other)]
    with pytest.raises(SyncMismatch, match="different updates"):
        plan_of(given)


def test_the_problem_of_one_rank_stops_all():
    given = [table(0, STAGES[0]), table(1, [], stage=1, problem="x is not in memory")]
    with pytest.raises(SyncMismatch, match="rank 1: x is not in memory"):
        plan_of(given)


def test_what_only_the_bridge_exports_has_buckets_of_its_own():
    plan = plan_of(tables(), [named("late", 4, 4), named("later", 4, 4)])
    late = [tensor for tensor in plan.tensors if tensor.name.startswith("late")]
    assert [tensor.name for tensor in plan.tensors[-2:]] == ["late", "later"]
    assert {plan.buckets[tensor.bucket].sender for tensor in late} == {0}
    assert not {tensor.bucket for tensor in late} & {tensor.bucket for tensor in plan.tensors[:-2]}


def test_a_table_arrives_as_it_was_and_replicas_are_read_once():
    sent = [encode(one.place, one.rows) for one in tables()]
    assert len(zlib.decompress(sent[0].partition(b"\n")[2])) > 500
    found = decode(sent)
    assert found == tables()
    assert found[0].rows is found[1].rows


def exchange_bytes(rank, world_size, store, sizes):
    from trainer_core.model.mesh import join, leave
    from trainer_core.platform.platform import prepare
    from trainer_core.weights.exchange import exchange

    platform = prepare("cpu")
    mesh = join(RankSpec(rank=rank, world_size=world_size, store=store), ParallelConfig(data=world_size), platform)
    found = [exchange(random.Random(rank).randbytes(size + rank), mesh) for size in sizes]
    leave()
    return found


def test_tables_of_any_size_are_exchanged():
    block = 1 << 18
    sizes = [0, 5, block - 9, block - 8, block, 3 * block]
    found = run_ranks(2, exchange_bytes, sizes)
    assert found[0] == found[1]
    for size, (payloads, rounds) in zip(sizes, found[0], strict=True):
        assert payloads == [random.Random(rank).randbytes(size + rank) for rank in (0, 1)]
        assert rounds == -(-(8 + size + 1) // block)


def test_a_plan_that_was_sent_to_another_process_is_the_same_plan():
    plan = plan_of(tables(), [named("late", 4, 4, dtype="float32")])
    assert pickle.loads(pickle.dumps(plan)) == plan
