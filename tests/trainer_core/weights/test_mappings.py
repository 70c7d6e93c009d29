"""The bridge is asked once for names that differ in numbers alone; the answer is right for each."""

import itertools

import pytest

from tests.trainer_core.ranks import run_ranks

EXPERT = "decoder.layers.*.mlp.experts.linear_fc{}.weight*"
HF_EXPERT = "model.layers.*.mlp.experts.*.{}_proj.weight"
RESTS = [
    "norm.weight", "router.bias", "shifted.weight",
    *(f"mlp.experts.linear_fc{part}.weight{expert}" for part in (1, 2) for expert in (0, 1, 12)),
]  # fmt: skip
LOCAL = [
    *(f"decoder.layers.{layer}.{rest}" for layer, rest in itertools.product((0, 1, 3, 11), RESTS)),
    "mtp.layers.0.norm.weight", "mtp.layers.1.norm.weight", "embedding.word_embeddings.weight",
]  # fmt: skip


def registry():
    """One layer has a pattern of its own, and names of one kind count from 1 on."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import GatedMLPMapping, ReplicatedMapping

    class OneFurther(ReplicatedMapping):
        def resolve(self, captures):
            further = (str(int(captures[0]) + 1),)
            return ReplicatedMapping(self._resolve_names(captures)[0], self._resolve_names(further)[1])

    return MegatronMappingRegistry(
        ReplicatedMapping("decoder.layers.0.norm.weight", "model.first.weight"),
        ReplicatedMapping("decoder.layers.*.norm.weight", "model.layers.*.norm.weight"),
        ReplicatedMapping("decoder.layers.*.router.bias", "model.layers.*.gate.bias"),
        OneFurther("decoder.layers.*.shifted.weight", "model.layers.*.shifted.weight"),
        GatedMLPMapping(EXPERT.format(1), gate=HF_EXPERT.format("gate"), up=HF_EXPERT.format("up")),
        ReplicatedMapping(EXPERT.format(2), HF_EXPERT.format("down")),
        ReplicatedMapping("mtp.layers.*.norm.weight", "model.next.*.norm.weight"),
        ReplicatedMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    )


def renumbered(first, experts):
    """Names as the bridge gives them on a later stage, with experts of a later rank."""

    def whole(_chunks, _config, name, stage):
        parts = name.split(".")
        if parts[0] == "decoder":
            parts[2] = str(int(parts[2]) + first + 5 * stage)
            head, _, number = parts[-1].partition("weight")
            parts[-1] = f"{head}weight{int(number) + experts}" if number else parts[-1]
        return ".".join(parts)

    return whole


def compared(_rank, _world, _store, first, experts, backwards):
    """Ours and the bridge's answers, by name."""
    from trainer_core.weights import mappings

    whole = renumbered(first, experts)
    vars(mappings)["_megatron_local_name_to_global"] = whole
    bridges = registry()
    names = mappings.Names(bridges, [], None)
    found = []
    for stage, name in itertools.product((0, 1), LOCAL[::-1] if backwards else LOCAL):
        known, renamed = names.known(stage, name), whole([], None, name, stage)
        asked = bridges.megatron_to_hf_lookup(renamed)
        one = known.whole, type(known.mapping).__name__, known.names
        found.append((one, (renamed, type(asked).__name__, mappings.names_of(asked))))
    return found


@pytest.mark.parametrize(("first", "experts"), [(0, 0), (4, 16)])
@pytest.mark.parametrize("backwards", [False, True])
def test_every_name_is_what_the_bridge_says_of_it(first, experts, backwards):
    (found,) = run_ranks(1, compared, first, experts, backwards)
    assert len(found) == 2 * len(LOCAL)
    for known, asked in found:
        assert known == asked


def counted(_rank, _world, _store):
    """Kinds of names that differ in numbers alone, with the questions to the bridge; and parameters without a name."""
    from trainer_core.weights import mappings

    vars(mappings)["_megatron_local_name_to_global"] = renumbered(0, 0)
    bridges, asked = registry(), []
    look = bridges.megatron_to_hf_lookup
    bridges.megatron_to_hf_lookup = lambda name: asked.append(name) or look(name)
    names = mappings.Names(bridges, [], None)
    known = [names.known(0, f"decoder.layers.{layer}.mlp.experts.linear_fc2.weight{layer}") for layer in range(9)]
    kinds, count = {one.kind for one in known}, len(asked)
    return len(kinds), count, [names.known(0, f"decoder.layers.{layer}.unheard.weight").mapping for layer in (0, 1)]


def test_a_kind_is_asked_for_once_and_what_has_no_name_is_told():
    # the first name, and one to find its numbers again
    assert run_ranks(1, counted) == [(1, 2, [None, None])]
