"""A weight update reaches all engines or none: each failure of it, the weights that the engines serve afterwards,
and its repair by a repetition."""

import threading
from types import SimpleNamespace

import pytest

from flows.iteration import begin
from storage.backends.root import open_root
from storage.errors import SyncMismatch, WorkerLost
from storage.kill_points import Point
from tasks.config.stored import record_config
from tasks.engine.protocol import BASE, EngineIdentity, Sampling
from tasks.stages import transaction
from tasks.stages.served_weights import ensure_served
from tasks.stages.transaction import deliver
from tests.small.adapters import AdaptedTrainer, LiveEngine
from tests.small.config import small_config
from tests.small.here import WorkersHere, context_here
from tests.small.models import made
from tests.small.workers import LAYERS, SmallEngine, SmallTrainer, plan_of
from trainer_core.weights.channel import fail
from trainer_core.weights.plan import text_digest

HOW = Sampling(max_tokens=4, stop_token_ids=(1,))
UNUSABLE = EngineIdentity(weight_version=None, weights_digest=None)


class Engine(SmallEngine):
    """An engine that can be given a fault."""

    fault = ""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = threading.Event()

    def survey_model(self):
        if self.fault == "dies while it looks":
            raise WorkerLost("engine died")
        self.seen.set()

    def prepare_update(self, plan, digest, channel, first_receiver, in_flight):
        if self.fault == "refuses":
            raise SyncMismatch("engine refuses the plan: model.layers.1.weight has another shape")
        found = super().prepare_update(plan, digest, channel, first_receiver, in_flight)
        return "0" * 32 if self.fault == "reads another plan" else found

    def receive_update(self):
        if self.fault == "dies before the first byte":
            raise WorkerLost("engine died")
        arrived = super().receive_update()
        if self.fault == "drops the last tensor":
            return arrived.model_copy(update={"digests": dict(list(arrived.digests.items())[:-1])})
        if self.fault == "makes up a tensor":
            return arrived.model_copy(update={"digests": {**arrived.digests, "model.norm.weight": "0" * 32}})
        if self.fault == "finds fewer":
            return arrived.model_copy(update={"landed": 3})
        if self.fault == "makes other FP8 numbers":
            return arrived.model_copy(update={"quantized": "0" * 32})
        return arrived

    def _loaded(self, name, octets):
        if self.fault == "flips a bit" and name == LAYERS[2]:
            octets = octets.copy()
            octets[7] ^= 1
        if name == LAYERS[1] and self.fault == "skips a layer":
            raise SyncMismatch(f"{name} was not loaded")
        if name == LAYERS[1] and self.fault == "dies in the middle":
            raise WorkerLost("engine died")
        if self.fault == "loads two layers into each other's place" and name in LAYERS[2:]:
            name = LAYERS[5 - LAYERS.index(name)]
        super()._loaded(name, octets)

    def commit_update(self, version, digest):
        if self.fault == "dies at the commit":
            raise WorkerLost("engine died")
        super().commit_update(version, digest)
        if self.fault == "keeps the old version":
            self._version = 0
        return self.identity()


class Rank(SmallTrainer):
    """A rank that can be given a fault."""

    fault = ""

    def stopped(self, error):
        """Note the failure of a transfer."""

    def plan_weights(self, version, arena_bytes, form="whole"):
        planned = super().plan_weights(version, arena_bytes, form)
        if self.fault == "plans otherwise":
            return type(planned)("1" * 32, planned.plan, planned.exchanges)
        if self.fault == "plans another version":
            plan = plan_of(version + 1, 2)
            return type(planned)(text_digest(plan.model_dump_json()), None if self._rank else plan.model_dump_json(), 1)
        return planned

    def send_weights(self, digest, channel, stored=None):
        if self.fault == "dies":
            raise WorkerLost("rank died")
        try:
            sent = super().send_weights(digest, channel, stored)
        except SyncMismatch as error:
            self.stopped(error)
            raise
        if self.fault == "sends twice":
            return type(sent)({**sent.digests, LAYERS[0]: "0" * 32}, sent.seconds)
        return sent

    def _packed(self, name, octets):
        if name == LAYERS[3] and self.fault == "cannot convert":
            raise SyncMismatch(f"{name} changed after it was planned")
        return super()._packed(name, octets)


@pytest.fixture
def run(tmp_path, request):
    """A run of two engines that serve version 0, and a trainer that holds other weights now."""
    more, engine_kind, rank_kind = getattr(request, "param", ([], Engine, Rank))
    config = small_config(["engine.count=2", *more])
    root = open_root(str(tmp_path / "root"))
    record_config(root, "small", config)
    made = []
    workers = WorkersHere(
        config, engine=lambda directory: made.append(engine_kind(directory)) or made[-1], trainer=rank_kind
    )
    with context_here(root, config, tmp_path / "scratch", workers=workers) as context:
        position = begin(context)
        context.outbox.settle()
        for rank in workers.ranks:
            rank.adopt(None)
            rank.arrays["weights"] = rank.arrays["weights"] + 1
        handles = dict(enumerate(workers.engines("")))
        before = made[0].identity()
        workers.calls.clear()
        group = workers.trainers("", workers._trained_under)

        def sync(under=context, version=1, **more):
            return deliver(under, handles, group, version, **more)

        yield SimpleNamespace(
            context=context, position=position, engines=made, ranks=workers.ranks, calls=workers.calls, before=before,
            sync=sync,
        )  # fmt: skip


