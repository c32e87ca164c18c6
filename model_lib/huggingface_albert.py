"""The table of Hugging Face's ALBERT; see `albert_act.model`.

Lan et al. 2020. The words have an embedding narrower than the tokens, and the
iterations share their parameters: those of the group that iteration i of n
belongs to with g groups, `int(i / (n / g))`, each of which is one block or
several in turn. Block k here is block k % m of group k // m there, of m.
"""

from typing import Any

from model_lib import albert_sizes
from model_lib.huggingface_tables import Architecture, Module

# Absent options mean the sizes of ALBERT-xxlarge, as in transformers.
DEFAULTS: dict[str, Any] = albert_sizes.DEFAULTS | albert_sizes.decode_variant(
  'albert_xxlarge'
)

_SQUARE = ('width', 'width')


def _embedding(ours: str, theirs: str, rows: str) -> Module:
  sizes = (rows, 'embedding_width')
  return Module(
    f'embeddings/{ours}', f'embeddings.{theirs}', 'embedding', sizes
  )


_BASE = (
  _embedding('word', 'word_embeddings', 'vocab_size'),
  _embedding('position', 'position_embeddings', 'max_positions'),
  _embedding('token_type', 'token_type_embeddings', 'type_vocab_size'),
  Module(
    'embeddings/norm', 'embeddings.LayerNorm', 'norm', ('embedding_width',)
  ),
  Module(
    'projection',
    'encoder.embedding_hidden_mapping_in',
    'dense',
    ('embedding_width', 'width'),
  ),
  Module('pooler', 'pooler', 'dense', _SQUARE),
)
_BLOCK = (
  Module('attention/query', 'attention.query', 'dense', _SQUARE),
  Module('attention/key', 'attention.key', 'dense', _SQUARE),
  Module('attention/value', 'attention.value', 'dense', _SQUARE),
  Module('attention/out', 'attention.dense', 'dense', _SQUARE),
  Module('attention_norm', 'attention.LayerNorm', 'norm', ('width',)),
  Module('mlp/hidden', 'ffn', 'dense', ('width', 'mlp_dim')),
  Module('mlp/out', 'ffn_output', 'dense', ('mlp_dim', 'width')),
  Module('mlp_norm', 'full_layer_layer_norm', 'norm', ('width',)),
)
_PREDICTIONS = (
  Module(
    'predictions/hidden',
    'predictions.dense',
    'dense',
    ('width', 'embedding_width'),
  ),
  Module(
    'predictions/norm', 'predictions.LayerNorm', 'norm', ('embedding_width',)
  ),
  Module('predictions', 'predictions', 'bias', ('vocab_size',)),
  Module('sop', 'sop_classifier.classifier', 'dense', ('width', 2)),
)

ALBERT = Architecture(
  model_type='albert',
  options={
    'hidden_size': 'width',
    'embedding_size': 'embedding_width',
    'num_hidden_layers': 'max_iterations',
    'num_hidden_groups': 'num_groups',
    'inner_group_num': 'inner_group',
    'intermediate_size': 'mlp_dim',
    'num_attention_heads': 'num_heads',
    'vocab_size': 'vocab_size',
    'max_position_embeddings': 'max_positions',
    'type_vocab_size': 'type_vocab_size',
    'hidden_act': 'activation',
    'layer_norm_eps': 'norm_epsilon',
  },
  defaults=DEFAULTS,
  fixed={},
  # Published configurations have them, with these values: experiments of the
  # authors that no published code does otherwise.
  only={
    'net_structure_type': (0,),
    'gap_size': (0,),
    'num_memory_blocks': (0,),
    'down_scale_factor': (1,),
  },
  rates={
    'dropout': 'hidden_dropout_prob',
    'attention_dropout': 'attention_probs_dropout_prob',
    'classifier_dropout': 'classifier_dropout_prob',
  },
  base=_BASE,
  stack='encoder.albert_layer_groups.{outer}.albert_layers.{inner}',
  block=_BLOCK,
  heads={
    'classifier': (
      Module('head', 'classifier', 'dense', ('width', 'num_classes')),
    ),
    'pretraining': _PREDICTIONS,
  },
  classes={
    'classifier': 'AlbertForSequenceClassification',
    'pretraining': 'AlbertForPreTraining',
  },
  tied={
    'predictions.decoder.weight': 'embeddings.word_embeddings.weight',
    'predictions.decoder.bias': 'predictions.bias',
  },
  tie_option='tie_word_embeddings',
  outer='num_groups',
  inner='inner_group',
)
