"""Tables of rules and of certificates of looped models, over seeds.

  python -m benchmarks.looped_rules --runs=/tmp/seed0,/tmp/seed1,/tmp/seed2 \\
      --results=benchmarks/results/looped_rules.csv

All rules are replayed on `--rows` puzzles that a run has not seen. They are the
population of the certificates: of `--splits` samples, each as many independent
draws as a quarter of it, each certifies a threshold of the score, and
`violated` is how often the lost share of the population exceeds epsilon.
`verifier saves` is what the verifier does on it. The engine then answers
`--timed` of these puzzles by each rule, in turns; a certified rule is of the
certificate of all of them. Cells are mean and range over the runs. The
certificates, NAME_certificates.csv, and a picture are written to the folder of
`--results`.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import MinLen

from benchmarks import command, looped, timing
from core.fields import flag
from eval_lib import plots, report
from eval_lib.plots import Line
from launch.command_line import Count, Positive
from looped import certificate, rules, stops

DATA_SEED = 2  # of the further puzzles; configurations have 0
LEAST = 20  # rows of a difficulty that is drawn
SAMPLED = 4  # a sample has a row for SAMPLED of the population
FULL, CERTIFIED = (stops.FULL, 'all'), 'certified'
CERTIFICATES = (CERTIFIED, 'sequence'), (CERTIFIED, 'pareto')
SHOWN: Any = (FULL, (stops.SCORE, 0.5), *CERTIFICATES, (stops.SAME, 2.0),
              (stops.VERIFIED, 0.0))  # fmt: skip
TITLES = {
  'accuracy': 'solved %', 'iterations': 'iterations', 'lost': 'lost %',
  'speed': 'rows/s', 'speedup': 'speed-up', 'violated': 'violated %',
  'saved': 'saved %', 'verified': 'verifier saves %',
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  runs: Annotated[tuple[str, ...], MinLen(1)] = flag(
    'directories of runs that differ in the seed', metavar='DIRECTORY,...'
  )
  results: command.File = flag('the table of the docs', metavar='FILE.csv')
  rows: Positive = flag('further puzzles of a run', 8000)
  splits: Positive = flag('samples of them', 200)
  epsilon: command.Share = flag('share that may be lost', 0.01)
  delta: command.Share = flag('how often it may be exceeded', 0.05)
  patience: Positive = flag('iterations before a row is given up', 4)
  timed: Positive = flag('puzzles of a call of the engine', 512)
  batch: Positive = flag('rows of a full batch', 32)
  backend: Literal['xla', 'onnxruntime'] = flag('of the engine', 'onnxruntime')
  rounds: Count = flag('timed rounds; 0 times nothing', 10)


def write(flags: Any) -> None:
  runs, levels = zip(*(measure(run, flags) for run in flags.runs), strict=True)
  path, names = pathlib.Path(flags.results), [*TITLES]
  certified = ['lost', *names[5:]]
  shown = names[: 5 if flags.rounds else 3]
  tables = {'': (SHOWN, shown), '_certificates': (CERTIFICATES, certified)}
  for suffix, (keys, columns) in tables.items():
    table = [
      {'rule': rule, 'setting': knob, **cells(runs, (rule, knob), columns)}
      for rule, knob in keys
    ]
    report.print_table(f'{len(runs)} runs', table)
    report.write_csv(path.with_stem(path.stem + suffix), table)
  with plots.if_installed():
    draw(path, runs, levels)


def measure(workdir: str, flags: Any) -> tuple[Any, dict[int, float]]:
  """Returns measured rules by (rule, knob), and iterations by difficulty."""
  changes = dict(data_seed=DATA_SEED, test_examples=flags.rows)
  run, puzzle, arrays = looped.opened(workdir, flags.rows, **changes)
  rows = looped.recorded(run, arrays['tokens']) | {'label': arrays['label']}
  record, hard = certificate.record_of(rows), arrays['difficulty']
  table: dict[Any, dict[str, float]] = {
    (rule, knob): stops.summary(steps, record.right)
    for rule, knob, steps in stops.stops(rows, arrays['tokens'], puzzle)
  }
  table[FULL] = table[stops.FULL, record.right.shape[1]]
  for key in CERTIFICATES:
    table[key] = resampled(record, key[1], flags)
  if flags.rounds:
    chains = {
      key: looped.chain_of(run, puzzle, rule=rule)
      for key, rule in rules_of(record, puzzle, flags).items()
    }
    speeds = timed(workdir, chains, arrays['tokens'][: flags.timed], flags)
    for key, values in speeds.items():
      table[key] = table[key] | values
  steps = 1 + certificate.stops_of(record, [rules.Score(0.5)])[0]
  difficulties, counts = np.unique(hard, return_counts=True)
  common = difficulties[counts >= min(LEAST, counts.max())].tolist()
  levels = {n: steps[hard == n].mean() for n in common}
  return table, levels


def rules_of(record: Any, puzzle: Any, flags: Any) -> dict[Any, Any]:
  """Returns the rules of `SHOWN`, as the engine serves them."""
  chosen: Any = {
    FULL: rules.AllIterations(),
    (stops.SCORE, 0.5): rules.Score(0.5),
    (stops.SAME, 2.0): rules.Unchanged(),
    (stops.VERIFIED, 0.0): rules.Verified(puzzle),
  }
  for key in CERTIFICATES:
    chosen[key] = certificate.certify(
      record, key[1], flags.epsilon, flags.delta, flags.patience
    ).rule
  return chosen


def timed(workdir: str, chains: Any, questions: Any, flags: Any) -> Any:
  """Returns 'speed', the engine's rows/s, and 'speedup' over all iterations."""

  def candidate(key: Any) -> timing.Candidate:
    def make() -> timing.Call:
      engine = looped.engine(
        chains[key], questions, flags.batch, flags.backend, 1
      )
      return timing.Call(engine, len(questions))

    name, is_full = ' '.join(map(str, key)), key == FULL
    return timing.Candidate(name, make, is_baseline=is_full, throughput='speed')

  candidates, case = [*map(candidate, chains)], {'run': workdir}
  lengths = dict(rounds=flags.rounds, warmup=2)
  with timing.Hosts() as hosts:
    rows, _ = timing.run(candidates, case, hosts, **lengths)
  speeds = ({k: row[k].median for k in ('speed', 'speedup')} for row in rows)
  return dict(zip(chains, speeds, strict=True))


