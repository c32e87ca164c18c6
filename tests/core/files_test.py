"""A file has its old content or the new one; numbers of arrays are JSON."""

import jax.numpy as jnp
import numpy as np
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


@pytest.mark.parametrize('dtype', ['bool', 'int32', 'float32', 'bfloat16'])
def test_a_number_of_any_dtype_is_json(dtype):
  value = jnp.ones((), dtype)
  for number in (value, np.asarray(value)[()]):
    assert files.loads(files.dumps({'a': number})) == {'a': 1}
  with pytest.raises(TypeError, match='is not JSON'):
    files.dumps({'a': jnp.ones(2, dtype)})
