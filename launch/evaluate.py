"""Evaluates the checkpoints of a run.

  python -m launch.evaluate --workdir=/tmp/digits

runs the evaluators of `config.evals` on the newest checkpoint, prints a table
with a column per checkpoint and writes evaluation.json, which keeps the other
entries and steps of earlier calls. Few-shot linear regression on frozen
features, on the run's images or others:

  python -m launch.evaluate --workdir=/tmp/digits --evals=fewshot --step=all
  python -m launch.evaluate --workdir=/tmp/run --evals=fewshot \\
      --dataset=name=folder,root=/data/caltech101,image_size=224 \\
      --config.evals.fewshot.shots=1,5,10

--evals=confusion prints precision, recall and F1 of each class, and writes them
(classes.csv) and a confusion matrix (confusion.png, .pdf) into the run; those
of --dataset are classes.NAME.csv, ...

--datasets prints one table of several, prepared as the run's unless given;
`train_split` and `test_split` replace train and test:

  python -m launch.evaluate --workdir=/tmp/run \\
      --datasets='cifar:name=tfds,builder=cifar100;mine:name=folder,root=DIR'

--watch evaluates each checkpoint of a training as it appears, until result.json
is there; the same command continues.

--labelled certifies again, on all rows of a file in the form of the run's data:

  python -m launch.evaluate --workdir=/tmp/tickets/adaptive --labelled=new.csv

--submission scores a file of answers by the labels of the validation split:

  python -m launch.predict --workdir=/tmp/sst2 --glue=validation --out=/tmp/dev
  python -m launch.evaluate --workdir=/tmp/sst2 --submission=/tmp/dev/SST-2.tsv
"""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal

from core import fields, files, registry
from core.errors import ConfigError, InvalidDataError, Mistakes
from core.fields import flag
from launch import classify_data, command_line
from launch.command_line import Count

LISTED = 'NAME:name=...,KEY=...;...'
POLL_SECONDS = 5.0  # between two looks at the directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of an evaluation."""

  workdir: str = flag('directory of the run', metavar='DIRECTORY')
  step: Literal['latest', 'best', 'all'] | Count = flag(
    'latest, best, all, or a number', 'latest'
  )
  evals: str | None = flag(
    'entries of config.evals, fewshot or confusion; default: all', None, 'NAMES'
  )
  dataset: str | None = flag('another data set', None, 'name=...,KEY=...')
  labelled: str = flag(
    "new rows in the form of the run's, to certify on: another file or folder",
    '',
    'PATH',
  )
  datasets: str = flag(
    'few-shot on these only, unless --evals is given', '', LISTED
  )
  submission: str = flag(
    "answers in GLUE's format, scored instead of the model's", '', 'FILE'
  )
  watch: bool = flag('evaluate checkpoints as they appear', False)
  batch_size: str = flag("rows of a batch; default: the run's", '', 'ROWS')
  overrides: tuple[str, ...] = command_line.overrides_flag()


def _config(flags: Flags) -> tuple[Any, list[str], list[str]]:
  """Returns the validated configuration, its evaluators, and listed ones."""
  from train_lib import config_schema, loading

  registry.trust_named(flags.overrides)
  config = loading.load_config(flags.workdir).to_dict()
  evals = config['evals']
  names = [] if flags.datasets or flags.submission else sorted(evals)
  data = config['dataset']
  tasks = data['label'].split('+') if data.get('kind') == 'tasks' else ()
  certificates = [f'certificate_{task}' for task in tasks] or ['certificate']
  names = certificates if flags.labelled else names
  if flags.evals is not None:
    names = flags.evals.split(',')
    if len({*names}) < len(names):
      raise ConfigError('--evals', flags.evals, 'each name once')
  # The rows that the calibration, or another evaluator, reports.
  entries = [evals.get('calibration', {}), *evals.values()]
  split = next((e['split'] for e in entries if 'split' in e), 'validation')
  if flags.submission:
    names.append('submitted')
    # Another split: --config.evals.submitted.split.
    is_mismatched = pathlib.Path(flags.submission).stem == 'MNLI-mm'
    part = 'validation' + '_mismatched' * is_mismatched
    entry = dict(type='submitted', path=flags.submission, split=part)
    evals['submitted'] = entry
  if flags.dataset is not None and not names:
    expected = 'none with --datasets unless --evals is given'
    raise ConfigError('--dataset', flags.dataset, expected)
  if 'fewshot' in names or flags.datasets:
    evals.setdefault('fewshot', {'type': 'fewshot'})
  if 'confusion' in names:
    evals.setdefault('confusion', dict(type='confusion', split=split))
  _add_fits(config, {*names} - {*evals}, split, tasks)
  for name in names:
    if name not in evals:
      expected = f'names of {sorted(evals)} or fewshot'
      raise ConfigError('--evals', name, expected)
    if flags.dataset is not None:
      settings = command_line.parse_fields('--dataset', flags.dataset)
      evals[name]['dataset'] = settings
  if flags.labelled:
    _certify_on(flags, config, names, certificates)
  size = [f'batch_size={flags.batch_size}'] if flags.batch_size else []
  config = config_schema.validate(config, [*flags.overrides, *size])
  if not flags.datasets:
    return config, names, []
  plain = config.to_dict()
  listed = _listed(flags.datasets, plain['evals'])
  return config_schema.validate(plain), [*names, *listed], listed


