"""A run on GLUE writes files for the server, which are read and scored."""

import importlib
import json
import random
import shutil

import numpy as np
import pytest

from eval_lib import submission
from launch import command_line, evaluate, glue, predict, train
from tests import shell
from tests.launch import toy_runs
from tests.launch.refused import TABLE

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of a dense model on a folder with the layout of GLUE's archives."""
  root = tmp_path_factory.mktemp('glue')
  toy_runs.write_data(root)
  draw = random.Random(1)
  texts = [' '.join(draw.choices(toy_runs.WORDS, k=9)) for _ in range(21)]
  texts[4] = ' '  # is to be answered, too
  folder = root / 'SST-2'
  folder.mkdir()
  for name in ('train.tsv', 'dev.tsv'):
    (root / name).rename(folder / name)
  lines = [f'{index}\t{text}' for index, text in enumerate(texts)]
  (folder / 'test.tsv').write_text('\n'.join(['index\tsentence', *lines]))
  arguments = f'data={root},vocabulary={root},variant=tiny,model=dense,submit=1'
  changes = [
    *toy_runs.SMALL, 'batch_size=16', 'dataset.max_length=16',
    'dataset.length_buckets=8,16', 'phases.0.steps=60',
    'phases.0.epochs=0',
  ]  # fmt: skip
  workdir = root / 'run'
  code = train.main([
    f'--config=configs/eat/glue.py:{arguments}', f'--workdir={workdir}',
    *(f'--config.{change}' for change in changes),
  ])  # fmt: skip
  assert code == command_line.OK
  return workdir


def answer(run, split, out):
  """Runs `launch.predict --glue`; returns the file."""
  flags = f'--workdir={run}', f'--glue={split}', f'--out={out}'
  assert predict.main([*flags, '--batches=4', '--compilation_cache=none']) == 0
  return out / 'SST-2.tsv'


def test_training_and_serving_answer_the_test_split(run, tmp_path):
  assert shell.result(run)['submit_test/rows'] == 21
  trained = submission.read(run / 'submission' / 'SST-2.tsv', 21)
  assert set(trained) == {0, 1}
  served = submission.read(answer(run, 'test', tmp_path / 'out'), 21)
  np.testing.assert_array_equal(served, trained)


def test_answers_to_a_split_with_labels_are_scored(run, tmp_path, capsys):
  path = answer(run, 'validation', tmp_path)
  assert evaluate.main([f'--workdir={run}', f'--submission={path}']) == 0
  (row,) = json.loads((run / 'evaluation.json').read_text())
  result = shell.result(run)
  assert row['submitted/accuracy'] == result['dev/accuracy']
  assert 'submitted/accuracy' in capsys.readouterr().out
  # One answer more is wrong, or right.
  answers = submission.read(path)
  answers[3] = 1 - answers[3]
  submission.write(tmp_path, 'SST-2', answers)
  evaluate.main([f'--workdir={run}', f'--submission={path}', '--evals=dev'])
  (row,) = json.loads((run / 'evaluation.json').read_text())
  change = row['submitted/accuracy'] - row['dev/accuracy']
  assert abs(change) == pytest.approx(1 / 24)

  # A part of a split does not count, though it is newer.
  (run / 'result.json').rename(tmp_path / 'result.json')
  part = '--config.evals.dev.split=validation[:50%]'
  evaluate.main([f'--workdir={run}', '--evals=dev', part])
  found = dict(glue.results(str(run)))
  assert found == {'SST-2': {'accuracy': row['submitted/accuracy']}}
  (tmp_path / 'result.json').rename(run / 'result.json')

  out = tmp_path / 'glue.csv'
  assert glue.main(['average', f'--runs={run}', f'--out={out}']) == 0
  first, mean, _ = shell.table(out)
  assert first['task'] == 'SST-2'
  assert float(first['accuracy']) == result['dev/accuracy']
  assert mean['score'] == first['score']
  assert mean['absent'].startswith('CoLA, MRPC')


@pytest.mark.parametrize(('command', 'words'), TABLE['glue'])
def test_what_cannot_be_answered_scored_or_zipped(
  command, words, run, tmp_path, refused
):
  submission.write(tmp_path, 'RTE', np.zeros(24, int))
  shutil.copy(run / 'config.json', tmp_path)  # a run without results
  places = {'run': run, 'out': tmp_path}
  module, *given = command.format(**places).split()
  words = [word.format(**places) for word in words]
  refused(importlib.import_module(module).main, given, words, code=None)
