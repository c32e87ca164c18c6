"""Which package may import which; packages are found, see `tests.packages`."""

import ast
import pathlib

import pytest

from tests import packages

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIBRARIES = {
  'model_lib': set(),
  'dataset_lib': set(),
  'halting': {'model_lib', 'dataset_lib'},
  'serve_lib': {'model_lib', 'dataset_lib', 'halting'},
  'eval_lib': {'model_lib', 'dataset_lib', 'halting', 'serve_lib'},
  'train_lib': {
    'model_lib', 'dataset_lib', 'halting', 'serve_lib', 'eval_lib'
  },
}  # fmt: skip


def may_import(root):
  """Packages that each package of a checkout may import."""
  families = packages.families(root)
  return LIBRARIES | {name: set(LIBRARIES) for name in families} | {
    'configs': set(), 'launch': {*LIBRARIES, *families, 'configs'}
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
  return (
    (set(imported_packages(path)) & set(legal)) - legal[package] - {package}
  )


@pytest.mark.parametrize('package', may_import(ROOT))
def test_a_package_imports_only_what_it_may(package):
  legal, files = may_import(ROOT), list((ROOT / package).rglob('*.py'))
  assert files
  wrong = {
    str(path): names
    for path in files
    if (names := forbidden(path, package, legal))
  }
  assert not wrong


def test_every_library_is_known():
  assert set(packages.libraries(ROOT)) == set(LIBRARIES)


def test_no_library_names_a_family():
  families = packages.families(ROOT)
  for library in LIBRARIES:
    for path in (ROOT / library).rglob('*.py'):
      tree = ast.parse(path.read_text())
      strings = {
        node.value.partition('.')[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and ':' in node.value
        and ' ' not in node.value
      }
      assert not strings & set(families), path


def test_configs_import_only_ml_collections_and_each_other():
  allowed = {
    'ml_collections',
    'configs',
    'difflib',
    'json',
    'pathlib',
    'typing',
  }
  for path in (ROOT / 'configs').rglob('*.py'):
    assert set(imported_packages(path)) <= allowed, path
