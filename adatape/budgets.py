"""One checkpoint read with other settings: quality against cost.

`launch.benchmark budgets` draws Figures 3, 8 and 9 of AdaTape for one model:
threshold tau, most tape tokens T and the share of the bank kept are changed
after training, and no parameter depends on them. The kept bank tokens are those
that most rows of the training split read with the trained settings; of a bank
made from the input these are positions.

`flops` count the tapes as they are. Images per second are those of the engine,
which pads a tape to its bucket, from decoded images to answers.
"""

import contextlib
import copy
import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from adatape import analysis
from adatape.model import TapeClassifier
from dataset_lib import builder
from dataset_lib.errors import ConfigError
from eval_lib import adaptive_plots, metrics, report
from eval_lib.benchmark import Call, Candidate, Hosts, checked, run
from model_lib.errors import FieldError
from model_lib.layers import build
from serve_lib.engine import Engine
from train_lib import loading

SHOWN = (
  'candidate', 'quality', 'tape_length_mean', 'flops', 'images_per_second',
  'speedup', 'limit',
)  # fmt: skip
TIMED_ROWS = 512  # at most


class Setting(NamedTuple):
  """A reading of the parameters."""

  threshold: int | float
  max_steps: int
  share: float  # of the bank that is kept, in (0, 1]

  @property
  def name(self) -> str:
    """The name in tables."""
    kept = f'bank {100 * self.share:.3g} %'
    return f'tau {self.threshold:g}, T {self.max_steps}, {kept}'


class _KeptBank(TapeClassifier):
  """Reads only the bank tokens `kept`, ascending."""

  kept: tuple[int, ...] = ()

  def embed(self, inputs: Any) -> Any:
    x, bank = super().embed(inputs)
    return x, bank[..., jnp.array(self.kept), :]

  @nn.nowrap
  def _flops(
    self, tokens: int, bank_size: int, tape_length: int | float | None
  ) -> float:
    return super()._flops(tokens, len(self.kept), tape_length)


def most_read(counts: Int[np.ndarray, ' C'], share: float) -> tuple[int, ...]:
  """Returns the most frequent bank tokens, ascending; of equal ones the first.

  At least one is kept.
  """
  kept = max(1, round(share * len(counts)))
  order = np.argsort(-counts, kind='stable')
  return tuple(np.sort(order[:kept]).tolist())


def changed(
  model: TapeClassifier,
  setting: Setting,
  kept: tuple[int, ...] = (),
  bank_size: int | None = None,
) -> Any:
  """Returns the model with another reading and the same parameters.

  `kept` are the bank tokens that are read, () for all `bank_size`. Raises
  FieldError if they are too few for the setting.
  """
  fields: Any = dict(threshold=setting.threshold, max_steps=setting.max_steps)
  found: Any = model.clone(**fields)
  if kept:
    kind: Any = type('KeptBank', (_KeptBank, type(model)), {})
    found = build(kind, found, kept=kept)
  found.reading().check_bank(len(kept) or bank_size, found.width)
  return found


def measure(
  task: Any, variables: Any, data: builder.Dataset
) -> dict[str, float]:
  """Returns 'quality', the mean 'flops' of a row, and `Task.evaluate`."""
  is_adaptive = isinstance(task.model, TapeClassifier)

  @jax.jit
  def evaluate(variables: Any, batch: Any) -> Any:
    given = variables['params'], variables['model_state'], batch
    # Of a dense run all rows cost the same.
    costs = task.outputs(*given)['flops'] if is_adaptive else batch['mask']
    return task.evaluate(*given), costs

  merged: Any = None
  costs = []
  for batch in data.batches():
    state, of_rows = evaluate(variables, batch)
    merged = metrics.merge_on_host(merged, state)
    costs.append(np.asarray(of_rows, np.float64)[batch['mask'] > 0])
  values = metrics.compute(merged or {})
  flops = np.concatenate(costs).mean() if is_adaptive else task.flops()
  return {'quality': values['accuracy'], 'flops': float(flops), **values}


