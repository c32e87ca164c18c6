"""The command that answers lines: reading, order, flags, refusals."""

import io
import json
import os
import stat
import subprocess
import sys
import threading
import types

import pytest

from core.errors import ConfigError, InvalidDataError
from dataset_lib import builder
from eval_lib import submission
from launch import command_line, predict, serving
from serve_lib import engine as engine_lib
from serve_lib import program_cache
from serve_lib.chain import Failure, InputError
from serve_lib.decisions import Prediction
from train_lib import loading

FIELDS = dict(depth=4, retention=0.5, exit_reason='confidence', truncated=False)

# -- lines in and out


class Echo:
  """An engine whose answer is the item's text."""

  def stream(self, items, window):
    for item in items:
      if isinstance(item, InputError):
        yield Failure(item, 'encode')
      else:
        text = item if isinstance(item, str) else item['text']
        yield Prediction(text, {'a': 1.0}, FIELDS)


def answers(data, engine=None):
  written = []
  lines = predict.read_lines(io.BytesIO(data))
  predict.answer_all(engine or Echo(), lines, written.append, 4)
  return [json.loads(line) for line in written]


def test_answers_are_in_order_with_the_ids_of_the_lines():
  # Editors on Windows begin a file with a byte order mark.
  lines = (
    b'\xef\xbb\xbf{"id": "x", "text": "one"}\n"two"\n{"id": 2, "text": "three"}'
  )
  assert [(a.get('id'), a.get('line'), a['label']) for a in answers(lines)] == [
    ('x', None, 'one'), (None, 2, 'two'), (2, None, 'three'),
  ]  # fmt: skip


@pytest.mark.parametrize('end', [b'', b'\n'])
@pytest.mark.parametrize(('extra', 'is_legal'), [(0, True), (1, False)])
def test_a_line_may_have_max_line_bytes(extra, is_legal, end, monkeypatch):
  monkeypatch.setattr(predict, 'MAX_LINE', 20)
  last = b'"' + b'x' * (18 + extra) + b'"'
  first, found = answers(b'"one"\n' + last + end)
  assert first['label'] == 'one'
  assert ('error' not in found) == is_legal


NESTED = b'{"id": %s, "text": "a"}'


@pytest.mark.parametrize(
  ('bad', 'message'),
  [(line, 'expected one JSON value in UTF-8') for line in (
    b'', b'{', b'\xff\xfe', b'[' * 100_000, b'nonsense', b'-1e400',
    b'{"id": 1e999, "text": "b"}', b'{"id": NaN, "text": "b"}',
    b'{"id": 7, "text": "b", "source": -Infinity}',
    b'{"id": ' + b'9' * 5000 + b', "text": "b"}',
  )] + [
    (NESTED % (b'[' * 900 + b']' * 900), 'line: expected '),
    (NESTED % b'[]', 'line: expected an id'),
    (b'"' + b'x' * 100_001 + b'"', 'expected at most 100001 bytes'),
  ],
)  # fmt: skip
def test_a_bad_line_is_answered_by_its_error(bad, message, monkeypatch):
  monkeypatch.setattr(predict, 'MAX_LINE', 100_001)
  first, wrong, last = answers(b'"one"\n' + bad + b'\n"two"\n')
  assert (first['label'], last['label']) == ('one', 'two')
  assert wrong['line'] == 2
  assert message in wrong['error']


def test_a_file_of_bad_lines_is_an_error():
  assert answers(b'') == []
  with pytest.raises(InvalidDataError, match='all 2 lines have failed'):
    answers(b'{\n{\n')


