"""Every documented command parses: its flags, its configuration, overrides.

Commands are taken from fenced blocks, indented blocks, tables and `code` of the
pages and of all docstrings, in their order, and are not run. A training leaves
the configuration of its run, which later commands read.
"""

import ast
import contextlib
import importlib
import itertools
import pathlib
import re
import shlex
import shutil

import numpy as np
import pytest

from core import files
from launch import command_line, evaluate, sweep
from tests.dataset_lib import corpora
from tests.model_lib import public_vits

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ('README.md', 'CONTRIBUTING.md', *sorted(map(str, (
  path.relative_to(ROOT) for path in ROOT.glob('docs/*.md')
))))  # fmt: skip
MODULES = sorted(
  str(path.relative_to(ROOT)) for path in ROOT.rglob('*.py')
  if re.search(r'python -m (launch|benchmarks)\.', path.read_text())
  and path.relative_to(ROOT).parts[0] not in ('tests', 'build')
)  # fmt: skip
NAMES = '|'.join(path.stem for path in ROOT.glob('launch/[a-z]*.py'))
# `launch.` may be missing in `code` that names flags.
COMMAND = re.compile(
  rf'\b(benchmarks\.\w+|(?:launch\.)?(?:{NAMES})) (.*)', re.S
)
FENCED = re.compile(r'^```\w*\n.*?^```$', re.M | re.S)
FORM = re.compile(r'\.\.\.|FILE\.py')  # of a command
# Directories that a configuration reads; `root` has one of each name.
READ = re.compile(r'\b(corpus|checkpoint|teacher|pretrained)=[^,]+')
STUBS = dict(
  teacher='eat/glue.py:task=sst2,model=dense,variant=medium,data=D,'
  'vocabulary=vocabulary',
  checkpoint='albert_act/pretrain.py:corpus=corpus,variant=micro,length=32',
)


def texts(path):
  """Returns the page, or the docstrings of a module."""
  source = (ROOT / path).read_text()
  if path.endswith('.md'):
    return [source]
  nodes = ast.walk(ast.parse(source))
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
  found = (ast.get_docstring(n) for n in nodes if isinstance(n, kinds))
  return [text for text in found if text]


def commands(text):
  """Yields (name, words) of each command; continued lines are joined."""
  text = text.replace('\\\n', '')
  blocks = '\n'.join(FENCED.findall(text))
  lines = re.findall(r'^.*(?:launch|benchmarks)\..*$', blocks, re.M)
  lines += re.findall(r'^ {2,}(?=.*\bpython -m [lb])\S.*$', text, re.M)
  for paragraph in FENCED.sub('', text).split('\n\n'):
    code = re.findall(r'`([^`]+)`', paragraph)
    lines += [one for one in code if re.search(r' -.*=\S*\w$', one, re.S)]
  for line in lines:
    if not (found := COMMAND.search(line)) or FORM.search(line):
      continue
    lexer = shlex.shlex(found[2], posix=True, punctuation_chars='|&;<>')
    lexer.whitespace_split = True
    ends = itertools.takewhile(lambda word: set(word) - {*'|&;<>'}, lexer)
    name = found[1].removeprefix('launch.')
    yield name, [word.replace('/tmp/', 'tmp_') for word in ends]


def complete(main, words):
  """Parses flags; adds the required ones that `code` leaves out."""
  try:
    return main.parse(words)
  except command_line.UsageError as error:
    if not (missing := re.search('are required: (--.*);', str(error))):
      raise
    return complete(main, [*words, *(f'{n}=.' for n in missing[1].split(', '))])


def save(folder, config):
  """Writes what later commands read of a run."""
  folder.mkdir(exist_ok=True)
  files.write_json(folder / 'config.json', config)
  shutil.copy('tokenizer.json', folder)


def check(name, words):
  """Parses a command; a training leaves the configuration of its run."""
  words = [READ.sub(r'\1=\1', word) for word in words]
  words = [
    word.replace('=pretrained', '=vit.npz') if 'images.py' in word else word
    for word in words
  ]
  module = name if '.' in name else f'launch.{name}'
  flags = complete(importlib.import_module(module).main, words)
  config, folder = getattr(flags, 'config', ''), getattr(flags, 'workdir', '')
  saved = pathlib.Path(folder, 'config.json')
  if not isinstance(config, str) or '.py' not in config:
    if name == 'evaluate' and saved.is_file():
      evaluate._config(flags)
  elif name != 'sweep':
    run = command_line.load_config(config, flags.overrides)
    if name == 'train' and not folder.startswith(('/', '.')):
      save(saved.parent, run.to_dict())
  # tests/launch/sweep_runs_test.py has the others, whose lines read runs.
  elif flags.overrides and '$' not in pathlib.Path(flags.overrides).read_text():
    sweep.read_runs(flags)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """A folder with the configurations, a corpus and a vocabulary."""
  root = tmp_path_factory.mktemp('commands')
  (root / 'configs').symlink_to(ROOT / 'configs')
  corpora.prepare(root, corpora.documents(20), name='corpus')
  shutil.copy(root / 'corpus/tokenizer.json', root)
  for name in ('FILE.conllu', 'en_ewt-ud-dev.conllu'):
    (root / name).touch()
  np.savez(root / 'vit.npz', **public_vits.archive())
  (root / 'benchmarks/results').mkdir(parents=True)
  with contextlib.chdir(root):
    save(root / 'pretrained', {'model_type': 'bert', 'num_hidden_layers': 6})
    shutil.copy('vocabulary/vocab.txt', 'pretrained')
    (root / 'minilm').symlink_to('pretrained')
    for name, config in STUBS.items():
      run = command_line.load_config(f'configs/{config}', ())
      save(root / name, run.to_dict())
  return root


@pytest.mark.parametrize('path', [*PAGES, *MODULES])
def test_documented_commands_parse(path, root, monkeypatch):
  monkeypatch.chdir(root)
  for text in texts(path):
    for name, words in commands(text):
      try:
        check(name, words)
      except Exception as error:
        error.add_note(f'{name} {shlex.join(words)}')
        raise


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('`benchmarks.cost --table=1,2`', '--table: '),
    ('```\npython -m launch.train --workdri=a --config=b.py\n```', 'workdri'),
    ('  python -m launch.train --workdir=a --config=\\\n'
     '    configs/adatape/parity.py:n=4', 'no such flag'),
    ('| x | `python -m launch.train --workdir=a '
     '--config=configs/adatape/parity.py:m=4` |', 'config argument'),
    ('In `train --config=configs/adatape/parity.py --config.model.dept=1`.',
     'dept'),
    ('  echo 1 | python -m launch.predict --workdir=a --sreve=x > b', 'sreve'),
  ],
)  # fmt: skip
def test_a_wrong_command_is_seen(text, words, root, monkeypatch):
  monkeypatch.chdir(root)
  [(name, given)] = commands(text)
  with pytest.raises((ValueError, command_line.UsageError), match=words):
    check(name, given)


def test_commands_of_every_form_are_seen():
  found = [c for path in (*PAGES, *MODULES) for t in texts(path)
           for c in commands(t)]  # fmt: skip
  assert {name for name, _ in found} >= {
    'train', 'evaluate', 'predict', 'serve', 'export', 'sweep', 'compile',
    'cluster', 'glue', 'prepare_corpus', 'benchmarks.analyze',
    'benchmarks.adatape', 'benchmarks.serve',
  }  # fmt: skip
  assert len(found) > 100
  assert ('benchmarks.cost', ['--table=1,7']) in found
