"""Tables of Hugging Face's encoders of texts: options and tensors.

BERT (Devlin et al. 2019), DistilBERT (Sanh et al. 2019), RoBERTa (Liu et al.
2019), XLM-R (Conneau et al. 2020), which has its tensors, and ModernBERT
(Warner et al. 2024). A family adds its own by `add`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from core.errors import ConfigError, check_option
from model_lib import sizes

# Modules of the embeddings and of every block, in the order of `named`.
_MODULES = {
  'embeddings/': 'word position norm token_type',
  'block/': 'attention/query attention/key attention/value attention/out '
  'attention_norm mlp/hidden mlp/out mlp_norm mlp/gated',
}
# Modules after the encoder.
HEADS = {'classifier': ('head',), 'pretraining': ('predictions', 'sop')}
# Parameters of modules that are neither a norm nor a dense layer.
_LEAVES = dict.fromkeys(
  ('embeddings/word', 'embeddings/position', 'embeddings/token_type'),
  ('embedding',),
) | {'predictions': ('bias',)}


def places(modules: Mapping[str, str], is_torch: bool = True) -> dict[str, str]:
  """Returns our parameter of each tensor of modules, ours to theirs.

  PyTorch's leaves are 'weight' and 'bias'; Flax has ours.
  """
  parameters = {}
  for ours, theirs in modules.items():
    first = 'scale' if ours.endswith('norm') else 'kernel'
    for leaf in _LEAVES.get(ours, (first, 'bias')):
      name = '.bias' if leaf == 'bias' else '.weight'
      tensor = theirs + (name if is_torch else f'/{leaf}')
      parameters[tensor] = f'{ours}/{leaf}'
  return parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """A `model_type` of Hugging Face."""

  model_type: str
  classes: Mapping[str, str]  # of transformers, by legal values of `heads`
  options: Mapping[str, str]  # our field of each option of config.json
  defaults: Mapping[str, Any]  # of all fields, when an option is absent
  rates: Mapping[str, str]  # the option of each dropout rate
  # Hugging Face's name of each module; `{outer}` and `{inner}` number the
  # blocks, `#0`, `#1` are equal parts of one tensor.
  modules: Mapping[str, str]
  # That a published encoder may lack; `model_type` if it is empty.
  prefix: str = ''
  joined: Mapping[str, int] = dataclasses.field(default_factory=dict)  # parts
  # Parameters (patterns) that exist only if a field is true; '' for never.
  only_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Returns config.json, which was read from a path, with the options above.
  read: Callable[[dict[str, Any], str], dict[str, Any]] = lambda c, path: c
  # Tied tensor -> the tensor that is loaded, which it must equal.
  tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Other options that change the computation, and their supported values.
  only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  # Field with the number of layers, or of groups, and of blocks in each.
  outer: str = 'depth'
  inner: str = ''
  unread: int = 0  # rows of the table of positions before that of a first token

  def places(self, fields: Mapping[str, Any], heads: str) -> dict[str, str]:
    """Returns our parameter of each tensor, by its full name."""
    inner = fields[self.inner] if self.inner else 1
    other_heads = {name for key in HEADS if key != heads for name in HEADS[key]}
    modules = {}
    for ours, theirs in self.modules.items():
      if ours.partition('/')[0] in other_heads:
        continue
      blocks = fields[self.outer] * inner if ours.startswith('block/') else 1
      for index in range(blocks):
        name = theirs.format(outer=index // inner, inner=index % inner)
        modules[ours.replace('block/', f'block_{index}/')] = name
    return {
      name: ours
      for name, ours in places(modules).items()
      if all(
        fields.get(field) or not re.search(pattern, ours)
        for pattern, field in self.only_with.items()
      )
    }


def named(begin: str, prefix: str, names: str) -> dict[str, str]:
  """Maps our modules that begin with `begin` to `names`, in order."""
  pairs = zip(_MODULES[begin].split(), names.split(), strict=False)
  return {begin + ours: f'{prefix}.{theirs}' for ours, theirs in pairs}


TABLES = 'word_embeddings position_embeddings LayerNorm '
TYPES = 'token_type_embeddings'
OPTIONS = {
  'hidden_size': 'width', 'intermediate_size': 'mlp_dim',
  'num_attention_heads': 'num_heads', 'vocab_size': 'vocab_size',
  'max_position_embeddings': 'max_positions',
  'type_vocab_size': 'type_vocab_size', 'hidden_act': 'activation',
  'layer_norm_eps': 'norm_epsilon',
}  # fmt: skip
# Of transformers' layer_types.
GLOBAL, LOCAL = 'full_attention', 'sliding_attention'
_BASES = {GLOBAL: 'global_rope_theta', LOCAL: 'local_rope_theta'}
_UNSCALED = (None, 'default')
_DISTIL_OPTIONS = {
  'dim': 'width', 'n_layers': 'depth', 'hidden_dim': 'mlp_dim',
  'n_heads': 'num_heads', 'vocab_size': 'vocab_size',
  'max_position_embeddings': 'max_positions', 'activation': 'activation',
}  # fmt: skip
RATES = {
  'dropout': 'hidden_dropout_prob',
  'attention_dropout': 'attention_probs_dropout_prob',
}

BERT = Architecture(
  model_type='bert',
  classes={'classifier': 'BertForSequenceClassification'},
  options=OPTIONS | {'num_hidden_layers': 'depth'},
  defaults=sizes.BERT.defaults,
  rates=RATES | {'classifier_dropout': 'classifier_dropout'},
  modules=named('embeddings/', 'bert.embeddings', TABLES + TYPES)
  | named(
    'block/',
    'bert.encoder.layer.{outer}',
    'attention.self.query attention.self.key attention.self.value '
    'attention.output.dense attention.output.LayerNorm intermediate.dense '
    'output.dense output.LayerNorm',
  )
  | {'pooler': 'bert.pooler.dense', 'head': 'classifier'},
)
DISTILBERT = Architecture(
  model_type='distilbert',
  classes={'classifier': 'DistilBertForSequenceClassification'},
  options=_DISTIL_OPTIONS,
  defaults=sizes.BERT.defaults | sizes.BERT.fields('distil'),
  rates={
    'dropout': 'dropout',
    'attention_dropout': 'attention_dropout',
    'classifier_dropout': 'seq_classif_dropout',
  },
  modules=named('embeddings/', 'distilbert.embeddings', TABLES)
  | named(
    'block/',
    'distilbert.transformer.layer.{outer}',
    'attention.q_lin attention.k_lin attention.v_lin attention.out_lin '
    'sa_layer_norm ffn.lin1 ffn.lin2 output_layer_norm',
  )
  | {'pooler': 'pre_classifier', 'head': 'classifier'},
)


def _positions(config: dict[str, Any], path: str) -> dict[str, Any]:
  """Returns RoBERTa's options without the positions that no token has."""
  option = 'max_position_embeddings'
  count, least = config.get(option, 512), ROBERTA.unread + 1
  if type(count) is not int or count < least:
    expected = f'an integer, at least {least}'
    raise ConfigError(f'{path}: {option}', count, expected)
  return config | {option: count - ROBERTA.unread}


