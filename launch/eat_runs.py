"""Trained EATs with recorded logits, and exit rules measured on them.

Each model is run once over the rows of a split, in its masked form, and the
logits of all heads are kept; quality and cost of a rule follow row by row.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dataset_lib import builder
from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.source import places
from eat import cost, exits
from eat.calibration_file import CalibrationFile
from eat.model import EatClassifier
from eat.serving import EatChain
from eval_lib import calibration, frontier, glue, predictions, risk
from serve_lib.chain import ServedRun
from train_lib import loading

BATCH = 64  # rows of a batch that is recorded
WINDOW = 32  # of the variant of a model without one (EAT, section 4)
MOST = 6  # points of the frontier that are timed
# Values of each rule; those of the entropy are shares of the largest, log C.
SWEPT: Mapping[str, Sequence[float]] = {
  'confidence': (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99),
  'entropy': (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
  'margin': (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98),
  'tolerance': (0.05, 0.1, 0.2, 0.3, 0.5, 1.0),  # of a regression
}


@dataclasses.dataclass(frozen=True)
class Model:
  """A run of a text task, as trained or changed, on the rows of a split."""

  name: str  # of the run, in tables
  directory: str
  step: int
  task: str  # of GLUE; '' for another
  chain: EatChain  # the model with its parameters, as it is served
  policy: Any  # with the temperatures of the heads
  split: str
  source: Any  # the split
  records: Mapping[str, np.ndarray]  # its rows, padded to the longest
  fitted: np.ndarray  # rows that the temperatures were fitted to, bool `[N]`
  calibrated_by: str  # where the temperatures come from
  variant: str = ''  # the change, '' for none
  logits: Any = None  # of all heads `[E, N, C]`, not calibrated; see `record`

  @property
  def heads(self) -> tuple[int, ...]:
    """Layers with a head."""
    return self.chain.model.heads()

  @property
  def classes(self) -> int:
    """Logits of a head; 1 for a regression."""
    return self.logits.shape[-1]

  @property
  def calibrated(self) -> np.ndarray:
    """Logits over the temperatures, as the policy has them."""
    return self.logits / self.policy.temperatures[:, None, None]

  @property
  def judged(self) -> np.ndarray:
    """Rows for calibration errors: none of a regression, no fitted ones."""
    return ~self.fitted & (self.classes > 1)

  @property
  def metric(self) -> str:
    """Name of the quality: the official one of the GLUE task."""
    return glue.TASK_METRICS[self.task][0] if self.task else 'accuracy'

  def quality(self, logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the metric of logits `[N, C]` and labels."""
    if self.task:
      return glue.compute(self.task, logits, labels)['score']
    return frontier.accuracy(logits, labels)

  def agreement(self, logits: np.ndarray, full: np.ndarray) -> float:
    """Returns the share of equal answers; of regressions the correlation."""
    if self.classes == 1:
      return float(np.corrcoef(logits[:, 0], full[:, 0])[0, 1])
    return frontier.same_class(logits, full)

  @functools.cached_property
  def kept(self) -> np.ndarray:
    """Tokens of each row that each pruning leaves, `[N, P]`."""
    return _by_length(
      self.records['length'], self.chain.model, cost.static_sizes
    )

  @functools.cached_property
  def cost(self) -> dict[str, np.ndarray]:
    """Measures of each row that leaves at each head, `[N, E]` each.

    `retention` is the share of the tokens that is left; `flops` are by formula
    at the row's own length, `flops_served` at its length bucket.
    """
    module, length = self.chain.model, self.records['length']
    # A head comes before a pruning at its layer.
    passed = [sum(p < head for p in module.prune_layers) for head in self.heads]
    tokens = np.concatenate([length[:, None], self.kept], axis=1)
    buckets = np.array(self.policy.lengths)
    served = buckets[np.searchsorted(buckets, length)]
    return {
      'depth': np.tile(self.heads, (len(length), 1)),
      'retention': tokens[:, passed] / length[:, None],
      'flops': _by_length(length, module, _flops),
      'flops_served': _by_length(served, module, _flops),
    }

  def dense_flops(self) -> np.ndarray:
    """Returns FLOPs of each row without pruning, window and exits, `[N]`."""
    plain = self.chain.model.clone(
      prune_layers=(), prune_ratios=(), window=0, exit_layers=()
    )
    return _by_length(self.records['length'], plain, _flops)[:, -1]


def _flops(module: EatClassifier, length: int) -> Any:
  """Returns the FLOPs of a row up to each head."""
  sizes = cost.static_sizes(module, length)
  return np.cumsum(cost.stage_flops(module, length, sizes, count_cls=True))


