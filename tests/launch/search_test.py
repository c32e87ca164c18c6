"""Ranges of fields, searched by trials that continue where they stopped."""

import concurrent.futures
import logging
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

from core import files
from core.errors import ConfigError, InvalidDataError

optuna = pytest.importorskip('optuna')
pytestmark = pytest.mark.filterwarnings('ignore:Heartbeat of storage')
from launch import command_line, search, sweep, sweep_runs  # noqa: E402
from tests import shell  # noqa: E402
from tests.launch.refused import TABLE  # noqa: E402
from train_lib import run_directory  # noqa: E402

PARITY = 'configs/adatape/parity.py:n=8'
LR = '--vary=optimizer.lr=log(1e-4,1e-2)'
DEPTH = '--vary=model.depth=int(1,3)'
OPTIMIZER = '--vary=optimizer.name=choice(adam,adamw)'

# A training that takes no time: its metric is its learning rate.
HEAD = """
import json, os, pathlib, signal, sys, time
workdir, given = pathlib.Path(sys.argv[1]), dict(
  item.split('=') for item in sys.argv[2:])
with open(workdir / 'starts', 'a') as file: file.write(f'{os.getpid()}\\n')
lr = float(given.get('optimizer.lr', 0.001))
def end(**metrics):
  path = workdir / 'new.json'
  path.write_text(json.dumps({'test/accuracy': lr, 'seconds': 1.0, **metrics}))
  path.rename(workdir / 'result.json')
"""


@pytest.fixture
def child(monkeypatch):
  """Sets the code of a training, which follows `HEAD`."""
  monkeypatch.setattr(search, 'POLL_SECONDS', 0.05)

  def change(code):
    def command(run):
      return ['-c', HEAD + code, str(run.workdir), *run.overrides]

    monkeypatch.setattr(sweep_runs.Run, 'command', command)

  change('end()')
  return change


def flags(tmp_path, *more):
  return [
    f'--workdir={tmp_path}/runs', f'--config={PARITY}',
    '--metric=test/accuracy', *more,
  ]  # fmt: skip


def table(tmp_path):
  return shell.table(tmp_path / 'runs' / 'sweep.csv')


def states(tmp_path, column='trial'):
  return {row[column]: row['state'] for row in table(tmp_path)}


@pytest.mark.parametrize(
  ('text', 'kind', 'values'),
  [
    ('a.b=log(1e-4, 1e-2)', 'log', (1e-4, 1e-2)),
    ('a=int(2,6)', 'int', (2, 6)),
    ('a=choice(3e-4, 1e-3)', 'choice', ('3e-4', '1e-3')),
    ('a=choice(a b:c,Ti/16)', 'choice', ('a b:c', 'Ti/16')),
    ('a=choice((1,2),True)', 'choice', ('(1,2)', 'True')),
  ],
)
def test_a_range_is_read(text, kind, values):
  assert search.parse_range(text) == (text.partition('=')[0], (kind, values))


@pytest.mark.parametrize(('given', 'words'), TABLE['search flags'])
def test_a_wrong_flag_is_refused_before_the_first_trial(
  given, words, tmp_path, refused, child
):
  child('1 / 0')
  given = given.format(lr=LR).split()
  refused(sweep.main, flags(tmp_path, '--trials=2', *given), words)
  assert not list(tmp_path.glob('runs/trial_*'))


@pytest.mark.parametrize(('mode', 'workers'), [('max', 1), ('min', 2)])
def test_the_table_the_picture_and_the_best(
  mode, workers, tmp_path, child, made, capsys
):
  given = flags(tmp_path, LR, DEPTH, OPTIMIZER, '--trials=6', f'--mode={mode}')
  given += [f'--workers={workers}', '--config.batch_size=64']
  assert sweep.main(given) == 0
  rows = table(tmp_path)
  rates = [float(row['test/accuracy']) for row in rows]
  assert rates == sorted({*rates}, reverse=mode == 'max')
  assert all(1e-4 <= rate <= 1e-2 for rate in rates)
  assert states(tmp_path) == dict.fromkeys('012345', 'complete')
  assert all(row['test/accuracy'] == row['optimizer.lr'] for row in rows)
  best = files.read_object(tmp_path / 'runs' / 'best.json')
  assert best['config']['optimizer']['lr'] == rates[0]
  assert best['config']['batch_size'] == 64
  assert f'optimizer.lr={rates[0]}' in shlex.split(best['command'])
  names = [axes.get_xlabel() for axes in made[-1].axes]
  assert names == ['trial', 'optimizer.lr', 'model.depth', 'optimizer.name']
  # The same command has nothing left to do; one more trial can be added.
  capsys.readouterr()
  assert sweep.main(given) == 0
  assert 'complete: ' not in capsys.readouterr().out
  assert sweep.main([*given, '--trials=7']) == 0
  assert '[7/7] complete: ' in capsys.readouterr().out
  if workers == 1:  # the same seed, the same values
    assert sweep.main([*given, f'--workdir={tmp_path}/runs/again']) == 0
    again = files.read_object(tmp_path / 'runs/again/best.json')
    assert again['test/accuracy'] == rates[0]


