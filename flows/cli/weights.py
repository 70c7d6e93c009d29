"""Commands on stored weights: `ratchet evaluate`, `ratchet export` and `ratchet check-sync`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.views.evaluations import evaluation_lines
from flows.views.output import Output
from storage.backends.root import open_root
from storage.errors import StageFailed
from tasks.config.environment import prepare_process
from tasks.config.evaluation import EvaluationSettings
from tasks.config.section import COLDEST
from tasks.export.choice import choose
from tasks.export.target import ExportFolder, local_or_url
from trainer_core.config import Precision

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

TopK = Annotated[
    int, Parameter(help="Likeliest tokens that can be drawn for them; 0 for all.", validator=Number(gte=0))
]
MinP = Annotated[
    float,
    Parameter(
        help="Least probability of a token that can be drawn for them, as a share of the likeliest one's.",
        validator=Number(gte=0, lt=1),
    ),
]
_DEFAULTS = EvaluationSettings()
_SHOWN = 8  # names of a long list
_POSITIVE = Parameter(validator=Number(gt=0))


def evaluate_command(
    which: Which,
    /,
    *,
    samples: Annotated[
        int, Parameter(help="Sampled answers to each prompt, beside the greedy one.", validator=Number(gte=0, lte=4096))
    ] = _DEFAULTS.samples,
    temperature: Annotated[
        float, Parameter(help="Of the sampled answers.", validator=Number(gte=COLDEST))
    ] = _DEFAULTS.temperature,
    top_p: Annotated[
        float, Parameter(help="Nucleus of the sampled answers.", validator=Number(gt=0, lte=1))
    ] = _DEFAULTS.top_p,
    top_k: TopK = _DEFAULTS.top_k,
    min_p: MinP = _DEFAULTS.min_p,
    prompts: Annotated[int, _POSITIVE, Parameter(help="How many prompts, from the first.")] = _DEFAULTS.prompts,
    max_tokens: Annotated[
        int | None, _POSITIVE, Parameter(help="Limit on the tokens of an answer; by default the run's.")
    ] = _DEFAULTS.max_tokens,
    table: Annotated[Literal["held_out", "train"], Parameter(help="Which prompts of the run.")] = _DEFAULTS.table,
    passing: Annotated[
        str | None,
        Parameter(name="--pass", help="Which answers pass, as in 'right >= 1'; by default as evaluate.pass says."),
    ] = _DEFAULTS.passing,
    seed: Annotated[int, Parameter(help="Of the sampled answers.", validator=Number(gte=0))] = _DEFAULTS.seed,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Evaluate stored weights: pass@1, pass@k, mean reward by data source, greedy and sampled.

    The result is stored with the run, which may go on meanwhile. The same evaluation is not done again, and one that
    was interrupted continues. Only iterations whose state is kept can be evaluated.
    """
    settings = EvaluationSettings(
        table=table, prompts=prompts, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k,
        min_p=min_p, max_tokens=max_tokens, passing=passing, seed=seed,
    )  # fmt: skip
    prepare_process()
    with Output(json=json) as output:
        output.say(f"evaluating {which}")
        from flows.evaluating import evaluate_weights  # imports Ray

        record = evaluate_weights(root, which, settings, output.say)
        output.result(record, evaluation_lines(record))
    return 0


def export_command(
    which: Which,
    /,
    *,
    to: Annotated[str, Parameter(help="The new folder: a local path, or any fsspec URL.")],
    precision: Annotated[
        Precision | None, Parameter(help="Type of the weights; by default that of the trained state.")
    ] = None,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Write a trained model as a Hugging Face folder that transformers and vLLM load; needs storage alone, no GPU.

    The weights are compared with the digest of those that were served, and the files with what was written.
    """
    store = open_root(root)
    chosen, target = choose(store, which), ExportFolder.new(local_or_url(to))
    prepare_process()
    with Output(json=json) as output:
        why = f", {chosen.why}" if chosen.why else ""
        output.say(f"exporting iteration {chosen.iteration} of run {chosen.run}{why}")
        from tasks.export.export import export  # imports torch, and Megatron later

        made = export(store, chosen, target, precision)
        output.result(made, list(_exported(made)))
    return 0


def _exported(made: "Exported") -> Iterator[str]:
    yield f"folder     {made.folder}"
    yield f"model      iteration {made.iteration} of run {made.run}, {made.precision}"
    yield f"weights    {made.tensors} tensors, {made.bytes / (1 << 20):.1f} MiB, as served: {made.weights_digest}"
    yield f"files      {', '.join(sorted(made.files))}"


def check_sync_command(which: Which, /, *, root: RootUrl = DEFAULT_ROOT, json: Json = False) -> int:
    """Compare the engines of a run with the stored weights of an iteration, tensor by tensor.

    The engines that the run has on the cluster of RAY_ADDRESS are only asked what they hold. Where there are none, a
    new one gets the stored weights as it does after a restart. Exit code 1 if an engine holds anything else.
    """
    prepare_process()
    with Output(json=json) as output:
        from flows.evaluating import check_engines  # imports Ray

        found = check_engines(root, which, output.say)
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
    names = ", ".join(engine.differing[:_SHOWN])
    more = f" and {len(engine.differing) - _SHOWN} more" if len(engine.differing) > _SHOWN else ""
    return [f"{engine.name}: {engine.problem}", *([f"  differing: {names}{more}"] if names else [])]
