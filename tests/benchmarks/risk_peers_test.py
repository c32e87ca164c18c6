"""Choices of other authors by hand, and the table of resamplings."""

import types

import numpy as np
import pytest

from benchmarks import risk_peers
from tests.eval_lib.risk_test import population, variant


def columns(*errors, rows=100):
  return (np.arange(rows)[:, None] < np.array(errors)).astype(np.int8)


@pytest.mark.parametrize(
  ('choose', 'losses', 'limits', 'best'),
  [
    (risk_peers.uncorrected, columns(0, 10, 11, 9, 12), [0.1], 3),
    (risk_peers.uncorrected, columns(20), [0.1], None),
    # (N + 1) / N 0.1 - 1 / N = 0.091.
    (risk_peers.rc_eenn_expectation, columns(0, 10, 11, 9, 12), [0.1], 3),
    (risk_peers.rc_eenn_expectation, columns(0, 10), [0.1], 0),
    # With two rows without loss and epsilon 0.9 the capital is (1 + 0.9 b1)
    # (1 + 0.9 b2), where both bets are 1: 1.9^2 = 3.61.
    (risk_peers.rc_eenn_bound, columns(0, rows=2), [0.9, 1 / 3.6], 0),
    (risk_peers.rc_eenn_bound, columns(0, rows=2), [0.9, 1 / 3.62], None),
    # It stops at the first failure.
    (risk_peers.rc_eenn_bound, columns(0, 60, 0), [0.1, 0.1], 0),
    # 0.9^22 <= 0.1 < 0.9^21, and a loss of 22 is too many.
    (risk_peers.calm, columns(0, 1, 0, rows=22), [0.1, 0.1], 0),
    (risk_peers.calm, columns(0, rows=21), [0.1, 0.1], None),
  ],
)
def test_choices_by_hand(choose, losses, limits, best):
  assert choose(losses, *limits) == best


def test_cats_by_hand():
  confidence = np.array([[0.9, 0.6, 0.8, 0.7], [0.5, 0.95, 0.85, 0.75]])
  differs = np.array([[1, 1, 1, 0], [0, 0, 1, 0]], bool)
  # Largest confidences of wrong heads: 0.9, 0.6, 0.85, then infinity.
  thresholds = np.array([1.0, 0.91, 0.9, 0.86, 0.61, 0.5])
  given = confidence, differs, thresholds
  assert risk_peers.cats(*given, 0.1) is None
  # At 1/3 of four values the third, 0.9; at 0.7 the second, 0.85.
  assert risk_peers.cats(*given, 1 / 3) == 1
  assert risk_peers.cats(*given, 0.7) == 3


def test_the_table_has_every_method_once():
  logits, labels = population(400)
  models = [variant(logits), variant(logits, 0.9, ratio=0.4)]
  flags = types.SimpleNamespace(epsilon=0.1, delta=0.2, draws=20)
  table = risk_peers.resample(models, labels, flags)
  found = {(row['risk'], row['method']): row for row in table}
  assert len(found) == len(table) == 15
  for row in table:
    assert 0 <= row['exceeded'] <= 1
    assert row['mean'] <= row['worst']
  # The second model answers alike and costs less.
  plain = found['accuracy', 'sequence']
  assert found['accuracy', 'sequence + models']['saved'] > plain['saved'] > 0
  # No choice of disagreement saves more than the mean without correction.
  most = found['disagreement', 'no correction']['saved']
  for name in ('sequence', 'CALM', 'CATs', 'RC-EENN, bound'):
    assert 0 < found['disagreement', name]['saved'] < most
