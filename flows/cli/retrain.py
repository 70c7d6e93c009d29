"""`ratchet retrain` and `ratchet import`: training on samples that are stored, and storing samples made elsewhere."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from flows.cli.options import Common, Settings, flag, several
from flows.views.output import Output
from storage.ids import check_run_name
from tasks.config.environment import prepare_process
from tasks.importing.rows import ImportOrder, mapped
from tasks.importing.samples import Imported, import_samples

_COUNT = Number(gte=1)


@Parameter(name="*")
@dataclass(frozen=True)
class Selection:
    """Options that are keys of [retrain]."""

    start: Annotated[
        str | None, Parameter(name="--from", help="The state to begin with, as [ROOT//]RUN[@ITERATION].")
    ] = None
    select: Annotated[tuple[str, ...], several("Run whose samples are selected, as [ROOT//]RUN[@FROM-TO]")] = ()
    where: Annotated[
        str | None, Parameter(help="Condition over columns, as in 'reward > 0 and oldest_version >= 12'.")
    ] = None
    newer_than: Annotated[
        str | None, Parameter(help="Only samples of the last 90m, 24h, 7d or 2w, counted from when the run begins.")
    ] = None
    limit: Annotated[int | None, Parameter(help="Most samples.", validator=_COUNT)] = None
    deduplicate: Annotated[bool | None, flag("Take equal samples once.")] = None
    rescore: Annotated[bool | None, flag("Score them again first, with [reward]; old scores stay.")] = None
    samples: Annotated[int | None, Parameter(help="Samples of an iteration.", validator=_COUNT)] = None
    epochs: Annotated[int | None, Parameter(help="Passes over the selection.", validator=_COUNT)] = None


def retrain_command(
    run: Annotated[str, Parameter(help="Id of the new run. An existing one needs no further options.")],
    /,
    *,
    selection: Selection = Selection(),
    config: Annotated[str | None, Parameter(help="TOML file with what differs from the run to begin from.")] = None,
    settings: Settings = (),
    common: Common = Common(),
) -> int:
    """Train a new run on stored samples, or continue one. Start no engine and sample no prompt."""
    # imports the hub's library, which reads the environment then
    from flows.preflight import begin_on_samples
    from tasks.forking import retrain_config, since_of, start_of

    store = common.store
    check_run_name(run)
    given = {key: value for key, value in vars(selection).items() if value not in (None, ())}
    if selection.start is not None:
        given["start"] = start_of(store, run, selection.start)
    if (age := given.pop("newer_than", None)) is not None:
        given["since"] = since_of(store, run, age)
    resolved = retrain_config(store, run, given, config, settings)
    prepare_process()
    with Output(json=common.json) as output:
        begin_on_samples(run, store, resolved, announce=output.say)
        from flows.cli.launch import Order, launch  # imports Prefect and Ray

        return launch(Order(resolved, run, common.root, common.again(["retrain", run])), output)


def import_command(
    *files: Annotated[str, Parameter(help="Paths or URLs of .jsonl, .json or .parquet files.")],
    run: Annotated[str, Parameter(name="--run", help="Id of the new run that holds them.")],
    map: Annotated[tuple[str, ...], several("WHAT=COLUMN: the column that a property is in")] = (),
    temperature: Annotated[float | None, Parameter(help="Temperature at which all samples were drawn.")] = None,
    without_logprobs: Annotated[
        bool, flag("Accept samples without log-probabilities, for objectives that need none.")
    ] = False,
    common: Common = Common(),
) -> int:
    """Store samples made elsewhere, each file as an iteration, so that `ratchet retrain` can select them.

    A sample has prompt_tokens, response_tokens and logprobs (lists), and may have reward, prompt_id, sample_id,
    finish_reason, weight_version, sampled, turns, seed, temperature and top_p."""
    order = ImportOrder(files, run, mapped(map), temperature, logprobs=not without_logprobs)
    made = import_samples(common.store, order)
    return common.show(made, _of_import(made))


def _of_import(made: Imported) -> list[str]:
    renamed = [f"{what} from {column}" for what, column in made.columns.items() if what != column]
    return [
        f"run {made.run}: {made.samples} samples of {made.groups} prompts, {made.scored} with a reward",
        *([f"columns: {', '.join(renamed)}"] if renamed else []),
        f"train on them with: ratchet retrain NEW --select {made.run} --from RUN@ITERATION",
    ]
