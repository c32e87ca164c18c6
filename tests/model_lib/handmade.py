"""Tiny Hugging Face checkpoints made by hand, and parameters of our models."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from model_lib import bert, sizes

FIELDS = sizes.BERT.defaults | {
  'width': 8,
  'depth': 2,
  'mlp_dim': 12,
  'num_heads': 2,
  'vocab_size': 10,
  'max_positions': 7,
}
DISTIL = FIELDS | {'type_vocab_size': 0, 'pooler_activation': 'relu'}
CONFIG = {
  'model_type': 'bert',
  'hidden_size': 8,
  'num_hidden_layers': 2,
  'intermediate_size': 12,
  'num_attention_heads': 2,
  'vocab_size': 10,
  'max_position_embeddings': 7,
}
# Names of Hugging Face with the shapes that PyTorch gives them.
LAYER = {
  'attention.self.query.weight': (8, 8),
  'attention.self.query.bias': (8,),
  'attention.self.key.weight': (8, 8),
  'attention.self.key.bias': (8,),
  'attention.self.value.weight': (8, 8),
  'attention.self.value.bias': (8,),
  'attention.output.dense.weight': (8, 8),
  'attention.output.dense.bias': (8,),
  'attention.output.LayerNorm.weight': (8,),
  'attention.output.LayerNorm.bias': (8,),
  'intermediate.dense.weight': (12, 8),
  'intermediate.dense.bias': (12,),
  'output.dense.weight': (8, 12),
  'output.dense.bias': (8,),
  'output.LayerNorm.weight': (8,),
  'output.LayerNorm.bias': (8,),
}
SHAPES = {
  'bert.embeddings.word_embeddings.weight': (10, 8),
  'bert.embeddings.position_embeddings.weight': (7, 8),
  'bert.embeddings.token_type_embeddings.weight': (2, 8),
  'bert.embeddings.LayerNorm.weight': (8,),
  'bert.embeddings.LayerNorm.bias': (8,),
  **{f'bert.encoder.layer.0.{name}': shape for name, shape in LAYER.items()},
  **{f'bert.encoder.layer.1.{name}': shape for name, shape in LAYER.items()},
  'bert.pooler.dense.weight': (8, 8),
  'bert.pooler.dense.bias': (8,),
  'classifier.weight': (3, 8),
  'classifier.bias': (3,),
}
DISTIL_LAYER = {
  'attention.q_lin.weight': (8, 8),
  'attention.q_lin.bias': (8,),
  'attention.k_lin.weight': (8, 8),
  'attention.k_lin.bias': (8,),
  'attention.v_lin.weight': (8, 8),
  'attention.v_lin.bias': (8,),
  'attention.out_lin.weight': (8, 8),
  'attention.out_lin.bias': (8,),
  'sa_layer_norm.weight': (8,),
  'sa_layer_norm.bias': (8,),
  'ffn.lin1.weight': (12, 8),
  'ffn.lin1.bias': (12,),
  'ffn.lin2.weight': (8, 12),
  'ffn.lin2.bias': (8,),
  'output_layer_norm.weight': (8,),
  'output_layer_norm.bias': (8,),
}
DISTIL_SHAPES = {
  'distilbert.embeddings.word_embeddings.weight': (10, 8),
  'distilbert.embeddings.position_embeddings.weight': (7, 8),
  'distilbert.embeddings.LayerNorm.weight': (8,),
  'distilbert.embeddings.LayerNorm.bias': (8,),
  **{
    f'distilbert.transformer.layer.{index}.{name}': shape
    for index in (0, 1)
    for name, shape in DISTIL_LAYER.items()
  },
  'pre_classifier.weight': (8, 8),
  'pre_classifier.bias': (8,),
  'classifier.weight': (3, 8),
  'classifier.bias': (3,),
}
DTYPES = {
  'float64': 'F64', 'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16',
  'int64': 'I64',
}  # fmt: skip


def random_tensors(shapes=SHAPES):
  """Values that float16 and bfloat16 hold exactly."""
  generator = np.random.default_rng(0)
  return {
    name: (generator.integers(-128, 128, shape) / 128).astype(np.float32)
    for name, shape in shapes.items()
  }


def write_file(path, tensors):
  """A safetensors file by hand: length of the header, header, data."""
  header, data = {}, b''
  for name, array in tensors.items():
    raw = array.tobytes()
    header[name] = {
      'dtype': DTYPES[str(array.dtype)],
      'shape': list(array.shape),
      'data_offsets': [len(data), len(data) + len(raw)],
    }
    data += raw
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + data)


def write(directory, tensors=None, **config):
  """A checkpoint by hand."""
  tensors = random_tensors() if tensors is None else tensors
  write_file(directory / 'model.safetensors', tensors)
  (directory / 'config.json').write_text(json.dumps(CONFIG | config))
  return tensors


def fresh_params(fields, num_classes=3):
  """Random parameters of our model with these fields."""
  model = bert.BertClassifier(num_classes=num_classes, **fields)
  row, length = jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4)
  shapes = jax.eval_shape(model.init, jax.random.key(0), row, row, length)
  generator = np.random.default_rng(1)
  return jax.tree.map(
    lambda leaf: generator.normal(size=leaf.shape).astype(np.float32),
    nn.unbox(shapes['params']),
  )


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
