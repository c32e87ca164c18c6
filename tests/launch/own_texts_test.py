"""A file of one's own is trained, served and evaluated; a change is refused."""

import json
import shutil

import numpy as np
import pytest

from launch import classify, command_line, evaluate, export
from serve_lib import bundle as bundles
from serve_lib.engine import Engine
from tests import shell
from tests.launch import toy_runs
from train_lib import loading, trainer
from train_lib.run_directory import ConfigChangedError

STEPS = 10


def write(path, rows):
  """Writes a CSV whose texts have commas, quotes and line breaks."""
  lines = [
    f'"w{n % 40}, ""w{n % 7}""\nw{n % 2}","{label}"\n'
    for n, label in enumerate(rows)
  ]
  path.write_text('body,topic\n' + ''.join(lines))
  return path


def load(folder, argument, *changes):
  argument += ',label=topic' * ('label=' not in argument)
  return command_line.load_config(
    f'configs/texts.py:data={folder}/own.csv,text=body,vocabulary={folder},'
    f'variant=tiny,{argument}',
    [
      *toy_runs.SMALL, 'batch_size=16', 'log_every=5', 'phases.0.epochs=0.1',
      f'phases.0.least_steps={STEPS}', *changes,
    ],
  )  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A trained run and its data."""
  folder = tmp_path_factory.mktemp('own')
  toy_runs.write_data(folder)
  write(folder / 'own.csv', ['no', 'yes, please'] * 40)
  trainer.train(load(folder, 'model=dense'), str(folder / 'run'))
  return folder


def test_few_rows_are_trained_for_some_steps(folder):
  rows = shell.rows(folder / 'run')
  measured = [r['step'] for r in rows if 'validation/accuracy' in r]
  assert measured == [2, 4, 6, 8, 10]
  assert [r['step'] for r in rows if 'test/accuracy' in r] == [STEPS]
  info = loading.load_info(folder / 'run')
  assert info.splits['rows'] == {'train': 48, 'validation': 16, 'test': 16}
  config = loading.load_config(folder / 'run')
  assert config.dataset.max_length == info.input_shape[0] == 8


def test_it_is_served_by_the_names_of_its_labels(folder):
  with Engine(*loading.serve(folder / 'run')) as engine:
    [answer] = engine.predict([{'text': 'w1, "w2"'}])
  assert {*answer.probabilities} == {'no', 'yes, please'}


def test_a_dense_run_is_calibrated_as_serving_advises(folder, tmp_path, capsys):
  run = shutil.copytree(folder / 'run', tmp_path / 'run')
  with Engine(*loading.serve(run)) as engine:
    warning, *_ = engine.policy.warnings
  assert warning.startswith('no drift check')
  *_, command = warning.partition('-m launch.evaluate ')
  assert evaluate.main(command.split()) == 0
  with Engine(*loading.serve(run)) as engine:
    assert 'no drift check' not in str(engine.policy.warnings)
  # A certificate is of the rows to which the calibration was not fitted.
  names = '--evals=calibration,certificate'
  assert evaluate.main([f'--workdir={run}', names]) == 0
  printed = capsys.readouterr().out
  assert 'certificate has read 12 rows of validation[25%:]\n' in printed


def evaluated(folder, *flags):
  run = folder / 'run'
  assert evaluate.main([f'--workdir={run}', '--evals=test', *flags]) == 0
  return json.loads((run / 'evaluation.json').read_text())[0]


def test_new_rows_are_evaluated_and_changed_ones_are_refused(folder, capsys):
  new = write(folder / 'new.csv', ['yes, please'] * 9)
  flags = f'--dataset=name=texts,path={new}', '--config.evals.test.split=all'
  assert np.isfinite(evaluated(folder, *flags)['test/cross_entropy'])
  own = (folder / 'own.csv').read_text()
  try:
    write(folder / 'own.csv', ['no', 'yes, please'] * 41)
    with pytest.raises(SystemExit) as error:
      evaluated(folder)
    assert error.value.code == 2
    assert 'its rows changed' in capsys.readouterr().err
    with pytest.raises(ConfigChangedError, match=r"splits: .*'train': 48"):
      trainer.train(load(folder, 'model=dense'), str(folder / 'run'))
    evaluated(folder, '--config.allow_other_rows=True')
  finally:
    (folder / 'own.csv').write_text(own)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('argument', 'rows', 'metric'),
  [
    ('model=eat', ['a', 'b'] * 40, 'calibration/ece'),
    ('model=eat,kind=number', map(str, range(80)), 'test/explained'),
    ('kind=classes', ['a', 'b;c', 'c'] * 30, 'test/accuracy'),
  ],
)
def test_kinds_of_labels_and_models(argument, rows, metric, folder, tmp_path):
  toy_runs.write_data(tmp_path)
  write(tmp_path / 'own.csv', rows)
  trainer.train(load(tmp_path, argument), str(tmp_path / 'run'))
  last = shell.rows(tmp_path / 'run')[-1]
  assert any(name.startswith(metric) for name in last), last
  # In few steps at least the mean is known, which explains nothing.
  assert last.get('test/explained', 0.0) > -0.3
  # Serving needs neither the data nor the vocabulary, and what the training
  # calibrated is of its last checkpoint.
  for name in ('own.csv', 'vocab.txt'):
    (tmp_path / name).unlink()
  with Engine(*loading.serve(tmp_path / 'run')) as engine:
    assert not engine.policy.warnings or 'calibration' not in metric
    [answer] = engine.predict(['w1 w2'])
  assert answer.label is not None


TASKS = {'domain': ['bank', 'art'], 'spam': ['no', 'yes'], 'size': ['s', 'l']}


def write_tasks(path, count, end=''):
  """Writes rows of three tasks, of which every fourth lacks a label."""
  lines = []
  for n in range(count):
    digits = n % 2, n // 2 % 2, n // 4 % 2
    labels = [c[d] for c, d in zip(TASKS.values(), digits, strict=True)]
    labels[n % 3] = '' if n % 4 == 1 else labels[n % 3]
    words = ' '.join(f'w{10 * k + d}' for k, d in enumerate(digits))
    text = f'w{n % 40} {words}{end.format(n // 40)}'
    lines.append([text, *labels])
  write_lines(path, [['body', *TASKS], *lines])


def write_lines(path, rows):
  path.write_text('\n'.join(map(','.join, rows)) + '\n')
  return path


@pytest.mark.slow
def test_a_file_of_several_tasks_is_certified_served_and_bundled(
  tmp_path, capsys
):
  toy_runs.write_data(tmp_path)
  write_tasks(tmp_path / 'own.csv', 240)
  write_tasks(tmp_path / 'new.csv', 400, ' w{}')
  write_tasks(tmp_path / 'few.csv', 20, ' w0')
  argument = f'label={"+".join(TASKS)},epochs=1'
  dense, run = tmp_path / 'dense', tmp_path / 'run'
  trainer.train(
    load(tmp_path, f'{argument},model=dense', 'evals={}'), str(dense)
  )
  given = f'{argument},model=eat,teacher={dense}'
  trainer.train(load(tmp_path, given), str(run))
  last = shell.rows(run)[-1]
  mean = np.mean([last[f'test/accuracy_{name}'] for name in TASKS])
  assert last['test/accuracy'] == pytest.approx(mean)
  rows = {}
  for name in TASKS:
    found = json.loads((run / f'certificate.{name}.json').read_text())
    rows[name] = found['sources']['']['rows']
  assert max(rows.values()) < 36  # of the 48 of validation that do not fit
  place = f'--workdir={run}'
  assert evaluate.main([place, f'--labelled={tmp_path / "new.csv"}']) == 0
  for number, name in enumerate(TASKS):
    found = json.loads((run / f'certificate.{name}.json').read_text())
    missing = sum(n % 3 == number for n in range(1, 400, 4))
    assert found['sources']['']['rows'] == 400 - missing
  # Rows without labels of one task certify the others.
  lines = (tmp_path / 'new.csv').read_text().splitlines()
  cells = [line.split(',') for line in lines]
  for row in cells[1:]:
    row[2] = ''
  partial = write_lines(tmp_path / 'partial.csv', cells)
  with pytest.raises(SystemExit):
    evaluate.main([place, f'--labelled={partial}'])
  assert 'certificate_spam stays as it was' in capsys.readouterr().err
  for name, file in (('size', partial), ('spam', tmp_path / 'new.csv')):
    found = json.loads((run / f'certificate.{name}.json').read_text())
    assert found['sources']['']['dataset']['path'] == str(file)
  with pytest.raises(SystemExit):
    evaluate.main([place, f'--labelled={tmp_path / "few.csv"}'])
  refused = capsys.readouterr().err.splitlines()[-3:]
  for name, line in zip(TASKS, refused, strict=True):
    assert f'certificate_{name}: the old certificate stays' in line
  bundle = tmp_path / 'bundle'
  served = f'--workdir={run}', '--serve=tau=guaranteed', '--batches=1'
  assert export.main([*served, f'--bundle={bundle}']) == 0
  texts = ['w1 w10 w21', 'w0 w11']
  with Engine(*loading.serve(run, options={'tau': 'guaranteed'})) as engine:
    answers = engine.predict(texts)
  chain, policy, grid = bundles.read(bundle)
  with Engine(chain, policy, grid.lengths, grid.batches) as engine:
    again = engine.predict(texts)
  for given, want in zip(answers, again, strict=True):
    assert given.label == want.label
    assert {*given.as_dict()['tasks']} == {*TASKS}
    assert {*given.probabilities['spam']} == {'no', 'yes'}


def test_several_tasks_are_not_classified(tmp_path, capsys):
  flags = f'{tmp_path}/own.csv', '--label=a+b', f'--out={tmp_path}/out'
  with pytest.raises(SystemExit):
    classify.main([*flags])
  assert '--label: expected one column' in capsys.readouterr().err
