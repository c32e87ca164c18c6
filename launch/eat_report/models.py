"""The models of an EAT report: runs, what they are changed to, what they say.

Each model is run once over the split, in its masked form, and its logits are
kept; the settings of exits are then measured on them (`sweeps`),
and the chosen ones timed (`speed`).
"""

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dataset_lib import builder, tokenizer
from dataset_lib.errors import ConfigError
from eat import cost, service
from eat.model import EatClassifier
from eval_lib import calibration, evaluator, frontier, glue_metrics, predictions
from launch import command_line
from train_lib import loading, setup, sharding
from train_lib.text_classification import TOKENIZER_FILE

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
    flops: FLOPs of each row up to each head, `[N, E]`, by formula.
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
  config = loading.load_config(directory, key=flag)
  if 'teacher' in config.loss:
    config.loss.teacher = ''
  words = tokenizer.load(pathlib.Path(directory) / TOKENIZER_FILE)
  if 'tokenizer' in config.dataset:
    config.dataset.tokenizer = str(pathlib.Path(directory) / TOKENIZER_FILE)
  split = _limited(split or _own_split(config), limit)
  task = loading.load_task(directory, config, step)
  service.as_adaptive(task.model)
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
  if '[' in split:
    raise command_line.UsageError(
      f'--limit: expected a split without a part of its own, got {split!r}'
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
  """Runs a model over all rows."""
  rows = _outputs(run, module, run.split)
  length, kept = rows['length'], rows.get('kept')
  if kept is None:
    kept = np.zeros((len(length), 0), np.int32)
  heads = module.heads()
  if len(temperatures) != len(heads):
    raise ConfigError(
      'calibration.json', temperatures.tolist(),
      f'a temperature for each of the heads at layers {heads}',
    )  # fmt: skip
  sizes, costs = np.unique(length), {}
  for size in sizes.tolist():
    stages = cost.static_sizes(module, size)
    costs[size] = np.cumsum(cost.stage_flops(module, size, stages, True))
  return Model(
    run=run,
    variant=variant,
    module=module,
    temperatures=temperatures,
    logits=predictions.heads_first(rows),
    length=length,
    kept=kept,
    left=_left(module, length, kept),
    flops=np.stack([costs[size] for size in length.tolist()]),
  )


def _outputs(run: Run, module: EatClassifier, split: str) -> dict[str, Any]:
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


def temperatures_of(run: Run) -> tuple[np.ndarray, str]:
  """(temperatures of the heads as served, where they come from).

  From the run's calibration.json, or else fitted here on the calibration
  split of its configuration.

  Raises:
    ConfigError: calibration.json is of another checkpoint.
  """
  heads = service.as_adaptive(run.task.model).heads()
  written = service.read_calibration(run.directory)
  service.check_parameters(written, run.variables, run.directory, run.step)
  known = written.get('temperatures')
  if known:
    return np.asarray(known), 'calibration.json'
  entry = run.config.evals.get('calibration', {})
  split = entry.get('calibration_split', '')
  if not split or run.task.info.num_classes < 2 or len(heads) == 1:
    return np.ones(len(heads)), 'none'
  rows = _outputs(run, run.task.model, split)
  logits = predictions.heads_first(rows)
  return calibration.fit_temperatures(logits, rows['label']), split


def quality_of(
  run: Run,
) -> tuple[str, Callable[[Any, Any], float], Callable[[Any, Any], float]]:
  """(name, quality, agreement): the official metric, and that of answers.

  Two regressions agree by their correlation.
  """
  task = glue_metrics.task_of({'dataset': run.config.dataset, 'task': ''})
  if run.task.info.num_classes == 1:
    return (
      'pearson',
      _correlation,
      lambda one, full: _correlation(one, full[:, 0]),
    )
  if not task:
    return 'accuracy', frontier.accuracy, frontier.same_class
  metric = glue_metrics.TASKS[task].metrics[0]

  def quality(logits, labels):
    return glue_metrics.compute(task, logits, labels)['score']

  return metric, quality, frontier.same_class


def _correlation(logits: Any, labels: Any) -> float:
  return glue_metrics.pearson(
    logits[:, 0].astype(np.float64), labels.astype(np.float64)
  )


def dense_flops(model: Model) -> np.ndarray:
  """FLOPs of each row in the same encoder without anything adaptive, `[N]`."""
  plain = model.module.clone(
    prune_layers=(), prune_ratios=(), window=0, exit_layers=()
  )
  costs: Mapping[int, float] = {
    size: sum(cost.stage_flops(plain, size, (), True))
    for size in np.unique(model.length).tolist()
  }
  return np.array([costs[size] for size in model.length.tolist()])