def resampled(record: Any, method: str, flags: Any) -> dict[str, float]:
  """Certifies random samples; returns means of the results on all rows."""
  rng, (count, limit), rows = np.random.default_rng(0), record.right.shape, []
  proved = record.right | (np.arange(limit) == limit - 1)
  verified = 1 - (1 + proved.argmax(1)).mean() / limit
  for _ in range(flags.splits):
    drawn = rng.integers(count, size=count // SAMPLED)
    sample = certificate.take(record, drawn)
    rule = certificate.certify(
      sample, method, flags.epsilon, flags.delta, flags.patience
    ).rule
    steps = 1 + certificate.stops_of(record, [rule])[0]
    row: Any = stops.summary(steps, record.right)
    extra = {'saved': 1 - steps.mean() / limit, 'verified': verified}
    rows.append(row | extra | {'violated': row['lost'] > flags.epsilon})
  return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def cells(runs: Any, key: Any, names: Sequence[str]) -> dict[str, str]:
  """Returns mean and range over runs, of shares in percent."""
  result = {}
  for name in names:
    title, x = TITLES[name], np.array([run[key][name] for run in runs])
    estimate = report.Estimate(x.mean(), x.min(), x.max())
    result[title] = estimate.text(100.0 if '%' in title else 1.0)
  return result


def draw(path: pathlib.Path, runs: Any, levels: Any) -> None:
  """Draws medians and ranges over runs."""
  lines, hard = [], sorted(set.intersection(*map(set, levels)))
  for number, rule in enumerate(dict.fromkeys(key[0] for key in runs[0])):
    keys = [key for key in runs[0] if key[0] == rule and key != FULL]
    x, y = (
      np.array([[run[key][name] for key in keys] for run in runs])
      for name in ('iterations', 'accuracy')
    )
    lines.append(line(rule, x.mean(0), 100 * y, number))
  steps = np.array([[level[n] for n in hard] for level in levels])
  stops.draw(path, lines, line('median, range of the runs', hard, steps))


def line(label: str, x: Any, y: Any, number: int = 0) -> Line:
  order = np.argsort(x)
  low, high, mean = (f(y[:, order], 0) for f in (np.min, np.max, np.median))
  return Line(label, np.array(x)[order], mean, number, (low, high))


main = command.reporting('looped_rules', __doc__, Flags, write)

if __name__ == '__main__':
  raise SystemExit(main())
