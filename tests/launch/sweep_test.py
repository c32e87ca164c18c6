"""A list of overrides, checked as a whole and trained line by line."""

import csv
import itertools
import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from launch import command_line, config_flags, sweep
from tests.albert_act import tiny_run
from tests.dataset_lib import corpora
from train_lib import config_schema, strict_json

PARITY = 'configs/adatape/parity.py:n=8'
LINES = """\
# learning rates

optimizer.lr=0.001 batch_size=16  # the first
optimizer.lr=1e-4 batch_size=16
\t
optimizer.lr=0.01 'model.pool=a b'
"""


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)


def write(tmp_path, text):
  path = tmp_path / 'list.txt'
  path.write_text(text)
  return path


def flags(tmp_path, text, metric='test/accuracy', config=PARITY, **others):
  return [
    f'--config={config}', f'--overrides={write(tmp_path, text)}',
    f'--workdir={tmp_path}/runs', f'--metric={metric}',
    *(f'--{name}={value}' for name, value in others.items()),
  ]  # fmt: skip


def test_lines_and_comments(tmp_path):
  runs = sweep.read_runs(str(write(tmp_path, LINES)), tmp_path)
  assert [run.number for run in runs] == [3, 4, 6]
  assert runs[0].overrides == ('optimizer.lr=0.001', 'batch_size=16')
  assert runs[2].overrides == ('optimizer.lr=0.01', 'model.pool=a b')
  assert runs[1].name == 'optimizer.lr=1e-4 batch_size=16'


def test_directories_are_readable_and_their_own(tmp_path):
  runs = sweep.read_runs(str(write(tmp_path, LINES)), tmp_path)
  names = [run.workdir.name for run in runs]
  assert names[0].startswith('lr=0.001,batch_size=16-')
  assert names[2].startswith('lr=0.01,pool=a_b-')
  assert len(set(names)) == 3
  assert {run.workdir.parent for run in runs} == {tmp_path}
  # Names that are cut or replaced alike are told apart all the same.
  assert sweep.directory(['a.x=1']) != sweep.directory(['b.x=1'])
  assert sweep.directory(['x=a/b']) != sweep.directory(['x=a b'])
  long = [sweep.directory([f'x={"y" * 300}{n}']) for n in range(2)]
  assert long[0] != long[1]
  assert max(map(len, long)) < 100
  assert '/' not in sweep.directory(['warm_start.workdir=/tmp/../x'])


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('batch_size=8\n\noptimizer.lrr=1', ['line 3', 'optimizer.lrr', "'lr'"]),
    ('batch_size=8\noptimizer.lr=fast', ['line 2', 'float', 'fast']),
    ('batch_size=0', ['line 1', 'batch_size', '[1, ']),
    ('batch_size', ['line 1', 'batch_size=value']),
    ('batch_size=8\n"batch', ['line 2', 'quotation']),
    ('batch_size=8 seed=1\nseed=2\nseed=1 batch_size=8',
     ['line 3', 'another run than in line 1']),
    ('optimizer.lr=1e-3\noptimizer.lr=0.001', ['line 2', 'line 1']),
    ('# nothing\n\n', ['--overrides', 'at least one line']),
  ],
)  # fmt: skip
def test_a_wrong_line_is_named_before_anything_runs(
  text, words, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(sweep, 'train', None)
  with pytest.raises(SystemExit) as stop:
    sweep.main(flags(tmp_path, text))
  assert_refused(stop, capsys, words, tmp_path)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    (dict(metric='dev/accuracy'), ['--metric', "['test']", 'dev/accuracy']),
    (dict(metric='accuracy'), ['--metric', 'EVAL/METRIC', "'accuracy'"]),
    (dict(metric='test'), ['--metric', 'EVAL/METRIC', "'test'"]),
    (dict(config='nowhere.py'), ['line 1', '--config', 'nowhere.py']),
    (dict(mode='least'), ['--mode', 'min', 'least']),
    (dict(metrc='x'), ['--metrc', '--metric']),
  ],
)
def test_bad_command_lines_are_answered_in_one_line(
  changes, words, tmp_path, capsys
):
  with pytest.raises(SystemExit) as stop:
    sweep.main(flags(tmp_path, 'batch_size=8', **changes))
  assert_refused(stop, capsys, words, tmp_path)


@pytest.mark.parametrize('content', [None, b'batch_size=\xff'])
def test_a_list_that_cannot_be_read(content, tmp_path, capsys):
  given = flags(tmp_path, '')
  (tmp_path / 'list.txt').unlink()
  if content:
    (tmp_path / 'list.txt').write_bytes(content)
  with pytest.raises(SystemExit) as stop:
    sweep.main(given)
  assert_refused(stop, capsys, ['--overrides'], tmp_path)


