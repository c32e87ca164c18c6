"""A tiny Hugging Face ALBERT by hand: its files, and parameters of ours."""

import json

import numpy as np

from model_lib import convert_tables
from tests.model_lib.handmade import random_tensors, write_file

FIELDS = convert_tables.ALBERT.defaults | {
  'width': 8,
  'embedding_width': 6,
  'max_iterations': 5,
  'num_groups': 2,
  'inner_group': 2,
  'mlp_dim': 12,
  'num_heads': 2,
  'vocab_size': 10,
  'max_positions': 7,
}
CONFIG = {
  'model_type': 'albert',
  'hidden_size': 8,
  'embedding_size': 6,
  'num_hidden_layers': 5,
  'num_hidden_groups': 2,
  'inner_group_num': 2,
  'intermediate_size': 12,
  'num_attention_heads': 2,
  'vocab_size': 10,
  'max_position_embeddings': 7,
}
# Names of Hugging Face with the shapes that PyTorch gives them.
LAYER = {
  'full_layer_layer_norm.weight': (8,),
  'full_layer_layer_norm.bias': (8,),
  'attention.query.weight': (8, 8),
  'attention.query.bias': (8,),
  'attention.key.weight': (8, 8),
  'attention.key.bias': (8,),
  'attention.value.weight': (8, 8),
  'attention.value.bias': (8,),
  'attention.dense.weight': (8, 8),
  'attention.dense.bias': (8,),
  'attention.LayerNorm.weight': (8,),
  'attention.LayerNorm.bias': (8,),
  'ffn.weight': (12, 8),
  'ffn.bias': (12,),
  'ffn_output.weight': (8, 12),
  'ffn_output.bias': (8,),
}
LAYERS = 'albert.encoder.albert_layer_groups.{}.albert_layers.{}.'
ENCODER = {
  'albert.embeddings.word_embeddings.weight': (10, 6),
  'albert.embeddings.position_embeddings.weight': (7, 6),
  'albert.embeddings.token_type_embeddings.weight': (2, 6),
  'albert.embeddings.LayerNorm.weight': (6,),
  'albert.embeddings.LayerNorm.bias': (6,),
  'albert.encoder.embedding_hidden_mapping_in.weight': (8, 6),
  'albert.encoder.embedding_hidden_mapping_in.bias': (8,),
  **{
    LAYERS.format(group, inner) + name: shape
    for group in (0, 1)
    for inner in (0, 1)
    for name, shape in LAYER.items()
  },
  'albert.pooler.weight': (8, 8),
  'albert.pooler.bias': (8,),
}
CLASSIFIER = ENCODER | {'classifier.weight': (3, 8), 'classifier.bias': (3,)}
PRETRAINING = ENCODER | {
  'predictions.bias': (10,),
  'predictions.LayerNorm.weight': (6,),
  'predictions.LayerNorm.bias': (6,),
  'predictions.dense.weight': (6, 8),
  'predictions.dense.bias': (6,),
  'sop_classifier.classifier.weight': (2, 8),
  'sop_classifier.classifier.bias': (2,),
}
TABLE = 'albert.embeddings.word_embeddings.weight'


def write(directory, tensors=None, shapes=CLASSIFIER, **config):
  """A checkpoint by hand; returns its tensors."""
  tensors = random_tensors(shapes) if tensors is None else tensors
  write_file(directory / 'model.safetensors', tensors)
  (directory / 'config.json').write_text(json.dumps(CONFIG | config))
  return tensors


def _dense(inputs, outputs):
  return {'kernel': (inputs, outputs), 'bias': (outputs,)}


def _norm(width):
  return {'scale': (width,), 'bias': (width,)}


def param_shapes(fields=FIELDS, num_classes=3, heads='classifier'):
  """The nested shapes of the parameters, written down by hand."""
  width, narrow = fields['width'], fields['embedding_width']
  mlp_dim, words = fields['mlp_dim'], fields['vocab_size']
  shapes = {
    'embeddings': {
      'word': {'embedding': (words, narrow)},
      'position': {'embedding': (fields['max_positions'], narrow)},
      'token_type': {'embedding': (fields['type_vocab_size'], narrow)},
      'norm': _norm(narrow),
    },
    'projection': _dense(narrow, width),
    'pooler': _dense(width, width),
  }
  for block in range(fields['num_groups'] * fields['inner_group']):
    shapes[f'block_{block}'] = {
      'attention': {
        name: _dense(width, width) for name in ('query', 'key', 'value', 'out')
      },
      'attention_norm': _norm(width),
      'mlp': {'hidden': _dense(width, mlp_dim), 'out': _dense(mlp_dim, width)},
      'mlp_norm': _norm(width),
    }
  if heads == 'classifier':
    return shapes | {'head': _dense(width, num_classes)}
  predictions = {
    'hidden': _dense(width, narrow), 'norm': _norm(narrow), 'bias': (words,)
  }  # fmt: skip
  return shapes | {'predictions': predictions, 'sop': _dense(width, 2)}


def fresh_params(fields=FIELDS, num_classes=3, heads='classifier'):
  """Random parameters of these shapes."""
  generator = np.random.default_rng(1)

  def draw(shapes):
    if isinstance(shapes, tuple):
      return 0.3 * generator.normal(size=shapes).astype(np.float32)
    return {name: draw(part) for name, part in shapes.items()}

  return draw(param_shapes(fields, num_classes, heads))
