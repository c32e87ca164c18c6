"""Reading a run's metrics, also after kills and restarts, and drawing them."""

import json
import math

import numpy as np
import pytest

from adatape.task import PonderClassification, TapeClassification
from albert_act.pretraining import Pretraining
from eval_lib import report, run_plots
from recurrent_act.task import SequenceTask

TASKS = TapeClassification, PonderClassification, Pretraining, SequenceTask
PANELS = [panel for task in TASKS for panel in task.PANELS]


def write(path, rows, tail=''):
  text = ''.join(json.dumps(row) + '\n' for row in rows) + tail
  (path / 'metrics.jsonl').write_text(text)


def full_run(steps):
  for step in range(1, steps + 1):
    row = {
      'step': step, 'train/loss': 1 / step, 'train/cross_entropy': 0.9 / step,
      'train/accuracy': 1 - 0.5 / step, 'train/learning_rate': 1e-3,
      'train/tape_length_mean': 5.0, 'train/tape_length_min': 4.0,
      'train/tape_length_max': 6.0,
    }  # fmt: skip
    if step == steps:
      row |= {
        'test/accuracy': 0.9, 'test/cross_entropy': 0.2, 'fewshot/5shot': 0.6,
        'fewshot/5shot_std': 0.1, 'fewshot/10shot': 0.7,
        'fewshot/10shot_std': 0.0,
      }  # fmt: skip
    yield row


@pytest.mark.parametrize('steps', [1, 150])
def test_draws_png_and_pdf(tmp_path, steps):
  write(tmp_path, full_run(steps), tail='{"step": 4, "train/lo')
  path = run_plots.plot_run(str(tmp_path), PANELS)
  assert path == tmp_path / 'run.png'
  assert path.read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
  assert (tmp_path / 'run.pdf').read_bytes().startswith(b'%PDF')


def test_small_and_large_ticks_have_one_form(tmp_path, made):
  rows = [{'step': s, 'train/learning_rate': 5e-5 * s} for s in (1, 2)]
  write(tmp_path, rows)
  run_plots.plot_run(tmp_path)
  ticks = [t.get_text() for t in made[0].axes[0].get_yticklabels()]
  assert ticks[:3] == ['0', '0.00002', '0.00004']
  assert '0.0001' in ticks


@pytest.fixture
def panels_of(tmp_path, made):
  """Draws rows of metrics and returns the axes by their titles."""

  def draw(rows):
    write(tmp_path, rows)
    run_plots.plot_run(tmp_path, PANELS)
    return {axes.get_title(loc='left'): axes for axes in made[-1].axes}

  return draw


BOTH = {
  'train/iterations': 2.0, 'valid/iterations': 3.0, 'train/depth': 3.0,
  'valid/depth': 4.0, 'train/mlm_accuracy': 0.25, 'valid/mlm_accuracy': 1.25,
  'train/sop_accuracy': 0.5, 'valid/sop_accuracy': 1.5,
}  # fmt: skip
LONG = {'train/loss': 3.0, 'train/learning_rate': 1e-3}
LOSS = {'train': [1, 1]}


@pytest.mark.parametrize(
  ('metrics', 'panels'),
  [
    # Equal curves are drawn once.
    ({'train/cross_entropy': 1.0}, {'Loss': LOSS}),
    ({'train/cross_entropy': 0.5, 'test/loss': 2.0},
     {'Loss': LOSS | {'test': [2, 2], 'train, cross-entropy': [0.5, 0.5]}}),
    # A mean of targets says little of each; an EAT may be served by an exit.
    ({'t/accuracy': 0.5, 't/accuracy_a.b': 0.75, 't/cross_entropy_a.b': 1.0,
      't/accuracy_c': 0.25, 't/cross_entropy_c': 1.0,
      't/accuracy_exit_4_c': 0.375, 't/accuracy_exit_2_c': 0.25},
     {'Loss': LOSS, 'Accuracy, a.b': {'t': [75, 75]},
      'Accuracy, c': {'t': [25, 25], 't, exit at layer 2': [25, 25]}}),
    ({'train/ponder_steps_mean': 2.0, 'test/steps': 3.0},
     {'Loss': LOSS, 'Ponder steps': {'train, mean': [2, 2]},
      'Repetitions': {'test, mean': [3, 3]}}),
    (BOTH,
     {'Loss': LOSS,
      'Masked words, sentence order': {
        'train, masked words': [25, 25], 'valid, masked words': [125, 125],
        'train, sentence order': [50, 50], 'valid, sentence order': [150, 150],
      },
      'Iterations': {
        'train, mean of the tokens': [2, 2],
        'valid, mean of the tokens': [3, 3],
        'train, depth of the rows': [3, 3], 'valid, depth of the rows': [4, 4],
      }}),
  ],
)  # fmt: skip
def test_only_what_was_logged_is_drawn(panels_of, metrics, panels):
  rows = [{'step': step, 'train/loss': 1.0} | metrics for step in (1, 2)]
  found = panels_of(rows)
  drawn = {
    name: {line.get_label(): [*line.get_ydata()] for line in axes.get_lines()}
    for name, axes in found.items()
  }
  assert drawn == panels
  for axes in found.values():  # steps are whole numbers in short runs
    np.testing.assert_array_equal(axes.get_xticks(), axes.get_xticks().round())
  if 'Iterations' in found:
    # A colour for each source, a kind of line for each metric.
    mean, other, depth, _ = found['Iterations'].get_lines()
    assert mean.get_color() == depth.get_color() != other.get_color()
    assert mean.get_linestyle() != depth.get_linestyle()


