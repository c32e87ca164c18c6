"""The closed form against NumPy's solvers and hand-made features."""

import numpy as np
import pytest

from eval_lib import least_squares


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
  regression = least_squares.fit(features, labels, 3)
  for l2 in least_squares.L2_GRID:
    want = np.linalg.solve(x.T @ x + l2 * np.eye(width + 1), x.T @ y)
    np.testing.assert_allclose(
      regression.weights(l2), want, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize(('rows', 'width'), [(40, 5), (4, 30)])
def test_equals_lstsq_of_the_augmented_system(rows, width):
  features, labels = problem(rows, width)
  x, y = design(features, labels)
  regression = least_squares.fit(features, labels, 3)
  for l2 in (2.0**-10, 1.0, 2.0**10):
    stacked = np.concatenate([x, np.sqrt(l2) * np.eye(width + 1)])
    targets = np.concatenate([y, np.zeros((width + 1, 3))])
    want = np.linalg.lstsq(stacked, targets)[0]
    np.testing.assert_allclose(
      regression.weights(l2), want, rtol=1e-5, atol=1e-7
    )


def test_accuracies_equal_a_plain_loop():
  features, labels = problem(12, 4)
  others, other_labels = problem(50, 4, seed=1)
  regression = least_squares.fit(features, labels, 3)
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
    with_dead = least_squares.fit(dead, labels, 3).weights(l2)
    without = least_squares.fit(features, labels, 3).weights(l2)
    np.testing.assert_allclose(with_dead[4], 0.0, atol=1e-12)
    np.testing.assert_allclose(np.delete(with_dead, 4, 0), without, atol=1e-9)
  regression = least_squares.fit(dead, labels, 3)
  labels = np.zeros(20, int)
  changed = others.copy()
  changed[:, 4] *= -1
  assert regression.accuracies(others, labels, [1.0]) == (
    regression.accuracies(changed, labels, [1.0])
  )


def test_choice_is_the_held_out_optimum_and_of_equals_the_strongest():
  features, labels = problem(30, 20)
  others, other_labels = problem(200, 20, seed=1)
  regression = least_squares.fit(features, labels, 3)
  grid = least_squares.L2_GRID
  scores = regression.accuracies(others, other_labels, grid)
  chosen = least_squares.choose_l2(regression, others, other_labels)
  best = max(scores)
  assert chosen == max(
    l2 for l2, score in zip(grid, scores, strict=True) if score == best
  )
  assert min(scores) < best  # else the choice would not matter here


def test_without_held_out_images_the_documented_constant():
  features, labels = problem(6, 4)
  regression = least_squares.fit(features, labels, 3)
  nothing = np.zeros((0, 4)), np.zeros(0, int)
  chosen = least_squares.choose_l2(regression, *nothing)
  assert chosen == least_squares.L2_WITHOUT_HELD_OUT == 1024.0


def test_grid():
  grid = least_squares.L2_GRID
  assert grid[0] == 2.0**-10
  assert grid[-1] == 2.0**20
  np.testing.assert_array_equal(grid[1:] / grid[:-1], 2.0)
