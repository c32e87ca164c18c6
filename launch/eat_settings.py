"""Exit rules measured on recorded logits of a trained EAT.

A setting is a model with an exit rule; its quality and cost follow from the
logits row by row. It is called `rule=value`, with a veto margin
`rule=value+veto=margin`, and of a changed model `variant/rule=value`.
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
from launch.eat_runs import Model

CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
MARGINS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98)
ENTROPIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)  # of the largest, log C
TOLERANCES = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
# The rule 'combined': this confidence, and the head before agrees.
COMBINED, COMBINED_PATIENCE = (0.6, 0.7, 0.8, 0.9), 2
# A row with confidence tau of two classes has a margin of 2 tau - 1; veto
# margins as shares of the way from there to 1.
VETOES = (0.25, 0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model with an exit rule, measured on the rows of the split.

  Attributes:
    name: see the module.
    model: the model.
    rule: when rows leave.
    value: the rule's parameter, of 'combined' tau; None if it has none.
    point: quality, depth, FLOPs over the dense model's, and so on.
    exits: index of the head at which each row leaves, `[N]`.
  """

  name: str
  model: Model
  rule: Rule
  value: float | None
  point: frontier.Point
  exits: np.ndarray

  @functools.cached_property
  def rows(self) -> dict[str, np.ndarray]:
    """Measures of each row, `[N]` each.

    Tokens; where it leaves: layers run, share of the tokens left, FLOPs at its
    own length and at its length bucket, as the engine runs it; answer, label.
    """
    model, chosen = self.model, self.chosen
    at = np.arange(len(chosen)), self.exits
    return {
      'length': model.length,
      'depth': np.array(model.heads)[self.exits],
      'retention': model.left[at] / model.length,
      'flops': model.flops[at],
      'flops_served': model.flops_served[at],
      'answer': chosen.argmax(1) if chosen.shape[1] > 1 else chosen[:, 0],
      'label': model.run.records['label'],
    }

  @property
  def chosen(self) -> np.ndarray:
    """The logits of the heads at which the rows leave, `[N, C]`."""
    return self.model.logits[self.exits, np.arange(len(self.exits))]

  @property
  def reason(self) -> str:
    """Name of the rule by which a row leaves early."""
    return exits.reason(self.rule, self.model.logits.shape[-1] == 1)


Rules = Mapping[str, tuple[Rule, float | None]]


def rules(model: Model, tau: float) -> Rules:
  """Returns all rules to sweep, with their parameters, by name.

  Args:
    model: with its logits.
    tau: confidence of the default setting, which gets the veto margins.
  """
  heads, classes = len(model.heads), model.logits.shape[-1]
  result: dict[str, tuple[Rule, Any]] = {'never': (Rule('never'), None)}
  if heads == 1:
    return result
  if classes == 1:
    return result | {
      f'tolerance={one:g}': (Rule('patience', tolerance=one), one)
      for one in TOLERANCES
    }
  entropies = [round(share * math.log(classes), 4) for share in ENTROPIES]
  for name, values in (
    ('confidence', sorted({*CONFIDENCES, tau})),
    ('entropy', entropies),
    ('margin', MARGINS),
    # It needs heads that can agree before the last.
    ('combined', COMBINED if heads > COMBINED_PATIENCE else ()),
  ):
    for one in values:
      rule = Rule(name, tau=float(one), patience=COMBINED_PATIENCE)
      result[f'{name}={one:g}'] = rule, float(one)
  for one in range(1, heads):
    result[f'patience={one}'] = Rule('patience', patience=one), float(one)
  least = max(2.0 * tau - 1.0, 0.0)
  for share in VETOES:
    margin = round(least + share * (1.0 - least), 4)
    rule = Rule('confidence', tau=tau, veto_margin=margin)
    result[f'confidence={tau:g}+veto={margin:g}'] = rule, tau
  return result


def default_name(model: Model, tau: float) -> str:
  """Returns the name of the setting that a model is served with by default."""
  if len(model.heads) == 1:
    return 'never'
  is_regression = model.logits.shape[-1] == 1
  return 'tolerance=0.1' if is_regression else f'confidence={tau:g}'


