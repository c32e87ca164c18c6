"""A list of overrides, checked as a whole and trained line by line."""

import itertools
import os
import pathlib
import signal
import threading
import time

import numpy as np
import pytest

from launch import command_line, sweep
from launch.sweep_runs import Run
from tests import shell
from tests.albert_act import tiny_run
from tests.dataset_lib import corpora
from tests.launch.refused import TABLE

SIGNALS = signal.SIGTERM, signal.SIGINT
PARITY = 'configs/adatape/parity.py:n=8'
RATES = 'optimizer.lr=0.01\noptimizer.lr=0.03\noptimizer.lr=0.02\n'


def flags(tmp_path, text, metric='test/accuracy', config=PARITY, **others):
  path = tmp_path / 'list.txt'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return [
    f'--config={config}', f'--overrides={path}', f'--workdir={tmp_path}/runs',
    f'--metric={metric}', *(f'--{name}={v}' for name, v in others.items()),
  ]  # fmt: skip


def read_runs(given):
  return sweep.read_runs(sweep.main.parse(given))


def test_lines_and_their_directories(tmp_path):
  lines = (
    '# learning rates\n\noptimizer.lr=0.001 batch_size=16  # the first\n'
    'optimizer.lr=1e-4 batch_size=16\n\t\n'
    "optimizer.lr=0.01 'checkpoint.best_metric=test/a b'\n"
    f'checkpoint.best_metric=test/../{"y" * 300}'
  )
  runs = read_runs(flags(tmp_path, lines))
  assert [run.name for run in runs[:3]] == [
    'optimizer.lr=0.001 batch_size=16', 'optimizer.lr=1e-4 batch_size=16',
    'optimizer.lr=0.01 checkpoint.best_metric=test/a b',
  ]  # fmt: skip
  assert runs[2].overrides[1] == 'checkpoint.best_metric=test/a b'
  assert {run.workdir.parent for run in runs} == {tmp_path / 'runs'}
  names = [run.workdir.name for run in runs]
  assert names[0].startswith('lr=0.001,batch_size=16-')
  assert names[2].startswith('lr=0.01,best_metric=test_a_b-')
  assert max(map(len, names)) < 100
  # Another configuration is another run.
  other = flags(tmp_path, lines, config='configs/adatape/parity.py:n=10')
  names += [run.workdir.name for run in read_runs(other)]
  assert len(set(names)) == 8


@pytest.mark.parametrize(
  ('text', 'more', 'words'),
  [
    *((text, '', words) for text, words in TABLE['sweep lines']),
    *(('batch_size=8', more, words) for more, words in TABLE['sweep flags']),
  ],
)
def test_a_wrong_line_or_flag_is_named_before_anything_runs(
  text, more, words, tmp_path, refused, trained
):
  text = text.encode().decode('unicode_escape').encode('latin-1')
  given = [*flags(tmp_path, text), *more.split()]
  refused(sweep.main, given, words)
  assert not trained.runs
  assert not (tmp_path / 'runs').exists()


def table(tmp_path):
  rows = shell.table(tmp_path / 'runs' / 'sweep.csv')
  for row in rows:
    assert pathlib.Path(row['workdir']).parent == tmp_path / 'runs'
  return [(row['run'][13:], row['test/accuracy']) for row in rows]


@pytest.mark.parametrize(
  ('mode', 'order'),
  [('max', ['0.03', '0.02', '0.01']), ('min', ['0.01', '0.02', '0.03'])],
)
def test_the_table_is_ordered(mode, order, tmp_path, trained, capsys):
  assert sweep.main(flags(tmp_path, RATES, mode=mode)) == 0
  assert trained.names() == ['0.01', '0.03', '0.02']
  assert table(tmp_path) == [(rate, rate) for rate in order]
  printed = capsys.readouterr().out
  assert '[2/3] optimizer.lr=0.03' in printed
  places = [printed.rindex(f'optimizer.lr={rate}') for rate in order]
  assert places == sorted(places)


def test_a_run_that_fails_is_named_and_the_others_go_on(
  tmp_path, trained, capsys
):
  trained.outcomes.update({'0.01': command_line.NOT_FINITE, '0.03': 137})
  assert sweep.main(flags(tmp_path, RATES)) == command_line.NOT_FINITE
  assert trained.names() == ['0.01', '0.03', '0.02']
  error = capsys.readouterr().err.splitlines()
  assert error == ['exit code 3: optimizer.lr=0.01',
                   'exit code 137: optimizer.lr=0.03']  # fmt: skip
  assert table(tmp_path) == [('0.02', '0.02'), ('0.01', ''), ('0.03', '')]
  # The same command skips what has finished.
  trained.outcomes.clear()
  assert sweep.main(flags(tmp_path, RATES)) == 0
  assert trained.names()[3:] == ['0.01', '0.03']
  assert '[3/3] finished before: optimizer.lr=0.02' in capsys.readouterr().out
  assert [row[0] for row in table(tmp_path)] == ['0.03', '0.02', '0.01']


@pytest.mark.parametrize('code', [75, 130])
def test_a_run_that_was_stopped_stops_the_others(
  code, tmp_path, trained, capsys
):
  trained.outcomes['0.03'] = code
  assert sweep.main(flags(tmp_path, RATES)) == command_line.PREEMPTED
  assert trained.names() == ['0.01', '0.03']
  assert 'the same command continues' in capsys.readouterr().err
  assert not (tmp_path / 'runs' / 'sweep.csv').exists()


