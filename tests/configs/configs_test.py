"""Every shipped configuration is legal and trains: the real file, shrunk."""

import json

import jax
import numpy as np
import pytest

from launch import command_line
from train_lib import config_schema, trainer

FOLDER = 'configs/adatape/image_folder.py:root={root},size=32,variant=Ti/16'
CONFIGS = [
  'configs/adatape/parity.py',
  'configs/adatape/parity.py:n=8,model=transformer',
  'configs/adatape/parity.py:n=8,model=ut',
  'configs/adatape/parity_paper.py:n=8,depth=2,width=24,mlp_dim=32',
  'configs/adatape/parity_paper.py:n=8,depth=2,width=24,model=transformer',
  'configs/adatape/parity_paper.py:n=8,depth=2,width=24,model=ut',
  'configs/adatape/digits.py',
  'configs/adatape/digits.py:model=input',
  'configs/adatape/digits.py:model=vit',
  FOLDER,
  FOLDER + ',model=input,bank_patch=4',
  FOLDER + ',model=vit',
]
SHRUNK = [
  'batch_size=8',
  'mesh.data=1',
  'stages.stage1.steps=2',
  'log_every=1',
  'tensorboard=false',
  'checkpoint.every_steps=0',
  'loader.num_threads=1',
]


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)


@pytest.fixture
def folder(tmp_path):
  import cv2

  pixels = np.random.default_rng(0)
  for split in ('train', 'test'):
    for name in ('cat', 'dog'):
      (tmp_path / split / name).mkdir(parents=True)
      for number in range(8):
        image = pixels.integers(0, 255, (40, 40, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / split / name / f'{number}.jpg'), image)
  return tmp_path


def shrunk(flag):
  """Two steps of a two-block model on 32 or fewer pixels."""
  if 'image_folder' not in flag:
    return SHRUNK
  small = [*SHRUNK, 'model.depth=2']
  return small if 'model=' in flag else [*small, 'model.bank_size=60']


@pytest.mark.parametrize('flag', CONFIGS)
def test_config_trains_two_steps(flag, folder, tmp_path):
  config = command_line.load_config(flag.format(root=folder), shrunk(flag))
  config_schema.validate(config)
  workdir = tmp_path / 'run'
  result = trainer.train(config, str(workdir))
  assert result['steps'] == 2
  assert np.isfinite(result['test/cross_entropy'])
  rows = [
    json.loads(line)
    for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [row['step'] for row in rows] == [1, 2]
  assert all(np.isfinite(row['train/loss']) for row in rows)
  if 'Tape' in config.task:
    assert rows[0]['train/tape_length_max'] <= config.model.max_steps
  assert (workdir / 'run.png').exists()
  for name in ('config.json', 'versions.json', 'result.json'):
    assert json.loads((workdir / name).read_text())


def test_every_config_file_is_in_the_table(repository):
  files = {
    str(path.relative_to(repository))
    for path in (repository / 'configs').rglob('*.py')
    if path.name not in ('__init__.py', 'common.py')
  }
  assert files == {flag.partition(':')[0] for flag in CONFIGS}


@pytest.mark.parametrize('flag', CONFIGS[:1])
def test_dry_run_prints_sizes_and_writes_nothing(flag, capsys, tmp_path):
  config = command_line.load_config(flag, SHRUNK)
  trainer.dry_run(config)
  text = capsys.readouterr().out
  for word in ('parameters', 'FLOPs', 'memory', 'tokens [8, 16] int32'):
    assert word in text
  assert not list(tmp_path.iterdir())


def test_a_tensorflow_free_run(monkeypatch, tmp_path):
  import sys

  before = 'tensorflow' in sys.modules
  config = command_line.load_config(
    CONFIGS[0], [s for s in SHRUNK if 'tensorboard' not in s]
  )
  trainer.train(config, str(tmp_path / 'run'))
  assert list((tmp_path / 'run' / 'tensorboard').iterdir())
  assert ('tensorflow' in sys.modules) == before
  assert jax.process_count() == 1
