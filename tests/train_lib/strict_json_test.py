"""JSON without NaN, written atomically; metrics with torn lines."""

import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import InvalidDataError
from train_lib import strict_json
from train_lib.strict_json import Metrics


def test_values_become_json():
  value = {
    'a': (np.int64(3), jnp.float32(0.5)),
    4: [{'b': None}, math.nan, math.inf, -math.inf, np.float32('nan')],
  }
  text = strict_json.dumps(value)
  assert json.loads(text) == {
    'a': [3, 0.5],
    '4': [{'b': None}, 'NaN', 'Infinity', '-Infinity', 'NaN'],
  }
  assert float('-Infinity') == -math.inf
  with pytest.raises(TypeError):
    strict_json.dumps({'a': np.zeros(2)})


@pytest.mark.parametrize('text', ['NaN', '[Infinity]', '{"a": -Infinity}', '{'])
def test_other_text_is_refused(text):
  with pytest.raises(ValueError):
    strict_json.loads(text)


@pytest.mark.parametrize('content', [b'', b'{', b'[]', b'null', b'\xff', None])
def test_a_damaged_object_is_named(tmp_path, content):
  path = tmp_path / 'x.json'
  with pytest.raises(FileNotFoundError):
    strict_json.read_object(path)
  path.mkdir() if content is None else path.write_bytes(content)
  with pytest.raises(InvalidDataError, match=r'x\.json is damaged'):
    strict_json.read_object(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / 'x.json'
  strict_json.write(path, {'a': 1})

  def full(fd):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space'):
    strict_json.write(path, {'a': 2})
  assert strict_json.read_object(path) == {'a': 1}
  assert [p.name for p in tmp_path.iterdir()] == ['x.json']


def make_metrics(tmp_path, steps=(1, 2, 3)):
  metrics = Metrics(tmp_path / 'metrics.jsonl')
  for step in steps:
    metrics.write(step, {'loss': step / 2})
  return metrics


def steps_of(metrics):
  lines = metrics.path.read_text().splitlines()
  return [json.loads(line)['step'] for line in lines]


def test_metrics_are_one_object_per_line(tmp_path):
  metrics = make_metrics(tmp_path, (1,))
  metrics.write(2, {'loss': math.nan, 'best': -math.inf})
  lines = metrics.path.read_text().splitlines()
  assert [json.loads(line) for line in lines] == [
    {'step': 1, 'loss': 0.5},
    {'step': 2, 'loss': 'NaN', 'best': '-Infinity'},
  ]


def test_truncation_removes_later_steps_only(tmp_path):
  Metrics(tmp_path / 'metrics.jsonl').truncate_after(5)
  assert list(tmp_path.iterdir()) == []
  metrics = make_metrics(tmp_path)
  metrics.truncate_after(2)
  assert steps_of(metrics) == [1, 2]
  metrics.write(3, {})
  assert steps_of(metrics) == [1, 2, 3]
  other = Metrics(metrics.path, primary=False)
  other.write(4, {})
  other.truncate_after(0)
  assert steps_of(other) == [1, 2, 3]
  metrics.truncate_after(0)
  assert metrics.path.read_text() == ''


def test_a_line_torn_anywhere_is_removed(tmp_path):
  metrics = make_metrics(tmp_path, (1, 2, 30))
  good = metrics.path.read_bytes()
  for end in range(good.rindex(b'{'), len(good)):
    metrics.path.write_bytes(good[:end])
    metrics.truncate_after(30)
    assert steps_of(metrics) == [1, 2], end
    metrics.write(3, {'loss': 1.0})
    assert steps_of(metrics) == [1, 2, 3]


@pytest.mark.parametrize('damaged', ['{"step": 2, ', '[2]', '{"a": 1}', '\xff'])
def test_a_damaged_line_inside_is_removed_with_a_warning(tmp_path, damaged):
  metrics = make_metrics(tmp_path)
  lines = metrics.path.read_text().splitlines()
  lines[1] = damaged
  metrics.path.write_bytes(('\n'.join(lines) + '\n').encode('latin-1'))
  with pytest.warns(UserWarning, match='line 2 is damaged'):
    metrics.truncate_after(3)
  assert steps_of(metrics) == [1, 3]
