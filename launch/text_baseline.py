"""A baseline for labelled texts: logistic regression on mean embeddings.

The pretrained encoder is frozen. A text is the mean of its tokens' last states,
of length 1, as sentence-transformers embeds texts with MiniLM.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dataset_lib import builder
from eval_lib import predictions
from model_lib.layers import masked_mean, valid_tokens
from train_lib import loading, sharding, warm_start
from train_lib.task import build_task

# Inverse strengths of the L2 penalty; the validation split decides.
STRENGTHS = (0.1, 1.0, 10.0, 100.0)
BATCH = 64


def accuracy(workdir: str, pretrained: str, split: str = 'test') -> float:
  """Returns the accuracy on a split of the data of a dense run.

  The regression is fitted to the run's training split; `pretrained` is the
  encoder that the run started from.
  """
  from sklearn.linear_model import LogisticRegression  # slow to import

  config = loading.load_config(workdir)
  embed = _encoder(config, workdir, pretrained)
  features, labels = embed(config.train_split)
  fitted = [
    LogisticRegression(C=strength, max_iter=1000).fit(features, labels)
    for strength in STRENGTHS
  ]
  chosen_on = embed('validation')
  best = max(fitted, key=lambda one: one.score(*chosen_on))
  return float(best.score(*embed(split)))


def _encoder(config: Any, workdir: str, pretrained: str) -> Any:
  """Returns a function of a split: embeddings `[N, D]`, labels `[N]`."""
  info = loading.load_info(workdir)
  task = build_task(config, info)
  fresh = sharding.unbox(task.init(jax.random.key(0))[0])
  params = warm_start.warm_start(
    fresh, pretrained, (), ('^head/',), config.model, info
  )

  @jax.jit
  def outputs(variables: Any, batch: Any) -> dict[str, Any]:
    inputs = task.arguments(batch)
    states = task.model.apply(variables, *inputs, method='encode')
    mean = masked_mean(states, valid_tokens(states, batch['length']))
    size = jnp.linalg.norm(mean, axis=-1, keepdims=True)
    return {'embedding': mean / jnp.maximum(size, 1e-9)}

  def embed(split: str) -> tuple[np.ndarray, np.ndarray]:
    source = builder.build_source(config.dataset, split)
    source.bad_rows = ()  # the training has tolerated them
    data = builder.chosen(source, np.arange(len(source)), BATCH)
    rows = predictions.collect(
      data, {'params': params}, outputs, finite='embedding'
    )
    return rows['embedding'], rows['label']

  return embed
