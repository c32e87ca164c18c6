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
    sizes = tuple(every[: np.searchsorted(every, longest) + 1]), doubling(batch)
    engine = Engine(self.policy.chain, self.policy, *sizes, max_pending=10**7)
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
  name: str, directory: str, flag: str, *, step: Any = None, split: str = '',
  limit: int = 0, lengths: tuple[int, ...] | None = None,
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
    'temperatures': origin, 'rows_fitted': int(fitted.sum()),
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
