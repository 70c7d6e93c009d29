"""`ratchet samples`: what the model said, and what it got for it."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.cli.places import place_in
from flows.views.output import Output
from flows.views.samples import Choice, read_chosen, sample_lines
from storage.backends.root import open_root

_FEW = 3


def samples_command(
    which: str,
    /,
    *,
    best: Annotated[int, Parameter(help="Show this many with the highest rewards.", validator=Number(gte=0))] = 0,
    worst: Annotated[int, Parameter(help="Show this many with the lowest rewards.", validator=Number(gte=0))] = 0,
    prompt: Annotated[str | None, Parameter(help="Show all samples of this prompt.")] = None,
    random: Annotated[int, Parameter(help="Show this many drawn at random.", validator=Number(gte=0))] = 0,
    seed: Annotated[int, Parameter(help="Chooses those drawn at random.", validator=Number(gte=0))] = 0,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show samples of an iteration: texts, rewards, advantages. Without a choice, the three best and the three worst.

    Parameters
    ----------
    which
        RUN[@ITERATION]: the iteration that sampled them; by default the newest.
    """
    place = place_in(which, "RUN[@ITERATION]")
    choice = Choice(best=best, worst=worst, prompt=prompt, random=random, seed=seed)
    if not (best or worst or random or prompt is not None):
        choice = Choice(best=_FEW, worst=_FEW)
    found = read_chosen(open_root(root), place.run, place.iteration, choice)
    with Output(json=json) as output:
        output.result(found, sample_lines(found))
    return 0
