"""Evaluates the checkpoints of a run.

  python -m launch.evaluate --workdir=/tmp/digits

runs the evaluators of `config.evals` on the newest checkpoint, prints a table
with a column per checkpoint and writes evaluation.json into the workdir.
Few-shot linear regression on frozen features, on the run's images or others:

  python -m launch.evaluate --workdir=/tmp/digits --evals=fewshot --step=all
  python -m launch.evaluate --workdir=/tmp/run --evals=fewshot \\
      --dataset=name=folder,root=/data/caltech101,image_size=224 \\
      --config.evals.fewshot.shots=1,5,10
"""

import dataclasses
import pathlib
import sys
from typing import Any, Literal

from dataset_lib.errors import ConfigError
from dataset_lib.fields import flag
from launch import command_line
from launch.command_line import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of an evaluation."""

  workdir: str = flag('directory of the run', metavar='DIRECTORY')
  step: Literal['latest', 'best', 'all'] | Count = flag(
    'latest, best, all, or a number', 'latest'
  )
  evals: str | None = flag(
    "entries of config.evals or 'fewshot'; default: all", None, 'NAMES'
  )
  dataset: str | None = flag('another data set', None, 'name=...,KEY=...')
  batch_size: str = flag("rows of a batch; default: the run's", '', 'ROWS')
  overrides: tuple[str, ...] = command_line.overrides_flag()


def _config(flags: Flags) -> tuple[Any, list[str]]:
  """Returns the validated configuration and the names of its evaluators."""
  from train_lib import config_schema, loading

  config = loading.load_config(flags.workdir).to_dict()
  evals = config['evals']
  names = sorted(evals) if flags.evals is None else flags.evals.split(',')
  if 'fewshot' in names:
    default = dict(type='fewshot', shots=(1, 5, 10, 25), seeds=3)
    evals.setdefault('fewshot', default)
  read = command_line.parse_fields
  for name in names:
    if name not in evals:
      expected = f'names of {sorted(evals)} or fewshot'
      raise ConfigError('--evals', name, expected)
    if flags.dataset is not None:
      evals[name]['dataset'] = read('--dataset', flags.dataset)
  size = [f'batch_size={flags.batch_size}'] if flags.batch_size else []
  return config_schema.validate(config, [*flags.overrides, *size]), names


def run(flags: Flags) -> int:
  """Evaluates, prints a table, writes evaluation.json."""
  import jax

  from dataset_lib import text_files
  from eval_lib.report import print_table
  from train_lib import build, loading, sharding
  from train_lib.run_directory import CHECKPOINTS, steps_in

  config, names = _config(flags)
  workdir = flags.workdir
  steps: list[Any] = [flags.step]
  if flags.step == 'all':
    # 'latest' raises the error for an empty directory.
    steps = steps_in(pathlib.Path(workdir, CHECKPOINTS)) or ['latest']
  mesh = sharding.make_mesh(config.mesh)
  sharding.check_batch_size(config, mesh)
  entries = {name: config.evals[name] for name in names}
  rows = []
  with jax.set_mesh(mesh):
    for step in steps:
      loaded = loading.restore(workdir, config, step, mesh)
      given = entries, loaded.task, mesh, config, workdir
      row: dict[str, float] = {'step': loaded.saved.step}
      for name, one in build.build_evaluators(*given).items():
        values = one.run(loaded.variables)
        row |= {f'{name}/{key}': value for key, value in values.items()}
      rows.append(row)
  columns = {f'step {row["step"]}': row for row in rows}
  print_table(workdir, [
    {'metric': name} | {k: f'{row[name]:.4f}' for k, row in columns.items()}
    for name in rows[0] if name != 'step'
  ])  # fmt: skip
  path = pathlib.Path(workdir, 'evaluation.json')
  text_files.write_json(path, rows)
  print(f'written: {path}')
  return command_line.OK


main = command_line.Command('evaluate', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
