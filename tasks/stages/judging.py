"""A judge's part of the stages: the model of `[engines.judge]` is stored with the run, and its engine answers."""

import json
from functools import partial

import numpy as np
from numpy.typing import NDArray

from storage.digest import value_digest
from storage.errors import InputError
from storage.exchanges import RunExchanges
from storage.manifest import Manifest, Part
from storage.parts import PartWriter, read_part
from tasks.config.model import JUDGE_KEY, judge_section
from tasks.config.run import RunConfig
from tasks.data.tokenizer import TextCodec
from tasks.rewards.engine_judge import EngineJudge
from tasks.rewards.judge import Judges
from tasks.rewards.reward_model import RewardModel
from tasks.stages.context import RunContext
from tasks.stages.prepared import JUDGE_MODEL, other_directory, store_model
from tasks.stages.views import Prepared
from tasks.workers.engines import EngineHandle
from trainer_core.config import is_classifier


def store_judge(writer: PartWriter, config: RunConfig) -> tuple[Part, ...]:
    """Store the judge's model with stage `prepare`; nothing if the run has no engine for one. Raises InputError: its
    directory cannot be read."""
    return store_model(writer, config, judge_section(config.model, config.engines), JUDGE_KEY, JUDGE_MODEL)


def judges_of(context: RunContext, prepared: Prepared) -> Judges:
    """Exchanges and engine of the judges of a run. The engine starts when it is first asked; what is kept asks none."""
    kept, section = RunExchanges(context.root, context.run), context.config.engines
    if section is None:
        return Judges(kept)
    if _scores_alone(context, prepared):
        return Judges(kept, model=RewardModel(section.judge.max_model_len, partial(_values, context, prepared)))
    engine = EngineJudge(
        model=_identity(prepared.manifest, section.judge.precision),
        longest=section.judge.max_model_len,
        questions=context.questions,
        read=lambda: TextCodec.from_directory(other_directory(context, prepared, JUDGE_MODEL), left_out=None),
        start=partial(_engine, context, prepared),
    )
    return Judges(kept, engine)


def _engine(context: RunContext, prepared: Prepared) -> EngineHandle:
    return context.workers.judge(other_directory(context, prepared, JUDGE_MODEL))


def _scores_alone(context: RunContext, prepared: Prepared) -> bool:
    """True if the stored judge is a classifier."""
    part = prepared.manifest.below(JUDGE_MODEL).get("config.json")
    return part is not None and is_classifier(json.loads(read_part(context.root, part)))


def _values(context: RunContext, prepared: Prepared, sequences: list[NDArray[np.int32]]) -> NDArray[np.float32]:
    return _engine(context, prepared).values(sequences)


def _identity(prepared: Manifest, precision: str) -> str:
    """Identity of what answers. Raises InputError: the run has stored no judge."""
    if not (parts := prepared.below(JUDGE_MODEL)):
        raise InputError(
            f"iteration 0 of run {prepared.run!r} has stored no judge (engines.judge): start a new run, or give the "
            "reward `judge` a url"
        )
    return value_digest([{name: part.digest for name, part in parts.items()}, precision])
