"""Accuracy against cost: exit rules and thresholds over recorded logits.

The logits of all heads are recorded once; a rule selects the head at which each
row leaves, so a sweep costs no run of the model. Rules are functions of the
logits; the confidence rule of EAT, section 4, is here, others in `eat.exits`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float, Int, Num

from dataset_lib.errors import ConfigError
from eval_lib import calibration, evaluator, glue, predictions, report

FILE = 'frontier.csv'

Number = Annotated[float | int, Interval(ge=0.0, le=1e30)]


class Setting(NamedTuple):
  """A rule with its parameter.

  Attributes:
    rule: its name, e.g. 'confidence'.
    value: its parameter, e.g. the threshold; None if it has none.
    exit_of: `(logits [E, N, C]) -> int [N]`, the index of the head at which
      each row leaves; NumPy or JAX.
  """

  rule: str
  value: float | None
  exit_of: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Point:
  """The measures of a setting over the rows of a split.

  Attributes:
    rule: as in the setting.
    value: as in the setting.
    quality: accuracy or another measure; more is better.
    depth: mean number of layers executed.
    flops: FLOPs spent over those of the full model on the same rows.
    agreement: share of the rows with the answer of the full model.
    shares: of the rows by the head they leave at, `[E]`.
  """

  rule: str
  value: float | None
  quality: float
  depth: float
  flops: float
  agreement: float
  shares: tuple[float, ...]


def accuracy(
  logits: Float[np.ndarray, 'N C'], labels: Int[np.ndarray, ' N']
) -> float:
  """Returns the share of right answers."""
  return float((logits.argmax(-1) == labels).mean())


def same_class(
  logits: Float[np.ndarray, 'N C'], full: Float[np.ndarray, 'N C']
) -> float:
  """Returns the share of the rows with the same answer."""
  return float((logits.argmax(-1) == full.argmax(-1)).mean())


def never() -> Setting:
  """Returns the full model: every row leaves at the last head."""
  return Setting(
    'never', None, lambda logits: np.full(logits.shape[1], len(logits) - 1)
  )


def confidence(
  threshold: float, temperatures: Float[np.ndarray, ' E'] | None = None
) -> Setting:
  """Returns the rule `max_c P >= threshold`, of logits over temperatures."""

  def exit_of(logits):
    heads = predictions.probabilities(logits, temperatures)
    return predictions.confidence_exit(heads, threshold)

  return Setting('confidence', threshold, exit_of)


def sweep(
  logits: Float[np.ndarray, 'E N C'],
  labels: Num[np.ndarray, ' N'],
  settings: Sequence[Setting],
  *,
  layers: Sequence[int],
  flops: Any = None,
  full_flops: Any = None,
  quality: Callable[[Any, Any], float] = accuracy,
  agreement: Callable[[Any, Any], float] = same_class,
) -> list[Point]:
  """Measures settings on the same rows.

  Args:
    logits: of all heads; the last is the full model.
    labels: classes, or numbers of a regression.
    settings: what to measure.
    layers: layers executed when a row leaves at each head, `[E]`.
    flops: FLOPs of a row that leaves at each head, `[E]`, or `[N, E]` where
      they differ from row to row; None takes `layers` for the cost.
    full_flops: FLOPs of a row in the model compared with, a number or `[N]`;
      None for the last column of `flops`.
    quality: `(logits [N, C], labels [N]) -> float`.
    agreement: `(logits [N, C], logits of the last head [N, C]) -> float`.
  """
  heads, rows = logits.shape[:2]
  costs = np.asarray(layers if flops is None else flops, np.float64)
  cost = np.broadcast_to(costs, (rows, heads))
  full = cost[:, -1] if full_flops is None else full_flops
  full = np.broadcast_to(np.asarray(full, np.float64), (rows,))
  points = []
  for setting in settings:
    exits = np.asarray(setting.exit_of(logits))
    chosen = logits[exits, np.arange(rows)]
    points.append(
      Point(
        rule=setting.rule,
        value=setting.value,
        quality=float(quality(chosen, labels)),
        depth=float(np.asarray(layers)[exits].mean()),
        flops=float(cost[np.arange(rows), exits].sum() / full.sum()),
        agreement=float(agreement(chosen, logits[-1])),
        shares=tuple((np.bincount(exits, minlength=heads) / rows).tolist()),
      )
    )
  return points


def pareto(
  cost: Float[np.ndarray, ' P'], quality: Float[np.ndarray, ' P']
) -> Bool[np.ndarray, ' P']:
  """Marks points on the frontier: no other is as good in both and better.

  Equal points are marked alike; a point with a NaN is never on it.
  """
  finite = ~(np.isnan(cost) | np.isnan(quality))
  as_good = (cost[:, None] <= cost) & (quality[:, None] >= quality)
  better = (cost[:, None] < cost) | (quality[:, None] > quality)
  return finite & ~(as_good & better).any(0)


def rows_of(
  points: Sequence[Point], layers: Sequence[int], metric: str, cost: str
) -> list[dict[str, str | None]]:
  """Returns the lines of a CSV file: rule, value, numbers, shares.

  Args:
    points: of `sweep`.
    layers: of the heads; the columns of their shares are `exit_<layer>`.
    metric: name of the quality.
    cost: name of the points' `flops`.
  """
  rows = []
  for point in points:
    numbers = {
      metric: point.quality,
      'depth': point.depth,
      cost: point.flops,
      'agreement': point.agreement,
    }
    for layer, share in zip(layers, point.shares, strict=True):
      numbers[f'exit_{layer}'] = share
    value = None if point.value is None else f'{point.value:g}'
    row: dict[str, str | None] = {'rule': point.rule, 'value': value}
    rows.append(row | {name: f'{one:.6g}' for name, one in numbers.items()})
  return rows


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Sweeps the confidence rule over thresholds; writes frontier.csv.

  The quality is the main number of the GLUE task, or accuracy without one.

  Attributes:
    split: to evaluate.
    calibration_split: to fit temperatures on before; None for none.
    thresholds: of the confidence.
    layers: of the heads; () for those of the model.
    flops: of a row that leaves at each head, in any unit; () counts the cost
      in layers, `depth_share`.
    full_flops: of a row in the model compared with; 0 for the last head.
    task: '' for that of the data set.
  """

  split: evaluator.Split = 'validation'
  calibration_split: Annotated[
    evaluator.Split | None,
    'the name of a split that training does not use, or None',
  ] = None
  thresholds: tuple[calibration.Share, ...] = (0.80, 0.85, 0.90, 0.95)
  layers: predictions.Layers = ()
  flops: tuple[Number, ...] = ()
  full_flops: Number = 0.0
  task: glue.TaskName = ''

  def __post_init__(self):
    self.layers = self.layers or self.context.layers
    self._data, self._fitted = predictions.open_splits(self)
    self._cost = 'flops' if self.flops else 'depth_share'
    task = glue.task_of(self.task, self.dataset or {})
    self._metric, self._quality = 'accuracy', accuracy
    if task:
      self._metric = glue.TASK_METRICS[task][0]
      self._quality = functools.partial(_main_number, task)

  def run(self, variables: Any) -> dict[str, float]:
    """Sweeps and writes `frontier.csv` into the workdir.

    Returns:
      For every threshold t: `<metric>_tau_<t>`, `depth_tau_<t>` (layers),
      `agreement_tau_<t>` and the share of the full model's cost,
      `flops_tau_<t>`, or `depth_share_tau_<t>` where no FLOPs are given;
      `<metric>_full` is that of the last head, and `<metric>_<head>` that of
      each (`layer_4`, or `head_1` without `layers`), were it the only one.
    """
    logits, labels = predictions.labelled_logits(
      self._data, self.split, variables, self.context
    )
    heads = len(logits)
    if self.flops and len(self.flops) != heads:
      expected = f'{heads} numbers, one for each head of the model'
      raise ConfigError('flops', self.flops, expected)
    temperatures = None
    if self.calibration_split is not None:
      fitted = predictions.labelled_logits(
        self._fitted, self.calibration_split, variables, self.context
      )
      temperatures = calibration.fit_temperatures(*fitted)
    thresholds = sorted({float(t) for t in self.thresholds})
    layers = predictions.layers_of(self.layers, heads)
    points = sweep(
      logits,
      labels,
      [*(confidence(t, temperatures) for t in thresholds), never()],
      layers=layers,
      flops=self.flops or None,
      full_flops=self.full_flops or None,
      quality=self._quality,
    )
    if self.context.workdir and jax.process_index() == 0:
      path = pathlib.Path(self.context.workdir) / FILE
      rows = rows_of(points, layers, self._metric, self._cost)
      report.write_csv(path, rows)
    result = {f'{self._metric}_full': points[-1].quality}
    names = predictions.head_names(self.layers, heads)
    for name, head in zip(names, logits, strict=True):
      result[f'{self._metric}_{name}'] = float(self._quality(head, labels))
    for point in points[:-1]:
      result |= {
        f'{self._metric}_tau_{point.value:g}': point.quality,
        f'depth_tau_{point.value:g}': point.depth,
        f'{self._cost}_tau_{point.value:g}': point.flops,
        f'agreement_tau_{point.value:g}': point.agreement,
      }
    return result


def _main_number(
  task: str, logits: Float[np.ndarray, 'N C'], labels: Int[np.ndarray, ' N']
) -> float:
  return glue.compute(task, logits, labels)['score']
