"""Wrong command lines: one line that names the flag and what is legal."""

import dataclasses
import importlib
import pathlib
import shlex
import subprocess
import sys

import pytest

from core import fields
from core.errors import ConfigError
from launch import command_line, train
from tests import wrong_values
from train_lib import config_schema

PARITY = '--config=configs/adatape/parity.py'
CLUSTER = f'{PARITY} --name=a --workdir=/mnt/runs/a'
POD = f'{CLUSTER} --topology=v5e:4x4'
# Flags that other words follow, by command; `{}` is the row's.
COMMANDS = {
  'train': '{}',
  'train parity': f'{PARITY}{{}}',
  'train digits': '--config=configs/adatape/digits.py{}',
  'train images': '--config=configs/adatape/images.py{}',
  'train quick': '--config=configs/adatape/quick_start.py{}',
  'train eat': '--config=configs/eat/glue.py:data=/no,vocabulary=/no{}',
  'predict': '{}',
  'predict run': '--workdir=/nowhere {}',
  'predict bundle': '--bundle=/b {}',
  'serve': '--workdir=/nowhere --port=0 {}',
  'export': '--workdir=/nowhere {}',
  'cluster gke': f'gke {POD} --image=a --claim=b {{}}',
  'cluster tpu_vm': f'tpu_vm {POD} --zone=c {{}}',
  'cluster slurm': f'slurm {CLUSTER} {{}}',
}
# Arguments, and words of the line.
CASES = {
  'train': [
    ('', '--config required'),
    ('--config=README.md', '--config Python file'),
    ('--config=configs/adatape/parety.py', 'configs/adatape/parity.py'),
  ],
  'train parity': [
    (':m=16', "'m=16' 'n' model"),
    (':n=many', 'n int many'),
    (' --wrkdir=x', '--wrkdir --workdir'),
    (' --workdir=../up', '--workdir ..'),
    (' --config.optimzer.lr=1', 'optimzer optimizer'),
    (' --config.optimizer.lrr=1', 'optimizer.lrr mean lr'),
    (' --config.optimizer=adam', 'optimizer group of fields'),
    (' --config.optimizer.lr.x=1', 'optimizer.lr.x value'),
    (' --config.num_micro=3', 'num_micro divisor of 128 3'),
    (' --config.phases.0=9', 'phases.0 such as phases.0.FIELD'),
    (' --config.phases=()', 'phases at least one phase'),
    (' --config.stages.stage1.steps=9', 'stages --config.phases.0.steps=100'),
    (' --config.phases.0.trainable=(', 'trainable regular'),
    (' --config.mesh.tensor=-1', 'mesh at most one'),
    (' --config.checkpoint.best_metric=dev/x', 'best_metric test'),
    (' --config.task=adatape.task:Tape', 'task adatape.task:Tape'),
    (' --config.task=train_lib.task:Task', 'task subclass'),
    (' --config.model.max_steps=9', 'max_steps 9'),
    (' --config.model.name=pathlib:Path', 'model.name subclass'),
    # A model without a tape, or without a ponder cost; any Linen module.
    (' --config.model.name=model_lib.vit:ViT', 'TapeClassifier'),
    (':model=ut --config.model.name=model_lib.vit:ViT',
     'model.name adatape.universal:Pondering'),
    (':model=transformer --config.model.name=pathlib:Path', 'model.name Linen'),
    (' --config.model.num_classes=5', 'num_classes max_steps'),
    (' --config.phases.0.knobs="{\'tape\': 1}"', 'knobs tape_w'),
    (' --config.phases.0.knobs="{\'tape_weight\': (\'linear\', 0)}"',
     'knobs.tape_weight linear'),
    (' --config.warm_start.skip=(,', 'warm_start.skip tuple'),
    (' "--config.warm_start.renames=->a"', "'old->new'"),
    (' --config.warm_start.workdir=/nowhere', 'warm_start.workdir'),
    (' --coordinator=host:1', '--distributed'),
    (' --distributed --coordinator=localhost:1 --num_processes=2 '
     '--process_id=5', '--coordinator --process_id num_processes=2'),
    (' --distributed --num_processes=2 --process_id=0',
     '--coordinator address of process 0 None'),
    (' --config.dataset.name=parety', 'dataset.name parity'),
    (' --config.evals.test.split=dev', 'split test dev'),
    (' --config.evals.test.type=accurracy', 'type classification'),
  ],
  'train digits': [
    (' --config.phases.0.steps=9', '0 beside steps=9 80'),
    (' --config.model.patch_size=3', 'patch_size 3'),
    (':model=input --config.model.width=16 --config.model.query_dim=32',
     'model.query_dim width 16 32'),
  ],
  'train images': [('', 'root tfds=NAME'), (':root=/a,tfds=b', 'root /a b')],
  'train quick': [
    (' --config.phases.3.steps=9', 'phases.3 items are 0, 1, 2'),
    # The knob of the last phase hides it.
    (' --config.loss.tape_weight=0.3', 'loss.tape_weight 0.1, which 0.3'),
  ],
  'train eat': [
    (' --config.model.prune_layers=(2,)', 'model.prune_ratios (2,)'),
    (' --config.phases.0.model="{\'exit_layers\': (50,)}"',
     'phases.0.model.exit_layers [1, 12] 50'),
    (' --config.loss.exit_weights=(1.0,)', 'exit_weights 2 weights'),
    (',variant=nope', 'variant minilm nope'),
    (',epochs=0', 'phases.0 0'),
    (',"exits=2;3"', 'exits 2-3-4 2;3'),
    (',model=dense,exits=4', 'exits model=eat dense'),
    (',parts=pwx', 'parts pwe pwx'),
    (',model=dense,parts=p', 'parts model=eat dense'),
    (',layers=6', "'layers=6' pretrained"),
    (',teacher=/nowhere', 'teacher /nowhere'),
    (',pretrained=/nowhere', 'pretrained /nowhere'),
    (' --config.loss.teacher=/nowhere', 'loss.teacher /nowhere'),
    (' --config.model.from_checkpoint=/no', 'model.from_checkpoint /no'),
    (',teacher=/a,pretrained=/b', 'pretrained teacher /b'),
  ],
  'predict': [
    ('', '--workdir --bundle=FILE'),
    ('--workdir=/nowhere', 'workdir: the directory of a run'),
  ],
  'predict run': [
    ('--batches=0,1', '--batches: a list of positive integers'),
    ('--step=last', '--step: latest, best or an integer'),
    ('--serve=tau', '--serve: key=value'),
    ('--glue=test', '--out a folder with --glue'),
    ('--out=x', '--out nothing without --glue'),
  ],
  'predict bundle': [
    ('--workdir=/a', '--workdir --bundle'),
    ('--serve=tau=1', '--serve determines'),
    ('--batches=3', '--batches (3,)'),
  ],
  'serve': [
    (f'--host={"é" * 80}', '--port: a free address'),
    ('--log_every=0', 'workdir: the directory of a run'),
  ],
  'export': [
    ('', '--out --bundle required'),
    ('--out=b --bundle=c', '--out'),
    ('--out=b --serve=tau=1', '--serve'),
    ('--bundle=b --dense', '--dense'),
    ('--bundle=/', '--bundle a file'),
    ('--bundle=setup.py/b', 'a directory to'),
    ('--out=b', '--workdir config.json'),
    ('--out=tests', '--out new or empty'),
    ('--out=README.md', '--out a file'),
  ],
  'cluster gke': [
    ('--config.batch_size=24', 'batch_size multiple of 16 24'),
    ('--config.mesh.data=8', 'mesh 16 devices 8'),
    ('--topology=v9:4x4', '--topology v6e'),
    ('--chips_per_host=3', '--chips_per_host 16 chips 3'),
    ('--workdir=gs://us/run', '--workdir mount gs://'),
    ('--workdir=/tmp/run', '--workdir /mnt/runs'),
    ('--name=My_Job', '--name lower-case My_Job'),
  ],
  'cluster tpu_vm': [
    ('--topology=v5e:2x8', '--topology v5e:2x8'),
    ('--zone=', '--zone not empty'),
    ('"--workdir=/run\n"', '--workdir absolute path'),
  ],
  'cluster slurm': [
    ('--nodes=3', 'batch_size multiple of 3 128'),
    ('--sbatch=account', '--sbatch key=value account'),
  ],
}  # fmt: skip


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


def main_of(name):
  return importlib.import_module(f'launch.{name.split()[0]}').main


@pytest.mark.parametrize(
  ('name', 'arguments', 'words'),
  [(name, *row) for name, rows in CASES.items() for row in rows],
)
def test_one_line_names_flag_and_legal_range(
  name, arguments, words, refused_early
):
  arguments = shlex.split(COMMANDS[name].format(arguments))
  refused_early(main_of(name), arguments, words.split())


@pytest.mark.parametrize(
  ('body', 'words'),
  [
    ('return None', ['get_config', 'ConfigDict', 'None']),
    ('return [1]', ['get_config', 'ConfigDict', '[1]']),
    ('raise RuntimeError("no disk")', ['RuntimeError', 'no disk']),
    ('return {}["x"]', ['KeyError', 'x']),
    ('return dict(sed=1)', ['sed: ', 'mean seed']),
    ('return +', ['config.py: expected a file', 'invalid syntax']),
  ],
)
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


def wrong_numbers(kind):
  """(field, number) of a dataclass, each outside of the type of its field."""
  for name, value in wrong_values.wrong_fields(kind):
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
      f'--{field.name}={legal.get(field.name, "x")}'
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
