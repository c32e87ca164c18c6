"""What a run of any family spends on rows, against their difficulty.

  python -m benchmarks.adaptivity --workdir=/tmp/sst2_eat \\
      --dense=/tmp/sst2 --out=/tmp/adaptivity

Of any task with `Task.outputs`. A row costs its FLOPs, and what else the task
counts in rows: tape tokens, iterations, steps. Of a model with several heads a
row leaves at the first head whose calibrated confidence is at least `--tau`; a
regression runs to the last head. Difficulty is the length of a row, the entropy
of the prediction of the dense run (of the run itself without one), and what the
data know. `--out` gets correlations.csv, examples.csv and a picture.
"""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import scipy.special
import scipy.stats
from jaxtyping import Float

from benchmarks import command, pictures
from core.errors import ConfigError
from core.fields import flag
from dataset_lib import builder, tokenizer
from eval_lib import glue, plots, predictions, report
from eval_lib.calibration import CalibrationFile
from halting.row_rules import Confidence, scale, softmax
from train_lib import loading
from train_lib.task import Task

BATCH, EXAMPLES = 64, 10
SHOWN = 60  # characters of a text that are printed
NUMBERS = 100  # of an input that are shown instead of a text
DIFFICULTIES = 'length', 'difficulty'  # that batches or outputs may have
_OTHERS = {*DIFFICULTIES, 'index', 'label', 'flops', 'full_flops'}

Columns = dict[str, np.ndarray]  # a number of each row `[N]`, by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Run):
  """Flags of this command."""

  dense: str = flag('run whose entropy is the difficulty', '', 'DIRECTORY')
  tau: command.Share = flag(
    'confidence threshold of a model with several heads', 0.9
  )


def write(flags: Any) -> None:
  """Runs both models, writes and prints the tables, and draws the costs.

  Raises ConfigError for a run without outputs of rows or without classes, or a
  dense run on other rows.
  """
  config = loading.load_config(flags.workdir)
  split = loading.split_of(config, flags.split)
  found, rows, data = _read(config, '--workdir', flags, split)
  logits, name = rows['logits'][:, -1], 'own'
  if flags.dense:
    dense = loading.load_config(flags.dense, '--dense')
    _, others, _ = _read(dense, '--dense', flags, split)
    same = np.array_equal(others['label'], rows['label'])
    if not same or others['logits'].shape[-1] != logits.shape[-1]:
      expected = f'a run on the same {len(logits)} rows as {flags.workdir}'
      raise ConfigError('--dense', flags.dense, expected)
    logits, name = others['logits'][:, -1], 'dense'
  costs, answers = spent(rows, found, flags)
  hard: Columns = {k: rows[k] for k in DIFFICULTIES if k in rows}
  task: Any = found.task
  if task.label_names:
    hard[f'entropy_{name}'] = entropy(logits, task.info.max_labels)
  hard = {name: one for name, one in hard.items() if np.ptp(one) > 0}
  if not hard:
    expected = 'rows that differ in length or are classified'
    raise ConfigError('--workdir', flags.workdir, expected)
  table = correlations(costs, hard)
  names, text = task.label_names, reader(config, data)
  rights = predictions.correct(answers, rows['label'])
  shown = []
  for kind, row in extremes(costs['flops']):
    index, label = int(rows['index'][row]), rows['label'][row]
    right = bool(rights[row]) if names else None
    numbers = {k: one[row].item() for k, one in (costs | hard).items()}
    shown.append({
      'kind': kind, 'index': index,
      'label': predictions.label_text(label, names),
      'right': right, **numbers, 'text': text(index),
    })  # fmt: skip
  out = pathlib.Path(flags.out)
  for file, title, lines in (
    ('correlations', f'rank correlations, {len(logits)} rows', table),
    ('examples', 'cheapest and most expensive rows', shown),
  ):
    report.write_csv(out / f'{file}.csv', lines)
    brief = [
      {k: v[:SHOWN] if isinstance(v, str) else v for k, v in row.items()}
      for row in lines
    ]
    report.print_table(title, brief, columns=list(lines[0]))
  with plots.if_installed():
    title = f'Cost of a row, {len(logits)} rows'
    drawn = {'GFLOPs': 1e-9 * costs.pop('flops')} | costs
    pictures.plot_against(out / 'adaptivity', drawn, hard, title)
  print(f'step {found.saved.step}, written: {out}')


