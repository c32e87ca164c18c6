"""A tiny dense run, a tiny EAT and a whole report of them, made once."""

import json
import pathlib

import jax
import numpy as np
import pytest

from launch import benchmark
from launch.eat_report import models
from tests.launch.eat_report import toy


@pytest.fixture(scope='package')
def runs(tmp_path_factory):
  root = pathlib.Path(__file__).resolve().parents[3]
  directory = tmp_path_factory.mktemp('runs')
  toy.write_data(directory)
  dense = toy.train(directory, 'dense', root, 'model=dense', 'model.depth=2')
  eat = toy.train(
    directory, 'eat', root, 'model=eat', 'model.depth=3',
    'model.prune_layers=(1,2)', 'model.exit_layers=(1,2)', 'model.window=4',
    'loss.exit_weights=(0.3,0.3,1.0)',
  )  # fmt: skip
  (eat / 'calibration.json').write_text(
    json.dumps(
      {'temperatures': toy.TEMPERATURES, 'calibration_split': toy.FITTED}
    )
  )
  return {'dense': dense, 'eat': eat}


@pytest.fixture(scope='package')
def direct(runs):
  """(run, its rows, what its model says of all of them in one call)."""
  run = models.load('EAT', str(runs['eat']), '', 0, '--workdir')
  records = run.records.records(np.arange(len(run.records)))
  arrays = [records[key] for key in ('tokens', 'token_types', 'length')]
  apply = jax.jit(run.task.model.apply)
  _, out = apply({'params': run.variables['params']}, *arrays)
  return run, records, jax.device_get(out)


@pytest.fixture(scope='package')
def tau(direct):
  """Half of the rows leave at the first head."""
  return round(float(np.median(toy.confidences(direct)[0])), 4)


@pytest.fixture(scope='package')
def made(runs, tau, tmp_path_factory):
  """The directory of a whole report."""
  out = tmp_path_factory.mktemp('report') / 'out'
  code = benchmark.main(
    [
      'eat', f'--workdir={runs["eat"]}', f'--dense={runs["dense"]}',
      f'--ablation=again={runs["dense"]}',
      f'--out={out}', '--rows=10', '--warmup=1', '--repeats=2',
      '--batch_size=2', '--guarantee', '--epsilon=0.3', f'--tau={tau}',
      '--draws=20', '--sentences=3', '--most=2', '--peers=none',
    ]
  )  # fmt: skip
  assert code == 0
  return out
