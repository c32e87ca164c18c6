"""The guarantee on recorded rows, against a plain loop over the same draws."""

import numpy as np
import pytest

from launch.eat_report import guarantee
from tests.launch.eat_report.toy import LOGITS, exceeded_by_loop, fake

LABELS = np.random.default_rng(1).integers(2, size=400)
ALL = np.ones(400, bool)


def two_heads(noise):
  """Logits `[2, 400, 2]` whose heads differ by noise."""
  rng = np.random.default_rng(0)
  logits = np.zeros((2, 400, 2), np.float32)
  logits[0] = rng.standard_normal((400, 2))
  logits[1] = logits[0] + noise * rng.standard_normal((400, 2))
  return logits


def confidence(logits):
  powers = np.exp(logits - logits.max(-1, keepdims=True))
  return (powers / powers.sum(-1, keepdims=True)).max(-1)


@pytest.mark.slow
@pytest.mark.parametrize(('noise', 'epsilon'), [(1.0, 0.05), (0.5, 0.02)])
def test_it_fails_as_often_as_a_plain_loop_says(noise, epsilon):
  logits = two_heads(noise)
  model, delta, draws = fake(logits), 0.3, 40
  found = guarantee.resampled(model, LABELS, ALL, epsilon, delta, draws)
  answers = logits.argmax(-1)
  differs = answers[0] != answers[1]
  losses = {'disagreement': differs, 'harm': differs & (answers[1] == LABELS)}
  assert [row['loss'] for row in found] == list(losses)
  for row, lost in zip(found, losses.values(), strict=True):
    wanted = exceeded_by_loop(
      confidence(logits)[:1], lost[None], epsilon, delta, draws
    )
    assert 0 < wanted < 1
    assert row['exceeded'] == wanted
    assert row['worst'] > epsilon


def test_what_leaves_and_whom_it_harms():
  logits = two_heads(0.3)
  loose, harm = guarantee.resampled(fake(logits), LABELS, ALL, 0.1, 0.1, 20)
  early = (confidence(logits)[0] >= np.float32(loose['threshold'])).mean()
  assert loose['early'] == pytest.approx(early, abs=1e-9)
  # Only rows that the full model has right can be harmed.
  assert harm['early'] >= loose['early'] > 0


def test_heads_that_always_agree_never_exceed():
  for row in guarantee.resampled(
    fake(two_heads(0.0)), LABELS, ALL, 0.02, 0.1, 20
  ):
    assert (row['exceeded'], row['worst'], row['mean']) == (0, 0, 0)
    assert row['early'] == 1


def test_a_random_head_is_not_certified():
  logits = two_heads(0.0)
  # The most confident are as wrong as the others.
  logits[1] = np.random.default_rng(2).standard_normal((400, 2))
  disagreement, _ = guarantee.resampled(
    fake(logits), LABELS, ALL, 0.02, 0.1, 20
  )
  assert disagreement['early'] < 0.05
  assert disagreement['mean'] <= 0.02


def test_one_head_has_no_guarantee():
  with pytest.raises(ValueError, match='no exits by confidence'):
    guarantee.resampled(
      fake(LOGITS[:1], heads=(4,)), LABELS[:3], ALL[:3], 0.1, 0.1, 5
    )


def test_rows_that_the_temperatures_were_fitted_to_do_not_count():
  logits, judged = two_heads(0.5), np.arange(400) >= 100
  some = guarantee.resampled(fake(logits), LABELS, judged, 0.05, 0.1, 20)
  alone = guarantee.resampled(
    fake(logits[:, 100:]), LABELS[100:], ALL[100:], 0.05, 0.1, 20
  )
  assert some == alone
  assert [row['rows'] for row in some] == [300, 300]
  with pytest.raises(ValueError, match='fitted to all 400 rows'):
    guarantee.resampled(fake(logits), LABELS, ~ALL, 0.05, 0.1, 20)
