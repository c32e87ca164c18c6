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
  calibration.csv  ECE of each head before and after its temperature
  guarantee.csv    with --guarantee: how often the guaranteed threshold fails
  result.json      the main numbers
  *.png, *.pdf     frontier_flops, frontier and frontier_batch (quality against
                   FLOPs and time), exits, retention, reliability_<layer>
                   and ablation
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

from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib import benchmark, calibration, frontier, predictions, report, risk
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
# Columns of the tables that are printed.
SHOWN = {
  'settings': 'setting quality agreement depth retention flops flops_share '
              'flops_served early',
  'timings': 'batch candidate seconds latency_mean latency_p50 latency_p95 '
             'speedup limit share differing_rows',
  'calibration': 'layer accuracy temperature ece ece_calibrated rows',
  'guarantee': 'loss epsilon exceeded delta mean worst threshold early draws '
               'rows',
}  # fmt: skip


def write(given: Mapping[str, Any]) -> None:
  """Writes and prints the report that the flags of the command describe.

  Raises:
    ConfigError: a flag does not fit the run, or a run has other rows.
    InvalidDataError: the labels are hidden, or a guarantee is impossible.
  """
  keep_freed_memory()
  settings, default, shown = _sweep(given)
  model, out = default.model, pathlib.Path(given['out'])
  tables: dict[str, Any] = {'calibration': calibration_rows(model)}
  if given['guarantee']:  # before the long part: it can refuse the model
    tables['guarantee'] = guarantee(model, given)
  theirs: dict[str, Setting] = {}
  if given['time'] != 'none':
    print(f'timing {len(shown)} settings', flush=True)
    tables['timings'], theirs = _time(shown, given)
  every = [setting_row(one) for one in settings.values()]
  out.mkdir(parents=True, exist_ok=True)
  for name, rows in (tables | {'settings': every}).items():
    if rows:
      report.write_csv(out / f'{name}.csv', rows)
  names = {one.name for one in shown}
  tables['settings'] = [r for r in every if r['setting'] in names]
  reference = shown[0].name if 'timings' in tables else None
  facts = _facts(model) | {'reference': reference}
  plain = {name: list(map(report.flat, rows)) for name, rows in tables.items()}
  strict_json.write(out / 'result.json', facts | plain)
  for name, columns in SHOWN.items():
    if rows := tables.get(name):
      report.print_table(name, rows, columns=columns.split())
  print(', '.join(f'{name}: {value}' for name, value in facts.items()))
  measured = tables.get('timings', ()), theirs
  eat_pictures.draw(out, settings, default, *measured)
  print(f'written: {out}')


def _sweep(
  given: Mapping[str, Any],
) -> tuple[dict[str, Setting], Setting, list[Setting]]:
  """Records all models and measures all settings on their logits.

  Returns:
    (settings of all runs by name, the one that the EAT is served with by
    default, those to time: the reference of the speed-ups first).
  """
  tau, how, step = given['tau'], given['time'], given['step']
  eat = eat_runs.load('EAT', given['workdir'], given, '--workdir', step)
  runs = [(name, given[name], f'--{name}') for name in DENSE if given[name]]
  pairs = (item.split('=', 1) for item in given['ablation'])
  runs += [(name, directory, '--ablation') for name, directory in pairs]
  others, labels = [], eat.records['label']
  for name, directory, flag in runs:
    run = eat_runs.load(name, directory, given, flag, None)
    if not np.array_equal(run.records['label'], labels):
      expected = f'a run on the same {len(labels)} rows as {eat.directory}'
      raise ConfigError(flag, directory, expected)
    others.append(eat_runs.record(run))
  recorded = [*eat_runs.variants(eat, given['prune_scales'])]
  dense = (others if given['dense'] else recorded)[0].module.clone(
    prune_layers=(), prune_ratios=(), window=0, exit_layers=()
  )
  full = eat_runs.flops(dense, eat.records['length'])[:, -1]
  settings: dict[str, Setting] = {}
  for model in others:  # one setting of each
    served = f'{model.name}/{eat_runs.default_name(model, tau)}'
    settings[served] = eat_runs.measure(model, full, tau)[served]
  own: dict[str, Setting] = {}
  for model in recorded:
    own |= eat_runs.measure(model, full, tau)
  default = own[eat_runs.default_name(recorded[0], tau)]
  timed = eat_runs.choose(own, 'auto' if how == 'none' else how, default.name)
  timed = [default] * bool(given['ablation']) + timed
  reference = settings.get('dense/never', own['never'])
  every = {one.name: one for one in (reference, *settings.values(), *timed)}
  return settings | own, default, [*every.values()]


