"""Published sizes of ALBERT, and Hugging Face's options and tensors of it.

Lan et al. 2020.
"""

from model_lib.convert_tables import (
  OPTIONS,
  RATES,
  TABLES,
  TYPES,
  Architecture,
  add,
  named,
)
from model_lib.sizes import Sizes, table

# tiny, small and base: Simoulin and Crabbe 2021, Table 1: ALBERT-base with up
# to 6, 12 and 24 iterations; albert_*: Lan et al. 2020, Table 1; micro and mini
# for a laptop.
_VARIANTS = table(
  'width max_iterations num_heads embedding_width',
  micro=(128, 6, 4, 64),
  mini=(256, 12, 4, 128),
  tiny=(768, 6, 12, 128),
  small=(768, 12, 12, 128),
  base=(768, 24, 12, 128),
  albert_base=(768, 12, 12, 128),
  albert_large=(1024, 24, 16, 128),
  albert_xlarge=(2048, 24, 16, 128),
  albert_xxlarge=(4096, 12, 64, 128),
)
SIZES = Sizes(
  _VARIANTS,
  _VARIANTS['albert_base'] | {
    'num_groups': 1, 'inner_group': 1, 'vocab_size': 30000,
    'max_positions': 512, 'type_vocab_size': 2, 'activation': 'gelu_new',
    'norm_epsilon': 1e-12,
  },
)  # fmt: skip

_OPTIONS = OPTIONS | {
  'embedding_size': 'embedding_width', 'num_hidden_layers': 'max_iterations',
  'num_hidden_groups': 'num_groups', 'inner_group_num': 'inner_group',
}  # fmt: skip
ALBERT = Architecture(
  model_type='albert',
  classes={
    'classifier': 'AlbertForSequenceClassification',
    'pretraining': 'AlbertForPreTraining',
  },
  options=_OPTIONS,
  # Absent options mean ALBERT-xxlarge, as in transformers.
  defaults=SIZES.defaults | SIZES.fields('albert_xxlarge'),
  rates=RATES | {'classifier_dropout': 'classifier_dropout_prob'},
  modules=named('embeddings/', 'albert.embeddings', TABLES + TYPES)
  | named(
    'block/',
    'albert.encoder.albert_layer_groups.{outer}.albert_layers.{inner}',
    'attention.query attention.key attention.value attention.dense '
    'attention.LayerNorm ffn ffn_output full_layer_layer_norm',
  )
  | {
    'projection': 'albert.encoder.embedding_hidden_mapping_in',
    'pooler': 'albert.pooler',
    'head': 'classifier',
    'predictions/hidden': 'predictions.dense',
    'predictions/norm': 'predictions.LayerNorm',
    'predictions': 'predictions',
    'sop': 'sop_classifier.classifier',
  },
  tied={
    'predictions.decoder.weight': 'albert.embeddings.word_embeddings.weight',
    'predictions.decoder.bias': 'predictions.bias',
  },
  only={
    'net_structure_type': (0,),
    'gap_size': (0,),
    'num_memory_blocks': (0,),
    'down_scale_factor': (1,),
  },
  outer='num_groups',
  inner='inner_group',
)
add(ALBERT)
