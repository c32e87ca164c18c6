"""From a CSV of made-up words to a certified model and its page."""

import contextlib
import csv
import json
import random
import re
import shutil

import pytest

from core.errors import ConfigError, InvalidDataError
from dataset_lib.bad_records import TooManyBadRecordsError
from eval_lib import certificate
from launch import classify, classify_data, evaluate, export, train
from launch import classify_page as page
from tests.launch.toy_runs import SMALL, SPECIAL, WORDS

OVERRIDES = [
  '--config.mesh.data=1', '--config.tensorboard=false',
  '--config.loader.num_threads=1', '--config.optimizer.lr=0.003',
]  # fmt: skip
ROWS, SPLITS = 200, ('train', 'validation', 'test')


def write_rows(path, seed):
  """Writes rows of two classes; each class has words of its own."""
  draw = random.Random(seed)
  with path.open('w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(('id', 'body', 'category'))
    for number in range(ROWS):
      own = WORDS[20 * (number % 2) :][:20]
      words = ' '.join(draw.choices(own, k=draw.randrange(3, 9)))
      writer.writerow((number, words, ('bills, fees', 'sign in')[number % 2]))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Two files of rows, and a Hugging Face directory to start from."""
  root = tmp_path_factory.mktemp('classify')
  (root / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
  write_rows(root / 'tickets.csv', 0)
  write_rows(root / 'new.csv', 1)
  config = (
    f'configs/texts.py:data={root}/tickets.csv,text=body,label=category,'
    f'variant=tiny,vocabulary={root}'
  )
  steps = 'phases.0.epochs=0', 'phases.0.steps=2', 'phases.0.least_steps=0'
  steps += ('evals={}',)
  changes = [f'--config.{change}' for change in (*SMALL, *steps)]
  train.main([f'--config={config}', f'--workdir={root}/tiny', *changes])
  export.main([f'--workdir={root}/tiny', f'--out={root}/hf'])
  return root


@pytest.mark.slow
def test_a_file_becomes_a_certified_model_and_a_page(folder, capfd):
  out = folder / 'out'
  command = [
    str(folder / 'tickets.csv'), '--text=body', '--label=category',
    f'--pretrained={folder / "hf"}', f'--out={out}', '--timed_rows=8',
    *OVERRIDES,
  ]  # fmt: skip
  assert classify.main([*command, '--dry_run']) == 0
  told = capfd.readouterr().out
  assert re.search(r'all +120 +40 +40 *\n +bills, fees +60 +20 +20 ', told)
  assert '0 bad rows' in told
  assert not out.exists()
  assert classify.main(command) == 0
  printed = capfd.readouterr().out
  assert f'python -m launch.serve --workdir={out}/adaptive' in printed
  found = json.loads((out / 'report.json').read_text())
  assert found['rows'] == {'train': 120, 'validation': 40, 'test': 40}
  assert [*found['accuracy']] == [
    'dense', 'adaptive, full depth', 'adaptive, as served',
    'embeddings + logistic regression',
  ]  # fmt: skip
  assert min(found['accuracy'].values()) > 0.9
  # Of 30 rows: 1 % would need 229.
  assert found['certificate']['rows'] == 30
  assert found['certificate']['epsilon'] == 0.1
  candidates = {row['candidate'] for row in found['speed']}
  assert candidates == {
    'dense', 'dense, exported to ONNX', 'adaptive, full depth',
    'adaptive, as served',
  }  # fmt: skip
  assert 'frontier/accuracy_tau' not in printed
  with (out / 'test_answers.csv').open(newline='') as file:
    rows = [*csv.DictReader(file)]
  served = sum(row['label'] == row['answer'] for row in rows) / len(rows)
  assert served == pytest.approx(found['accuracy']['adaptive, as served'])
  assert {row['label'] for row in rows} == {'bills, fees', 'sign in'}
  assert (out / 'report.png').stat().st_size > 10_000

  trained = (out / 'adaptive/result.json').stat().st_mtime_ns
  assert classify.main(command) == 0
  assert (out / 'adaptive/result.json').stat().st_mtime_ns == trained
  assert 'launch.train' not in capfd.readouterr().out

  workdir = f'--workdir={out / "adaptive"}'
  evaluate.main([workdir, f'--labelled={folder / "new.csv"}'])
  said = capfd.readouterr().out
  assert 'lose at most 2 points of accuracy' in said
  _, again = said.split('is older; draw it again: python -m launch.classify')
  assert '--path' not in again
  again = json.loads((out / 'adaptive/certificate.json').read_text())
  entry = again['sources']['']
  assert entry['rows'] == ROWS
  assert entry['dataset']['path'] == str(folder / 'new.csv')
  assert entry['epsilon'] == 0.02  # that of the number of its rows

  copied = shutil.copy(folder / 'tickets.csv', folder / 'copied.csv')
  replace = '--config.evals.certificate.replace=true'  # of fewer rows
  evaluate.main([workdir, f'--labelled={copied}', replace])
  told = 'left out: 130 with inputs of the training or calibration'
  assert told in capfd.readouterr().out


def test_results_of_other_settings_are_refused(tmp_path):
  settings = {'data': 'a.csv', 'seed': 0, 'overrides': ['batch_size=8']}
  path = tmp_path / 'classify.json'
  classify.check_settings(path, settings)  # nothing was trained
  path.write_text(json.dumps(settings))
  classify.check_settings(path, settings)
  with pytest.raises(ConfigError, match=r"data: expected 'a\.csv'.*--out"):
    classify.check_settings(path, settings | {'data': 'b.csv'})
  with pytest.raises(ConfigError, match=r'--seed: expected 0.*--out'):
    classify.check_settings(path, settings | {'seed': 1})


@pytest.mark.parametrize(('changed', 'said'), [
  ({'text': 'bodies'}, "--text: expected a column of .*, got 'bodies'"),
  ({'label': 'kind'}, "--label: expected a column of .*, got 'kind'"),
  ({'source': 'team'}, "--source: expected a column of .*, got 'team'"),
])  # fmt: skip
def test_a_mistake_is_told_before_a_training(tmp_path, capsys, changed, said):
  write_rows(tmp_path / 'tickets.csv', 0)
  (tmp_path / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
  columns = {'text': 'body', 'label': 'category'}
  data = {'data': f'{tmp_path}/tickets.csv', **columns}
  flags = classify.Flags(out='out', **data)
  data |= {'variant': 'tiny', 'vocabulary': str(tmp_path)}

  def config(values):
    return f'configs/texts.py:{classify_data.arguments(values)}'

  classify_data.check(flags, config(data), SMALL, tells=True)
  said_of_rows = 'certificate: 30 distinct rows of validation, epsilon=0.1, '
  assert said_of_rows in capsys.readouterr().out
  header, *rows = (tmp_path / 'tickets.csv').read_text().splitlines(True)
  (tmp_path / 'tickets.csv').write_text(''.join([header, *rows, *rows]))
  classify_data.check(flags, config(data), SMALL, tells=True)
  # Copies count once, and not where temperatures are fitted to one.
  assert 'certificate: 25 distinct rows' in capsys.readouterr().out
  write_rows(tmp_path / 'tickets.csv', 0)
  with pytest.raises(ConfigError, match=said):
    classify_data.check(flags, config(data | changed), SMALL)
  with (tmp_path / 'tickets.csv').open('ab') as file:
    file.write(b'1,\xf6,sign in\n' * 3)
  with pytest.raises(TooManyBadRecordsError, match=f'3 of {ROWS + 3} records'):
    classify_data.check(flags, config(data), SMALL, tells=True)


def test_too_few_rows_are_told_before_a_training(tmp_path, capfd):
  (tmp_path / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
  config = f'data={tmp_path}/few.csv,text=body,label=kind,variant=tiny,'
  config = f'configs/texts.py:{config}vocabulary={tmp_path}'
  flags = classify.Flags(data=f'{tmp_path}/few.csv', out='out')
  for rows, is_refused in ((10, True), (20, False)):
    lines = [f'{WORDS[n]},{"ab"[n % 2]}' for n in range(rows)]
    (tmp_path / 'few.csv').write_text('\n'.join(['body,kind', *lines]))
    refused = pytest.raises(InvalidDataError, match='too few rows for temper')
    with refused if is_refused else contextlib.nullcontext():
      classify_data.check(flags, config, SMALL)


def test_ctrl_c_is_for_the_command_which_may_save(capfd):
  code = 'import os, sys, time; os.kill(os.getppid(), 2); time.sleep(0.3)'
  assert classify._run(['-c', f'{code}; print("saved"); sys.exit(130)']) == 130
  said = capfd.readouterr()
  assert said.out.endswith('saved\n')
  assert said.err == 'the same command continues\n'


def test_accuracies_have_exact_intervals():
  summary = {'rows': {'test': 10}, 'accuracy': {'dense': 1.0, 'served': 0.0}}
  found = page.intervals(summary)
  # By hand: p ** 10 = .025.
  low = 0.025**0.1
  assert found['dense'] == pytest.approx((1.0, low, 1.0))
  assert found['served'] == pytest.approx((0.0, 0.0, 1 - low))


def test_the_page_says_what_is_slower_or_better():
  times = {('dense', 1): 6, ('dense', 32): 3, (page.SERVED, 1): 8}
  times[page.SERVED, 32] = 2
  summary = {
    'speed': [
      {'candidate': name, 'batch': batch, 'milliseconds': [time]}
      for (name, batch), time in times.items()
    ],
    'accuracy': {'dense': 0.5, page.SERVED: 0.55, page.BASELINE: 0.6},
    'classes': [{'support': 4}, {'support': 4}],
  }
  found = page.speedup(summary).partition(': ')[2]
  assert found == '0.75x (slower) at batch 1, 1.50x at batch 32.'
  assert page.speedup(summary | {'speed': []}) == ''
  warned = page.warning(summary)
  assert 'right on 50.0% of the test rows, one class for all on 50.0%' in warned
  assert 'better than the served model, 60.0% against 55.0%. Try' in warned
  summary['accuracy'] = {'dense': 0.6, page.SERVED: 0.6, page.BASELINE: 0.6}
  assert page.warning(summary) == ''


def test_a_page_of_equal_rows_has_one_list_that_fits(made, tmp_path):
  row = {'label': 'a', 'answer': 'b', 'confidence': 0.5, 'depth': 2}
  rows = [row | {'text': '😡中' + 'long ' * 99}] * 9
  summary = {'rows': {'test': 9}, 'accuracy': {'dense': 1.0}, 'speed': [],
             'certificate': {}}  # fmt: skip
  kind = classify_data.KINDS['eat']
  page.draw(tmp_path / 'x', kind, summary, '', rows, ['a', 'b'])
  made[0].draw_without_rendering()  # a missing glyph is a warning
  texts = [one.get_text() for one in made[0].subfigs[-1].texts]
  titles = [text.split('\n')[0] for text in texts]
  assert titles == ['All rows take 2 layers; surest first',
                    'Wrong (9 of 9), surest first']  # fmt: skip
  for line in texts[0].split('\n')[1:]:
    assert re.fullmatch(' +2 layers +50%  b .is a.: 😡�(long )+l?o?n?g?…', line)


def test_names_with_commas_are_refused():
  with pytest.raises(ConfigError, match=r'--label.*without commas'):
    classify_data.arguments({'data': 'x.csv', 'label': 'a,b'})


@pytest.mark.parametrize(('tau', 'said'), [
  (0.8, 'early exits lose at most 5 points of accuracy against its own full '
        'depth (threshold 0.8, certified on 60 rows); 75% of these rows leave'),
  (None, 'Nothing is certified on 60 rows, so every row runs to full depth: a '
         'loss of at most 5 points of accuracy with confidence 90% needs at '
         'least 77 rows'),
])  # fmt: skip
def test_what_a_certificate_says(tau, said):
  entry = dict(
    risk='accuracy',
    rows=60,
    epsilon=0.05,
    delta=0.1,
    tau=tau,
    rows_needed=77,
    early=0.75,
  )
  assert said in certificate.words(entry)
  small = entry | dict(epsilon=0.004, delta=0.001, risk='harm')
  assert "at most 0.4% by the risk 'harm'" in certificate.words(small)
  assert 'ith confidence 99.9%' in certificate.words(small)
  mean = certificate.words(entry | dict(method='conformal'))
  assert 'confidence' not in mean
  assert 'n average over draws of such rows' in mean
  facts = certificate.about_rows(dict(unchecked=True, group='user'))
  assert 'training are gone or changed' in facts
  assert 'Rows of one user count as independent' in facts
  assert certificate.words({}) == 'No certificate was made.'
