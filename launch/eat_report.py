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
  *.png, *.pdf     see `launch.eat_pictures`
"""

import contextlib
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eat.policy import EatPolicy
from eval_lib import benchmark, report
from eval_lib.hosts import Call, Candidate, Case, Hosts
from launch import eat_models, eat_pictures, eat_settings, export, peers
from launch.eat_calls import check_answers
from launch.eat_models import Model
from launch.eat_settings import Setting
from serve_lib.engine import Engine
from serve_lib.grid import doubling
from serve_lib.process import keep_freed_memory
from train_lib import strict_json

CHUNK = 25  # rows of a turn
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


class Sweep(NamedTuple):
  """All measured settings.

  Attributes:
    settings: those of all runs; the other runs have one each, `run/rule`.
    default: the setting that the EAT is served with by default.
    chosen: the settings to time, the reference of the speed-ups first.
    dense: those of dense runs, which other libraries run too.
  """

  settings: list[Setting]
  default: Setting
  chosen: list[Setting]
  dense: list[Setting]


def write(given: Mapping[str, Any]) -> None:
  """Writes and prints the report.

  Args:
    given: the flags of the command.

  Raises:
    ConfigError: a flag does not fit the run, or a run has other rows.
    InvalidDataError: the labels are hidden, or a guarantee is impossible.
  """
  keep_freed_memory()
  made = sweep(given)
  model, out = made.default.model, pathlib.Path(given['out'])
  out.mkdir(parents=True, exist_ok=True)
  tables = {
    'settings': [eat_settings.setting_row(one) for one in made.settings],
    'calibration': eat_settings.calibration_rows(model),
  }
  if given['guarantee']:  # before the long part: it can refuse the model
    tables['guarantee'] = eat_settings.guarantee(model, given)
  shown = made.chosen
  latency: dict[str, Any] = {}
  theirs: dict[str, Setting] = {}
  if given['time'] != 'none':
    print(f'timing {len(shown)} settings', flush=True)
    tables['timings'], latency, theirs = time(shown, made.dense, given)
  examples = [
    row
    for one in shown
    for row in eat_settings.example_rows(one, latency.get(one.name, {}))
  ]
  for name, rows in {**tables, 'examples': examples}.items():
    if rows:
      report.write_csv(out / f'{name}.csv', rows)
  names = {one.name for one in shown}
  tables['settings'] = [
    row for row in tables['settings'] if row['setting'] in names
  ]
  facts = _facts(made.default.model)
  facts['reference'] = shown[0].name if 'timings' in tables else None
  plain = {name: list(map(report.flat, rows)) for name, rows in tables.items()}
  strict_json.write(out / 'result.json', facts | plain)
  for name, (columns, note) in SHOWN.items():
    if tables.get(name):
      rows = [report.readable(row, columns.split()) for row in tables[name]]
      report.print_table(f'{name}: {note.format(**facts)}', rows)
  eat_pictures.draw(
    out, made.settings, made.default, tables.get('timings', ()), theirs,
    given['sentences'],
  )  # fmt: skip
  print(f'written: {out}')


def sweep(given: Mapping[str, Any]) -> Sweep:
  """Records all models and measures all settings on their logits."""
  tau, where = given['tau'], (given['split'], given['limit'])
  eat = eat_models.load(
    'EAT', given['workdir'], *where, '--workdir', given['step']
  )
  print(f'{eat.directory}, step {eat.step}: {len(eat.labels)} rows of split '
        f'{eat.split}, {jax.devices()[0].device_kind}')  # fmt: skip
  others: dict[str, Model] = {}
  compared = [(name, given[name]) for name in ('dense', 'student')]
  for name, directory in (*compared, *given['ablation']):
    if directory:
      flag = f'--{name}' if name in ('dense', 'student') else '--ablation'
      others[name] = eat_models.load(name, directory, *where, flag)
      eat_models.check_same_rows(eat, others[name], flag)
  changed = eat_models.variants(eat.module, given['prune_scales'])
  recorded = [eat_models.record(eat, *one) for one in changed.items()]
  others = {name: eat_models.record(one) for name, one in others.items()}
  full = others.get('dense', recorded[0]).dense_flops()
  own = [
    one for model in recorded for one in eat_settings.measure(model, full, tau)
  ]
  single = {}
  for name, model in others.items():
    settings = eat_settings.measure(model, full, tau, f'{name}/')
    served = f'{name}/{eat_settings.default_name(model, tau)}'
    single[name] = {one.name: one for one in settings}[served]
  names = {one.name: one for one in own}
  default = names[eat_settings.default_name(recorded[0], tau)]
  how = given['time'] if given['time'] != 'none' else 'auto'
  timed = eat_settings.choose(own, how, default.name, given['most'])
  extra = [default] if given['ablation'] else []
  reference = single.get('dense', names['never'])
  every = [reference, *single.values(), *extra, *timed]
  dense = [single[name] for name in ('dense', 'student') if name in single]
  chosen = list({one.name: one for one in every}.values())
  return Sweep([*single.values(), *own], default, chosen, dense)


def _facts(model: Model) -> dict[str, Any]:
  low, middle, high = np.quantile(model.length, (0.05, 0.5, 0.95)).tolist()
  mean = float(model.length.mean())
  return {
    'workdir': model.directory,
    'step': model.step,
    'split': model.split,
    'rows': len(model.length),
    'temperatures': model.calibrated_by,
    'rows_fitted': int(model.fitted.sum()),
    'device': jax.devices()[0].device_kind,
    'metric': model.metric,
    'length': dict(mean=mean, p5=low, p50=middle, p95=high),
  }


# -- times ---------------------------------------------------------------------


def time(
  settings: Sequence[Setting],
  dense: Sequence[Setting],
  given: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Setting]]:
  """Times settings on the same rows: alone, and in full batches.

  A turn is a few rows in a row, the same ones for every candidate. Ours run in
  the engine in this process, other libraries in their own.

  Args:
    settings: of any models; the first is the reference.
    dense: of dense models, which other libraries run too.
    given: the flags of the command.

  Returns:
    (rows of `eval_lib.benchmark`, at batch 1 with the mean and percentiles of
    the latency; mean seconds by row of the split, by candidate; the settings
    that other libraries ran, by candidate).
  """
  total = len(settings[0].exits)
  count = min(given['rows'], total)
  rows = np.linspace(0, total - 1, count).round().astype(int)
  calls = min(CHUNK, count)
  turns, warmup = -(-count // calls), -(-given['warmup'] // calls)
  alone, full = {'batch': 1}, {'batch': given['batch_size']}
  with contextlib.ExitStack() as stack:
    hosts = stack.enter_context(Hosts(environment={'HF_HUB_OFFLINE': '1'}))
    ours = _candidates(settings, rows, given, stack)
    theirs = list(_peers(dense, rows, given, stack))
    candidates = [*ours, *(candidate for candidate, _ in theirs)]
    prepared, samples = benchmark.time_case(
      candidates, alone, hosts, rounds=given['rounds'] * turns, warmup=warmup,
      calls=calls,
    )  # fmt: skip
    table = benchmark.rows(alone, candidates, samples, prepared)
    in_batches = benchmark.run(
      candidates, [full], hosts, rounds=given['rounds'], warmup=1
    )
  # `Host.prepare` calls once; then the rows follow each other.
  first, latency = 1 + warmup * calls, {}
  for row in table:
    seconds = samples[row['candidate']].ravel()[: given['rounds'] * count]
    row['latency_mean'] = float(seconds.mean())
    for percent in (50, 95):
      row[f'latency_p{percent}'] = float(np.percentile(seconds, percent))
    means = np.roll(seconds.reshape(-1, count).mean(0), first % count)
    latency[row['candidate']] = dict(
      zip(rows.tolist(), means.tolist(), strict=True)
    )
  of_peers = {candidate.name: one for candidate, one in theirs}
  return table + in_batches, latency, of_peers


def _candidates(
  settings: Sequence[Setting],
  rows: np.ndarray,
  given: Mapping[str, Any],
  stack: contextlib.ExitStack,
) -> list[Candidate]:
  """Serves each model with an engine; settings of a model share it."""
  engines: dict[int, tuple[Engine, EatPolicy]] = {}
  found: list[Candidate] = []
  for setting in settings:
    model, old = setting.model, setting.model.policy
    if id(model) not in engines:
      policy = EatPolicy(
        model.chain, old.reader, old.class_names, old.lengths,
        temperatures=old.temperatures.tolist(),
      )  # fmt: skip
      # The length buckets up to that of the longest row.
      last = int(np.searchsorted(old.lengths, model.length.max()))
      engine = Engine(
        model.chain, policy, old.lengths[: last + 1],
        doubling(given['batch_size']),
        cache_directory=given['compilation_cache'],
      )  # fmt: skip
      engine.warm_up(progress=True)
      engines[id(model)] = stack.enter_context(engine), policy
    flops = float(setting.rows['flops_served'][rows].mean())
    options = dict(setting=setting, rows=rows, served=engines[id(model)])
    found.append(
      Candidate(
        setting.name, _make, options, is_baseline=not found,
        flops=(flops, flops),
      )
    )  # fmt: skip
  return found


def _items(setting: Setting, rows: np.ndarray) -> list[dict[str, Any]]:
  records = [setting.model.source.record(int(row)) for row in rows]
  return [{k: one[k] for k in ('tokens', 'token_types')} for one in records]


def _make(
  case: Case,
  setting: Setting,
  rows: np.ndarray,
  served: tuple[Engine, EatPolicy],
) -> Call:
  """Prepares a setting: the next row in each call, or all rows."""
  engine, policy = served
  items = _items(setting, rows)

  def predict(some: Sequence[Any]) -> Sequence[Any]:
    policy.rule = setting.rule  # settings of a model share the policy
    return check_answers(engine.predict(some))

  def is_same(label: Any, logits: np.ndarray) -> bool:
    if policy.class_names:
      return label == policy.class_names[int(logits.argmax())]
    return bool(np.isclose(label, logits[0], rtol=1e-3, atol=1e-3))

  # The forms agree to rounding, so a row at a threshold may differ.
  differing = sum(
    answer.depth != setting.rows['depth'][row]
    or not is_same(answer.label, setting.chosen[row])
    for row, answer in zip(rows.tolist(), predict(items), strict=True)
  )
  columns = {'differing_rows': int(differing)}
  if case['batch'] > 1:
    return Call(lambda: predict(items), len(items), columns=columns)
  turns = itertools.cycle(items)
  return Call(lambda: predict([next(turns)]), columns=columns)


def _peers(
  dense: Sequence[Setting],
  rows: np.ndarray,
  given: Mapping[str, Any],
  stack: contextlib.ExitStack,
) -> Iterator[tuple[Candidate, Setting]]:
  """Yields dense models of other libraries, as far as those are installed."""
  folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
  for library in given['peers'] if dense else ():
    if library == 'none':
      continue
    if reason := peers.missing(library):
      print(f'left out: {peers.TITLES[library]}: {reason}')
      continue
    for setting in dense:
      model = setting.model
      weights = folder / model.name
      if not weights.exists():
        params = model.chain.variables['params']
        export.save(str(weights), model.module, params)
      name = f'{peers.TITLES[library]} {model.name}'
      make = functools.partial(
        peers.make_rows, library=library, weights=str(weights),
        items=_items(setting, rows), expected=setting.chosen[rows],
      )  # fmt: skip
      yield Candidate(name, make, process=name), setting