def serving(run, reason=""):
    """Identity that each engine reports, outside an update; one without usable weights does not sample and says
    why."""
    for engine in run.engines:
        if engine.identity() == UNUSABLE:
            with pytest.raises(SyncMismatch, match=f"cannot be used: .*{reason}"):
                engine.generate([[5]], [0], HOW)
        else:
            engine.generate([[5]], [0], HOW)
        with pytest.raises(SyncMismatch, match="no weight update was prepared"):
            engine.receive_update()
    return [engine.identity() for engine in run.engines]


def test_all_engines_serve_what_the_trainer_holds(run):
    seen = []

    def noted(point):
        seen.append((point, [engine.identity().weight_version for engine in run.engines]))

    delivery = run.sync(noted=noted)
    committed = EngineIdentity(weight_version=1, weights_digest=delivery.weights_digest)
    assert serving(run) == [committed] * 2
    assert all((engine.weights == run.ranks[0].arrays["weights"]).all() for engine in run.engines)
    assert seen == [(Point.SENT, [None, None]), (Point.SERVED, [1, None]), (Point.SERVED, [1, 1])]
    assert delivery.digests == run.engines[0].held()
    metrics = delivery.metrics()
    assert (metrics["tensors"], metrics["landed"], metrics["metadata_exchanges"]) == (4, 4, 1)
    assert metrics["bytes"] == run.engines[0].weights.nbytes
    steps = ("plan_s", "prepare_s", "send_s", "verify_s", "commit_s", "pause_s", "send_convert_s", "receive_load_s")
    assert set(steps) <= metrics.keys()


@pytest.mark.parametrize(
    "run", [(["train.lora.rank=4", "engine.adapter=live"], LiveEngine, AdaptedTrainer)], indirect=True
)
def test_a_live_adapter_is_sent_alone_to_engines_that_have_its_base(run, tmp_path):
    """All engines have got the base with version 0; later one is new, and then the trainer has another base."""

    def sent(version):
        run.calls.clear()
        delivery = run.sync(version=version)
        base = delivery.digests[BASE]
        assert {engine.base for engine in run.engines} == {base}
        steps = [run.calls.count(name) for name in ("plan_weights", "receive_update")]
        return base, steps, "base_bytes" in delivery.metrics()

    base = run.engines[0].base
    assert sent(1) == (base, [1, 2], False)
    run.engines[1].base = None
    assert sent(2) == (base, [3, 3], True)
    other = made(tmp_path / "other", 9)
    for rank in run.ranks:
        rank._model_dir = str(other)
    found = sent(3)
    assert found == (found[0], [3, 4], True)
    assert found[0] != base


OLD = "the old weights"
BOTH_OLD, BOTH_UNUSABLE = (OLD, OLD), (None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "fault", "message", "after"),
    [
        ("engine", "refuses", "model.layers.1.weight has another shape", BOTH_OLD),
        ("engine", "reads another plan", "engine 1 has computed 00000000", BOTH_OLD),
        ("engine", "flips a bit", r"engine 1 has received model.layers.2.weight with digest \w{32}, but \w{32}",
         BOTH_UNUSABLE),
        ("engine", "loads two layers into each other's place",
         r"1 has received model.layers.2.weight .*1 more: model.layers.3.weight", BOTH_UNUSABLE),
        ("engine", "drops the last tensor", "model.layers.3.weight not received by engine 1", BOTH_UNUSABLE),
        ("engine", "makes up a tensor", "model.norm.weight received by engine 1, though not sent", BOTH_UNUSABLE),
        ("engine", "finds fewer", "engine 1 has found 3 tensors again", BOTH_UNUSABLE),
        ("engine", "makes other FP8 numbers", "engines have made different FP8 numbers", BOTH_UNUSABLE),
        ("engine", "skips a layer", "model.layers.1.weight was not loaded", BOTH_UNUSABLE),
        ("rank", "plans otherwise", "trainer rank 1 has planned the weight update 1111", BOTH_OLD),
        ("rank", "plans another version", "trainer rank 1 has planned", BOTH_OLD),
        ("both ranks", "plans another version", "but made .* to version 2", BOTH_OLD),
        ("rank", "sends twice", "model.layers.0.weight were sent by trainer rank 1 and by another", BOTH_UNUSABLE),
        ("rank", "cannot convert", "model.layers.3.weight changed after it was planned", BOTH_UNUSABLE),
    ],
)  # fmt: skip
def test_nobody_commits_what_is_not_proven(who, fault, message, after, run):
    faulty = {"engine": run.engines[1:], "rank": run.ranks[1:], "both ranks": run.ranks}[who]
    for one in faulty:
        one.fault = fault
    with pytest.raises(SyncMismatch, match=message):
        run.sync()
    assert "commit_update" not in run.calls
    assert serving(run, message) == [run.before if one is OLD else UNUSABLE for one in after]
    for one in faulty:
        one.fault = ""
    delivery = run.sync()
    assert [held.weights_digest for held in serving(run)] == [delivery.weights_digest] * 2


