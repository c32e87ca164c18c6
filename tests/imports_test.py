"""Who may import whom: the walls of the house."""

import ast

import pytest

LIBRARIES = ('model_lib', 'dataset_lib', 'serve_lib', 'eval_lib', 'train_lib')
MODELS = ('adatape', 'albert_act', 'eat', 'recurrent_act')
MAY_IMPORT = {
  'model_lib': set(),
  'dataset_lib': set(),
  'serve_lib': {'model_lib', 'dataset_lib'},
  'eval_lib': {'model_lib', 'dataset_lib', 'serve_lib'},
  'train_lib': {'model_lib', 'dataset_lib', 'serve_lib', 'eval_lib'},
  'adatape': set(LIBRARIES),
  'albert_act': set(LIBRARIES),
  'eat': set(LIBRARIES),
  'recurrent_act': set(LIBRARIES),
  'configs': set(),
  'launch': {*LIBRARIES, *MODELS, 'configs'},
}


def imported_rooms(path):
  """Top-level names a file imports, wherever in the file it does."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name.split('.')[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      yield (node.module or '').split('.')[0]


def forbidden(path, room):
  rooms = set(imported_rooms(path)) & set(MAY_IMPORT)
  return rooms - MAY_IMPORT[room] - {room}


@pytest.mark.parametrize('room', MAY_IMPORT)
def test_room_imports_only_what_it_may(repository, room):
  files = list((repository / room).rglob('*.py'))
  assert files, f'the room {room} is empty'
  wrong = {
    str(path): names for path in files if (names := forbidden(path, room))
  }
  assert not wrong


def test_every_package_is_a_known_room(repository):
  packages = {path.parent.name for path in repository.glob('*/__init__.py')}
  assert packages == set(MAY_IMPORT)


def test_a_forbidden_import_is_found(tmp_path):
  path = tmp_path / 'wrong.py'
  path.write_text('def f():\n  from launch import train\n')
  assert forbidden(path, 'train_lib') == {'launch'}


def test_configs_import_only_ml_collections_and_common(repository):
  allowed = {'ml_collections', 'configs', 'difflib', 'typing'}
  for path in (repository / 'configs').rglob('*.py'):
    assert set(imported_rooms(path)) <= allowed, path
