"""Quality and speed of a trained EAT: `launch.benchmark eat`.

Every model is run once over the split; exit rules and prune ratios are swept
over the recorded logits. The chosen settings (`--time`) are then timed through
the engine, in turns with the dense run and the student, and with those of
PyTorch and ONNX Runtime: rows alone, and in full batches. Tokenising is not
timed. `flops` are by formula for the length of each row, `flops_served` for its
length bucket, to which the FLOP limit belongs. Calibration errors are those of
the rows that the temperatures were not fitted to. Written into `--out`:

  settings.csv     quality, depth, retention and FLOPs of all settings
  timings.csv      latency and throughput of the timed ones
  examples.csv     each row with each timed setting
  calibration.csv  ECE of each head before and after its temperature
  guarantee.csv    with --guarantee: how often the guaranteed threshold fails
  result.json      the main numbers
  *.png, *.pdf     frontier_flops, frontier and frontier_batch (quality against
                   FLOPs and time), exits, retention, reliability_<layer>,
                   ablation, and sentences (also as a page)
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dataset_lib.errors import ConfigError
from eat.policy import EatPolicy
from eval_lib import benchmark, report
from eval_lib.benchmark import Call, Candidate, Hosts
from launch import eat_pictures, eat_runs, export, peers
from launch.candidates_eat import checked
from launch.eat_runs import Model, Setting
from serve_lib.engine import Engine
from serve_lib.grid import doubling
from serve_lib.process import keep_freed_memory
from train_lib import strict_json

CHUNK = 25  # rows of a turn
DENSE = ('dense', 'student')  # runs that other libraries can run too
# Columns and note of the tables that are printed.
SHOWN = {
  'settings': (
    'setting quality agreement depth retention flops flops_share flops_served '
    'early',
    '{metric}; {rows_fitted} of {rows} rows also fitted the temperatures',
  ),
  'timings': (
    'batch candidate seconds latency_mean latency_p50 latency_p95 speedup '
    'limit share differing_rows',
    'speed-up over {reference}; median [quartiles] of the turns',
  ),
  'calibration': (
    'layer accuracy temperature ece ece_calibrated rows',
    'temperatures: {temperatures}; of the other rows',
  ),
  'guarantee': (
    'loss epsilon exceeded delta mean worst threshold early draws rows',
    'risk <= epsilon with probability 1 - delta, resampled',
  ),
}


def write(given: Mapping[str, Any]) -> None:
  """Writes and prints the report.

  Args:
    given: the flags of the command.

  Raises:
    ConfigError: a flag does not fit the run, or a run has other rows.
    InvalidDataError: the labels are hidden, or a guarantee is impossible.
  """
  keep_freed_memory()
  settings, default, shown = sweep(given)
  model, out = default.model, pathlib.Path(given['out'])
  tables: dict[str, Any] = {
    'settings': [eat_runs.setting_row(one) for one in settings.values()],
    'calibration': eat_runs.calibration_rows(model),
  }
  if given['guarantee']:  # before the long part: it can refuse the model
    tables['guarantee'] = eat_runs.guarantee(model, given)
  latency: dict[str, Any] = {}
  theirs: dict[str, Setting] = {}
  if given['time'] != 'none':
    print(f'timing {len(shown)} settings', flush=True)
    tables['timings'], latency, theirs = time(shown, given)
  tables['examples'] = [
    row
    for one in shown
    for row in eat_runs.example_rows(one, latency.get(one.name, {}))
  ]
  out.mkdir(parents=True, exist_ok=True)
  for name, rows in tables.items():
    if rows:
      report.write_csv(out / f'{name}.csv', rows)
  del tables['examples']
  names = {one.name for one in shown}
  tables['settings'] = [r for r in tables['settings'] if r['setting'] in names]
  facts = _facts(model) | {'reference': shown[0].name if latency else None}
  plain = {name: list(map(report.flat, rows)) for name, rows in tables.items()}
  strict_json.write(out / 'result.json', facts | plain)
  for name, (columns, note) in SHOWN.items():
    if tables.get(name):
      rows = [report.readable(row, columns.split()) for row in tables[name]]
      report.print_table(f'{name}: {note.format(**facts)}', rows)
  timings = tables.get('timings', ())
  count = given['sentences']
  eat_pictures.draw(out, settings, default, timings, theirs, count)
  print(f'written: {out}')


def sweep(
  given: Mapping[str, Any],
) -> tuple[dict[str, Setting], Setting, list[Setting]]:
  """Records all models and measures all settings on their logits.

  Returns:
    (settings of all runs by name, the one that the EAT is served with by
    default, those to time: the reference of the speed-ups first).
  """
  tau = given['tau']
  eat = eat_runs.load(
    'EAT', given['workdir'], given, '--workdir', given['step']
  )
  compared = [(name, given[name]) for name in DENSE]
  others = {}
  for name, directory in (*compared, *given['ablation']):
    if not directory:
      continue
    flag = f'--{name}' if name in DENSE else '--ablation'
    run = eat_runs.load(name, directory, given, flag)
    labels = eat.records['label']
    if not np.array_equal(run.records['label'], labels):
      expected = f'a run on the same {len(labels)} rows as {eat.directory}'
      raise ConfigError(flag, directory, expected)
    others[name] = eat_runs.record(run)
  changed = eat_runs.variants(eat.chain.model, given['prune_scales'])
  recorded = [eat_runs.record(eat, *one) for one in changed.items()]
  full = others.get('dense', recorded[0]).dense_flops()
  single: dict[str, Setting] = {}
  own: dict[str, Setting] = {}
  for name, model in others.items():  # one setting of each
    served = f'{name}/{eat_runs.default_name(model, tau)}'
    single[served] = eat_runs.measure(model, full, tau, f'{name}/')[served]
  for model in recorded:
    own |= eat_runs.measure(model, full, tau)
  default = own[eat_runs.default_name(recorded[0], tau)]
  how = 'auto' if given['time'] == 'none' else given['time']
  timed = eat_runs.choose(own, how, default.name)
  extra = [default] if given['ablation'] else []
  reference = single.get('dense/never', own['never'])
  every = [reference, *single.values(), *extra, *timed]
  chosen = list({one.name: one for one in every}.values())
  return single | own, default, chosen


def _facts(model: Model) -> dict[str, Any]:
  length = model.records['length']
  low, middle, high = np.quantile(length, (0.05, 0.5, 0.95)).tolist()
  mean = float(length.mean())
  return {
    'workdir': model.directory,
    'step': model.step,
    'split': model.split,
    'rows': len(length),
    'temperatures': model.calibrated_by,
    'rows_fitted': int(model.fitted.sum()),
    'device': jax.devices()[0].device_kind,
    'metric': model.metric,
    'length': dict(mean=mean, p5=low, p50=middle, p95=high),
  }


# -- times ---------------------------------------------------------------------


def time(
  settings: Sequence[Setting], given: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Setting]]:
  """Times settings on the same rows: alone, and in full batches.

  A turn is a few rows in a row, the same ones for every candidate. Ours run in
  the engine in this process, other libraries in their own.

  Args:
    settings: of any models; the first is the reference.
    given: the flags of the command.

  Returns:
    (rows of `eval_lib.benchmark`, at batch 1 with the mean and percentiles of
    the latency; mean seconds by row of the split, by candidate; the settings
    that other libraries ran, by candidate).
  """
  total, rounds = len(settings[0].exits), given['rounds']
  count = min(given['rows'], total)
  rows = np.linspace(0, total - 1, count).round().astype(int)
  calls = min(CHUNK, count)
  turns, warmup = -(-count // calls), -(-given['warmup'] // calls)
  theirs = {
    f'{peers.TITLES[library]} {one.model.name}': (library, one)
    for library in peers.usable(given['peers'])
    for one in settings
    if one.model.name in DENSE
  }
  with contextlib.ExitStack() as stack:
    hosts = stack.enter_context(Hosts(environment={'HF_HUB_OFFLINE': '1'}))
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    engines = _engines(settings, given['batch_size'], stack)

    def run(batch: int, **timing: Any) -> Any:
      found = [_candidate(one, rows, batch, engines) for one in settings]
      found[0] = dataclasses.replace(found[0], is_baseline=True)
      for name, (library, one) in theirs.items():
        make = _make_peer(library, one, rows, batch, folder)
        found.append(Candidate(name, make, process=name))
      return benchmark.run(found, {'batch': batch}, hosts, **timing)

    table, samples = run(1, rounds=rounds * turns, warmup=warmup, calls=calls)
    in_batches, _ = run(given['batch_size'], rounds=rounds, warmup=1)
  # A call is made once when prepared; then the rows follow each other.
  first, latency = 1 + warmup * calls, {}
  for row in table:
    seconds = samples[row['candidate']].ravel()[: rounds * count]
    row['latency_mean'] = float(seconds.mean())
    row['latency_p50'], row['latency_p95'] = np.percentile(
      seconds, (50, 95)
    ).tolist()
    means = np.roll(seconds.reshape(-1, count).mean(0), first % count)
    latency[row['candidate']] = dict(
      zip(rows.tolist(), means.tolist(), strict=True)
    )
  return table + in_batches, latency, {n: one for n, (_, one) in theirs.items()}


def _engines(
  settings: Sequence[Setting], batch: int, stack: contextlib.ExitStack
) -> dict[int, tuple[Engine, EatPolicy]]:
  """Returns a warm engine with its policy for each model."""
  engines: dict[int, tuple[Engine, EatPolicy]] = {}
  for model in (one.model for one in settings):
    if id(model) in engines:
      continue
    old, longest = model.policy, model.records['length'].max()
    policy = EatPolicy(
      model.chain, old.reader, old.class_names, old.lengths,
      temperatures=old.temperatures.tolist(),
    )  # fmt: skip
    lengths = old.lengths[: np.searchsorted(old.lengths, longest) + 1]
    engine = Engine(model.chain, policy, lengths, doubling(batch))
    engine.warm_up(progress=True)
    engines[id(model)] = stack.enter_context(engine), policy
  return engines


def _items(setting: Setting, rows: np.ndarray) -> list[dict[str, Any]]:
  records = [setting.model.source.record(int(row)) for row in rows]
  return [{k: one[k] for k in ('tokens', 'token_types')} for one in records]


def _candidate(
  setting: Setting, rows: np.ndarray, batch: int, engines: Mapping[int, Any]
) -> Candidate:
  """Returns a setting: the next row in each call at batch 1, or all rows."""
  measures, (engine, policy) = setting.rows(), engines[id(setting.model)]
  items = _items(setting, rows)
  turns = itertools.cycle(items)

  def predict(some: Sequence[Any]) -> Sequence[Any]:
    policy.rule = setting.rule  # settings of a model share the policy
    return checked(engine.predict(some))

  def differs(row: int, answer: Any) -> bool:
    # The forms agree to rounding, so a row at a threshold may differ.
    if answer.depth != measures['depth'][row]:
      return True
    if policy.class_names:
      return answer.label != policy.class_names[measures['answer'][row]]
    return not np.isclose(answer.label, measures['answer'][row], 1e-3, 1e-3)

  def make() -> Call:
    answers = predict(items)
    wrong = sum(map(differs, rows.tolist(), answers))
    columns = {'differing_rows': wrong}
    if batch == 1:
      return Call(lambda: predict([next(turns)]), columns=columns)
    return Call(lambda: predict(items), len(items), columns=columns)

  flops = float(measures['flops_served'][rows].mean())
  return Candidate(setting.name, make, flops=(flops, flops))


def _make_peer(
  library: str, setting: Setting, rows: np.ndarray, batch: int, folder: Any
) -> Any:
  """Returns the function that prepares a dense model in another library."""
  model, weights = setting.model, folder / setting.model.name
  if not weights.exists():
    params = model.chain.variables['params']
    export.save(str(weights), model.chain.model, params)
  given = library, str(weights), _items(setting, rows), batch
  return functools.partial(peers.make, *given, expected=setting.chosen[rows])
