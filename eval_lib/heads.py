"""The base of evaluators of the heads of a classifier."""

import contextlib
import dataclasses
import pathlib
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval, Predicate

from core.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)
from dataset_lib import builder, contract, source, splits
from dataset_lib.texts import Texts
from eval_lib import evaluator
from eval_lib.predictions import Heads, Labels

Layers = Annotated[
  tuple[Annotated[int, Interval(ge=1, le=10_000)], ...],
  Predicate(lambda layers: list(layers) == sorted(set(layers))),
  'ascending layers from 1, one for each head, or () to count the heads',
]


def named(name: str, column: str) -> str:
  """Returns the name of a column's file, such as 'calibration.domain.json'."""
  stem, dot, suffix = name.partition('.')
  return f'{stem}.{column}{dot}{suffix}' if column else name


def inputs_of(rows: source.Source) -> list[bytes]:
  """Returns a checksum of each row's inputs; [] of rows without files."""
  if not rows.HAS_FILES:
    return []
  result = []
  for index in range(len(rows)):
    record: dict[str, Any] = {}
    with contextlib.suppress(BadRecord):
      record = rows.record(index)
    parts = (record[name] for name in sorted({*record} - {'label'}))
    result.append(
      splits.checksum(b''.join(np.array(p).tobytes() for p in parts))
    )
  return result


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Records logits once for all rules, temperatures and thresholds.

  Temperatures are fitted on `calibration_split`; it may share no row with
  `split`, which is reported, or with the training split of the run.
  """

  NEEDS_OUTPUTS: ClassVar[bool] = True
  split: evaluator.Split = 'validation'
  calibration_split: Annotated[
    evaluator.Split | None,
    'the name of a split that training does not use, or None',
  ] = None
  layers: Layers = ()  # of the heads; () for the model's
  # Of a run on several label columns the one that is evaluated: its rows with a
  # label, its logits. Its files are named as `calibration.domain.json`.
  column: str = ''
  # `inputs_of` rows that were checked: of training, of the calibration.
  known: set[bytes] = dataclasses.field(default_factory=set, init=False)
  # Rows of training, or of the calibration, were not found as they were.
  unchecked: bool = dataclasses.field(default=False, init=False)

  def __post_init__(self):
    super().__post_init__()
    self.layers = self.layers or self.context.layers
    info = self.splits['split'].info
    if self.column not in (columns := [*info.tasks] or ['']):
      expected = f'one of {columns}, the label columns of the run'
      raise ConfigError('column', self.column, expected)
    self.classes = info.tasks.get(self.column, slice(0, info.num_classes))
    if info.num_classes < 2 or (info.max_labels and not self.column):
      kind = 'several labels a row' if info.max_labels else 'a regression'
      expected = 'one class a row: others have no single confidence'
      raise ConfigError('dataset', kind, expected)
    if self.calibration_split:
      expected = (
        'rows that `split` does not have, it shares {}: what was fitted cannot '
        'judge itself'
      )
      reported = self.splits['split'].source
      self.check_apart('calibration_split', reported, expected)
      self.check_untrained('calibration_split')

  def file(self, name: str) -> pathlib.Path | None:
    """See the base."""
    return super().file(named(name, self.column))

  def collect(
    self, field: str, variables: Any, outputs: Any, **options: Any
  ) -> dict[str, np.ndarray]:
    """See the base; of a column the rows with a label, and its logits."""
    rows = super().collect(field, variables, outputs, **options)
    if not self.column:
      return rows
    labels = source.labels_of(rows['label'], self.classes)
    self.unlabelled += int((labels < 0).sum())
    if not (labels >= 0).any():
      split = getattr(self, field)
      message = f'no row of {split!r} has a label in {self.column!r}'
      raise InvalidDataError(message)
    logits = rows['logits'][..., self.classes]
    rows |= {'label': labels, 'logits': logits}
    return {name: values[labels >= 0] for name, values in rows.items()}

  def heads(self, field: str, variables: Any) -> tuple[Heads, Labels]:
    """Returns logits and labels of the split that a field names."""
    rows = self.collect(field, variables, self.context.outputs)
    return np.moveaxis(rows['logits'], 1, 0), rows['label']

  def names(self, count: int) -> dict[str, int]:
    """Returns the layer of each head, `layer_4: 4`; without `head_1: 1`.

    Raises ConfigError if there are more or fewer layers than heads.
    """
    if self.layers and len(self.layers) != count:
      expected = f'{count} layers, one for each head of the model'
      raise ConfigError('layers', tuple(self.layers), expected)
    kind = 'layer' if self.layers else 'head'
    return {f'{kind}_{n}': n for n in self.layers or range(1, count + 1)}

  def check_untrained(self, field: str) -> None:
    """Raises ConfigError if the run is trained on rows of a field's split."""
    train_split = self.context.train_split
    # The training split is read only if the names do not decide it: other names
    # than 'train' may mean the same rows, as dev and validation, or 'all'.
    trained, evaluated = (
      {part.name for part in source.parts(split)}
      for split in (train_split, getattr(self, field))
    )
    may_share = trained != {'train'} or bool(evaluated & {'train', 'all'})
    # Files of a user may have copies, which their places do not tell.
    own = self.splits[field].source
    may_share |= field == 'split' and isinstance(own, Texts)
    if not train_split or not may_share:
      return
    try:
      rows = builder.build_source(
        self.context.dataset, train_split, is_checked=True
      )
    except MissingDataError:
      if self.dataset is None:
        raise
      self.unchecked = True  # others are reported where the run's data are gone
      return
    if self.dataset and (run := self.context.info) is not None:
      changed = contract.differences(run, rows.info, contract.ROWS)
      self.unchecked |= bool(changed)
    advice = "hold some out, as 'train[95%:]' of 'train[:95%]'"
    advice = 'give rows that were not in its file' if self.dataset else advice
    expected = (
      f'rows that the run is not trained on, it shares {{}} with {train_split=}'
      f'; {advice}'
    )
    self.check_apart(field, rows, expected)
    self.known.update(inputs_of(rows))

  def check_unfitted(self, file: Any) -> None:
    """Raises ConfigError if a calibration is fitted to rows of `split`."""
    try:
      fitted = file.fitted_rows(self.context.dataset)
    except MissingDataError:
      if self.dataset is None:
        raise
      self.unchecked = True
      return
    if fitted is not None:
      expected = 'rows that no temperature was fitted to, it shares {}'
      self.check_apart('split', fitted, expected)
      self.known.update(inputs_of(fitted))
