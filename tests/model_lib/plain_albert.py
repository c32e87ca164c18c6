"""ALBERT once more in plain NumPy and float64, one row without padding."""

import jax
import numpy as np

from tests.model_lib.plain_bert import block_by_loop, dense, gelu, layer_norm


def gelu_by_tanh(x):
  return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
  'gelu': gelu,
  'gelu_new': gelu_by_tanh,
  'relu': lambda x: np.maximum(x, 0),
  'silu': lambda x: x / (1 + np.exp(-x)),
  'tanh': np.tanh,
}


def float64(params):
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def blocks_of_iterations(fields):
  """The numbers of the blocks in the order in which a token meets them."""
  share = fields['max_iterations'] / fields['num_groups']
  inner = fields['inner_group']
  return [
    int(iteration / share) * inner + step
    for iteration in range(fields['max_iterations'])
    for step in range(inner)
  ]


def states_by_loop(params, tokens, types, fields):
  """States [L, D] after the last iteration."""
  params, epsilon = float64(params), fields['norm_epsilon']
  tables = params['embeddings']
  x = tables['word']['embedding'][tokens]
  x = x + tables['token_type']['embedding'][types]
  x = x + tables['position']['embedding'][: len(tokens)]
  x = dense(params['projection'], layer_norm(tables['norm'], x, epsilon))
  activation = ACTIVATIONS[fields['activation']]
  for block in blocks_of_iterations(fields):
    x, _ = block_by_loop(
      params[f'block_{block}'], x, fields['num_heads'], epsilon, activation
    )
  return x


def pooled_by_loop(params, states):
  return np.tanh(dense(float64(params['pooler']), states[0]))


def class_logits_by_loop(params, states):
  return dense(float64(params['head']), pooled_by_loop(params, states))


def order_logits_by_loop(params, states):
  return dense(float64(params['sop']), pooled_by_loop(params, states))


def word_logits_by_loop(params, states, fields):
  """Logits [L, V] of the words, by the table that embeds them."""
  params = float64(params)
  head = params['predictions']
  hidden = ACTIVATIONS[fields['activation']](dense(head['hidden'], states))
  hidden = layer_norm(head['norm'], hidden, fields['norm_epsilon'])
  return hidden @ params['embeddings']['word']['embedding'].T + head['bias']