# Read as a BERT, and saved as one.
ROBERTA = dataclasses.replace(
  BERT,
  model_type='roberta',
  defaults=sizes.BERT.defaults | {'vocab_size': 50265},
  modules={
    ours: theirs.replace('bert.', 'roberta.', 1)
    for ours, theirs in BERT.modules.items()
  }
  | {'pooler': 'classifier.dense', 'head': 'classifier.out_proj'},
  prefix='roberta.',
  read=_positions,
  unread=2,  # padding has the second
  only={'pad_token_id': (1,)},  # positions start after it
)
XLM_ROBERTA = dataclasses.replace(
  ROBERTA, model_type='xlm-roberta', defaults=sizes.BERT.defaults
)


def _older(config: dict[str, Any], path: str) -> dict[str, Any]:
  """Returns ModernBERT's options of transformers 4; 5 groups them by layer."""
  config = dict(config)
  if (kinds := config.get('layer_types')) is not None:
    count = len(kinds) if isinstance(kinds, list) else 0
    patterns = (
      (n, [GLOBAL if i % n == 0 else LOCAL for i in range(count)])
      for n in range(1, count + 1)
    )
    every = next((n for n, layers in patterns if layers == kinds), 0)
    if not every:
      expected = f'{GLOBAL!r} of the first layer and every n-th, else {LOCAL!r}'
      raise ConfigError(f'{path}: layer_types', kinds, expected)
    config['global_attn_every_n_layers'] = every
  groups = config.get('rope_parameters') or {}
  for kind, option in _BASES.items():
    rope = (groups.get(kind) or {}) if isinstance(groups, dict) else None
    if not isinstance(rope, dict) or rope.get('rope_type') not in _UNSCALED:
      expected = "an object of objects with rope_theta and rope_type 'default'"
      raise ConfigError(f'{path}: rope_parameters', groups, expected)
    if 'rope_theta' in rope:
      config[option] = rope['rope_theta']
  return config


