"""Exit rules of EATs, measured on recorded logits.

Quality and cost of a rule follow row by row; no model is run again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from benchmarks.recorded_runs import Model, flops, load, record, variants
from core import registry
from core.errors import ConfigError
from eval_lib import frontier, glue
from halting import row_rules
from halting.row_rules import Never, RowRule

DENSE = ('dense', 'student')  # runs that other libraries can run too
MOST = 6  # points of the frontier that are timed
# Rules that are swept, and those of a regression.
SWEPT: Sequence[type[RowRule]] = (
  row_rules.Confidence, row_rules.Entropy, row_rules.Margin, row_rules.Patience
)  # fmt: skip
OF_REGRESSIONS: Sequence[type[RowRule]] = (row_rules.Tolerance,)


class Setting(NamedTuple):
  """A model with an exit rule, measured on the rows of the split."""

  name: str  # `rule=value`; other models prefix their variant or run
  model: Model  # recorded
  rule: RowRule
  point: frontier.Point

  def cost(self, measure: str) -> np.ndarray:
    """Returns a measure of each row where it leaves, see `Model.cost`."""
    return self._where_rows_leave(self.model.cost[measure])

  def metrics(self) -> dict[str, float]:
    """Returns all metrics, the quality first, of a task with several."""
    model = self.model
    names = glue.TASK_METRICS.get(model.task, ())
    if len(names) < 2:
      return {}
    logits = self._where_rows_leave(model.calibrated.swapaxes(0, 1))
    found = glue.compute(model.task, logits, model.records['label'])
    return {name: found[name] for name in names}

  def _where_rows_leave(self, values: np.ndarray) -> np.ndarray:
    exits = self.point.exits
    return values[np.arange(len(exits)), exits]


def default_name(model: Model, tau: float) -> str:
  """Returns the name of the setting that a model is served with by default."""
  if len(model.heads) == 1:
    return 'never'
  return 'tolerance=0.1' if model.classes == 1 else f'confidence={tau:g}'


def _rules(
  model: Model, tau: float, swept: Sequence[type[RowRule]]
) -> Iterator[RowRule]:
  """Yields rules to sweep; confidence also with `tau`."""
  yield Never()
  early = len(model.heads) - 1
  kinds = OF_REGRESSIONS if model.classes == 1 else swept
  for kind in kinds if early else ():
    values: set[Any] = {*kind.sweep(model.classes, early)}
    if kind is row_rules.Confidence:
      values.add(tau)
    for value in sorted(values):
      yield kind(**{kind.KNOB: value})


def measure(
  model: Model,
  full_flops: np.ndarray,
  tau: float,
  swept: Sequence[type[RowRule]] = SWEPT,
) -> dict[str, Setting]:
  """Measures all exit rules on recorded logits; returns them by name.

  `full_flops` `[N]`: FLOPs of each row in the dense model.
  """
  recording = frontier.Recording(
    model.calibrated, model.records['label'], model.heads, model.cost['flops'],
    full_flops, frontier.main_number(model.task)[1],
  )  # fmt: skip
  prefix = model.variant if model.name == 'EAT' else model.name
  result = {}
  for rule in _rules(model, tau, swept):
    point = recording.leave(rule.first(recording.logits))
    name = f'{prefix}/{rule}' if prefix else str(rule)
    result[name] = Setting(name, model, rule, point)
  return result


def choose(
  settings: Mapping[str, Setting], text: str, default: str
) -> list[Setting]:
  """Returns the settings to time; raises ConfigError for unknown names.

  `text` is 'auto' (or 'none') for the full model, the default and points of the
  frontier of quality against FLOPs, spread evenly; 'all', or names.
  """
  names = dict.fromkeys(settings if text == 'all' else text.split(','))
  if text in ('auto', 'none'):
    always = 'never', default
    listed = [*dict.fromkeys([*always, *settings])]
    points = [settings[name].point for name in listed]
    places = np.array([(point.flops, point.quality) for point in points])
    # Equal points once; those of the unchanged model come first.
    places, first = np.unique(places, axis=0, return_index=True)
    best = [listed[n] for n in first[frontier.pareto(*places.T)]]
    best = [name for name in best if name not in always]
    spread = np.linspace(0, len(best) - 1, min(MOST, len(best))).round()
    names = dict.fromkeys([*always, *(best[int(n)] for n in spread)])
  elif not {*names} <= {*settings}:
    expected = f'auto, all, none or names: {", ".join(list(settings)[:3])}'
    raise ConfigError('--time', text, expected)
  return [settings[name] for name in names]


def sweep(
  given: Mapping[str, Any],
) -> tuple[dict[str, Setting], Setting, list[Setting]]:
  """Records all models and measures all settings on their logits.

  Returns (settings of all runs by name, default setting that the EAT is served
  with, settings to time with the reference of the speed-ups first).
  """
  tau = given['tau']
  swept = (
    *SWEPT,
    *(registry.locate(n, '--rules', RowRule) for n in given['rules']),
  )
  eat = load('EAT', given['workdir'], given, '--workdir', given['step'])
  runs = {name: (given[name], f'--{name}') for name in DENSE if given[name]}
  pairs = (item.split('=', 1) for item in given['ablation'])
  runs |= {name: (directory, '--ablation') for name, directory in pairs}
  others, labels = [], eat.records['label']
  for name, (directory, flag) in runs.items():
    other = load(name, directory, given, flag, None)
    if not np.array_equal(other.records['label'], labels):
      expected = f'a run on the same {len(labels)} rows as {given["workdir"]}'
      raise ConfigError(flag, directory, expected)
    if not np.array_equal(other.records['length'], eat.records['length']):
      logging.warning(
        '%s %s: its rows are not as long as those of %s, so the tokenizer or '
        'dataset.max_length differs', flag, directory, given['workdir'],
      )  # fmt: skip
    module = other.module
    mechanisms = module.exit_layers, module.prune_layers, module.window
    if name in DENSE and any(mechanisms):
      expected = 'a run without exits, pruning and window'
      raise ConfigError(flag, directory, expected)
    others.append(record(other))
  recorded = [*variants(eat, given['prune_scales'])]
  dense = (others if given['dense'] else recorded)[0].module.clone(
    prune_layers=(), prune_ratios=(), window=0, exit_layers=()
  )
  full = flops(dense, eat.records['length'])[:, -1]
  settings: dict[str, Setting] = {}
  own: dict[str, Setting] = {}
  for model in recorded:
    own |= measure(model, full, tau, swept)
  for model in others:  # one setting of each
    name = f'{model.name}/{default_name(model, tau)}'
    settings[name] = measure(model, full, tau)[name]
  default = own[default_name(recorded[0], tau)]
  timed = choose(own, given['time'], default.name)
  first = [settings.get('dense/never', own['never']), *settings.values()]
  first += [default] * bool(given['ablation'])
  every = {one.name: one for one in (*first, *timed)}
  return settings | own, default, [*every.values()]
