"""The contract of a run: what its inputs and labels are, compared by field.

The data set builds it, as `DatasetInfo`, and the run saves it. Whatever uses
the run passes here: what differs is named, and refused, or mapped where only
one mapping is possible. What one side does not know is not compared.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int

from core.errors import ConfigError
from dataset_lib.source import DatasetInfo

SHOWN = 3  # class names of a message
INPUTS = ('input_key', 'input_shape', 'input_dtype')
SCALING = ('mean', 'std')
LABELS = ('label_kind', 'num_classes', 'class_names')
TOKENS = ('tokenizer', 'truncation_side')  # of `Tokenizer.preprocessing`
PREPARED = ('resize_small', 'crop', *TOKENS)
# Everything but the number of examples.
ALL = (*INPUTS, *SCALING, *PREPARED, 'max_length', 'vocab_size', *LABELS)


class Difference(NamedTuple):
  """A field whose value is not that of the run."""

  field: str
  expected: Any
  given: Any

  def __str__(self) -> str:
    return f'{self.field}: expected {self.expected}, got {self.given}'

  def error(self, place: str, whose: str) -> ConfigError:
    """Returns the error of `place`, such as 'dataset'."""
    expected = f'{self.expected}, as {whose}'
    return ConfigError(f'{place}.{self.field}', self.given, expected)


def differences(
  run: DatasetInfo,
  data: DatasetInfo,
  fields: Collection[str] = ALL,
  is_copy: bool = False,
) -> list[Difference]:
  """Returns the known fields of some data that are not those of a run.

  With `is_copy`, a field that `data` lacks differs, too.
  """
  different = []
  for field in fields:
    expected, given = (_value(info, field) for info in (run, data))
    if expected and (given or is_copy) and expected != given:
      if field == 'class_names':
        expected, given = _shown(expected, given), _shown(given, expected)
      different.append(Difference(field, expected, given))
  return different


def check(
  run: DatasetInfo,
  data: DatasetInfo,
  fields: Collection[str],
  place: str,
  whose: str = 'the run has',
) -> None:
  """Raises ConfigError of `place` for the first field that differs."""
  for one in differences(run, data, fields):
    raise one.error(place, whose)


def check_inputs(
  run: DatasetInfo,
  data: DatasetInfo,
  place: str = 'dataset',
  whose: str = 'the run has',
) -> None:
  """Raises ConfigError unless the model of a run can read the inputs.

  Rows of texts, which are padded, may be shorter than those of the run.
  """
  both = run.length_buckets and data.length_buckets
  if both and data.input_shape < run.input_shape:
    check(run, data, ('input_key', 'input_dtype', *TOKENS), place, whose)
  else:
    check(run, data, (*INPUTS, *TOKENS), place, whose)
  for field in ('vocab_size', 'token_types'):
    expected, given = getattr(run, field), getattr(data, field)
    if given > expected > 0:
      raise Difference(field, expected, given).error(place, whose)


def class_ids(
  run: DatasetInfo,
  data: DatasetInfo,
  place: str = 'dataset',
  whose: str = 'the run has',
) -> Int[np.ndarray, ' C'] | None:
  """Returns the run's id of each class of other data; None if they agree.

  Classes are matched by name, and the data may lack some. Raises ConfigError
  for another kind of labels or a class that the run does not have, and without
  names for another number of classes.
  """
  check(run, data, ('label_kind',), place, whose)
  if bool(run.max_labels) != bool(data.max_labels):
    difference = Difference('max_labels', run.max_labels, data.max_labels)
    raise difference.error(place, whose)
  known, names = run.class_names, data.class_names
  unique = all(len({*one}) == len(one) for one in (known, names))
  if names and unique and {*names} <= {*known}:
    is_same = names == known[: len(names)]
    return None if is_same else np.array([*map(known.index, names)], np.int32)
  check(run, data, ('class_names', 'num_classes'), place, whose)
  return None


def order_of_head(theirs: Sequence[str], ours: Sequence[str]) -> Any:
  """Returns the columns of a published head in the order of our classes.

  Names that only one has are compared with nothing. Raises ValueError where a
  name has another place, and the order is not certain.
  """
  if not theirs or not ours or theirs == ours:
    return slice(None)
  places = {name: place for place, name in enumerate(theirs)}
  if len(places) == len(theirs) and places.keys() == {*ours}:
    return [places[name] for name in ours]
  both = places.keys() & {*ours}
  pairs = zip(theirs, ours, strict=False)
  if all(a == b or both.isdisjoint((a, b)) for a, b in pairs):
    message = 'classes of the head are taken in its order: %r, ... for %r, ...'
    logging.warning(message, theirs[0], ours[0])
    return slice(None)
  expected = f'classes {", ".join(ours[:SHOWN])}, ...'
  skip = 'warm_start.skip=("^head/",) keeps a fresh head'
  raise ValueError(f'its head: expected {expected}, got {theirs[:9]}; {skip}')


def _value(info: DatasetInfo, field: str) -> Any:
  """Returns the value of a field; a false one is unknown."""
  return {**info.preprocessing, **vars(info)}.get(field)


def _shown(names: Sequence[str], others: Sequence[str]) -> str:
  """Returns the number of classes, and some that the others do not have."""
  alone = [name for name in names if name not in {*others}] or [
    one for one, other in zip(names, others, strict=False) if one != other
  ]
  named = ', '.join(map(repr, alone[:SHOWN])) + ', ...' * (len(alone) > SHOWN)
  return f'{len(names)} classes' + f' with {named}' * bool(alone)
