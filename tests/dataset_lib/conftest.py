"""A folder for files of texts, whose tokenizer knows `word_rows.VOCABULARY`."""

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
