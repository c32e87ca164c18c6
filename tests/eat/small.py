"""A small EAT with random parameters, for the tests of this folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dataset_lib.source import DatasetInfo
from eat.model import EatClassifier, EatModernBert
from train_lib.sharding import unbox

FIELDS = dict(
  num_classes=3, width=16, depth=4, mlp_dim=32, num_heads=2, vocab_size=50,
  max_positions=64, prune_layers=(1, 3), prune_ratios=(0.3, 0.3), window=8,
  exit_layers=(1, 3),
)  # fmt: skip
MODERN = {name: FIELDS[name] for name in FIELDS if name != 'window'} | dict(
  local_window=6, global_base=90.0, local_base=20.0
)


@functools.cache
def build(**changes):
  """A model and variables; every array is random, also the norms' scales.

  At initialisation LayerNorm gives every token the same norm, and which
  tokens are pruned would hang on rounding.
  """
  return randomly(EatClassifier(**(FIELDS | changes)))


@functools.cache
def build_modern(**changes):
  """The same of a ModernBERT, whose blocks 1 and 4 attend to all tokens."""
  return randomly(EatModernBert(**(MODERN | changes)))


def randomly(model):
  rows = jnp.ones((1, 8), jnp.int32)
  length = jnp.full((1,), 8, jnp.int32)
  abstract = jax.eval_shape(model.init, jax.random.key(0), rows, rows, length)
  return model, randomised(abstract)


def randomised(variables, seed=0, scale=0.3):
  rng = np.random.default_rng(seed)

  def leaf(path, value):
    noise = rng.standard_normal(value.shape).astype(np.float32)
    around = 1.0 if 'scale' in jax.tree_util.keystr(path) else 0.0
    return jnp.asarray(around + scale * noise)

  return jax.tree_util.tree_map_with_path(leaf, unbox(variables))


def rows(count, low=2, high=20, seed=0, vocab_size=50):
  """Rows of random tokens: a list of 1-D arrays."""
  rng = np.random.default_rng(seed)
  return [
    rng.integers(1, vocab_size, rng.integers(low, high + 1)).astype(np.int32)
    for _ in range(count)
  ]


def item(tokens):
  """A row as a chain reads it, the second half being the second text."""
  types = (np.arange(len(tokens)) >= len(tokens) // 2).astype(np.int32)
  return {'tokens': tokens, 'token_types': types}


def batch(texts, length, size=None):
  """(tokens, token_types, length) of rows padded to `length`."""
  size = size or len(texts)
  tokens = np.zeros((size, length), np.int32)
  types = np.zeros((size, length), np.int32)
  lengths = np.ones(size, np.int32)
  for index, text in enumerate(texts):
    tokens[index, : len(text)] = text
    types[index, len(text) // 2 : len(text)] = 1
    lengths[index] = len(text)
  return jnp.asarray(tokens), jnp.asarray(types), jnp.asarray(lengths)


def labelled(inputs, num_classes, real, seed=0):
  """A batch of (tokens, token_types, length), of which `real` rows count."""
  rows = len(inputs[2])
  label = np.random.default_rng(seed).integers(0, max(num_classes, 2), rows)
  return dict(zip(('tokens', 'token_types', 'length'), inputs, strict=True)) | {
    'label': jnp.asarray(label, 'int32' if num_classes > 1 else 'float32'),
    'mask': (jnp.arange(rows) < real).astype(jnp.float32),
    'index': jnp.arange(rows, dtype=jnp.int32),
  }


def info(num_classes=3, vocab_size=50):
  """The description of rows of up to 20 token ids."""
  is_regression = num_classes == 1
  return DatasetInfo(
    input_key='tokens',
    input_shape=(20,),
    input_dtype='int32',
    num_classes=num_classes,
    class_names=() if is_regression else tuple('abc'[:num_classes]),
    num_examples=8,
    vocab_size=vocab_size,
    label_dtype='float32' if is_regression else 'int32',
  )


def task(kind, model, info, /, **config):
  """A task with a model of its own, as a run of it would be read."""
  made = kind.__new__(kind)
  made.config, made.info, made.model = config, info, model
  return made
