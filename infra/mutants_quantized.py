"""Faults in FP8 engines that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_PROOF, _FILE = ("tests/tasks/engine/vllm/test_quantized.py",), "tasks/engine/vllm/quantized.py"

QUANTIZED = (
    Mutant(
        "scales-not-compared",
        "scales of the update before stay beside new numbers, and nobody notices",
        _FILE,
        "            if (wanted := self._expected.get(name)) != digest:\n",
        '            if (wanted := self._expected.get(name)) != digest and name.endswith(".weight"):\n',
        _PROOF,
    ),
    Mutant(
        "layers-without-numbers-pass",
        "a layer that the update has not made again passes",
        _FILE,
        "            if (wanted := self._expected.get(name)) != digest:\n",
        "            if (wanted := self._expected.get(name, digest)) != digest:\n",
        _PROOF,
    ),
    Mutant(
        "scales-of-zero",
        "a row of zeros has the scale 0, by which it is divided",
        _FILE,
        ".clamp(min=SMALLEST)",
        "",
        _PROOF,
    ),
    Mutant(
        "moved-numbers-pass",
        "numbers that CUDA graphs do not read are compared",
        _FILE,
        "if now[name] != self._storage[name]",
        "if name not in self._storage",
        _PROOF,
    ),
    Mutant(
        "quantized-with-the-samples-of-bf16",
        "samples that a bf16 engine has drawn count as those of an FP8 engine",
        "tasks/config/run.py",
        "        return self.quantization or self.precision\n",
        "        return self.precision\n",
        ("tests/tasks/config/test_engine.py",),
    ),
    Mutant(
        "probe-of-fp8-by-the-limits-of-bf16",
        "a sync of a trainer with FP8 is measured by the limits of bf16, and refused",
        "tasks/stages/weight_sync.py",
        '"fp8" if config.train.fp8 else config.train.precision',
        "config.train.precision",
        ("tests/tasks/stages/test_probe.py",),
    ),
    Mutant(
        "teacher-in-fp8",
        "a teacher computes with the FP8 numbers of the policy's setting",
        "trainer_core/config.py",
        '{"lora": None, "fp8": None, ',
        '{"lora": None, ',
        ("tests/trainer_core/test_config.py",),
    ),
    Mutant(
        "fp8-on-cpu-starts",
        "a run on CPU whose engines shall compute with FP8 numbers is not refused before the start",
        "tasks/model_checks/fitness.py",
        '    if device == "cpu":\n        fact = f"{given} takes',
        '    if device == "cuda":\n        fact = f"{given} takes',
        ("tests/tasks/test_checks.py", "tests/bad_input/test_models.py"),
    ),
)
