"""Trained EATs and their variants, with recorded logits of a split's rows.

Each model is run once, in its masked form, and the logits of all heads are
kept; `launch.eat_settings` measures exit rules on them.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dataset_lib import builder
from dataset_lib.errors import ConfigError
from dataset_lib.source import places
from eat import cost
from eat.calibration_file import CalibrationFile
from eat.model import EatClassifier
from eat.policy import EatPolicy
from eat.serving import EatChain
from eval_lib import frontier, glue, predictions
from serve_lib.chain import ServedRun
from train_lib import loading
from train_lib.run_directory import TOKENIZER

WINDOW = 32  # of the variant of a model without one (EAT, section 4)
BATCH = 64  # rows of a batch that is recorded


@dataclasses.dataclass(frozen=True)
class Model:
  """A finished run of a text task, as trained or changed, with a split's rows.

  Attributes:
    name: of the run, in tables.
    directory: of the run.
    step: of the checkpoint.
    task: of GLUE; '' for another.
    chain: the model with its parameters, as it is served.
    policy: its policy, with the temperatures of its heads.
    source: the rows.
    records: all rows, padded to the longest.
    split: their split.
    fitted: rows that the temperatures were fitted to, bool `[N]`.
    calibrated_by: where the temperatures come from.
    variant: the change, '' for none.
    logits: float32 `[E, N, C]` of all heads, not calibrated; see `record`.
    kept: tokens left after each pruning, `[N, P]`; see `record`.
  """

  name: str
  directory: str
  step: int
  task: str
  chain: EatChain
  policy: EatPolicy
  source: Any
  records: Mapping[str, np.ndarray]
  split: str
  fitted: np.ndarray
  calibrated_by: str
  variant: str = ''
  logits: Any = None
  kept: Any = None

  @property
  def module(self) -> EatClassifier:
    """The classifier."""
    return self.chain.model

  @property
  def heads(self) -> tuple[int, ...]:
    """The layers with a head."""
    return self.module.heads()

  @property
  def classes(self) -> int:
    """Logits of a head; 1 for a regression."""
    return self.logits.shape[-1]

  @property
  def length(self) -> np.ndarray:
    """Tokens of each row, `[N]`."""
    return self.records['length']

  @property
  def labels(self) -> np.ndarray:
    """The label of each row, `[N]`."""
    return self.records['label']

  @property
  def metric(self) -> str:
    """Name of the quality: the official one of the GLUE task."""
    if not self.policy.class_names:
      return 'pearson'
    return glue.TASK_METRICS[self.task][0] if self.task else 'accuracy'

  def quality(self, logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the metric of logits `[N, C]` and labels."""
    if self.metric == 'pearson':
      return glue.pearson(logits[:, 0].astype(float), labels.astype(float))
    if self.task:
      return glue.compute(self.task, logits, labels)['score']
    return frontier.accuracy(logits, labels)

  def agreement(self, logits: np.ndarray, full: np.ndarray) -> float:
    """Returns the share of equal answers; of regressions the correlation."""
    if self.metric == 'pearson':
      return self.quality(logits, full[:, 0])
    return frontier.same_class(logits, full)

  @property
  def calibrated(self) -> np.ndarray:
    """The logits over the temperatures, as the policy has them."""
    return self.logits / self.policy.temperatures[:, None, None]

  @property
  def left(self) -> np.ndarray:
    """Tokens left at each head, `[N, E]`; it comes before a pruning there."""
    tokens = np.concatenate([self.length[:, None], self.kept], axis=1)
    layers = self.module.prune_layers
    return tokens[:, [sum(p < head for p in layers) for head in self.heads]]

  @functools.cached_property
  def flops(self) -> np.ndarray:
    """FLOPs up to each head by formula, at the row's own length, `[N, E]`."""
    return _flops(self.module, self.length)

  @functools.cached_property
  def flops_served(self) -> np.ndarray:
    """As `flops`, at the row's length bucket; padding rows do not count."""
    buckets = np.array(self.policy.lengths)
    length = buckets[np.searchsorted(buckets, self.length)]
    return _flops(self.module, length)

  def dense_flops(self) -> np.ndarray:
    """FLOPs of each row without pruning, window and exits, `[N]`."""
    plain = self.module.clone(
      prune_layers=(), prune_ratios=(), window=0, exit_layers=()
    )
    return _flops(plain, self.length)[:, -1]


def _flops(module: EatClassifier, length: np.ndarray) -> np.ndarray:
  sizes, index = np.unique(length, return_inverse=True)
  table = [
    cost.stage_flops(module, size, cost.static_sizes(module, size), True)
    for size in sizes.tolist()
  ]
  return np.cumsum(table, axis=1)[index]


