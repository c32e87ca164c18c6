"""Quality and speed of a trained EAT, from its checkpoint.

  python -m benchmarks.eat --workdir=/tmp/sst2_eat --dense=/tmp/sst2 \\
      --out=/tmp/report

Exit rules and prune ratios are swept over recorded logits. The settings of
`--time` are then timed on token ids, in turns with the dense run, the student
and other libraries: one row at a time, and in full batches. FLOPs count each
row at its own length. `--out` gets settings.csv (all settings), timings.csv,
calibration.csv (rows outside the calibration split, all and by source),
retention.csv, guarantee.csv, result.json and the pictures.
`quality_difference` is the quality minus that of the reference, in points; the
reference is the dense run if given, else the EAT at full depth. Tasks with two
metrics have a column for each; `quality` is the first.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval, Predicate

from benchmarks import command, eat_pictures, peers, recorded_runs
from benchmarks.recorded_runs import Model, Setting
from benchmarks.risk_peers import resample
from benchmarks.timing import Candidate, Hosts, in_turn, run
from core import files
from core.errors import InvalidDataError
from core.fields import flag
from eval_lib import calibration, frontier, plots, report
from eval_lib.risk import Variant
from halting.row_rules import scale
from launch.command_line import Count, Positive
from model_lib import convert
from serve_lib.chain import checked
from serve_lib.engine import Engine

CHUNK = 25  # rows timed before the next candidate
# Printed columns of tables that have more.
SHOWN = {
  'settings': 'setting quality quality_difference accuracy spearman agreement '
              'depth retention flops flops_share early',
  'timings': 'batch candidate quality quality_difference seconds latency_mean '
             'latency_p50 latency_p95 speedup limit share',
}  # fmt: skip
SOURCE_ROWS = 10 * calibration.BINS  # fewer give no ECE of their own


def _are_runs(items: Sequence[str]) -> bool:
  pairs = [item.partition('=')[::2] for item in items]
  names = {'EAT', 'dense', 'student', *dict(pairs)}
  return all(map(all, pairs)) and len(names) == 3 + len(pairs)


Scale = Annotated[int | float, Interval(ge=0.0, lt=1e3)]
Runs = Annotated[
  tuple[str, ...], Predicate(_are_runs), 'list of NAME=DIRECTORY with new names'
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Served, command.Run):
  dense: str = flag('a dense run on the same data', '')
  student: str = flag('a run of a smaller dense model', '')
  ablation: Runs = flag('runs for the ablation', (), 'NAME=DIRECTORY,...')
  limit: Count = flag('number of first rows of the split; 0 for all', 0)
  prune_scales: tuple[Scale, ...] = flag('prune-ratio factors', (0.0, 0.5, 1.0))
  rules: tuple[str, ...] = flag('exit rules of yours to sweep too', (), 'NAME')
  time: str = flag(
    'auto (never, the default and the frontier), all, none, or names such as '
    'confidence=0.9,prune_0.5/never',
    'auto',
  )
  rows: Positive = flag('number of rows to time, at most', 1000)
  warmup: Count = flag('calls of each setting before the timed ones', 50)
  rounds: Positive = flag('timed rounds', 3, names=command.ROUNDS)
  guarantee: bool = flag('resample rows: how often does the bound fail?', False)
  epsilon: command.Share = flag('bound on the risk', 0.02)
  delta: command.Share = flag('largest probability that the bound fails', 0.1)
  draws: Positive = flag('number of resamplings', 200)


def write(flags: Any) -> None:
  settings, default, timed = recorded_runs.sweep(flags)
  model, out = default.model, pathlib.Path(flags.out)
  reference = timed[0]  # of speed-ups and differences
  tables: dict[str, Any] = {'calibration': calibration_rows(model)}
  tables['retention'] = retention_rows(default)
  if flags.guarantee:  # fails early if no guarantee is possible
    recorded = {setting.model for setting in settings.values()}
    tables['guarantee'] = guarantee(model, recorded, flags)
  if flags.time != 'none':
    print(f'timing {len(timed)} settings', flush=True)
    tables['timings'] = _time(timed, flags)
  every = [setting_row(setting, reference) for setting in settings.values()]
  names = {setting.name for setting in timed}
  tables['settings'] = [row for row in every if row['setting'] in names]
  facts = {**model.facts, 'reference': reference.name}
  plain = {name: list(map(report.flat, rows)) for name, rows in tables.items()}
  files.write_json(out / 'result.json', facts | plain)
  for name, rows in tables.items():
    if rows:
      written = every if name == 'settings' else rows
      report.write_csv(out / f'{name}.csv', written)
      columns = SHOWN[name].split() if name in SHOWN else list(rows[0])
      report.print_table(name, rows, columns=columns)
  print(', '.join(f'{name}: {value}' for name, value in facts.items()))
  with plots.if_installed():
    eat_pictures.draw(out, settings, every, tables, default)
  print(f'written: {out}')


def qualities(setting: Setting, reference: Setting) -> dict[str, float]:
  quality = setting.point.quality
  points = 100.0 * (quality - reference.point.quality)
  return {'quality': quality, 'quality_difference': points} | setting.metrics()


def setting_row(setting: Setting, reference: Setting) -> dict[str, Any]:
  """Returns means over the rows; `agreement` is with the last head."""
  point, model = setting.point, setting.model
  rule, _, value = setting.name.rpartition('/')[-1].partition('=')
  shares = zip(model.heads, point.shares, strict=True)
  return {
    'setting': setting.name,
    'run': model.facts['workdir'],
    'variant': model.variant or 'as trained',
    'rule': rule,
    'value': float(value) if value else None,
    **qualities(setting, reference),
    'agreement': point.agreement if len(model.heads) > 1 else None,
    'depth': point.depth,
    **{
      name: float(setting.where_rows_leave(cost).mean())
      for name, cost in model.cost.items()
    },
    'flops_share': point.flops,
    'early': 1.0 - point.shares[-1],
    **{f'exit_{layer}': share for layer, share in shares},
  }


def calibration_rows(model: Model) -> list[dict[str, Any]]:
  """Returns ECE and accuracy by head, of all rows outside calibration.

  Also of each source that at least `SOURCE_ROWS` of them name.
  """
  judged = model.judged
  scales = np.array(model.policy.temperatures, np.float32)
  sources = model.records.get('source', np.full(len(judged), ''))
  names, counts = np.unique(sources[judged], return_counts=True)
  parts = {'all': judged} if judged.any() else {}
  for name in names[(counts >= SOURCE_ROWS) & (names != '')].tolist():
    parts[name] = judged & (sources == name)
  rows: list[dict[str, Any]] = []
  for source, chosen in parts.items():
    logits, labels = model.logits[:, chosen], model.records['label'][chosen]
    plain = calibration.errors(logits, labels)
    scaled = calibration.errors(scale(logits, scales), labels)
    for place, layer in enumerate(model.heads):
      rows.append({
        'source': source, 'layer': layer,
        'accuracy': frontier.accuracy(logits[place], labels),
        'temperature': float(scales[place]), 'rows': len(labels),
        'ece': plain[place], 'ece_calibrated': scaled[place],
      })  # fmt: skip
  return rows


def retention_rows(setting: Setting) -> list[dict[str, Any]]:
  """Returns the shares of the tokens left after each layer (EAT, Figure 2).

  `scheduled` is the product of 1 - p over the prunings so far; `rows_share` is
  of the rows that the setting runs so far. [] for a model without pruning.
  """
  model, rows = setting.model, list[dict[str, Any]]()
  module, share = model.module, np.ones(len(model.fitted))
  scheduled, depth = 1.0, np.asarray(model.heads)[setting.point.exits]
  ratios = dict(zip(module.prune_layers, module.prune_ratios, strict=True))
  for layer in range(module.depth + 1) if ratios else ():
    if layer in ratios:
      scheduled *= 1.0 - ratios[layer]
      place = module.prune_layers.index(layer)
      share = model.observed[:, place] / model.records['length']
    percents = np.percentile(share, (25, 50, 75)).tolist()
    rows.append({
      'layer': layer, 'scheduled': scheduled, 'observed': float(share.mean()),
      **dict(zip(('p25', 'p50', 'p75'), percents, strict=True)),
      'rows_share': float((depth >= layer).mean()),
    })  # fmt: skip
  return rows


def guarantee(model: Model, others: Any, flags: Any) -> list[dict[str, Any]]:
  """Resamples the rows that no temperature was fitted to; see `resample`.

  Of the recorded `others`, those with larger prune ratios are also offered.
  """
  judged, labels = model.judged, model.records['label'][model.judged]
  if len(model.heads) == 1 or not len(labels):
    raise InvalidDataError(
      '--guarantee: expected exits by confidence, and rows that no temperature '
      f'was fitted to, got {len(model.heads)} heads and {len(labels)} such '
      'rows; other rows are given as --split'
    )
  trained = tuple(model.module.prune_ratios)
  models = {tuple(m.module.prune_ratios): m for m in others if m.name == 'EAT'}
  models[trained] = model
  variants = [
    Variant({}, models[ratios].calibrated[:, judged],
            models[ratios].cost['flops'][judged])
    for ratios in sorted(models) if ratios >= trained
  ]  # fmt: skip
  return resample(variants, labels, flags)


def _time(settings: Sequence[Setting], flags: Any) -> list[dict[str, Any]]:
  """Times settings alone, with latencies, and in full batches."""
  total, size = len(settings[0].point.exits), flags.batch_size
  count = min(flags.rows, total)
  rows = np.linspace(0, total - 1, count).round().astype(int)
  calls = min(CHUNK, count)
  turns, warmup = -(-count // calls), -(-flags.warmup // calls)
  dense = [s for s in settings if s.model.name in recorded_runs.DENSE]
  timed = {setting.name: setting for setting in settings}
  with contextlib.ExitStack() as stack:
    hosts = stack.enter_context(Hosts())
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    served = functools.cache(lambda m: stack.enter_context(m.start(size)))
    candidates: dict[int, list[Candidate]] = {
      batch: [_candidate(s, rows, batch, served(s.model)) for s in settings]
      for batch in (1, size)
    }
    for each in candidates.values():
      each[0] = dataclasses.replace(each[0], is_baseline=True)
    libraries = [*peers.usable(flags.peers if dense else ())]
    for library, setting in itertools.product(libraries, dense):
      model = setting.model
      name = f'{peers.TITLES[library]} {model.name}'
      weights = folder / model.name
      timed[name] = setting
      if not weights.exists():
        params = model.policy.chain.variables['params']
        convert.save_model(str(weights), model.module, params)
      for batch in candidates:
        make = functools.partial(
          peers.make, library, str(weights), model.items(rows), batch,
          expected=model.logits[-1, rows],
        )  # fmt: skip
        candidates[batch].append(Candidate(name, make, process=name))
    length: Any = dict(rounds=flags.rounds * turns, warmup=warmup, calls=calls)
    table, samples = run(candidates[1], {'batch': 1}, hosts, **length)
    for row in table:
      seconds = samples[row['candidate']].ravel()[: flags.rounds * count]
      row['latency_mean'] = float(seconds.mean())
      for percent in (50, 95):
        row[f'latency_p{percent}'] = float(np.percentile(seconds, percent))
    if size > 1:
      length = dict(rounds=flags.rounds, warmup=1)
      table += run(candidates[size], {'batch': size}, hosts, **length)[0]
  return [r | qualities(timed[r['candidate']], settings[0]) for r in table]


def _candidate(
  setting: Setting, rows: np.ndarray, batch: int, engine: Engine
) -> Candidate:
  """Returns a candidate that answers the next row, or all in full batches."""

  def answer(items: Any) -> None:
    # Settings of a model share the policy.
    setting.model.policy.rule = setting.rule
    checked(engine.predict(items))

  call = in_turn(answer, setting.model.items(rows), batch)
  flops = setting.where_rows_leave(setting.model.cost['flops'])[rows].mean()
  return Candidate(setting.name, lambda: call, flops=float(flops))


main = command.reporting('eat', __doc__, Flags, write)

if __name__ == '__main__':
  raise SystemExit(main())
