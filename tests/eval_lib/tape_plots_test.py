"""Plots of tapes: what they show, and that it can be read."""

import numpy as np
import pytest

from eval_lib import adaptive_plots
from eval_lib.adaptive_plots import Example

GRID = np.arange(12.0).reshape(3, 4)


def test_a_heatmap_shows_every_cell(made, tmp_path, assert_readable):
  adaptive_plots.plot_heatmap(tmp_path / 'x', GRID, 'rows (%)', 'Read')
  axes, bar = made[0].axes
  (mesh,) = axes.collections
  np.testing.assert_array_equal(np.asarray(mesh.get_array()).ravel(), range(12))
  # A cell is centred at its index; the first row is above.
  assert axes.get_xlim() == (-0.5, 3.5)
  assert axes.get_ylim() == (2.5, -0.5)
  labels = axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()
  assert labels == ('X-Index', 'Y-Index', 'rows (%)')
  assert_readable(made[0], 4)


@pytest.mark.parametrize('values', [GRID[:1], np.ones((1, 2))])
def test_a_heatmap_of_one_row(values, made, tmp_path, assert_readable):
  adaptive_plots.plot_heatmap(tmp_path / 'x', values, 'rows (%)', 'Read')
  axes, _ = made[0].axes
  assert_readable(made[0], 4)
  assert axes.bbox.height > 40


def test_a_histogram_shows_shares_and_the_mean(made, tmp_path, assert_readable):
  counts = np.array([0, 0, 1, 3])
  adaptive_plots.plot_histogram(tmp_path / 'x', counts, 'tokens', 'Length')
  (axes,) = made[0].axes
  bars = [(bar.get_x() + 0.4, bar.get_height()) for bar in axes.patches]
  assert bars == [pytest.approx((2, 25)), pytest.approx((3, 75))]
  (line,) = axes.get_lines()
  assert line.get_xdata()[0] == 2.75
  assert_readable(made[0], 4)


def test_examples_show_images_and_symbols(made, tmp_path, assert_readable):
  image = np.zeros((8, 8, 3), np.uint8)
  one = Example(image, 'accordion_of_wo\ntape 3')
  text = '\n'.join(['1 0 - 0 1 1 1 1'] * 8)
  groups = {'shortest tapes': [one] * 5,
            'longest tapes': [Example(text, 'odd\ntape 9')]}  # fmt: skip
  adaptive_plots.plot_examples(tmp_path / 'x', groups)
  axes = made[0].axes
  assert [len(one.images) for one in axes[:6]] == [1] * 5 + [0]
  (shown,) = axes[5].texts
  assert shown.get_text() == text
  assert_readable(made[0], 7)


def test_a_frontier_of_rates_is_the_upper_right(made, tmp_path):
  points = {'a': (1.0, 3.0), 'b': (2.0, 2.0), 'c': (1.5, 1.0)}
  given = {'x': points}, 'images/s', 'accuracy (%)'
  adaptive_plots.plot_frontier(tmp_path / 'x', *given, is_rate=True)
  line = made[0].axes[0].get_lines()[0]
  assert line.get_xdata().tolist() == [1.0, 2.0]
