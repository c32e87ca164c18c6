"""Which rows of a report the temperatures were fitted to."""

import argparse
import json

import numpy as np
import pytest

from dataset_lib import builder, source, tokenizer
from launch.eat_report import temperatures
from launch.eat_report.temperatures import Temperatures
from tests.launch.eat_report import toy


@pytest.fixture
def run_of(tmp_path):
  """Makes a run on a split of a tiny data set of 24 rows of validation."""
  toy.write_data(tmp_path)
  words = tokenizer.load(tmp_path / 'vocab.txt')
  words.save(tmp_path / 'tokenizer.json')
  dataset = dict(
    name='glue', task='sst2', directory=str(tmp_path), max_length=16,
    tokenizer=str(tmp_path / 'tokenizer.json'),
  )  # fmt: skip

  def make(split):
    return argparse.Namespace(
      directory=str(tmp_path),
      step=1,
      variables={'params': {}},
      split=split,
      records=builder.build_source(dataset, split),
      config=argparse.Namespace(dataset=dataset, evals={}),
    )

  return make


def rows_of(run, split):
  """Numbers of the rows that temperatures from a split were fitted to."""
  given = dict(run.config.dataset, tokenizer='/moved/away')
  fitted = temperatures.fitted_rows(
    run, Temperatures(np.ones(2), 'somewhere', split, given)
  )
  assert fitted.shape == (len(run.records),)
  return np.flatnonzero(fitted).tolist()


def permutation(run_of):
  """Which row of the file each part of one row is."""
  whole = source.places(run_of('validation').records)
  return [
    whole.index(source.places(run_of(f'validation[{n}:{n + 1}]').records)[0])
    for n in range(24)
  ]


@pytest.mark.parametrize(
  ('split', 'fitted_to', 'shared'),
  [
    ('validation', 'validation[:25%]', range(6)),
    ('validation', 'dev[75%:]', range(18, 24)),
    ('validation[3:]', 'validation[:25%]', range(3, 6)),
    ('validation', 'train[90%:]+validation[2:4]', (2, 3)),
    ('validation', 'train[95%:]', ()),
    ('validation[50%:]', 'validation[:50%]', ()),
    ('validation', 'validation', range(24)),
    ('validation', '', ()),
  ],
)
def test_rows_of_a_part_are_found(run_of, split, fitted_to, shared):
  order = permutation(run_of)
  first = {'validation[3:]': 3, 'validation[50%:]': 12}.get(split, 0)
  shown = sorted(order[first:])
  expected = sorted(shown.index(order[number]) for number in shared)
  assert rows_of(run_of(split), fitted_to) == expected


def test_the_calibration_says_what_it_was_fitted_to(run_of, tmp_path):
  run = run_of('validation')
  path = tmp_path / 'calibration.json'
  path.write_text(json.dumps({'temperatures': [2.0, 1.0]}))
  old = temperatures.of(run)
  assert old.values.tolist() == [2.0, 1.0]
  assert 'does not say' in old.source
  assert not temperatures.fitted_rows(run, old).any()
  path.write_text(
    json.dumps(
      {'temperatures': [2.0, 1.0], 'calibration_split': 'validation[:50%]'}
    )
  )
  new = temperatures.of(run)
  assert new.source == 'calibration.json, fitted to validation[:50%]'
  assert temperatures.fitted_rows(run, new).sum() == 12
