"""Which package may import which; packages are found, see `tests.packages`."""

import ast
import json
import pathlib
import re

import pytest

from core import registry
from core.errors import ConfigError
from tests import packages, shell

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIBRARIES = {
  'core': set(),
  'model_lib': {'core'},
  'dataset_lib': {'core'},
  'halting': {'core', 'model_lib'},
  'eval_lib': {'core', 'model_lib', 'dataset_lib', 'halting'},
  'serve_lib': {'core', 'model_lib', 'dataset_lib', 'halting', 'eval_lib'},
  'train_lib': {'core', 'model_lib', 'dataset_lib', 'halting', 'eval_lib'},
}


def may_import(root):
  """Packages that each package of a checkout may import."""
  families = packages.families(root)
  return LIBRARIES | {name: set(LIBRARIES) for name in families} | {
    'configs': set(), 'launch': {*LIBRARIES, *families, 'configs'},
    'benchmarks': {*LIBRARIES, *families, 'launch'},
  }  # fmt: skip


def imported_packages(path):
  """Top-level names that a file imports, at any place in it."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name.split('.')[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      yield (node.module or '').split('.')[0]


def forbidden(path, package, legal):
  """Packages of the checkout that a file imports and may not."""
  ours = {*imported_packages(path)} & {*legal}
  return ours - legal[package] - {package}


@pytest.mark.parametrize('package', may_import(ROOT))
def test_a_package_imports_only_what_it_may(package):
  legal, files = may_import(ROOT), list((ROOT / package).rglob('*.py'))
  assert files
  wrong = {str(path): forbidden(path, package, legal) for path in files}
  assert not any(wrong.values()), wrong


def test_nothing_names_the_benchmarks():
  name = re.compile(r'benchmarks\.\w+:|import_module\(.*benchmarks')
  for package in set(may_import(ROOT)) - {'benchmarks'}:
    for path in (ROOT / package).rglob('*.py'):
      assert not name.search(path.read_text()), path


def test_a_configuration_cannot_name_a_benchmark():
  words = r"--trust=benchmarks \(in .* core\.registry\.trust\('benchmarks'\)"
  with pytest.raises(ConfigError, match=words):
    registry.locate('benchmarks.timing:Call', 'model.name')


@pytest.mark.parametrize(
  'module', ['eat.task', 'albert_act.task', 'train_lib.trainer']
)
def test_training_loads_no_server(module):
  """Nor certificates; a Task names how it is served by a string."""
  code = f'import json, sys, {module}; print(json.dumps([*sys.modules]))'
  ours = {
    name for name in json.loads(shell.python('-c', code).stdout)
    if name.partition('.')[0] in may_import(ROOT)
  }  # fmt: skip
  assert not {one for one in ours if one.startswith('serve_lib')}
  assert 'eval_lib.certificate' not in ours
  if module == 'eat.task':
    assert len(ours) <= 25, sorted(ours)


def test_every_library_is_known():
  assert set(packages.libraries(ROOT)) == set(LIBRARIES)


def test_no_library_names_a_family():
  families = '|'.join(packages.families(ROOT))
  name = re.compile(rf"""['"]({families})[\w.]*:[^ ]*['"]""")
  for library in LIBRARIES:
    for path in (ROOT / library).rglob('*.py'):
      assert not name.search(path.read_text()), path


def test_configs_import_only_ml_collections_and_each_other():
  allowed = {
    'ml_collections', 'configs', 'difflib', 'json', 'pathlib', 're', 'typing'
  }  # fmt: skip
  for path in (ROOT / 'configs').rglob('*.py'):
    assert set(imported_packages(path)) <= allowed, path
