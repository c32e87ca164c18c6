"""A run as `launch.export` wrote it, and rows for both, for its tests."""

import jax
import jax.numpy as jnp
import numpy as np

from dataset_lib import tokenizer
from launch import export
from train_lib import loading, sharding


def exported(run, out, *flags):
  assert export.main([f'--workdir={run}', f'--out={out}', *flags]) == 0
  return out


def params_of(run):
  task = loading.load_task(run, loading.load_own_config(run))
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    return loading.load_params(run, task, mesh).variables['params']


def encoded(run, texts, pairs):
  """Padded rows as the run reads them."""
  rows = tokenizer.load(run / 'tokenizer.json').encode(texts, pairs)
  lengths = np.diff(rows.offsets)
  shape = (len(texts), lengths.max())
  tokens, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  valid = np.arange(shape[1])[None] < lengths[:, None]
  tokens[valid], types[valid] = rows.tokens, rows.token_types
  return [jnp.asarray(x, jnp.int32) for x in (tokens, types, lengths)]
