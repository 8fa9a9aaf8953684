# %% [markdown]
# # Training and predicting from Python
#
# A notebook of this file: `jupytext --to notebook docs/library.py`, or open it in an editor that knows `# %%` cells.
# It takes some seconds on a CPU and writes to `runs/` in the current directory.

# %%
import numpy as np
import pandas as pd

from hybrid_parallel_recsys import Run, Training, options
from nn.models.description import build_from_json

# %% [markdown]
# ## Options
#
# They are those of the command line, and are checked as there.

# %%
config = options(
    "dlrm",
    "data.synthetic.train_rows=16384",
    "data.synthetic.test_rows=2048",
    "data.synthetic.cardinalities=[1000,200,50]",
    "data.synthetic.num_numerical=4",
    "train.batch_size=512",
    "train.epochs=2",
    "log.every=8",
    "device=cpu",
)

# %% [markdown]
# ## A loop of one's own
#
# `step` trains on the next batch. Records, checkpoints by the clock and resuming are as with the command.

# %%
with Training(config, quiet=True) as training:
    batch = training.batch()
    print({name: tuple(column.shape) for name, column in batch.items()})
    while training.num_steps < training.last_step:
        result = training.step()
        if training.num_steps % 16 == 0:
            measured = training.evaluate()
            print(training.num_steps, f"loss {result.loss:.4f}  AUC {measured['test_auc']:.4f}")
    saved = training.save()
    summary = training.finish()
    run_dir = training.run_dir

# %% [markdown]
# ## The run, loaded
#
# Any run directory can be loaded, also one that many GPUs have trained.

# %%
run = Run.load(run_dir)
print(run.num_steps, run.checkpoint.name, run.summary()["test_auc"])
run.metrics().to_pandas()[["step", "loss", "test_auc"]].tail()

# %% [markdown]
# ## Predictions
#
# A row has the ids and numbers of the dataset.

# %%
generator = np.random.default_rng(1)
rows = pd.DataFrame(
    {
        **{name: generator.normal(size=5) for name in run.spec.numerical},
        **{f.name: generator.integers(0, f.cardinality, 5) for f in run.spec.categorical},
    }
)
print(rows.join(run.predict(rows)))

# %% [markdown]
# ## The model
#
# `model.json` describes it; a new one with other weights needs no dataset.

# %%
model = build_from_json(run_dir / "model.json", seed=7)
print(sum(parameter.numel() for parameter in model.parameters()), "parameters")