def _by_length(length: np.ndarray, module: Any, function: Any) -> np.ndarray:
  """Returns `function(module, length)` of each row, computed once a length."""
  sizes, index = np.unique(length, return_inverse=True)
  return np.array([function(module, size) for size in sizes.tolist()])[index]


def load(
  name: str,
  directory: str,
  given: Mapping[str, Any],
  flag: str,
  step: Any = None,
) -> Model:
  """Reads a run and the rows of a split; `record` adds the logits.

  Args:
    name: in tables.
    directory: of the run.
    given: the flags of the command.
    flag: that named the directory, for errors.
    step: a step, 'best', or None for the newest.

  Raises:
    ConfigError: the directory has no run of a BERT, or the calibration is that
      of another checkpoint.
    InvalidDataError: the labels are hidden.
  """
  config = loading.load_own_config(directory, flag)
  task = loading.load_task(directory, config, step)
  loaded = loading.load_params_on_one_device(directory, task, step)
  run = ServedRun(directory, loaded.step)
  policy: Any
  chain, policy = task.serve(loaded.variables, {'rule': 'never'}, run)
  if not isinstance(chain, EatChain):
    raise ConfigError(flag, directory, 'a run of an EAT or of a dense BERT')
  own = config.evals.get('dev', {}).get('split', 'validation')
  split, dataset = given['split'] or own, config.dataset.to_dict()
  source: Any = builder.build_source(dataset, split)
  rows = np.arange(min(given['limit'] or len(source), len(source)))
  records = source.records(rows)
  if policy.class_names:
    predictions.check_labels(records['label'], len(policy.class_names), split)
  values = CalibrationFile.read(directory, loaded.step).values
  fitted, calibrated_by = _fitted(values, source, dataset)
  print(f'{name}: {directory}, step {loaded.step}, {len(rows)} rows of {split}')
  return Model(
    name, directory, loaded.step, glue.task_of('', dataset), chain, policy,
    split, source, records, fitted[rows], calibrated_by,
  )  # fmt: skip


def _fitted(
  values: Mapping[str, Any], source: Any, dataset: Mapping[str, Any]
) -> tuple[np.ndarray, str]:
  """Returns which rows a calibration was fitted to, and where it comes from.

  Rows are the same if they have the same place in the same file.
  """
  split, none = values.get('calibration_split', ''), np.zeros(len(source), bool)
  if not values.get('temperatures'):
    return none, 'none'
  if not split:
    return none, 'calibration.json, which does not name the rows'
  given = dict(values.get('dataset', dataset))
  if 'tokenizer' in given:  # that of the calibration may have been moved
    given['tokenizer'] = dataset['tokenizer']
  used = set(places(builder.build_source(given, split)))
  fitted = np.array([place in used for place in places(source)])
  return fitted, f'calibration.json, fitted to {split}'


def record(
  model: Model, variant: str = '', module: EatClassifier | None = None
) -> Model:
  """Runs a model, or a variant of it, over all rows, sorted by length."""
  module = module or model.chain.model
  records, buckets = model.records, np.array(model.policy.lengths)
  lengths, variables = records['length'], model.chain.variables
  count, order = len(lengths), np.argsort(lengths, kind='stable')
  shape = len(module.heads()), count, module.num_classes
  logits = np.zeros(shape, np.float32)
  apply = jax.jit(lambda v, *inputs: module.apply(v, *inputs)[1]['exits'])
  for start in range(0, count, BATCH):
    rows = order[np.arange(start, start + BATCH).clip(max=count - 1)]
    size = buckets[np.searchsorted(buckets, lengths[rows].max())]
    inputs = (records[name][rows, :size] for name in ('tokens', 'token_types'))
    logits[:, rows] = apply(variables, *inputs, lengths[rows])
  if not np.isfinite(logits).all():
    raise FloatingPointError(f'{model.directory}: logits are not finite')
  chain = EatChain(module, variables, model.chain.pad_id, with_full=False)
  return dataclasses.replace(model, variant=variant, chain=chain, logits=logits)


def variants(
  module: EatClassifier, scales: Sequence[float]
) -> dict[str, EatClassifier]:
  """Returns the model as trained, '', with other prune ratios, and window.

  Raises:
    ConfigError: a scaled ratio is not below 1.
  """
  result = {'': module}
  for scale in scales if any(module.prune_ratios) else ():
    ratios = tuple(round(scale * ratio, 4) for ratio in module.prune_ratios)
    if max(ratios) >= 1.0:
      expected = f'scales of {tuple(module.prune_ratios)} that leave tokens'
      raise ConfigError('--prune_scales', scale, expected)
    if scale != 1.0:
      result[f'prune_{scale:g}'] = module.clone(prune_ratios=ratios)
  window = 0 if module.window else WINDOW
  name = f'window_{window}' if window else 'no_window'
  return result | {name: module.clone(window=window)}


