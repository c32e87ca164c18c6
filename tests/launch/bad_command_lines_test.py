"""Bad command lines: one line that names the key and the legal range."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from launch import command_line, train

PARITY = '--config=configs/adatape/parity.py'
DIGITS = '--config=configs/adatape/digits.py'
FOLDER = '--config=configs/adatape/images.py:root=/nowhere'
EAT = '--config=configs/eat/glue.py:data=/nowhere,vocabulary=/nowhere'
QUICK = '--config=configs/adatape/quick_start.py'
KNOB = "--config.phases.0.knobs={'tape_weight': "
PEERS = ('--distributed', '--coordinator=localhost:1')

# (arguments, what the line must say)
CASES = [
  ([], ['--config', 'required']),
  (['--config=nowhere.py'], ['--config', 'nowhere.py', 'Python file']),
  (['--config=configs/adatape/parety.py'], ['configs/adatape/parity.py']),
  (['--config=README.md'], ['--config', 'Python file']),
  ([PARITY + ':m=16'], ["'m=16'", "'n'", 'model']),
  ([PARITY + ':n=many'], ['n', 'int', 'many']),
  ([PARITY + ':n=2'], ['n', '>= 4', '2']),
  ([PARITY + ':model=lstm'], ['model', 'adatape', 'ut', 'lstm']),
  ([PARITY, '--wrkdir=x'], ['--wrkdir', '--workdir']),
  ([PARITY, '--config.optimzer.lr=1'], ['optimzer', 'optimizer']),
  ([PARITY, '--config.optimizer.lrr=1'], ['optimizer.lrr', 'mean lr']),
  ([PARITY, '--config.optimizer=adam'], ['optimizer', 'group of fields']),
  ([PARITY, '--config.optimizer.lr.x=1'], ['optimizer.lr.x', 'value']),
  ([PARITY, '--config.optimizer.lr=fast'], ['optimizer.lr', 'number', 'fast']),
  ([PARITY, '--config.batch_size=-7'], ['batch_size', '[1, ', '-7']),
  ([PARITY, '--config.num_micro=3'], ['num_micro', 'divisor of 128', '3']),
  ([PARITY, '--config.phases.0.steps=0'], ['phases.0.steps', '>= 1']),
  ([DIGITS, '--config.phases.0.steps=9'], ['0 beside steps=9', '80']),
  ([QUICK, '--config.phases.3.steps=9'], ['phases.3', 'items are 0, 1, 2']),
  ([PARITY, '--config.phases.0=9'], ['phases.0', 'such as phases.0.FIELD']),
  ([PARITY, '--config.phases=9'], ['phases', 'a tuple, each a group of fi']),
  ([PARITY, '--config.phases=()'], ['phases', 'at least one phase']),
  ([PARITY, '--config.stages.stage1.steps=9'], ['stages', 'phases']),
  ([PARITY, '--config.phases.0.trainable=('], ['trainable', 'regular']),
  ([PARITY, '--config.mesh.data=0'], ['mesh.data', '-1', '0']),
  ([PARITY, '--config.mesh.tensor=-1'], ['mesh', 'at most one']),
  ([PARITY, '--config.checkpoint.best_metric=dev/x'], ['best_metric', 'test']),
  ([PARITY, '--config.task=adatape.task:Tape'], ['task', 'adatape.task:Tape']),
  ([PARITY, '--config.task=pathlib:Path'], ['task', 'subclass']),
  ([PARITY, '--config.task=train_lib.task:Task'], ['task', 'subclass']),
  ([PARITY, '--config.model.max_steps=9'], ['max_steps', '9']),
  ([PARITY, '--config.model.num_heads=5'], ['num_heads', '5']),
  ([PARITY, '--config.model.name=pathlib:Path'], ['model.name', 'subclass']),
  # A model without a tape, or without a ponder cost; any Linen module.
  ([PARITY, '--config.model.name=model_lib.vit:ViT'], ['TapeClassifier']),
  ([f'{PARITY}:model=ut', '--config.model.name=model_lib.vit:ViT'],
   ['model.name', 'adatape.universal:Pondering']),
  ([f'{PARITY}:model=transformer', '--config.model.name=pathlib:Path'],
   ['model.name', 'Linen']),
  ([PARITY, '--config.model.num_classes=5'], ['num_classes', 'max_steps']),
  ([PARITY, "--config.phases.0.knobs={'tape': 1}"], ['knobs', 'tape_w']),
  ([PARITY, KNOB + "('bent', 0, 1)}"], ['knobs.tape_weight', 'linear']),
  ([PARITY, KNOB + "('linear', 0)}"], ['knobs.tape_weight', 'linear']),
  # The knob of the last phase hides it.
  ([QUICK, '--config.loss.tape_weight=0.3'],
   ['loss.tape_weight', '0.1, at which', '0.3']),
  ([PARITY, '--config.warm_start.skip=(,'], ['warm_start.skip', 'tuple']),
  ([PARITY, '--config.warm_start.renames=->a'], ["'old->new'"]),
  *(([PARITY, f'--config.warm_start.workdir={file}'],
     ['warm_start.workdir', '.npz or .safetensors file'])
    for file in ('/nowhere', 'README.md', 'missing.npz')),
  ([PARITY, '--coordinator=host:1'], ['--distributed']),
  ([PARITY, *PEERS, '--num_processes=0'], ['--num_processes', 'positive', '0']),
  ([PARITY, *PEERS, '--num_processes=2', '--process_id=5'],
   ['--coordinator', '--process_id', 'process_id=5, num_processes=2']),
  ([PARITY, PEERS[0], '--num_processes=2', '--process_id=0'],
   ['--coordinator', 'address of process 0', 'None']),
  ([PARITY, '--config.dataset.name=parety'], ['dataset.name', 'parity']),
  ([PARITY, '--config.evals.test.split=dev'], ['split', 'test', 'dev']),
  ([PARITY, '--config.evals.test.type=accurracy'], ['type', 'classification']),
  ([DIGITS, '--config.dataset.augment=flop'], ['dataset.augment', 'flip']),
  ([DIGITS, '--config.model.patch_size=3'], ['patch_size', '3']),
  ([DIGITS + ':model=input', '--config.model.width=16',
    '--config.model.query_dim=32'], ['model.query_dim', 'width 16', '32']),
  (['--config=configs/adatape/images.py'], ['root', 'tfds=NAME']),
  (['--config=configs/adatape/images.py:root=/a,tfds=b'], ['root', '/a', 'b']),
  ([FOLDER, '--workdir=../up'], ['--workdir', '..']),
  ([EAT, '--config.model.exit_layers=(40,)'], ['exit_layers', '[1, 12]', '40']),
  ([EAT, '--config.model.prune_layers=(2,)'], ['model.prune_ratios', '(2,)']),
  ([EAT, "--config.phases.0.model={'exit_layers': (50,)}"],
   ['phases.0.model.exit_layers', '[1, 12]', '50']),
  ([EAT, '--config.loss.exit_weights=(1.0,)'], ['exit_weights', '2 weights']),
  ([EAT + ',variant=nope'], ['variant', 'minilm', 'nope']),
  ([EAT + ',epochs=0'], ['phases.0', '0']),
  ([EAT + ',exits=2;3'], ['exits', '2-3-4', '2;3']),
  ([EAT + ',model=dense,exits=4'], ['exits', 'model=eat', 'dense']),
  ([EAT + ',parts=pwx'], ['parts', 'pwe', 'pwx']),
  ([EAT + ',model=dense,parts=p'], ['parts', 'model=eat', 'dense']),
  ([EAT + ',layers=6'], ["'layers=6'", 'pretrained']),
  ([EAT + ',teacher=/nowhere'], ['teacher', '/nowhere']),
  ([EAT + ',pretrained=/nowhere'], ['pretrained', '/nowhere']),
  ([EAT, '--config.loss.teacher=/nowhere'], ['loss.teacher', '/nowhere']),
  ([EAT, '--config.model.from_checkpoint=/nowhere'],
   ['model.from_checkpoint', '/nowhere']),
  ([EAT + ',teacher=/a,pretrained=/b'], ['pretrained', 'teacher', '/b']),
]  # fmt: skip


@pytest.fixture
def refused_early(tmp_path, refused, monkeypatch):
  """Runs training, which touches no device and writes nothing."""
  from jax._src import xla_bridge

  def touched(*_, **__):
    raise AssertionError('a device was touched')

  # Whatever asks for a device, even for their number, comes by here.
  monkeypatch.setattr(xla_bridge, 'backends', touched)
  monkeypatch.setattr(xla_bridge, 'backends_are_initialized', lambda: False)

  def run(arguments, words):
    refused(train.main, [f'--workdir={tmp_path}/run', *arguments], words)
    assert not (tmp_path / 'run').exists()

  return run


@pytest.mark.parametrize(('arguments', 'words'), CASES)
def test_one_line_names_key_and_legal_range(arguments, words, refused_early):
  refused_early(arguments, words)


@pytest.mark.parametrize(
  ('body', 'words'),
  [
    ('return None', ['get_config', 'ConfigDict', 'None']),
    ('return [1]', ['get_config', 'ConfigDict', '[1]']),
    ('raise RuntimeError("no disk")', ['RuntimeError', 'no disk']),
    ('return {}["x"]', ['KeyError', 'x']),
    ('return dict(sed=1)', ['sed: ', 'mean seed']),
    ('return dict(optimizer=3)', ['optimizer', 'group of fields', '3']),
    ('return +', ['config.py: expected a file', 'invalid syntax']),
  ],
)
def test_a_wrong_file_is_explained_in_one_line(
  body, words, tmp_path, refused_early
):
  path = tmp_path / 'config.py'
  path.write_text(f'def get_config():\n  {body}\n')
  refused_early([f'--config={path}'], words)


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


def commands():
  """(command, words before its flags) of every command line."""
  root = pathlib.Path(train.__file__).parents[1]
  for path in (*root.glob('launch/*.py'), *root.glob('benchmarks/*.py')):
    name = f'{path.parent.name}.{path.stem}'
    main = getattr(importlib.import_module(name), 'main', None)
    if isinstance(main, command_line.Command):
      kinds = main.flags if isinstance(main.flags, dict) else {'': main.flags}
      yield from ((main, kind.split()) for kind in kinds)


def test_every_command_explains_its_flags(capsys):
  names = set()
  for main, words in commands():
    with pytest.raises(SystemExit) as ended:
      main([*words, '--help'])
    assert ended.value.code in (0, None)
    name = f'{main.package}.{main.name}'
    assert ' '.join([name, *words]) in capsys.readouterr().out
    names.add(name)
  assert names >= {
    'launch.train', 'launch.serve', 'launch.cluster', 'benchmarks.serve',
    'benchmarks.adatape',
  }  # fmt: skip