def _facts(model: Model) -> dict[str, Any]:
  length = model.records['length']
  names, shares = ('p5', 'p50', 'p95'), (0.05, 0.5, 0.95)
  quantiles = zip(names, np.quantile(length, shares).tolist(), strict=True)
  return {
    'workdir': model.directory,
    'step': model.step,
    'split': model.split,
    'rows': len(length),
    'temperatures': model.calibrated_by,
    'rows_fitted': int(model.fitted.sum()),
    'device': jax.devices()[0].device_kind,
    'metric': frontier.main_number(model.task)[0],
    'length': {'mean': float(length.mean()), **dict(quantiles)},
  }


# -- tables --------------------------------------------------------------------


def setting_row(setting: Setting) -> dict[str, Any]:
  """Returns means over the rows; `agreement` is with the own last head."""
  point, model = setting.point, setting.model
  mean = {name: float(v.mean()) for name, v in setting.rows.items()}
  shares = zip(model.heads, point.shares, strict=True)
  return {
    'setting': setting.name,
    'run': model.directory,
    'variant': model.variant or 'as trained',
    'rule': point.rule,
    'value': point.value,
    'quality': point.quality,
    'agreement': point.agreement if len(model.heads) > 1 else None,
    'depth': point.depth,
    'retention': mean['retention'],
    'flops': mean['flops'],
    'flops_share': point.flops,
    'flops_served': mean['flops_served'],
    'early': 1.0 - point.shares[-1],
    **{f'exit_{layer}': share for layer, share in shares},
  }


def calibration_rows(model: Model) -> list[dict[str, Any]]:
  """Returns ECE and accuracy of each head; nothing without judged rows."""
  labels, scales = (
    model.records['label'][model.judged],
    model.policy.temperatures,
  )
  logits = model.logits[:, model.judged]
  if not len(labels):
    return []
  columns = {
    'layer': model.heads,
    'accuracy': [frontier.accuracy(head, labels) for head in logits],
    'temperature': scales.tolist(),
    'rows': itertools.repeat(len(labels), len(logits)),
    'ece': calibration.errors(logits, labels),
    'ece_calibrated': calibration.errors(logits, labels, temperatures=scales),
  }
  rows = zip(*columns.values(), strict=True)
  return [dict(zip(columns, row, strict=True)) for row in rows]


