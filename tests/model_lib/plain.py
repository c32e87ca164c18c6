"""Layers and BERT once more in plain NumPy, and rows to compare them on."""

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


def noise(module, *inputs, scale=0.4, seed=5, **options):
  """Parameters of the module, biases and scales too, drawn at random."""
  generator = np.random.default_rng(seed)
  shapes = jax.eval_shape(
    lambda key: module.init(key, *inputs, **options), jax.random.key(0)
  )
  return jax.tree.map(
    lambda leaf: scale * generator.normal(size=leaf.shape).astype(np.float32),
    nn.unbox(shapes['params']),
  )


def counted_flops(model, *inputs):
  """FLOPs of a call by the compiler, which counts the body of a loop once."""
  params = jax.eval_shape(model.init, jax.random.key(0), *inputs)
  lowered = jax.jit(model.apply).lower(params, *inputs)
  return lowered.cost_analysis()['flops']


def normal(*shape):
  values = np.random.default_rng(0).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def float64(tree):
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def dense(params, x):
  return x @ params['kernel'] + params.get('bias', 0.0)


def layer_norm(params, x, epsilon=1e-6):
  deviation = np.sqrt(x.var(-1, keepdims=True) + epsilon)
  normed = (x - x.mean(-1, keepdims=True)) / deviation
  return normed * params['scale'] + params.get('bias', 0.0)


def gelu(x):
  return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def gelu_new(x):
  inner = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
  return 0.5 * x * (1.0 + np.tanh(inner))


def mlp(params, x, activation=gelu):
  hidden = activation(dense(params['hidden'], x))
  if 'gated' in params:
    hidden = hidden * dense(params['gated'], x)
  return dense(params['out'], hidden)


def attend_by_loop(query, key, value, valid, near=None, sizes=1.0):
  """One row, one query at a time; (output, mean attention on each token).

  A query reads the valid keys that are `near[query]`, an array `[L, L]`; a key
  counts as often as its size.
  """
  heads, length, width = query.shape
  out, received = np.zeros(query.shape), np.zeros(length)
  for head, i in np.ndindex(heads, length):
    keys = valid if near is None else valid & near[i]
    if not keys.any():
      continue
    weights = np.exp(key[head] @ query[head, i] / math.sqrt(width)) * sizes
    weights = weights[keys] / weights[keys].sum()
    out[head, i] = weights @ value[head, keys]
    if valid[i]:
      received[keys] += weights / (heads * np.sum(valid))
  return out, received


def attention_by_loop(
  params, x, num_heads, valid=None, turned=lambda x: x, **options
):
  """Multi-head attention of one row, of `turned` queries and keys."""
  valid = np.ones(len(x), bool) if valid is None else valid
  query, key, value = (
    dense(params[name], x).reshape(len(x), num_heads, -1).swapaxes(0, 1)
    for name in ('query', 'key', 'value')
  )
  query, key = turned(query), turned(key)
  out, received = attend_by_loop(query, key, value, valid, **options)
  return dense(params['out'], out.swapaxes(0, 1).reshape(x.shape)), received


def block_by_loop(params, x, num_heads, epsilon, activation=gelu):
  """One row of valid tokens through a post-LN block; also what it received."""
  attended, received = attention_by_loop(params['attention'], x, num_heads)
  x = layer_norm(params['attention_norm'], x + attended, epsilon)
  out = mlp(params['mlp'], x, activation)
  return layer_norm(params['mlp_norm'], x + out, epsilon), received


def classifier_by_loop(params, tokens, types, epsilon=1e-12, pool=np.tanh):
  """Logits of one row without padding, in float64."""
  params = float64(params)
  tables = params['embeddings']
  x = tables['word']['embedding'][tokens]
  if 'token_type' in tables:
    x = x + tables['token_type']['embedding'][types]
  x = x + tables['position']['embedding'][: len(tokens)]
  x = layer_norm(tables['norm'], x, epsilon)
  for index in range(TINY['depth']):
    x, _ = block_by_loop(params[f'block_{index}'], x, 4, epsilon)
  return dense(params['head'], pool(dense(params['pooler'], x[0])))
