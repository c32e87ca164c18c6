"""What every test shares: 8 fake devices, strict numerics, the real data.

The environment is set before jax is imported anywhere; the import hook checks
the jaxtyping annotations of the libraries at run time with beartype.
"""

import os
import pathlib

os.environ['JAX_PLATFORMS'] = 'cpu'
# Most of the time of a test is compiling, and level 0 takes 40 % of it off.
# What stands later wins: tests that train for long ask for the usual level, see
# .ci/run.
os.environ['XLA_FLAGS'] = (
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 '
) + os.environ.get('XLA_FLAGS', '')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import jax
import jaxtyping
import pytest

PACKAGES = (
  'adatape',
  'albert_act',
  'dataset_lib',
  'eat',
  'eval_lib',
  'model_lib',
  'recurrent_act',
  'serve_lib',
  'train_lib',
)
HOOK = jaxtyping.install_import_hook(PACKAGES, 'beartype.beartype')

jax.config.update('jax_numpy_rank_promotion', 'raise')

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def repository() -> pathlib.Path:
  """The root of the checkout, from where `python -m launch.train` runs."""
  return REPOSITORY


@pytest.fixture
def shared_data() -> pathlib.Path:
  """The folder of real data beside the checkout, or a skip with the reason."""
  path = pathlib.Path(
    os.environ.get('SHARED_DATA', REPOSITORY.parent / 'shared' / 'data')
  )
  if not path.is_dir():
    pytest.skip(f'no real data at {path}; set SHARED_DATA to its folder')
  return path


@pytest.fixture(autouse=True)
def strict_dtypes(request):
  """No implicit casts in our mathematics; optax's own optimizers make some."""
  rooms = {'model_lib', 'adatape', 'albert_act', 'eval_lib'}
  ours = rooms & set(request.path.parts)
  with jax.numpy_dtype_promotion('strict' if ours else 'standard'):
    yield
