"""Settings of a trained EAT: a model with an exit rule, measured on a split.

The quality and cost of a rule follow from recorded logits row by row. A setting
is called `rule=value`, of a changed model `variant/rule=value`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataset_lib.errors import ConfigError, InvalidDataError
from eat import exits
from eat.exits import Rule
from eval_lib import calibration, frontier, predictions, risk
from launch.eat_models import Model

# Values of each rule; those of the entropy are shares of the largest, log C.
SWEPT: Mapping[str, Sequence[float]] = {
  'confidence': (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99),
  'entropy': (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
  'margin': (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98),
  'tolerance': (0.05, 0.1, 0.2, 0.3, 0.5, 1.0),  # of a regression
}


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model with an exit rule, measured on the rows of the split.

  Attributes:
    name: see the module.
    model: the model, recorded.
    rule: when rows leave.
    point: quality, depth, FLOPs over the dense model's, and so on.
    exits: index of the head at which each row leaves, `[N]`.
  """

  name: str
  model: Model
  rule: Rule
  point: frontier.Point
  exits: np.ndarray

  @property
  def chosen(self) -> np.ndarray:
    """The logits of the heads at which the rows leave, `[N, C]`."""
    return self.model.logits[self.exits, np.arange(len(self.exits))]

  @functools.cached_property
  def rows(self) -> dict[str, np.ndarray]:
    """Measures of each row, `[N]` each, `retention` the share of its tokens."""
    model, chosen = self.model, self.chosen
    at = np.arange(len(chosen)), self.exits
    return {
      'length': model.length,
      'depth': np.array(model.heads)[self.exits],
      'retention': model.left[at] / model.length,
      'flops': model.flops[at],
      'flops_served': model.flops_served[at],
      'answer': chosen.argmax(1) if chosen.shape[1] > 1 else chosen[:, 0],
      'label': model.labels,
    }


def default_name(model: Model, tau: float) -> str:
  """Returns the name of the setting that a model is served with by default."""
  if len(model.heads) == 1:
    return 'never'
  return 'tolerance=0.1' if model.classes == 1 else f'confidence={tau:g}'


def _rules(model: Model, tau: float) -> dict[tuple[str, float | None], Rule]:
  """Returns the rules to sweep, by name and value."""
  result: dict[tuple[str, float | None], Rule] = {
    ('never', None): Rule('never')
  }
  heads = len(model.heads)
  if heads == 1:
    return result
  if model.classes == 1:
    for value in SWEPT['tolerance']:
      result['tolerance', value] = Rule('patience', tolerance=value)
    return result
  for name in ('confidence', 'entropy', 'margin'):
    for value in sorted({*SWEPT[name], *([tau] * (name == 'confidence'))}):
      if name == 'entropy':
        value = round(value * math.log(model.classes), 4)
      result[name, value] = Rule(name, tau=value)
  for count in range(1, heads):
    result['patience', float(count)] = Rule('patience', patience=count)
  return result


def measure(
  model: Model, full_flops: np.ndarray, tau: float, prefix: str = ''
) -> list[Setting]:
  """Measures all exit rules on the logits of a model.

  Args:
    model: recorded.
    full_flops: FLOPs of each row in the dense model.
    tau: confidence of the default setting.
    prefix: of the names; '' for the variant's.
  """
  prefix = prefix or (f'{model.variant}/' if model.variant else '')
  result = []
  for (name, value), rule in _rules(model, tau).items():
    leave = np.asarray(exits.first_exit(rule, model.calibrated))
    [point] = frontier.sweep(
      model.logits,
      model.labels,
      [frontier.Setting(name, value, functools.partial(_known, leave))],
      layers=model.heads,
      flops=model.flops,
      full_flops=full_flops,
      quality=model.quality,
      agreement=model.agreement,
    )
    title = prefix + (name if value is None else f'{name}={value:g}')
    result.append(Setting(title, model, rule, point, leave))
  return result


def _known(exits_of: np.ndarray, logits: Any) -> np.ndarray:
  return exits_of


def choose(
  settings: Sequence[Setting], text: str, default: str, most: int
) -> list[Setting]:
  """Returns the settings to time.

  Args:
    settings: all of them.
    text: 'auto' for the full model, the default and the frontier of quality
      against FLOPs; 'all', 'none', or names.
    default: name of the default setting.
    most: points of the frontier at most for 'auto', spread evenly.

  Raises:
    ConfigError: there is no such setting.
  """
  by_name = {setting.name: setting for setting in settings}
  if text in ('all', 'none'):
    return list(settings) if text == 'all' else []
  if text != 'auto':
    names = list(dict.fromkeys(text.split(',')))
    if not {*names} <= {*by_name}:
      expected = f'auto, all, none or names: {", ".join(list(by_name)[:3])}'
      raise ConfigError('--time', text, expected)
    return [by_name[name] for name in names]
  places = [(one.point.flops, one.point.quality) for one in settings]
  always = {name: by_name[name] for name in ('never', default)}
  known = {(one.point.flops, one.point.quality) for one in always.values()}
  # Equal points once; those of the unchanged model come first.
  best: dict[Any, Setting] = {}
  is_best = frontier.pareto(*np.array(places).T)
  for index in np.flatnonzero(is_best).tolist():
    if places[index] not in known:
      best.setdefault(places[index], settings[index])
  points = [best[place] for place in sorted(best)]
  spread = np.linspace(0, len(points) - 1, min(most, len(points))).round()
  return [*always.values(), *(points[int(index)] for index in spread)]


