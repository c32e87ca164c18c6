"""Splits that must have no row in common: of training, fitting and judging.

A model, a temperature and a threshold all look better on the rows that they
were chosen for than on others.
"""

from collections.abc import Mapping
from typing import Any

from dataset_lib import builder, source
from dataset_lib.errors import ConfigError
from eval_lib import evaluator


def build(
  config: Mapping[str, Any], context: evaluator.EvalContext
) -> tuple[builder.Dataset, builder.Dataset | None]:
  """The splits that an evaluator judges on, and fits something to.

  Args:
    config: complete; its `dataset`, `split` and `calibration_split`.
    context: of the run.

  Returns:
    (`split`, `calibration_split` or None).

  Raises:
    ConfigError: `calibration_split` has rows in common with `split` or with
      what the run is trained on, or the data have no classes.
  """
  judging = evaluator.build_dataset(config['dataset'], config['split'], context)
  if judging.info.num_classes < 2:
    raise ConfigError(
      'dataset', 'a regression', 'classes: numbers have no confidence'
    )
  if not config['calibration_split']:
    return judging, None
  fitted = evaluator.build_dataset(
    config['dataset'], config['calibration_split'], context
  )
  check_apart(judging, fitted, config['calibration_split'])
  check_untrained(fitted, 'calibration_split', config, context)
  return judging, fitted


def check_apart(
  judging: builder.Dataset, fitted: builder.Dataset, split: str
) -> None:
  """Raises ConfigError if two parts of a data set have rows in common.

  Args:
    judging: what numbers are reported of.
    fitted: what something was fitted to.
    split: the value of `calibration_split`, which names the second.
  """
  shared = len(judging.places() & fitted.places())
  if shared:
    raise ConfigError(
      'calibration_split',
      split,
      f'rows that `split` does not have, it shares {shared}: what was fitted '
      'cannot judge itself',
    )


def check_untrained(
  dataset: builder.Dataset,
  field: str,
  config: Mapping[str, Any],
  context: evaluator.EvalContext,
) -> None:
  """Raises ConfigError if a model is trained on rows that are to be new to it.

  Args:
    dataset: these rows.
    field: that names their split.
    config: of the evaluator.
    context: of the run.
  """
  # Reading all of what a run is trained on takes its time: only if need be.
  # Other names than 'train' may mean the same rows, as dev and validation.
  trained = names(context.train_split)
  if not context.train_split or (
    trained == {'train'} and 'train' not in names(config[field])
  ):
    return
  rows = builder.build_source(context.dataset, context.train_split)
  shared = len(dataset.places() & {*source.places(rows)})
  if shared:
    raise ConfigError(
      field,
      config[field],
      f'rows that the run is not trained on, it shares {shared} with '
      f'train_split={context.train_split!r}; hold some out, as '
      "'train[95%:]' of 'train[:95%]'",
    )


def names(split: str) -> set[str]:
  """The splits that parts are taken of: `{'train'}` of 'train[:95%]'."""
  return {part.partition('[')[0] for part in split.split('+')}
