"""A folder for files of texts, whose tokenizer knows `word_rows.VOCABULARY`."""

import subprocess
import sys

import pytest

from tests.dataset_lib import word_rows


@pytest.fixture
def root(tmp_path):
  """A folder for data; the tokenizer lies beside it."""
  folder = tmp_path / 'vocabulary'
  folder.mkdir()
  (folder / 'vocab.txt').write_text('\n'.join(word_rows.VOCABULARY))
  (tmp_path / 'data').mkdir()
  return tmp_path / 'data'


@pytest.fixture(scope='session')
def tfds_data(tmp_path_factory):
  """A folder of the data sets of `tfds_files`."""
  root = tmp_path_factory.mktemp('tfds')
  subprocess.run(
    [sys.executable, '-m', 'tests.dataset_lib.tfds_files', str(root)],
    check=True,
    capture_output=True,
  )
  return root
