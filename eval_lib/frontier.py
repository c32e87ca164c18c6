"""Accuracy against cost: exit rules and thresholds over recorded logits.

The logits of all heads are recorded once; a rule decides at which head each
row leaves, so a sweep costs no run of the model. Rules are functions of the
logits, so this room needs to know none but the confidence rule of EAT,
section 4; `eat.exits` hands in the others.
"""

import csv
import dataclasses
import functools
import io
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, real
from eval_lib import calibration, evaluator, glue_metrics, predictions

THRESHOLDS = (0.80, 0.85, 0.90, 0.95)
FILE = 'frontier.csv'


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
  """What a setting gives over the rows of a split.

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
  """Share of right answers."""
  return float((logits.argmax(-1) == labels).mean())


def same_class(
  logits: Float[np.ndarray, 'N C'], full: Float[np.ndarray, 'N C']
) -> float:
  """Share of the rows with the same answer.

  Raises:
    ValueError: with one logit a row there are no classes.
  """
  if logits.shape[-1] < 2:
    raise ValueError(
      'agreement: expected at least 2 classes, got 1; for a regression give '
      'sweep a quality and an agreement of its own'
    )
  return float((logits.argmax(-1) == full.argmax(-1)).mean())


def never() -> Setting:
  """The full model: every row leaves at the last head."""
  return Setting(
    'never', None, lambda logits: np.full(logits.shape[1], len(logits) - 1)
  )


def confidence(
  threshold: float, temperatures: Float[np.ndarray, ' E'] | None = None
) -> Setting:
  """Exit where `max_c P >= threshold`, of the logits over temperatures."""

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

  Raises:
    ValueError: a rule gives no head for each row, or tables do not fit.
  """
  heads, rows = logits.shape[:2]
  if len(layers) != heads:
    raise ValueError(f'layers: expected {heads}, got {tuple(layers)}')
  table = np.asarray(layers if flops is None else flops, np.float64)
  cost = np.broadcast_to(table, (rows, heads))
  full = cost[:, -1] if full_flops is None else full_flops
  full = np.broadcast_to(np.asarray(full, np.float64), (rows,))
  points = []
  for setting in settings:
    exits = _exits(setting, logits)
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


def _exits(
  setting: Setting, logits: Float[np.ndarray, 'E N C']
) -> Int[np.ndarray, ' N']:
  exits = np.asarray(setting.exit_of(logits))
  heads, rows = logits.shape[:2]
  legal = exits.shape == (rows,) and np.issubdtype(exits.dtype, np.integer)
  if not legal or not ((exits >= 0) & (exits < heads)).all():
    raise ValueError(
      f'rule {setting.rule!r}: expected a head in [0, {heads}) for each of '
      f'{rows} rows, got {exits.dtype} {exits.shape}: {exits}'
    )
  return exits


def pareto(
  cost: Float[np.ndarray, ' P'], quality: Float[np.ndarray, ' P']
) -> Bool[np.ndarray, ' P']:
  """Which points are on the frontier: no other is as good in both and better.

  Equal points stay together; a point with a NaN is never on it.
  """
  finite = ~(np.isnan(cost) | np.isnan(quality))
  as_good = (cost[:, None] <= cost) & (quality[:, None] >= quality)
  better = (cost[:, None] < cost) | (quality[:, None] > quality)
  return finite & ~(as_good & better).any(0)


def write_csv(
  path: str | os.PathLike[str],
  points: Sequence[Point],
  layers: Sequence[int],
  metric: str = 'accuracy',
) -> None:
  """A line per point: rule, value, metric, depth, flops, agreement, shares.

  The shares of the rows that leave at each head are called `exit_<layer>`.
  """
  file = io.StringIO()
  writer = csv.writer(file, lineterminator='\n')
  exits = [f'exit_{layer}' for layer in layers]
  writer.writerow(
    ['rule', 'value', metric, 'depth', 'flops', 'agreement', *exits]
  )
  for point in points:
    value = '' if point.value is None else f'{point.value:g}'
    numbers = (
      point.quality, point.depth, point.flops, point.agreement, *point.shares
    )  # fmt: skip
    writer.writerow([point.rule, value, *(f'{one:.6g}' for one in numbers)])
  predictions.replace_file(pathlib.Path(path), file.getvalue())


