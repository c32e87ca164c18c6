"""Reading what a run logged, also after kills and restarts."""

import json
import math

import numpy as np

from eval_lib import run_metrics


def test_reading_resumed_and_nonfinite_rows(tmp_path):
  rows = [
    {'step': 1, 'a': 1.0},
    {'step': 3, 'a': 'NaN'},
    {'step': 2, 'a': 9.0},
    {'step': 2, 'a': 2, 'b': 'Infinity'},
  ]
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (tmp_path / 'metrics.jsonl').write_text(text + '{"step": 4, "a": ')
  series = run_metrics.read_series(tmp_path / 'metrics.jsonl')
  np.testing.assert_array_equal(series['a'], [[1, 2, 3], [1.0, 2.0, math.nan]])
  np.testing.assert_array_equal(series['b'], [[2], [math.inf]])


def test_moving_average_by_a_plain_loop():
  values = np.random.default_rng(0).normal(size=210)
  values[50] = np.nan
  half = 3  # 3 % of 210 is a window of 6: i - 3 ... i + 2
  want = [
    np.nan if np.isnan(v) else np.nanmean(values[max(0, i - half) : i + 3])
    for i, v in enumerate(values)
  ]
  np.testing.assert_allclose(run_metrics.smooth(values), want, rtol=1e-9)
  assert run_metrics.smooth(values[:100]) is None


def test_envelope_holds_every_value():
  values = np.random.default_rng(0).normal(size=300)
  assert (run_metrics.envelope(values, np.max) >= values).all()
  assert (run_metrics.envelope(values, np.min) <= values).all()
  np.testing.assert_array_equal(
    run_metrics.envelope(values[:9], np.max), values[:9]
  )
