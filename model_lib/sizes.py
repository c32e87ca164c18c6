"""Sizes of published models by name, and types of common model fields."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from core.errors import ConfigError

Rate = Annotated[float, Interval(ge=0.0, le=0.99)]
# A field that `Sizes.complete` sets at construction if it is None.
if TYPE_CHECKING:
  Size = Any
else:
  Size = Annotated[int, Interval(ge=1, le=2**20)] | None


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The named variants of a kind of model."""

  # Fields of the model by name of the variant.
  variants: Mapping[str, Mapping[str, Any]]
  # Every field that a checkpoint determines, with its default.
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  # A name may end in the patch size, as 'B/16'.
  has_patch: bool = False

  def fields(self, variant: str) -> dict[str, Any]:
    """Returns the fields of a variant; raises ConfigError if it is unknown."""
    match = re.fullmatch(r'(.*)/([1-9][0-9]*)', variant)
    if self.has_patch and match:
      return self.fields(match[1]) | {'patch_size': int(match[2])}
    if variant not in self.variants:
      suffix = ", with a patch size as in 'B/16'" if self.has_patch else ''
      expected = f'one of {tuple(self.variants)}{suffix}'
      raise ConfigError('variant', variant, expected)
    return dict(self.variants[variant])

  def complete(self, model: Any) -> None:
    """Sets the sizes of a module that are None from its `variant`.

    Called before the module's own `__post_init__`, while fields can be set.
    Raises ConfigError if a size is missing or num_heads does not divide width.
    """
    preset = self.fields(model.variant) if model.variant else {}
    example = next(iter(self.variants))
    names = [*self.variants[example], *['patch_size'] * self.has_patch]
    for name in names:
      if name not in model.__dataclass_fields__:
        continue  # A model that repeats one block has no depth.
      size = getattr(model, name) or preset.get(name, 0)
      if size < 1:
        expected = f'a positive number, or a variant such as {example!r}'
        raise ConfigError(name, size, expected)
      setattr(model, name, size)
    check_heads(model)


def check_heads(model: Any) -> None:
  """Raises ConfigError unless `num_heads` divides `width`."""
  if model.width % model.num_heads:
    expected = f'a divisor of width {model.width}'
    raise ConfigError('num_heads', model.num_heads, expected)


def table(names: str, **rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
  """Returns the fields of each variant, `mlp_dim` being 4 times the width."""
  return {
    variant: dict(zip(names.split(), row, strict=True))
    | {'mlp_dim': 4 * row[0]}
    for variant, row in rows.items()
  }


# Base and large: Devlin et al. 2019; distil: Sanh et al. 2019; tiny to medium:
# Turc et al. 2019; minilm: Wang et al. 2020.
_BERT = table(
  'width depth num_heads',
  tiny=(128, 2, 2), mini=(256, 4, 4), small=(512, 4, 8), medium=(512, 8, 8),
  minilm=(384, 6, 12), distil=(768, 6, 12), base=(768, 12, 12),
  large=(1024, 24, 16),
)  # fmt: skip
_BERT['distil'] |= {'type_vocab_size': 0, 'pooler_activation': 'relu'}
BERT = Sizes(
  _BERT,
  _BERT['base'] | {
    'vocab_size': 30522, 'max_positions': 512, 'type_vocab_size': 2,
    'activation': 'gelu', 'norm_epsilon': 1e-12, 'pooler_activation': 'tanh',
  },
)  # fmt: skip

# Warner et al. 2024, Table 4.
_MODERN = table(
  'width depth num_heads', base=(768, 22, 12), large=(1024, 28, 16)
)
_MODERN['base']['mlp_dim'], _MODERN['large']['mlp_dim'] = 1152, 2624
MODERN_BERT = Sizes(
  _MODERN,
  _MODERN['base'] | {
    'vocab_size': 50368, 'max_positions': 8192, 'type_vocab_size': 0,
    'activation': 'gelu', 'norm_epsilon': 1e-5, 'pooler_activation': 'gelu',
    'global_every': 3, 'local_window': 128, 'global_base': 160000.0,
    'local_base': 10000.0, 'norm_bias': False, 'attention_bias': False,
    'mlp_bias': False, 'pooler_bias': False, 'pooling': 'cls',
  },
)  # fmt: skip

# Table 1 of the ViT paper; Ti from DeiT (AdaTape's Table 3 prints width 196).
VIT = Sizes(
  table(
    'width depth num_heads',
    Ti=(192, 12, 3), S=(384, 12, 6), B=(768, 12, 12), L=(1024, 24, 16),
  ),
  {
    'width': 768, 'depth': 12, 'num_heads': 12, 'mlp_dim': 3072,
    'patch_size': 16, 'pool': 'cls', 'positions': 'learned',
    'activation': 'gelu',
  },
  has_patch=True,
)  # fmt: skip
