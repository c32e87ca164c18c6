"""Trained EATs with recorded logits.

Each model is run once over the rows of a split, in its masked form, and the
logits of all heads are kept; `benchmarks.exit_settings` measures rules on them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core.errors import ConfigError
from dataset_lib import builder
from eat.chain import EatChain
from eat.model import EatClassifier
from eat.policy import ExitPolicy
from eval_lib import frontier, glue, predictions
from eval_lib.calibration import CalibrationFile
from halting.row_rules import scale
from serve_lib.chain import doubling
from serve_lib.engine import Engine
from serve_lib.monitor import Monitor
from train_lib import loading
from train_lib.task import ServedRun

BATCH = 64  # rows of a batch that is recorded


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
    """Layers with a head."""
    return self.module.heads()

  @property
  def classes(self) -> int:
    """Logits of a head; 1 for a regression."""
    return self.logits.shape[-1]

  @property
  def calibrated(self) -> np.ndarray:
    """Logits divided by the temperatures of the policy."""
    return scale(self.logits, self.policy.temperatures)

  @property
  def judged(self) -> np.ndarray:
    """Rows not used for fitting, bool `[N]`; all False for a regression."""
    return ~self.fitted & (self.classes > 1)

  def items(self, rows: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """Returns rows of the split as the engine takes them."""
    records = [self.data.source.record(int(row)) for row in rows]
    return [{k: one[k] for k in ('tokens', 'token_types')} for one in records]

  @functools.cached_property
  def lengths(self) -> tuple[int, ...]:
    """The length buckets that the rows need."""
    longest, (*every,) = self.records['length'].max(), self.policy.lengths
    return tuple(every[: np.searchsorted(every, longest) + 1])

  def start(self, batch: int) -> Engine:
    """Returns an engine for the lengths of the rows; no caller waits."""
    engine = Engine(
      self.policy.chain, self.policy, self.lengths, doubling(batch),
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
    """Measures of each row that leaves at each head, `[N, E]` each.

    `retention` is the share of the tokens that is left; `flops` are by formula
    at the row's own length.
    """
    length = self.records['length']
    # A head comes before a pruning at its layer.
    passed = [sum(p < h for p in self.module.prune_layers) for h in self.heads]
    tokens = np.concatenate([length[:, None], self.kept], axis=1)

    retention = tokens[:, passed] / length[:, None]
    return {'retention': retention, 'flops': flops(self.module, length)}


def flops(module: EatClassifier, length: np.ndarray) -> np.ndarray:
  """Returns the FLOPs of rows up to each head, `[N, E]`."""
  found, places = np.unique(length, return_inverse=True)
  table = []
  for tokens in found.tolist():
    sizes = module.static_sizes(tokens)
    table.append(module.stage_flops(tokens, sizes, count_cls=True))
  return np.cumsum(table, axis=1)[places]


def load(
  name: str, directory: str, given: Mapping[str, Any], flag: str, step: Any
) -> Model:
  """Reads a run and the rows of a split; `record` adds the logits.

  `given` has the `split` and the `limit` of its rows and the `lengths` of the
  buckets (None: the run's), and may have options to `serve` the run with; the
  default is that no row leaves early.
  Raises ConfigError, of the flag, if the directory has no run of a BERT, and
  InvalidDataError if the labels are hidden.
  """
  config = loading.load_config(directory, flag)
  loaded = loading.restore(directory, config, step)
  step = loaded.saved.step
  run = ServedRun(directory, step, lengths=given['lengths'])
  policy: Any
  options = given.get('serve', {'rule': 'never'})
  chain, policy = loaded.task.serve(loaded.variables, options, run)
  if not isinstance(chain, EatChain):
    raise ConfigError(flag, directory, 'a run of an EAT or of a dense BERT')
  own = config.evals.get('dev', {}).get('split', 'validation')
  split, dataset = given['split'] or own, config.dataset.to_dict()
  rows: Any = builder.build_source(dataset, split, loaded.task.info)
  count = min(given['limit'] or len(rows), len(rows))
  records = rows.records(np.arange(count))
  if rows.sources:
    records['source'] = np.array(rows.sources[:count])
  if policy.class_names:
    most = len(policy.class_names) - 1
    predictions.check_labels(records['label'], most, f'split {split!r}')
  if (longest := int(records['length'].max())) > policy.lengths[-1]:
    expected = f'at least the {longest} tokens of the longest row as the last'
    raise ConfigError('--lengths', policy.lengths, expected)
  file = CalibrationFile(directory, step)
  fitted, origin = _fitted(file, rows, dataset)
  print(f'{name}: {directory}, step {step}, {count} rows of {split}')
  task, length = glue.task_of('', dataset), records['length']
  shares = {f'p{n}': float(np.percentile(length, n)) for n in (5, 50, 95)}
  facts = {
    'workdir': directory,
    'step': step,
    'split': split,
    'rows': count,
    'temperatures': origin,
    'rows_fitted': int(fitted[:count].sum()),
    'device': jax.devices()[0].device_kind,
    'metric': frontier.main_number(task)[0],
    'length': {'mean': float(length.mean()), **shares},
  }
  data = builder.chosen(rows, np.arange(count), BATCH)
  return Model(name, facts, task, policy, data, records, fitted[:count])


def _fitted(
  file: CalibrationFile, rows: Any, dataset: Mapping[str, Any]
) -> tuple[np.ndarray, str]:
  """Returns rows the temperatures were fitted to; a description of the file."""
  used: set[str] = set()
  origin = 'calibration.json, which does not name the rows'
  if not file.values.get('temperatures'):
    origin = 'none'
  elif (known := file.fitted_rows(dataset)) is not None:
    origin = f'calibration.json, fitted to {file.values["calibration_split"]}'
    used = known.places()
  places = (rows.where(index) for index in range(len(rows)))
  return np.array([place in used for place in places]), origin


def record(model: Model, variant: str = '', **changes: Any) -> Model:
  """Runs a model with changed fields over all rows."""
  chain, module = model.policy.chain, model.module.clone(**changes)

  @jax.jit
  def outputs(variables: Any, batch: Any) -> dict[str, Any]:
    inputs = (batch[name] for name in ('tokens', 'token_types', 'length'))
    out = module.apply(variables, *inputs)[1]
    found = {'logits': out['exits'], 'kept': out['kept']}
    return {name: jnp.moveaxis(one, 0, 1) for name, one in found.items()}

  rows = predictions.collect(model.data, chain.variables, outputs)
  chain = EatChain(module, chain.variables, chain.reader, with_unpruned=False)
  # Use a fresh monitor, because a drift check would send rows to full depth.
  policy = dataclasses.replace(model.policy, chain=chain, monitor=Monitor())
  logits = np.moveaxis(rows['logits'], 1, 0)
  changed: Any = dict(variant=variant, policy=policy, logits=logits)
  return dataclasses.replace(model, **changed, observed=rows['kept'])


def variants(model: Model, scales: Sequence[int | float]) -> Iterator[Model]:
  """Yields the model as trained and with other prune ratios.

  Raises ConfigError if a scaled ratio is not below 1.
  """
  yield record(model)
  trained = tuple(model.module.prune_ratios)
  for factor in scales if any(trained) else ():
    ratios = tuple(round(factor * ratio, 4) for ratio in trained)
    if max(ratios) >= 1.0:
      expected = f'scales of {trained} that leave tokens'
      raise ConfigError('--prune_scales', factor, expected)
    if factor != 1.0:
      yield record(model, f'prune_{factor:g}', prune_ratios=ratios)