def _add_fits(
  config: Any, names: Set[str], split: str, tasks: Sequence[str]
) -> None:
  """Adds named calibrations and certificates; of several tasks each has one."""
  evals = config['evals']
  if any(one.get('split') == 'validation' for one in evals.values()):
    split = 'validation'
  for name in sorted(names):  # a calibration before its certificate
    kind, _, column = name.partition('_')
    own = dict(split=split) | (dict(column=column) if tasks else {})
    if column not in (tasks or ('',)):
      continue
    if kind == 'certificate':
      fit = evals.get(name.replace(kind, 'calibration', 1), {})
      own['split'] = fit.get('split', split)  # that it was not fitted to
      kind = registry.locate(config['task'], 'task').CERTIFICATE
      evals[name] = own | dict(type=kind)
    elif kind == 'calibration' and split == 'validation':
      parts = dict(calibration_split=f'{split}[:25%]', split=f'{split}[25%:]')
      evals[name] = own | parts | dict(type=kind)


def _certify_on(
  flags: Flags, config: Any, names: list[str], certificates: list[str]
) -> None:
  """Makes certificates those of the rows of --labelled."""
  from dataset_lib import builder

  place = builder.source_class(config['dataset']['name']).PLACE
  is_legal = place and {*names} <= {*certificates}
  if not is_legal or flags.dataset is not None:
    expected = f'only --evals={",".join(certificates)}'
    expected += ', of a run on files of its own'
    raise ConfigError('--labelled', flags.labelled, expected)
  settings = config['dataset'] | {place: flags.labelled}
  for name in names:
    config['evals'][name] |= dict(dataset=settings, split='all')


def _listed(text: str, evals: dict[str, Any]) -> list[str]:
  """Adds a few-shot evaluator for each data set; returns their names."""
  listed = []
  for item in text.split(';'):
    name, _, fields = item.strip().partition(':')
    if not (name.isidentifier() and fields):
      raise ConfigError('--datasets', item, LISTED)
    settings = command_line.parse_fields('--datasets', fields)
    if name in evals:
      taken = f'a new name, none of {sorted(evals)}'
      raise ConfigError('--datasets', name, taken)
    splits = ('train_split', 'test_split')
    entry = {key: settings.pop(key) for key in splits if key in settings}
    entry['dataset'] = settings
    evals[name] = evals['fewshot'] | entry
    listed.append(name)
  return listed


def run(flags: Flags) -> None:
  """Evaluates, prints a table, writes evaluation.json."""
  import jax

  from eval_lib import fewshot
  from eval_lib.report import print_table
  from serve_lib import program_cache
  from train_lib import build, loading, sharding
  from train_lib.checkpoint_io import CheckpointError

  if flags.watch and flags.step != 'latest':
    raise ConfigError('--step', flags.step, 'none with --watch')
  config, names, listed = _config(flags)
  workdir = flags.workdir
  path = pathlib.Path(workdir, 'evaluation.json')
  written, data = read_rows(path), data_of(config, names)
  mesh = sharding.make_mesh(config.mesh)
  sharding.check_batch_size(config, mesh)
  entries = {name: config.evals[name] for name in names}
  rows: list[dict[str, Any]] = []
  notes, weaker = list[str](), list[str]()  # `weaker` certificates are refused
  with files.failing_late(), program_cache.kept(), jax.set_mesh(mesh):
    for step in _steps(flags, written, data):
      try:
        loaded = loading.restore(workdir, config, step, mesh)
      except CheckpointError as error:
        if not flags.watch:
          raise
        message = files.printable(error)  # perhaps deleted by now
        print(f'warning: {message}', file=sys.stderr)
        continue
      evaluators = build.build_evaluators(
        entries, loaded.task, mesh, config, workdir
      )
      results = _measure(evaluators, loaded.variables, notes, weaker)
      row = {'step': loaded.saved.step} | {
        f'{name}/{key}': value
        for name, values in results.items() for key, value in values.items()
      }  # fmt: skip
      rows.append(row)
      if listed:
        title = f'few-shot at step {row["step"]}, % (mean ± std)'
        print_table(title, fewshot.table({k: results[k] for k in listed}))
      written = read_rows(path)  # another call may have written it
      old = written.get(loaded.saved.step, {})
      new = {name: data[name] for name in results}
      kept = {k: v for k, v in old.items() if k.partition('/')[0] not in new}
      datasets = {'datasets': {**old.get('datasets', {}), **new}}
      written[loaded.saved.step] = {**kept, **row, **datasets}
      files.write_json(path, [written[step] for step in sorted(written)])
      if flags.watch:
        _print(workdir, [row])
    if not flags.watch and len(rows[0]) > 1:
      _print(workdir, rows)
  older = [] if weaker else _older_report(flags)
  for note in dict.fromkeys([*notes, *older]):
    print(note)
  print(f'written: {path}')
  if weaker:
    raise Mistakes(weaker)


