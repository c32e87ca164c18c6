"""Names of JAX that are not public: one fails by its name when it goes."""

import functools
import importlib
import re

import pytest
from jax import _src as private

from tests.conftest import REPOSITORY

# By module of `jax._src`: what this project uses of it.
NAMES = {
  'distributed': (  # JAX has no public key-value store
    'global_state.client',
    'global_state.process_id',
    'global_state.num_processes',
    '_jax.DistributedRuntimeClient.key_value_set',
    '_jax.DistributedRuntimeClient.key_value_dir_get',
  ),
  'xla_bridge': ('backends', 'backends_are_initialized'),  # tests
}


@pytest.mark.parametrize('module', NAMES)
def test_a_private_name_is_there(module):
  parent = importlib.import_module(f'{private.__name__}.{module}')
  for name in NAMES[module]:
    functools.reduce(getattr, name.split('.'), parent)


def test_no_other_private_module_is_used():
  used = set()
  for path in REPOSITORY.rglob('*.py'):
    text = path.read_text()
    used |= {*re.findall(r'^ *from jax\._src import (\w+)', text, re.M)}
    assert not re.search(r'^ *(import jax\._src|from jax\._src\.)', text, re.M)
  assert used == {*NAMES}