def test_a_metric_that_no_run_has_is_named(tmp_path, trained, refused):
  expected = '--metric: expected one of test/accuracy, got'
  refused(sweep.main, flags(tmp_path, RATES, 'test/acuracy'), [expected])
  # It is seen after the first run, which is not lost.
  assert trained.names() == ['0.01']
  trained.outcomes['0.03'] = {'test/accuracy': float('nan')}
  assert sweep.main(flags(tmp_path, RATES)) == 0
  assert trained.names() == ['0.01', '0.03', '0.02']
  assert table(tmp_path)[2] == ('0.03', '')


def test_arguments_of_the_file_and_the_picture(tmp_path, trained, made, capsys):
  file, lines = 'configs/adatape/parity.py', {
    ':n=8 seed=0': 0.8, ':n=8 seed=1': 0.9, ':n=8 :model=ut seed=0': 0.5,
    ':n=4 seed=2': 0.6,
  }  # fmt: skip
  for line, value in lines.items():
    trained.outcomes[line] = {'test/accuracy': value, 'few/5shot': 0.2, 's': 9}
  options = dict(x='dataset.length', names='ParityModel=AdaTape')
  given = flags(tmp_path, '\n'.join(lines), config=file, **options)
  assert sweep.main(given) == 0
  arguments = [run.config.removeprefix(file) for run in trained.runs]
  assert arguments == [':n=8', ':n=8', ':n=8,model=ut', ':n=4']
  assert [run.workdir.name[:-9] for run in trained.runs] == [
    'n=8,seed=0', 'n=8,seed=1', 'n=8,model=ut,seed=0', 'n=4,seed=2'
  ]  # fmt: skip
  [axes] = made[-1].axes
  lines = {line.get_label(): line for line in axes.get_lines()}
  adatape, universal = lines['AdaTape'], lines['UniversalTransformer']
  assert adatape.get_xdata().tolist() == [4, 8]
  np.testing.assert_allclose(adatape.get_ydata(), [60.0, 85.0])
  assert universal.get_xydata().tolist() == [[8, 50.0]]
  assert axes.get_xlabel() == 'dataset.length'
  assert axes.get_ylabel() == 'test/accuracy (%)'
  # All metrics are in the table, and nothing else.
  text = (tmp_path / 'runs' / 'sweep.csv').read_text()
  assert text.startswith('run,test/accuracy,workdir,few/5shot\n')
  assert f'picture: {tmp_path}/runs/sweep.png' in capsys.readouterr().out


CHILD = """
import pathlib, signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGINT):
  signal.signal(number, lambda number, frame: got.append(int(number)))
pathlib.Path(sys.argv[1], 'ready').touch()
while not got:
  time.sleep(0.01)
time.sleep(0.3)
pathlib.Path(sys.argv[1], 'got').write_text(str(got))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
  """A run whose training is the code of its name."""
  monkeypatch.setattr(Run, 'command', lambda run: [
    '-c', f'import os, sys; {run.name}', str(tmp_path)
  ])  # fmt: skip
  return Run(CHILD, '', [], tmp_path)


@pytest.mark.parametrize('number', SIGNALS)
def test_a_signal_reaches_the_training_once(number, run):
  def ask():
    while not (run.workdir / 'ready').exists():
      time.sleep(0.01)
    os.kill(os.getpid(), number)

  handlers = [signal.getsignal(one) for one in SIGNALS]
  thread = threading.Thread(target=ask)
  thread.start()
  code = sweep.train(run)
  thread.join()
  # Asked to stop, even if it came too late for this one.
  assert code == command_line.PREEMPTED
  assert (run.workdir / 'got').read_text() == str([int(number)])
  assert [signal.getsignal(one) for one in SIGNALS] == handlers


@pytest.mark.parametrize(
  ('end', 'code'),
  [('sys.exit(3)', 3), ('0', 0), ('os.kill(os.getpid(), 9)', 137)],
)
def test_exit_codes_are_those_of_a_shell(end, code, run):
  assert sweep.train(run._replace(name=end)) == code


@pytest.mark.parametrize(
  ('file', 'grid', 'rates', 'batches', 'epochs'),
  [
    ('glue.py:task=rte', 'grid', (5e-5, 3e-5, 2e-5), (16, 32), (2, 3, 4)),
    ('probing.py:task=past_present', 'grid_probing', (5e-5,), (32,),
     (1, 2, 3, 4, 5)),
  ],
)  # fmt: skip
def test_the_grids_of_the_paper(tmp_path, file, grid, rates, batches, epochs):
  start = tiny_run.bare(tmp_path / 'run', corpora.tokenizer(tmp_path / 'words'))
  flag = f'configs/albert_act/{file},data=D,checkpoint={start}'
  text = pathlib.Path(f'configs/albert_act/{grid}.txt').read_text()
  runs = read_runs(flags(tmp_path, text, 'dev/accuracy', flag))
  found = set()
  for run in runs:
    config = command_line.load_config(flag, run.overrides)
    (phase,) = config.phases
    found.add((config.optimizer.lr, config.batch_size, phase.epochs))
  assert len(runs) == len(found)
  assert found == set(itertools.product(rates, batches, epochs))
