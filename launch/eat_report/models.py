"""The models of an EAT report: runs, what they are changed to, what they say.

Each model is run once over the split, in its masked form, and its logits are
kept; the settings of exits are then measured on them (`sweeps`),
and the chosen ones timed (`speed`).
"""

import copy
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dataset_lib import builder, tokenizer
from dataset_lib.errors import ConfigError
from eat import cost, serving
from eat.model import EatClassifier
from eval_lib import evaluator, predictions
from eval_lib.calibration import FILE
from launch import command_line
from train_lib import loading, setup, sharding
from train_lib.run_directory import TOKENIZER

# What 'window off' is compared with where a model has none (EAT, section 4).
WINDOW = 32


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run of a text task, with its data.

  Attributes:
    name: what the tables call it.
    directory: of the run.
    config: its configuration, without the teacher, which is not needed.
    task: as it was at the checkpoint.
    variables: the parameters, on one device.
    step: of the checkpoint.
    records: the rows of the split.
    words: the tokenizer.
    split: the split.
  """

  name: str
  directory: str
  config: Any
  task: Any
  variables: Any
  step: int
  records: Any
  words: tokenizer.Tokenizer
  split: str


@dataclasses.dataclass(frozen=True)
class Model:
  """A run, as it is or changed, and what it says of every row.

  Attributes:
    run: whose parameters it has.
    variant: what was changed, '' for nothing.
    module: the classifier.
    temperatures: of its heads, `[E]`.
    logits: float32 `[E, N, C]` of all heads, not calibrated.
    length: tokens of each row, `[N]`.
    kept: tokens left after each pruning, `[N, P]`.
    left: tokens left where each head is, `[N, E]`.
    flops: FLOPs of each row up to each head, `[N, E]`, by formula, at the
      row's own length.
    flops_served: the same as the engine runs them: at the row's length bucket
      with its static sizes, which also decide how the window is computed. Rows
      that fill up a batch are not counted.
  """

  run: Run
  variant: str
  module: EatClassifier
  temperatures: np.ndarray
  logits: np.ndarray
  length: np.ndarray
  kept: np.ndarray
  left: np.ndarray
  flops: np.ndarray
  flops_served: np.ndarray

  @property
  def heads(self) -> tuple[int, ...]:
    """The layers with a head."""
    return self.module.heads()

  @property
  def calibrated(self) -> np.ndarray:
    """The logits over the temperatures, as `eat.policy` sees them."""
    return self.logits / self.temperatures.astype(np.float32)[:, None, None]


def load(
  name: str, directory: str, split: str, limit: int, flag: str, step: Any = None
) -> Run:
  """Reads a run and the rows of a split.

  Args:
    name: what to call it.
    directory: of the run.
    split: '' for the one of the run's evaluation 'dev'.
    limit: at most so many rows; 0 for all.
    flag: that named the directory, for errors.
    step: a step, 'best', or None for the newest.

  Raises:
    ConfigError: the directory is no run, or the run none of a text task.
    UsageError: the split cannot be limited.
  """
  config = loading.load_own_config(directory, key=flag)
  words = tokenizer.load(pathlib.Path(directory) / TOKENIZER)
  split = _limited(split or _own_split(config), limit)
  task = loading.load_task(directory, config, step)
  serving.as_adaptive(task.model)
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    loaded = loading.load_params(directory, task, mesh, step)
  return Run(
    name, directory, config, task, loaded.variables, loaded.step,
    builder.build_source(config.dataset, split), words, split,
  )  # fmt: skip


def _own_split(config: Any) -> str:
  return str(config.evals.get('dev', {}).get('split', 'validation'))


def _limited(split: str, limit: int) -> str:
  if not limit:
    return split
  if '[' in split or '+' in split:
    raise command_line.UsageError(
      '--limit: expected a split that is neither a part of one nor a sum, got '
      f'{split!r}; leave out --limit and give the rows as --split'
    )
  return f'{split}[:{limit}]'


def check_same_rows(run: Run, other: Run, flag: str) -> None:
  """Raises ConfigError unless two runs have the same rows with same labels."""
  ours, theirs = (labels_of(one) for one in (run, other))
  if len(ours) != len(theirs) or (ours != theirs).any():
    raise ConfigError(
      flag,
      other.directory,
      f'a run on the same rows as {run.directory}: {len(ours)} of split '
      f'{run.split!r}',
    )


def labels_of(run: Run) -> np.ndarray:
  """The labels of the rows, `[N]`."""
  return run.records.records(np.arange(len(run.records)))['label']


def variants(
  module: EatClassifier, scales: Sequence[float], change_window: bool
) -> dict[str, EatClassifier]:
  """The model with other keep ratios, and with the window switched.

  Args:
    module: as it was trained; it has the name ''.
    scales: of its prune ratios.
    change_window: whether to switch the window.

  Raises:
    UsageError: a scaled ratio is not below 1.
  """
  result = {'': module}
  for scale in scales if any(module.prune_ratios) else ():
    ratios = tuple(float(round(scale * r, 4)) for r in module.prune_ratios)
    if max(ratios) >= 1.0:
      raise command_line.UsageError(
        f'--prune_scales: expected scales of {tuple(module.prune_ratios)} that '
        f'leave tokens, got {scale:g}'
      )
    if scale != 1.0:
      result[f'prune_{scale:g}'] = module.clone(prune_ratios=ratios)
  if change_window and module.window:
    result['no_window'] = module.clone(window=0)
  elif change_window:
    result[f'window_{WINDOW}'] = module.clone(window=WINDOW)
  return result


def record(
  run: Run, module: EatClassifier, variant: str, temperatures: np.ndarray
) -> Model:
  """Runs a model over all rows.

  Args:
    run: whose parameters and rows.
    module: the run's classifier, or a changed one.
    variant: what was changed, '' for nothing.
    temperatures: of its heads, `[E]`.

  Raises:
    ConfigError: there is not a temperature for each head.
  """
  rows = outputs(run, module, run.split)
  length, kept = rows['length'], rows.get('kept')
  if kept is None:
    kept = np.zeros((len(length), 0), np.int32)
  heads = module.heads()
  if len(temperatures) != len(heads):
    raise ConfigError(
      FILE, temperatures.tolist(),
      f'a temperature for each of the heads at layers {heads}',
    )  # fmt: skip
  return Model(
    run=run,
    variant=variant,
    module=module,
    temperatures=temperatures,
    logits=predictions.heads_first(rows),
    length=length,
    kept=kept,
    left=_left(module, length, kept),
    flops=_flops(module, length),
    flops_served=_flops(module, _padded(run, length)),
  )


def _flops(module: EatClassifier, length: np.ndarray) -> np.ndarray:
  """FLOPs up to each head, `[N, E]`, of rows with so many tokens, `[N]`."""
  sizes, places = np.unique(length, return_inverse=True)
  table = [
    cost.stage_flops(module, size, cost.static_sizes(module, size), True)
    for size in sizes.tolist()
  ]
  return np.cumsum(table, axis=1)[places]


def _padded(run: Run, length: np.ndarray) -> np.ndarray:
  """The length bucket of each row, `[N]`."""
  buckets = np.array(length_buckets(run))
  return buckets[np.searchsorted(buckets, length)]


def length_buckets(run: Run) -> tuple[int, ...]:
  """The lengths that the run's rows are padded to, ascending."""
  info = run.task.info
  return tuple(info.length_buckets or info.input_shape)


def outputs(run: Run, module: EatClassifier, split: str) -> dict[str, Any]:
  """What a model says of the rows of a split; see `predictions.collect`."""
  task = run.task
  if isinstance(task.model, EatClassifier):
    task = copy.copy(task)
    task.model = module
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    context = setup.eval_context(task, mesh, run.config, run.directory)
    dataset = evaluator.build_dataset(run.config.dataset, split, context)
    return predictions.collect(dataset, run.variables, context)


def _left(module, length, kept) -> np.ndarray:
  """Pruning at the layer of a head comes after the head."""
  tokens = np.concatenate([length[:, None], kept], axis=1)
  done = [sum(p < head for p in module.prune_layers) for head in module.heads()]
  return tokens[:, done]


def dense_flops(model: Model) -> np.ndarray:
  """FLOPs of each row, at its length, without anything adaptive, `[N]`."""
  plain = model.module.clone(
    prune_layers=(), prune_ratios=(), window=0, exit_layers=()
  )
  return _flops(plain, model.length)[:, -1]
