"""Stage `select`: the stored samples to train on, copied into the run, so that training on them can be repeated."""

import json

from storage.errors import InputError
from storage.manifest import Manifest, find
from storage.parts import read_part
from storage.schema import SELECTION, fingerprint
from storage.selection import write_sources
from tasks.config.retrain import RetrainSection
from tasks.stages.names import Stage
from tasks.stages.prepared import MODEL
from tasks.stages.selecting import Ranges, Rollout, Selecting, rollouts
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared, Selected

_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


@stage(Stage.SELECT, ("prepare",), Selected)
def select(work: Work, prepared: Prepared) -> StageOutput:
    """Copy what [retrain] selects into parts, one for each share that an iteration trains on.

    Raises:
        InputError: nothing is selected, or what is cannot be trained on from the state that the run begins with.
    """
    section = work.config.retrain
    if section is None:
        raise InputError("the run has no [retrain], so there is nothing to select: start it with `ratchet retrain`")
    selecting, ranges, parts, checked = Selecting(section), Ranges(), [], set[tuple[str, str]]()
    for rollout in rollouts(work.root, section):
        if (place := (rollout.root.url, rollout.manifest.run)) not in checked:
            _check_tokenizer(prepared, rollout)
            checked.add(place)
        for share in selecting.add(rollout):
            ranges.add(share)
            parts.append(work.writer.write_table(f"samples-{len(parts):06d}.arrow", share, SELECTION))
        if selecting.full:
            break
    for share in selecting.rest():
        ranges.add(share)
        parts.append(work.writer.write_table(f"samples-{len(parts):06d}.arrow", share, SELECTION))
    _check_content(work, prepared, selecting, ranges)
    return StageOutput(
        parts=(*parts, write_sources(work.writer, selecting.sources)),
        schema_fingerprint=fingerprint(SELECTION),
        facts={"samples": selecting.rows, "temperature": min(ranges.temperatures), "shares": len(parts)},
        metrics=_metrics(selecting, ranges),
    )


def _metrics(selecting: Selecting, ranges: Ranges) -> dict[str, float]:
    mean = {"reward_mean": ranges.rewards / ranges.scored} if ranges.scored else {}
    return {
        "samples": float(selecting.rows),
        "groups": float(selecting.groups),
        "rollouts": float(len(selecting.sources)),
        "examined": float(selecting.examined),
        "duplicates": float(selecting.duplicates),
        "scored": float(ranges.scored),
        **mean,
    }


def _check_tokenizer(prepared: Prepared, rollout: Rollout) -> None:
    """Refuse samples whose token ids mean something else."""
    theirs = find(rollout.root, rollout.manifest.run, 0, Stage.PREPARE)
    if theirs is None:
        return  # imported: only the range of its token ids can be checked
    ours = _tokenizer(prepared.manifest)
    differing = [name for name, digest in _tokenizer(theirs).items() if ours.get(name, digest) != digest]
    if differing:
        raise InputError(
            f"the samples of run {rollout.manifest.run!r} were made with another tokenizer than that of the model to "
            f"be trained: {differing[0]} differs. Select samples of runs that have the same one"
        )


def _tokenizer(manifest: Manifest) -> dict[str, str]:
    names = {part.name.removeprefix(MODEL): part.digest for part in manifest.parts if part.name.startswith(MODEL)}
    return {name: names[name] for name in _TOKENIZER if name in names}


def _check_content(work: Work, prepared: Prepared, selecting: Selecting, ranges: Ranges) -> None:
    section = work.config.retrain
    assert isinstance(section, RetrainSection)
    if not selecting.rows:
        raise InputError(
            f"nothing is selected: {selecting.examined} samples were examined, and retrain.where "
            f"{section.where!r} keeps none of them. Change it, or retrain.select"
        )
    if len(ranges.temperatures) > 1:
        found = ", ".join(f"{one:g}" for one in sorted(ranges.temperatures))
        raise InputError(
            f"the selected samples were drawn at several temperatures ({found}), and their log-probabilities cannot be "
            f"compared with those of one trainer: add 'temperature = {min(ranges.temperatures):g}' to retrain.where"
        )
    vocabulary = json.loads(read_part(work.root, prepared.manifest.part(f"{MODEL}config.json")))["vocab_size"]
    if ranges.largest_token >= vocabulary:
        raise InputError(
            f"the selected samples hold token id {ranges.largest_token}, but the model to be trained has "
            f"{vocabulary} tokens: they were made with another tokenizer"
        )
    longest = work.config.train.max_length
    if ranges.longest > longest:
        raise InputError(
            f"a selected sample has {ranges.longest} tokens, but train.max_length is {longest}: raise it, or add "
            f"'length(prompt_tokens) + length(response_tokens) <= {longest}' to retrain.where"
        )