@pytest.mark.parametrize(
    ("who", "fault", "after"),
    [
        ("engine", "dies while it looks", 0),
        ("engine", "dies before the first byte", None),
        ("engine", "dies in the middle", None),
        ("rank", "dies", None),
        ("engine", "dies at the commit", 1),
    ],
)
def test_a_death_is_told_as_such_and_the_others_stop_with_it(who, fault, after, run):
    """The loss of a process explains the errors of those that waited for it, so the stage is tried again."""
    faulty = {"engine": run.engines[1], "rank": run.ranks[1]}[who]
    faulty.fault = fault
    with pytest.raises(WorkerLost, match="died"):
        run.sync()
    assert run.engines[0].identity().weight_version == after
    faulty.fault = ""
    run.sync()
    assert [held.weight_version for held in serving(run)] == [1, 1]


def test_engines_look_at_their_models_while_ranks_plan(run, monkeypatch):
    plan_weights, seen = SmallTrainer.plan_weights, []

    def planned_last(rank, *given):
        seen.append([engine.seen.wait(10) for engine in run.engines])
        return plan_weights(rank, *given)

    monkeypatch.setattr(SmallTrainer, "plan_weights", planned_last)
    for engine in run.engines:
        engine.seen.clear()
    run.sync()
    assert seen == [[True, True]] * len(run.ranks)


@pytest.mark.parametrize(("in_flight", "meanwhile"), [("abort", True), ("keep", True), ("wait", False)])
def test_ranks_begin_to_send_while_engines_prepare(run, monkeypatch, in_flight, meanwhile):
    """Ranks do not begin while engines finish requests in flight, which may take longer than ranks wait."""
    config = run.context.config
    config = config.model_copy(update={"sync": config.sync.model_copy(update={"in_flight": in_flight})})
    context = type(run.context)(**{**vars(run.context), "config": config})
    begun, seen = threading.Event(), []
    send_weights, prepare_update = SmallTrainer.send_weights, SmallEngine.prepare_update

    def sending(rank, *given):
        begun.set()
        return send_weights(rank, *given)

    def preparing(engine, *given):
        seen.append(begun.wait(10 if meanwhile else 0.2))
        return prepare_update(engine, *given)

    monkeypatch.setattr(SmallTrainer, "send_weights", sending)
    monkeypatch.setattr(SmallEngine, "prepare_update", preparing)
    run.sync(context)
    assert seen == [meanwhile, meanwhile]


def test_ranks_that_have_begun_to_send_stop_when_an_engine_refuses(run):
    """The calls to ranks end before the update does: the next call to them is not kept waiting."""
    run.engines[1].fault = "refuses"
    stopped = []
    for rank in run.ranks:
        rank.stopped = stopped.append
    with pytest.raises(SyncMismatch, match="refuses the plan"):
        run.sync()
    assert len(stopped) == 1  # ranks are called one after another, and the first of them has failed
    assert "refuses the plan" in str(stopped[0])
    assert "receive_update" not in run.calls


def test_an_engine_that_serves_something_else_than_was_committed_is_noticed(run):
    run.engines[1].fault = "keeps the old version"
    with pytest.raises(SyncMismatch, match=r"engine 1 serves weight_version=0 .* after weight_version=1"):
        run.sync()


def test_weights_that_are_not_those_expected_are_not_served(run):
    with pytest.raises(SyncMismatch, match="but feed were served when it was committed"):
        run.sync(expected="feed")
    assert serving(run) == [UNUSABLE] * 2


def test_an_engine_that_must_not_be_used_gets_the_recorded_weights_before_it_samples(run):
    run.engines[1].fault = "flips a bit"
    with pytest.raises(SyncMismatch):
        run.sync()
    run.engines[1].fault = ""
    ensure_served(run.context, run.position.prepared, run.position.served)
    assert serving(run) == [run.before] * 2


def test_an_interruption_makes_everybody_stop(run, monkeypatch):
    class Interrupted(BaseException):
        pass

    def interrupted(*_given):
        raise Interrupted

    def marked(folder, reason):
        reasons.append(reason)
        fail(folder, reason)

    reasons = []
    monkeypatch.setattr(transaction, "fail", marked)
    monkeypatch.setattr(run.ranks[1], "_packed", interrupted)
    with pytest.raises(Interrupted):
        run.sync()
    assert set(reasons) >= {"the weight sync was interrupted"}
    assert "" not in reasons
    assert serving(run) == [UNUSABLE] * 2


@pytest.mark.parametrize("call_s", [1.0, 100.0, 36000.0])
def test_an_update_gives_up_before_the_call_that_carries_it(run, tmp_path, call_s):
    workers = run.context.config.workers.model_copy(update={"call_deadline_s": call_s})
    config = run.context.config.model_copy(update={"workers": workers})
    context = type(run.context)(**{**vars(run.context), "config": config})
    assert transaction._channel(context, "memory", tmp_path, 2).deadline_s < call_s
