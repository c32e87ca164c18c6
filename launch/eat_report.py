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

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib import calibration, frontier, predictions, report, risk
from launch import eat_pictures, eat_runs, eat_times
from launch.eat_runs import Model, Setting
from launch.eat_times import DENSE
from serve_lib.process import keep_freed_memory
from train_lib import strict_json

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
    'settings': [setting_row(one) for one in settings.values()],
    'calibration': calibration_rows(model),
  }
  if given['guarantee']:  # before the long part: it can refuse the model
    tables['guarantee'] = guarantee(model, given)
  latency: dict[str, Any] = {}
  theirs: dict[str, Setting] = {}
  if given['time'] != 'none':
    print(f'timing {len(shown)} settings', flush=True)
    tables['timings'], latency, theirs = eat_times.time(shown, given)
  tables['examples'] = [
    row for one in shown for row in example_rows(one, latency.get(one.name, {}))
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
  for name, columns in SHOWN.items():
    if tables.get(name):
      rows = [report.readable(row, columns.split()) for row in tables[name]]
      report.print_table(name, rows)
  print(', '.join(f'{name}: {value}' for name, value in facts.items()))
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
  tau, step = given['tau'], given['step']
  eat = eat_runs.load('EAT', given['workdir'], given, '--workdir', step)
  labels, others = eat.records['label'], []
  runs = {name: (given[name], f'--{name}') for name in DENSE if given[name]}
  for item in given['ablation']:
    name, directory = item.split('=', 1)
    runs[name] = directory, '--ablation'
  for name, (directory, flag) in runs.items():
    run = eat_runs.load(name, directory, given, flag)
    if not np.array_equal(run.records['label'], labels):
      expected = f'a run on the same {len(labels)} rows as {eat.directory}'
      raise ConfigError(flag, directory, expected)
    others.append(eat_runs.record(run, '', run.chain.model))
  recorded = list(eat_runs.variants(eat, given['prune_scales']))
  plain = eat_runs.plain((others if given['dense'] else recorded)[0])
  full = eat_runs.flops(plain, eat.records['length'])[:, -1]
  single: dict[str, Setting] = {}
  for model in others:  # one setting of each
    served = f'{model.name}/{eat_runs.default_name(model, tau)}'
    single[served] = eat_runs.measure(model, full, tau)[served]
  own: dict[str, Setting] = {}
  for model in recorded:
    own |= eat_runs.measure(model, full, tau)
  default = own[eat_runs.default_name(recorded[0], tau)]
  how = 'auto' if given['time'] == 'none' else given['time']
  extra = [default] if given['ablation'] else []
  reference = single.get('dense/never', own['never'])
  timed = eat_runs.choose(own, how, default.name)
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


def example_rows(
  setting: Setting, latency: Mapping[int, float]
) -> Iterator[dict[str, Any]]:
  """Yields a line for each row of the split.

  `kept_<layer>` are the tokens left after the pruning at that layer, None if
  the row left before it; `latency` are seconds of the rows that were timed.
  """
  model, values = setting.model, setting.rows
  layers = model.chain.model.prune_layers
  for row, leave in enumerate(setting.exits):
    line = {name: value[row].item() for name, value in values.items()}
    is_last = leave == len(model.heads) - 1
    right = int(line['answer'] == line['label'])
    line['exit_reason'] = 'last layer' if is_last else setting.point.rule
    line['correct'] = right if model.classes > 1 else None
    line['latency'] = latency.get(row)
    for at, kept in zip(layers, model.kept[row].tolist(), strict=True):
      # The pruning at the layer of a head comes after the head.
      line[f'kept_{at}'] = kept if at < line['depth'] else None
    yield {'setting': setting.name, 'index': row, **line}


def calibration_rows(model: Model) -> list[dict[str, Any]]:
  """Returns ECE and accuracy of each head; nothing without judged rows."""
  labels = model.records['label'][model.judged]
  scales, rows = model.policy.temperatures, []
  for place, layer in enumerate(model.heads if len(labels) else ()):
    head = model.logits[place : place + 1, model.judged]
    row = {'layer': layer, 'accuracy': frontier.accuracy(head[0], labels)}
    row |= {'temperature': float(scales[place]), 'rows': len(labels)}
    row['ece'] = calibration.errors(head, labels)[0]
    row['ece_calibrated'] = calibration.errors(head / scales[place], labels)[0]
    rows.append(row)
  return rows


def guarantee(model: Model, given: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Resamples the rows: how often do guaranteed thresholds fail?

  Once for the disagreement with the full model and once for the harm, rows
  that it has right and the early exit wrong. Only rows count that no
  temperature was fitted to.

  Raises:
    InvalidDataError: a regression, a model without exits, or no rows.
  """
  logits = model.logits[:, model.judged]
  labels, last = model.records['label'][model.judged], len(logits) - 1
  if not last or not len(labels):
    raise InvalidDataError(
      '--guarantee: expected exits by confidence, and rows that no '
      f'temperature was fitted to, got {last + 1} heads and {len(labels)} such '
      'rows; other rows are given as --split'
    )
  epsilon, delta, draws = (given[n] for n in ('epsilon', 'delta', 'draws'))
  rows = len(labels)
  heads = predictions.probabilities(model.calibrated[:, model.judged])
  thresholds = risk.default_thresholds(model.classes)
  leaves = risk.confidence_exits(heads, thresholds)
  losses = {
    'disagreement': risk.disagreement(logits, leaves),
    'harm': risk.harm(logits, leaves, labels),
  }
  result = []
  for name, loss in losses.items():
    limits = loss, thresholds, epsilon, delta
    risks = risk.resampled_risk(*limits, rows=rows, draws=draws)
    found = risk.guaranteed_threshold(*limits)
    early = leaves[found.certified - 1] < last if found.certified else 0.0
    row = {'loss': name, 'epsilon': epsilon, 'delta': delta, 'rows': rows}
    row |= {'draws': draws, 'exceeded': float((risks > epsilon).mean())}
    row |= {'worst': float(risks.max()), 'mean': float(risks.mean())}
    row |= {'threshold': found.threshold, 'early': float(np.mean(early))}
    result.append(row)
  return result
