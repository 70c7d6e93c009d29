"""A judge's part of the stages: the model of `[engines.judge]` is stored with the run, and its engine answers."""

from storage.digest import value_digest
from storage.errors import InputError
from storage.exchanges import RunExchanges
from storage.manifest import Manifest
from tasks.data.tokenizer import TextCodec
from tasks.rewards.engine_judge import EngineJudge
from tasks.rewards.judge import Judges
from tasks.rewards.reward_model import RewardModel
from tasks.rewards.scoring import is_valued
from tasks.stages.context import RunContext
from tasks.stages.prepared import other_directory, other_parts
from tasks.stages.views import Prepared
from tasks.workers.engines import EngineHandle


def judges_of(context: RunContext, prepared: Prepared) -> Judges:
    """Exchanges and engine of the judges of a run. The engine starts when it is first asked; what is kept asks none."""
    kept, section = RunExchanges(context.root, context.run), context.config.engines
    if section is None:
        return Judges(kept)

    def start() -> EngineHandle:
        return context.workers.judge(other_directory(context, prepared, "judge"))

    if is_valued(context.config.reward):
        return Judges(kept, model=RewardModel(section.judge.max_model_len, lambda some: start().values(some)))
    engine = EngineJudge(
        model=_identity(prepared.manifest, section.judge.precision),
        longest=section.judge.max_model_len,
        questions=context.questions,
        read=lambda: TextCodec.from_directory(other_directory(context, prepared, "judge"), left_out=None),
        start=start,
    )
    return Judges(kept, engine)


def _identity(prepared: Manifest, precision: str) -> str:
    """Identity of what answers. Raises InputError: the run has stored no judge."""
    if not (parts := other_parts(prepared, "judge")):
        raise InputError(
            f"iteration 0 of run {prepared.run!r} has stored no judge (engines.judge): start a new run, or give the "
            "reward `judge` a url"
        )
    return value_digest([{name: part.digest for name, part in parts.items()}, precision])