def guarantee(model: Model, given: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Resamples the rows: how often do guaranteed thresholds fail?

  Once for the disagreement with the full model and once for the harm, rows
  that it has right and the early exit wrong. Only rows count that no
  temperature was fitted to.

  Raises:
    InvalidDataError: a regression, a model without exits, or no rows.
  """
  judged = ~model.fitted
  if model.classes == 1 or len(model.heads) == 1 or not judged.any():
    raise InvalidDataError(
      '--guarantee: expected exits by confidence, and rows that no '
      f'temperature was fitted to, got {len(model.heads)} heads and '
      f'{int(judged.sum())} such rows; other rows are given as --split'
    )
  logits, labels = model.logits[:, judged], model.labels[judged]
  bounds, draws = (given['epsilon'], given['delta']), given['draws']
  heads = predictions.probabilities(model.calibrated[:, judged])
  thresholds = risk.default_thresholds(model.classes)
  leaves = risk.confidence_exits(heads, thresholds)
  losses = {
    'disagreement': risk.disagreement(logits, leaves),
    'harm': risk.harm(logits, leaves, labels),
  }
  result = []
  for name, loss in losses.items():
    risks = risk.resampled_risk(
      loss, thresholds, *bounds, rows=len(labels), draws=draws
    )
    found = risk.guaranteed_threshold(loss, thresholds, *bounds)
    early = 0.0
    if found.threshold is not None:
      early = float((leaves[found.certified - 1] < len(heads) - 1).mean())
    result.append(
      dict(
        loss=name, epsilon=bounds[0], delta=bounds[1], rows=len(labels),
        draws=draws, exceeded=float((risks > bounds[0]).mean()),
        worst=float(risks.max()), mean=float(risks.mean()),
        threshold=found.threshold, early=early,
      )
    )  # fmt: skip
  return result


def calibration_rows(model: Model) -> list[dict[str, Any]]:
  """Returns ECE and accuracy of each head; nothing without judged rows."""
  judged = ~model.fitted
  if model.classes == 1 or not judged.any():
    return []
  logits, labels = model.logits[:, judged], model.labels[judged]
  temperatures = model.policy.temperatures
  before = calibration.errors(logits, labels)
  after = calibration.errors(logits, labels, temperatures=temperatures)
  return [
    dict(
      layer=layer, accuracy=frontier.accuracy(head, labels),
      temperature=float(temperatures[place]), rows=len(labels),
      ece=before[place], ece_calibrated=after[place],
    )
    for place, (layer, head) in enumerate(
      zip(model.heads, logits, strict=True)
    )
  ]  # fmt: skip


def setting_row(setting: Setting) -> dict[str, Any]:
  """Returns means over the rows; `agreement` is with the own last head."""
  point, model = setting.point, setting.model
  mean = {name: float(values.mean()) for name, values in setting.rows.items()}
  return dict(
    setting=setting.name, run=model.directory,
    variant=model.variant or 'as trained', rule=point.rule, value=point.value,
    quality=point.quality,
    agreement=point.agreement if len(model.heads) > 1 else None,
    depth=point.depth, retention=mean['retention'], flops=mean['flops'],
    flops_share=point.flops, flops_served=mean['flops_served'],
    early=1.0 - point.shares[-1],
  ) | {
    f'exit_{layer}': share
    for layer, share in zip(model.heads, point.shares, strict=True)
  }  # fmt: skip


def example_rows(
  setting: Setting, latency: Mapping[int, float]
) -> list[dict[str, Any]]:
  """Returns a line for each row of the split.

  `kept_<layer>` are the tokens left after the pruning at that layer, None if
  the row left before it.

  Args:
    setting: the setting.
    latency: seconds of the rows that were timed.
  """
  model, result = setting.model, []
  for row in range(len(setting.exits)):
    line = {name: values[row].item() for name, values in setting.rows.items()}
    is_last = setting.exits[row] == len(model.heads) - 1
    right = int(line['answer'] == line['label'])
    line |= {
      'exit_reason': 'last layer' if is_last else setting.point.rule,
      'correct': right if model.classes > 1 else None,
      'latency': latency.get(row),
    }
    kept = zip(model.module.prune_layers, model.kept[row].tolist(), strict=True)
    # The pruning at the layer of a head comes after the head.
    line |= {f'kept_{at}': n if at < line['depth'] else None for at, n in kept}
    result.append({'setting': setting.name, 'index': row, **line})
  return result
