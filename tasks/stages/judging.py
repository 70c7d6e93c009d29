"""A judge's part of the stages: the model of `[engines.judge]` is stored with the run, and its engine answers."""

from functools import partial
from pathlib import Path

from storage.digest import value_digest
from storage.errors import InputError
from storage.exchanges import RunExchanges
from storage.manifest import Manifest, Part
from storage.ownership.scratch import scratch
from storage.parts import PartWriter
from tasks.config.model import JUDGE_KEY, judge_section
from tasks.config.run import RunConfig
from tasks.data.models import fill_model_directory
from tasks.data.tokenizer import TextCodec
from tasks.engine.protocol import EngineProtocol
from tasks.rewards.engine_judge import EngineJudge
from tasks.rewards.judge import Judges
from tasks.stages.context import RunContext
from tasks.stages.prepared import JUDGE_MODEL
from tasks.stages.views import Prepared


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
    engine = EngineJudge(
        model=_identity(prepared.manifest, section.judge.precision),
        longest=section.judge.max_model_len,
        questions=context.questions,
        read=lambda: TextCodec.from_directory(_directory(context, prepared), left_out=None),
        start=partial(_engine, context, prepared),
    )
    return Judges(kept, engine)


def _engine(context: RunContext, prepared: Prepared) -> EngineProtocol:
    return context.workers.judge(_directory(context, prepared))


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
