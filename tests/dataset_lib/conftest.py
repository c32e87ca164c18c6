"""A folder for files of texts, and a cache folder for indexes of records.

The tokenizer of the texts knows `word_rows.VOCABULARY`.
"""

import pytest

from tests.dataset_lib import corpora, word_rows


@pytest.fixture
def root(tmp_path):
  """A folder for data; the tokenizer lies beside it."""
  corpora.tokenizer(tmp_path / 'vocabulary', word_rows.VOCABULARY)
  (tmp_path / 'data').mkdir()
  return tmp_path / 'data'


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  """An empty cache folder instead of the user's."""
  folder = tmp_path_factory.mktemp('cache')
  monkeypatch.setenv('XDG_CACHE_HOME', str(folder))
  return folder