# -- exit rules ----------------------------------------------------------------


class Setting(NamedTuple):
  """A model with an exit rule, measured on the rows of the split."""

  name: str  # `rule=value`, of a changed model `variant/rule=value`
  model: Model  # recorded
  rule: exits.Rule
  point: frontier.Point  # means over the rows
  exits: np.ndarray  # index of the head at which each row leaves, `[N]`

  @property
  def chosen(self) -> np.ndarray:
    """Logits of the heads at which the rows leave, `[N, C]`."""
    return self.model.logits[self.exits, np.arange(len(self.exits))]

  def rows(self) -> dict[str, np.ndarray]:
    """Returns measures of each row, `[N]` each; see `Model.cost`."""
    at, chosen = (np.arange(len(self.exits)), self.exits), self.chosen
    records, is_class = self.model.records, self.model.classes > 1
    return {
      'length': records['length'],
      **{name: table[at] for name, table in self.model.cost.items()},
      'answer': chosen.argmax(1) if is_class else chosen[:, 0],
      'label': records['label'],
    }


def default_name(model: Model, tau: float) -> str:
  """Returns the name of the setting that a model is served with by default."""
  if len(model.heads) == 1:
    return 'never'
  return 'tolerance=0.1' if model.classes == 1 else f'confidence={tau:g}'


def _rules(model: Model, tau: float) -> Iterator[tuple[str, Any, exits.Rule]]:
  """Yields (name, value, rule) to sweep."""
  yield 'never', None, exits.Rule('never')
  early = len(model.heads) - 1
  if model.classes == 1:
    for value in SWEPT['tolerance'] if early else ():
      yield 'tolerance', value, exits.Rule('patience', tolerance=value)
    return
  for name in ('confidence', 'entropy', 'margin') if early else ():
    unit = math.log(model.classes) if name == 'entropy' else 1.0
    own = [tau] if name == 'confidence' else []
    for value in sorted({*SWEPT[name], *own}):
      value = round(value * unit, 4)
      yield name, value, exits.Rule(name, tau=value)
  for count in range(1, early + 1):
    yield 'patience', float(count), exits.Rule('patience', patience=count)


def measure(
  model: Model, full_flops: np.ndarray, tau: float, prefix: str = ''
) -> dict[str, Setting]:
  """Measures all exit rules on the logits of a model; returns them by name.

  Args:
    model: recorded.
    full_flops: FLOPs of each row in the dense model.
    tau: confidence of the default setting.
    prefix: of the names; '' for the variant's.
  """
  prefix = prefix or (f'{model.variant}/' if model.variant else '')
  result = {}
  for name, value, rule in _rules(model, tau):
    found = np.asarray(exits.first_exit(rule, model.calibrated))
    known = functools.partial(lambda found, logits: found, found)
    setting = frontier.Setting(name, value, known)
    [point] = frontier.sweep(
      model.logits, model.records['label'], [setting], layers=model.heads,
      flops=model.cost['flops'], full_flops=full_flops, quality=model.quality,
      agreement=model.agreement,
    )  # fmt: skip
    title = prefix + (name if value is None else f'{name}={value:g}')
    result[title] = Setting(title, model, rule, point, found)
  return result


def choose(
  settings: Mapping[str, Setting], text: str, default: str
) -> list[Setting]:
  """Returns the settings to time.

  Args:
    settings: all of them, by name.
    text: 'auto' for the full model, the default and points of the frontier of
      quality against FLOPs, spread evenly; 'all', 'none', or names.
    default: name of the default setting.

  Raises:
    ConfigError: there is no such setting.
  """
  if text in ('all', 'none'):
    return list(settings.values()) if text == 'all' else []
  if text != 'auto':
    names = list(dict.fromkeys(text.split(',')))
    if not {*names} <= {*settings}:
      expected = f'auto, all, none or names: {", ".join(list(settings)[:3])}'
      raise ConfigError('--time', text, expected)
    return [settings[name] for name in names]
  # Equal points once; those of the unchanged model come first.
  by_place: dict[tuple[float, float], Setting] = {}
  always = {name: settings[name] for name in ('never', default)}
  for one in (*always.values(), *settings.values()):
    by_place.setdefault((one.point.flops, one.point.quality), one)
  is_best = frontier.pareto(*np.array(list(by_place)).T)
  pairs = zip(by_place.items(), is_best, strict=True)
  best = sorted(
    p for (p, one), good in pairs if good and one.name not in always
  )
  spread = np.linspace(0, len(best) - 1, min(MOST, len(best))).round()
  return [*always.values(), *(by_place[best[int(n)]] for n in spread)]


