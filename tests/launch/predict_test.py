"""The command that answers lines: reading, order, errors, a whole run."""

import io
import json
import random
import signal
import subprocess
import sys
import threading

import pytest

from eat.policy import Prediction
from launch import command_line, predict
from serve_lib.chain import Failure, InputError


class Echo:
  """An engine whose answer is the item's text."""

  def stream(self, items):
    for item in items:
      if isinstance(item, InputError):
        yield Failure(item, 'encode')
      else:
        text = item if isinstance(item, str) else item['text']
        yield Prediction(text, {'a': 1.0}, 4, 0.5, 'confidence', False)


def answers(data, engine=None):
  written = []
  lines = predict.read_lines(io.BytesIO(data))
  predict.answer_all(engine or Echo(), lines, written.append)
  return [json.loads(line) for line in written]


def test_answers_are_in_order_with_the_ids_of_the_lines():
  lines = b'{"id": "x", "text": "one"}\n"two"\n{"text": "three"}'
  assert [(a['id'], a['label']) for a in answers(lines)] == [
    ('x', 'one'), (2, 'two'), (3, 'three'),
  ]  # fmt: skip


@pytest.mark.parametrize(
  'bad',
  [
    b'',
    b'{',
    b'\xff\xfe',
    b'[' * 100_000,
    b'nonsense',
    b'{"id": 1e999, "text": "b"}',
    b'{"id": NaN, "text": "b"}',
    b'{"id": 7, "text": "b", "source": -Infinity}',
    b'{"id": ' + b'9' * 5000 + b', "text": "b"}',
    b'-1e400',
  ],
)
def test_a_bad_line_is_answered_by_its_error(bad):
  first, wrong, last = answers(b'"one"\n' + bad + b'\n"two"\n')
  assert (first['label'], last['label']) == ('one', 'two')
  assert wrong['id'] == 2
  assert 'expected one JSON value in UTF-8' in wrong['error']


@pytest.mark.parametrize('depth', [1, 100, 900])
def test_an_id_is_a_text_or_a_number(depth):
  nested = b'[' * depth + b']' * depth
  wrong, last = answers(b'{"id": ' + nested + b', "text": "a"}\n"two"')
  assert wrong['id'] == 1
  assert wrong['error'].startswith('line: expected ')
  assert last['label'] == 'two'


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


def test_a_closed_stderr_takes_no_answer_with_it(monkeypatch):
  class Closed(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  class Drifting(Echo):
    def stream(self, items):
      for answer in super().stream(items):
        predict.log_drift(True, {'psi': 0.5})
        yield answer

  monkeypatch.setattr(sys, 'stderr', Closed())
  written = answers(b'"one"\n"two"\n', Drifting())
  assert [answer['label'] for answer in written] == ['one', 'two']


def test_a_huge_line_takes_no_memory_and_nobody_down(monkeypatch):
  monkeypatch.setattr(predict, 'MAX_LINE', 16)
  wrong, last = answers(b'"' + b'x' * 1000 + b'"\n"two"\n')
  assert 'expected at most 16 bytes' in wrong['error']
  assert last['label'] == 'two'


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--thresholds=forum=much', '--thresholds: expected a number for'),
    ('--thresholds=forum=nan', '--thresholds: expected a number for'),
    (
      '--minimum_retention=forum=2',
      '--minimum_retention: expected a number in',
    ),
    ('--log_every=-1', 'argument --log_every: invalid number of seconds'),
    ('--log_every=nan', 'argument --log_every: invalid number of seconds'),
    ('--minimum_retention=forum=much', '--minimum_retention: expected'),
    ('--batches=0,1', '--batches: invalid list of positive integers'),
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

  config = (
    f'configs/eat/sst2.py:data={tmp_path},vocabulary={tmp_path},epochs=2,'
    'batch=16,max_length=16'
  )
  sizes = dict(
    width=16, depth=5, mlp_dim=32, num_heads=2, vocab_size=44, max_positions=16
  )
  run(
    'train', f'--config={config}', f'--workdir={workdir}',
    '--config.tensorboard=false', '--config.mesh.data=1',
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
