"""The source of an engine of the user's own is part of a run's meaning; without one nothing of it is."""

import pytest

from storage.errors import InputError
from tasks.config.document import load_config
from tasks.config.identity import meaning, meaning_digest
from tests.tasks.config.test_run import MINIMAL


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: pass")
    (tmp_path / "run.toml").write_text(f'{MINIMAL}\n[engine]\nfunction = "mine.py:Mine"\n')
    return tmp_path / "run.toml"


def digest(config):
    return meaning_digest(config.model_dump(mode="json"))


def test_another_source_is_another_run(file):
    config = load_config(str(file))
    assert config.engine.function == f"{file.parent}/mine.py:Mine"
    decides = meaning(config.model_dump(mode="json"), "rollout")["engine"]
    assert decides == {"precision": "fp32", "function": "mine.py:Mine", "source": config.engine.source}
    (file.parent / "mine.py").write_text("class Mine: other = 1")
    assert digest(load_config(str(file))) != digest(config)
    with pytest.raises(InputError, match=r"'mine.py:Mine' has changed: .*--set engine.source="):
        load_config(str(file), [f"engine.source={config.engine.source}"])


def test_vllm_s_runs_have_the_meaning_without_it(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    config = load_config(str(tmp_path / "run.toml"))
    assert meaning(config.model_dump(mode="json"))["engine"] == {"precision": "fp32"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("engine.tensor=2", "engine.tensor has no effect with engine.function, whose engine is one process"),
        (
            ["engine.quantization=fp8", "engine.precision=bf16"],
            "engine.quantization has no effect with engine.function",
        ),
        ("engine.function=absent", "engine.function 'absent' is unknown: installed are none"),
        ("engine.function=absent.py:Mine", "there is no file absent.py"),
    ],
)
def test_what_cannot_be_is_refused(file, given, said):
    with pytest.raises(InputError, match=said):
        load_config(str(file), [given] if isinstance(given, str) else given)


def test_quantization_is_part_of_the_meaning_and_takes_bf16(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    plain, quantized = (
        load_config(str(tmp_path / "run.toml"), ["engine.precision=bf16", *more])
        for more in ([], ["engine.quantization=fp8"])
    )
    assert meaning(quantized.model_dump(mode="json"))["engine"] == {"precision": "bf16", "quantization": "fp8"}
    assert meaning(plain.model_dump(mode="json"))["engine"] == {"precision": "bf16"}
    assert (plain.engine.numbers, quantized.engine.numbers) == ("bf16", "fp8")
    with pytest.raises(InputError, match=r'precision is "fp32": set engine\.precision = "bf16"'):
        load_config(str(tmp_path / "run.toml"), ["engine.quantization=fp8"])


def test_fp8_training_is_part_of_the_meaning(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    plain, fp8 = (
        load_config(str(tmp_path / "run.toml"), ["train.precision=bf16", *more])
        for more in ([], ["train.fp8=tensorwise"])
    )
    assert meaning(fp8.model_dump(mode="json"))["train"]["fp8"] == "tensorwise"
    assert "fp8" not in meaning(plain.model_dump(mode="json"))["train"]


def test_a_live_adapter_is_part_of_the_meaning_and_needs_adapters_beside_plain_weights(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    live = ["train.lora.rank=4", "engine.adapter=live"]
    found = load_config(str(tmp_path / "run.toml"), live)
    assert meaning(found.model_dump(mode="json"), "rollout")["engine"] == {"precision": "fp32", "adapter": "live"}
    fp8 = ["engine.precision=bf16", "engine.quantization=fp8"]
    for given, said in (
        (live[1:], r"engine\.adapter has no effect with train\.lora not given"),
        ([*live, *fp8], r'quantization = "fp8" changes or divides them: leave engine\.quantization out'),
        ([*live, "engine.tensor=2"], r"tensor = 2 changes or divides them: leave engine\.tensor out"),
    ):
        with pytest.raises(InputError, match=said):
            load_config(str(tmp_path / "run.toml"), given)


def test_a_source_without_a_function_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    with pytest.raises(InputError, match=r"engine\.source has no effect with engine\.function not given"):
        load_config(str(tmp_path / "run.toml"), ["engine.source=abc"])