def guarantee(model: Model, given: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Resamples the rows that no temperature was fitted to; see `eval_lib.risk`.

  Raises:
    InvalidDataError: a regression, a model without exits, or no rows.
  """
  judged, labels = model.judged, model.records['label'][model.judged]
  if len(model.heads) == 1 or not len(labels):
    raise InvalidDataError(
      '--guarantee: expected exits by confidence, and rows that no temperature '
      f'was fitted to, got {len(model.heads)} heads and {len(labels)} such '
      'rows; other rows are given as --split'
    )
  heads = predictions.probabilities(model.calibrated[:, judged])
  limits = (given[name] for name in ('epsilon', 'delta', 'draws'))
  return risk.resample_confidence(heads, labels, *limits)


# -- times ---------------------------------------------------------------------


def _time(
  settings: Sequence[Setting], given: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Setting]]:
  """Times settings on the same rows: alone, and in full batches.

  The first is the reference. A turn is a few rows, the same ones for every
  candidate. Other libraries run in processes of their own.

  Returns:
    (rows of `eval_lib.benchmark`, at batch 1 with the mean and percentiles of
    the latency; the settings that other libraries ran, by candidate).
  """
  total, rounds = len(settings[0].point.exits), given['rounds']
  count, size = min(given['rows'], total), given['batch_size']
  rows = np.linspace(0, total - 1, count).round().astype(int)
  calls = min(CHUNK, count)
  turns, warmup = -(-count // calls), -(-given['warmup'] // calls)
  dense = [one for one in settings if one.model.name in DENSE]
  theirs = {
    f'{peers.TITLES[library]} {one.model.name}': (library, one)
    for library in peers.usable(given['peers'] if dense else ())
    for one in dense
  }
  with contextlib.ExitStack() as stack:
    hosts = stack.enter_context(Hosts())
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    models = {id(one.model): one.model for one in settings}
    engines = {key: _engine(one, size, stack) for key, one in models.items()}

    def run(batch: int, **timing: Any) -> Any:
      found = [
        _candidate(one, rows, batch, engines[id(one.model)]) for one in settings
      ]
      found[0] = dataclasses.replace(found[0], is_baseline=True)
      for name, (library, one) in theirs.items():
        model, weights = one.model, folder / one.model.name
        if not weights.exists():
          params = model.policy.chain.variables['params']
          export.save(str(weights), model.module, params)
        given = library, str(weights), _items(one, rows), batch
        expected = {'expected': model.logits[-1, rows]}
        make = functools.partial(peers.make, *given, **expected)
        found.append(Candidate(name, make, process=name))
      return benchmark.run(found, {'batch': batch}, hosts, **timing)

    table, samples = run(1, rounds=rounds * turns, warmup=warmup, calls=calls)
    in_batches, _ = run(size, rounds=rounds, warmup=1)
  for row in table:
    seconds = samples[row['candidate']].ravel()[: rounds * count]
    row['latency_mean'] = float(seconds.mean())
    for percent in (50, 95):
      row[f'latency_p{percent}'] = float(np.percentile(seconds, percent))
  return table + in_batches, {name: one for name, (_, one) in theirs.items()}


def _engine(model: Model, batch: int, stack: contextlib.ExitStack) -> Engine:
  policy, longest = model.policy, model.records['length'].max()
  lengths = policy.lengths[: np.searchsorted(policy.lengths, longest) + 1]
  engine = Engine(policy.chain, policy, lengths, doubling(batch))
  engine.warm_up(progress=True)
  return stack.enter_context(engine)


def _items(setting: Setting, rows: np.ndarray) -> list[dict[str, Any]]:
  records = [setting.model.source.record(int(row)) for row in rows]
  return [{k: one[k] for k in ('tokens', 'token_types')} for one in records]


def _candidate(
  setting: Setting, rows: np.ndarray, batch: int, engine: Engine
) -> Candidate:
  """Returns a candidate that answers the next row, or all in full batches."""
  policy, items = setting.model.policy, _items(setting, rows)
  names, turns = policy.class_names, itertools.cycle(items)
  depths, answers, served = (
    setting.rows[name][rows] for name in ('depth', 'answer', 'flops_served')
  )

  def predict(some: Sequence[Any]) -> Sequence[Any]:
    policy.rule = setting.rule  # settings of a model share the policy
    return checked(engine.predict(some))

  def differs(answer: Any, depth: int, wanted: Any) -> bool:
    # The forms agree to rounding, so a row at a threshold may differ.
    if names:
      return (answer.depth, answer.label) != (depth, names[wanted])
    is_close = np.isclose(answer.label, wanted, 1e-3, 1e-3)
    return answer.depth != depth or not is_close

  def make() -> Call:
    wrong = sum(map(differs, predict(items), depths, answers))
    columns = {'differing_rows': wrong}
    if batch == 1:
      return Call(lambda: predict([next(turns)]), columns=columns)
    return Call(lambda: predict(items), len(items), columns=columns)

  return Candidate(setting.name, make, flops=float(served.mean()))
