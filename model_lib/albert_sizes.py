"""Sizes of ALBERT by name, and what a checkpoint determines."""

import dataclasses
from typing import Any

from model_lib.sizes import look_up, sizes_of_variant


@dataclasses.dataclass(frozen=True)
class AlbertSizes:
  """Sizes of an encoder whose layers share their weights.

  Attributes:
    width: of the tokens.
    embedding_width: of the embeddings, which are projected to `width`.
    max_iterations: applications of a layer: all of them at a fixed depth, at
      most so many with halting.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
  """

  width: int
  embedding_width: int
  max_iterations: int
  mlp_dim: int
  num_heads: int


def _sizes(
  width: int, max_iterations: int, num_heads: int, embedding_width: int = 128
) -> dict[str, Any]:
  return dataclasses.asdict(
    AlbertSizes(width, embedding_width, max_iterations, 4 * width, num_heads)
  )


# tiny, small and base: Simoulin and Crabbe 2021, Table 1, which are ALBERT-base
# with up to 6, 12 and 24 iterations; albert_*: Lan et al. 2020, Table 1; micro
# and mini are ours, for a laptop.
VARIANTS: dict[str, dict[str, Any]] = {
  'micro': _sizes(128, 6, 4, embedding_width=64),
  'mini': _sizes(256, 12, 4),
  'tiny': _sizes(768, 6, 12),
  'small': _sizes(768, 12, 12),
  'base': _sizes(768, 24, 12),
  'albert_base': _sizes(768, 12, 12),
  'albert_large': _sizes(1024, 24, 16),
  'albert_xlarge': _sizes(2048, 24, 16),
  'albert_xxlarge': _sizes(4096, 12, 64),
}
# The fields that a checkpoint determines, with the values of ALBERT-base; what
# Hugging Face's configuration has by default is in `model_lib.huggingface`.
DEFAULTS: dict[str, Any] = VARIANTS['albert_base'] | {
  'num_groups': 1,
  'inner_group': 1,
  'vocab_size': 30000,
  'max_positions': 512,
  'type_vocab_size': 2,
  'activation': 'gelu_new',
  'norm_epsilon': 1e-12,
}


def decode_variant(variant: str) -> dict[str, Any]:
  """The sizes of a variant.

  Raises:
    ValueError: if the variant is unknown.
  """
  return look_up(VARIANTS, variant)


def resolve_sizes(variant: str, **explicit: int) -> AlbertSizes:
  """Sizes of a variant, overridden by the explicit ones that are not 0.

  Args:
    variant: for example 'base'; '' if every size is explicit.
    **explicit: fields of `AlbertSizes`; 0 means as in the variant.

  Raises:
    ValueError: if a size is given by neither, or is negative.
  """
  return sizes_of_variant(
    AlbertSizes, decode_variant, variant, explicit, example='base'
  )
