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
from dataset_lib.errors import ConfigError
from dataset_lib.source import places
from eat import cost, exits
from eat.calibration_file import CalibrationFile
from eat.model import EatClassifier
from eat.policy import EatPolicy
from eat.serving import EatChain
from eval_lib import frontier, glue, predictions
from serve_lib.chain import ServedRun
from serve_lib.monitor import Monitor
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
  policy: EatPolicy  # with the chain and the temperatures of its heads
  split: str
  source: Any  # the split
  records: Mapping[str, np.ndarray]  # its rows, padded to the longest
  fitted: np.ndarray  # rows that the temperatures were fitted to, bool `[N]`
  calibrated_by: str  # where the temperatures come from
  variant: str = ''  # the change, '' for none
  logits: Any = None  # of all heads `[E, N, C]`, not calibrated; see `record`

  @property
  def module(self) -> EatClassifier:
    """The classifier; a dense one prunes nothing and has one head."""
    return self.policy.chain.model

  @property
  def heads(self) -> tuple[int, ...]:
    """Layers with a head."""
    return self.module.heads()

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

  @functools.cached_property
  def kept(self) -> np.ndarray:
    """Tokens of each row that each pruning leaves, `[N, P]`."""
    length = self.records['length'].tolist()
    return np.array([cost.static_sizes(self.module, size) for size in length])

  @functools.cached_property
  def cost(self) -> dict[str, np.ndarray]:
    """Measures of each row that leaves at each head, `[N, E]` each.

    `retention` is the share of the tokens that is left; `flops` are by formula
    at the row's own length, `flops_served` at its length bucket.
    """
    module, length = self.module, self.records['length']
    # A head comes before a pruning at its layer.
    passed = [sum(p < head for p in module.prune_layers) for head in self.heads]
    tokens = np.concatenate([length[:, None], self.kept], axis=1)
    buckets = np.array(self.policy.lengths)
    return {
      'depth': np.tile(self.heads, (len(length), 1)),
      'retention': tokens[:, passed] / length[:, None],
      'flops': flops(module, length),
      'flops_served': flops(module, buckets[np.searchsorted(buckets, length)]),
    }


def flops(module: EatClassifier, length: np.ndarray) -> np.ndarray:
  """Returns the FLOPs of rows up to each head, `[N, E]`."""

  @functools.cache
  def count(length: int) -> Any:
    sizes = cost.static_sizes(module, length)
    return np.cumsum(cost.stage_flops(module, length, sizes, count_cls=True))

  return np.array([count(size) for size in length.tolist()])


def load(
  name: str, directory: str, given: Mapping[str, Any], flag: str, step: Any
) -> Model:
  """Reads a run and the rows of a split; `record` adds the logits.

  Raises ConfigError, of the flag, if the directory has no run of a BERT, and
  InvalidDataError if the labels are hidden.
  """
  config = loading.load_config(directory, flag)
  loaded = loading.restore(directory, config, step)
  run = ServedRun(directory, loaded.step)
  policy: Any
  chain, policy = loaded.task.serve(loaded.variables, {'rule': 'never'}, run)
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
    name, directory, loaded.step, glue.task_of('', dataset), policy, split,
    source, records, fitted[rows], calibrated_by,
  )  # fmt: skip


def _fitted(
  values: Mapping[str, Any], source: Any, dataset: Mapping[str, Any]
) -> tuple[np.ndarray, str]:
  """Returns the rows that a calibration was fitted to, and its origin.

  Rows are the same if they have the same place in the same file.
  """
  split, used = values.get('calibration_split', ''), set()
  origin = 'calibration.json, which does not name the rows'
  if not values.get('temperatures'):
    origin = 'none'
  elif split:
    origin = f'calibration.json, fitted to {split}'
    given = dict(values.get('dataset', dataset))
    if 'tokenizer' in given:  # that of the calibration may have been moved
      given['tokenizer'] = dataset['tokenizer']
    used = {*places(builder.build_source(given, split))}
  return np.array([place in used for place in places(source)]), origin


def record(model: Model, variant: str = '', **changes: Any) -> Model:
  """Runs a model with changed fields over all rows, sorted by length."""
  records, chain = model.records, model.policy.chain
  module = model.module.clone(**changes)
  lengths, buckets = records['length'], np.array(model.policy.lengths)
  count, order = len(lengths), np.argsort(lengths, kind='stable')
  shape = len(module.heads()), count, module.num_classes
  logits = np.zeros(shape, np.float32)
  apply = jax.jit(lambda v, *inputs: module.apply(v, *inputs)[1]['exits'])
  for start in range(0, count, BATCH):
    rows = order[np.arange(start, start + BATCH).clip(max=count - 1)]
    size = buckets[np.searchsorted(buckets, lengths[rows].max())]
    inputs = (records[name][rows, :size] for name in ('tokens', 'token_types'))
    logits[:, rows] = apply(chain.variables, *inputs, lengths[rows])
  if not np.isfinite(logits).all():
    raise FloatingPointError(f'{model.directory}: logits are not finite')
  chain = EatChain(module, chain.variables, chain.pad_id, with_full=False)
  # A drift check would send rows to full depth.
  policy = dataclasses.replace(model.policy, chain=chain, monitor=Monitor())
  return dataclasses.replace(
    model, variant=variant, policy=policy, logits=logits
  )


