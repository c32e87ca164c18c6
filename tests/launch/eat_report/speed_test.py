"""Measured seconds and FLOPs as served, by hand."""

import argparse

import numpy as np
import pytest

from eat import cost
from eat.exits import Rule
from eat.model import EatClassifier
from eval_lib.timing import Timings
from launch.eat_report import models, report_rows
from launch.eat_report.speed import Speed
from tests.launch.eat_report.toy import LABELS, LOGITS, fake, measured


def test_speed_by_hand():
  latency = {
    'dense/never': np.array([[4.0, 6.0], [6.0, 8.0]]),
    'never': np.array([[2.0, 3.0], [4.0, 3.0]]),
  }
  seconds = {k: v.sum(1) for k, v in latency.items()}
  together = {
    'dense/never': np.array([5.0, 5.0]),
    'never': np.array([1.0, 2.0]),
  }
  speed = Speed(
    np.array([0, 2]), latency, Timings(seconds), Timings(together),
    {'dense/never': 0, 'never': 1}, 32,
  )  # fmt: skip
  row = report_rows.speed_row('never', speed, 'dense/never')
  assert row['latency_mean'] == 3.0
  assert row['latency_p50'] == 3.0
  assert row['speedup_batch_1'] == 2.0  # 10 / 5 and 14 / 7
  assert row['speedup_batch'] == pytest.approx((5.0 + 2.5) / 2)
  assert row['throughput'] == pytest.approx(2 / 1.5)
  assert row['differing_rows'] == 1
  [setting] = measured(fake(LOGITS), {'never': (Rule('never'), None)})
  rows = report_rows.example_rows([setting], LABELS, speed)
  assert [r['latency'] for r in rows] == [3.0, None, 3.0]
  assert [r['correct'] for r in rows] == [1, 1, 0]


def test_tokens_kept_are_counted_where_the_row_was_pruned():
  settings = {one.name: one for one in measured(fake(LOGITS))}
  # Pruned after the head at layer 2: who leaves there has lost nothing.
  rows = report_rows.example_rows([settings['confidence=0.8']], LABELS, None)
  assert [r['kept_2'] for r in rows] == [None, 7, None]
  assert [r['flops_served'] for r in rows] == [30, 60, 30]


def test_the_flop_limit_is_that_of_the_timed_rows_as_served():
  settings = {one.name: one for one in measured(fake(LOGITS))}
  limit = report_rows.flop_limit
  full, early = settings['never'], settings['confidence=0.8']
  assert limit(early, full, np.array([0, 1, 2])) == pytest.approx(180 / 120)
  assert limit(early, full, np.array([0, 2])) == pytest.approx(2)
  assert limit(full, full, np.array([1])) == 1


def test_rows_are_served_at_their_length_bucket():
  model = EatClassifier(
    width=8, depth=2, mlp_dim=16, num_heads=2, vocab_size=30, num_classes=2,
    prune_layers=(1,), prune_ratios=(0.5,), exit_layers=(1,), window=4,
    window_implementation='auto', max_positions=300,
  )  # fmt: skip
  info = argparse.Namespace(length_buckets=(32, 256), input_shape=(256,))
  run = argparse.Namespace(task=argparse.Namespace(info=info))
  length = np.array([17, 32, 33, 2])
  assert models._padded(run, length).tolist() == [32, 32, 256, 32]
  got = models._flops(model, np.array([32, 256]))
  for row, size in zip(got, (32, 256), strict=True):
    # 0.5 of 31 and of 255 others are kept, rounded up, and [CLS].
    sizes = (1 + -(-(size - 1) // 2),)
    wanted = np.cumsum(cost.stage_flops(model, size, sizes, True))
    np.testing.assert_array_equal(row, wanted)
  no_buckets = argparse.Namespace(length_buckets=(), input_shape=(64,))
  run = argparse.Namespace(task=argparse.Namespace(info=no_buckets))
  assert models.length_buckets(run) == (64,)
