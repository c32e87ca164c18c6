"""The marks of tests that write files of TFDS, which takes TensorFlow."""

import importlib.util

import pytest

MARKS = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec('tensorflow') is None
    or importlib.util.find_spec('tensorflow_datasets') is None,
    reason='writing TFDS files needs tensorflow and tensorflow_datasets',
  ),
]
