"""The table of classes and the confusion matrix against plain counting."""

import csv

import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest

from core.errors import ConfigError
from eval_lib import confusion
from tests import contexts

NAMES = ['9', 'cat', '10', 'never']
LABELS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
ANSWERS = np.array([0, 0, 1, 1, 2, 2, 2, 0, 2])


def test_the_table_by_hand():
  table = {r['class']: r for r in confusion.table(LABELS, ANSWERS, NAMES)}
  assert list(table) == ['cat', 'never', '9', '10']
  for name, row in table.items():
    own, said = NAMES.index(name) == LABELS, NAMES.index(name) == ANSWERS
    right = (own & said).sum()
    precision, recall = right / max(said.sum(), 1), right / max(own.sum(), 1)
    assert row['precision'] == pytest.approx(precision)
    assert row['recall'] == pytest.approx(recall)
    both = precision + recall
    assert row['f1'] == pytest.approx(2 * precision * recall / (both or 1))
    assert row['support'] == own.sum()


def drawn(*rows):
  axes = matplotlib.figure.Figure().subplots()
  confusion.plot(axes, *rows, 'a split')
  labels = [text.get_text() for text in axes.get_yticklabels()]
  assert labels == [text.get_text() for text in axes.get_xticklabels()]
  numbers = {t.get_position(): int(t.get_text()) for t in axes.texts}
  return axes, labels, numbers


def test_the_picture_has_every_count():
  axes, labels, numbers = drawn(LABELS, ANSWERS, NAMES)
  assert sum(numbers.values()) == len(LABELS)
  for (x, y), number in numbers.items():
    label, answer = NAMES.index(labels[y]), NAMES.index(labels[x])
    assert number == ((label == LABELS) & (answer == ANSWERS)).sum()
  assert axes.yaxis_inverted()
  assert axes.get_title() == '9 rows of a split'


def test_of_many_classes_the_most_confused_are_drawn():
  names = [f'{n:02d}' for n in range(40)]
  labels = np.repeat(np.arange(40), 3)
  answers = np.where(labels < 29, labels ^ 1, labels)
  axes, shown, _ = drawn(labels, answers, names)
  # 28 was said to be 29, which has an error too.
  assert shown == names[:30]
  assert axes.get_title().endswith('\n30 most confused of 40 classes')


FAKE = dict(
  name='tests.fakes:FakeImages', image_size=8, num_classes=3, test_examples=12
)


def test_the_evaluator_writes_what_it_prints(tmp_path, capsys):
  def outputs(variables, batch):
    logits = jnp.zeros((len(batch['label']), 2, 3)).at[..., 1].set(1.0)
    return {'logits': logits}

  context = dict(outputs=outputs, workdir=tmp_path)
  built = contexts.evaluator_of('confusion', FAKE, context)
  result = built.run({})
  with (tmp_path / 'classes.csv').open() as file:
    rows = list(csv.DictReader(file))
  f1 = [float(row['f1']) for row in rows if int(row['support'])]
  assert result['macro_f1'] == pytest.approx(np.mean(f1)) != 0
  assert sum(int(row['support']) for row in rows) == 12
  assert (tmp_path / 'confusion.png').is_file()
  assert 'precision' in capsys.readouterr().out


def test_rows_of_several_labels_are_refused():
  puzzle = dict(name='looped.sudoku:Sudoku', rows=2, columns=2)
  data = dict(name='looped.data:Generated', puzzle=puzzle)
  with pytest.raises(ConfigError, match=r'label_kind.*one for each row'):
    contexts.evaluator_of('confusion', data)
