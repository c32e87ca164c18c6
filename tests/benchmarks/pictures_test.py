"""Plots of adaptive computation: what they show, and that it can be read."""

import sys

import numpy as np
import pytest

from benchmarks import pictures
from eval_lib import plots, run_plots
from eval_lib.report import Estimate

CURVES = {
  'EAT': {
    '0.90': (40.0, 91.5), '0.80': (31.0, 89.4), '0.85': (34.0, 90.8),
    '0.94': (60.0, 91.4), '0.95': (60.5, 91.9),
  },
  'DistilBERT-shaped': {'': (91.0, 90.2)},
  'dense': {'never': (156.0, 92.2)},
}  # fmt: skip
CLOSE = {'one': dict.fromkeys('abcde', (1.0, 1.0)) | {'f': (2.0, 2.0)}}
LENGTH = np.repeat(np.arange(2, 62), 20)
KEPT = np.stack([1 + np.ceil(0.7 * (LENGTH - 1)).astype(int), LENGTH // 2], 1)
BY_LAYER = [
  {'layer': n, 'scheduled': 0.7, 'observed': 0.8, 'p25': 0.6, 'p75': 0.9}
  for n in (0, 1)
]
COST = {'flops': LENGTH**2, 'depth': 1 + LENGTH % 3}
HARD = {'length': LENGTH, 'entropy_dense': 1 / LENGTH}
ACCURACY, LATENCY = 'accuracy (%)', 'latency (ms)'
VARIANTS = {
  'dense': {ACCURACY: 92.2, LATENCY: Estimate(156.0, 150.0, 170.0)},
  'all': {ACCURACY: 91.4, LATENCY: Estimate(61.0, 60.0, 63.0)},
}
EXITS = {
  'all layers': {'layer 2': 0.0, 'layer 6': 100.0},
  'P≥0.9': {'layer 2': 60.0, 'layer 6': 40.0},
}
RANGES = {
  'AdaTape': {8: [98.0, 99.0], 4: [100.0]},
  'UT': {4: [50.0, 60.0], 8: [50.0]},
}
NAN = np.nan
COSINES = {
  'cosine': {'mask': np.array([0.2, 0.6, 1]), 'cls': np.array([0.1, -0.3, 1])},
  'share': {'mask': np.array([1, 0.5, 0]), 'cls': np.array([1, NAN, NAN])},
}
TRIALS = {
  ACCURACY: [50.0, None, 70.0, 60.0], 'lr': [1e-4, 1e-3, 1e-2, 2e-3],
  'name': ['adam', 'adamw', 'adam', 'adamw'],
}  # fmt: skip
PLOTS = {
  'frontier': (pictures.plot_frontier, CURVES, LATENCY, ACCURACY),
  'close': (pictures.plot_frontier, CLOSE, LATENCY, ACCURACY),
  'retention': (pictures.plot_retention, LENGTH, KEPT, (2, 4), BY_LAYER),
  'ranges': (run_plots.plot_ranges, RANGES, 'N', ACCURACY),
  'trials': (run_plots.plot_trials, TRIALS, 'max', ['lr']),
  'ablation': (pictures.plot_bars, VARIANTS, 'Ablation'),
  'exits': (pictures.plot_exits, EXITS, 'Exits'),
  'against': (pictures.plot_against, COST, HARD, 'Cost'),
  'iterations': (pictures.plot_iterations, COSINES, 'here'),
}


@pytest.fixture
def drawn(tmp_path, made):
  """Draws a plot by name and gives its axes."""

  def draw(name):
    plot, *arguments = PLOTS[name]
    plot(tmp_path / name, *arguments)
    return made[-1].axes

  return draw


@pytest.mark.parametrize('name', PLOTS)
def test_axes_have_units_and_no_two_texts_overlap(name, drawn, assert_readable):
  found = drawn(name)
  for axes in found:
    shared = axes.get_shared_x_axes().get_siblings(axes)
    assert any(other.get_xlabel() for other in shared)
  assert_readable(found[0].figure, 3)


# Of each panel: labels of axes and legend, y of lines, bars, written numbers.
SHOWN = {
  'frontier': [dict(
    x=LATENCY, y=ACCURACY, labels=list(CURVES),
    # (60, 91.4) costs more than (40, 91.5) and is worse.
    lines=[[89.4, 90.8, 91.5, 91.9], [91.5, 89.4, 90.8, 91.4, 91.9],
           *[[90.2]] * 2, *[[92.2]] * 2],
    # 0.94 and 0.95 cost the same, but are far enough apart in accuracy.
    texts=['0.90', '0.80', '0.85', '0.94', '0.95'],
  )],
  # Four names have room at one point.
  'close': [dict(labels=['one'], texts=['a', 'b', 'c', 'd', 'f'])],
  'exits': [dict(
    x='rows (%)', labels=['layer 2', 'layer 6'], texts=['60', '100', '40'],
    bars=[(0, 0), (0, 60), (0, 100), (60, 40)],
  )],
  'ranges': [dict(
    x='N', y=ACCURACY, labels=['AdaTape', 'UT'],
    lines=[[100.0, 98.5], [55.0, 50.0]],
  )],
  'trials': [
    # The best of all has a star.
    dict(x='trial', y=ACCURACY, labels=['best so far', 'a trial', 'best: 70'],
         lines=[[50, 50, 70, 70], [50, NAN, 70, 60], [70]]),
    dict(x='lr', lines=[[50, NAN, 70, 60], [70]]),
    dict(x='name', lines=[[50, NAN, 70, 60], [70]]),
  ],
  'ablation': [
    dict(x=ACCURACY, bars=[(0, 92.2), (0, 91.4)],
         texts=['92.2', '91.4']),
    dict(x=LATENCY, bars=[(0, 156), (0, 61)],
         texts=['156', '61']),
  ],
  'iterations': [
    dict(y='cosine', labels=['mask', 'cls'],
         lines=[*COSINES['cosine'].values()]),
    dict(x='iteration', y='share', lines=[*COSINES['share'].values()]),
  ],
}  # fmt: skip


@pytest.mark.parametrize('name', SHOWN)
def test_shows(name, drawn):
  for axes, shown in zip(drawn(name), SHOWN[name], strict=True):
    texts = [text.get_text() for text in axes.texts]
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert axes.get_xlabel() == shown.get('x', axes.get_xlabel())
    assert axes.get_ylabel() == shown.get('y', axes.get_ylabel())
    assert axes.get_legend_handles_labels()[1] == shown.get('labels', [])
    assert [text for text in texts if text] == shown.get('texts', [])
    assert bars == [pytest.approx(bar) for bar in shown.get('bars', [])]
    if 'lines' in shown:
      for line, y in zip(axes.get_lines(), shown['lines'], strict=True):
        np.testing.assert_allclose(line.get_ydata(), y)
    assert axes.yaxis_inverted() == bool(bars)


def test_retention_is_the_median_over_groups_of_lengths(drawn):
  by_layer, axes = drawn('retention')
  observed, scheduled = by_layer.get_lines()
  np.testing.assert_allclose(observed.get_xydata(), [[0, 80], [1, 80]])
  np.testing.assert_allclose(scheduled.get_ydata(), [70, 70])
  assert len(by_layer.collections) == 1
  # Of 60 lengths, with equally many rows, five in each of the 12 groups.
  groups = [number == (LENGTH - 2) // 5 for number in range(12)]
  for line, kept in zip(axes.get_lines(), KEPT.T, strict=True):
    expected = [np.median(100 * kept[g] / LENGTH[g]) for g in groups]
    np.testing.assert_allclose(line.get_ydata(), expected)
    np.testing.assert_array_equal(line.get_xdata(), np.arange(4, 62, 5))
  assert len(axes.collections) == 2  # the quartiles


def test_each_cost_is_drawn_against_each_difficulty(drawn):
  found = drawn('against')
  labels = [(axes.get_ylabel(), axes.get_xlabel()) for axes in found]
  # Panels share the axes of their row and their column.
  assert labels == [
    ('flops', ''), ('', ''), ('depth', 'length'), ('', 'entropy_dense')
  ]  # fmt: skip
  (line,) = found[0].get_lines()
  np.testing.assert_array_equal(line.get_ydata(), np.arange(4, 62, 5) ** 2)


@pytest.mark.parametrize('name', ['frontier', 'ablation'])
def test_nothing_to_draw_is_an_error(name, tmp_path):
  plot, _, *arguments = PLOTS[name]
  with pytest.raises(ValueError, match='something to draw'):
    plot(tmp_path / 'x', {}, *arguments)
  assert not any(tmp_path.iterdir())


GRID = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize('values', [GRID, GRID[:1], np.ones((1, 2))])
def test_a_heatmap_shows_every_cell(values, made, tmp_path, assert_readable):
  pictures.plot_heatmap(tmp_path / 'x', values, 'rows (%)', 'Read')
  axes, bar = made[0].axes
  (mesh,) = axes.collections
  cells, (rows, columns) = np.asarray(mesh.get_array()), values.shape
  np.testing.assert_array_equal(cells.ravel(), values.ravel())
  # A cell is centred at its index; the first row is above.
  assert axes.get_xlim() == (-0.5, columns - 0.5)
  assert axes.get_ylim() == (rows - 0.5, -0.5)
  labels = axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()
  assert labels == ('column', 'row' if rows > 1 else '', 'rows (%)')
  assert_readable(made[0], 4)
  assert axes.bbox.height > 40


def test_examples_show_images_and_symbols(made, tmp_path, assert_readable):
  image = np.zeros((8, 8, 3), np.uint8)
  one = image, 'accordion_of_wo\ntape 3'
  text = '\n'.join(['1 0 - 0 1 1 1 1'] * 8)
  groups = {'shortest tapes': [one] * 5,
            'longest tapes': [(text, 'odd\ntape 9')]}  # fmt: skip
  pictures.plot_examples(tmp_path / 'x', groups)
  axes = made[0].axes
  assert [len(one.images) for one in axes[:6]] == [1] * 5 + [0]
  (shown,) = axes[5].texts
  assert shown.get_text() == text
  assert_readable(made[0], 7)


def test_a_frontier_of_rates_is_the_upper_right(made, tmp_path):
  points = {'a': (1.0, 3.0), 'b': (2.0, 2.0), 'c': (1.5, 1.0)}
  given = {'x': points}, 'images/s', 'accuracy (%)'
  pictures.plot_frontier(tmp_path / 'x', *given, is_rate=True)
  line = made[0].axes[0].get_lines()[0]
  assert line.get_xdata().tolist() == [1.0, 2.0]


def test_a_model_has_one_colour_and_each_library_a_marker():
  names = 'other', 'dense', 'EAT 80 %', 'PyTorch dense', 'ViT-B/16', 'UViT'
  looks = {n: plots.look(k) for n, k in pictures.numbers(names).items()}
  assert len({*looks.values()}) == len(names)
  colours = {name: colour for name, (colour, _) in looks.items()}
  assert colours['dense'] == colours['PyTorch dense'] == colours['ViT-B/16']
  assert len({*colours.values()}) == 4


def test_a_wide_frontier_is_logarithmic_with_error_bars(drawn, made, tmp_path):
  (axes,) = drawn('frontier')
  assert axes.get_xscale() == 'log'
  low = {'a': {'': (Estimate(2.0, 1.5, 2.5), 90.0)}, 'b': {'': (3.0, 80.0)}}
  pictures.plot_frontier(tmp_path / 'x', low, LATENCY, ACCURACY)
  (axes,) = made[-1].axes
  assert axes.get_xscale() == 'linear'
  assert axes.get_ylim() == pytest.approx((77, 93))  # two points
  ((bar,),) = [lines.get_segments() for lines in axes.collections]
  assert bar.tolist() == [[1.5, 90.0], [2.5, 90.0]]


def test_without_matplotlib_there_is_a_note(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with plots.if_installed():
    pictures.plot_bars(tmp_path / 'x', VARIANTS, 'Ablation')
  assert "pip install -e '.[plots]'" in capsys.readouterr().err
