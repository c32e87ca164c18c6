"""BERT once more in plain NumPy, a small model, and rows to compare them on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from model_lib import bert

TINY = {'width': 16, 'depth': 2, 'mlp_dim': 24, 'num_heads': 4}
TOKENS = jnp.array([[7, 3, 9, 4, 1], [7, 5, 2, 0, 0], [7, 0, 0, 0, 0]])
TYPES = jnp.array([[0, 0, 0, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
LENGTH = jnp.array([5, 3, 1])
BATCH = (TOKENS, TYPES, LENGTH)


def classifier(**fields):
  fields = {'vocab_size': 11, 'max_positions': 6, **TINY, **fields}
  return bert.BertClassifier(num_classes=3, **fields)


def noise(model, *inputs, **options):
  """Parameters of the module, all drawn at random."""
  generator = np.random.default_rng(5)
  shapes = jax.eval_shape(
    lambda key: model.init(key, *inputs, **options), jax.random.key(0)
  )
  return jax.tree.map(
    lambda leaf: 0.4 * generator.normal(size=leaf.shape).astype(np.float32),
    nn.unbox(shapes['params']),
  )


def dense(params, x):
  return x @ params['kernel'] + params['bias']


def layer_norm(params, x, epsilon):
  deviation = np.sqrt(x.var(-1, keepdims=True) + epsilon)
  normed = (x - x.mean(-1, keepdims=True)) / deviation
  return normed * params['scale'] + params['bias']


def gelu(x):
  return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def block_by_loop(params, x, num_heads, epsilon, activation=gelu):
  """One row of valid tokens through a post-LN block; also what it received."""
  head = x.shape[-1] // num_heads
  q, k, v = (
    dense(params['attention'][name], x) for name in ('query', 'key', 'value')
  )
  merged, received = np.zeros(x.shape), np.zeros(len(x))
  for h in range(num_heads):
    part = slice(h * head, (h + 1) * head)
    for i in range(len(x)):
      weights = np.exp(k[:, part] @ q[i, part] / math.sqrt(head))
      weights /= weights.sum()
      merged[i, part] = weights @ v[:, part]
      received += weights / (num_heads * len(x))
  x = x + dense(params['attention']['out'], merged)
  x = layer_norm(params['attention_norm'], x, epsilon)
  hidden = activation(dense(params['mlp']['hidden'], x))
  x = x + dense(params['mlp']['out'], hidden)
  return layer_norm(params['mlp_norm'], x, epsilon), received


def classifier_by_loop(params, tokens, types, epsilon=1e-12):
  """Logits of one row without padding, in float64."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  tables = params['embeddings']
  x = tables['word']['embedding'][tokens]
  if 'token_type' in tables:
    x = x + tables['token_type']['embedding'][types]
  x = x + tables['position']['embedding'][: len(tokens)]
  x = layer_norm(tables['norm'], x, epsilon)
  for index in range(TINY['depth']):
    x, _ = block_by_loop(params[f'block_{index}'], x, 4, epsilon)
  return dense(params['head'], np.tanh(dense(params['pooler'], x[0])))
