"""The analysis of tapes against counting row by row."""

import collections

import jax
import numpy as np
import pytest

from benchmarks import tape_report
from core.errors import ConfigError
from dataset_lib import builder
from tests.adatape import serving_test

IMAGES = {**serving_test.DATA['image'], 'test_examples': 30}
NIGHTLY = pytest.mark.nightly
LEARNED = {**serving_test.IMAGE, 'bank': 'learnable', 'bank_size': 20}


def read(model, dataset, rows):
  task, variables = serving_test.build(model, dataset)
  data = tape_report.spread_rows(dataset, 'test', rows)
  return task, variables, tape_report.read(task, variables, data)


def one_by_one(task, variables, dataset, indices):
  """(tape length, tokens read, right answer) of each row alone."""
  source = builder.build_source(dataset, 'test')
  key = task.info.input_key
  apply = jax.jit(task.apply)
  for index in indices:
    record = source.record(int(index))
    batch = {key: record[key][None]}
    logits, out = apply(variables['params'], {}, batch)
    tape, length = out['tape'], int(out['tape']['length'][0])
    picks = np.asarray(tape['indices'])[0, :length].ravel().tolist()
    yield length, picks, int(logits[0].argmax()) == record['label']


@pytest.mark.parametrize(
  ('model', 'dataset', 'grid'),
  [
    pytest.param(serving_test.IMAGE, IMAGES, (4, 4), marks=NIGHTLY),
    (LEARNED, IMAGES, (0, 0)),
    pytest.param(
      serving_test.PARITY, serving_test.DATA['tokens'], (1, 8), marks=NIGHTLY
    ),
  ],
  ids=['input', 'learnable', 'symbols'],
)
def test_equals_counting_row_by_row(model, dataset, grid):
  task, variables, tapes = read(model, dataset, 15)
  total = len(builder.build_source(dataset, 'test'))
  indices = [n * total // 15 for n in range(15)]
  assert tapes.index.tolist() == indices
  lengths, picks, right = zip(
    *one_by_one(task, variables, dataset, indices), strict=True
  )
  counted = collections.Counter(token for row in picks for token in row)
  assert tapes.length.tolist() == list(lengths)
  assert tapes.correct.tolist() == list(right)
  assert {n: c for n, c in enumerate(tapes.counts) if c} == counted
  assert tape_report.bank_grid(task.model, task.info.input_shape) == grid

  names = task.label_names
  summary, by_length, classes, bank = tape_report.tables(tapes, grid, names)
  (tape, sequence), inputs = summary.rows, tapes.input_tokens
  assert inputs == (1 if grid == (1, 8) else 4)
  assert tape['mean'] == pytest.approx(np.mean(lengths), abs=1e-4)
  assert tape['variance'] == pytest.approx(np.var(lengths), abs=1e-4)
  for name in ('minimum', 'maximum', 'limit'):
    assert sequence[name] == tape[name] + inputs
  assert tape['limit'] == task.model.max_steps
  found = {row['tape length']: row['rows'] for row in by_length.rows}
  assert found == collections.Counter(lengths)
  assert [row['rows'] for row in bank.rows] == sorted(tapes.counts)[::-1]
  for row in bank.rows:
    assert row['rows'] == counted[row['token']]
    assert row['share'] == pytest.approx(row['rows'] / 15, abs=1e-6)
    assert ('x' in row) == bool(grid[1])
    if grid[1]:
      assert row['token'] == grid[1] * row['y'] + row['x']
  of_class = {name: [] for name in names}
  for label, length in zip(tapes.label, lengths, strict=True):
    of_class[names[label]].append(length)
  for row in classes.rows:
    assert row['mean'] == pytest.approx(np.mean(of_class[row['class']]), 1e-4)
  means = [row['mean'] for row in classes.rows]
  assert means == sorted(means)


def test_examples_are_the_shortest_and_longest():
  task, _, tapes = read(serving_test.IMAGE, IMAGES, 20)
  source = builder.build_source(IMAGES, 'test')
  names = task.label_names
  rows, shown = tape_report.examples(tapes, source, 3, names)
  lengths = sorted(tapes.length.tolist())
  assert lengths[0] < lengths[-1]
  found = [row['tape length'] for row in rows]
  assert found == lengths[:3] + lengths[::-1][:3]
  assert len({row['index'] for row in rows}) == 6
  pictures = shown['shortest tapes'] + shown['longest tapes']
  for row, (picture, title) in zip(rows, pictures, strict=True):
    record = source.record(row['index'])
    np.testing.assert_array_equal(picture, record['image'])
    assert row['class'] == f'fake_{record["label"]}'
    assert title == f'{row["class"]}\ntape {row["tape length"]}'
  _, shown = tape_report.examples(tapes, source, 99, ('a',) * 3)
  assert [len(group) for group in shown.values()] == [10, 10]


def test_patches_have_the_number_of_their_step(made, tmp_path, capsys):
  task, variables, tapes = read(serving_test.IMAGE, IMAGES, 20)
  source = builder.build_source(IMAGES, 'test')
  _, shown = tape_report.examples(tapes, source, 1, task.label_names)
  tape_report.draw_tapes(tmp_path, tapes, (4, 4), shown)
  ends = np.argsort(tapes.length, kind='stable')[[0, -1]]
  read_alone = one_by_one(task, variables, IMAGES, tapes.index[ends])
  for axes, (length, picks, _) in zip(made[0].axes, read_alone, strict=True):
    places = [(n % 4 + 0.5, n // 4 + 0.5) for n in picks]
    steps = np.repeat(np.arange(1, length + 1), len(picks) // length)
    assert {t.get_position(): t.get_text() for t in axes.texts} == dict(
      zip(places, map(str, steps), strict=True)
    )
    assert f'tape {length} tokens' in axes.get_title(loc='left')
  tape_report.draw_tapes(tmp_path, tapes, (0, 0), shown)
  assert len(made) == 1
  assert "bank='learnable' reads trained vectors" in capsys.readouterr().out


def test_symbols_are_written_in_lines():
  tokens = np.array([0, 1, 2, 0, 3, 28], np.int32)
  assert tape_report._lines(tokens) == '1 - 0 1\na z'


def test_without_a_bank_there_is_nothing_to_analyse():
  with pytest.raises(ConfigError, match='nothing to analyse'):
    read({**serving_test.IMAGE, 'bank': 'none'}, IMAGES, 4)
