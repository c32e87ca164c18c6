"""The shipped experiments, as a user runs them, to the promised accuracy."""

import json
import subprocess
import sys
import tarfile

import pytest

from launch import command_line, train


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)
  # One device and nothing else of the tests' environment.
  monkeypatch.delenv('XLA_FLAGS', raising=False)


def launch(command, *arguments):
  done = subprocess.run(
    [sys.executable, '-m', f'launch.{command}', *arguments],
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def result(workdir):
  return json.loads((workdir / 'result.json').read_text())


@pytest.mark.parametrize(
  'seed',
  [
    pytest.param(0, marks=pytest.mark.slow),
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2)),
  ],
)
def test_quick_start_solves_parity(seed, tmp_path):
  text = launch(
    'train', '--config=configs/adatape/parity.py', f'--config.seed={seed}',
    f'--workdir={tmp_path}',
  )  # fmt: skip
  assert result(tmp_path)['accuracy'] >= 0.99
  for shown in ('accuracy', 'seconds', f'plot: {tmp_path}/run.png'):
    assert shown in text


@pytest.mark.nightly
@pytest.mark.parametrize('model', ['learn', 'input', 'vit'])
def test_digits_and_the_few_shot_table_of_its_checkpoint(model, tmp_path):
  config = f'--config=configs/adatape/digits.py:model={model}'
  launch('train', config, f'--workdir={tmp_path}')
  assert result(tmp_path)['accuracy'] >= 0.96
  text = launch('evaluate', f'--workdir={tmp_path}', '--evals=test,fewshot')
  row = json.loads((tmp_path / 'evaluation.json').read_text())[0]
  assert row['test/accuracy'] == pytest.approx(result(tmp_path)['accuracy'])
  assert 'fewshot/10shot' in text
  # Features of a model that saw all labels: far above the chance of 0.1.
  assert row['fewshot/10shot'] > 0.9


@pytest.fixture
def photographs(shared_data, tmp_path):
  with tarfile.open(shared_data / 'images' / 'caltech101_folders.tar') as tar:
    tar.extractall(tmp_path, filter='data')
  return tmp_path / 'caltech101'


@pytest.mark.nightly
@pytest.mark.parametrize('model', ['learn', 'input', 'vit'])
def test_trains_on_real_photographs(model, photographs, tmp_path):
  workdir = tmp_path / 'run'
  launch(
    'train',
    f'--config=configs/adatape/images.py:root={photographs},'
    f'model={model},size=64',
    '--config.batch_size=64',
    '--config.stages.stage1.epochs=2',
    '--config.model.depth=3',
    '--config.log_every=10',
    f'--workdir={workdir}',
  )
  rows = (workdir / 'metrics.jsonl').read_text().splitlines()
  losses = [
    row['train/cross_entropy']
    for row in map(json.loads, rows)
    if 'train/cross_entropy' in row
  ]
  assert sum(losses[-3:]) / 3 < losses[0]
  # 100 classes: chance is 0.01.
  assert result(workdir)['accuracy'] > 0.03
  shots = '--config.evals.fewshot.shots=5,'
  text = launch('evaluate', f'--workdir={workdir}', '--evals=fewshot', shots)
  assert 'fewshot/5shot' in text


SMALL = (
  '--config=configs/adatape/parity.py', '--config.batch_size=8',
  '--config.mesh.data=1', '--config.checkpoint.every_steps=0',
  '--config.stages.stage1.steps=2', '--config.log_every=1',
)  # fmt: skip


@pytest.mark.slow
def test_a_dry_run_prints_sizes_and_writes_nothing(tmp_path):
  text = launch('train', *SMALL, '--dry_run', f'--workdir={tmp_path}/run')
  for word in ('parameters', 'FLOPs', 'memory', 'tokens [8, 16] int32'):
    assert word in text
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_with_tensorboard_imports_no_tensorflow(tmp_path):
  code = (
    'import sys\n'
    'from launch import train\n'
    'train.main(sys.argv[1:])\n'
    "assert 'tensorflow' not in sys.modules\n"
  )
  subprocess.run(
    [sys.executable, '-c', code, *SMALL, f'--workdir={tmp_path}'], check=True
  )
  assert list((tmp_path / 'tensorboard').iterdir())


@pytest.mark.slow
def test_a_pattern_that_trains_nothing_is_refused(tmp_path):
  with pytest.raises(SystemExit) as stop:
    train.main(
      [*SMALL, f'--workdir={tmp_path}/run',
       '--config.stages.stage1.trainable=nomatch']
    )  # fmt: skip
  assert stop.value.code == command_line.USAGE
  assert not (tmp_path / 'run').exists()
