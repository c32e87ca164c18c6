"""Wrong command lines: one line that names the flag and what is legal."""

import dataclasses
import importlib
import pathlib
import shlex
import subprocess
import sys
import typing

import pytest

from core import fields
from core.errors import ConfigError, UserError
from dataset_lib.bad_records import TooManyBadRecordsError
from launch import cluster, command_line, train
from tests import wrong_values
from tests.launch.refused import TABLE
from train_lib import config_schema, trainer

PARITY = '--config=configs/adatape/parity.py'


@pytest.fixture
def refused_early(tmp_path, refused, monkeypatch):
  """Runs a command, which touches no device, starts and writes nothing."""
  from jax._src import xla_bridge

  def touched(*_, **__):
    raise AssertionError('a device was touched, or a process started')

  # Whatever asks for a device, even for their number, comes by here.
  monkeypatch.setattr(xla_bridge, 'backends', touched)
  monkeypatch.setattr(xla_bridge, 'backends_are_initialized', lambda: False)
  monkeypatch.setattr(subprocess, 'Popen', touched)

  def run(main, arguments, words):
    if main is train.main:
      arguments = [f'--workdir={tmp_path}/run', *arguments]
    refused(main, arguments, words)
    assert not (tmp_path / 'run').exists()

  return run


@pytest.mark.parametrize(
  ('command', 'arguments', 'words'),
  [
    (section, *row)
    for section in TABLE if section.startswith('launch.')
    for row in TABLE[section]
  ],
)  # fmt: skip
def test_one_line_names_flag_and_legal_range(
  command, arguments, words, refused_early
):
  # An argument of the configuration's file follows it.
  space = '' if arguments.startswith((':', ',')) else ' '
  module, *given = shlex.split(f'{command}{space}{arguments}')
  refused_early(importlib.import_module(module).main, given, words)


@pytest.mark.parametrize(('body', 'words'), TABLE['config file'])
def test_a_wrong_file_is_explained_in_one_line(
  body, words, tmp_path, refused_early
):
  path = tmp_path / 'config.py'
  path.write_text(f'def get_config():\n  {body}\n')
  refused_early(train.main, [f'--config={path}'], words)


def groups(kind=config_schema.Run, path=''):
  """(path, dataclass) of a training's configuration and of its groups."""
  yield path, kind
  for field in dataclasses.fields(kind):
    hint = fields.hints(kind)[field.name]
    if dataclasses.is_dataclass(hint):
      yield from groups(hint, f'{path}{field.name}.')


def item(hint):
  """The type of the items of a list, any other as it is."""
  is_annotated = typing.get_origin(hint) is typing.Annotated
  base = typing.get_args(hint)[0] if is_annotated else hint
  is_list = typing.get_origin(base) is tuple
  return item(typing.get_args(base)[0]) if is_list else hint


def wrong_numbers(kind):
  """(field, number) of a dataclass, outside of the type of field or items."""
  for name, hint in fields.hints(kind).items():
    for value in wrong_values.outside(item(hint)):
      if isinstance(value, int | float) and value != 3:  # 3 for texts
        yield name, value


@pytest.mark.parametrize(('path', 'kind'), [*groups()])
def test_a_value_out_of_range_is_refused(path, kind):
  for name, value in wrong_numbers(kind):
    with pytest.raises(ConfigError) as refusal:
      command_line.load_config(PARITY[9:], [f'{path}{name}={value}'])
    assert refusal.value.field == path + name


def commands():
  """(command, words before its flags, flags) of every command line."""
  root = pathlib.Path(train.__file__).parents[1]
  for path in (*root.glob('launch/*.py'), *root.glob('benchmarks/*.py')):
    name = f'{path.parent.name}.{path.stem}'
    main = vars(importlib.import_module(name)).get('main')
    if isinstance(main, command_line.Command):
      kinds = main.flags if isinstance(main.flags, dict) else {'': main.flags}
      yield from ((main, word.split(), kind) for word, kind in kinds.items())


def test_every_command_explains_and_checks_its_flags(capsys):
  names, legal = set(), {'topology': 'v5e:4x4', 'workdir': '/x'}
  for main, words, kind in commands():
    with pytest.raises(SystemExit) as ended:
      main([*words, '--help'])
    assert ended.value.code in (0, None)
    name = ' '.join([f'{main.package}.{main.name}', *words])
    assert name in capsys.readouterr().out
    names.add(name)
    required = [
      f'{f"--{field.name}=" * (field.metadata["names"] != field.name)}'
      f'{legal.get(field.name, "x")}'
      for field in dataclasses.fields(kind)
      if field.default is dataclasses.MISSING
    ]
    for flag, value in wrong_numbers(kind):
      with pytest.raises(ValueError, match=f'^--{flag}: expected'):
        main.parse([*words, *required, f'--{flag}={value}'])
  assert names >= {
    'launch.train', 'launch.serve', 'launch.cluster gke', 'benchmarks.serve',
    'benchmarks.adatape',
  }  # fmt: skip


@pytest.mark.parametrize(
  ('error', 'code', 'base'),
  [
    (trainer.Preempted(3), 75, Exception),
    (TooManyBadRecordsError('3 records'), 4, RuntimeError),
    (cluster.UnavailableError('kubectl'), 69, RuntimeError),
    (UserError('a:\n  b\n  c\nD.'), 2, Exception),
    (type('Own', (UserError,), {'exit_code': 9})('own words'), 9, Exception),
  ],
)
def test_an_error_of_a_user_is_one_line_and_its_code(error, code, base, capsys):
  def fail(_):
    raise error

  with pytest.raises(SystemExit) as ended:
    command_line.Command('name', None, command_line.RunFlags, fail)(
      ['--workdir=x']
    )
  assert ended.value.code == code
  said = str(error).replace('a:\n  b\n  c\n', 'a: b. c. ')
  assert capsys.readouterr().err == f'error: {said}\n'
  assert isinstance(error, base)


@pytest.mark.parametrize(
  ('given', 'peers'),
  [
    ([], (None, None, None)),
    (['--num_processes=2', '--process_id=1'], (None, 2, 1)),
    (['--coordinator=a:1'], ('a:1', None, None)),
  ],
)
def test_jax_finds_the_processes_that_are_not_given(given, peers, monkeypatch):
  joined = []
  monkeypatch.setattr(
    'jax.distributed.initialize', lambda *peers, **_: joined.append(peers)
  )
  monkeypatch.setattr('train_lib.trainer.train', lambda *_: None)
  assert train.main([PARITY, '--dry_run', '--distributed', *given]) == 0
  assert joined == [peers]


def test_a_good_command_line_passes(tmp_path):
  flags = train.main.parse(
    ['--config.optimizer.lr=3e-4', PARITY + ':n=8', f'--workdir={tmp_path}/run',
     '--config.batch_size', '1e2', '--config.warm_start.skip=head,cls',
     '--config.evals.test.every_steps=7', '--config.dataset.name=parity']
  )  # fmt: skip
  assert not flags.dry_run
  config = command_line.load_config(flags.config, flags.overrides)
  assert config.optimizer.lr == 3e-4
  assert (config.batch_size, config.dataset.length) == (100, 8)
  assert config.warm_start.skip == ('head', 'cls')
  assert config.evals.test.every_steps == 7
  assert type(config.dataset.name) is str


def test_from_the_shell_within_seconds_and_without_traceback(tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'launch.train', PARITY, '--config.batch_size=-7',
     f'--workdir={tmp_path}/run'],
    capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  assert done.returncode == command_line.USAGE
  assert done.stderr.startswith('error: batch_size')
  assert done.stderr.count('\n') == 1
