"""The evaluate command on the checkpoints of a tiny run."""

import json

import pytest

from launch import command_line, evaluate
from train_lib import loading, trainer

pytestmark = pytest.mark.slow

TINY = [
  'batch_size=64', 'mesh.data=1', 'model.depth=2', 'model.width=16',
  'model.mlp_dim=16', 'stages.stage1.steps=4', 'stages.stage1.epochs=0',
  'log_every=1', 'tensorboard=false', 'evals.test.every_steps=2',
  'checkpoint.every_steps=2', 'checkpoint.best_metric=test/accuracy',
]  # fmt: skip


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, request):
  path = request.config.rootpath / 'configs/adatape/digits.py'
  config = command_line.load_config(f'{path}:model=vit', TINY)
  directory = tmp_path_factory.mktemp('runs') / 'run'
  trainer.train(config, str(directory))
  return directory


def rows_of(workdir, *arguments):
  assert evaluate.main([f'--workdir={workdir}', *arguments]) == 0
  return json.loads((workdir / 'evaluation.json').read_text())


def test_table_and_file_agree_with_training(workdir, capsys):
  shots = '--config.evals.fewshot.shots=1,5'
  (row,) = rows_of(workdir, '--evals=test,fewshot', shots)
  result = json.loads((workdir / 'result.json').read_text())
  assert row['step'] == 4
  for name in ('test/accuracy', 'test/cross_entropy'):
    assert row[name] == pytest.approx(result[name], rel=1e-6)
  assert 0.0 <= row['fewshot/5shot'] <= 1.0
  assert 'fewshot/5shot' in capsys.readouterr().out


def test_all_checkpoints_and_the_best(workdir):
  rows = rows_of(workdir, '--step=all', '--evals=test')
  assert [row['step'] for row in rows] == [2, 4]
  (best,) = rows_of(workdir, '--step=best', '--evals=test')
  assert best['test/accuracy'] == max(row['test/accuracy'] for row in rows)
  assert rows_of(workdir, '--step=2', '--evals=test') == rows[:1]


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--evals=fewshoot', '--dataset=name=digits'], ['--evals', 'fewshot']),
    (['--step=last'], ['--step', 'latest']),
    (['--evals='], ['--evals', "['test']", "''"]),
    (['--evals=test,'], ['--evals', "''"]),
    (['--batch_size=0'], ['batch_size', '[1, ', '0']),
    (['--dataset=name=parity,length=4'], ['dataset.name', 'parity']),
    (['--dataset=digits'], ['--dataset', 'key=value']),
    (['--config.seeed=1'], ['seeed', 'mean seed']),
    (['--dataset=name=tests.fakes:FakeImages,image_size=16,num_classes=7'],
     ['evals.test.dataset', '7 classes']),
    (['--batch_size=3', '--config.mesh.data=2'], ['batch_size', 'of 2', '3']),
  ],
)  # fmt: skip
def test_bad_command_lines(workdir, arguments, words, refused):
  refused(evaluate.main, [f'--workdir={workdir}', *arguments], words)


def test_the_task_is_that_of_the_checkpoints_stage(workdir):
  config = loading.load_config(workdir)
  config.stages.stage2 = dict(steps=2, model=dict(mlp_dim=24))
  for step in (2, None, 'best'):
    assert loading.restore(workdir, config, step).task.model.mlp_dim == 16


def test_missing_runs_and_checkpoints_and_another_model(
  workdir, tmp_path, refused
):
  empty, code = f'--workdir={tmp_path}', command_line.CHECKPOINT
  refused(evaluate.main, [empty], ['config.json'])
  (tmp_path / 'config.json').write_text((workdir / 'config.json').read_text())
  refused(evaluate.main, [empty, '--step=all'], ['has no checkpoint'], code)
  other = [f'--workdir={workdir}', '--config.model.width=32']
  refused(evaluate.main, other, code=code)
