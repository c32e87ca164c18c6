"""Few-shot: the closed form, honest choice of L2, the whole evaluator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError
from eval_lib import fewshot
from tests import contexts

DIGITS = dict(name='digits', image_size=8)


def toy(per_class, spread=0.01, seed=0, width=6):
  """Features of four classes, each around a corner, and their labels."""
  rng = np.random.default_rng(seed)
  labels = np.repeat(np.arange(4), per_class)
  noise = spread * rng.normal(size=(len(labels), width))
  return np.eye(4, width)[labels] + noise, labels


@pytest.mark.parametrize('shots', [1, 5, 10])
def test_separable_features_reach_all(shots):
  train, test = toy(20, width=4), toy(30, width=4, seed=1)
  draw = fewshot.run_draw(train, test, 4, shots, seed=0)
  assert draw == (1.0, draw.l2, 4 * (20 - shots), 0)
  # Of classes with fewer images; without held-out images a constant.
  train = train[0][shots:], train[1][shots:]
  draw = fewshot.run_draw(train, test, 4, 20, seed=0)
  assert draw[1:] == (fewshot.L2_WITHOUT_HELD_OUT, 0, 1) == (1024.0, 0, 1)


def test_shots_are_nested_and_l2_depends_on_images_outside_them(monkeypatch):
  shots, held_out = [], []

  class Spy(fewshot.Regression):
    def __init__(self, features, labels, num_classes):
      shots.append({tuple(row) for row in features})
      super().__init__(features, labels, num_classes)

    def choose_l2(self, rows):
      held_out.append({tuple(row) for row in rows[0]})
      return super().choose_l2(rows)

  monkeypatch.setattr(fewshot, 'Regression', Spy)
  train, test = toy(10), toy(5, seed=1)
  for number in (1, 3):
    fewshot.run_draw(train, test, 4, number, seed=0)
  few, many = shots
  assert (len(few), len(many)) == (4, 12)
  assert few < many
  rows = {tuple(row) for row in train[0]}
  assert held_out == [rows - few, rows - many]


def test_a_seed_fixes_the_shots_and_l2_never_depends_on_the_test_split():
  # Other test labels change the accuracy, not the choice.
  train, test = toy(20, spread=1.0), toy(50, spread=1.0, seed=1)
  splits = test, test, (test[0], (test[1] + 1) % 4)
  accuracies = set()
  for seed in range(4):
    draws = (fewshot.run_draw(train, split, 4, 5, seed) for split in splits)
    honest, again, lied_to = draws
    assert honest == again
    assert honest.l2 == lied_to.l2
    assert honest.accuracy != lied_to.accuracy
    accuracies.add(honest.accuracy)
  assert len(accuracies) > 1


def test_summary_by_hand():
  draws = [fewshot.Draw(0.5, 4.0, 7, 1), fewshot.Draw(0.7, 16.0, 7, 1)]
  metrics, row = fewshot.summary(5, draws)
  assert metrics == pytest.approx({
    '5shot': 0.6, '5shot_std': 0.1, '5shot_log2_l2': 3.0, '5shot_held_out': 7.0,
    '5shot_short_classes': 1.0,
  })  # fmt: skip
  assert list(row.values()) == [5, '60.00 ± 10.00 %', '2, 4', 7, 1]


def pixels(variables, batch):
  """Raw pixels: a poor representation, but a deterministic one."""
  image = batch['image'].astype(jnp.float32) * variables['scale']
  return image[..., 0].reshape(image.shape[0], -1)


def run(batch_size=256, scale=1.0, **entry):
  context = dict(batch_size=batch_size, features=jax.jit(pixels))
  built = contexts.evaluator_of('fewshot', DIGITS, context, **entry)
  return built.run({'scale': jnp.float32(scale)})


def test_digits_end_to_end(capsys):
  entry = dict(shots=(1, 10), seeds=2)
  result = run(64, **entry)
  assert 0.3 < result['1shot'] < result['10shot'] < 1.0
  assert result['10shot'] > 0.8  # digits are easy even from pixels
  assert 'few-shot, digits: 2 draws' in capsys.readouterr().out
  assert run(scale=2.0, **entry) == result


def test_diverged_features_are_an_error():
  with pytest.raises(FloatingPointError, match='features: expected finite'):
    run(shots=(1,), seeds=1, scale=float('nan'))


def test_shots_are_not_tested():
  with pytest.raises(ConfigError, match='without rows of train_split'):
    run(shots=(1,), train_split='test')


def test_splits_with_other_classes_are_an_error(tmp_path):
  import cv2

  for path in ('train/cat', 'train/dog', 'test/cat', 'test/cow'):
    (tmp_path / path).mkdir(parents=True)
    cv2.imwrite(str(tmp_path / path / '0.png'), np.zeros((8, 8, 3), np.uint8))
  folder = dict(name='folder', root=str(tmp_path), image_size=8)
  with pytest.raises(InvalidDataError, match='lacks: cow'):
    run(8, dataset=folder, shots=(1,))


def standardised(others, shots):
  """Features by the moments of the shots, with the bias."""
  columns = (others - shots.mean(0)) / shots.std(0)
  return np.pad(columns, [(0, 0), (0, 1)], constant_values=100.0)


@pytest.mark.parametrize(
  ('per_class', 'width'), [(10, 5), (2, 8), (2, 7), (1, 30)]
)
def test_equals_normal_equations(per_class, width):
  features, labels = toy(per_class, 1.0, width=width)
  x, y = standardised(features, features), 2.0 * np.eye(4)[labels] - 1.0
  regression = fewshot.Regression(features, labels, 4)
  for l2 in fewshot.L2_GRID:
    want = np.linalg.solve(x.T @ x + l2 * np.eye(width + 1), x.T @ y)
    found = regression.weights(l2)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)


def test_the_choice_is_the_held_out_optimum_and_of_equals_the_strongest():
  features, labels = toy(8, 1.0, width=20)
  others, other_labels = toy(50, 1.0, seed=1, width=20)
  regression = fewshot.Regression(features, labels, 4)
  scores = {}
  for l2 in fewshot.L2_GRID:
    outputs = standardised(others, features) @ regression.weights(l2)
    scores[l2] = np.mean(outputs.argmax(-1) == other_labels)
  found = regression.accuracies((others, other_labels), fewshot.L2_GRID)
  assert found == list(scores.values())
  best = [l2 for l2, score in scores.items() if score == max(found)]
  assert regression.choose_l2((others, other_labels)) == max(best)
  assert min(found) < max(found)  # else the choice would not matter here


def test_a_feature_constant_over_the_shots_counts_for_nothing():
  features, labels = toy(3, 1.0, width=4)
  dead = np.pad(features, [(0, 0), (0, 1)], constant_values=0.3)
  regression = fewshot.Regression(dead, labels, 4)
  for l2 in (2.0**-10, 1.0):
    *alive, zero, bias = regression.weights(l2)
    without = fewshot.Regression(features, labels, 4).weights(l2)
    np.testing.assert_allclose(zero, 0.0, atol=1e-12)
    np.testing.assert_allclose([*alive, bias], without, atol=1e-9)
  others = np.random.default_rng(2).normal(size=(20, 5))
  others, labels = 100 * others, np.zeros(20, int)
  flipped = regression.accuracies((others * [1, 1, 1, 1, -1], labels), [1.0])
  assert regression.accuracies((others, labels), [1.0]) == flipped
