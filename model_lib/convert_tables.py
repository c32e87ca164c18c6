"""Tables of Hugging Face's BERT, DistilBERT and ALBERT: options and tensors.

Devlin et al. 2019; Sanh et al. 2019; Lan et al. 2020. `MODULES` says what each
module of ours holds; an `Architecture` gives Hugging Face's name of each module
and option.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from model_lib import sizes
from model_lib.errors import check_option

# Kind and sizes of each module: fields of the model, 'num_classes' or numbers.
# Kinds: 'embedding' [a, b]; 'dense' [a, b] and bias [b]; 'norm' [a] and bias
# [a]; 'bias' [a]. Paths under 'block' are those of every block.
MODULES = {
  'embeddings/word': 'embedding vocab_size embedding_width',
  'embeddings/position': 'embedding max_positions embedding_width',
  'embeddings/token_type': 'embedding type_vocab_size embedding_width',
  'embeddings/norm': 'norm embedding_width',
  'projection': 'dense embedding_width width',
  'block/attention/query': 'dense width width',
  'block/attention/key': 'dense width width',
  'block/attention/value': 'dense width width',
  'block/attention/out': 'dense width width',
  'block/attention_norm': 'norm width',
  'block/mlp/hidden': 'dense width mlp_dim',
  'block/mlp/out': 'dense mlp_dim width',
  'block/mlp_norm': 'norm width',
  'pooler': 'dense width width',
  'head': 'dense width num_classes',
  'predictions/hidden': 'dense width embedding_width',
  'predictions/norm': 'norm embedding_width',
  'predictions': 'bias vocab_size',
  'sop': 'dense width 2',
}
# Modules after the encoder.
HEADS = {
  'classifier': ('head',),
  'pretraining': (
    'predictions/hidden',
    'predictions/norm',
    'predictions',
    'sop',
  ),
}
_LEAVES = {'embedding': 'embedding', 'dense': 'kernel', 'norm': 'scale'}


class Place(NamedTuple):
  """The parameter that a tensor is loaded into.

  Attributes:
    name: path of the parameter, 'block_0/mlp/out/kernel'.
    shape: shape of the parameter.
  """

  name: str
  shape: tuple[int, ...]

  @property
  def transposed(self) -> bool:
    """True if the tensor is the transpose of the parameter."""
    return self.name.endswith('/kernel')

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of the tensor."""
    return self.shape[::-1] if self.transposed else self.shape


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A `model_type` of Hugging Face.

  Attributes:
    model_type: its name.
    options: our field of each option of config.json.
    defaults: all fields, with the values of absent options.
    rates: the option of each dropout rate.
    classes: the class of transformers for each legal value of `heads`.
    modules: Hugging Face's name of each module; `{outer}` and `{inner}` number
      the blocks. A published encoder may lack the prefix `model_type`.
    fixed: fields without an option, and their values.
    only: options that change the computation, and their supported values.
    tied: tensors that must equal another one, which is loaded.
    outer: the field that counts the blocks.
    inner: the field that counts the blocks of a group; '' for 1.
  """

  model_type: str
  options: Mapping[str, str]
  defaults: Mapping[str, Any]
  rates: Mapping[str, str]
  classes: Mapping[str, str]
  modules: Mapping[str, str]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
  outer: str = 'depth'
  inner: str = ''

  def places(
    self, fields: Mapping[str, Any], num_classes: int, heads: str
  ) -> dict[str, Place]:
    """Returns the place of each tensor by its full name."""
    shapes = {'embedding_width': fields['width'], **fields}
    shapes['num_classes'] = num_classes
    inner = fields[self.inner] if self.inner else 1
    blocks = range(fields[self.outer] * inner)
    others = {name for key in HEADS if key != heads for name in HEADS[key]}
    places: dict[str, Place] = {}
    for ours, theirs in self.modules.items():
      if ours in others:
        continue
      kind, *names = MODULES[ours].split()
      shape = tuple(shapes.get(name) or int(name) for name in names)
      for index in blocks if ours.startswith('block/') else (0,):
        outer, rest = divmod(index, inner)
        path = ours.replace('block/', f'block_{index}/')
        name = theirs.format(outer=outer, inner=rest)
        if kind != 'bias':
          places[f'{name}.weight'] = Place(f'{path}/{_LEAVES[kind]}', shape)
        if kind != 'embedding':
          places[f'{name}.bias'] = Place(f'{path}/bias', shape[-1:])
    return places


def _block(prefix: str, names: str) -> dict[str, str]:
  """Returns Hugging Face's names of a block's modules, in our order."""
  ours = [name for name in MODULES if name.startswith('block/')]
  return {
    name: f'{prefix}.{theirs}'
    for name, theirs in zip(ours, names.split(), strict=True)
  }


def _embeddings(prefix: str, token_types: bool = True) -> dict[str, str]:
  """Returns Hugging Face's names of the embeddings' modules."""
  names = {
    'embeddings/word': f'{prefix}.embeddings.word_embeddings',
    'embeddings/position': f'{prefix}.embeddings.position_embeddings',
    'embeddings/norm': f'{prefix}.embeddings.LayerNorm',
  }
  if token_types:
    types = f'{prefix}.embeddings.token_type_embeddings'
    names['embeddings/token_type'] = types
  return names


_OPTIONS = {
  'hidden_size': 'width',
  'intermediate_size': 'mlp_dim',
  'num_attention_heads': 'num_heads',
  'vocab_size': 'vocab_size',
  'max_position_embeddings': 'max_positions',
  'type_vocab_size': 'type_vocab_size',
  'hidden_act': 'activation',
  'layer_norm_eps': 'norm_epsilon',
}
_RATES = {
  'dropout': 'hidden_dropout_prob',
  'attention_dropout': 'attention_probs_dropout_prob',
}

BERT = Architecture(
  model_type='bert',
  options=_OPTIONS | {'num_hidden_layers': 'depth'},
  defaults=sizes.BERT.defaults,
  fixed={'pooler_activation': 'tanh'},
  rates=_RATES | {'classifier_dropout': 'classifier_dropout'},
  classes={'classifier': 'BertForSequenceClassification'},
  modules=_embeddings('bert')
  | _block(
    'bert.encoder.layer.{outer}',
    'attention.self.query attention.self.key attention.self.value '
    'attention.output.dense attention.output.LayerNorm intermediate.dense '
    'output.dense output.LayerNorm',
  )
  | {'pooler': 'bert.pooler.dense', 'head': 'classifier'},
)
_DISTIL = {**sizes.BERT.defaults} | sizes.BERT.fields('distil')
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
  rates={
    'dropout': 'dropout',
    'attention_dropout': 'attention_dropout',
    'classifier_dropout': 'seq_classif_dropout',
  },
  classes={'classifier': 'DistilBertForSequenceClassification'},
  modules=_embeddings('distilbert', token_types=False)
  | _block(
    'distilbert.transformer.layer.{outer}',
    'attention.q_lin attention.k_lin attention.v_lin attention.out_lin '
    'sa_layer_norm ffn.lin1 ffn.lin2 output_layer_norm',
  )
  | {'pooler': 'pre_classifier', 'head': 'classifier'},
)
ALBERT = Architecture(
  model_type='albert',
  options=_OPTIONS
  | {
    'embedding_size': 'embedding_width',
    'num_hidden_layers': 'max_iterations',
    'num_hidden_groups': 'num_groups',
    'inner_group_num': 'inner_group',
  },
  # Absent options mean ALBERT-xxlarge, as in transformers.
  defaults={**sizes.ALBERT.defaults} | sizes.ALBERT.fields('albert_xxlarge'),
  # Published configurations hold these options with these values.
  only={
    'net_structure_type': (0,),
    'gap_size': (0,),
    'num_memory_blocks': (0,),
    'down_scale_factor': (1,),
  },
  rates=_RATES | {'classifier_dropout': 'classifier_dropout_prob'},
  classes={
    'classifier': 'AlbertForSequenceClassification',
    'pretraining': 'AlbertForPreTraining',
  },
  modules=_embeddings('albert')
  | {
    'projection': 'albert.encoder.embedding_hidden_mapping_in',
    'pooler': 'albert.pooler',
  }
  | _block(
    'albert.encoder.albert_layer_groups.{outer}.albert_layers.{inner}',
    'attention.query attention.key attention.value attention.dense '
    'attention.LayerNorm ffn ffn_output full_layer_layer_norm',
  )
  | {
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
  outer='num_groups',
  inner='inner_group',
)
ARCHITECTURES = {
  architecture.model_type: architecture
  for architecture in (BERT, DISTILBERT, ALBERT)
}


def find(model_type: str, heads: str = 'classifier') -> Architecture:
  """Returns the architecture of a model type with such heads.

  Raises:
    FieldError: if the model type is unknown or has no such heads.
  """
  check_option('model_type', model_type, tuple(ARCHITECTURES))
  architecture = ARCHITECTURES[model_type]
  check_option('heads', heads, tuple(architecture.classes))
  return architecture
