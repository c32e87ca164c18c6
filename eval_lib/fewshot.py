"""Few-shot linear regression on frozen features.

The protocol of big_vision (`evaluators/fewshot_lsr.py`; AdaTape section 3.1):
L2-regularised least squares from the standardised features of a few examples
per class ("shots") to targets -1 and 1. Unlike there, each draw of shots
chooses the L2 strength that is most accurate on other training images. NumPy in
float64 gives the same result everywhere.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
from annotated_types import Interval, MinLen
from jaxtyping import Float, Int

from core import fields
from core.errors import ConfigError
from eval_lib import evaluator
from eval_lib.report import print_table

L2_GRID = 2.0 ** np.arange(-10, 21)
# Kept if no training image is left to choose with; big_vision's constant.
L2_WITHOUT_HELD_OUT = 2.0**10
# A large constant feature, so the bias is hardly regularised.
BIAS = 100.0
# Training images that the L2 is chosen on: ImageNet's would take too long.
MAX_HELD_OUT = 10_000
MAX_SHOTS = 100_000
# Of the metrics of `kshot`, see `Evaluator.run`.
ENDS = '', '_std', '_log2_l2', '_held_out', '_short_classes'

# Features [M, D] and labels [M] of a split.
Rows = tuple[Float[np.ndarray, '_ D'], Int[np.ndarray, ' _']]


class Regression:
  """Least squares for every L2 strength, after one eigen-decomposition.

  With X `[M, D + 1]` (standardised features and the bias) and Y `[M, classes]`
  the weights are `X^T (X X^T + l2 I)^-1 Y = (X^T X + l2 I)^-1 X^T Y`. The
  smaller of the two matrices is decomposed.
  """

  def __init__(
    self,
    features: Float[np.ndarray, 'M D'],
    labels: Int[np.ndarray, ' M'],
    num_classes: int,
  ):
    features = features.astype(np.float64)
    self._mean, std = features.mean(0), features.std(0)
    # A feature that is constant over the shots becomes zero, and its weight
    # too. A tiny divisor instead would blow up the feature on other images.
    is_constant = std <= 1e-9 * (1 + np.abs(self._mean))
    self._std = np.where(is_constant, np.inf, std)
    inputs = self._inputs(features)
    targets = 2.0 * np.eye(num_classes)[labels] - 1.0
    if len(inputs) < inputs.shape[1]:
      eigenvalues, vectors = np.linalg.eigh(inputs @ inputs.T)
      self._left, self._right = inputs.T @ vectors, vectors.T @ targets
    else:
      eigenvalues, vectors = np.linalg.eigh(inputs.T @ inputs)
      self._left, self._right = vectors, vectors.T @ (inputs.T @ targets)
      self._left[:-1][is_constant] = 0.0  # but for rounding it is
    # Both matrices are positive semi-definite; rounding can say otherwise.
    self._eigenvalues = eigenvalues.clip(0.0)

  def weights(self, l2: float) -> Float[np.ndarray, 'D_1 classes']:
    """Returns the least-squares solution for one L2 strength > 0."""
    return (self._left / (self._eigenvalues + l2)) @ self._right

  def accuracies(self, rows: Rows, strengths: Iterable[float]) -> list[float]:
    """Returns the accuracy of the largest output, for each L2 strength."""
    inputs = self._inputs(rows[0])
    outputs = (inputs @ self.weights(l2) for l2 in strengths)
    return [float(np.mean(out.argmax(-1) == rows[1])) for out in outputs]

  def choose_l2(self, held_out: Rows) -> float:
    """Returns the most accurate strength, the largest of equal ones.

    Without held-out images it is `L2_WITHOUT_HELD_OUT`.
    """
    if not len(held_out[1]):
      return L2_WITHOUT_HELD_OUT
    scores = self.accuracies(held_out, L2_GRID)
    return float(max(zip(scores, L2_GRID, strict=True))[1])

  def _inputs(
    self, features: Float[np.ndarray, 'B D']
  ) -> Float[np.ndarray, 'B D_1']:
    inputs = (features - self._mean) / self._std
    return np.pad(inputs, ((0, 0), (0, 1)), constant_values=BIAS)


class Draw(NamedTuple):
  """The result of one draw of shots."""

  accuracy: float  # on the test split
  l2: float  # the strength that was chosen
  held_out: int  # number of training images it was chosen on
  short_classes: int  # classes with fewer images than shots


def run_draw(
  train: Rows, test: Rows, num_classes: int, shots: int, seed: int
) -> Draw:
  """Draws shots, fits, chooses the L2 strength, and only then tests.

  A class may have fewer examples. The k shots of a seed are among its k + 1.
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
  regression = Regression(features[chosen], labels[chosen], num_classes)
  l2 = regression.choose_l2((features[held_out], labels[held_out]))
  [accuracy] = regression.accuracies(test, [l2])
  short_classes = sum(len(rows) < shots for rows in by_class)
  return Draw(accuracy, l2, len(held_out), short_classes)


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Few-shot accuracy of a run's features on any data set of images.

  The draws do not depend on the run's seed: all runs have the same shots.
  """

  ANY_CLASSES: ClassVar[bool] = True
  train_split: evaluator.Split = 'train'  # to draw shots from
  test_split: evaluator.Split = 'test'
  shots: Annotated[
    tuple[Annotated[int, Interval(ge=1, le=MAX_SHOTS)], ...],
    MinLen(1), fields.Distinct,
    f'a tuple of distinct integers in [1, {MAX_SHOTS}]',
  ] = (1, 5, 10, 25)  # fmt: skip
  seeds: Annotated[int, Interval(ge=1, le=1000)] = 3  # number of draws

  def __post_init__(self):
    super().__post_init__()
    train, test = self.splits['train_split'], self.splits['test_split']
    if (kind := train.info.label_kind) not in ('', 'class'):
      expected = 'one class for each row; of images max_labels=0'
      raise ConfigError('dataset.label_kind', kind, expected)
    test.label_as(train.info)
    expected = 'a split without rows of train_split, {} are shared'
    self.check_apart('test_split', train.source, expected)

  def metric_names(self, measured):
    """See `evaluator.Evaluator`."""
    return [f'{shots}shot{end}' for shots in self.shots for end in ENDS]

  def run(self, variables: Any) -> dict[str, float]:
    """Extracts features, regresses, prints a table.

    Returns for k shots `kshot` and `kshot_std`, mean and standard deviation of
    the test accuracy over the seeds; `kshot_log2_l2`, a mean; `kshot_held_out`,
    images the L2 was chosen on; `kshot_short_classes`, with fewer images.
    """
    train, test = (self._features(field, variables) for field in self.splits)
    classes = self.splits['train_split'].info.num_classes
    metrics: dict[str, float] = {}
    rows = []
    for shots in self.shots:
      cases = (train, test, classes, shots)
      draws = [run_draw(*cases, seed) for seed in range(self.seeds)]
      means, row = summary(shots, draws)
      metrics |= means
      rows.append(row)
    if jax.process_index() == 0:
      title = f'few-shot, {self.data["name"]}: {self.seeds} draws, '
      print_table(f'{title}{len(test[1])} test images', rows)
    return metrics

  def _features(self, field: str, variables: Any) -> Rows:
    def outputs(variables, batch):
      return {'features': self.context.features(variables, batch)}

    rows = self.collect(field, variables, outputs, finite='features')
    return rows['features'].astype(np.float64), rows['label'].astype(np.int64)


def summary(
  shots: int, draws: Sequence[Draw]
) -> tuple[dict[str, float], dict[str, Any]]:
  """Returns the metrics of `Evaluator.run`, and a row to print."""
  accuracies, strengths, [held_out, *_], [short_classes, *_] = zip(
    *draws, strict=True
  )
  mean, std = float(np.mean(accuracies)), float(np.std(accuracies))
  logs = np.log2(strengths)
  numbers = mean, std, float(logs.mean()), held_out, short_classes
  row = {
    'shots per class': shots,
    'accuracy (mean ± std)': f'{percent(mean, std)} %',
    'log2 L2': ', '.join(f'{value:.0f}' for value in np.unique(logs)),
    'images that chose it': held_out,
    'classes with fewer images': short_classes,
  }
  names = (f'{shots}shot{end}' for end in ENDS)
  return dict(zip(names, map(float, numbers), strict=True)), row


def percent(mean: float, std: float) -> str:
  """Formats mean ± standard deviation of an accuracy, in percent."""
  return f'{100 * mean:.2f} ± {100 * std:.2f}'


def table(results: Mapping[str, Mapping[str, float]]) -> list[dict[str, str]]:
  """Returns a row for each data set and a column for each number of shots.

  `results` of `Evaluator.run` are by the name of the data set.
  """
  return [
    {'data set': name}
    | {
      key.replace('shot', '-shot'): percent(mean, metrics[f'{key}_std'])
      for key, mean in metrics.items()
      if f'{key}_std' in metrics
    }
    for name, metrics in results.items()
  ]
