"""Trained EATs with recorded logits, and exit rules measured on them.

Each model is run once over the rows of a split, in its masked form, and the
logits of all heads are kept; rules need no further run.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from core import registry
from core.errors import ConfigError
from dataset_lib import builder
from eat.chain import EatChain
from eat.model import EatClassifier
from eat.policy import ExitPolicy
from eval_lib import frontier, glue, predictions
from eval_lib.calibration import CalibrationFile
from halting import row_rules
from halting.row_rules import Never, RowRule, scale
from serve_lib.chain import doubling
from serve_lib.engine import Engine
from serve_lib.monitor import Monitor
from train_lib import loading
from train_lib.task import ServedRun

BATCH = 64  # rows of a batch that is recorded
DENSE = ('dense', 'student')  # runs that other libraries can run too
# Of an EAT, with the values of a dense one; EatModernBert has no window.
PARTS: Any = dict(prune_layers=(), prune_ratios=(), exit_layers=(), window=0)
MOST = 6  # points of the frontier that are timed
# Rules to sweep for classes, and for a regression.
SWEPT: Sequence[type[RowRule]] = (
  row_rules.Confidence, row_rules.Entropy, row_rules.Margin, row_rules.Patience
)  # fmt: skip
OF_REGRESSIONS: Sequence[type[RowRule]] = (row_rules.Tolerance,)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A run of a text task, as trained or changed, on the rows of a split."""

  name: str  # of the run, in tables
  facts: Mapping[str, Any]  # about the run and the rows, for the report
  task: str  # of GLUE; '' for another
  policy: ExitPolicy  # with the chain and the temperatures of its heads
  data: builder.Dataset  # its first rows, in batches
  records: Mapping[str, np.ndarray]  # the rows, padded to the longest
  fitted: np.ndarray  # rows that the temperatures were fitted to, bool `[N]`
  variant: str = ''  # the change, '' for none
  logits: Any = None  # of all heads `[E, N, C]`, not calibrated; see `record`
  observed: Any = None  # tokens that each pruning left, `[N, P]`; see `record`

  @property
  def module(self) -> EatClassifier:
    """The classifier; a dense one prunes nothing and has one head."""
    return self.policy.chain.model

  @property
  def heads(self) -> tuple[int, ...]:
    return self.module.heads()

  @property
  def classes(self) -> int:
    """Logits of a head; 1 for a regression."""
    return self.logits.shape[-1]

  @property
  def calibrated(self) -> np.ndarray:
    return scale(self.logits, self.policy.temperatures)

  @property
  def judged(self) -> np.ndarray:
    """Rows not used for fitting, bool `[N]`; all False for a regression."""
    return ~self.fitted & (self.classes > 1)

  def items(self, rows: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """Returns rows of the split as the engine takes them."""
    records = (self.data.source.record(int(row)) for row in rows)
    return [{k: row[k] for k in ('tokens', 'token_types')} for row in records]

  def start(self, batch: int) -> Engine:
    """Returns an engine for the lengths of the rows; no caller waits."""
    longest, (*every,) = self.records['length'].max(), self.policy.lengths
    lengths = tuple(every[: np.searchsorted(every, longest) + 1])
    engine = Engine(
      self.policy.chain, self.policy, lengths, doubling(batch),
      max_pending=10**7,
    )  # fmt: skip
    print(f'{self.name}: in {engine.warm_up(progress=True).backend}')
    return engine

  @functools.cached_property
  def kept(self) -> np.ndarray:
    """Tokens of each row that each pruning leaves, `[N, P]`."""
    length = self.records['length'].tolist()
    return np.array([self.module.static_sizes(size) for size in length])

  @functools.cached_property
  def cost(self) -> dict[str, np.ndarray]:
    """Share of tokens left, and FLOPs by formula, of rows by head, `[N, E]`."""
    length = self.records['length']
    # A head comes before a pruning at its layer.
    passed = [sum(p < h for p in self.module.prune_layers) for h in self.heads]
    tokens = np.concatenate([length[:, None], self.kept], axis=1)
    retention = tokens[:, passed] / length[:, None]
    return {'retention': retention, 'flops': flops(self.module, length)}


def flops(module: EatClassifier, length: np.ndarray) -> np.ndarray:
  """Returns the FLOPs of rows up to each head, `[N, E]`."""
  lengths, places = np.unique(length, return_inverse=True)
  table = [
    module.stage_flops(tokens, module.static_sizes(tokens), count_cls=True)
    for tokens in lengths.tolist()
  ]
  return np.cumsum(table, axis=1)[places]


def load(
  name: str, directory: str, flag: str, *, step: int | str | None = None,
  split: str = '', limit: int = 0, lengths: tuple[int, ...] | None = None,
  serve: Mapping[str, Any] | None = None,
) -> Model:  # fmt: skip
  """Reads a run and the rows of a split; `record` adds the logits.

  Args:
    flag: named by a ConfigError.
    split: '' for that of the evaluation dev.
    limit: number of first rows, 0 for all.
    serve: options to serve the run with; by default no row leaves early.
  """
  config = loading.load_config(directory, flag)
  loaded = loading.restore(directory, config, step)
  step = loaded.saved.step
  policy: Any
  chain, policy = loaded.task.serve(
    loaded.variables, {'rule': 'never'} if serve is None else serve,
    ServedRun(directory, step, lengths),
  )  # fmt: skip
  if not isinstance(chain, EatChain):
    raise ConfigError(flag, directory, 'a run of an EAT or of a dense BERT')
  split = split or config.evals.get('dev', {}).get('split', 'validation')
  dataset = config.dataset.to_dict()
  rows: Any = builder.build_source(dataset, split, loaded.task.info)
  count = min(limit or len(rows), len(rows))
  records = rows.records(np.arange(count))
  if rows.sources:
    records['source'] = np.array(rows.sources[:count])
  if policy.class_names:
    most = len(policy.class_names) - 1
    predictions.check_labels(records['label'], most, f'split {split!r}')
  length = records['length']
  if (longest := int(length.max())) > policy.lengths[-1]:
    expected = f'at least the {longest} tokens of the longest row as the last'
    raise ConfigError('--lengths', policy.lengths, expected)
  file, used, origin = CalibrationFile(directory, step), set[str](), 'none'
  if file.values.get('temperatures'):
    origin = 'calibration.json, which does not name the rows'
    if (chosen := file.fitted_rows(dataset)) is not None:
      origin = f'calibration.json, fitted to {file.values["calibration_split"]}'
      used = chosen.places()
  fitted = np.array([rows.where(n) in used for n in range(count)])
  print(f'{name}: {directory}, step {step}, {count} rows of {split}')
  task = glue.task_of('', dataset)
  shares = {f'p{n}': float(np.percentile(length, n)) for n in (5, 50, 95)}
  facts = {
    'workdir': directory, 'step': step, 'split': split, 'rows': count,
    'temperatures': origin, 'rows_in_calibration': int(fitted.sum()),
    'device': jax.devices()[0].device_kind,
    'metric': frontier.main_number(task)[0],
    'length': {'mean': float(length.mean()), **shares},
  }  # fmt: skip
  data = builder.chosen(rows, np.arange(count), BATCH)
  return Model(name, facts, task, policy, data, records, fitted)


def record(model: Model, variant: str = '', **changes: Any) -> Model:
  """Runs a model with changed fields over all rows."""
  chain, module = model.policy.chain, model.module.clone(**changes)

  @jax.jit
  def outputs(variables: Any, batch: Any) -> dict[str, Any]:
    inputs = (batch[name] for name in ('tokens', 'token_types', 'length'))
    out = module.apply(variables, *inputs)[1]
    heads = {'logits': out['exits'], 'kept': out['kept']}
    return {name: jnp.moveaxis(values, 0, 1) for name, values in heads.items()}

  rows = predictions.collect(model.data, chain.variables, outputs)
  chain = EatChain(module, chain.variables, chain.reader, with_unpruned=False)
  # Use a fresh monitor, because a drift check would send rows to full depth.
  policy = dataclasses.replace(model.policy, chain=chain, monitor=Monitor())
  logits = np.moveaxis(rows['logits'], 1, 0)
  changed: Any = dict(variant=variant, policy=policy, logits=logits)
  return dataclasses.replace(model, **changed, observed=rows['kept'])


def variants(model: Model, scales: Sequence[int | float]) -> Iterator[Model]:
  """Yields the model as trained and with other prune ratios."""
  yield record(model)
  trained = tuple(model.module.prune_ratios)
  for factor in scales if any(trained) else ():
    ratios = tuple(round(factor * ratio, 4) for ratio in trained)
    if max(ratios) >= 1.0:
      expected = f'scales of {trained} that leave tokens'
      raise ConfigError('--prune_scales', factor, expected)
    if factor != 1.0:
      yield record(model, f'prune_{factor:g}', prune_ratios=ratios)


class Setting(NamedTuple):
  name: str  # `rule=value`; other models prefix their variant or run
  model: Model  # recorded
  rule: RowRule
  point: frontier.Point

  def where_rows_leave(self, values: np.ndarray) -> np.ndarray:
    """Returns values `[N, E, ...]` of heads at the head of each row."""
    exits = self.point.exits
    return values[np.arange(len(exits)), exits]

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of a task of GLUE that has several."""
    task = self.model.task
    names = glue.TASK_METRICS.get(task, ())
    if len(names) < 2:
      return {}
    logits = self.where_rows_leave(self.model.calibrated.swapaxes(0, 1))
    values = glue.compute(task, logits, self.model.records['label'])
    return {name: values[name] for name in names}


def default_name(model: Model, tau: float) -> str:
  """Returns the name of the setting that a model is served with by default."""
  if len(model.heads) == 1:
    return 'never'
  return 'tolerance=0.1' if model.classes == 1 else f'confidence={tau:g}'


def measure(
  model: Model, full_flops: np.ndarray, tau: float, swept: Any = SWEPT
) -> dict[str, Setting]:
  """Returns all exit rules by name, confidence also with `tau`.

  `full_flops` `[N]` are the FLOPs of the dense model.
  """
  recording = frontier.Recording(
    model.calibrated, model.records['label'], model.heads, model.cost['flops'],
    full_flops, frontier.main_number(model.task)[1],
  )  # fmt: skip
  rules: list[RowRule] = [Never()]
  early = len(model.heads) - 1
  kinds = OF_REGRESSIONS if model.classes == 1 else swept
  for kind in kinds if early else ():
    values = {*kind.sweep(model.classes, early)}
    values |= {tau} if kind is row_rules.Confidence else set()
    # A rule of a user may name no values.
    rules += [kind(**{kind.KNOB: v}) for v in sorted(values)] or [kind()]
  prefix = model.variant if model.name == 'EAT' else model.name
  result = {}
  for rule in rules:
    name = f'{prefix}/{rule}' if prefix else str(rule)
    point = recording.leave(rule.first(recording.logits))
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
  for name, directory, flag in runs:
    model = load(name, directory, flag, **rows)
    same_labels, same_lengths = (
      np.array_equal(model.records[key], eat.records[key])
      for key in ('label', 'length')
    )
    if not same_labels:
      expected = f'a run on the same {len(eat.fitted)} rows as {flags.workdir}'
      raise ConfigError(flag, directory, expected)
    if not same_lengths:
      logging.warning(
        '%s %s: its rows are not as long as those of %s, so the tokenizer or '
        'dataset.max_length differs', flag, directory, flags.workdir,
      )  # fmt: skip
    if name in DENSE and any(vars(model.module).get(part) for part in PARTS):
      expected = 'a run without exits, pruning and window'
      raise ConfigError(flag, directory, expected)
    yield record(model)


def sweep(flags: Any) -> tuple[dict[str, Setting], Setting, list[Setting]]:
  """Measures all settings on recorded logits.

  Returns (settings of all runs by name, default of the EAT, settings to time,
  the reference of the speed-ups first).
  """
  registry.trust_named(flags.rules)
  swept = *SWEPT, *(registry.locate(n, '--rules', RowRule) for n in flags.rules)
  rows = {name: getattr(flags, name) for name in ('split', 'limit', 'lengths')}
  eat = load('EAT', flags.workdir, '--workdir', step=flags.step, **rows)
  compared = [*_others(flags, eat, rows)]
  recorded = [*variants(eat, flags.prune_scales)]
  module = (compared if flags.dense else recorded)[0].module
  none = {part: value for part, value in PARTS.items() if part in vars(module)}
  dense = module.clone(**none)
  full = flops(dense, eat.records['length'])[:, -1]
  of_eat: dict[str, Setting] = {}
  for model in recorded:
    of_eat |= measure(model, full, flags.tau, swept)
  names = {f'{m.name}/{default_name(m, flags.tau)}': m for m in compared}
  settings = {k: measure(m, full, flags.tau)[k] for k, m in names.items()}
  default = of_eat[default_name(recorded[0], flags.tau)]
  timed = choose(of_eat, flags.time, default.name)
  reference = settings.get('dense/never', of_eat['never'])
  first = reference, *settings.values(), *[default] * bool(flags.ablation)
  unique = {setting.name: setting for setting in (*first, *timed)}
  return settings | of_eat, default, [*unique.values()]
