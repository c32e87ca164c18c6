"""Tiny Hugging Face checkpoints made by hand, and parameters of our models."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from albert_act import published
from albert_act.model import AlbertClassifier, AlbertPretraining
from halting.token_rules import Fixed
from model_lib import convert_tables
from model_lib.bert import BertClassifier
from model_lib.modern_bert import ModernBertClassifier
from tests.model_lib import plain

_COMMON = {
  'width': 8, 'mlp_dim': 12, 'num_heads': 2, 'vocab_size': 10,
  'max_positions': 7,
}  # fmt: skip
FIELDS = convert_tables.BERT.defaults | _COMMON | {'depth': 2}
DISTIL = FIELDS | {'type_vocab_size': 0, 'pooler_activation': 'relu'}
ALBERT = published.ALBERT.defaults | _COMMON | {
  'embedding_width': 6, 'max_iterations': 5, 'num_groups': 2, 'inner_group': 2,
}  # fmt: skip
MODERN = convert_tables.MODERN_BERT.defaults | _COMMON | {'depth': 2}
_OPTIONS = {
  'hidden_size': 8, 'intermediate_size': 12, 'num_attention_heads': 2,
  'vocab_size': 10, 'max_position_embeddings': 7,
}  # fmt: skip
CONFIG = {'model_type': 'bert', 'num_hidden_layers': 2} | _OPTIONS
DISTIL_CONFIG = {
  'model_type': 'distilbert', 'dim': 8, 'n_layers': 2, 'hidden_dim': 12,
  'n_heads': 2, 'vocab_size': 10, 'max_position_embeddings': 7,
}  # fmt: skip
ALBERT_CONFIG = _OPTIONS | {
  'model_type': 'albert', 'embedding_size': 6, 'num_hidden_layers': 5,
  'num_hidden_groups': 2, 'inner_group_num': 2,
}  # fmt: skip
MODERN_CONFIG = _OPTIONS | {
  'model_type': 'modernbert', 'num_hidden_layers': 2,
  'global_attn_every_n_layers': 3, 'global_rope_theta': 160000.0,
}  # fmt: skip


# Shapes of the tensors that `transformers` writes of each kind, by name.
SHAPES = json.loads(
  pathlib.Path(__file__).with_name('transformers.json').read_bytes()
)
DECODER = 'predictions.decoder.weight'
TABLE = 'albert.embeddings.word_embeddings.weight'
# Kind: (model type, heads, config.json, fields).
KINDS = {
  'bert': ('bert', 'classifier', CONFIG, FIELDS),
  'distilbert': ('distilbert', 'classifier', DISTIL_CONFIG, DISTIL),
  'albert': ('albert', 'classifier', ALBERT_CONFIG, ALBERT),
  'modernbert': ('modernbert', 'classifier', MODERN_CONFIG, MODERN),
  'pretraining': ('albert', 'pretraining', ALBERT_CONFIG, ALBERT),
}


def random_tensors(kind='bert'):
  """Values that float16 and bfloat16 hold exactly."""
  generator = np.random.default_rng(0)
  return {
    name: (generator.integers(-128, 128, shape) / 128).astype(np.float32)
    for name, shape in SHAPES[kind].items()
  }


def write_file(path, tensors):
  tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
  path.write_bytes(safetensors.numpy.save(tensors, metadata={'format': 'pt'}))


def write(directory, tensors=None, kind='bert', **config):
  """A checkpoint by hand; returns its tensors."""
  options = KINDS[kind][2]
  tensors = random_tensors(kind) if tensors is None else tensors
  write_file(directory / 'model.safetensors', tensors)
  (directory / 'config.json').write_text(json.dumps(options | config))
  return tensors


def shard(directory, **weight_map):
  """The hand-made checkpoint in two files with an index."""
  tensors = write(directory)
  (directory / 'model.safetensors').unlink()
  names = list(tensors)
  files = {
    'model-00001-of-00002.safetensors': names[:9],
    'model-00002-of-00002.safetensors': names[9:],
  }
  for file, part in files.items():
    write_file(directory / file, {name: tensors[name] for name in part})
  index = {name: file for file, part in files.items() for name in part}
  text = json.dumps({'metadata': {}, 'weight_map': index | weight_map})
  (directory / 'model.safetensors.index.json').write_text(text)


def model_of(kind, num_classes, fields):
  """Our model of a kind, and inputs of one row."""
  row, length = jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4)
  if kind == 'pretraining':
    model = AlbertPretraining(rule=Fixed(), **fields)
    return model, (row, row, length, row[:, :1])
  if kind == 'albert':
    fields = {'rule': Fixed()} | fields
  others = {'albert': AlbertClassifier, 'modernbert': ModernBertClassifier}
  classifier = others.get(kind, BertClassifier)
  return classifier(num_classes=num_classes, **fields), (row, row, length)


def fresh_params(kind='bert', num_classes=3, fields=None):
  """Random parameters of our model."""
  model, inputs = model_of(kind, num_classes, fields or KINDS[kind][3])
  return plain.noise(model, *inputs, scale=0.3, seed=1)


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