MODERN_BERT = Architecture(
  model_type='modernbert',
  classes={'classifier': 'ModernBertForSequenceClassification'},
  options={
    'hidden_size': 'width', 'intermediate_size': 'mlp_dim',
    'num_hidden_layers': 'depth', 'num_attention_heads': 'num_heads',
    'vocab_size': 'vocab_size', 'max_position_embeddings': 'max_positions',
    'hidden_activation': 'activation', 'norm_eps': 'norm_epsilon',
    'classifier_activation': 'pooler_activation',
    'global_attn_every_n_layers': 'global_every',
    'local_attention': 'local_window', 'global_rope_theta': 'global_base',
    'local_rope_theta': 'local_base', 'norm_bias': 'norm_bias',
    'attention_bias': 'attention_bias', 'mlp_bias': 'mlp_bias',
    'classifier_bias': 'pooler_bias', 'classifier_pooling': 'pooling',
  },
  defaults=sizes.MODERN_BERT.defaults,
  rates={
    'dropout': 'embedding_dropout',
    'attention_dropout': 'attention_dropout',
    'classifier_dropout': 'classifier_dropout',
  },
  modules=named(
    'block/',
    'model.layers.{outer}',
    'attn.Wqkv#0 attn.Wqkv#1 attn.Wqkv#2 attn.Wo attn_norm mlp.Wi#0 mlp.Wo '
    'mlp_norm mlp.Wi#1',
  )
  | {
    'embeddings/word': 'model.embeddings.tok_embeddings',
    'embeddings/norm': 'model.embeddings.norm',
    'norm': 'model.final_norm',
    'pooler/dense': 'head.dense',
    'pooler/norm': 'head.norm',
    'head': 'classifier',
  },
  prefix='model.',
  joined={'Wqkv': 3, 'Wi': 2},
  only_with={
    '^block_0/attention_norm/': '',
    'norm/bias$': 'norm_bias',
    r'/attention/\w+/bias$': 'attention_bias',
    r'/mlp/\w+/bias$': 'mlp_bias',
    '^pooler/dense/bias$': 'pooler_bias',
  },
  only={'rope_scaling': (None,)},
  read=_older,
)  # fmt: skip
_ARCHITECTURES = {
  kind.model_type: kind
  for kind in (BERT, DISTILBERT, ROBERTA, XLM_ROBERTA, MODERN_BERT)
}


def add(architecture: Architecture) -> None:
  """Adds the architecture of a family, which its models import."""
  _ARCHITECTURES[architecture.model_type] = architecture


def find(
  model_type: Any, heads: str = 'classifier', field: str = 'model_type'
) -> Architecture:
  """Returns the architecture of a model type; ConfigError if unknown."""
  check_option(field, model_type, tuple(_ARCHITECTURES))
  architecture = _ARCHITECTURES[model_type]
  check_option('heads', heads, tuple(architecture.classes))
  return architecture
