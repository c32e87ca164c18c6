"""The command that answers lines: reading, order, errors, a whole run."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from launch import command_line, predict
from tests.eat import tiny_run


def test_statistics_are_logged_regularly_and_drift_when_it_turns(capsys):
  class Ticks(threading.Event):
    """Passes three periods and then waits for the end."""

    periods = 3

    def wait(self, timeout=None):
      assert timeout == 60.0
      self.periods -= 1
      if self.periods < 0:
        ended.set()
        return super().wait(10.0)
      return False

  ended, calls = threading.Event(), []
  with predict.regularly(60.0, lambda: calls.append(1), Ticks()):
    assert ended.wait(10.0)
  assert len(calls) == 3
  with predict.regularly(0.0, lambda: calls.append(1)):
    pass
  assert len(calls) == 3
  predict.log_drift(True, {'psi': 0.5})
  predict.log_drift(False, {'psi': 0.0})
  began, over = capsys.readouterr().err.splitlines()
  assert 'every row runs to full depth: {"psi": 0.5}' in began
  assert 'over; rows leave early again: {"psi": 0.0}' in over


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--log_every=-1', 'argument --log_every: invalid number of seconds'),
    ('--log_every=nan', 'argument --log_every: invalid number of seconds'),
    ('--batches=0,1', '--batches: invalid list of positive integers'),
    ('--max_pending=0', '--max_pending: invalid positive integer'),
    ('--max_pending=99999999', '--max_pending: expected an integer in [1, '),
    ('--max_pool_bytes=-1', '--max_pool_bytes: invalid integer of 0 or more'),
    ('--lengths=16;32', '--lengths: invalid list of positive integers'),
    ('--step=last', "--step: invalid step: 'latest', 'best' or a number"),
    ('--serve=tau', '--serve: expected key=value'),
    ('--workdir=/nowhere', '--workdir: expected the directory of a run'),
  ],
)
def test_bad_arguments_are_answered_in_one_line(flag, message, capsys):
  with pytest.raises(SystemExit) as stop:
    predict.main(['--workdir=/nowhere', flag])
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert message in error
  assert len(error.strip().splitlines()) == 1


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return tiny_run.train(tmp_path_factory)


def build_engine(workdir, *flags):
  flags = [f'--workdir={workdir}', '--batches=1', *flags]
  return predict.build_engine(*predict.parse(flags))


@pytest.mark.slow
def test_the_flags_reach_the_engine(workdir, capsys):
  engine = build_engine(
    workdir, '--lengths=12', '--max_pending=7', '--max_pool_bytes=99999',
    '--serve=rule=margin,tau=0.25', '--thresholds=forum=0.5',
  )  # fmt: skip
  with engine:
    assert engine.grid.lengths == (12,)
    assert engine._intake._max_pending == 7
    assert engine._policy.rule.tau == 0.25
    (answer,) = engine.predict([' '.join(['film'] * 14)])
  assert answer.truncated
  cache = workdir / predict.CACHE
  assert any(cache.iterdir())
  assert f'kept in {cache}' in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.nightly
def test_a_workdir_that_cannot_be_written_is_served(workdir, tmp_path, capsys):
  copy = shutil.copytree(workdir, tmp_path / 'copy')
  shutil.rmtree(copy / predict.CACHE, ignore_errors=True)
  (copy / predict.CACHE).touch()  # no directory can be made: root may write
  build_engine(copy, '--lengths=8').close()
  assert 'not kept for the next start' in capsys.readouterr().err


def test_where_compiled_programs_are_kept(tmp_path):
  assert predict.cache_directory('none', str(tmp_path)) == ''
  assert predict.cache_directory('/elsewhere', str(tmp_path)) == '/elsewhere'
  assert not any(tmp_path.iterdir())
  made = str(tmp_path / predict.CACHE)
  assert predict.cache_directory('', str(tmp_path)) == made


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--lengths=8,32', 'lengths: expected numbers of tokens from 1 to 16'),
    ('--thresholds=forum=much', 'serve.thresholds.forum: expected a prob'),
    ('--thresholds=forum=nan', 'serve.thresholds.forum: expected a prob'),
    ('--minimum_retention=forum=2', 'serve.minimum_retention.forum: expected'),
    ('--serve=tauu=1', 'did you mean tau?'),
  ],
)
def test_options_that_do_not_fit_the_run(workdir, capsys, flag, message):
  with pytest.raises(SystemExit) as stop:
    predict.main([f'--workdir={workdir}', flag])
  assert stop.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line


@pytest.mark.slow
def test_train_evaluate_and_predict(tmp_path, repository):
  """Two-stage training, calibration, then answers to a thousand lines."""
  words = [f'w{number}' for number in range(40)]
  vocabulary = tmp_path / 'vocab.txt'
  vocabulary.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *words]))
  draw = random.Random(0)

  def row():
    text = draw.choices(words, k=draw.randrange(3, 20))
    return ' '.join(text) + f'\t{int(text[0] < "w2")}'

  for name, count in (('train', 400), ('dev', 60)):
    lines = ['sentence\tlabel', *(row() for _ in range(count))]
    (tmp_path / f'{name}.tsv').write_text('\n'.join(lines))
  workdir = tmp_path / 'run'

  def run(module, *flags, **options):
    command = [sys.executable, '-m', f'launch.{module}', *flags]
    done = subprocess.run(
      command, cwd=repository, capture_output=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout, done.stderr.decode()

  config = f'configs/eat/glue.py:data={tmp_path},vocabulary={tmp_path},epochs=2'
  sizes = dict(
    width=16, depth=5, mlp_dim=32, num_heads=2, vocab_size=44, max_positions=16
  )
  run(
    'train', f'--config={config}', f'--workdir={workdir}',
    '--config.tensorboard=false', '--config.mesh.data=1',
    '--config.batch_size=16', '--config.dataset.max_length=16',
    '--config.optimizer.lr=3e-3', '--config.dataset.length_buckets=8,16',
    *(f'--config.model.{name}={size}' for name, size in sizes.items()),
  )  # fmt: skip
  result = json.loads((workdir / 'result.json').read_text())
  assert 'dev/accuracy' in result
  assert (workdir / 'calibration.json').is_file()
  # Serving needs neither the data nor the vocabulary.
  for path in (vocabulary, tmp_path / 'train.tsv', tmp_path / 'dev.tsv'):
    path.unlink()
  lines, bad = [], {3, 77, 501}
  for number in range(600):
    text = json.dumps({'text': row().split('\t')[0]}).encode()
    lines.append(b'\xff\x00' if number in bad else text)
  out, log = run(
    'predict', f'--workdir={workdir}', '--batches=1,8', '--serve=tau=0.7',
    input=b'\n'.join(lines) + b'\n',
  )  # fmt: skip
  # The parameters that training calibrated are those of its last checkpoint.
  assert 'warning' not in log
  assert 'tests' in json.loads(log.splitlines()[-1])['drift']
  given = [json.loads(line) for line in out.splitlines()]
  assert [answer['id'] for answer in given] == list(range(1, 601))
  failed = {n for n, answer in enumerate(given) if 'error' in answer}
  assert failed == bad
  good = [answer for answer in given if 'error' not in answer]
  assert {answer['depth'] for answer in good} <= {4, 5}
  assert all(answer['retention'] <= 1 for answer in good)
  _interrupt_while_idle(workdir, repository)


def _interrupt_while_idle(workdir, repository):
  """Ctrl-C ends the command though its input stays open."""
  program = (
    'import signal, sys; from launch import predict; '
    # Ignored where the tests run in the background of a shell.
    'signal.signal(signal.SIGINT, signal.default_int_handler); '
    'sys.exit(predict.main(sys.argv[1:]))'
  )
  flags = [f'--workdir={workdir}', '--batches=1']
  with subprocess.Popen(
    [sys.executable, '-c', program, *flags],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    cwd=repository,
  ) as process:
    try:
      process.stdin.write(b'{"text": "w1"}\n')
      process.stdin.flush()
      assert json.loads(process.stdout.readline())['id'] == 1
      process.send_signal(signal.SIGINT)
      assert process.wait(30.0) == command_line.INTERRUPTED
      assert process.stderr.read().splitlines()[-1] == b'error: interrupted'
    finally:
      process.kill()
