"""A run of one step, which tests change as others could."""

import pytest

from launch import command_line
from tests.dataset_lib.conftest import cache, root  # noqa: F401  fixtures
from tests.launch.conftest import refused  # noqa: F401
from train_lib import trainer

CONFIG = 'configs/adatape/digits.py:model=learn'
TINY = [
  'batch_size=16', 'mesh.data=1', 'model.width=8', 'model.mlp_dim=8',
  'model.num_heads=1', 'phases.0.steps=1', 'phases.0.epochs=0',
  'tensorboard=false', 'dataset.image_size=8', 'model.depth=2',
  'model.bank_size=20', 'model.query_dim=4', 'model.max_steps=2',
  'model.tokens_per_step=2',
]  # fmt: skip
FLAGS = [f'--config={CONFIG}', *(f'--config.{one}' for one in TINY)]


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
  config = command_line.load_config(CONFIG, TINY)
  directory = tmp_path_factory.mktemp('runs') / 'run'
  trainer.train(config, str(directory))
  return directory
