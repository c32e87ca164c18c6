"""What a run leaves for those who read it back without its data."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.source import DatasetInfo
from train_lib import checkpoint_io, loading, run_directory, sharding
from train_lib.checkpoint import Checkpointer
from train_lib.task import Task

INFO = DatasetInfo('tokens', (64,), 'int32', 1, (), 10, 30, 'float32', (32, 64))


def test_info_survives_the_file(tmp_path):
  with run_directory.RunDirectory(tmp_path, {}) as directory:
    directory.write('dataset_info.json', dataclasses.asdict(INFO))
  assert loading.load_info(tmp_path) == INFO


@pytest.mark.parametrize(
  ('file', 'load', 'contents'),
  [
    ('dataset_info.json', loading.load_info,
     (None, '{', '{"input_key": 1}', '[]', '{"a": 1}')),
    ('config.json', loading.load_config,
     ('', '{', '[]', 'null', '{"task": NaN}', '{"task": "x"}', '\udcff')),
  ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, file, load, contents):
  for content in contents:
    if content is not None:
      (tmp_path / file).write_text(content, errors='surrogateescape')
    with pytest.raises(InvalidDataError, match=f'{file} is damaged'):
      load(tmp_path)


@pytest.mark.parametrize('key', ['--workdir', 'loss.teacher'])
def test_a_missing_run_names_the_field_that_has_it(tmp_path, key):
  with pytest.raises(ConfigError) as error:
    loading.load_config(tmp_path, key)
  assert error.value.field == key


@pytest.mark.parametrize('devices', [0, 2])
def test_all_variables_are_on_the_devices(tmp_path, devices):
  tree = {'params': {'w': jnp.ones(4)}, 'model_state': {'mean': jnp.ones(2)}}
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, tree)
  mesh = sharding.make_mesh({'data': devices}) if devices else None
  task = mock.Mock(spec=Task)
  task.init = lambda rng: (tree['params'], tree['model_state'])
  trained = loading.Trained(checkpoint_io.find(tmp_path), task, mesh)
  for leaf in jax.tree.leaves(trained.variables):
    assert isinstance(leaf, jax.Array)
    assert len(leaf.sharding.device_set) == max(devices, 1)


def test_a_run_needs_its_own_directory_only(tmp_path):
  (tmp_path / 'config.json').write_text(
    '{"warm_start": {"workdir": "/gone"}, "loss": {"teacher": "/gone"}, '
    '"dataset": {"tokenizer": "/gone", "length_buckets": [1, 2]}}'
  )
  (tmp_path / 'tokenizer.json').write_text('')
  config = loading.load_config(tmp_path)
  assert (config.warm_start.workdir, config.loss.teacher) == ('', '')
  assert config.dataset.tokenizer == str(tmp_path / 'tokenizer.json')
  assert config.dataset.length_buckets == (1, 2)
