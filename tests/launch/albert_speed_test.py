"""The benchmark of halting runs on a tiny model; no test asserts a time."""

import csv
import os

import numpy as np
import pytest

from albert_act import compaction
from launch import albert_benchmark, benchmark, command_line, csv_rows


@pytest.mark.slow
def test_the_table_of_a_tiny_model(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(compaction, 'SHARES', (0.5, 1.0))
  monkeypatch.setattr(compaction, 'FEW_TOKENS', (8,))
  out = tmp_path / 'rows.csv'
  code = benchmark.main(
    ['albert', '--variant=micro', '--length=12', '--batch=2', '--shares=0.5',
     '--repeats=2', '--iterations=2', '--train_batch=2', f'--out={out}']
  )  # fmt: skip
  assert code == command_line.OK
  printed = capsys.readouterr().out
  forms = ['fixed, scanned', 'fixed, unrolled', "fixed, engine's forms",
           'masked', 'while_loop', 'engine']  # fmt: skip
  for name in (*forms, 'halting, rematerialised by 2'):
    assert name in printed
  with out.open() as file:
    rows = list(csv.DictReader(file))
  assert [row['what'] for row in rows] == forms
  assert {row['batch'] for row in rows} == {'2'}
  for row in rows:
    assert 0.3 < float(row['mean_share']) < 0.7
    assert float(row['depth_share']) >= float(row['mean_share'])
    if row['what'].startswith('fixed'):
      assert row['limit'] == ''
    else:
      assert float(row['limit']) > 1.0
    assert float(row['difference']) < 1e-5
  with (tmp_path / 'rows_train.csv').open() as file:
    steps = list(csv.DictReader(file))
  assert len(steps) == 4
  assert {(row['batch'], row['variant']) for row in steps} == {('2', 'micro')}


@pytest.mark.slow
def test_the_score_gives_the_share_that_is_asked_for():
  import jax
  from flax import linen as nn

  from albert_act.model import AlbertClassifier

  model = AlbertClassifier(variant='micro', vocab_size=50, max_positions=16)
  rng = np.random.default_rng(0)
  tokens = jax.numpy.asarray(rng.integers(1, 50, (2, 16)), 'int32')
  inputs = (tokens, tokens * 0, jax.numpy.full((2,), 16))
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *inputs))['params']
  score = albert_benchmark.score_for(model, params, inputs, 0.5)
  _, out = jax.jit(model.apply)({'params': params | {'score': score}}, *inputs)
  steps = np.asarray(out['ponder']['steps'])
  assert steps.mean() / 6 == pytest.approx(0.5, abs=0.06)
  assert len(set(steps.reshape(-1).tolist())) > 2


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--variant=huge', "--variant: expected one of ('micro'"),
    ('--shares=1.5', '--shares: invalid list of shares between 0 and 1'),
    ('--batch=0', '--batch: invalid list of positive integers'),
    ('--out=/nowhere/x.csv', '--out: expected a file in a directory'),
    ('--out=/', "--out: expected a file, '/' is a directory"),
  ],
)
def test_bad_arguments_are_answered_in_one_line(flag, message, capsys):
  with pytest.raises(SystemExit) as stop:
    benchmark.main(['albert', flag])
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  assert message in error


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
  # Root may write everywhere.
  monkeypatch.setattr(os, 'access', lambda path, mode: path != tmp_path)
  with pytest.raises(command_line.UsageError, match='not writable'):
    csv_rows.check_out(str(tmp_path / 'x.csv'))
  (tmp_path / 'there.csv').touch()
  csv_rows.check_out(str(tmp_path / 'there.csv'))