def _measure(
  evaluators: Mapping[str, Any],
  variables: Any,
  notes: list[str],
  weaker: list[str],
) -> dict[str, dict[str, float]]:
  """Returns results by evaluator; adds notes, and certificates' refusals."""
  from eval_lib import certificate

  results = {}
  for name, evaluation in evaluators.items():
    try:
      results[name] = evaluation.measure(variables)
      notes += [f'{name} {note}' for note in evaluation.notes()]
    except certificate.WeakerError as error:
      weaker.append(str(error))
    except InvalidDataError as error:
      # The rows may have no label of one of several tasks, which are columns.
      is_of_task = isinstance(evaluation, certificate.Evaluator)
      if not (is_of_task and evaluation.column):
        raise
      weaker.append(f'{name} stays as it was: {error}')
  return results


def _older_report(flags: Flags) -> Iterator[str]:
  """Yields a line if a report of `launch.classify` has another certificate."""
  if flags.labelled and (again := classify_data.redraw(flags.workdir)):
    yield f'the report of {flags.workdir} is older; draw it again: {again}'


def _steps(
  flags: Flags, written: Mapping[int, Any], data: Mapping[str, Any]
) -> Iterator[Any]:
  """Yields the steps to evaluate; with --watch, until the training ends."""
  from train_lib.run_directory import CHECKPOINTS, steps_in

  folder = pathlib.Path(flags.workdir, CHECKPOINTS)
  if not flags.watch:
    # 'latest' raises the error for an empty directory.
    every: list[Any] = steps_in(folder) if flags.step == 'all' else [flags.step]
    yield from every or ['latest']
    return
  seen = {
    step for step, row in written.items()
    if data.items() <= row.get('datasets', {}).items()
  }  # fmt: skip
  while True:
    # Asked first: the last checkpoint is complete before this file is written.
    has_ended = pathlib.Path(flags.workdir, 'result.json').exists()
    new = [step for step in steps_in(folder) if step not in seen]
    yield from new
    seen |= {*new}
    if has_ended and not new:
      return
    time.sleep(0.0 if new else POLL_SECONDS)


def _print(workdir: str, rows: list[dict[str, float]]) -> None:
  from eval_lib.report import print_table

  columns = {f'step {row["step"]}': row for row in rows}
  print_table(workdir, [
    {'metric': name} | {k: f'{row[name]:.4f}' for k, row in columns.items()}
    for name in rows[0] if name != 'step'
  ])  # fmt: skip


def read_rows(path: pathlib.Path) -> dict[int, dict[str, Any]]:
  """Returns the rows of an earlier evaluation by step, {} without one."""
  with contextlib.suppress(FileNotFoundError), files.damage_of(path):
    rows = files.read_json(path)
    for row in rows:
      values = {key: row[key] for key in row if key != 'datasets'}
      fields.check_value('metrics', values, dict[str, files.Number])
      data = row.get('datasets', {})
      fields.check_value('datasets', data, dict[str, dict[str, Any]])
    return {int(row['step']): dict(row) for row in rows}
  return {}


def data_of(config: Any, names: list[str]) -> dict[str, Any]:
  """Returns the data sets and splits of evaluators, as JSON has them."""
  data = {}
  for name in names:
    entry = config.evals[name].to_dict()
    splits = {key: entry[key] for key in entry if key.endswith('split')}
    data[name] = (entry['dataset'] or config.dataset.to_dict()) | splits
  return files.loads(files.dumps(data))


main = command_line.Command('evaluate', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
