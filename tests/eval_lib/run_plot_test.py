"""Reading a run's metrics, also after kills and restarts, and drawing them."""

import json
import math
import sys

import numpy as np
import pytest

from eval_lib import run_plot


def write(path, rows, tail=''):
  text = ''.join(json.dumps(row) + '\n' for row in rows) + tail
  (path / 'metrics.jsonl').write_text(text)


def full_run(steps):
  for step in range(1, steps + 1):
    row = {
      'step': step,
      'train/loss': 1 / step,
      'train/cross_entropy': 0.9 / step,
      'train/accuracy': 1 - 0.5 / step,
      'train/learning_rate': 1e-3,
      'train/tape_length_mean': 5.0,
      'train/tape_length_min': 4.0,
      'train/tape_length_max': 6.0,
    }
    if step == steps:
      row |= {
        'test/accuracy': 0.9,
        'test/cross_entropy': 0.2,
        'fewshot/5shot': 0.6,
        'fewshot/5shot_std': 0.1,
        'fewshot/10shot': 0.7,
        'fewshot/10shot_std': 0.0,
      }
    yield row


@pytest.mark.parametrize('steps', [1, 3, 150])
def test_draws_png_and_pdf(tmp_path, steps):
  write(tmp_path, full_run(steps), tail='{"step": 4, "train/lo')
  path = run_plot.plot_run(str(tmp_path))
  assert path == tmp_path / 'run.png'
  assert path.read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
  assert (tmp_path / 'run.pdf').read_bytes().startswith(b'%PDF')


def panels_of(tmp_path, rows, made):
  """The axes that `plot_run` draws, by their titles."""
  write(tmp_path, rows)
  run_plot.plot_run(tmp_path)
  return {axes.get_title(loc='left'): axes for axes in made[-1].axes}


def test_panels_and_labels_of_a_tape_run(tmp_path, made):
  panels = panels_of(tmp_path, full_run(3), made)
  assert list(panels) == ['Loss', 'Accuracy', 'Tape length', 'Learning rate']
  labels = {
    title: axes.get_legend_handles_labels()[1] for title, axes in panels.items()
  }
  assert labels['Loss'] == [
    'train',
    'train, cross-entropy',
    'test, cross-entropy',
  ]
  assert labels['Accuracy'] == [
    'train',
    'test',
    'fewshot, 5-shot',
    'fewshot, 10-shot',
  ]
  assert labels['Tape length'] == ['train, min to max', 'train, mean']
  train, test = panels['Accuracy'].get_lines()[:2]
  np.testing.assert_allclose(train.get_ydata(), [50.0, 75.0, 100 - 50 / 3])
  np.testing.assert_allclose(test.get_xydata(), [[3, 90]])


def test_only_what_was_logged_is_drawn(tmp_path, made):
  rows = [
    {'step': 1, 'train/loss': 1.0, 'train/cross_entropy': 1.0},
    {'step': 2, 'train/loss': 0.5, 'train/cross_entropy': 0.5},
  ]
  panels = panels_of(tmp_path, rows, made)
  assert list(panels) == ['Loss']
  assert len(panels['Loss'].get_lines()) == 1  # equal curves are drawn once


@pytest.mark.parametrize(
  ('metrics', 'panel', 'lines'),
  [
    ({'train/ponder_steps_mean': 2.0}, 'Ponder steps', 1),
    ({'train/steps': 2.0, 'test/steps': 3.0}, 'Repetitions', 2),
  ],
)
def test_steps_are_drawn(tmp_path, made, metrics, panel, lines):
  rows = [{'step': 1, 'train/loss': 1.0} | metrics]
  panels = panels_of(tmp_path, rows, made)
  assert list(panels) == ['Loss', panel]
  assert len(panels[panel].get_lines()) == lines


