"""`ratchet evaluate`: answers of stored weights, scored and stored beside the run."""

from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.views.evaluations import evaluation_lines
from flows.views.output import Output
from tasks.config.environment import prepare_process
from tasks.config.evaluation import EvaluationSettings
from tasks.config.numbers import COLDEST

_DEFAULTS = EvaluationSettings()
_POSITIVE = Parameter(validator=Number(gt=0))


def evaluate_command(
    which: str,
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

    Parameters
    ----------
    which
        RUN for its last iteration, RUN@ITERATION, or RUN@best for the kept one with the highest held-out pass rate;
        RUN@best.reward takes the mean reward instead, and RUN@best.NAME a component of it.
    """
    settings = EvaluationSettings(
        table=table, prompts=prompts, samples=samples, temperature=temperature, top_p=top_p, max_tokens=max_tokens,
        passing=passing, seed=seed,
    )  # fmt: skip
    prepare_process()
    with Output(json=json) as output:
        output.say(f"evaluating {which}")
        from flows.evaluating import evaluate_weights  # imports Ray

        record = evaluate_weights(root, which, settings, output.say)
        output.result(record, evaluation_lines(record))
    return 0
