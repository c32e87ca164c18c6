"""A file has its old content or the new one; numbers of arrays are JSON."""

import math

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


def test_values_become_strict_json():
  rest = [{'b': None}, math.nan, math.inf, -math.inf, np.float32('nan')]
  names = ['NaN', 'Infinity', '-Infinity', 'NaN']
  found = files.loads(files.dumps({'a': (np.int64(3), 0.5), 4: rest}))
  assert found == {'a': [3, 0.5], '4': [{'b': None}, *names]}
  for dtype in ('bool', 'int32', 'float32', 'bfloat16'):
    value = jnp.ones((), dtype)
    numbers = files.loads(files.dumps([value, np.asarray(value)[()]]))
    assert numbers == [1, 1]
    with pytest.raises(TypeError, match='is not JSON'):
      files.dumps({'a': jnp.ones(2, dtype)})
  deep, twice = '[' * 100_000, '{"b": {"a": 1, "a": 1}}'
  for text in ('NaN', '[Infinity]', '{"a": -Infinity}', '{', deep, twice):
    with pytest.raises(ValueError):
      files.loads(text)
