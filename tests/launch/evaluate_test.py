"""The evaluate command on the checkpoints of a tiny run."""

import json
import re
import shutil

import pytest

from launch import command_line, evaluate
from tests import shell
from tests.launch.refused import TABLE
from train_lib import loading, trainer
from train_lib.phases import Phase

pytestmark = pytest.mark.slow

TINY = [
  'batch_size=64', 'mesh.data=1', 'model.depth=2', 'model.width=16',
  'model.mlp_dim=16', 'phases.0.steps=4', 'phases.0.epochs=0',
  'log_every=1', 'tensorboard=false', 'evals.test.every_steps=2',
  'checkpoint.every_steps=2', 'checkpoint.best_metric=test/accuracy',
]  # fmt: skip


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  config = command_line.load_config('configs/adatape/digits.py:model=vit', TINY)
  directory = tmp_path_factory.mktemp('runs') / 'run'
  trainer.train(config, str(directory))
  return directory


def rows_of(workdir, *arguments, keep=False):
  """The rows of evaluation.json, without those of earlier calls."""
  file = workdir / 'evaluation.json'
  if not keep:
    file.unlink(missing_ok=True)
  assert evaluate.main([f'--workdir={workdir}', *arguments]) == 0
  return json.loads(file.read_text())


SHOTS = '--config.evals.fewshot.shots=1,5'
FAKES = 'name=tests.fakes:FakeImages,train_examples=64,test_examples=40'
FAKE_16 = f'{FAKES},num_classes=3,image_size=16'


def test_a_list_of_data_sets_equals_single_calls(workdir, capsys):
  single = {}
  for name, given in (('a', FAKE_16), ('b', 'name=digits,image_size=16')):
    flags = '--evals=fewshot', SHOTS, f'--dataset={given}'
    (row,) = rows_of(workdir, *flags)
    single[name] = {k: v for k, v in row.items() if k.startswith('fewshot/')}
    assert row['datasets']['fewshot']['name'] == given.split(',')[0][5:]
  capsys.readouterr()
  # Both get the image size of the run.
  listed = f'a:{FAKES},num_classes=3;b:name=digits,test_split=test'
  (row,) = rows_of(workdir, f'--datasets={listed}', SHOTS)
  for name, found in single.items():
    assert len(found) == 10
    for key, value in found.items():
      assert row[key.replace('fewshot', name)] == value
  assert row['datasets']['a']['image_size'] == 16
  assert row['datasets']['b']['test_split'] == 'test'
  entries = {key.partition('/')[0] for key in row}
  assert entries == {'step', 'datasets', 'a', 'b'}
  lines = capsys.readouterr().out.splitlines()
  for name, found in single.items():
    cells = [
      f'{100 * found[key]:.2f} ± {100 * found[f"{key}_std"]:.2f}'
      for key in ('fewshot/1shot', 'fewshot/5shot')
    ]
    assert [name, *cells] in [re.split(' {2,}', line.strip()) for line in lines]


def test_splits_of_a_listed_data_set(workdir):
  listed = f'--datasets=a:{FAKE_16},train_split=test,test_split=train'
  (row,) = rows_of(workdir, listed, SHOTS)
  # Of the 40 images of the test split, 3 are the shots of 1.
  assert row['a/1shot_held_out'] == 37
  assert row['datasets']['a']['train_split'] == 'test'


def test_results_of_earlier_calls_are_kept(workdir):
  first = rows_of(workdir, '--step=all', '--evals=test')
  (row,) = [row for row in first if row['step'] == 4]
  after = rows_of(workdir, f'--datasets=a:{FAKE_16}', SHOTS, keep=True)
  assert after[0] == first[0]
  assert after[1].items() >= {**row, 'datasets': after[1]['datasets']}.items()
  assert set(after[1]['datasets']) == {'test', 'a'}
  # Only the results of a repeated entry are replaced.
  shots = '--config.evals.fewshot.shots=2,'
  again = rows_of(workdir, f'--datasets=a:{FAKE_16}', shots, keep=True)
  assert 'a/2shot' in again[1]
  assert 'a/1shot' not in again[1]
  assert again[1]['test/accuracy'] == row['test/accuracy']


def test_a_damaged_file_is_not_replaced(workdir, refused):
  file = workdir / 'evaluation.json'
  for text in ('{', '[3]', '[{"test/accuracy": 1.0}]'):
    file.write_text(text)
    flags = f'--workdir={workdir}', '--evals=test'
    refused(evaluate.main, flags, ['evaluation.json'], command_line.DATA)
    assert file.read_text() == text
  file.unlink()


