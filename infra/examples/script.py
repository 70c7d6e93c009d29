"""Train, look at samples, export: `python script.py CONFIG.toml RUN ROOT FOLDER [SECTION.KEY=VALUE ...]`."""

import sys

import ratchet

config, name, root, folder, *settings = sys.argv[1:]
run = ratchet.Run(name, root)
done = run.train(config, settings=settings)  # a second time goes on, or has nothing to do
print(f"{done.iterations} iterations, {done.seconds_total:.0f} s")

for row in run.curves().select(["iteration", "reward/reward_mean", "train/grad_norm"]).to_pylist():
    print(row)
best = run.samples([done.iterations]).sort_by([("reward", "descending")]).slice(0, 3)
for row in best.to_pylist():
    print(f"{row['reward']:.2f} | {row['prompt']} -> {row['response']}")

model = run.export(folder)
print(f"{model.tensors} tensors of iteration {model.iteration} are in {model.folder}")
