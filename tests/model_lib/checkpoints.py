"""Tiny Hugging Face checkpoints made by hand, and parameters of our models."""

import json

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


def dense(names, outputs, inputs):
  """Shapes of PyTorch's linear layers."""
  return {
    f'{name}.{leaf}': shape
    for name in names.split()
    for leaf, shape in (('weight', (outputs, inputs)), ('bias', (outputs,)))
  }


def norm(names, width):
  return {
    f'{name}.{leaf}': (width,)
    for name in names.split()
    for leaf in ('weight', 'bias')
  }


def layers(prefixes, attention, norms, hidden, out):
  """Shapes of some blocks with the names that Hugging Face gives them."""
  shapes = dense(attention, 8, 8) | norm(norms, 8)
  shapes |= dense(hidden, 12, 8) | dense(out, 8, 12)
  return {
    f'{prefix}.{name}': shape
    for prefix in prefixes
    for name, shape in shapes.items()
  }


def embeddings(prefix, width, types=True):
  names = {'word': 10, 'position': 7} | ({'token_type': 2} if types else {})
  return {
    f'{prefix}.embeddings.{name}_embeddings.weight': (rows, width)
    for name, rows in names.items()
  } | norm(f'{prefix}.embeddings.LayerNorm', width)


SHAPES = {
  **embeddings('bert', 8),
  **layers(
    ('bert.encoder.layer.0', 'bert.encoder.layer.1'),
    'attention.self.query attention.self.key attention.self.value '
    'attention.output.dense',
    'attention.output.LayerNorm output.LayerNorm',
    'intermediate.dense',
    'output.dense',
  ),
  **dense('bert.pooler.dense', 8, 8),
  **dense('classifier', 3, 8),
}
DISTIL_SHAPES = {
  **embeddings('distilbert', 8, types=False),
  **layers(
    ('distilbert.transformer.layer.0', 'distilbert.transformer.layer.1'),
    'attention.q_lin attention.k_lin attention.v_lin attention.out_lin',
    'sa_layer_norm output_layer_norm',
    'ffn.lin1',
    'ffn.lin2',
  ),
  **dense('pre_classifier', 8, 8),
  **dense('classifier', 3, 8),
}
_MODERN_LAYER = {
  'attn.Wqkv': (24, 8), 'attn.Wo': (8, 8), 'mlp.Wi': (24, 8),
  'mlp.Wo': (8, 12), 'mlp_norm': (8,),
}  # fmt: skip
MODERN_SHAPES = {
  **{
    f'model.layers.{layer}.{name}.weight': shape
    for layer in range(2)
    for name, shape in _MODERN_LAYER.items()
  },
  'model.layers.1.attn_norm.weight': (8,),
  'model.embeddings.tok_embeddings.weight': (10, 8),
  'model.embeddings.norm.weight': (8,),
  'model.final_norm.weight': (8,),
  'head.dense.weight': (8, 8),
  'head.norm.weight': (8,),
  **dense('classifier', 3, 8),
}
LAYERS = 'albert.encoder.albert_layer_groups.{}.albert_layers.{}.'
ENCODER = {
  **embeddings('albert', 6),
  **dense('albert.encoder.embedding_hidden_mapping_in', 8, 6),
  **layers(
    [LAYERS.format(group, inner)[:-1] for group in (0, 1) for inner in (0, 1)],
    'attention.query attention.key attention.value attention.dense',
    'attention.LayerNorm full_layer_layer_norm',
    'ffn',
    'ffn_output',
  ),
  **dense('albert.pooler', 8, 8),
}
CLASSIFIER = ENCODER | dense('classifier', 3, 8)
PRETRAINING = ENCODER | {
  'predictions.bias': (10,),
  **norm('predictions.LayerNorm', 6),
  **dense('predictions.dense', 6, 8),
  **dense('sop_classifier.classifier', 2, 8),
}
DECODER = 'predictions.decoder.weight'
TABLE = 'albert.embeddings.word_embeddings.weight'
# Kind: (model type, heads, config.json, fields, shapes of the tensors).
KINDS = {
  'bert': ('bert', 'classifier', CONFIG, FIELDS, SHAPES),
  'distilbert': (
    'distilbert', 'classifier', DISTIL_CONFIG, DISTIL, DISTIL_SHAPES
  ),
  'albert': ('albert', 'classifier', ALBERT_CONFIG, ALBERT, CLASSIFIER),
  'modernbert': (
    'modernbert', 'classifier', MODERN_CONFIG, MODERN, MODERN_SHAPES
  ),
  'pretraining': ('albert', 'pretraining', ALBERT_CONFIG, ALBERT, PRETRAINING),
}  # fmt: skip


def random_tensors(shapes=SHAPES):
  """Values that float16 and bfloat16 hold exactly."""
  generator = np.random.default_rng(0)
  return {
    name: (generator.integers(-128, 128, shape) / 128).astype(np.float32)
    for name, shape in shapes.items()
  }


def write_file(path, tensors):
  tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
  path.write_bytes(safetensors.numpy.save(tensors, metadata={'format': 'pt'}))


def write(directory, tensors=None, kind='bert', **config):
  """A checkpoint by hand; returns its tensors."""
  _, _, options, _, shapes = KINDS[kind]
  tensors = random_tensors(shapes) if tensors is None else tensors
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
