"""A critic that begins with a folder of its own: its values against transformers on every layout, and its state."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainer_core.models import FAMILIES, SHARED, make_family, places_of, random_samples
from tests.trainer_core.phases.test_critic import LAYOUTS, MARKS, settings
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import ParallelConfig

SAMPLES = random_samples(6, turns=True)
COUNTED = SAMPLES.per_response_token(SAMPLES.usable)
LATER = {**MARKS, "tp2-sp": pytest.mark.slow}  # each rank holds the whole row; test_critic.py divides the layers
PARAMETERS = [pytest.param(name, marks=LATER.get(name, pytest.mark.full)) for name in LAYOUTS]
SIZES = {"hidden_size": 96, "num_hidden_layers": 8, "vocab_size": 102}  # of another family than the policy


def make_classifier(rank, world_size, store, directory, family, sizes):
    """Write a random sequence classifier with one label, and beside it the language model with its layers."""
    import torch
    import transformers

    kind, own = FAMILIES[family]
    torch.manual_seed(9)
    config = getattr(transformers, f"{kind}Config")(
        **(SHARED | {"num_hidden_layers": 4} | own | sizes | {"num_labels": 1})
    )
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    language = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(one for name, one in model.named_buffers() if "e_score" in name)):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    language.model.load_state_dict(model.model.state_dict())
    model.save_pretrained(f"{directory}/classifier")
    language.save_pretrained(f"{directory}/language")


def values_of_prefixes(rank, world_size, store, directory):
    """Score of what is before each token that the policy has sampled, by transformers in float32."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for row, sequence in enumerate(np.split(SAMPLES.tokens, np.cumsum(SAMPLES.lengths)[:-1])):
        tokens = torch.from_numpy(sequence.astype(np.int64))
        with torch.no_grad():
            found += [model(tokens[None, :place]).logits[0, 0].item() for place in places_of(SAMPLES, row)]
    return np.array(found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a policy; folder with those of a classifier and of a language model; values of the classifier."""
    policy, critic = (tmp_path_factory.mktemp(name) for name in ("policy", "critic"))
    run_ranks(1, make_family, str(policy), "qwen3")
    run_ranks(1, make_classifier, str(critic), "llama", SIZES)
    return str(policy), critic, run_ranks(1, values_of_prefixes, str(critic / "classifier"))[0]


def begun_with(rank, world_size, store, names):
    """Row and constant of a head of one column that begins with a classifier that has the tensors of these names."""
    import torch

    from trainer_core.model.values import ValueHead

    class Given(dict):
        source = SimpleNamespace(get_all_keys=lambda: names)

    head = ValueHead(1, 1)
    head.begin(Given({"score.weight": torch.tensor([[2.0]]), "score.bias": torch.tensor([3.0])}))
    return head.weight.item(), head.bias.item()


@pytest.mark.parametrize(
    ("names", "begun"),
    [([], (0, 0)), (["score.weight"], (2, 0)), (["score.weight", "score.bias"], (2, 3))],
    ids=["language", "rewards", "critic"],
)
def test_what_a_folder_does_not_have_is_0(names, begun):
    assert run_ranks(1, begun_with, names) == [begun]


def with_source(folder, layout="single"):
    config = settings(layout)
    return config.model_copy(update={"critic": config.critic.model_copy(update={"source": str(folder)})})


def walk(trainer, language, folder):
    """Values at first; identity, values after an iteration, and the same from its state, when no weights are left to
    read. Also the largest value of a critic that begins with a language model, and the difference of its layers."""
    from trainer_core.phases.critic import Critic  # imports Megatron, which needs the platform prepared

    trainer.import_model()
    first, own = trainer._critic.values(SAMPLES), trainer._critic.model
    config = trainer._config.critic.model_copy(update={"source": language})
    with own.weights("readable"):
        other = Critic("", trainer._config, config, trainer._mesh, trainer._platform, False)
        other.begin(trainer._model)
        pairs = [
            (one, two)
            for mine, theirs in zip(own.modules, other.model.modules, strict=True)
            for (name, one), (_, two) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True)
            if "output_layer" not in name
        ]
        difference = max(float((one - two).abs().max()) for one, two in pairs)
    largest = float(np.abs(other.values(SAMPLES)).max())
    trainer.train_policy(SAMPLES, 1.0)
    saved, after = trainer.save(folder).identity, trainer._critic.values(SAMPLES)
    Path(trainer._config.critic.source, "model.safetensors").unlink(missing_ok=True)
    assert trainer.load(folder).identity == saved
    return first, after, trainer._critic.values(SAMPLES), largest, difference


@pytest.mark.parametrize("layout", PARAMETERS)
def test_values_are_those_of_transformers_and_the_state_needs_no_folder(folders, tmp_path, layout):
    policy, critic, expected = folders
    source = shutil.copytree(critic / "classifier", tmp_path / "source")
    state = tmp_path / "state"
    found = run_trainers(policy, with_source(source, layout), walk, str(critic / "language"), state)
    for first, after, loaded, largest, difference in found:
        np.testing.assert_allclose(first[COUNTED], expected[COUNTED], rtol=0, atol=1e-5)
        assert np.abs(first[COUNTED]).min() > 0
        assert not first[~COUNTED].any()
        np.testing.assert_array_equal(after, loaded)
        assert np.abs(after - first)[COUNTED].min() > 0
        assert (largest, difference) == (0, 0)


def first_values(trainer):
    trainer.import_model()
    return trainer._critic.values(SAMPLES)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_classifier_with_experts_gives_the_same_values_on_two_layouts(tmp_path, family):
    run_ranks(1, make_family, str(tmp_path / "policy"), "qwen3-moe")
    run_ranks(1, make_classifier, str(tmp_path), family, {})
    expected = run_ranks(1, values_of_prefixes, str(tmp_path / "classifier"))[0]
    own = with_source(tmp_path / "classifier")
    for config in (own, own.model_copy(update={"parallel": ParallelConfig(data=2, expert=2)})):
        for found in run_trainers(str(tmp_path / "policy"), config, first_values):
            np.testing.assert_allclose(found[COUNTED], expected[COUNTED], rtol=0, atol=1e-5)
