"""A file has its old content or the new one."""

import pytest

from core import files


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
  path = tmp_path / 'a.json'
  files.write_text(path, 'old\n')
  files.write_text(path, 'new\n')
  assert path.read_text() == 'new\n'
  assert list(tmp_path.iterdir()) == [path]

  def fail(self, target):
    raise OSError('disk full')

  monkeypatch.setattr(type(path), 'replace', fail)
  with pytest.raises(OSError, match='disk full'):
    files.write_text(path, 'newer\n')
  assert path.read_text() == 'new\n'
  assert list(tmp_path.iterdir()) == [path]
