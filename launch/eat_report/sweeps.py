"""The settings of an EAT report: exit rules swept over recorded logits.

A setting is a model and a rule. It is called `rule=value`, with a veto margin
`rule=value+veto=margin`, and where the model was changed
`variant/rule=value`. What it gives is counted row by row from the logits; only
the chosen ones are timed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eat import exits
from eat.exits import Rule
from eval_lib import frontier, predictions
from launch import command_line
from launch.eat_report.models import Model

CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
MARGINS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98)
# Of the largest entropy, log C.
ENTROPIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
TOLERANCES = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
# The rule 'combined': as sure as that, and the head before says the same.
COMBINED = (0.6, 0.7, 0.8, 0.9)
COMBINED_PATIENCE = 2
# Who is sure by tau has a margin of 2 tau - 1; veto margins as shares of the
# way from there to 1.
VETOES = (0.25, 0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model with a rule, and what they give over the rows of the split.

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

  @property
  def retention(self) -> np.ndarray:
    """Share of its tokens that each row has left where it leaves, `[N]`."""
    return _at(self.model.left, self.exits) / self.model.length

  @property
  def flops(self) -> np.ndarray:
    """FLOPs of each row at its own length, `[N]`."""
    return _at(self.model.flops, self.exits)

  @property
  def flops_served(self) -> np.ndarray:
    """FLOPs of each row at its length bucket, as the engine runs it, `[N]`."""
    return _at(self.model.flops_served, self.exits)

  @property
  def depth(self) -> np.ndarray:
    """Layers run for each row, `[N]`."""
    return np.array(self.model.heads)[self.exits]

  @property
  def chosen(self) -> np.ndarray:
    """The logits of the heads at which the rows leave, `[N, C]`."""
    return self.model.logits[self.exits, np.arange(len(self.exits))]

  def reasons(self) -> list[str]:
    """Why each row left, in the words of `eat.policy`."""
    last = len(self.model.heads) - 1
    early = exits.reason(self.rule, self.model.logits.shape[-1] == 1)
    return [
      'last layer' if head == last else early for head in self.exits.tolist()
    ]


def _at(table: np.ndarray, exit_heads: np.ndarray) -> np.ndarray:
  return table[np.arange(len(table)), exit_heads]


def rules(
  model: Model, tau: float = 0.9
) -> dict[str, tuple[Rule, float | None]]:
  """All rules to sweep, with their parameters, by name.

  Args:
    model: with its logits.
    tau: confidence of the default setting, which is among them and gets the
      veto margins. Of two classes, a veto only says in other words that the
      confidence must be higher.
  """
  result: dict[str, tuple[Rule, float | None]] = {'never': (never(), None)}
  heads, classes = len(model.heads), model.logits.shape[-1]
  if heads == 1:
    return result
  if classes == 1:
    for tolerance in TOLERANCES:
      name = f'tolerance={tolerance:g}'
      result[name] = Rule('patience', tolerance=tolerance), tolerance
    return result
  for name, values in (
    ('confidence', sorted({*CONFIDENCES, tau})),
    ('entropy', [round(s * math.log(classes), 4) for s in ENTROPIES]),
    ('margin', MARGINS),
  ):
    for value in values:
      result[f'{name}={value:g}'] = Rule(name, tau=float(value)), float(value)
  # The last head has nobody to agree with that could still save anything.
  for patience in range(1, heads):
    result[f'patience={patience}'] = (
      Rule('patience', patience=patience), float(patience),
    )  # fmt: skip
  return result | _combined(heads) | _vetoes(tau)


def _combined(heads: int) -> dict[str, tuple[Rule, float | None]]:
  """Confident and patient; nothing where only the last heads could agree."""
  if heads <= COMBINED_PATIENCE:
    return {}
  return {
    f'combined={tau:g}': (
      Rule('combined', tau=tau, patience=COMBINED_PATIENCE), tau,
    )
    for tau in COMBINED
  }  # fmt: skip


def _vetoes(tau: float) -> dict[str, tuple[Rule, float | None]]:
  """Confident, but nobody leaves whose margin is below the veto's."""
  surely = max(2.0 * tau - 1.0, 0.0)
  margins = [round(surely + share * (1.0 - surely), 4) for share in VETOES]
  return {
    f'confidence={tau:g}+veto={margin:g}': (
      Rule('confidence', tau=tau, veto_margin=margin), tau,
    )
    for margin in margins
  }  # fmt: skip


