"""`ratchet retrain` and `ratchet import`: training on samples that are stored, and storing samples made elsewhere."""

import shlex
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl, Settings
from flows.views.output import Output
from storage.backends.root import open_root
from storage.errors import InputError
from storage.ids import check_run_name
from tasks.config.credentials import shown_text
from tasks.config.environment import prepare_process
from tasks.importing.rows import ImportOrder, mapped
from tasks.importing.samples import Imported, import_samples

Start = Annotated[str | None, Parameter(name="--from", help="The state to begin with, as [ROOT//]RUN[@ITERATION].")]
Select = Annotated[
    tuple[str, ...],
    Parameter(help="Whose samples, as [ROOT//]RUN[@FROM-TO]; may be repeated.", negative=(), show_default=False),
]
Where = Annotated[str | None, Parameter(help="Condition over columns, as in 'reward > 0 and oldest_version >= 12'.")]
Age = Annotated[
    str | None, Parameter(help="Only samples of the last 90m, 24h, 7d or 2w, counted from when the run begins.")
]
Rescore = Annotated[bool, Parameter(help="Score them again first, with [reward]; old scores stay.", negative=())]


def retrain_command(
    run: Annotated[str, Parameter(help="Id of the new run. An existing one needs no further options.")],
    /,
    *,
    start: Start = None,
    select: Select = (),
    where: Where = None,
    newer_than: Age = None,
    limit: Annotated[int | None, Parameter(help="Most samples.", validator=Number(gte=1))] = None,
    deduplicate: Annotated[bool, Parameter(help="Take equal samples once.", negative=())] = False,
    rescore: Rescore = False,
    samples: Annotated[int | None, Parameter(help="Samples of an iteration.", validator=Number(gte=1))] = None,
    epochs: Annotated[int | None, Parameter(help="Passes over the selection.", validator=Number(gte=1))] = None,
    config: Annotated[str | None, Parameter(help="TOML file with what differs from the run to begin from.")] = None,
    settings: Settings = (),
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Train a new run on stored samples, or continue that. No engine is started, and no prompt is sampled."""
    # imports the hub's library, which reads the environment then
    from flows.preflight import begin_on_samples
    from tasks.retraining import retrain_config, since_of, start_of

    store = open_root(root)
    check_run_name(run)
    table: dict[str, Any] = {
        "start": None if start is None else start_of(store, run, start),
        "select": list(select) or None,
        "where": where,
        "since": None if newer_than is None else since_of(store, run, newer_than),
        "limit": limit,
        "deduplicate": deduplicate or None,
        "rescore": rescore or None,
        "samples": samples,
        "epochs": epochs,
    }
    given = {key: value for key, value in table.items() if value is not None}
    resolved = retrain_config(store, run, given, config, settings)
    prepare_process()
    again = shlex.join(["ratchet", "retrain", run, f"--root={shown_text(root)}", *(["--json"] if json else [])])
    with Output(json=json) as output:
        begin_on_samples(run, store, resolved, announce=output.say)
        from flows.cli.launch import Order, launch  # imports Prefect and Ray

        return launch(Order(resolved, run, root, again), output)


def import_command(
    *files: Annotated[str, Parameter(help="Paths or URLs of .jsonl, .json or .parquet files.")],
    run: Annotated[str, Parameter(name="--run", help="Id of the run that is to hold them.")],
    map: Annotated[
        tuple[str, ...],
        Parameter(help="WHAT=COLUMN: the column that a property is in; may be repeated.", negative=()),
    ] = (),
    temperature: Annotated[float | None, Parameter(help="At which all samples were drawn.")] = None,
    without_logprobs: Annotated[
        bool, Parameter(help="They have no log-probabilities: only objectives that need none.", negative=())
    ] = False,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Store samples made elsewhere, each file as an iteration, so that `ratchet retrain` can select them.

    A sample has prompt_tokens, response_tokens and logprobs (lists), and may have reward, prompt_id, sample_id,
    finish_reason, weight_version, sampled, turns, seed, temperature and top_p.
    """
    if not files:
        raise InputError("name at least one .jsonl, .json or .parquet file to import")
    order = ImportOrder(files, run, mapped(map), temperature, logprobs=not without_logprobs)
    made = import_samples(open_root(root), order)
    return Output.show(json, made, _of_import(made))


def _of_import(made: Imported) -> list[str]:
    renamed = [f"{what} from {column}" for what, column in made.columns.items() if what != column]
    return [
        f"run {made.run}: {made.samples} samples of {made.groups} prompts, {made.scored} with a reward",
        *([f"columns: {', '.join(renamed)}"] if renamed else []),
        f"train on them with: ratchet retrain NEW --select {made.run} --from RUN@ITERATION",
    ]