def assert_refused(stop, capsys, words, tmp_path):
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  for word in words:
    assert word in error
  assert not (tmp_path / 'runs').exists()


@pytest.fixture
def trained(monkeypatch):
  """Trainings that end at once; by learning rate what they give."""
  calls, outcomes = [], {}

  def train(command):
    fields = dict(item.split('=', 1) for item in command[3:])
    rate = fields['--config.optimizer.lr']
    calls.append(rate)
    outcome = outcomes.get(rate, {'test/accuracy': float(rate)})
    if isinstance(outcome, int):
      return outcome
    workdir = pathlib.Path(fields['--workdir'])
    workdir.mkdir(parents=True)
    overrides = [
      f'{key.removeprefix("--config.")}={value}'
      for key, value in fields.items()
      if key.startswith('--config.')
    ]
    config = config_flags.load_config(fields['--config'], overrides)
    strict_json.write(workdir / 'config.json', config.to_dict())
    strict_json.write(workdir / 'result.json', outcome)
    return 0

  monkeypatch.setattr(sweep, 'train', train)
  return calls, outcomes


RATES = 'optimizer.lr=0.01\noptimizer.lr=0.03\noptimizer.lr=0.02\n'


def table(tmp_path):
  with (tmp_path / 'runs' / 'sweep.csv').open(newline='') as file:
    return [(row['run'][13:], row['test/accuracy'], row['workdir'])
            for row in csv.DictReader(file)]  # fmt: skip


def test_the_command_of_a_run():
  run = sweep.Run(1, ('a=1', 'b.c=x y'), pathlib.Path('/tmp/w'))
  assert sweep.train_command('c.py:n=8', run)[1:] == [
    '-m', 'launch.train', '--config=c.py:n=8', '--workdir=/tmp/w',
    '--config.a=1', '--config.b.c=x y',
  ]  # fmt: skip


@pytest.mark.parametrize(
  ('mode', 'order'),
  [('max', ['0.03', '0.02', '0.01']), ('min', ['0.01', '0.02', '0.03'])],
)
def test_the_table_is_ordered(mode, order, tmp_path, trained, capsys):
  assert sweep.main(flags(tmp_path, RATES, mode=mode)) == 0
  assert trained[0] == ['0.01', '0.03', '0.02']
  rows = table(tmp_path)
  assert [row[0] for row in rows] == [row[1] for row in rows] == order
  for rate, _, workdir in rows:
    result = strict_json.loads(
      (pathlib.Path(workdir) / 'result.json').read_text()
    )
    assert result == {'test/accuracy': float(rate)}
  printed = capsys.readouterr().out
  assert '[2/3] optimizer.lr=0.03' in printed
  places = [printed.rindex(f'optimizer.lr={rate}') for rate in order]
  assert places == sorted(places)


def test_a_run_that_fails_is_named_and_the_others_go_on(
  tmp_path, trained, capsys
):
  calls, outcomes = trained
  outcomes.update({'0.01': command_line.NOT_FINITE, '0.03': 137})
  assert sweep.main(flags(tmp_path, RATES)) == command_line.NOT_FINITE
  assert calls == ['0.01', '0.03', '0.02']
  error = capsys.readouterr().err.splitlines()
  assert error == ['exit code 3: optimizer.lr=0.01',
                   'exit code 137: optimizer.lr=0.03']  # fmt: skip
  assert [row[:2] for row in table(tmp_path)] == [
    ('0.02', '0.02'), ('0.01', ''), ('0.03', '')
  ]  # fmt: skip
  # The same command skips what has finished.
  calls.clear()
  outcomes.clear()
  assert sweep.main(flags(tmp_path, RATES)) == 0
  assert calls == ['0.01', '0.03']
  assert '[3/3] finished before: optimizer.lr=0.02' in capsys.readouterr().out
  assert [row[0] for row in table(tmp_path)] == ['0.03', '0.02', '0.01']


def test_all_failed(tmp_path, trained):
  trained[1].update({'0.01': 4, '0.03': 4, '0.02': 4})
  assert sweep.main(flags(tmp_path, RATES)) == 4
  assert [row[1] for row in table(tmp_path)] == ['', '', '']


