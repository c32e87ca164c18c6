"""Exit rules of EATs, measured on recorded logits; no model is run again."""

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
# Rules to sweep for classes, and for a regression.
SWEPT: Sequence[type[RowRule]] = (
  row_rules.Confidence, row_rules.Entropy, row_rules.Margin, row_rules.Patience
)  # fmt: skip
OF_REGRESSIONS: Sequence[type[RowRule]] = (row_rules.Tolerance,)


class Setting(NamedTuple):
  name: str  # `rule=value`; other models prefix their variant or run
  model: Model  # recorded
  rule: RowRule
  point: frontier.Point

  def cost(self, measure: str) -> np.ndarray:
    """Returns a measure of each row where it leaves, see `Model.cost`."""
    return self._where_rows_leave(self.model.cost[measure])

  def metrics(self) -> dict[str, float]:
    model = self.model
    names = glue.TASK_METRICS.get(model.task, ())
    if len(names) < 2:
      return {}
    logits = self._where_rows_leave(model.calibrated.swapaxes(0, 1))
    values = glue.compute(model.task, logits, model.records['label'])
    return {name: values[name] for name in names}

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
    extra = {tau} if kind is row_rules.Confidence else set()
    values = sorted({*kind.sweep(model.classes, early)} | extra)
    for value in values:
      yield kind(**{kind.KNOB: value})
    if not values:  # a rule of a user that names none
      yield kind()


def measure(
  model: Model,
  full_flops: np.ndarray,
  tau: float,
  swept: Sequence[type[RowRule]] = SWEPT,
) -> dict[str, Setting]:
  """Returns all exit rules by name; `full_flops` `[N]` of the dense model."""
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
  """Returns the settings to time.

  `text` is 'auto' (or 'none') for the full model, the default and points of the
  frontier of quality against FLOPs, spread evenly; 'all', or names.
  """
  names = dict.fromkeys(settings if text == 'all' else text.split(','))
  if text in ('auto', 'none'):
    always = 'never', default
    listed = [*dict.fromkeys([*always, *settings])]
    points = [settings[name].point for name in listed]
    places = np.array([(point.flops, point.quality) for point in points])
    # Equal points once; the unchanged model comes first.
    places, first = np.unique(places, axis=0, return_index=True)
    best = [listed[n] for n in first[frontier.pareto(*places.T)]]
    best = [name for name in best if name not in always]
    spread = np.linspace(0, len(best) - 1, min(MOST, len(best))).round()
    names = dict.fromkeys([*always, *(best[int(n)] for n in spread)])
  elif not {*names} <= {*settings}:
    expected = f'auto, all, none or names: {", ".join(list(settings)[:3])}'
    raise ConfigError('--time', text, expected)
  return [settings[name] for name in names]


def _others(flags: Any, eat: Model, rows: Mapping[str, Any]) -> Iterator[Model]:
  """Yields the other runs of the flags, recorded on the rows of the EAT."""
  runs = [(n, getattr(flags, n), f'--{n}') for n in DENSE if getattr(flags, n)]
  runs += [(*item.split('=', 1), '--ablation') for item in flags.ablation]
  own = eat.records
  for name, directory, flag in runs:
    model = load(name, directory, flag, **rows)
    if not np.array_equal(model.records['label'], own['label']):
      count = len(own['label'])
      expected = f'a run on the same {count} rows as {flags.workdir}'
      raise ConfigError(flag, directory, expected)
    if not np.array_equal(model.records['length'], own['length']):
      logging.warning(
        '%s %s: its rows are not as long as those of %s, so the tokenizer or '
        'dataset.max_length differs', flag, directory, flags.workdir,
      )  # fmt: skip
    module = model.module
    adaptive = module.exit_layers, module.prune_layers, module.window
    if name in DENSE and any(adaptive):
      expected = 'a run without exits, pruning and window'
      raise ConfigError(flag, directory, expected)
    yield record(model)


def sweep(flags: Any) -> tuple[dict[str, Setting], Setting, list[Setting]]:
  """Measures all settings on recorded logits.

  Returns (settings of all runs by name, default of the EAT, settings to time,
  the reference of the speed-ups first).
  """
  tau, names = flags.tau, flags.rules
  registry.trust_named(names)
  swept = *SWEPT, *(registry.locate(n, '--rules', RowRule) for n in names)
  rows = {name: getattr(flags, name) for name in ('split', 'limit', 'lengths')}
  eat = load('EAT', flags.workdir, '--workdir', step=flags.step, **rows)
  others = [*_others(flags, eat, rows)]
  recorded = [*variants(eat, flags.prune_scales)]
  dense = (others if flags.dense else recorded)[0].module.clone(
    prune_layers=(), prune_ratios=(), window=0, exit_layers=()
  )
  full = flops(dense, eat.records['length'])[:, -1]
  own: dict[str, Setting] = {}
  for model in recorded:
    own |= measure(model, full, tau, swept)
  settings: dict[str, Setting] = {}
  for model in others:  # one setting of each
    name = f'{model.name}/{default_name(model, tau)}'
    settings[name] = measure(model, full, tau)[name]
  default = own[default_name(recorded[0], tau)]
  timed = choose(own, flags.time, default.name)
  first = [settings.get('dense/never', own['never']), *settings.values()]
  first += [default] * bool(flags.ablation)
  every = {setting.name: setting for setting in (*first, *timed)}
  return settings | own, default, [*every.values()]
