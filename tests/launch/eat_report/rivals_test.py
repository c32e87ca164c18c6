"""What other libraries get: our weights, our rows, batches that suit them."""

import importlib.util

import numpy as np
import pytest

from launch import peers
from launch.eat_report import rival_worker, rivals

ROWS = [[7, 8, 9, 5], [3], [4, 6], [1, 2, 3]]


def records():
  return [
    {'tokens': np.array(row), 'token_types': np.array(row) % 2} for row in ROWS
  ]


@pytest.mark.parametrize('size', [1, 3, 9])
def test_batches_have_every_row_once(tmp_path, size):
  rival_worker.write_rows(str(tmp_path / 'rows.npz'), records())
  batches = rival_worker.batches(str(tmp_path / 'rows.npz'), size)
  places = np.concatenate([places for places, _ in batches])
  assert places.tolist() == [1, 2, 3, 0]  # by length
  for places, (tokens, types, mask) in batches:
    longest = max(len(ROWS[place]) for place in places)
    assert tokens.shape == types.shape == mask.shape == (len(places), longest)
    for row, place in enumerate(places):
      padding = [0] * (longest - len(ROWS[place]))
      assert tokens[row].tolist() == ROWS[place] + padding
      assert types[row].tolist() == [one % 2 for one in ROWS[place]] + padding
      assert mask[row].tolist() == [1] * len(ROWS[place]) + padding


def test_who_is_not_installed_is_left_out(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  lines = []
  with rivals.start(
    ['torch', 'onnx'], {'dense': None}, np.arange(2), 2, lines.append
  ) as found:
    assert found == []
  assert len(lines) == 2
  assert 'PyTorch: torch, transformers not installed' in lines[0]
  assert '[peers]' in lines[0]
  assert peers.missing('onnx').startswith('torch, transformers, onnx')


def test_another_model_is_reported():
  ours = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
  lines = []
  assert rivals._differing('x', ours, ours + 1e-5, lines.append) == 0
  assert not lines
  assert rivals._differing('x', ours, ours[::-1], lines.append) == 2
  assert 'WARNING: x has our weights' in lines[0]
  number = ours[:, :1]
  assert rivals._differing('x', number, number + 1.0, lines.append) == 2