@pytest.mark.parametrize(
  'code', [command_line.PREEMPTED, command_line.INTERRUPTED]
)
def test_a_run_that_was_stopped_stops_the_others(
  code, tmp_path, trained, capsys
):
  calls, outcomes = trained
  outcomes['0.03'] = code
  assert sweep.main(flags(tmp_path, RATES)) == command_line.PREEMPTED
  assert calls == ['0.01', '0.03']
  assert 'the same command goes on' in capsys.readouterr().err
  assert not (tmp_path / 'runs' / 'sweep.csv').exists()


def test_what_has_finished_with_another_configuration_is_not_taken(
  tmp_path, trained, capsys
):
  assert sweep.main(flags(tmp_path, RATES)) == 0
  capsys.readouterr()
  other = flags(tmp_path, RATES, config='configs/adatape/parity.py:n=10')
  with pytest.raises(SystemExit) as stop:
    sweep.main(other)
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  for word in ('line 1', 'dataset.length: saved 8, given 10', '--workdir'):
    assert word in error
  assert len(trained[0]) == 3


def test_a_metric_that_no_run_has_is_named(tmp_path, trained, capsys):
  with pytest.raises(SystemExit) as stop:
    sweep.main(flags(tmp_path, RATES, metric='test/acuracy'))
  assert stop.value.code == command_line.USAGE
  (error,) = capsys.readouterr().err.splitlines()
  assert '--metric: expected one of test/accuracy, got' in error
  # It is seen after the first run, which is not lost.
  (first,) = trained[0]
  trained[0].clear()
  assert sweep.main(flags(tmp_path, RATES)) == 0
  assert len(trained[0]) == 2
  assert first not in trained[0]


def test_numbers_that_are_not_finite_come_last(tmp_path, trained):
  trained[1]['0.03'] = {'test/accuracy': float('nan')}
  assert sweep.main(flags(tmp_path, RATES)) == 0
  assert [row[:2] for row in table(tmp_path)][2] == ('0.03', '')


CHILD = """
import pathlib, signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGINT):
  signal.signal(number, lambda number, frame: got.append(number))
pathlib.Path(sys.argv[1], 'ready').touch()
while not got:
  time.sleep(0.01)
time.sleep(0.3)
pathlib.Path(sys.argv[1], 'got').write_text(' '.join(str(int(n)) for n in got))
sys.exit(0)
"""


@pytest.mark.parametrize('number', sweep.SIGNALS)
def test_a_signal_reaches_the_training_once(number, tmp_path):
  def ask():
    while not (tmp_path / 'ready').exists():
      time.sleep(0.01)
    os.kill(os.getpid(), number)

  handlers = [signal.getsignal(one) for one in sweep.SIGNALS]
  thread = threading.Thread(target=ask)
  thread.start()
  code = sweep.train([sys.executable, '-c', CHILD, str(tmp_path)])
  thread.join()
  # Asked to stop, even if it came too late for this one.
  assert code == command_line.PREEMPTED
  assert (tmp_path / 'got').read_text() == str(int(number))
  assert [signal.getsignal(one) for one in sweep.SIGNALS] == handlers


@pytest.mark.parametrize(
  ('program', 'code'),
  [
    ('import sys; sys.exit(3)', 3),
    ('pass', 0),
    ('import os; os.kill(os.getpid(), 9)', 137),
  ],
)
def test_exit_codes_are_those_of_a_shell(program, code):
  assert sweep.train([sys.executable, '-c', program]) == code


@pytest.mark.parametrize(
  ('file', 'list_of', 'rates', 'batches', 'epochs'),
  [
    ('glue.py:task=rte', 'grid', (5e-5, 3e-5, 2e-5), (16, 32), (2, 3, 4)),
    ('probing.py:task=past_present', 'grid_probing', (5e-5,), (32,),
     (1, 2, 3, 4, 5)),
  ],
)  # fmt: skip
def test_the_grids_of_the_paper(
  tmp_path, file, list_of, rates, batches, epochs
):
  start = tiny_run.bare(tmp_path / 'run', corpora.tokenizer(tmp_path / 'words'))
  config = f'configs/albert_act/{file},data=D,checkpoint={start}'
  _, runs = sweep.parse(
    [f'--config={config}', f'--overrides=configs/albert_act/{list_of}.txt',
     f'--workdir={tmp_path}/runs', '--metric=dev/accuracy']
  )  # fmt: skip
  found = set()
  for run in runs:
    loaded = config_flags.load_config(config, run.overrides)
    config_schema.validate(loaded)
    (stage,) = loaded.stages.values()
    found.add((loaded.optimizer.lr, loaded.batch_size, stage.epochs))
  assert len(runs) == len(found)
  assert found == set(itertools.product(rates, batches, epochs))