def test_wide_legends_do_not_narrow_the_panels(panels_of):
  panels = panels_of({'step': step, **BOTH, **LONG} for step in (1, 2))
  for axes in panels.values():
    assert axes.get_position().width > 0.3, axes.get_title(loc='left')
    if legend := axes.get_legend():
      box = legend.get_window_extent()
      assert box.x1 <= axes.get_window_extent().x1


def test_panels_and_labels_of_a_tape_run(panels_of):
  panels = panels_of(full_run(3))
  assert {
    title: axes.get_legend_handles_labels()[1] for title, axes in panels.items()
  } == {
    'Loss': ['train', 'train, cross-entropy', 'test, cross-entropy'],
    'Accuracy': ['train', 'fewshot, 5-shot', 'fewshot, 10-shot', 'test'],
    'Tape length': ['train, mean, min to max'],
    'Learning rate': ['train'],
  }
  train, *_, test = panels['Accuracy'].get_lines()
  np.testing.assert_allclose(train.get_ydata(), [50.0, 75.0, 100 - 50 / 3])
  assert panels['Accuracy'].get_ylim()[1] <= 100  # a share ends there
  np.testing.assert_allclose(test.get_xydata(), [[3, 90]])


def test_a_long_curve_is_smoothed_over_its_pale_values(panels_of):
  panels = panels_of(full_run(150))
  pale, line = panels['Loss'].get_lines()[:2]
  assert pale.get_alpha() == 0.25
  values = 1 / np.arange(1, 151)
  np.testing.assert_allclose(pale.get_ydata(), values)
  np.testing.assert_array_equal(line.get_ydata(), run_plots.smooth(values))
  # A schedule is exact.
  assert len(panels['Learning rate'].get_lines()) == 1


@pytest.mark.parametrize(
  ('text', 'error', 'match'),
  [
    ('{"step": 1}\nrubbish\n{"step": 2}\n', ValueError,
     r"metrics.jsonl:2: .*'rubbish'"),
    ('{"step": 1, "other": 1.0}\n', ValueError, 'other'),
    (None, FileNotFoundError, 'metrics.jsonl'),
  ],
)  # fmt: skip
def test_unusable_metrics_are_errors(tmp_path, text, error, match):
  if text:
    (tmp_path / 'metrics.jsonl').write_text(text)
  with pytest.raises(error, match=match):
    run_plots.plot_run(tmp_path)


def test_reading_resumed_and_nonfinite_rows(tmp_path):
  keys = ('step', 'a', 'b')
  rows = [(1, 1.0), (3, 'NaN'), (2, 9.0), (2, 2, 'Infinity')]
  rows = [dict(zip(keys, row, strict=False)) for row in rows]
  write(tmp_path, rows, tail='{"step": 4, "a": ')
  curves = report.read_curves(tmp_path / 'metrics.jsonl')
  np.testing.assert_array_equal(curves['a'], [[1, 2, 3], [1.0, 2.0, math.nan]])
  np.testing.assert_array_equal(curves['b'], [[2], [math.inf]])


def test_moving_average_by_a_plain_loop():
  values = np.random.default_rng(0).normal(size=210)
  values[50] = np.nan
  # 3 % of 210 is a window of 6: i - 3 ... i + 2
  want = [np.nanmean(values[max(0, i - 3) : i + 3]) for i in range(210)]
  want[50] = np.nan
  np.testing.assert_allclose(run_plots.smooth(values), want, rtol=1e-9)
  np.testing.assert_array_equal(run_plots.smooth(values[:100]), values[:100])


def test_the_band_holds_every_value(panels_of):
  lengths = np.sort(np.random.default_rng(0).integers(4, 20, (300, 3)))
  names = ['step', *(f'train/tape_length_{x}' for x in ('min', 'mean', 'max'))]
  rows = np.insert(lengths, 0, np.arange(1, 301), axis=1).tolist()
  panels = panels_of([dict(zip(names, row, strict=True)) for row in rows])
  [band] = panels['Tape length'].collections
  vertices = band.get_paths()[0].vertices
  for step, (low, _, high) in enumerate(lengths, 1):
    heights = vertices[np.abs(vertices[:, 0] - step) <= 0.5, 1]
    assert heights.min() <= low <= high <= heights.max()