def variants(model: Model, scales: Sequence[float]) -> Iterator[Model]:
  """Yields the model as trained, with other prune ratios, and other window.

  Raises ConfigError if a scaled ratio is not below 1.
  """
  yield record(model)
  module = model.module
  for scale in scales if any(module.prune_ratios) else ():
    ratios = tuple(round(scale * ratio, 4) for ratio in module.prune_ratios)
    if max(ratios) >= 1.0:
      expected = f'scales of {tuple(module.prune_ratios)} that leave tokens'
      raise ConfigError('--prune_scales', scale, expected)
    if scale != 1.0:
      yield record(model, f'prune_{scale:g}', prune_ratios=ratios)
  window = 0 if module.window else WINDOW
  name = f'window_{window}' if window else 'no_window'
  yield record(model, name, window=window)


# -- exit rules ----------------------------------------------------------------


class Setting(NamedTuple):
  """A model with an exit rule, measured on the rows of the split."""

  name: str  # `rule=value`, of another model `variant/rule=value`
  model: Model  # recorded
  rule: exits.Rule
  point: frontier.Point  # means over the rows
  rows: dict[str, np.ndarray]  # measures of each row, see `Model.cost`


def default_name(model: Model, tau: float) -> str:
  """Returns the name of the setting that a model is served with by default."""
  if len(model.heads) == 1:
    return 'never'
  return 'tolerance=0.1' if model.classes == 1 else f'confidence={tau:g}'


def _rules(model: Model, tau: float) -> Iterator[tuple[str, Any, exits.Rule]]:
  """Yields (name, value, rule) to sweep."""
  yield 'never', None, exits.Rule('never')
  early, swept = len(model.heads) - 1, dict(SWEPT)
  numbers = swept.pop('tolerance')
  if model.classes == 1:
    for value in numbers if early else ():
      yield 'tolerance', value, exits.Rule('patience', tolerance=value)
    return
  swept['confidence'] = list({*swept['confidence'], tau})
  for name, values in swept.items() if early else ():
    unit = math.log(model.classes) if name == 'entropy' else 1.0
    for value in sorted(round(value * unit, 4) for value in values):
      yield name, value, exits.Rule(name, tau=value)
  for count in range(1, early + 1):
    yield 'patience', float(count), exits.Rule('patience', patience=count)


def measure(
  model: Model, full_flops: np.ndarray, tau: float
) -> dict[str, Setting]:
  """Measures all exit rules on recorded logits; returns them by name.

  `full_flops` `[N]` are of the rows in the dense model.
  """
  rules, logits = [*_rules(model, tau)], model.calibrated
  points = frontier.sweep(
    logits,
    model.records['label'],
    [
      frontier.Setting(name, value, functools.partial(exits.first_exit, rule))
      for name, value, rule in rules
    ],
    layers=model.heads,
    flops=model.cost['flops'],
    full_flops=full_flops,
    quality=frontier.main_number(model.task)[1],
  )
  prefix = model.variant if model.name == 'EAT' else model.name
  result = {}
  for (name, value, rule), point in zip(rules, points, strict=True):
    at = np.arange(len(point.exits)), point.exits
    chosen = logits[point.exits, at[0]]
    rows = {
      'length': model.records['length'],
      **{measure: table[at] for measure, table in model.cost.items()},
      'answer': chosen.argmax(1) if model.classes > 1 else chosen[:, 0],
      'label': model.records['label'],
    }
    title = name if value is None else f'{name}={value:g}'
    title = '/'.join(filter(None, [prefix, title]))
    result[title] = Setting(title, model, rule, point, rows)
  return result


def choose(
  settings: Mapping[str, Setting], text: str, default: str
) -> list[Setting]:
  """Returns the settings to time; raises ConfigError for unknown names.

  `text` is 'auto' for the full model, the default and points of the frontier
  of quality against FLOPs, spread evenly; 'all', 'none', or names.
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
  best = sorted(
    place
    for (place, one), good in zip(by_place.items(), is_best, strict=True)
    if good and one.name not in always
  )
  spread = np.linspace(0, len(best) - 1, min(MOST, len(best))).round()
  return [*always.values(), *(by_place[best[int(n)]] for n in spread)]
