"""One checkpoint read with other settings: quality against cost.

  python -m benchmarks.budgets --workdir=/tmp/digits --dense=/tmp/vit \\
      --thresholds=1,2 --max_steps=3,6 --bank_shares=0.5,1

Threshold tau, most tape tokens T and the share of the bank kept are changed
after training (AdaTape, Figures 3, 8, 9). The kept bank tokens are the ones
that most rows of the training split read with the trained settings; of a bank
made from the input these are positions.

It is compared with a dense run, or all runs of a sweep. Models of adaptive
depth run in their dynamic form. `flops` count tapes and depths as they are.
The engine takes decoded images; images/s count up to the answers.
"""

import collections
import contextlib
import copy
import csv
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Interval, MinLen

from adatape.model import TapeClassifier
from benchmarks import command, pictures
from benchmarks.tape_report import chosen_inputs, most_read, read, spread_rows
from benchmarks.timing import Call, Candidate, Hosts, run
from core import files
from core.errors import ConfigError
from core.fields import flag
from dataset_lib import contract
from eval_lib import metrics, plots, report
from launch import command_line
from launch.command_line import Count, Positive, Sizes
from model_lib.layers import build
from serve_lib.chain import checked
from serve_lib.engine import Engine
from train_lib import loading

TIMED = ('images_per_second', 'speedup', 'limit')
SHOWN = ('candidate', 'quality', 'tape_length_mean', 'flops', *TIMED)
TIMED_ROWS = 512  # at most
Part = Annotated[int | float, Interval(gt=0.0, le=1.0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Run):
  dense: str = flag('a run without a tape on the same data', '', 'DIRECTORY')
  sweep: str = flag('a sweep whose runs stand beside it', '', 'DIRECTORY')
  names: command_line.Names = flag('other names to show', '', 'GIVEN=SHOWN;...')
  out: str = flag('default: budgets/ in the workdir', '', 'DIRECTORY')
  thresholds: tuple[Annotated[int | float, Gt(0.0)], ...] = flag(
    'halting thresholds; default: own', ()
  )
  max_steps: Sizes = flag('most tape tokens T; default: own', ())
  bank_shares: Annotated[tuple[Part, ...], MinLen(1)] = flag(
    'shares of the bank kept, the most read', (1.0,)
  )
  batch_size: Positive = flag('rows of a full batch', 32)
  rounds: Count = flag('timed rounds; 0: no timing', 5, names=command.ROUNDS)
  warmup: Count = flag('rounds before the timed ones', 1)


# A row of the table, a task, variables.
Reading = tuple[dict[str, Any], Any, Any]


class Setting(NamedTuple):
  threshold: int | float
  max_steps: int
  share: float  # of the bank that is kept, in (0, 1]

  @property
  def name(self) -> str:
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


def changed(
  model: Any, setting: Setting, kept: tuple[int, ...] = (), size: Any = None
) -> Any:
  """Returns the model with another reading and the same parameters.

  `kept` are the bank tokens that are read, () for all `size`.
  """
  threshold, max_steps = float(setting.threshold), setting.max_steps
  result: Any = model.clone(threshold=threshold, max_steps=max_steps)
  if kept:
    kind: Any = type('KeptBank', (_KeptBank, type(model)), {})
    result = build(kind, result, kept=kept)
  result.reading().check_bank(len(kept) or size, result.width)
  return result


def measure(task: Any, variables: Any, data: Any) -> dict[str, float]:
  """Returns 'quality', the mean 'flops' of a row, and `Task.evaluate`."""

  @jax.jit
  def evaluate(variables: Any, batch: Any) -> Any:
    params, state = variables['params'], variables['model_state']
    flops = task.row_flops(task.apply(params, state, batch)[1])
    flops = jnp.broadcast_to(flops, batch['mask'].shape).astype(jnp.float32)
    mean = metrics.Average.from_values(flops, batch['mask'])
    return {'flops': mean, **task.evaluate(params, state, batch)}

  collected = metrics.Collected()
  for batch in data.batches():
    collected.add(jax.device_get(evaluate(variables, batch)))
  values = metrics.compute(collected.take())
  return {'quality': values['accuracy'], **values}


def write(flags: Any) -> None:
  config = loading.load_config(flags.workdir)
  split = loading.split_of(config, flags.split)
  loaded = loading.restore(flags.workdir, config, flags.step)
  model, info = loaded.task.model, loaded.task.info
  if not isinstance(model, TapeClassifier) or model.reading() is None:
    expected = 'a run of an AdaTape with a bank'
    raise ConfigError('--workdir', config.model.name, expected)
  other_readings = [*_others(flags, loaded)]
  data = spread_rows(config.dataset, split, flags.rows, info)
  # Without a share below 1 one row is read, for the size of the bank.
  rows = flags.rows if min(flags.bank_shares) < 1 else 1
  fitted = spread_rows(config.dataset, config.train_split, rows, info)
  counts = read(loaded.task, loaded.variables, fitted).counts
  trained = Setting(model.threshold, model.max_steps, 1.0)
  wanted = itertools.product(
    flags.thresholds or (trained.threshold,),
    flags.max_steps or (trained.max_steps,),
    flags.bank_shares,
  )
  readings: list[Reading] = []
  for setting in dict.fromkeys([trained, *itertools.starmap(Setting, wanted)]):
    kept = most_read(counts, setting.share) if setting.share < 1 else ()
    task = copy.copy(loaded.task)
    try:
      task.model = changed(model, setting, kept, len(counts))
    except ConfigError as error:
      print(f'left out: {setting.name}: {error}')
      continue
    row = {'candidate': setting.name, **setting._asdict()}
    readings.append((row, task, loaded.variables))
  readings += other_readings
  table = []
  for row, task, variables in readings:
    row |= measure(task, variables, data)
    table.append(row)
  if flags.rounds:
    _time(readings, data, flags)
  out = report.folder_of(flags.out, flags.workdir, 'budgets')
  title = f'{split}, at most {flags.rows} rows; trained: {trained.name}'
  budgets = report.Table('budgets', title, table, columns=SHOWN)
  command.write_tables(out, [budgets])
  with plots.if_installed():
    draw(out, table)
  print(f'written: {out}')


def _read_sweep(table: pathlib.Path) -> list[tuple[str, str]]:
  """Reads runs and directories; raises the errors of `damage_of`."""
  with files.damage_of(table):
    lines = files.read_bytes(table).decode().splitlines()
    try:
      columns, *rows = csv.reader(lines, strict=True)
    except csv.Error as error:
      raise ValueError(error) from error
    places = [columns.index(name) for name in ('run', 'workdir')]
    return [(row[places[0]], row[places[1]]) for row in rows]


def _others(flags: Any, loaded: loading.Trained) -> Iterator[Reading]:
  """Yields the other runs, with what their trainings reported."""
  places = [('dense', '', flags.dense, '--dense')] if flags.dense else []
  if flags.sweep:
    names = report.names(flags.names)
    table = pathlib.Path(flags.sweep, 'sweep.csv')
    if not table.is_file():
      raise ConfigError('--sweep', flags.sweep, 'a directory with a sweep.csv')
    for run, workdir in _read_sweep(table):
      parts = re.split(r'\s*\bseed=(\d+)\s*', run)
      name, seed = ' '.join(parts[::2]).strip(), ''.join(parts[1::2])
      name = name.replace(':model=', '')
      if report.read_result(workdir):
        places.append((names.get(name, name), seed, workdir, '--sweep'))
      else:
        print(f'left out: {files.printable(run)}: it has no result')
  for name, seed, workdir, key in dict.fromkeys(places):
    config = loading.load_config(workdir, key)
    if 'dynamic' in config.model:
      config.model = {**config.model, 'dynamic': True}
    other = loading.restore(workdir, config)
    same = *contract.INPUTS, *contract.LABELS
    contract.check(loaded.task.info, other.task.info, same, key)
    result = report.read_result(workdir) or {}
    row = {'candidate': name, 'seed': seed}
    row |= {key: value for key, value in result.items() if '/' in key}
    yield row, other.task, other.variables


def _time(readings: list[Reading], data: Any, flags: Any) -> None:
  """Times engines, of seeds the first; adds columns to the rows.

  The baseline is the first other run, without one the trained settings.
  """
  last, size = len(data.source) - 1, flags.batch_size
  rows = np.linspace(0, last, min(last + 1, TIMED_ROWS)).astype(int)
  items = chosen_inputs(data.source, rows)
  baseline = next((r for r, *_ in readings if 'seed' in r), readings[0][0])
  timed: dict[str, dict[str, Any]] = {}
  names = set[str]()
  with contextlib.ExitStack() as stack:
    hosts, candidates = stack.enter_context(Hosts()), []
    for row, task, variables in readings:
      if row['candidate'] in names:
        continue
      names.add(row['candidate'])
      name = f'{row["candidate"]} {row.get("seed", "")}'.strip()
      timed[name] = row
      chain, policy = serve_prepared(task, variables)
      # Small batches pad the last rows of a bucket less.
      sizes = tuple(sorted({max(1, size // 4), size}))
      engine = Engine(chain, policy, policy.lengths, sizes)
      stack.enter_context(engine)

      def answer(engine: Engine = engine) -> None:
        checked(engine.predict(items))

      candidates.append(Candidate(
        name, functools.partial(Call, answer, len(items)),
        is_baseline=row is baseline, flops=row['flops'],
        throughput='images_per_second',
      ))  # fmt: skip
    length: Any = dict(rounds=flags.rounds, warmup=flags.warmup)
    for line in run(candidates, {'batch': size}, hosts, **length)[0]:
      added = {key: line[key] for key in ('baseline', *TIMED)}
      timed[line['candidate']].update(added)


def serve_prepared(task: Any, variables: Any) -> tuple[Any, Any]:
  """Returns chain and policy for items as batches of the data set have them."""
  chain, policy = task.serve(variables, {})
  # A reader is frozen, and its own conversion resizes and crops.
  object.__setattr__(policy.reader, 'convert', np.asarray)
  return chain, policy


def draw(out: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Draws quality against FLOPs and images/s; runs of a name are their mean."""
  most = max(row['flops'] for row in rows)
  unit, scale = ('M', 1e6) if most < 1e9 else ('G', 1e9)
  groups = collections.defaultdict[Any, list[Mapping[str, Any]]](list)
  for row in rows:
    name, point = row['candidate'], ''
    if 'share' in row:
      name = f'AdaTape, {100 * row["share"]:.3g} % of its bank'
      point = f'τ {row["threshold"]:g}, T {row["max_steps"]}'
    groups[name, point].append(row)
  labels = f'{unit}FLOPs of a row', 'images/s'
  curves = collections.defaultdict[str, Any](dict)
  for (name, point), same in groups.items():
    quality = [100 * row['quality'] for row in same]
    mean = report.Estimate(np.mean(quality), min(quality), max(quality))
    flops = float(np.mean([row['flops'] for row in same])) / scale
    # Of seeds the first is timed.
    for label, cost in zip(
      labels, (flops, same[0].get('images_per_second')), strict=True
    ):
      if cost is not None:
        curves[label].setdefault(name, {})[point] = cost, mean
  for label, drawn in curves.items():
    is_rate = label == labels[1]
    pictures.plot_frontier(
      out / ('frontier_speed' if is_rate else 'frontier_flops'), drawn, label,
      'accuracy (%)', is_rate, 'Frontier: thresholds τ, at most T tape tokens',
    )  # fmt: skip


main = command.reporting('budgets', __doc__, Flags, write)

if __name__ == '__main__':
  raise SystemExit(main())