def test_workers_ask_for_no_more_trials_than_are_left(tmp_path, child):
  given = flags(tmp_path, LR, '--trials=2', '--workers=4')
  assert sweep.main(given) == 0
  study = search._open(sweep.main.parse(given))
  assert [one.state.name for one in study.trials] == ['COMPLETE'] * 2


@pytest.mark.parametrize('most', [6, 5])
def test_a_grid_has_every_combination(tmp_path, child, most):
  seeds = [f'--vary=seed=int(0,{10**9})', '--trials=5'] if most == 5 else []
  given = flags(tmp_path, DEPTH, OPTIMIZER, '--sampler=grid', '--workers=3')
  assert sweep.main([*given, *seeds]) == 0
  names = {(r['model.depth'], r['optimizer.name']) for r in table(tmp_path)}
  every = {(d, n) for d in '123' for n in ('adam', 'adamw')}
  assert names == ({('1', 'adam')} if seeds else every)
  assert len(table(tmp_path)) == most


def test_failed_trials_have_a_reason(
  tmp_path, child, refused, caplog, monkeypatch
):
  monkeypatch.setattr(logging.getLogger('optuna'), 'propagate', True)
  child("""
depth = given['model.depth']
if depth == '1': sys.exit('error: this depth is illegal')
end(**{'test/accuracy': 'NaN' if depth == '2' else 0.5})
""")
  given = flags(tmp_path, DEPTH, '--sampler=grid')
  assert sweep.main(given) == 0
  shown = states(tmp_path, 'model.depth')
  assert shown['1'].endswith('exit code 1: error: this depth is illegal')
  assert shown['2'] == 'fail test/accuracy is NaN'
  assert shown['3'] == 'complete'
  assert optuna.logging.get_verbosity() == optuna.logging.WARNING
  assert 'optuna' not in caplog.text
  child('sys.exit(3)')
  given[0] += '/2'
  refused(sweep.main, given, ['no trial has finished', 'train.log'])


def test_a_metric_that_no_trial_has(tmp_path, child, refused):
  given = flags(tmp_path, LR, '--trials=3', '--metric=test/acuracy')
  refused(sweep.main, given, ['--metric', 'test/accuracy', "'test/acuracy'"])
  assert len([*tmp_path.glob('runs/trial_*')]) == 1


def test_a_bad_trial_is_pruned(tmp_path, child):
  child("""
rank = int(workdir.name[6:])
with open(workdir / 'metrics.jsonl', 'a') as file:
  for step in (1, 2, 3):
    row = {'step': step, 'test/accuracy': 0.1 if rank == 4 else 0.5 + rank}
    file.write(json.dumps(row) + '\\n')
if rank == 4:
  time.sleep(60)
time.sleep(0.5)
end()
""")
  assert sweep.main(flags(tmp_path, LR, '--trials=6', '--prune')) == 0
  shown = states(tmp_path)
  assert shown.pop('4') == 'pruned worse than the median'
  assert {*shown.values()} == {'complete'}


def test_another_search_in_the_workdir_is_refused(tmp_path, child, refused):
  refused(sweep.main, flags(tmp_path, LR), ['--trials', 'only a grid'])
  given = flags(tmp_path, LR, '--trials=1')
  assert sweep.main(given) == 0
  refused(sweep.main, [*given, '--mode=min'], ['mode'])
  refused(sweep.main, [*given, '--config.seed=1'], ['--fixed', 'workdir'])


def opened(tmp_path, **others):
  given = dict(
    config='a', workdir=str(tmp_path), metric='a/b', vary=('x=int(1,2)',)
  )
  return search._open(sweep_runs.Flags(**given | others))


