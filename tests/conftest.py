"""Fixtures of all tests: 8 fake devices, strict numerics, the real data.

The environment is set before jax is imported anywhere; the import hook checks
the jaxtyping annotations of the libraries at run time with beartype.
"""

import atexit
import gc
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

os.environ['JAX_PLATFORMS'] = 'cpu'
# Compiling takes most of a test's time, and level 0 shortens it by 40 %. A flag
# of the environment overrides it: .ci/run sets the usual level at night.
os.environ['XLA_FLAGS'] = (
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 '
) + os.environ.get('XLA_FLAGS', '')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import jax
import jaxtyping
import pytest

from tests import packages

pytest_plugins = ['tests.figures']
REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_jaxtyped = jaxtyping.jaxtyped


def jaxtyped(typechecker: Callable) -> Callable:
  """A decorator that leaves functions without shapes to beartype alone.

  jaxtyping binds the arguments of every call, which took a third of the time of
  tests of data.
  """

  def decorate(given):
    names_shapes = 'jaxtyping' in str(getattr(given, '__annotations__', ''))
    if isinstance(given, type) or names_shapes:
      return _jaxtyped(given, typechecker=typechecker)
    return typechecker(given)

  return decorate


jaxtyping.jaxtyped = jaxtyped  # which modules imported by the hook call
HOOK = jaxtyping.install_import_hook(
  (
    *packages.libraries(REPOSITORY),
    *packages.families(REPOSITORY),
    'benchmarks',
  ),
  'beartype.beartype',
)

from core import registry  # noqa: E402  after the hook

registry.trust('tests')  # whose fakes configurations name
jax.config.update('jax_numpy_rank_promotion', 'raise')
# Compiled programs are kept for the processes that tests start, many of which
# train the same small model.
CACHE = 'JAX_COMPILATION_CACHE_DIR'
if CACHE not in os.environ:  # not set by the process that has started this one
  os.environ[CACHE] = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
jax.config.update('jax_compilation_cache_dir', None)


def pytest_collection_finish() -> None:
  """Modules and tests live to the end: the collector need not visit them."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 100)  # jax makes many objects without cycles


@pytest.fixture(scope='session', autouse=True)
def in_the_checkout() -> None:
  """Tests run in the root of the checkout, as `python -m launch.train`."""
  os.chdir(REPOSITORY)


@pytest.fixture(scope='session', autouse=True)
def not_an_own_process() -> Iterator[None]:
  """Commands that tests call do not claim the threads of the process."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr('serve_lib.process.own_process', lambda: None)
    yield


@pytest.fixture
def shared_data() -> Callable[..., pathlib.Path]:
  """Returns a path of the real data next to the checkout; skips without it."""
  default = REPOSITORY.parent / 'shared' / 'data'
  root = pathlib.Path(os.environ.get('SHARED_DATA', default))

  def existing(*parts: str) -> pathlib.Path:
    path = root.joinpath(*parts)
    if not path.exists():
      pytest.skip(f'no {path}; SHARED_DATA is the folder of real data')
    return path

  return existing


@pytest.fixture(scope='session')
def folders(tmp_path_factory):
  """Stand-in data; see `tests.golden.standin`."""
  from tests.golden import standin  # after the import hook

  return standin.write_all(tmp_path_factory.mktemp('standin'))


@pytest.fixture
def mesh():
  """A mesh of 2 devices on each of 3 axes, which is set."""
  axes, kinds = ('data', 'fsdp', 'tensor'), (jax.sharding.AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 2, 2), axes, axis_types=kinds)
  with jax.set_mesh(mesh):
    yield mesh


@pytest.fixture(autouse=True)
def strict_dtypes(request):
  """Forbids implicit casts in our mathematics; optax makes some."""
  rooms = {'halting', 'model_lib', 'adatape', 'albert_act', 'eval_lib'}
  ours = rooms & set(request.path.parts)
  with jax.numpy_dtype_promotion('strict' if ours else 'standard'):
    yield


@pytest.fixture(autouse=True)
def no_mesh_left():
  """Fails a test that leaves a mesh set, which would break later ones."""
  yield
  assert jax.sharding.get_abstract_mesh().empty, 'a mesh is left set'
