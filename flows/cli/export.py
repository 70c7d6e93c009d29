"""`ratchet export`: a trained model as a Hugging Face folder."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.views.output import Output
from storage.backends.root import open_root
from tasks.config.environment import prepare_process
from tasks.export.choice import choose
from tasks.export.target import Target, local_or_url
from trainer_core.config import Precision

if TYPE_CHECKING:
    from tasks.export.export import Exported


def export_command(
    which: str,
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

    Parameters
    ----------
    which
        RUN for its last iteration, RUN@ITERATION, or RUN@best for the kept one with the highest held-out pass rate;
        RUN@best.reward takes the mean reward instead, and RUN@best.NAME a component of it.
    """
    store = open_root(root)
    chosen, target = choose(store, which), Target.new(local_or_url(to))
    prepare_process()
    with Output(json=json) as output:
        why = f", {chosen.why}" if chosen.why else ""
        output.say(f"exporting iteration {chosen.iteration} of run {chosen.run}{why}")
        from tasks.export.export import export  # imports torch, and Megatron later

        made = export(store, chosen, target, precision)
        output.result(made, list(_lines(made)))
    return 0


def _lines(made: "Exported") -> Iterator[str]:
    yield f"folder     {made.folder}"
    yield f"model      iteration {made.iteration} of run {made.run}, {made.precision}"
    yield f"weights    {made.tensors} tensors, {made.bytes / (1 << 20):.1f} MiB, as served: {made.weights_digest}"
    yield f"files      {', '.join(sorted(made.files))}"