def load(
  name: str, directory: str, split: str, limit: int, flag: str, step: Any = None
) -> Model:
  """Reads a run and the rows of a split; `record` adds the logits.

  Args:
    name: in tables.
    directory: of the run.
    split: '' for the one of the run's evaluation 'dev'.
    limit: rows at most, the first of the split; 0 for all.
    flag: that named the directory, for errors.
    step: a step, 'best', or None for the newest.

  Raises:
    ConfigError: the directory has no run of a BERT, the calibration is that of
      another checkpoint, or the split cannot be limited.
    InvalidDataError: the labels are hidden.
  """
  config = loading.load_own_config(directory, flag)
  task = loading.load_task(directory, config, step)
  loaded = loading.load_params_on_one_device(directory, task, step)
  chain, policy = task.serve(
    loaded.variables, {'rule': 'never'}, ServedRun(directory, loaded.step)
  )
  if not (isinstance(chain, EatChain) and isinstance(policy, EatPolicy)):
    raise ConfigError(flag, directory, 'a run of an EAT or of a dense BERT')
  split = split or str(config.evals.get('dev', {}).get('split', 'validation'))
  if limit and ('[' in split or '+' in split):
    expected = 'none for a split that is a part of one or a sum; give --split'
    raise ConfigError('--limit', limit, expected)
  split += f'[:{limit}]' if limit else ''
  source: Any = builder.build_source(config.dataset, split)
  records = source.records(np.arange(len(source)))
  if policy.class_names:
    predictions.check_labels(records['label'], len(policy.class_names), split)
  values = CalibrationFile.read(directory, loaded.step).values
  return Model(
    name, directory, loaded.step, glue.task_of('', config.dataset.to_dict()),
    chain, policy, source, records, split,
    *_fitted(values, source, config.dataset, directory),
  )  # fmt: skip


def _fitted(
  values: Mapping[str, Any], source: Any, dataset: Any, directory: str
) -> tuple[np.ndarray, str]:
  """Returns which rows a calibration was fitted to, and where it comes from.

  Rows are the same if they have the same place in the same file.
  """
  none = np.zeros(len(source), bool)
  split = values.get('calibration_split', '')
  if not values.get('temperatures'):
    return none, 'none'
  if not split:
    return none, 'calibration.json, which does not name the rows'
  given = dict(values.get('dataset', dataset).items())
  own = pathlib.Path(directory) / TOKENIZER
  if 'tokenizer' in given and own.is_file():  # the other may have been moved
    given['tokenizer'] = str(own)
  used = set(places(builder.build_source(given, split)))
  fitted = np.array([place in used for place in places(source)])
  return fitted, f'calibration.json, fitted to {split}'


def check_same_rows(model: Model, other: Model, flag: str) -> None:
  """Raises ConfigError unless two runs have the same rows and labels."""
  if not np.array_equal(model.labels, other.labels):
    expected = (
      f'a run on the same rows as {model.directory}: {len(model.labels)} of '
      f'split {model.split!r}'
    )
    raise ConfigError(flag, other.directory, expected)


def record(
  model: Model, variant: str = '', module: EatClassifier | None = None
) -> Model:
  """Runs a model, or a variant of it, over all rows, sorted by length."""
  module = module or model.module
  records, buckets = model.records, np.array(model.policy.lengths)
  count, variables = len(model.labels), model.chain.variables
  order = np.argsort(model.length, kind='stable')
  heads, classes = len(module.heads()), module.num_classes
  logits = np.zeros((heads, count, classes), np.float32)
  kept = np.zeros((count, len(module.prune_layers)), np.int32)
  apply = jax.jit(lambda v, *inputs: module.apply(v, *inputs)[1])
  for start in range(0, count, BATCH):
    rows = order[np.arange(start, start + BATCH).clip(max=count - 1)]
    length = model.length[rows]
    size = int(buckets[np.searchsorted(buckets, length.max())])
    inputs = (records[name][rows, :size] for name in ('tokens', 'token_types'))
    out = jax.device_get(apply(variables, *inputs, length))
    logits[:, rows], kept[rows] = out['exits'], out['kept'].T
  if not np.isfinite(logits).all():
    raise FloatingPointError(f'{model.directory}: logits are not finite')
  chain = EatChain(module, variables, model.chain.pad_id, with_full=False)
  return dataclasses.replace(
    model, variant=variant, chain=chain, logits=logits, kept=kept
  )


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
