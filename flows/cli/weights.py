"""Commands on stored weights: `ratchet evaluate`, `ratchet export` and `ratchet check-sync`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.options import Common, option_name
from flows.views.evaluations import evaluation_lines
from flows.views.output import Output, size, some
from storage.errors import StageFailed
from tasks.config.environment import prepare_process
from tasks.config.evaluation import EvaluationSettings
from tasks.export.order import ExportFolder, ExportSettings, choose

if TYPE_CHECKING:
    from tasks.export.export import Exported
    from tasks.sync_check import CheckedEngine, CheckedSync

Which = Annotated[
    str,
    Parameter(
        help="RUN for its last iteration, RUN@ITERATION, or RUN@best for the kept one with the highest held-out pass "
        "rate; RUN@best.reward takes the mean reward instead, and RUN@best.NAME a component of it."
    ),
]
_SHOWN = 8  # names of a long list
_AS_TRAINED = ExportSettings()


def evaluate_command(
    which: Which,
    /,
    *,
    settings: Annotated[EvaluationSettings, Parameter(name="*", name_transform=option_name)] = EvaluationSettings(),
    common: Common = Common(),
) -> int:
    """Evaluate stored weights: pass@1, pass@k, mean reward by data source, greedy and sampled.

    The result is stored with the run, which may go on meanwhile. The same evaluation is not done again, and one that
    was interrupted continues. Only iterations whose state is kept can be evaluated."""
    prepare_process()
    with Output(json=common.json) as output:
        output.say(f"evaluating {which}")
        from flows.evaluating import evaluate_weights  # imports Ray

        record = evaluate_weights(common.root, which, settings, output.say)
        output.result(record, evaluation_lines(record))
    return 0


def export_command(
    which: Which,
    /,
    *,
    to: Annotated[str, Parameter(help="The new folder: a local path, or any fsspec URL.")],
    settings: Annotated[ExportSettings, Parameter(name="*", negative=())] = _AS_TRAINED,
    common: Common = Common(),
) -> int:
    """Write a trained model as a Hugging Face folder that transformers and vLLM load; needs storage alone, no GPU.

    The weights are compared with the digest of those that were served, and the files with what was written."""
    store = common.store
    chosen, target = choose(store, which), ExportFolder.new(to)
    prepare_process()
    with Output(json=common.json) as output:
        why = f", {chosen.why}" if chosen.why else ""
        output.say(f"exporting iteration {chosen.iteration} of run {chosen.run}{why}")
        from tasks.export.export import export_as  # imports torch, and Megatron later

        made = export_as(store, chosen, target, settings)
        output.result(made, list(_exported(made)))
    return 0


def _exported(made: "Exported") -> Iterator[str]:
    yield f"folder     {made.folder}"
    yield f"model      iteration {made.iteration} of run {made.run}, {made.precision}"
    yield f"weights    {made.tensors} tensors, {size(made.bytes)}, digest {made.weights_digest}"
    yield f"files      {', '.join(sorted(made.files))}"


def check_sync_command(which: Which, /, *, common: Common = Common()) -> int:
    """Compare the engines of a run with the stored weights of an iteration, tensor by tensor.

    The engines that the run has on the cluster of RAY_ADDRESS are only asked what they hold. Where there are none, a
    new one gets the stored weights as it does after a restart. Exit code 1 if an engine holds anything else."""
    prepare_process()
    with Output(json=common.json) as output:
        from flows.evaluating import check_engines  # imports Ray

        found = check_engines(common.root, which, output.say)
        output.result(found, _synced(found))
    return 0 if found.equal else StageFailed.exit_code


def _synced(found: "CheckedSync") -> list[str]:
    stored = {
        "equal": "the stored state gives them",
        "different": "THE STORED STATE GIVES OTHERS: `ratchet verify` shows what is damaged",
        "not compared": "the stored state was not converted here",
    }[found.stored]
    first = f"run {found.run}, iteration {found.iteration}: weights {found.weights_digest}; {stored}"
    return [first, *(line for engine in found.engines for line in _engine(engine))]


def _engine(engine: "CheckedEngine") -> list[str]:
    if engine.problem is None:
        return [f"{engine.name}: serves them"]
    named = [f"  differing: {some(engine.differing, _SHOWN)}"] if engine.differing else []
    return [f"{engine.name}: {engine.problem}", *named]
