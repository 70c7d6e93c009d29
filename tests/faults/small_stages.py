"""Stages that work as those in `tasks` do, with next to nothing to compute: the same inputs, parts, waits and order."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from storage.backends.root import Root
from storage.digest import value_digest
from storage.layout import STATE
from storage.manifest import Fence, Manifest, Part, need
from storage.parts import PartWriter, materialize, read_part, read_table
from storage.schema import EVALUATION, PROMPTS, REWARD, ROLLOUT, fingerprint
from storage.unfinished import find_piece, keep_piece
from storage.write_behind import Outbox
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, StageResult, run_stage
from tests.faults.journal import Journal
from tests.faults.processes import Fleet, Group
from trainer_core.batches.reading import read_samples

RUN, CONFIG = "run", "config"
PROMPT_COUNT, HELD_OUT = 16, 2
PIECES, GROUPS_PER_PIECE, SAMPLES = 3, 2, 2
MODEL = ("config.json", "model.bin", "tokenizer.json")


@dataclass(frozen=True)
class SmallContext:
    """As `tasks.stages.context.RunContext`."""

    root: Root
    fleet: Fleet
    scratch: Path
    fence: Fence
    outbox: Outbox
    journal: Journal
    other_lesson: int | None = None
    """Iteration whose training shall come out otherwise."""

    def stage(
        self, iteration: int, stage: Stage, inputs: Mapping[str, Manifest], body: Callable[[PartWriter], StageOutput]
    ) -> StageResult:
        writer = PartWriter(self.root, RUN, iteration, stage)

        def noted() -> StageOutput:
            self.journal.note("body", stage, iteration)
            return body(writer)

        return run_stage(writer, CONFIG, inputs, noted, self.fence, self.outbox)


def prepare(context: SmallContext) -> Manifest:
    def body(writer: PartWriter) -> StageOutput:
        folder = Path(tempfile.mkdtemp(dir=context.scratch))
        for name in MODEL:
            (folder / name).write_bytes(name.encode() * 1000)
        model = writer.write_files(folder, MODEL)
        table = writer.write_table("prompts.arrow", _prompts(), PROMPTS)
        return StageOutput(parts=(*model, table), schema_fingerprint=fingerprint(PROMPTS))

    return context.stage(0, Stage.PREPARE, {}, body).manifest


def warm_up(context: SmallContext, prepared: Manifest) -> Manifest:
    def body(writer: PartWriter) -> StageOutput:
        group = context.fleet.trainers()
        group.call("import_model", read_part(context.root, prepared.part("model.bin")))
        group.call("train", value_digest("warm-up"))
        return _saved(context, group, writer, 0)

    return _adopted(context, context.stage(0, Stage.TRAIN, {"prepare": prepared}, body))


def rollout(context: SmallContext, iteration: int, prepared: Manifest, synced: Manifest) -> Manifest:
    def body(writer: PartWriter) -> StageOutput:
        engine = _ensure_served(context, synced)
        cursor = int(str(synced.facts["cursor"]))
        table = read_table(context.root, prepared, PROMPTS)
        parts = tuple(_piece(context, writer, engine, synced, table, cursor, index) for index in range(PIECES))
        context.outbox.settle()  # samples count only once the state that made them is durable
        facts = {"cursor": cursor + PIECES * GROUPS_PER_PIECE, "weight_version": synced.facts["weight_version"]}
        return StageOutput(parts=parts, schema_fingerprint=fingerprint(ROLLOUT), facts=facts)

    return context.stage(iteration, Stage.ROLLOUT, {"prepare": prepared, "weights": synced}, body).manifest


def reward(context: SmallContext, iteration: int, prepared: Manifest, rollouts: Manifest) -> Manifest:
    def body(writer: PartWriter) -> StageOutput:
        table = read_table(context.root, rollouts, ROLLOUT)
        columns = {
            "prompt_id": table["prompt_id"].combine_chunks(),
            "sample_id": table["sample_id"].combine_chunks(),
            "reward": [sum(tokens) % 7 for tokens in table["response_tokens"].to_pylist()],
            "status": ["ok"] * table.num_rows,
            "detail": [""] * table.num_rows,
        }
        part = writer.write_table("rewards.arrow", _table(columns, REWARD), REWARD)
        return StageOutput(parts=(part,), schema_fingerprint=fingerprint(REWARD))

    return context.stage(iteration, Stage.REWARD, {"prepare": prepared, "rollout": rollouts}, body).manifest


def train(
    context: SmallContext, iteration: int, prepared: Manifest, rollouts: Manifest, rewards: Manifest, state: Manifest
) -> Manifest:
    inputs = {"prepare": prepared, "rollout": rollouts, "reward": rewards, "state": state}

    def body(writer: PartWriter) -> StageOutput:
        group = _ensure_state(context, state)
        samples = read_samples(context.root, rollouts, rewards)
        other = context.other_lesson == iteration
        group.call("train", value_digest([samples.tokens.tolist(), samples.rewards.tolist(), other]))
        return _saved(context, group, writer, int(str(rollouts.facts["cursor"])))

    return _adopted(context, context.stage(iteration, Stage.TRAIN, inputs, body))


def weight_sync(context: SmallContext, iteration: int, prepared: Manifest, trained: Manifest) -> Manifest:
    def body(writer: PartWriter) -> StageOutput:
        digest = _deliver(context, _ensure_state(context, trained), iteration)
        facts = {"weight_version": iteration, "weights_digest": digest, "cursor": trained.facts["cursor"]}
        return StageOutput(facts=facts)

    return context.stage(iteration, Stage.WEIGHT_SYNC, {"prepare": prepared, "train": trained}, body).manifest


def evaluate(context: SmallContext, iteration: int, prepared: Manifest, synced: Manifest) -> Manifest:
    def body(writer: PartWriter) -> StageOutput:
        responses = _ensure_served(context, synced).call("generate", list(range(HELD_OUT)))[0]
        columns = {
            "prompt_id": [f"p{row:02d}" for row in range(HELD_OUT)],
            "response_tokens": [tokens for tokens, _ in responses],
            "reward": [1.0] * HELD_OUT,
            "status": ["ok"] * HELD_OUT,
        }
        part = writer.write_table("answers.arrow", _table(columns, EVALUATION), EVALUATION)
        return StageOutput(parts=(part,), schema_fingerprint=fingerprint(EVALUATION))

    return context.stage(iteration, Stage.EVALUATE, {"prepare": prepared, "weights": synced}, body).manifest


def _ensure_state(context: SmallContext, state: Manifest) -> Group:
    """As `tasks.stages.held_state.ensure_state`."""
    group = context.fleet.trainers()
    if set(group.call("identity")) != {state.digest}:
        context.outbox.settle()  # ranks that died may have left a state that is not stored yet
        folder = context.scratch / "load"
        group.call("load", str(materialize(context.root, state, folder, STATE)))
        shutil.rmtree(folder)
        group.call("adopt", state.digest)
    return group


def _adopted(context: SmallContext, result: StageResult) -> Manifest:
    if not result.reused:
        context.fleet.trainers().call("adopt", result.manifest.digest)
    return result.manifest


def _saved(context: SmallContext, group: Group, writer: PartWriter, cursor: int) -> StageOutput:
    """As `tasks.stages.held_state.save_state`: the files are described now and stored behind the stages that follow."""
    folder = Path(tempfile.mkdtemp(dir=context.scratch))
    names = sorted(name for owned in group.call("save", str(folder)) for name in owned)
    parts = writer.describe_files(folder, names, STATE)

    def store() -> None:
        writer.store_files(folder, parts, STATE)
        shutil.rmtree(folder)

    return StageOutput(parts=parts, facts={"cursor": cursor}, store=store)


def _deliver(context: SmallContext, group: Group, version: int) -> str:
    return context.fleet.engine().call("receive", b"".join(group.call("export")), version)[0]


def _ensure_served(context: SmallContext, synced: Manifest) -> Group:
    """As `tasks.stages.served_weights.ensure_served`."""
    engine, wanted = context.fleet.engine(), (synced.iteration, synced.facts["weights_digest"])
    if engine.call("identity")[0] != wanted:
        context.outbox.settle()
        state = need(context.root, RUN, synced.iteration, Stage.TRAIN)
        assert _deliver(context, _ensure_state(context, state), synced.iteration) == wanted[1]
    return engine


def _piece(
    context: SmallContext,
    writer: PartWriter,
    engine: Group,
    synced: Manifest,
    prompts: pa.Table,
    cursor: int,
    index: int,
) -> Part:
    """As a piece of `tasks.stages.rollout`."""
    name = f"{index:05d}-{synced.digest[:12]}"
    kept = find_piece(writer, name)
    if kept is not None:
        return kept
    first = cursor + index * GROUPS_PER_PIECE
    table = _generated(writer, engine, synced, prompts, range(first, first + GROUPS_PER_PIECE))
    part = keep_piece(writer, name, writer.write_table(f"groups-{index:05d}.arrow", table, ROLLOUT))
    context.journal.note("piece", name, writer.iteration)
    return part


def _generated(writer: PartWriter, engine: Group, synced: Manifest, prompts: pa.Table, positions: range) -> pa.Table:
    drawn = [prompts.slice(place % PROMPT_COUNT, 1).to_pylist()[0] for place in positions for _ in range(SAMPLES)]
    seeds = [1000 * place + sample for place in positions for sample in range(SAMPLES)]
    responses, rows = engine.call("generate", seeds)[0], len(seeds)
    columns = {
        "run": [RUN] * rows,
        "iteration": [writer.iteration] * rows,
        "prompt_id": [prompt["prompt_id"] for prompt in drawn],
        "sample_id": list(range(SAMPLES)) * len(positions),
        "prompt_tokens": [prompt["prompt_tokens"] for prompt in drawn],
        "response_tokens": [tokens for tokens, _ in responses],
        "logprobs": [logprobs for _, logprobs in responses],
        "finish_reason": ["stop"] * rows,
        "weight_version": [synced.facts["weight_version"]] * rows,
        "seed": seeds,
        "temperature": [1.0] * rows,
        "top_p": [1.0] * rows,
        "max_tokens": [9] * rows,
    }
    return _table(columns, ROLLOUT)


def _prompts() -> pa.Table:
    names = [f"p{row:02d}" for row in range(PROMPT_COUNT)]
    nothing = [None] * PROMPT_COUNT
    columns = {
        "prompt_id": names,
        "prompt": names,
        "prompt_tokens": [[row, row + 1] for row in range(PROMPT_COUNT)],
        "answer": nothing,
        "answer_tokens": nothing,
        "record": ["{}"] * PROMPT_COUNT,
    }
    return _table(columns, PROMPTS)


def _table(columns: dict, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