def test_a_closed_stderr_loses_no_answer(monkeypatch):
  class Closed(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  class Drifting(Echo):
    def stream(self, items, window):
      for answer in super().stream(items, window):
        serving.log_drift(True, {'psi': 0.5})
        yield answer

  monkeypatch.setattr(sys, 'stderr', Closed())
  written = answers(b'"one"\n"two"\n', Drifting())
  assert [answer['label'] for answer in written] == ['one', 'two']


HEAD = """
import functools, itertools, sys
from launch import command_line, predict
from tests.launch.predict_test import Echo
def run(flags):
  lines = (({'line': number}, 'text') for number in itertools.count())
  try:
    write = functools.partial(print, flush=True)
    predict.answer_all(Echo(), lines, write, 4)
  finally:
    print('left', file=sys.stderr)
command_line.Command('predict', '', predict.Flags, run)(['--workdir=.'])
"""


def test_a_closed_stdout_ends_the_command_quietly():
  with subprocess.Popen(
    [sys.executable, '-c', HEAD], stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  ) as process:  # fmt: skip
    try:
      assert json.loads(process.stdout.readline())['line'] == 0
      process.stdout.close()
      assert process.wait(60.0) == command_line.OUTPUT_CLOSED == 141
      assert process.stderr.read() == b'left\n'
    finally:
      process.kill()


# -- the command


def test_statistics_are_logged_regularly_and_drift_when_it_turns(capsys):
  calls, ended = [], threading.Event()

  def snapshot():
    calls.append(1)
    if len(calls) == 3:
      ended.set()
    return {'answers': len(calls) // 2, 'failures': {}}

  monitor = types.SimpleNamespace(snapshot=snapshot)
  engine = types.SimpleNamespace(monitor=monitor)
  with serving.statistics(engine, 0.001):
    assert ended.wait(10.0)
  *logged, _ = capsys.readouterr().err.splitlines()
  assert len({*logged}) == len(logged) > 0  # none of an idle engine
  assert '"answers": 0' not in logged[0]
  count = len(calls)
  with serving.statistics(engine, 0.0):
    pass
  assert len(calls) == count + 1  # at the end
  capsys.readouterr()
  serving.log_drift(True, {'psi': 0.5})
  serving.log_drift(False, {'psi': 0.0})
  began, over = capsys.readouterr().err.splitlines()
  assert 'every row runs to full depth: {"psi": 0.5}' in began
  assert 'over; rows leave early again: {"psi": 0.0}' in over


@pytest.mark.nightly
def test_the_flags_reach_the_engine(runs, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  # In XLA lengths are buckets, and programs are kept.
  monkeypatch.setattr(engine_lib, '_onnx_stages', lambda *_: None)
  workdir = runs('eat sst2').folder
  before = sorted(workdir.rglob('*'))
  flags = predict.main.parse([
    f'--workdir={workdir}', '--batches=1', '--lengths=12', '--max_pending=7',
    '--max_pool_bytes=99999', '--serve=rule=margin,tau=0.25',
    '--thresholds=forum=0.5',
  ])  # fmt: skip
  with serving.build_engine(flags) as engine:
    assert engine.grid.lengths == (12,)
    assert engine._requests._max_pending == 7
    assert engine.policy.rule.tau == 0.25
    (answer,) = engine.predict([' '.join(['w1'] * 14)])
  assert answer.fields['truncated']
  name = program_cache.of_cores(serving.CACHE)
  cache = tmp_path / 'adaptive_computation' / name
  assert any(cache.iterdir())
  assert sorted(workdir.rglob('*')) == before
  assert f'kept in {cache}' in capsys.readouterr().err.splitlines()[-1]


def test_where_compiled_programs_are_kept(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  name = program_cache.of_cores(serving.CACHE)
  path = tmp_path / 'adaptive_computation' / name
  place = serving.cache_directory
  assert (place('none'), place('/elsewhere')) == ('', '/elsewhere')
  assert not any(tmp_path.iterdir())
  for _ in range(2):  # made, and found
    assert place('') == str(path)
  assert stat.S_IMODE(path.stat().st_mode) == 0o700
  another_user = os.geteuid() + 1
  for function, found in (('access', False), ('getuid', another_user)):
    with monkeypatch.context() as patch:
      patch.setattr(os, function, lambda *_, found=found: found)
      assert place('') == ''
  for folder in (path, path.parent):
    for mode in (0o770, 0o702, 0o777):
      folder.chmod(mode)
      assert place('') == ''
    folder.chmod(0o700)
  assert place('') == str(path)
  path.rmdir()
  for put in (lambda: path.symlink_to(tmp_path), path.touch):
    put()
    assert place('') == ''
    path.unlink()
  path.touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(path))  # cannot be made
  assert place('') == ''
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  monkeypatch.setenv('XDG_CACHE_HOME', 'relative')  # means nothing
  assert place('').startswith(str(tmp_path / 'home' / '.cache'))


def test_whole_splits_of_mnli_have_a_file_each(tmp_path, monkeypatch):
  for name in ('test_matched', 'test_mismatched', 'diagnostic'):
    row = 'index\tsentence1\tsentence2\n0\tw1\tw2\n'
    (tmp_path / f'{name}.tsv').write_text(row)
  (tmp_path / 'vocab.txt').write_text('[PAD]\n[UNK]\n[CLS]\n[SEP]\nw1\nw2\n')
  data = dict(name='glue', task='mnli', directory=str(tmp_path))
  config = types.SimpleNamespace(dataset=data | {'tokenizer': str(tmp_path)})
  monkeypatch.setattr(loading, 'load_config', lambda _: config)
  texts = data | {'tokenizer': str(tmp_path)}
  info = builder.build_source(submission.unlabelled(texts), 'test').info
  monkeypatch.setattr(loading, 'load_info', lambda _: info)

  def names(splits):
    flags = predict.Flags(workdir='run', out=str(tmp_path), glue=splits)
    return list(predict.open_splits(flags))

  assert names('test,test_mismatched,ax') == ['MNLI-m', 'MNLI-mm', 'AX']
  for splits, expected in (
    ('test,test_matched', 'one split for MNLI-m.tsv'),
    ('test[:10%]', 'whole splits'), ('train', 'whole splits'),
  ):  # fmt: skip
    with pytest.raises(ConfigError, match=f'--glue: expected {expected}'):
      names(splits)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('albert sst2 fixed', ['model.rule', 'ACT or another rule']),
    ('albert pretrain act', ['task: ', 'Pretraining', 'fine-tuned']),
  ],
)
def test_runs_that_are_not_served_are_refused(name, words, runs, refused):
  refused(predict.main, [f'--workdir={runs(name).folder}'], words)
