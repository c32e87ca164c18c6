"""Compares the inputs and labels of a run, its `DatasetInfo`, with others.

Fields that one side does not know are not compared.
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
ROWS = ('num_examples', 'splits', 'digest')
# Everything but the rows.
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
  """Returns the fields that differ; with `is_copy` also those `data` lacks."""
  different = []
  for field in fields:
    infos: Any = ({**info.preprocessing, **vars(info)} for info in (run, data))
    expected, given = (values.get(field) for values in infos)
    if expected and (given or is_copy) and expected != given:
      if field == 'class_names':
        expected, given = _shown(expected, given), _shown(given, expected)
      if field == 'splits':  # equal numbers of rows do not explain a difference
        keys = [k for k in expected if expected[k] != given.get(k)]
        expected, given = (
          {k: x.get(k) for k in keys} for x in (expected, given)
        )
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

  Rows of texts, which are padded, may be shorter than the run's rows.
  """
  are_padded = run.length_buckets and data.length_buckets
  is_shorter = are_padded and data.input_shape < run.input_shape
  inputs = ('input_key', 'input_dtype') if is_shorter else INPUTS
  check(run, data, (*inputs, *TOKENS), place, whose)
  for field in ('vocab_size', 'token_types'):
    expected, given = getattr(run, field), getattr(data, field)
    if given > expected > 0:
      raise Difference(field, expected, given).error(place, whose)


def check_splits(run: DatasetInfo, data: DatasetInfo) -> None:
  """Raises ConfigError where splits, made of a run's own rows, are others."""
  whose = 'the run has: its rows changed, so that some it was trained on are '
  whose += 'now in other splits. Restore the file, or name new rows by '
  whose += 'dataset=(name=texts,path=FILE) with split=all; '
  whose += 'allow_other_rows=True does not compare'
  check(run, data, ('splits',), 'dataset', whose)


def class_ids(
  run: DatasetInfo,
  data: DatasetInfo,
  place: str = 'dataset',
  whose: str = 'the run has',
) -> Int[np.ndarray, ' C'] | None:
  """Returns the run's id of each class of other data; None if they agree.

  Classes are matched by name, and the data may lack some. Raises ConfigError
  for other kinds or classes, without names for another number of classes.
  """
  check(run, data, ('label_kind',), place, whose)
  if bool(run.max_labels) != bool(data.max_labels):
    difference = Difference('max_labels', run.max_labels, data.max_labels)
    raise difference.error(place, whose)
  theirs, names = run.class_names, data.class_names
  unique = all(len({*each}) == len(each) for each in (theirs, names))
  if names and unique and {*names} <= {*theirs}:
    is_same = names == theirs[: len(names)]
    return None if is_same else np.array([*map(theirs.index, names)], np.int32)
  check(run, data, ('class_names', 'num_classes'), place, whose)
  return None


def order_of_head(theirs: Sequence[str], ours: Sequence[str]) -> Any:
  """Returns the columns of a published head in the order of our classes.

  Raises ValueError where a name has another place, and the order is uncertain.
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


def _shown(names: Sequence[str], others: Sequence[str]) -> str:
  """Returns the number of classes, and some that the others do not have."""
  alone = [name for name in names if name not in {*others}] or [
    one for one, other in zip(names, others, strict=False) if one != other
  ]
  named = ', '.join(map(repr, alone[:SHOWN])) + ', ...' * (len(alone) > SHOWN)
  return f'{len(names)} classes' + f' with {named}' * bool(alone)
