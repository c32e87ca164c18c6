"""A run that learns. Other properties of runs do not depend on the family."""

import pytest

from launch import command_line
from train_lib import config_schema, trainer


@pytest.mark.nightly
@pytest.mark.parametrize('rule', ['act', 'straight_through', 'fixed'])
def test_a_run_learns_parity(rule, repository, tmp_path):
  # Fojo's thesis at a size for a test: vectors of 12 numbers.
  file = f'{repository}/configs/recurrent_act/graves.py'
  config = command_line.load_config(f'{file}:task=parity,rule={rule}', [
    'tensorboard=false', 'mesh.data=1', 'loader.num_threads=0',
    'dataset.length=12', 'model.max_steps=3', 'stages.stage1.steps=2500',
  ])  # fmt: skip
  config_schema.validate(config)
  result = trainer.train(config, str(tmp_path / 'run'))
  assert result['test/accuracy'] > 0.95
