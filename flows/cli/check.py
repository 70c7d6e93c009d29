"""`ratchet check`: the checks of `run` without the run."""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import Json
from flows.views.output import Output
from tasks.config.document import load_config
from tasks.config.environment import prepare_process


def check_command(
    config: str,
    /,
    *,
    settings: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set", help="A setting, as section.key=value; may be repeated.", negative=(), show_default=False
        ),
    ] = (),
    json: Json = False,
) -> int:
    """Check a configuration as `run` does, and show a prompt and what would be started; starts and writes nothing.

    Parameters
    ----------
    config
        Path or URL of a TOML file.
    """
    from flows.views.checked import checked, lines_of

    prepare_process()
    with Output(json=json) as output:
        found = checked(load_config(config, settings))
        output.result(found, lines_of(found))
    return 0