# -- tables --------------------------------------------------------------------


def setting_row(setting: Setting) -> dict[str, Any]:
  """Returns means over the rows; `agreement` is with the own last head."""
  point, model = setting.point, setting.model
  mean = {name: float(v.mean()) for name, v in setting.rows().items()}
  names = ('depth', 'retention', 'flops')
  row = {
    'setting': setting.name,
    'run': model.directory,
    'variant': model.variant or 'as trained',
    'rule': point.rule,
    'value': point.value,
    'quality': point.quality,
    'agreement': point.agreement if len(model.heads) > 1 else None,
    **{name: mean[name] for name in names},
    'flops_share': point.flops,
    'flops_served': mean['flops_served'],
    'early': 1.0 - point.shares[-1],
  }
  shares = zip(model.heads, point.shares, strict=True)
  return row | {f'exit_{layer}': share for layer, share in shares}


def example_rows(
  setting: Setting, latency: Mapping[int, float]
) -> Iterator[dict[str, Any]]:
  """Yields a line for each row of the split.

  `kept_<layer>` are the tokens left after the pruning at that layer, None if
  the row left before it; `latency` are seconds of the rows that were timed.
  """
  model, values = setting.model, setting.rows()
  layers = model.chain.model.prune_layers
  for row, leave in enumerate(setting.exits):
    line = {name: value[row].item() for name, value in values.items()}
    is_last = leave == len(model.heads) - 1
    right = int(line['answer'] == line['label'])
    line['exit_reason'] = 'last layer' if is_last else setting.point.rule
    line['correct'] = right if model.classes > 1 else None
    line['latency'] = latency.get(row)
    for at, kept in zip(layers, model.kept[row].tolist(), strict=True):
      # The pruning at the layer of a head comes after the head.
      line[f'kept_{at}'] = kept if at < line['depth'] else None
    yield {'setting': setting.name, 'index': row, **line}


def calibration_rows(model: Model) -> list[dict[str, Any]]:
  """Returns ECE and accuracy of each head; nothing without judged rows."""
  logits = model.logits[:, model.judged]
  labels = model.records['label'][model.judged]
  if not len(labels):
    return []
  scales = model.policy.temperatures
  before = calibration.errors(logits, labels)
  after = calibration.errors(logits, labels, temperatures=scales)
  columns = ('layer', 'temperature', 'ece', 'ece_calibrated')
  numbers = zip(model.heads, scales.tolist(), before, after, strict=True)
  return [
    {'accuracy': frontier.accuracy(head, labels), 'rows': len(labels)}
    | dict(zip(columns, row, strict=True))
    for head, row in zip(logits, numbers, strict=True)
  ]


def guarantee(model: Model, given: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Resamples the rows: how often do guaranteed thresholds fail?

  Once for the disagreement with the full model and once for the harm, rows
  that it has right and the early exit wrong. Only rows count that no
  temperature was fitted to.

  Raises:
    InvalidDataError: a regression, a model without exits, or no rows.
  """
  logits = model.logits[:, model.judged]
  labels, last = model.records['label'][model.judged], len(logits) - 1
  if not last or not len(labels):
    raise InvalidDataError(
      '--guarantee: expected exits by confidence, and rows that no '
      f'temperature was fitted to, got {last + 1} heads and {len(labels)} such '
      'rows; other rows are given as --split'
    )
  epsilon, delta, draws = (given[n] for n in ('epsilon', 'delta', 'draws'))
  heads = predictions.probabilities(model.calibrated[:, model.judged])
  thresholds = risk.default_thresholds(model.classes)
  leaves = risk.confidence_exits(heads, thresholds)
  losses = {
    'disagreement': risk.disagreement(logits, leaves),
    'harm': risk.harm(logits, leaves, labels),
  }
  result = []
  for name, loss in losses.items():
    limits = loss, thresholds, epsilon, delta
    risks = risk.resampled_risk(*limits, rows=len(labels), draws=draws)
    found = risk.guaranteed_threshold(*limits)
    early = leaves[found.certified - 1] < last if found.certified else 0.0
    row = {'loss': name, 'epsilon': epsilon, 'delta': delta, 'draws': draws}
    row |= {'rows': len(labels), 'exceeded': float((risks > epsilon).mean())}
    row |= {'worst': float(risks.max()), 'mean': float(risks.mean())}
    row |= {'threshold': found.threshold, 'early': float(np.mean(early))}
    result.append(row)
  return result
