"""What a run leaves for those who read it back without its data."""

import dataclasses

import pytest

from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.source import DatasetInfo
from train_lib import loading, run_directory

INFO = DatasetInfo('tokens', (64,), 'int32', 1, (), 10, 30, 'float32', (32, 64))


def test_info_survives_the_file(tmp_path):
  with run_directory.RunDirectory(tmp_path, {}) as directory:
    directory.write('dataset_info.json', dataclasses.asdict(INFO))
  assert loading.load_info(tmp_path) == INFO


def test_only_the_primary_process_writes_it(tmp_path):
  with run_directory.RunDirectory(tmp_path, {}, primary=False) as directory:
    directory.write('dataset_info.json', dataclasses.asdict(INFO))
  assert loading.load_info(tmp_path) is None


@pytest.mark.parametrize('content', ['{', '{"input_key": 1}', '[]', '{"a": 1}'])
def test_a_damaged_file_is_named(tmp_path, content):
  (tmp_path / 'dataset_info.json').write_text(content)
  with pytest.raises(InvalidDataError, match=r'dataset_info\.json is damaged'):
    loading.load_info(tmp_path)


def test_a_missing_run_names_who_asked(tmp_path):
  with pytest.raises(ConfigError) as error:
    loading.load_config(tmp_path)
  assert error.value.field == '--workdir'
  with pytest.raises(ConfigError) as error:
    loading.load_config(tmp_path, key='loss.teacher')
  assert error.value.field == 'loss.teacher'


@pytest.mark.parametrize('content', ['', '{', '[]', 'null', '{"task": NaN}'])
def test_a_damaged_configuration_is_named(tmp_path, content):
  (tmp_path / 'config.json').write_text(content)
  with pytest.raises(InvalidDataError, match=r'config\.json is damaged'):
    loading.load_config(tmp_path)
