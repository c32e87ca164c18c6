"""Evaluates the checkpoints of a run.

  python -m launch.evaluate --workdir=/tmp/digits

runs what `config.evals` names on the newest checkpoint. Few-shot linear
regression on frozen features, on the run's own images or on others:

  python -m launch.evaluate --workdir=/tmp/digits --evals=fewshot --step=all
  python -m launch.evaluate --workdir=/tmp/run --evals=fewshot \\
      --dataset=name=folder,root=/data/caltech101,image_size=224 \\
      --config.evals.fewshot.shots=1,5,10

prints a table with a row per checkpoint and writes evaluation.json into the
workdir. Fields of the run's configuration that concern evaluation can be
overridden as in training.
"""

import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from launch import command_line, config_flags

FEWSHOT = dict(type='fewshot', shots=(1, 5, 10, 25), seeds=3)


def parser() -> command_line.Parser:
  """The command line, apart from the --config.key=value overrides."""
  result = command_line.Parser('python -m launch.evaluate', __doc__)
  add = result.add_argument
  add('--workdir', required=True, metavar='DIRECTORY',
      help='directory of the run')  # fmt: skip
  add('--evals', metavar='NAMES',
      help="entries of config.evals or 'fewshot'; default: all")  # fmt: skip
  add('--step', type=command_line.checkpoints, metavar='STEP', default='latest',
      help='latest (default), best, all, or a number')  # fmt: skip
  add('--dataset', metavar='name=...,key=value',
      help='another data set, e.g. name=digits,image_size=8')  # fmt: skip
  add('--batch_size', type=int, metavar='ROWS',
      help="rows of a batch; default: the run's")  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any, Any, list[str]]:
  """Returns (arguments, validated config, evaluators); touches no device."""
  rest, overrides = config_flags.split(argv)
  arguments = command_line.parse_arguments(parser(), rest)
  from train_lib import config_schema, loading

  config = loading.load_config(arguments.workdir).to_dict()
  evals = config['evals']
  names = sorted(evals)
  if arguments.evals is not None:
    names = arguments.evals.split(',')
  if 'fewshot' in names:
    evals.setdefault('fewshot', FEWSHOT)
  for name in names:
    if name not in evals:
      raise command_line.UsageError(
        f'--evals: expected names of {sorted(evals)} or fewshot, got {name!r}'
      )
    if arguments.dataset is not None:
      dataset = config_flags.parse_fields('--dataset', arguments.dataset)
      evals[name] = evals[name] | {'dataset': dataset}
  if arguments.batch_size is not None:
    config['batch_size'] = arguments.batch_size
  config = config_schema.validate(config_flags.override(config, overrides))
  return arguments, config, names


def _evaluate(
  workdir: str, config: Any, names: list[str], step: int | str | None
) -> list[dict[str, float]]:
  """Returns a row `{'step': ..., '<eval>/<metric>': ...}` per checkpoint."""
  import jax

  from train_lib import build, loading, sharding
  from train_lib.run_directory import CHECKPOINTS, steps_in

  mesh = sharding.make_mesh(config.mesh)
  sharding.check_batch_size(config, mesh)
  every: list[Any] = steps_in(pathlib.Path(workdir) / CHECKPOINTS)
  entries = {name: config.evals[name] for name in names}
  rows = []
  with jax.set_mesh(mesh):
    # The newest of none is an error that says so.
    for chosen in (every or [None]) if step == 'all' else [step]:
      loaded = loading.restore(workdir, config, chosen, mesh)
      task = loaded.task
      built = build.build_evaluators(entries, task, mesh, config, workdir)
      row: dict[str, float] = {'step': loaded.step}
      for name, one in built.items():
        values = one.run(loaded.variables)
        row |= {f'{name}/{key}': value for key, value in values.items()}
      rows.append(row)
  return rows


def run(arguments: Any, config: Any, names: list[str]) -> int:
  """Evaluates, prints a table, writes evaluation.json."""
  from eval_lib.report import print_table
  from train_lib import strict_json

  rows = _evaluate(arguments.workdir, config, names, arguments.step)
  names = [name for name in rows[0] if name != 'step']
  columns = {f'step {row["step"]}': row for row in rows}
  print_table(arguments.workdir, [
    {'metric': name} | {k: f'{row[name]:.4f}' for k, row in columns.items()}
    for name in names
  ])  # fmt: skip
  path = pathlib.Path(arguments.workdir, 'evaluation.json')
  strict_json.write(path, rows)
  print(f'written: {path}')
  return command_line.OK


main = functools.partial(command_line.main, parse, run)

if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
