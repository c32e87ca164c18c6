"""Quality against cost of exit rules, by the recorded logits of all heads."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Num

from eval_lib import calibration, glue, heads, report
from eval_lib.predictions import Heads, Labels
from halting.row_rules import Confidence, scale

FILE = 'frontier.csv'


def accuracy(logits: Float[np.ndarray, 'N C'], labels: Labels) -> float:
  """Returns the share of right answers."""
  return float((logits.argmax(-1) == labels).mean())


def main_number(task: str) -> tuple[str, Callable[[Any, Any], float]]:
  """Returns name and function of a GLUE task's first metric; '': accuracy."""
  if not task:
    return 'accuracy', accuracy
  return glue.TASK_METRICS[task][0], lambda logits, labels: glue.compute(
    task, logits, labels
  )['score']


class Point(NamedTuple):
  """The measures of a setting over the rows of a split."""

  quality: float  # accuracy or another measure; more is better
  depth: float  # mean number of layers executed
  flops: float  # FLOPs spent over the full model's on the same rows
  # Share of the rows with the answer of the full model; for a regression the
  # correlation with the full model's output.
  agreement: float
  shares: tuple[float, ...]  # of the rows by the head they leave at, `[E]`
  exits: Labels  # index of the head at which each row leaves


class Recording(NamedTuple):
  """Logits of all heads for the rows of a split, and the costs of exits."""

  logits: Heads  # the last head is the full model
  labels: Num[np.ndarray, ' N']  # classes, or numbers of a regression
  layers: Sequence[int]  # executed when a row leaves at each head, `[E]`
  # FLOPs of a row that leaves at each head, `[E]`, or of each row, `[N, E]`.
  flops: Any
  # FLOPs of a row in the reference model, or `[N]`; None: at the last head.
  full_flops: Any = None
  # (logits [N, C], labels [N]) -> float
  quality: Callable[[Any, Any], float] = accuracy

  def leave(self, exits: Labels) -> Point:
    """Measures the answers if each row leaves at the head of this index."""
    heads, rows = self.logits.shape[:2]
    places = np.arange(rows)
    cost = np.broadcast_to(np.asarray(self.flops, np.float64), (rows, heads))
    full = cost[:, -1] if self.full_flops is None else self.full_flops
    full = np.broadcast_to(np.asarray(full, np.float64), (rows,))
    chosen, final = self.logits[exits, places], self.logits[-1]
    agreement = accuracy(chosen, final.argmax(-1))
    if chosen.shape[1] == 1:
      agreement = glue.correlation(final[:, 0], chosen[:, 0])
    return Point(
      quality=float(self.quality(chosen, self.labels)),
      depth=float(np.asarray(self.layers)[exits].mean()),
      flops=float(cost[places, exits].sum() / full.sum()),
      agreement=agreement,
      shares=tuple((np.bincount(exits, minlength=heads) / rows).tolist()),
      exits=exits,
    )


def pareto(
  cost: Float[np.ndarray, ' P'], quality: Float[np.ndarray, ' P']
) -> Bool[np.ndarray, ' P']:
  """Marks points on the frontier.

  No other point is at least as good in both and strictly better in one. Equal
  points are marked alike; a point with a NaN is never on the frontier.
  """
  finite = ~(np.isnan(cost) | np.isnan(quality))
  as_good = (cost[:, None] <= cost) & (quality[:, None] >= quality)
  better = (cost[:, None] < cost) | (quality[:, None] > quality)
  return finite & ~(as_good & better).any(0)


@dataclasses.dataclass(kw_only=True)
class Evaluator(heads.Evaluator):
  """Sweeps the confidence rule over thresholds; writes frontier.csv.

  Temperatures are those that serve, of calibration.json. If it is missing, or
  of other parameters, they are fitted on `calibration_split`, if there is one,
  and written. The quality is the main number of the GLUE task, or accuracy
  without one. The cost is counted in layers; `benchmarks.eat` counts FLOPs.
  """

  thresholds: tuple[calibration.Share, ...] = (0.80, 0.85, 0.90, 0.95)
  task: glue.TaskName = ''  # '' for that of the data set

  def __post_init__(self):
    super().__post_init__()
    task = glue.task_of(self.task, self.data)
    self._metric, self._quality = main_number(task)
    self._taus = sorted({float(tau) for tau in self.thresholds})

  def metric_names(self, measured):
    """See `evaluator.Evaluator`."""
    heads = [f'layer_{layer}' for layer in self.layers]
    taus = [f'tau_{tau:g}' for tau in self._taus]
    names = [f'{self._metric}_{end}' for end in (*heads, 'full', *taus)]
    kinds = 'depth', 'depth_share', 'agreement'
    names += [f'{kind}_{tau}' for kind in kinds for tau in taus]
    return names if heads else None

  def run(self, variables: Any) -> dict[str, float]:
    """Returns for every threshold t metric, depth, share and agreement.

    `<metric>_tau_<t>`, `depth_tau_<t>` (layers), `depth_share_tau_<t>` (of all
    layers), `agreement_tau_<t>`; `<metric>_full` is that of the last head,
    `<metric>_<head>` of each (`layer_4`, or `head_1` without `layers`) alone.
    """
    logits, labels = self.heads('split', variables)
    calibrated = scale(logits, self._temperatures(variables, len(logits)))
    names = self.names(len(logits))
    layers = [*names.values()]
    recording = Recording(logits, labels, layers, layers, None, self._quality)
    scores = [float(self._quality(head, labels)) for head in logits]
    pairs = zip([*names, 'full'], [*scores, scores[-1]], strict=True)
    result = {f'{self._metric}_{name}': score for name, score in pairs}
    lines = []
    for tau in (*self._taus, np.inf):
      point = recording.leave(Confidence(tau).first(calibrated))
      numbers = {
        self._metric: point.quality,
        'depth': point.depth,
        'depth_share': point.flops,
        'agreement': point.agreement,
      }
      shares = zip(layers, point.shares, strict=True)
      columns = numbers | {f'exit_{layer}': share for layer, share in shares}
      line: dict[str, Any] = {'rule': 'never', 'value': None}
      if tau < np.inf:
        line = {'rule': 'confidence', 'value': f'{tau:g}'}
        result |= {f'{k}_tau_{tau:g}': number for k, number in numbers.items()}
      lines.append(line | {name: f'{x:.6g}' for name, x in columns.items()})
    if path := self.file(FILE):
      report.write_csv(path, lines)
    return result

  def _temperatures(self, variables: Any, heads: int) -> Any:
    """Returns the temperatures that serve, of calibration.json."""
    workdir, column = self.context.workdir, self.column
    file = calibration.CalibrationFile(workdir, column=column)
    parameters = calibration.fingerprint(variables)
    valid = file.values and file.values.get('parameters') in (None, parameters)
    if self.calibration_split and not valid:
      names = 'context', 'dataset', 'split', 'calibration_split', 'layers'
      settings: Any = {name: getattr(self, name) for name in names}
      settings['column'] = self.column
      return calibration.Evaluator(**settings).report(variables)['temperatures']
    file.check_fingerprint(parameters)
    self.check_unfitted(file)
    return file.temperatures(heads, self.layers) or [1.0] * heads
