"""A judge's part of the stages: the model of `[engines.judge]` is stored with the run, and its engine answers."""

import json
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.digest import value_digest
from storage.errors import InputError
from storage.exchanges import RunExchanges
from storage.manifest import Manifest, Part
from storage.ownership.scratch import scratch
from storage.parts import PartWriter, read_part
from tasks.config.model import JUDGE_KEY, judge_section
from tasks.config.run import RunConfig
from tasks.data.classifiers import gives_values
from tasks.data.models import fill_model_directory
from tasks.data.tokenizer import TextCodec
from tasks.rewards.engine_judge import EngineJudge
from tasks.rewards.judge import Judges
from tasks.rewards.reward_model import RewardModel
from tasks.stages.context import RunContext
from tasks.stages.prepared import JUDGE_MODEL
from tasks.stages.views import Prepared
from tasks.workers.engines import EngineHandle


def store_judge(writer: PartWriter, config: RunConfig) -> tuple[Part, ...]:
    """Store the judge's model with stage `prepare`; nothing if the run has no engine for one. Raises InputError: its
    directory cannot be read."""
    if (section := judge_section(config.model, config.engines)) is None:
        return ()
    with scratch() as directory:
        names = fill_model_directory(directory, section, config.run.seed, JUDGE_KEY)
        return writer.write_files(directory, names, JUDGE_MODEL)


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
        read=lambda: TextCodec.from_directory(_directory(context, prepared), left_out=None),
        start=partial(_engine, context, prepared),
    )
    return Judges(kept, engine)


def _engine(context: RunContext, prepared: Prepared) -> EngineHandle:
    return context.workers.judge(_directory(context, prepared))


def _scores_alone(context: RunContext, prepared: Prepared) -> bool:
    """True if the stored judge is a classifier."""
    part = prepared.manifest.below(JUDGE_MODEL).get("config.json")
    return part is not None and gives_values(json.loads(read_part(context.root, part)))


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


def _directory(context: RunContext, prepared: Prepared) -> Path:
    """A Hugging Face directory on each host with the judge, verified on first use in this process."""
    folder = context.scratch / f"judge-{prepared.digest[:16]}"
    verified = folder.with_suffix(".verified")
    if not verified.exists():
        context.folders.fetch(context.root, prepared.manifest, folder, JUDGE_MODEL)
        verified.touch()
    return folder
