"""The tables of Hugging Face's BERT and DistilBERT; see `bert.BertClassifier`.

Devlin et al. 2019; Sanh et al. 2019.
"""

from typing import Any

from model_lib.bert_sizes import DEFAULTS, decode_variant
from model_lib.huggingface_tables import Architecture, Module

_EMBEDDINGS = (
  Module(
    'embeddings/word',
    'embeddings.word_embeddings',
    'embedding',
    ('vocab_size', 'width'),
  ),
  Module(
    'embeddings/position',
    'embeddings.position_embeddings',
    'embedding',
    ('max_positions', 'width'),
  ),
  Module('embeddings/norm', 'embeddings.LayerNorm', 'norm', ('width',)),
)
_TOKEN_TYPES = Module(
  'embeddings/token_type',
  'embeddings.token_type_embeddings',
  'embedding',
  ('type_vocab_size', 'width'),
)
_SQUARE = ('width', 'width')
_CLASSIFIER = Module('head', 'classifier', 'dense', ('width', 'num_classes'))
_BERT_BLOCK = (
  Module('attention/query', 'attention.self.query', 'dense', _SQUARE),
  Module('attention/key', 'attention.self.key', 'dense', _SQUARE),
  Module('attention/value', 'attention.self.value', 'dense', _SQUARE),
  Module('attention/out', 'attention.output.dense', 'dense', _SQUARE),
  Module('attention_norm', 'attention.output.LayerNorm', 'norm', ('width',)),
  Module('mlp/hidden', 'intermediate.dense', 'dense', ('width', 'mlp_dim')),
  Module('mlp/out', 'output.dense', 'dense', ('mlp_dim', 'width')),
  Module('mlp_norm', 'output.LayerNorm', 'norm', ('width',)),
)
_DISTILBERT_BLOCK = (
  Module('attention/query', 'attention.q_lin', 'dense', _SQUARE),
  Module('attention/key', 'attention.k_lin', 'dense', _SQUARE),
  Module('attention/value', 'attention.v_lin', 'dense', _SQUARE),
  Module('attention/out', 'attention.out_lin', 'dense', _SQUARE),
  Module('attention_norm', 'sa_layer_norm', 'norm', ('width',)),
  Module('mlp/hidden', 'ffn.lin1', 'dense', ('width', 'mlp_dim')),
  Module('mlp/out', 'ffn.lin2', 'dense', ('mlp_dim', 'width')),
  Module('mlp_norm', 'output_layer_norm', 'norm', ('width',)),
)
_DISTIL: dict[str, Any] = DEFAULTS | decode_variant('distil')

BERT = Architecture(
  model_type='bert',
  options={
    'hidden_size': 'width',
    'num_hidden_layers': 'depth',
    'intermediate_size': 'mlp_dim',
    'num_attention_heads': 'num_heads',
    'vocab_size': 'vocab_size',
    'max_position_embeddings': 'max_positions',
    'type_vocab_size': 'type_vocab_size',
    'hidden_act': 'activation',
    'layer_norm_eps': 'norm_epsilon',
  },
  defaults=DEFAULTS,
  fixed={'pooler_activation': 'tanh'},
  only={},
  rates={
    'dropout': 'hidden_dropout_prob',
    'attention_dropout': 'attention_probs_dropout_prob',
    'classifier_dropout': 'classifier_dropout',
  },
  base=(
    *_EMBEDDINGS,
    _TOKEN_TYPES,
    Module('pooler', 'pooler.dense', 'dense', _SQUARE),
  ),
  stack='encoder.layer.{outer}',
  block=_BERT_BLOCK,
  heads={'classifier': (_CLASSIFIER,)},
  classes={'classifier': 'BertForSequenceClassification'},
)

DISTILBERT = Architecture(
  model_type='distilbert',
  options={
    'dim': 'width',
    'n_layers': 'depth',
    'hidden_dim': 'mlp_dim',
    'n_heads': 'num_heads',
    'vocab_size': 'vocab_size',
    'max_position_embeddings': 'max_positions',
    'activation': 'activation',
  },
  defaults=_DISTIL,
  fixed={
    name: _DISTIL[name]
    for name in ('type_vocab_size', 'norm_epsilon', 'pooler_activation')
  },
  only={},
  rates={
    'dropout': 'dropout',
    'attention_dropout': 'attention_dropout',
    'classifier_dropout': 'seq_classif_dropout',
  },
  base=_EMBEDDINGS,
  stack='transformer.layer.{outer}',
  block=_DISTILBERT_BLOCK,
  heads={
    'classifier': (
      Module('pooler', 'pre_classifier', 'dense', _SQUARE),
      _CLASSIFIER,
    )
  },
  classes={'classifier': 'DistilBertForSequenceClassification'},
)
