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
from collections.abc import Callable
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
_NO_COST = {*DIFFICULTIES, 'index', 'label', 'flops', 'full_flops'}
# Labels of the picture, where they are not the names of columns.
LABELS = {
  'tape_length': 'tape tokens', 'depth': 'depth (layers)',
  'entropy_own': 'entropy of the answer (nats)',
  'entropy_dense': 'entropy of the dense model (nats)',
}  # fmt: skip

Columns = dict[str, np.ndarray]  # a number of each row `[N]`, by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Run):
  dense: str = flag('run whose entropy is the difficulty', '', 'DIRECTORY')
  tau: command.Confidence = flag(
    'confidence threshold of a model with several heads', 0.9
  )


def write(flags: Any) -> None:
  config = loading.load_config(flags.workdir)
  split = loading.split_of(config, flags.split)
  trained, rows, data = _read(config, '--workdir', flags, split)
  logits, name = rows['logits'][:, -1], 'own'
  if flags.dense:
    dense = loading.load_config(flags.dense, '--dense')
    _, dense_rows, _ = _read(dense, '--dense', flags, split)
    same = np.array_equal(dense_rows['label'], rows['label'])
    if not same or dense_rows['logits'].shape[-1] != logits.shape[-1]:
      expected = f'a run on the same {len(logits)} rows as {flags.workdir}'
      raise ConfigError('--dense', flags.dense, expected)
    logits, name = dense_rows['logits'][:, -1], 'dense'
  costs, answers = spent(rows, trained, flags)
  task: Any = trained.task
  hard: Columns = {k: rows[k] for k in DIFFICULTIES if k in rows}
  if task.label_names:
    hard[f'entropy_{name}'] = entropy(logits, task.info.max_labels)
  hard = {name: values for name, values in hard.items() if np.ptp(values) > 0}
  if not hard:
    expected = 'rows that differ in length or are classified'
    raise ConfigError('--workdir', flags.workdir, expected)
  names, text = task.label_names, reader(config, data)
  rights = predictions.correct(answers, rows['label'])
  examples = []
  for kind, row in extremes(costs['flops']):
    index = int(rows['index'][row])
    examples.append({
      'kind': kind, 'index': index,
      'label': predictions.label_text(rows['label'][row], names),
      'right': bool(rights[row]) if names else None,
      **{k: values[row].item() for k, values in (costs | hard).items()},
      'text': text(index),
    })  # fmt: skip
  out = pathlib.Path(flags.out)
  table = correlations(costs, hard)
  title = f'rank correlations, {len(logits)} rows'
  command.write_tables(out, [
    report.Table('correlations', title, table, columns=[*table[0]]),
    report.Table('examples', '', examples),
  ])  # fmt: skip
  brief = [row | {'text': (row['text'] or '')[:SHOWN]} for row in examples]
  title = 'cheapest and most expensive rows'
  report.print_table(title, brief, columns=[*brief[0]])
  thousands = min(max(int(np.log10(np.median(costs['flops'])) // 3), 1), 3)
  costs['flops'] = costs['flops'] / 1e3**thousands
  labels = LABELS | {'flops': f'{" kMG"[thousands]}FLOPs'}
  with plots.if_installed():
    pictures.plot_against(
      out / 'adaptivity',
      {labels.get(k, k): v for k, v in costs.items()},
      {labels.get(k, k): v for k, v in hard.items()},
      f'Cost of a row, {len(logits)} rows: median and quartiles',
    )
  print(f'step {trained.saved.step}, written: {out}')


def _read(config: Any, flag: str, flags: Any, split: str) -> Any:
  """Returns a run: checkpoint, outputs of rows of a split, and data."""
  workdir = getattr(flags, flag[2:])
  step = flags.step if flag == '--workdir' else None
  trained = loading.restore(workdir, config, step)
  task = trained.task
  if type(task).outputs is Task.outputs:
    raise ConfigError(flag, workdir, 'a run whose task has outputs of rows')

  @jax.jit
  def outputs(variables: Any, batch: Any) -> dict[str, Any]:
    hard = {name: batch[name] for name in DIFFICULTIES if name in batch}
    params, state = variables['params'], variables['model_state']
    return hard | task.outputs(params, state, batch)

  source = builder.build_source(config.dataset, split, task.info)
  data = builder.spread(source, flags.rows, BATCH)
  return trained, predictions.collect(data, trained.variables, outputs), data


def spent(rows: Any, trained: Any, flags: Any) -> tuple[Columns, np.ndarray]:
  """Returns costs of rows by name, and the logits `[N, C]` they leave with."""
  heads = np.moveaxis(rows['logits'], 1, 0)
  places, exits = np.arange(heads.shape[1]), np.full(heads.shape[1], -1)
  layers = trained.task.head_layers
  one_class = heads.shape[-1] > 1 and np.ndim(rows.get('label', 0)) < 2
  if len(heads) > 1 and one_class:
    file = CalibrationFile(flags.workdir, trained.saved.step)
    file.check_parameters(trained.variables)
    scales = file.temperatures(len(heads), layers) or np.ones(len(heads))
    exits = Confidence(flags.tau).first(scale(heads, scales))
  costs = {'flops': rows['flops'].reshape(len(places), -1)[places, exits]}
  if len(heads) > 1 and layers:
    costs['depth'] = np.array(layers)[exits]
  for name, values in rows.items():
    if values.ndim == 1 and name not in _NO_COST:
      costs[name] = values
  return costs, heads[exits, places]


def entropy(
  logits: Float[np.ndarray, 'N C'], max_labels: int
) -> Float[np.ndarray, ' N']:
  """Returns the entropy of answers in nats; of several labels of each class."""
  logits = logits.astype(np.float64)
  if not max_labels:
    return scipy.special.entr(softmax(logits)).sum(-1)
  both = scipy.special.expit(np.stack([logits, -logits]))
  return scipy.special.entr(both).sum((0, 2))


def correlations(costs: Columns, hard: Columns) -> list[dict[str, Any]]:
  """Returns Spearman's correlation of costs and difficulties; 0 if constant."""
  return [
    {'cost': cost, 'mean_cost': float(spent.mean())}
    | {k: glue.correlation(spent, values, scipy.stats.spearmanr)
       for k, values in hard.items()}
    for cost, spent in costs.items()
  ]  # fmt: skip


def extremes(cost: np.ndarray, count: int = EXAMPLES) -> list[tuple[str, int]]:
  """Returns up to `count` rows of least and of most cost; no row is both."""
  order = np.argsort(cost, kind='stable').tolist()
  count = min(count, len(order) // 2)
  parts = {'cheapest': order[:count], 'most expensive': order[::-1][:count]}
  return [(kind, row) for kind, rows in parts.items() for row in rows]


def reader(config: Any, data: Any) -> Callable[[int], str | None]:
  """Returns a function from an index to its text, or to its few numbers."""
  path, source = config.dataset.get('tokenizer', ''), data.source
  if path:
    vocab = tokenizer.load(path)
    return lambda index: vocab.decode(source.record(index)['tokens'])
  info = source.info
  if math.prod(info.input_shape) > NUMBERS:
    return lambda index: None
  return lambda index: ' '.join(
    f'{x:g}' for x in source.record(index)[info.input_key].flat
  )


main = command.reporting('adaptivity', __doc__, Flags, write)

if __name__ == '__main__':
  raise SystemExit(main())