def _read(
  config: Any, flag: str, flags: Any, split: str
) -> tuple[loading.Trained, dict[str, Any], builder.Dataset]:
  """Returns a run: checkpoint, outputs of rows of a split, and data."""
  workdir = getattr(flags, flag[2:])
  step = flags.step if flag == '--workdir' else None
  found = loading.restore(workdir, config, step)
  task = found.task
  if type(task).outputs is Task.outputs:
    expected = 'a run whose task has outputs of rows'
    raise ConfigError(flag, workdir, expected)

  @jax.jit
  def outputs(variables: Any, batch: Any) -> dict[str, Any]:
    known = {name: batch[name] for name in DIFFICULTIES if name in batch}
    given = variables['params'], variables['model_state'], batch
    return known | task.outputs(*given)

  source = builder.build_source(config.dataset, split, task.info)
  data = builder.spread(source, flags.rows, BATCH)
  rows = predictions.collect(data, found.variables, outputs)
  return found, rows, data


def spent(
  rows: Mapping[str, Any], found: Any, flags: Any
) -> tuple[Columns, np.ndarray]:
  """Returns the costs of rows by name, and the logits `[N, C]` they leave with.

  `rows` are `Task.outputs` of the split.
  """
  heads = np.moveaxis(rows['logits'], 1, 0)
  places, exits = np.arange(heads.shape[1]), np.full(heads.shape[1], -1)
  one_class = heads.shape[-1] > 1 and np.ndim(rows.get('label', 0)) < 2
  if len(heads) > 1 and one_class:
    file = CalibrationFile(flags.workdir, found.saved.step)
    file.check_parameters(found.variables)
    layers = found.task.head_layers
    scales = file.temperatures(len(heads), layers) or np.ones(len(heads))
    exits = Confidence(flags.tau).first(scale(heads, scales))
  flops = rows['flops'].reshape(len(places), -1)
  costs = {'flops': flops[places, exits]}
  if len(heads) > 1 and found.task.head_layers:
    costs['depth'] = np.array(found.task.head_layers)[exits]
  for name, one in rows.items():
    if one.ndim == 1 and name not in _OTHERS:
      costs[name] = one
  return costs, heads[exits, places]


def entropy(
  logits: Float[np.ndarray, 'N C'], several: int
) -> Float[np.ndarray, ' N']:
  """Returns the entropy of answers in nats; of several labels of each class."""
  logits = logits.astype(np.float64)
  if not several:
    return scipy.special.entr(softmax(logits)).sum(-1)
  both = scipy.special.expit(np.stack([logits, -logits]))
  return scipy.special.entr(both).sum((0, 2))


def correlations(costs: Columns, hard: Columns) -> list[dict[str, Any]]:
  """Returns Spearman's correlation of costs and difficulties; 0 if constant."""
  return [
    {'cost': cost, 'mean_cost': float(values.mean())}
    | {k: glue.correlation(values, one, scipy.stats.spearmanr)
       for k, one in hard.items()}
    for cost, values in costs.items()
  ]  # fmt: skip


def extremes(cost: np.ndarray, count: int = EXAMPLES) -> list[tuple[str, int]]:
  """Returns the rows of least and of most cost, at most `count` of each.

  No row is both.
  """
  order = np.argsort(cost, kind='stable').tolist()
  count = min(count, len(order) // 2)
  parts = {'cheapest': order[:count], 'most expensive': order[::-1][:count]}
  return [(kind, row) for kind, rows in parts.items() for row in rows]


def reader(config: Any, data: Any) -> Callable[[int], str | None]:
  """Returns a function from an index to its text, or to its few numbers."""
  path, source = config.dataset.get('tokenizer', ''), data.source
  if path:
    words = tokenizer.load(path)
    return lambda index: words.decode(source.record(index)['tokens'])
  info = source.info
  if math.prod(info.input_shape) > NUMBERS:
    return lambda index: None
  key = info.input_key
  return lambda index: ' '.join(
    f'{x:g}' for x in source.record(index)[key].flat
  )


main = command.reporting('adaptivity', __doc__, Flags, write)

if __name__ == '__main__':
  sys.exit(main())
