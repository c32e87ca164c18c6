"""Whole runs: resumed, on several devices, read back, and one that learns."""

import json
import shutil

import jax
import numpy as np
import pytest

from launch import config_flags
from train_lib import config_schema, loading, trainer
from train_lib.checkpoint_io import find
from train_lib.run_directory import steps_in

SMALL = [
  'checkpoint.every_steps=3',
  'log_every=1',
  'tensorboard=false',
  'loader.num_threads=0',
  'dataset.test_examples=16',
  'dataset.length=6',
  'model.width=8',
  'batch_size=8',
  'stages.stage1_read.steps=3',
  'stages.stage2_skip.steps=3',
]
FLAG = 'configs/recurrent_act/graves.py:task=sparse_parity'


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)


def run(workdir, flag, *overrides):
  config = config_flags.load_config(flag, list(overrides))
  config_schema.validate(config)
  return trainer.train(config, str(workdir))


def losses(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [row['train/loss'] for row in map(json.loads, lines)]


@pytest.mark.slow
def test_resumed_and_sharded_runs_are_the_same_run(tmp_path):
  whole, resumed, sharded = (tmp_path / name for name in ('a', 'b', 'c'))
  run(whole, FLAG, *SMALL, 'mesh.data=1')
  shutil.copytree(whole, resumed)
  assert steps_in(resumed / 'checkpoints') == [3, 6]
  (newest,) = (resumed / 'checkpoints').glob('*6')
  shutil.rmtree(newest)
  (resumed / 'result.json').unlink()
  assert run(resumed, FLAG, *SMALL, 'mesh.data=1')['steps_this_process'] == 3
  assert losses(resumed) == losses(whole)
  pairs = [
    jax.tree.leaves(find(workdir).params()) for workdir in (whole, resumed)
  ]
  for a, b in zip(*pairs, strict=True):
    np.testing.assert_array_equal(a, b)

  cube = ['mesh.data=2', 'mesh.fsdp=2', 'mesh.tensor=2', 'num_micro=2']
  run(sharded, FLAG, *SMALL, *cube)
  np.testing.assert_allclose(losses(sharded), losses(whole), rtol=1e-5)

  task = loading.load_task(whole, loading.load_config(whole))
  assert task.info.input_shape == (6, 6)
  assert task.model.rule == 'skip'


@pytest.mark.nightly
@pytest.mark.parametrize('rule', ['act', 'straight_through', 'fixed'])
def test_a_run_learns_parity(rule, tmp_path):
  # Fojo's thesis at a size for a test: vectors of 12 numbers.
  flag = f'configs/recurrent_act/graves.py:task=parity,rule={rule}'
  result = run(
    tmp_path / 'run', flag, 'tensorboard=false', 'mesh.data=1',
    'loader.num_threads=0', 'dataset.length=12', 'model.max_steps=3',
    'stages.stage1.steps=2500',
  )  # fmt: skip
  assert result['test/accuracy'] > 0.95
