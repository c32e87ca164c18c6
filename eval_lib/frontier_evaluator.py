"""The evaluator 'frontier': confidence thresholds, to frontier.csv."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Float, Int

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, real
from eval_lib import (
  calibration,
  evaluator,
  glue_metrics,
  held_out,
  predictions,
)
from eval_lib.frontier import accuracy, confidence, never, sweep, write_csv

THRESHOLDS = (0.80, 0.85, 0.90, 0.95)
FILE = 'frontier.csv'


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
  row that leaves at each of them (any unit; without it the cost is counted in
  layers, `depth_share`), `full_flops` of a row in the model compared with (0:
  this one's last head), `calibration_split` to fit temperatures on before
  (None: none), `task` if the data set does not name it, and `dataset` if not
  the run's own. The quality is the main number of the GLUE task, or accuracy
  without one.
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
    layers = config['layers'] or context.layers
    self._config, self._context = {**config, 'layers': layers}, context
    self._dataset, self._held_out = held_out.build(config, context)
    self._cost = 'flops' if config['flops'] else 'depth_share'
    task = glue_metrics.task_of(config)
    self._metric, self._quality = 'accuracy', accuracy
    if task:
      self._metric = glue_metrics.TASK_METRICS[task][0]
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
      write_csv(path, points, layers, self._metric, self._cost)
    result = {f'{self._metric}_full': points[-1].quality}
    names = predictions.head_names(self._config['layers'], len(logits))
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
