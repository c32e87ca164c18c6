"""Few-shot linear regression on frozen features.

How good is a representation? A linear map is fitted from the features before
the head to the labels of a few examples per class ("shots"), in closed form,
and judged on a test split. The protocol is big_vision's
(`evaluators/fewshot_lsr.py`; also AdaTape section 3.1 and ViT section 4.1):
features standardised by the shots' mean and deviation, targets -1 and 1, a
large constant feature as the bias, L2-regularised least squares.

Unlike there the L2 strength is not a constant: each draw of shots sweeps
`L2_GRID` at the price of one eigen-decomposition and keeps the strength that
is most accurate on training images that are not among the shots. The test
split is never looked at for that.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import rich.console
import rich.table
from jaxtyping import Float, Int

from dataset_lib.errors import InvalidDataError
from dataset_lib.fields import ConfigLike, Field, integer, text
from eval_lib import evaluator
from eval_lib.least_squares import choose_l2, fit

# So many training images are enough to choose between 31 strengths; all of
# ImageNet's would cost more than the rest of the evaluation.
MAX_HELD_OUT = 10_000
MAX_SHOTS = 100_000


@dataclasses.dataclass(frozen=True)
class Draw:
  """Result of one draw of shots.

  Attributes:
    accuracy: on the test split.
    l2: the strength that was chosen.
    held_out: number of training images it was chosen on.
    short_classes: classes with fewer images than shots.
  """

  accuracy: float
  l2: float
  held_out: int
  short_classes: int


def run_draw(
  train: tuple[Float[np.ndarray, 'M D'], Int[np.ndarray, ' M']],
  test: tuple[Float[np.ndarray, 'B D'], Int[np.ndarray, ' B']],
  num_classes: int,
  shots: int,
  seed: int,
) -> Draw:
  """Draws shots, fits, chooses the L2 strength, and only then tests.

  Args:
    train: features and labels to draw from.
    test: features and labels to judge by.
    num_classes: labels are in [0, num_classes).
    shots: examples per class; a class with fewer gives what it has.
    seed: decides which; the k shots of a seed are among its k + 1 shots.
  """
  features, labels = train
  rng = np.random.default_rng(seed)
  by_class = [
    rng.permutation(np.flatnonzero(labels == label))
    for label in range(num_classes)
  ]
  chosen = np.concatenate([rows[:shots] for rows in by_class])
  rest = np.concatenate([rows[shots:] for rows in by_class])
  held_out = rng.permutation(rest)[:MAX_HELD_OUT]
  regression = fit(features[chosen], labels[chosen], num_classes)
  l2 = choose_l2(regression, features[held_out], labels[held_out])
  return Draw(
    accuracy=regression.accuracies(*test, [l2])[0],
    l2=l2,
    held_out=len(held_out),
    short_classes=sum(len(rows) < shots for rows in by_class),
  )


class Evaluator:
  """Few-shot accuracy of a run's features on any data set of images.

  Configuration: `dataset` (None: the run's own), `train_split`, `test_split`,
  `shots` per class, `seeds` (number of draws). Both splits are read with
  evaluation preprocessing. The draws do not depend on the run's seed, so runs
  are compared on the same shots.
  """

  FIELDS: ClassVar[Mapping[str, Field]] = {
    'dataset': evaluator.DATASET,
    'train_split': text('the name of a split', 'train'),
    'test_split': text('the name of a split', 'test'),
    'shots': Field(
      f'a tuple of distinct integers in [1, {MAX_SHOTS}]',
      lambda value: _are_shots(value),
      (1, 5, 10, 25),
    ),
    'seeds': integer(1, 1000, 3),
  }

  def __init__(self, config: Mapping[str, Any], context: evaluator.EvalContext):
    self._config, self._context = config, context
    self._train, self._test = (
      evaluator.build_dataset(config['dataset'], config[split], context)
      for split in ('train_split', 'test_split')
    )
    train, test = self._train.info, self._test.info
    if (train.num_classes, train.class_names) != (
      test.num_classes,
      test.class_names,
    ):
      raise InvalidDataError(
        f'few-shot: expected the same classes in {config["train_split"]!r} and '
        f'{config["test_split"]!r}, got {train.num_classes} and '
        f'{test.num_classes} classes: {train.class_names[:5]}... and '
        f'{test.class_names[:5]}...'
      )

  def run(self, variables: Any) -> dict[str, float]:
    """Extracts features, regresses, prints a table.

    Returns:
      For k shots: `kshot` (mean test accuracy over the seeds), `kshot_std`
      (population standard deviation over the seeds), `kshot_log2_l2` (mean),
      `kshot_held_out` (images the L2 was chosen on; 0: not chosen but
      `L2_WITHOUT_HELD_OUT`), `kshot_short_classes` (with fewer images than k).
    """
    train = extract_features(self._train, self._context, variables)
    test = extract_features(self._test, self._context, variables)
    num_classes = self._train.info.num_classes
    draws = {
      shots: [
        run_draw(train, test, num_classes, shots, seed)
        for seed in range(self._config['seeds'])
      ]
      for shots in self._config['shots']
    }
    if jax.process_index() == 0:
      title = _title(self._config, len(test[1]))
      console = rich.console.Console(highlight=False)
      console.print(table(draws, num_classes, title))
    return summary(draws)


def _are_shots(value: Any) -> bool:
  one = integer(1, MAX_SHOTS)
  return (
    isinstance(value, (tuple, list))
    and 0 < len(value) == len(set(value))
    and all(one.accepts(shots) for shots in value)
  )


def extract_features(
  dataset: Any, context: evaluator.EvalContext, variables: Any
) -> tuple[Float[np.ndarray, 'M D'], Int[np.ndarray, ' M']]:
  """Features and labels of a split, in the order of the records.

  Raises:
    InvalidDataError: the split holds no example.
    FloatingPointError: a feature is NaN or infinite.
  """
  parts: dict[str, list[np.ndarray]] = {}
  for batch in evaluator.on_devices(dataset, context):
    rows = {key: batch[key] for key in ('index', 'label', 'mask')}
    rows = evaluator.gather(
      rows | {'features': context.features(variables, batch)}
    )
    for key, value in rows.items():
      parts.setdefault(key, []).append(np.asarray(value)[rows['mask'] > 0])
  if not parts or not sum(map(len, parts['mask'])):
    raise InvalidDataError('few-shot: the split holds no example')
  whole = {key: np.concatenate(value) for key, value in parts.items()}
  # By record: batches and processes deal the records out differently.
  order = np.argsort(whole['index'], kind='stable')
  features = whole['features'][order].astype(np.float64)
  if not np.isfinite(features).all():
    raise FloatingPointError(
      'few-shot: expected finite features, got NaN or infinity; the run has '
      'diverged, or the model overflows in its compute dtype'
    )
  return features, whole['label'][order].astype(np.int64)


def summary(draws: Mapping[int, Sequence[Draw]]) -> dict[str, float]:
  """The flat result of `Evaluator.run`."""
  result: dict[str, float] = {}
  for shots, runs in draws.items():
    accuracies = [run.accuracy for run in runs]
    result |= {
      f'{shots}shot': float(np.mean(accuracies)),
      f'{shots}shot_std': float(np.std(accuracies)),
      f'{shots}shot_log2_l2': float(np.mean([math.log2(r.l2) for r in runs])),
      f'{shots}shot_held_out': float(runs[0].held_out),
      f'{shots}shot_short_classes': float(runs[0].short_classes),
    }
  return result


def table(
  draws: Mapping[int, Sequence[Draw]], num_classes: int, title: str
) -> rich.table.Table:
  """A table for people: a row per number of shots, with what fell short."""
  result = rich.table.Table(title=title)
  for heading in ('shots per class', 'accuracy (mean ± std)', 'log2 L2'):
    result.add_column(heading, justify='right')
  result.add_column('notes')
  for shots, runs in draws.items():
    accuracies = [100 * run.accuracy for run in runs]
    strengths = sorted({round(math.log2(run.l2)) for run in runs})
    result.add_row(
      str(shots),
      f'{np.mean(accuracies):.2f} ± {np.std(accuracies):.2f} %',
      ', '.join(map(str, strengths)),
      _notes(runs[0], num_classes),
    )
  return result


def _notes(run: Draw, num_classes: int) -> str:
  notes = []
  if run.short_classes:
    notes.append(
      f'{run.short_classes} of {num_classes} classes have fewer images'
    )
  if not run.held_out:
    notes.append('no training image left to choose the L2 strength')
  return '; '.join(notes) or f'L2 chosen on {run.held_out} training images'


def _title(config: Mapping[str, Any], test_size: int) -> str:
  dataset: ConfigLike = config['dataset']
  name = dict(dataset.items()).get('name', 'data set')
  return f'few-shot, {name}: {config["seeds"]} draws, {test_size} test images'
