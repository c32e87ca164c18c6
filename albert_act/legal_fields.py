"""Which values the fields of an ALBERT may have; see `encoder.Albert`."""

from typing import Any

from dataset_lib.fields import check_field, integer, real
from model_lib import halting
from model_lib.albert_sizes import AlbertSizes
from model_lib.layers import activation_function

HALTING = ('', *halting.RULES)

_RATE = real(0.0, 0.99)
_FIELDS = {
  'num_groups': integer(1, 1000),
  'inner_group': integer(1, 1000),
  'vocab_size': integer(1, 2**24),
  'max_positions': integer(1, 2**20),
  'type_vocab_size': integer(0, 2**20),
  'norm_epsilon': real(1e-30, 1.0),
  'halting_bias': real(-1e3, 1e3),
  'remat_chunk': integer(0, 1000),
  'dropout': _RATE,
  'attention_dropout': _RATE,
  'classifier_dropout': _RATE,
}


def check(model: Any, sizes: AlbertSizes) -> None:
  """Checks the fields one by one, and those that have to fit the sizes.

  Args:
    model: an `encoder.Albert`.
    sizes: what its sizes are.

  Raises:
    ValueError: naming the field, what is legal and what is given.
  """
  if model.halting not in HALTING:
    raise ValueError(
      f'halting: expected one of {HALTING}, got {model.halting!r}'
    )
  halting.rule(model.halting or 'act', model.epsilon)
  activation_function(model.activation)
  for name, field in _FIELDS.items():
    check_field(name, getattr(model, name), field)
  iterations = sizes.max_iterations
  for name, given, fits, expected in (
    ('num_heads', sizes.num_heads, sizes.width % sizes.num_heads == 0,
     f'a divisor of the width {sizes.width}'),
    ('num_groups', model.num_groups, model.num_groups <= iterations,
     f'at most the {iterations} iterations'),
    ('remat_chunk', model.remat_chunk,
     iterations % (model.remat_chunk or 1) == 0,
     f'a divisor of the {iterations} iterations'),
  ):  # fmt: skip
    if not fits:
      raise ValueError(f'{name}: expected {expected}, got {given}')
