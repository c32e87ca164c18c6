"""Few-shot: the closed form, honest choice of L2, the whole evaluator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import InvalidDataError
from eval_lib import evaluator, fewshot
from tests import contexts

DIGITS = dict(name='digits', image_size=8)


def toy(per_class, classes=4, width=6, spread=0.01, seed=0):
  """Features of width `width` around a corner per class."""
  rng = np.random.default_rng(seed)
  labels = np.repeat(np.arange(classes), per_class)
  noise = spread * rng.normal(size=(len(labels), width))
  return np.eye(classes, width)[labels] + noise, labels


def random_features(per_class, classes=4, width=6, seed=0):
  rng = np.random.default_rng(seed)
  labels = np.repeat(np.arange(classes), per_class)
  return rng.normal(size=(len(labels), width)), labels


@pytest.mark.parametrize('shots', [1, 5, 10])
def test_separable_features_reach_all(shots):
  train, test = toy(20, width=4), toy(30, width=4, seed=1)
  draw = fewshot.run_draw(train, test, 4, shots, seed=0)
  assert draw.accuracy == 1.0
  assert draw.held_out == 4 * (20 - shots)
  assert draw.short_classes == 0


def test_random_features_are_at_chance():
  train, test = random_features(60), random_features(500, seed=1)
  for shots in (1, 10):
    draws = [fewshot.run_draw(train, test, 4, shots, s) for s in range(3)]
    # 6,000 guesses at 1/4: four standard deviations are 0.022, and the
    # guesses of one draw share their weights, hence twice that.
    assert abs(np.mean([d.accuracy for d in draws]) - 0.25) < 0.045


def test_same_seed_same_shots_other_seed_others():
  train, test = toy(10, spread=0.6), toy(100, spread=0.6, seed=1)
  first = fewshot.run_draw(train, test, 4, 2, seed=3)
  assert first == fewshot.run_draw(train, test, 4, 2, seed=3)
  others = {fewshot.run_draw(train, test, 4, 2, s).accuracy for s in range(6)}
  assert len(others) > 1


@pytest.fixture
def spied(monkeypatch):
  """The rows of each fit, and of each choice of the L2 strength."""
  found = {'shots': [], 'held_out': []}

  class Spy(fewshot.Regression):
    def __init__(self, features, labels, num_classes):
      found['shots'].append({tuple(row) for row in features})
      super().__init__(features, labels, num_classes)

    def choose_l2(self, features, labels):
      found['held_out'].append({tuple(row) for row in features})
      return super().choose_l2(features, labels)

  monkeypatch.setattr(fewshot, 'Regression', Spy)
  return found


def test_shots_of_a_seed_are_nested(spied):
  for shots in (1, 3):
    fewshot.run_draw(toy(10), toy(2, seed=1), 4, shots, seed=0)
  few, many = spied['shots']
  assert (len(few), len(many)) == (4, 12)
  assert few < many


def test_l2_never_depends_on_the_test_split():
  """Other test labels change the accuracy, not the choice."""
  train, test = toy(20, spread=1.0), toy(50, spread=1.0, seed=1)
  wrong = (test[0], (test[1] + 1) % 4)
  for seed in range(4):
    honest = fewshot.run_draw(train, test, 4, 5, seed)
    lied_to = fewshot.run_draw(train, wrong, 4, 5, seed)
    assert honest.l2 == lied_to.l2
    assert honest.accuracy != lied_to.accuracy


def test_l2_depends_on_images_outside_the_shots(spied):
  train, test = toy(10), toy(5, seed=1)
  fewshot.run_draw(train, test, 4, 3, seed=0)
  [shots], [held_out] = spied['shots'], spied['held_out']
  assert shots | held_out == {tuple(row) for row in train[0]}
  assert not shots & held_out
  assert not held_out & {tuple(row) for row in test[0]}


def test_classes_with_fewer_images_are_reported():
  features, labels = toy(10)
  keep = np.concatenate([np.arange(3), np.arange(10, 40)])
  draw = fewshot.run_draw(
    (features[keep], labels[keep]), toy(10, seed=1), 4, 10, seed=0
  )
  assert draw.short_classes == 1
  assert draw.held_out == 0
  assert draw.l2 == 1024.0
  _, [row] = fewshot.summary({10: [draw]})
  assert row['classes with fewer images'] == '1'
  assert row['images that chose it'] == '0'


def test_summary_and_table_by_hand():
  draws = [
    fewshot.Draw(accuracy=0.5, l2=4.0, held_out=7, short_classes=0),
    fewshot.Draw(accuracy=0.7, l2=16.0, held_out=7, short_classes=0),
  ]
  metrics, [row] = fewshot.summary({5: draws})
  assert metrics == pytest.approx(
    {
      '5shot': 0.6,
      '5shot_std': 0.1,
      '5shot_log2_l2': 3.0,
      '5shot_held_out': 7.0,
      '5shot_short_classes': 0.0,
    }
  )
  assert list(row.values()) == ['5', '60.00 ± 10.00 %', '2, 4', '7', '0']


def pixels(variables, batch):
  """Raw pixels: a poor representation, but a deterministic one."""
  image = batch['image'].astype(jnp.float32) * variables['scale']
  return image[..., 0].reshape(image.shape[0], -1)


def context(batch_size, devices=1, features=pixels):
  return contexts.eval_context(
    DIGITS, batch_size=batch_size, features=jax.jit(features),
    put=contexts.rows_on(devices),
  )  # fmt: skip


def run(config, context, scale=1.0):
  built = evaluator.build('fewshot', dict(type='fewshot', **config), context)
  assert built.every_steps == 0
  return built.run({'scale': jnp.float32(scale)})


def test_digits_end_to_end_for_any_batch_size_and_device_count(capsys):
  config = dict(shots=(1, 10), seeds=2)
  first = run(config, context(batch_size=64))
  assert 0.3 < first['1shot'] < first['10shot'] < 1.0
  assert first['10shot'] > 0.8  # digits are easy even from pixels
  assert '10 draws' not in capsys.readouterr().out
  assert run(config, context(batch_size=200, devices=8)) == first


def test_result_ignores_the_scale_of_features():
  config = dict(shots=(5,), seeds=1)
  assert run(config, context(256)) == run(config, context(256), scale=2.0)


def test_diverged_features_are_an_error():
  with pytest.raises(FloatingPointError, match='finite'):
    run(dict(shots=(1,), seeds=1), context(256), scale=float('nan'))


def test_splits_with_other_classes_are_an_error(tmp_path):
  import cv2

  for path in ('train/cat', 'train/dog', 'test/cat', 'test/cow'):
    (tmp_path / path).mkdir(parents=True)
    cv2.imwrite(str(tmp_path / path / '0.png'), np.zeros((8, 8, 3), np.uint8))
  folder = dict(name='folder', root=str(tmp_path), image_size=8)
  with pytest.raises(ValueError, match=r'cow|classes'):
    run(dict(dataset=folder, shots=(1,)), context(8))


def test_empty_split_is_an_error():
  class Empty:
    def batches(self):
      return iter(())

  with pytest.raises(InvalidDataError, match='no example'):
    fewshot.extract_features(Empty(), context(8), {})


def problem(rows, width, classes=3, seed=0):
  rng = np.random.default_rng(seed)
  labels = rng.integers(classes, size=rows)
  features = rng.normal(size=(rows, width)) + np.eye(classes, width)[labels]
  return features, labels


def design(features, labels, classes=3):
  """Standardised features with the bias, and targets, by a plain loop."""
  columns = [
    (column - column.mean()) / column.std() if column.std() > 0 else column * 0
    for column in features.T
  ]
  x = np.stack([*columns, np.full(len(features), 100.0)], axis=1)
  y = np.array(
    [[1.0 if c == k else -1.0 for c in range(classes)] for k in labels]
  )
  return x, y


@pytest.mark.parametrize(('rows', 'width'), [(40, 5), (6, 6), (7, 6), (4, 30)])
def test_equals_normal_equations(rows, width):
  features, labels = problem(rows, width)
  x, y = design(features, labels)
  regression = fewshot.Regression(features, labels, 3)
  for l2 in fewshot.L2_GRID:
    want = np.linalg.solve(x.T @ x + l2 * np.eye(width + 1), x.T @ y)
    np.testing.assert_allclose(
      regression.weights(l2), want, rtol=1e-5, atol=1e-7
    )


def test_accuracies_equal_a_plain_loop():
  features, labels = problem(12, 4)
  others, other_labels = problem(50, 4, seed=1)
  regression = fewshot.Regression(features, labels, 3)
  strengths = [0.5, 2.0**12]
  got = regression.accuracies(others, other_labels, strengths)
  for value, l2 in zip(got, strengths, strict=True):
    weights = regression.weights(l2)
    hits = 0
    for row, label in zip(others, other_labels, strict=True):
      row = (row - features.mean(0)) / features.std(0)
      hits += np.argmax(np.append(row, 100.0) @ weights) == label
    assert value == hits / 50


def test_a_feature_constant_over_the_shots_counts_for_nothing():
  features, labels = problem(12, 4)
  dead = np.concatenate([features, np.full((12, 1), 0.3)], axis=1)
  others = np.random.default_rng(2).normal(size=(20, 5)) * 100
  for l2 in (2.0**-10, 1.0):
    with_dead = fewshot.Regression(dead, labels, 3).weights(l2)
    without = fewshot.Regression(features, labels, 3).weights(l2)
    np.testing.assert_allclose(with_dead[4], 0.0, atol=1e-12)
    np.testing.assert_allclose(np.delete(with_dead, 4, 0), without, atol=1e-9)
  regression = fewshot.Regression(dead, labels, 3)
  labels = np.zeros(20, int)
  changed = others.copy()
  changed[:, 4] *= -1
  assert regression.accuracies(others, labels, [1.0]) == (
    regression.accuracies(changed, labels, [1.0])
  )


def test_choice_is_the_held_out_optimum_and_of_equals_the_strongest():
  features, labels = problem(30, 20)
  others, other_labels = problem(200, 20, seed=1)
  regression = fewshot.Regression(features, labels, 3)
  grid = fewshot.L2_GRID
  scores = regression.accuracies(others, other_labels, grid)
  chosen = regression.choose_l2(others, other_labels)
  best = max(scores)
  assert chosen == max(
    l2 for l2, score in zip(grid, scores, strict=True) if score == best
  )
  assert min(scores) < best  # else the choice would not matter here


def test_without_held_out_images_the_documented_constant():
  features, labels = problem(6, 4)
  regression = fewshot.Regression(features, labels, 3)
  nothing = np.zeros((0, 4)), np.zeros(0, int)
  chosen = regression.choose_l2(*nothing)
  assert chosen == fewshot.L2_WITHOUT_HELD_OUT == 1024.0