def test_table_and_file_agree_with_training(workdir, capsys):
  (row,) = rows_of(workdir, '--evals=test,fewshot', SHOTS)
  result = shell.result(workdir)
  assert row['step'] == 4
  for name in ('test/accuracy', 'test/cross_entropy'):
    assert row[name] == pytest.approx(result[name], rel=1e-6)
  assert 0.0 <= row['fewshot/5shot'] <= 1.0
  assert 'fewshot/5shot' in capsys.readouterr().out
  (row,) = rows_of(workdir, '--evals=confusion')  # needs no entry of the config
  assert 0.0 <= row['confusion/macro_f1'] <= 1.0
  assert (workdir / 'confusion.png').is_file()
  assert 'confusion has read 359 rows of test\n' in capsys.readouterr().out
  rows_of(workdir, '--evals=confusion', '--dataset=name=digits,image_size=16')
  assert 'read 359 rows of test of digits\n' in capsys.readouterr().out
  assert (workdir / 'confusion.digits.png').is_file()


def test_an_empty_certificate_is_told_after_the_table(workdir, capsys):
  least = '--config.evals.certificate.epsilon=0.001'
  rows_of(workdir, '--evals=certificate', least)
  line = capsys.readouterr().out.splitlines()[-2]
  assert line.startswith('certificate has no choice: the model has no exits')


def test_all_checkpoints_and_the_best(workdir):
  rows = rows_of(workdir, '--step=all', '--evals=test')
  assert [row['step'] for row in rows] == [2, 4]
  (best,) = rows_of(workdir, '--step=best', '--evals=test')
  assert best['test/accuracy'] == max(row['test/accuracy'] for row in rows)
  assert rows_of(workdir, '--step=2', '--evals=test') == rows[:1]


@pytest.mark.parametrize(('arguments', 'words'), TABLE['evaluate'])
def test_bad_command_lines(workdir, arguments, words, refused):
  refused(evaluate.main, [f'--workdir={workdir}', *arguments.split()], words)


def test_the_task_is_that_of_the_checkpoints_phase(workdir):
  config = loading.load_config(workdir)
  config.phases += (Phase(steps=2, model=dict(mlp_dim=24)),)
  for step in (2, None, 'best'):
    assert loading.restore(workdir, config, step).task.model.mlp_dim == 16


def test_missing_runs_and_checkpoints_and_another_model(
  workdir, tmp_path, refused
):
  empty, code = f'--workdir={tmp_path}', command_line.CHECKPOINT
  refused(evaluate.main, [empty], ['config.json'])
  around = f'--workdir={workdir.parent}'
  refused(evaluate.main, [around], [f'such as {workdir}'])
  (tmp_path / 'config.json').write_text((workdir / 'config.json').read_text())
  refused(evaluate.main, [empty, '--step=all'], ['has no checkpoint'], code)
  other = [f'--workdir={workdir}', '--config.model.width=32']
  refused(evaluate.main, other, code=code)


def test_watching_evaluates_what_appears_until_the_end(
  workdir, tmp_path, monkeypatch, capsys
):
  expected = rows_of(workdir, '--step=all', '--evals=test')
  for name in ('config.json', 'dataset_info.json'):
    shutil.copy(workdir / name, tmp_path)
  (tmp_path / 'checkpoints').mkdir()

  def appear(name):
    shutil.copytree(workdir / name, tmp_path / name)

  def damaged():
    appear('checkpoints/4')
    (tmp_path / 'checkpoints/4').rename(tmp_path / 'checkpoints/3')

  events = iter([
    lambda: appear('checkpoints/2'), lambda: None, damaged,
    lambda: appear('checkpoints/4'),
    lambda: shutil.copy(workdir / 'result.json', tmp_path),
  ])  # fmt: skip
  capsys.readouterr()
  monkeypatch.setattr(evaluate, 'POLL_SECONDS', 0.01)
  monkeypatch.setattr(
    evaluate.time, 'sleep', lambda seconds: seconds and next(events)()
  )
  assert rows_of(tmp_path, '--watch', '--evals=test', keep=True) == expected
  printed = capsys.readouterr()
  assert printed.out.count('step 2') == 1
  assert 'warning' in printed.err
  # Continued: what is evaluated is not evaluated again.
  assert rows_of(tmp_path, '--watch', '--evals=test', keep=True) == expected
  assert 'step 4' not in capsys.readouterr().out