def measure(
  model: Model, chosen: Rules, full_flops: np.ndarray, prefix: str = ''
) -> list[Setting]:
  """Measures rules on the logits of a model.

  Args:
    model: with its logits.
    chosen: the rules by name.
    full_flops: FLOPs of each row in the dense model.
    prefix: of the names; '' for the variant's.

  Raises:
    InvalidDataError: the labels are hidden.
  """
  labels, classes = model.run.records['label'], model.logits.shape[-1]
  if classes > 1:
    predictions.check_labels(labels, classes, model.run.split)
  _, quality, agreement = model.run.metric()
  prefix = prefix or (f'{model.variant}/' if model.variant else '')
  leave = {
    name: np.asarray(exits.first_exit(rule, model.calibrated))
    for name, (rule, _) in chosen.items()
  }
  points = frontier.sweep(
    model.logits,
    labels,
    [
      frontier.Setting(rule.name, value, functools.partial(_known, leave[name]))
      for name, (rule, value) in chosen.items()
    ],
    layers=model.heads,
    flops=model.flops,
    full_flops=full_flops,
    quality=quality,
    agreement=agreement,
  )
  return [
    Setting(prefix + name, model, *chosen[name], point, leave[name])
    for name, point in zip(chosen, points, strict=True)
  ]


def _known(value: Any, logits: Any) -> Any:
  return value


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
  spent = np.array([setting.point.flops for setting in settings])
  quality = np.array([setting.point.quality for setting in settings])
  best = np.flatnonzero(frontier.pareto(spent, quality))
  # Equal points once; those of the unchanged model come first.
  _, first = np.unique(spent[best].round(12), return_index=True)
  always = {name: by_name[name] for name in ('never', default)}
  known = {(one.point.flops, one.point.quality) for one in always.values()}
  points = [
    settings[index]
    for index in best[first]
    if (settings[index].point.flops, settings[index].point.quality) not in known
  ]
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
  judged = ~model.run.fitted
  if model.logits.shape[-1] == 1 or len(model.heads) == 1 or not judged.any():
    raise InvalidDataError(
      '--guarantee: expected exits by confidence, and rows that no '
      f'temperature was fitted to, got {len(model.heads)} heads and '
      f'{int(judged.sum())} such rows; other rows are given as --split'
    )
  epsilon, delta, draws = (given[k] for k in ('epsilon', 'delta', 'draws'))
  logits = model.logits[:, judged]
  labels = model.run.records['label'][judged]
  heads = predictions.probabilities(model.calibrated[:, judged])
  thresholds = risk.default_thresholds(heads.shape[-1])
  leaves = risk.confidence_exits(heads, thresholds)
  result = []
  for name, losses in (
    ('disagreement', risk.disagreement(logits, leaves)),
    ('harm', risk.harm(logits, leaves, labels)),
  ):
    risks = risk.resampled_risk(
      losses, thresholds, epsilon, delta, rows=len(labels), draws=draws
    )
    found = risk.guaranteed_threshold(losses, thresholds, epsilon, delta)
    early = 0.0
    if found.threshold is not None:
      early = float((leaves[found.certified - 1] < len(heads) - 1).mean())
    result.append(
      dict(
        loss=name, epsilon=epsilon, delta=delta, rows=len(labels), draws=draws,
        exceeded=float((risks > epsilon).mean()), worst=float(risks.max()),
        mean=float(risks.mean()), threshold=found.threshold, early=early,
      )
    )  # fmt: skip
  return result


def calibration_rows(model: Model) -> list[dict[str, Any]]:
  """Returns ECE and accuracy of each head; nothing without judged rows."""
  judged = ~model.run.fitted
  if model.logits.shape[-1] == 1 or not judged.any():
    return []
  logits = model.logits[:, judged]
  labels = model.run.records['label'][judged]
  temperatures = model.run.policy.temperatures
  before = calibration.errors(logits, labels)
  after = calibration.errors(logits, labels, temperatures=temperatures)
  return [
    dict(
      layer=layer, accuracy=float((head.argmax(-1) == labels).mean()),
      temperature=float(temperatures[place]), rows=len(labels),
      ece=before[place], ece_calibrated=after[place],
    )
    for place, (layer, head) in enumerate(
      zip(model.heads, logits, strict=True)
    )
  ]  # fmt: skip
