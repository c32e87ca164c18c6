"""JSON without NaN, written all or not at all."""

import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from train_lib import strict_json


def test_numbers_that_are_not_finite_become_strings_float_reads():
  values = [math.nan, math.inf, -math.inf, np.float32('nan')]
  text = strict_json.dumps(values)
  assert text == '["NaN", "Infinity", "-Infinity", "NaN"]'
  for value, name in zip(values, json.loads(text), strict=True):
    np.testing.assert_equal(float(name), float(value))


def test_scalars_of_numpy_and_jax_and_nested_containers():
  value = {'a': (np.int64(3), jnp.float32(0.5)), 4: {'b': None}}
  assert strict_json.dumps(value) == '{"a": [3, 0.5], "4": {"b": null}}'


def test_refuses_what_is_no_json():
  with pytest.raises(TypeError):
    strict_json.dumps({'a': np.zeros(2)})
  for text in ('NaN', '[Infinity]', '{"a": -Infinity}', '{'):
    with pytest.raises(ValueError):
      strict_json.loads(text)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / 'x.json'
  strict_json.write(path, {'a': 1})

  def full(fd):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space'):
    strict_json.write(path, {'a': 2})
  assert json.loads(path.read_text()) == {'a': 1}
  assert [p.name for p in tmp_path.iterdir()] == ['x.json']
