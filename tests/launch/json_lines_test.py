"""Lines in and out: order, errors, closed outputs."""

import io
import json
import subprocess
import sys

import pytest

from launch import command_line, predict
from serve_lib.chain import Failure, InputError
from serve_lib.decisions import Prediction


class Echo:
  """An engine whose answer is the item's text."""

  def stream(self, items, window):
    for item in items:
      if isinstance(item, InputError):
        yield Failure(item, 'encode')
      else:
        text = item if isinstance(item, str) else item['text']
        yield Prediction(text, {'a': 1.0}, 4, 0.5, 'confidence', False)


def answers(data, engine=None):
  written = []
  lines = predict.read_lines(io.BytesIO(data))
  predict.answer_all(engine or Echo(), lines, written.append, 4)
  return [json.loads(line) for line in written]


def test_answers_are_in_order_with_the_ids_of_the_lines():
  lines = b'{"id": "x", "text": "one"}\n"two"\n{"text": "three"}'
  assert [(a['id'], a['label']) for a in answers(lines)] == [
    ('x', 'one'), (2, 'two'), (3, 'three'),
  ]  # fmt: skip


def test_a_byte_order_mark_is_no_part_of_the_first_line():
  assert answers(b'\xef\xbb\xbf"one"\n"two"')[0]['label'] == 'one'


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


def test_a_closed_stderr_loses_no_answer(monkeypatch):
  class Closed(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  class Drifting(Echo):
    def stream(self, items, window):
      for answer in super().stream(items, window):
        predict.log_drift(True, {'psi': 0.5})
        yield answer

  monkeypatch.setattr(sys, 'stderr', Closed())
  written = answers(b'"one"\n"two"\n', Drifting())
  assert [answer['label'] for answer in written] == ['one', 'two']


def test_a_huge_line_fails_alone(monkeypatch):
  monkeypatch.setattr(predict, 'MAX_LINE', 16)
  wrong, last = answers(b'"' + b'x' * 1000 + b'"\n"two"\n')
  assert 'expected at most 16 bytes' in wrong['error']
  assert last['label'] == 'two'


HEAD = """
import itertools, sys
from launch import predict
from tests.launch.json_lines_test import Echo
lines = ((number, 'text') for number in itertools.count())
try:
  predict.answer_all(Echo(), lines, predict.write_line, 4)
finally:
  print('left', file=sys.stderr)
"""


def test_a_closed_stdout_ends_the_command_quietly(repository):
  with subprocess.Popen(
    [sys.executable, '-c', HEAD],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    cwd=repository,
  ) as process:
    try:
      assert json.loads(process.stdout.readline())['id'] == 0
      process.stdout.close()
      assert process.wait(60.0) == command_line.OUTPUT_CLOSED == 141
      assert process.stderr.read() == b'left\n'
    finally:
      process.kill()