def never() -> Rule:
  """The rule of the full model."""
  return Rule('never')


def measure(
  model: Model,
  chosen: Mapping[str, tuple[Rule, float | None]],
  labels: np.ndarray,
  quality: Callable[[Any, Any], float],
  agreement: Callable[[Any, Any], float],
  full_flops: np.ndarray,
  prefix: str = '',
) -> list[Setting]:
  """What rules give on a model.

  Args:
    model: with its logits.
    chosen: the rules by name.
    labels: of the rows.
    quality: see `eval_lib.frontier.sweep`.
    agreement: see there.
    full_flops: FLOPs of each row in the dense model.
    prefix: of the names; '' for the variant's.

  Raises:
    InvalidDataError: the labels are hidden.
  """
  classes = model.logits.shape[-1]
  if classes > 1:
    predictions.check_labels(labels, classes, model.run.split)
  prefix = prefix or (f'{model.variant}/' if model.variant else '')
  logits = model.calibrated
  result = []
  for name, (rule, value) in chosen.items():
    exit_heads = np.asarray(exits.first_exit(rule, logits))
    # Temperatures change no answer; a regression has none.
    [point] = frontier.sweep(
      model.logits,
      labels,
      [frontier.Setting(rule.name, value, _constantly(exit_heads))],
      layers=model.heads,
      flops=model.flops,
      full_flops=full_flops,
      quality=quality,
      agreement=agreement,
    )
    result.append(Setting(prefix + name, model, rule, value, point, exit_heads))
  return result


def _constantly(value: Any) -> Callable[[Any], Any]:
  return lambda logits: value


def default_name(model: Model, tau: float) -> str:
  """The name of the setting a model is served with unless told otherwise."""
  if len(model.heads) == 1:
    return 'never'
  if model.logits.shape[-1] == 1:
    return 'tolerance=0.1'
  return f'confidence={tau:g}'


def choose(
  settings: Sequence[Setting], spec: str, default: str, most: int
) -> list[Setting]:
  """The settings to time.

  Args:
    settings: all of them.
    spec: 'auto' for the full model, the default and the frontier of quality
      against FLOPs; 'all', 'none', or names.
    default: name of the default setting.
    most: for 'auto', at most so many points of the frontier, spread evenly.

  Raises:
    UsageError: there is no such setting.
  """
  by_name = {setting.name: setting for setting in settings}
  if spec in ('all', 'none'):
    return list(settings) if spec == 'all' else []
  if spec != 'auto':
    names = spec.split(',')
    for name in names:
      if name not in by_name:
        raise command_line.UsageError(
          f'--time: expected auto, all, none or names of settings such as '
          f'{", ".join(list(by_name)[:3])}, got {name!r}'
        )
    return [by_name[name] for name in dict.fromkeys(names)]
  cost = np.array([setting.point.flops for setting in settings])
  quality = np.array([setting.point.quality for setting in settings])
  best = np.flatnonzero(frontier.pareto(cost, quality))
  # Equal points once; those of the unchanged model come first.
  _, first = np.unique(cost[best].round(12), return_index=True)
  always = [by_name[name] for name in dict.fromkeys(('never', default))]
  known = {(one.point.flops, one.point.quality) for one in always}
  points = [settings[place] for place in best[first]]
  points = [
    one for one in points if (one.point.flops, one.point.quality) not in known
  ]
  spread = np.linspace(0, len(points) - 1, min(most, len(points))).round()
  return [*always, *(points[int(place)] for place in spread)]