def test_halting_is_drawn_with_its_depth(tmp_path, made):
  halting = {'iterations': 2.0, 'depth': 3.0, 'mlm_accuracy': 0.1}
  rows = [
    {'step': step, 'train/loss': 1.0}
    | {f'train/{name}': value for name, value in halting.items()}
    | {f'valid/{name}': value + 1 for name, value in halting.items()}
    for step in (1, 2)
  ]
  panels = panels_of(tmp_path, rows, made)
  assert list(panels) == ['Loss', 'Masked words, sentence order', 'Iterations']
  iterations = panels['Iterations']
  assert iterations.get_legend_handles_labels()[1] == [
    'train, mean of the tokens', 'valid, mean of the tokens',
    'train, depth of the rows', 'valid, depth of the rows',
  ]  # fmt: skip
  lines = iterations.get_lines()
  assert [line.get_ydata()[0] for line in lines] == [2, 3, 3, 4]
  # A colour for each source, a kind of line for each metric.
  assert lines[0].get_color() == lines[2].get_color() != lines[1].get_color()
  assert lines[0].get_linestyle() != lines[2].get_linestyle()
  masked = panels['Masked words, sentence order'].get_lines()
  np.testing.assert_allclose(
    [line.get_ydata()[0] for line in masked], [10, 110]
  )


def test_a_long_curve_is_smoothed_over_its_pale_values(tmp_path, made):
  panels = panels_of(tmp_path, full_run(150), made)
  pale, line = panels['Loss'].get_lines()[:2]
  assert pale.get_alpha() == 0.25
  np.testing.assert_allclose(pale.get_ydata(), 1 / np.arange(1, 151))
  expected = run_plot.smooth(1 / np.arange(1, 151))
  np.testing.assert_array_equal(line.get_ydata(), expected)
  # A schedule is exact.
  assert len(panels['Learning rate'].get_lines()) == 1


def test_steps_are_whole_numbers_in_short_runs(tmp_path, made):
  axes = panels_of(tmp_path, full_run(9), made)['Loss']
  ticks = axes.get_xticks()
  np.testing.assert_array_equal(ticks, np.round(ticks))


def test_damage_in_the_middle_is_named(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl:2: .*'rubbish'"):
    run_plot.plot_run(tmp_path)


def test_nothing_to_draw_is_an_error(tmp_path):
  write(tmp_path, [{'step': 1, 'other': 1.0}])
  with pytest.raises(ValueError, match='other'):
    run_plot.plot_run(tmp_path)
  with pytest.raises(FileNotFoundError):
    run_plot.plot_run(tmp_path / 'no_such_run')


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
  write(tmp_path, full_run(2))
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
    run_plot.plot_run(tmp_path)


def test_reading_resumed_and_nonfinite_rows(tmp_path):
  rows = [
    {'step': 1, 'a': 1.0},
    {'step': 3, 'a': 'NaN'},
    {'step': 2, 'a': 9.0},
    {'step': 2, 'a': 2, 'b': 'Infinity'},
  ]
  write(tmp_path, rows, tail='{"step": 4, "a": ')
  curves = run_plot.read_curves(tmp_path / 'metrics.jsonl')
  np.testing.assert_array_equal(curves['a'], [[1, 2, 3], [1.0, 2.0, math.nan]])
  np.testing.assert_array_equal(curves['b'], [[2], [math.inf]])


def test_moving_average_by_a_plain_loop():
  values = np.random.default_rng(0).normal(size=210)
  values[50] = np.nan
  half = 3  # 3 % of 210 is a window of 6: i - 3 ... i + 2
  want = [
    np.nan if np.isnan(v) else np.nanmean(values[max(0, i - half) : i + 3])
    for i, v in enumerate(values)
  ]
  np.testing.assert_allclose(run_plot.smooth(values), want, rtol=1e-9)
  np.testing.assert_array_equal(run_plot.smooth(values[:100]), values[:100])


def test_the_band_holds_every_value(tmp_path, made):
  lengths = np.random.default_rng(0).integers(4, 20, (300, 3))
  lengths.sort(axis=1)
  rows = [
    {'step': step, 'train/tape_length_min': int(low),
     'train/tape_length_mean': int(mean), 'train/tape_length_max': int(high)}
    for step, (low, mean, high) in enumerate(lengths, 1)
  ]  # fmt: skip
  axes = panels_of(tmp_path, rows, made)['Tape length']
  [band] = axes.collections
  vertices = band.get_paths()[0].vertices
  for step, (low, _, high) in enumerate(lengths, 1):
    heights = vertices[np.abs(vertices[:, 0] - step) <= 0.5, 1]
    assert heights.min() <= low <= high <= heights.max()