def _numbers(
  expected: str, low: float, high: float, default: tuple[float, ...]
) -> Field:
  return Field(
    f'{expected} in [{low:g}, {high:g}]',
    lambda value: (
      isinstance(value, (tuple, list))
      and all(real(low, high).accepts(one) for one in value)
    ),
    default,
  )


class Evaluator:
  """Sweeps the confidence rule over thresholds; writes frontier.csv.

  Configuration: `split`, `thresholds`, `layers` of the heads, `flops` of a
  row that leaves at each of them (any unit; without it layers are the cost),
  `full_flops` of a row in the model compared with (0: this one's last head),
  `calibration_split` to fit temperatures on before (None: none), `task` if
  the data set does not name it, and `dataset` if not the run's own. The
  quality is the main number of the GLUE task, or accuracy without one.
  """

  FIELDS: ClassVar[Mapping[str, Field]] = {
    'split': fields.text('the name of a split', 'validation'),
    'calibration_split': Field(
      'the name of a split that training does not use, or None',
      lambda value: value is None or (isinstance(value, str) and bool(value)),
      None,
    ),
    'thresholds': _numbers('a tuple of numbers', 0.0, 1.0, THRESHOLDS),
    'layers': predictions.LAYERS,
    'flops': _numbers('a number for each head, or (); all', 0.0, 1e30, ()),
    'full_flops': real(0.0, 1e30, 0.0),
    'task': glue_metrics.TASK,
    'dataset': evaluator.DATASET,
  }

  def __init__(self, config: Mapping[str, Any], context: evaluator.EvalContext):
    self._config, self._context = config, context
    self._dataset = evaluator.build_dataset(
      config['dataset'], config['split'], context
    )
    self._held_out = None
    if config['calibration_split']:
      self._held_out = evaluator.build_dataset(
        config['dataset'], config['calibration_split'], context
      )
    if self._dataset.info.num_classes < 2:
      raise ConfigError(
        'dataset', 'a regression', 'classes: numbers have no confidence'
      )
    task = glue_metrics.task_of(config)
    self._metric, self._quality = 'accuracy', accuracy
    if task:
      self._metric = glue_metrics.TASKS[task].metrics[0]
      self._quality = functools.partial(_main_number, task)

  def run(self, variables: Any) -> dict[str, float]:
    """Sweeps and writes `frontier.csv` into the workdir.

    Returns:
      For every threshold t: `<metric>_tau_<t>`, `depth_tau_<t>` (layers),
      `flops_tau_<t>` (share of the full model's) and `agreement_tau_<t>`;
      `<metric>_full` is that of the last head.
    """
    logits, labels = self._record('split', self._dataset, variables)
    temperatures = None
    if self._held_out is not None:
      temperatures = calibration.fit_temperatures(
        *self._record('calibration_split', self._held_out, variables)
      )
    thresholds = sorted({float(t) for t in self._config['thresholds']})
    settings = [confidence(t, temperatures) for t in thresholds]
    settings.append(never())
    layers = predictions.layers_of(self._config['layers'], len(logits))
    points = sweep(
      logits,
      labels,
      settings,
      layers=layers,
      flops=self._flops(len(logits)),
      full_flops=self._config['full_flops'] or None,
      quality=self._quality,
    )
    if self._context.workdir and jax.process_index() == 0:
      path = pathlib.Path(self._context.workdir) / FILE
      write_csv(path, points, layers, self._metric)
    result = {f'{self._metric}_full': points[-1].quality}
    for point in points[:-1]:
      result |= {
        f'{self._metric}_tau_{point.value:g}': point.quality,
        f'depth_tau_{point.value:g}': point.depth,
        f'flops_tau_{point.value:g}': point.flops,
        f'agreement_tau_{point.value:g}': point.agreement,
      }
    return result

  def _flops(self, num_heads: int) -> tuple[float, ...] | None:
    given = self._config['flops']
    if given and len(given) != num_heads:
      expected = f'{num_heads} numbers, one for each head of the model'
      raise ConfigError('flops', given, expected)
    return given or None

  def _record(self, split, dataset, variables):
    name = self._config[split]
    return predictions.labelled_logits(dataset, name, variables, self._context)


def _main_number(
  task: str,
  logits: Float[np.ndarray, 'N C'],
  labels: Int[np.ndarray, ' N'],
) -> float:
  return glue_metrics.compute(task, logits, labels)['score']