def write(flags: Any, config: Any, split: str) -> None:
  """Sweeps, times, writes budgets.csv and the pictures; see the flags.

  Raises ConfigError for a run without a bank, or a dense run on other inputs.
  """
  loaded = loading.restore(flags.workdir, config, flags.step)
  model, variables = loaded.task.model, loaded.variables
  if not isinstance(model, TapeClassifier) or model.reading() is None:
    expected = 'a run of an AdaTape with a bank'
    raise ConfigError('--workdir', config.model.name, expected)
  dense = _dense(flags.dense, loaded) if flags.dense else None
  data = analysis.spread_rows(config.dataset, split, flags.rows)
  # Without a share below 1 one row is read, for the size of the bank.
  rows = flags.rows if min(flags.bank_shares) < 1 else 1
  fitted = analysis.spread_rows(config.dataset, config.train_split, rows)
  counts = analysis.read(loaded.task, variables, fitted).counts
  own = Setting(model.threshold, model.max_steps, 1.0)
  wanted = itertools.product(
    flags.thresholds or (own.threshold,),
    flags.max_steps or (own.max_steps,),
    flags.bank_shares,
  )
  tasks: dict[str, tuple[Any, Any]] = {}
  table: dict[str, dict[str, Any]] = {}
  for setting in dict.fromkeys([own, *itertools.starmap(Setting, wanted)]):
    kept = most_read(counts, setting.share) if setting.share < 1 else ()
    task = copy.copy(loaded.task)
    try:
      task.model = changed(model, setting, kept, len(counts))
    except FieldError as error:
      print(f'left out: {setting.name}: {error}')
      continue
    tasks[setting.name] = task, variables
    row = {'candidate': setting.name, **setting._asdict()}
    table[setting.name] = row | measure(task, variables, data)
  first = own.name
  if dense is not None:
    first = f'dense {type(dense.task.model).__name__}'
    tasks[first] = dense.task, dense.variables
    table[first] = {'candidate': first, **measure(*tasks[first], data)}
  if flags.rounds:
    _time(tasks, table, data, first, flags)
  rows = [*table.values()]
  out = pathlib.Path(flags.out or pathlib.Path(flags.workdir, 'budgets'))
  out.mkdir(parents=True, exist_ok=True)
  report.write_csv(out / 'budgets.csv', rows)
  title = f'{split}, at most {flags.rows} rows; trained: {own.name}'
  report.print_table(title, rows, columns=SHOWN)
  with adaptive_plots.if_installed():
    draw(out, rows)
  print(f'written: {out}')


def _dense(workdir: str, loaded: loading.Trained) -> loading.Trained:
  """Loads the newest checkpoint of another run with the same inputs."""
  dense = loading.restore(workdir, loading.load_config(workdir, '--dense'))
  ours, theirs = (
    (one.task.info.input_shape, one.task.info.num_classes)
    for one in (loaded, dense)
  )
  if ours != theirs:
    expected = f'a run on inputs and classes {ours}'
    raise ConfigError('--dense', f'{workdir} on {theirs}', expected)
  return dense


def _time(
  tasks: Mapping[str, tuple[Any, Any]],
  table: dict[str, dict[str, Any]],
  data: builder.Dataset,
  first: str,
  flags: Any,
) -> None:
  """Times engines of (task, variables); adds columns to the rows of `table`."""
  total, size = len(data.source), flags.batch_size
  chosen = np.linspace(0, total - 1, min(total, TIMED_ROWS)).astype(int)
  items = analysis.chosen_inputs(data.source, chosen)
  with contextlib.ExitStack() as stack:
    hosts, candidates = stack.enter_context(Hosts()), []
    for name, (task, variables) in tasks.items():
      chain, policy = task.serve(variables, {})
      # Small batches pad the last rows of a bucket less.
      sizes = tuple(sorted({max(1, size // 4), size}))
      engine = Engine(chain, policy, policy.lengths, sizes)
      stack.enter_context(engine)
      answer = functools.partial(_answer, engine, items)
      make = functools.partial(Call, answer, len(items))
      about: Any = dict(is_baseline=name == first, flops=table[name]['flops'])
      about['throughput'] = 'images_per_second'
      candidates.append(Candidate(name, make, **about))
    timing: Any = dict(rounds=flags.rounds, warmup=flags.warmup)
    timed, _ = run(candidates, {'batch': size}, hosts, **timing)
  for row in timed:
    columns = ('images_per_second', 'baseline', 'speedup', 'limit')
    table[row['candidate']] |= {key: row[key] for key in columns}


def _answer(engine: Engine, items: list[Any]) -> None:
  checked(engine.predict(items))


def draw(out: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Draws quality against FLOPs, and images/s where they were timed."""
  curves: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
  is_small = max(row['flops'] for row in rows) < 1e9
  unit, scale = ('M', 1e6) if is_small else ('G', 1e9)
  for row in rows:
    name, point = row['candidate'], ''
    if 'share' in row:
      setting = Setting(*(row[field] for field in Setting._fields))
      name = f'AdaTape, bank {100 * setting.share:.3g} %'
      point = f'{setting.threshold:g}/{setting.max_steps}'
    quality = 100 * row['quality']
    costs = {f'{unit}FLOPs of a row': row['flops'] / scale}
    if 'images_per_second' in row:
      costs['images/s'] = row['images_per_second'].median
    for label, cost in costs.items():
      curve = curves.setdefault(label, {}).setdefault(name, {})
      curve[point] = cost, quality
  for label, lines in curves.items():
    is_rate = label == 'images/s'
    path = out / ('frontier_speed' if is_rate else 'frontier_flops')
    given = path, lines, label, 'accuracy (%)'
    title = 'Frontier: points are τ/T'
    adaptive_plots.plot_frontier(*given, is_rate=is_rate, title=title)
