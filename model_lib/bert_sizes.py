"""Sizes of the published BERTs by name, and what a checkpoint determines."""

import dataclasses
from typing import Any

from model_lib.sizes import look_up, sizes_of_variant


@dataclasses.dataclass(frozen=True)
class BertSizes:
  """Sizes of an encoder; `mlp_dim` is the hidden width of its networks."""

  width: int
  depth: int
  mlp_dim: int
  num_heads: int


def _sizes(width: int, depth: int, num_heads: int) -> dict[str, Any]:
  return dataclasses.asdict(BertSizes(width, depth, 4 * width, num_heads))


# Base and large: Devlin et al. 2019; distil: Sanh et al. 2019; tiny to
# medium: Turc et al. 2019; minilm: Wang et al. 2020.
VARIANTS: dict[str, dict[str, Any]] = {
  'tiny': _sizes(128, 2, 2),
  'mini': _sizes(256, 4, 4),
  'small': _sizes(512, 4, 8),
  'medium': _sizes(512, 8, 8),
  'minilm': _sizes(384, 6, 12),
  'distil': _sizes(768, 6, 12)
  | {'type_vocab_size': 0, 'pooler_activation': 'relu'},
  'base': _sizes(768, 12, 12),
  'large': _sizes(1024, 24, 16),
}
# The fields that a checkpoint determines, with the values of BERT-base.
DEFAULTS: dict[str, Any] = VARIANTS['base'] | {
  'vocab_size': 30522,
  'max_positions': 512,
  'type_vocab_size': 2,
  'activation': 'gelu',
  'norm_epsilon': 1e-12,
  'pooler_activation': 'tanh',
}


def decode_variant(variant: str) -> dict[str, Any]:
  """The sizes of a variant, and its other fields that are not `DEFAULTS`.

  Raises:
    ValueError: if the variant is unknown.
  """
  return look_up(VARIANTS, variant)


def resolve_sizes(variant: str, **explicit: int) -> BertSizes:
  """Sizes of a variant, overridden by the explicit ones that are not 0.

  Args:
    variant: for example 'base'; '' if every size is explicit.
    **explicit: fields of `BertSizes`; 0 means as in the variant.

  Raises:
    ValueError: if a size is given by neither, or is negative.
  """
  return sizes_of_variant(
    BertSizes, decode_variant, variant, explicit, example='base'
  )
