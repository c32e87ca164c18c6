"""metrics.jsonl: torn lines, truncation, numbers that are not finite."""

import json
import math

import pytest

from train_lib.metrics_file import Metrics


def make_metrics(tmp_path, steps=(1, 2, 3)):
  metrics = Metrics(tmp_path / 'metrics.jsonl')
  for step in steps:
    metrics.write(step, {'loss': step / 2})
  return metrics


def test_writes_one_object_a_line(tmp_path):
  metrics = make_metrics(tmp_path, (1,))
  metrics.write(2, {'loss': math.nan, 'best': -math.inf})
  lines = metrics.path.read_text().splitlines()
  assert [json.loads(line) for line in lines] == [
    {'step': 1, 'loss': 0.5},
    {'step': 2, 'loss': 'NaN', 'best': '-Infinity'},
  ]
  first, second = metrics.read()
  assert first == {'step': 1, 'loss': 0.5}
  assert math.isnan(second['loss'])
  assert second['best'] == -math.inf


def test_truncation_drops_later_steps_only(tmp_path):
  metrics = make_metrics(tmp_path)
  metrics.truncate_after(2)
  assert [row['step'] for row in metrics.read()] == [1, 2]
  metrics.write(3, {})
  assert [row['step'] for row in metrics.read()] == [1, 2, 3]
  metrics.truncate_after(0)
  assert metrics.path.read_text() == ''


def test_truncation_of_nothing_makes_no_file(tmp_path):
  Metrics(tmp_path / 'metrics.jsonl').truncate_after(5)
  assert list(tmp_path.iterdir()) == []


def test_a_line_torn_anywhere_is_dropped(tmp_path):
  metrics = make_metrics(tmp_path, (1, 2, 30))
  good = metrics.path.read_bytes()
  start = good.rindex(b'{')
  for end in range(start, len(good)):
    metrics.path.write_bytes(good[:end])
    metrics.truncate_after(30)
    assert [row['step'] for row in metrics.read()] == [1, 2], end
    metrics.write(3, {'loss': 1.0})
    assert [row['step'] for row in metrics.read()] == [1, 2, 3]


def test_a_damaged_line_inside_is_dropped_with_a_warning(tmp_path):
  metrics = make_metrics(tmp_path)
  lines = metrics.path.read_text().splitlines(keepends=True)
  for damaged in ('{"step": 2, \n', '[2]\n', '{"loss": 1}\n', '\xff\n'):
    metrics.path.write_bytes((lines[0] + damaged + lines[2]).encode('latin-1'))
    with pytest.warns(UserWarning, match='line 2 is damaged'):
      metrics.truncate_after(3)
    assert [row['step'] for row in metrics.read()] == [1, 3]


def test_processes_that_are_not_primary_write_nothing(tmp_path):
  make_metrics(tmp_path)
  other = Metrics(tmp_path / 'metrics.jsonl', primary=False)
  other.write(4, {})
  other.truncate_after(0)
  assert [row['step'] for row in other.read()] == [1, 2, 3]
