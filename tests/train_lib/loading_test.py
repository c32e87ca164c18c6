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