# Optuna leaves the connection to a file that is no database open.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('damage', [b'SQLite format', b'{"op": 1}\n' * 999])
def test_a_damaged_study_is_refused(tmp_path, damage):
  opened(tmp_path).ask()
  path = tmp_path / 'search.db'
  path.write_bytes(damage)
  with pytest.raises(command_line.UsageError, match=f'study in {path}'):
    opened(tmp_path)


@pytest.mark.parametrize(
  'put',
  [os.mkfifo, pathlib.Path.mkdir, lambda path: path.symlink_to('elsewhere')],
)
def test_a_study_that_is_no_file_is_refused(tmp_path, put):
  put(tmp_path / 'search.db')
  with pytest.raises(InvalidDataError, match='not a regular file'):
    opened(tmp_path)
  assert not (tmp_path / 'elsewhere').exists()


def test_processes_begin_a_study_at_once(tmp_path):
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    studies = [pool.submit(opened, tmp_path) for _ in range(8)]
    numbers = [study.result().ask().number for study in studies]
  assert sorted(numbers) == [*range(8)]


@pytest.mark.parametrize('beats', [True, False])
def test_a_trial_without_heartbeats_is_tried_again(
  tmp_path, child, beats, monkeypatch
):
  """Its process was killed, also before its first heartbeat."""
  monkeypatch.setattr(search, 'SILENT_SECONDS', 2)
  given = flags(tmp_path, LR, '--trials=2')
  study = search._open(sweep.main.parse(given))
  trial = study.ask()
  if beats:
    study._storage.record_heartbeat(trial._trial_id)
    for name, value in (('place', 0), ('begun', 0)):
      trial.set_user_attr(name, value)
  assert sweep.main(given) == 0
  assert states(tmp_path) == dict.fromkeys('01', 'complete')
  assert [one.state.name for one in study.trials].count('FAIL') == 1


def test_a_stopped_search_continues(tmp_path, child, capsys):
  child("""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
""")
  given = flags(tmp_path, LR, '--trials=2')
  assert sweep.main(given) == command_line.PREEMPTED
  assert 'the same command continues' in capsys.readouterr().err
  # A training of a sweep that was killed holds the directory for a while.
  child("""
if len((workdir / 'starts').read_text().split()) < 4: sys.exit(5)
end()
""")
  assert sweep.main(given) == 0
  starts = tmp_path / 'runs' / 'trial_0' / 'starts'
  assert len(starts.read_text().split()) == 4
  assert states(tmp_path) == dict.fromkeys('01', 'complete')


@pytest.mark.parametrize(
  ('variable', 'shares'),
  [('CUDA_VISIBLE_DEVICES', ['0,2', '1']), ('TPU_VISIBLE_CHIPS', ['0', '1'])],
)
def test_workers_share_the_devices(variable, shares, monkeypatch):
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
  monkeypatch.setenv(variable, '0,1,2')
  assert [sweep_runs.devices(n, 2)[0][variable] for n in (0, 1)] == shares
  assert sweep_runs.devices(0, 1)[0][variable] == '0,1,2'
  with pytest.raises(ConfigError, match='--workers'):
    sweep_runs.devices(3, 4)


@pytest.mark.nightly
def test_a_killed_search_ends_with_all_trials(tmp_path):
  given = flags(
    tmp_path, LR, '--trials=2', '--config.phases.0.steps=400',
    '--config.checkpoint.every_steps=20', '--config.model.width=16',
    '--config.batch_size=8', '--config.log_every=20',
  )  # fmt: skip
  command = [sys.executable, '-m', 'launch.sweep', *given]
  first = tmp_path / 'runs' / 'trial_0'
  environment = os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'}
  with subprocess.Popen(command, env=environment) as process:
    while not run_directory.steps_in(first / 'checkpoints'):
      assert process.poll() is None
      time.sleep(0.05)
    process.kill()
  holder = files.read_object(first / 'run.lock')  # still at work
  os.kill(int(holder['pid']), signal.SIGKILL)
  assert not (first / 'result.json').exists()
  subprocess.run(command, check=True, env=environment)
  assert states(tmp_path) == dict.fromkeys('01', 'complete')
  assert 'continues at step' in (first / 'train.log').read_text()
  assert (tmp_path / 'runs' / 'sweep.png').exists()
