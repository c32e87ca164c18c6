"""Sizes of published models by name, and types of common model fields."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from model_lib.errors import FieldError

Rate = Annotated[float, Interval(ge=0.0, le=0.99)]
# A field that `Sizes.complete` sets at construction if it is None.
if TYPE_CHECKING:
  Size = Any
else:
  Size = Annotated[int, Interval(ge=1, le=2**20)] | None


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The named variants of a kind of model.

  Attributes:
    variants: fields of the model by name of the variant.
    defaults: every field that a checkpoint determines, with its default.
    has_patch: whether a name may end in the patch size, as 'B/16'.
  """

  variants: Mapping[str, Mapping[str, Any]]
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  has_patch: bool = False

  def fields(self, variant: str) -> dict[str, Any]:
    """Returns the fields of a variant.

    Raises:
      FieldError: if the variant is unknown.
    """
    match = re.fullmatch(r'(.*)/([1-9][0-9]*)', variant)
    if self.has_patch and match:
      return self.fields(match[1]) | {'patch_size': int(match[2])}
    if variant not in self.variants:
      suffix = ", with a patch size as in 'B/16'" if self.has_patch else ''
      expected = f'one of {tuple(self.variants)}{suffix}'
      raise FieldError('variant', variant, expected)
    return dict(self.variants[variant])

  def complete(self, model: Any) -> None:
    """Sets the sizes of a module that are None to those of its variant.

    Called before the module's own `__post_init__`, while fields can be set.

    Args:
      model: a Linen module with the fields `variant` and those of a variant.

    Raises:
      FieldError: if a size is given neither by a field nor by the variant, or
        `num_heads` does not divide `width`.
    """
    known = self.fields(model.variant) if model.variant else {}
    example = next(iter(self.variants))
    for name in self.sizes:
      size = getattr(model, name) or known.get(name, 0)
      if size < 1:
        expected = f'a positive number, or a variant such as {example!r}'
        raise FieldError(name, size, expected)
      setattr(model, name, size)
    check_heads(model)

  @property
  def sizes(self) -> tuple[str, ...]:
    """Names of the sizes, which a model cannot be without."""
    names = tuple(next(iter(self.variants.values())))
    return (*names, 'patch_size') if self.has_patch else names


def check_heads(model: Any) -> None:
  """Raises FieldError unless `num_heads` divides `width`."""
  if model.width % model.num_heads:
    expected = f'a divisor of width {model.width}'
    raise FieldError('num_heads', model.num_heads, expected)


def _bert(width: int, depth: int, num_heads: int) -> dict[str, Any]:
  return {
    'width': width,
    'depth': depth,
    'mlp_dim': 4 * width,
    'num_heads': num_heads,
  }


# Base and large: Devlin et al. 2019; distil: Sanh et al. 2019; tiny to medium:
# Turc et al. 2019; minilm: Wang et al. 2020.
_BERT = {
  'tiny': _bert(128, 2, 2),
  'mini': _bert(256, 4, 4),
  'small': _bert(512, 4, 8),
  'medium': _bert(512, 8, 8),
  'minilm': _bert(384, 6, 12),
  'distil': _bert(768, 6, 12)
  | {'type_vocab_size': 0, 'pooler_activation': 'relu'},
  'base': _bert(768, 12, 12),
  'large': _bert(1024, 24, 16),
}
BERT = Sizes(
  _BERT,
  _BERT['base']
  | {
    'vocab_size': 30522,
    'max_positions': 512,
    'type_vocab_size': 2,
    'activation': 'gelu',
    'norm_epsilon': 1e-12,
    'pooler_activation': 'tanh',
  },
)


def _albert(
  width: int, max_iterations: int, num_heads: int, embedding_width: int = 128
) -> dict[str, Any]:
  return {
    'width': width,
    'embedding_width': embedding_width,
    'max_iterations': max_iterations,
    'mlp_dim': 4 * width,
    'num_heads': num_heads,
  }


# tiny, small and base: Simoulin and Crabbe 2021, Table 1: ALBERT-base with up
# to 6, 12 and 24 iterations; albert_*: Lan et al. 2020, Table 1; micro and mini
# for a laptop.
_ALBERT = {
  'micro': _albert(128, 6, 4, embedding_width=64),
  'mini': _albert(256, 12, 4),
  'tiny': _albert(768, 6, 12),
  'small': _albert(768, 12, 12),
  'base': _albert(768, 24, 12),
  'albert_base': _albert(768, 12, 12),
  'albert_large': _albert(1024, 24, 16),
  'albert_xlarge': _albert(2048, 24, 16),
  'albert_xxlarge': _albert(4096, 12, 64),
}
ALBERT = Sizes(
  _ALBERT,
  _ALBERT['albert_base']
  | {
    'num_groups': 1,
    'inner_group': 1,
    'vocab_size': 30000,
    'max_positions': 512,
    'type_vocab_size': 2,
    'activation': 'gelu_new',
    'norm_epsilon': 1e-12,
  },
)

# Table 1 of the ViT paper; Ti from DeiT (AdaTape's Table 3 prints a width of
# 196, which 3 heads do not divide).
VIT = Sizes(
  {
    'Ti': {'width': 192, 'depth': 12, 'mlp_dim': 768, 'num_heads': 3},
    'S': {'width': 384, 'depth': 12, 'mlp_dim': 1536, 'num_heads': 6},
    'B': {'width': 768, 'depth': 12, 'mlp_dim': 3072, 'num_heads': 12},
    'L': {'width': 1024, 'depth': 24, 'mlp_dim': 4096, 'num_heads': 16},
  },
  has_patch=True,
)
