"""Fields of the shipped configurations, by arguments.

`tests/contract_test.py` trains a step of each.
"""

import ast
import functools
import itertools
import os
import pathlib
import re

import numpy as np
import pytest

from benchmarks import cost
from core import files
from dataset_lib import tokenizer
from launch import command_line
from tests.model_lib import public_vits

FOLDER = pathlib.Path(__file__).parent


def expanded(text):
  """Yields texts with one alternative for each '{a|b}'."""
  parts = re.split(r'\{(.+?)\}', text)
  for chosen in itertools.product(*(part.split('|') for part in parts)):
    yield ''.join(chosen)


def table():
  """Yields (configuration, overrides, fields) of fields.txt."""
  text = re.sub('^#.*\n', '', (FOLDER / 'fields.txt').read_text(), flags=re.M)
  for entry in re.split(r'\n+(?=\S)', text.strip()):
    flags, *items = entry.split()
    overrides = [item[2:] for item in items if item.startswith('--')]
    fields = dict(item.split('=', 1) for item in items if item[:2] != '--')
    fields = {k: ast.literal_eval(value) for k, value in fields.items()}
    yield from ((flag, overrides, fields) for flag in expanded(flags))


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  """The file of a tokenizer."""
  folder = tmp_path_factory.mktemp('words')
  (folder / 'vocab.txt').write_text('[PAD]\n[UNK]\n[CLS]\n[SEP]\na')
  path = folder / 'tokenizer.json'
  tokenizer.load(folder / 'vocab.txt').save(path)
  return path


@pytest.fixture
def load(words):
  """Loads `folder/file.py:arguments` with a tokenizer."""

  def loaded(flag, *overrides):
    is_text = re.match('.*(glue|probing|tags|texts)', flag)
    given = [f'dataset.tokenizer={words}'] * bool(is_text)
    given += ['model.vocab_size=5'] * ('/pretrain' in flag)
    return command_line.load_config(f'configs/{flag}', [*given, *overrides])

  return loaded


def assert_fields(config, expected):
  """Compares fields such as 'phases.0.steps' of `config`."""

  def item(group, name):
    return group[int(name)] if name.isdigit() else getattr(group, name)

  def value(path):
    return functools.reduce(item, path.split('.'), config)

  assert {path: value(path) for path in expected} == expected


@pytest.mark.parametrize(('flag', 'overrides', 'expected'), [*table()])
def test_fields(flag, overrides, expected, load):
  assert_fields(load(flag, *overrides), expected)


EAT = 'eat/glue.py:data=/x,'


@pytest.mark.parametrize(
  ('flag', 'entries'),
  [
    ('eat/glue.py:data=/x,task=stsb', {'dev'}),  # a regression has no ECE
    ('adatape/jft.py:data=/jft,fewshot=none', {'val'}),
  ],
)
def test_evaluations(flag, entries, load):
  assert {*load(flag).evals} == entries


def checkpoint(directory, **content):
  """A directory, as far as a configuration reads it."""
  directory.mkdir()
  (directory / 'config.json').write_text(files.dumps(content))
  return directory


@pytest.mark.parametrize(
  'make',
  [
    os.mkfifo, os.mkdir, lambda path: path.write_text('{"depth": [1]}'),
    lambda path: path.write_text('[' * 10**5),
    lambda path: path.symlink_to('/dev/zero'),
  ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named(make, tmp_path, load):
  make(tmp_path / 'config.json')
  with pytest.raises(ValueError, match='argument pretrained or teacher: exp'):
    load(f'{EAT}pretrained={tmp_path}')


@pytest.mark.parametrize(
  ('depth', 'exits', 'student'),
  [(24, (4,), 12), (6, (4,), 3), (5, (4,), 3), (3, (1,), 2), (1, (), 1)],
)
@pytest.mark.parametrize('model_type', ['bert', 'distilbert'])
def test_sizes_of_a_checkpoint(
  depth, exits, student, model_type, tmp_path, load
):
  layers = 'num_hidden_layers' if model_type == 'bert' else 'n_layers'
  content = {'model_type': model_type, layers: depth}
  directory = checkpoint(tmp_path / 'model', **content)
  config = load(f'{EAT}pretrained={directory}')
  assert_fields(config, {
    'model.depth': depth, 'model.exit_layers': exits,
    'model.type_vocab_size': 2 if model_type == 'bert' else 0,
    'warm_start.workdir': str(directory),
  })  # fmt: skip
  assert 'from_checkpoint' not in config.model
  assert_fields(load(f'{EAT}pretrained={directory},model=student'), {
    'model.depth': student,
    'warm_start.renames': tuple(
      f'^block_{n}/->{f"dropped_{n}/" if n % 2 else f"block_{n // 2}/"}'
      for n in range(depth)
    ),
    'warm_start.skip': ('^head/', '^dropped_')[: min(depth, 2)],
  })  # fmt: skip


def test_fine_tuning_of_a_published_vit(tmp_path, load):
  path = tmp_path / 'vit.npz'
  np.savez(path, **public_vits.archive())
  flag = f'images.py:data=/x,pretrained={path},finetune=1,model='
  rates = (
    '^encoder/block_0/->0.562500', '^encoder/block_1/->0.750000',
    '^(tokens/|distillation$)->0.421875',
  )  # fmt: skip
  sizes = {f'model.{name}': size for name, size in public_vits.FIELDS.items()}
  del sizes['model.num_classes']
  expected = sizes | {
    'model.pool': 'cls', 'warm_start.workdir': str(path), 'optimizer.lr': 3e-4,
    'dataset.image_size': 16,
  }  # fmt: skip
  scales = {'optimizer.scales': rates}
  assert_fields(load(f'{flag}plainvit'), expected | scales)
  tape = load(f'{flag}input', 'model.query_dim=8', 'model.bank_patch_size=2')
  scales = {'optimizer.scales': ('tape->1.000000', *rates)}
  assert_fields(tape, expected | scales)


def test_a_modern_bert_has_its_own_models(tmp_path, load, words):
  given = {'model_type': 'modernbert', 'num_hidden_layers': 6}
  start = checkpoint(tmp_path / 'model', **given, norm_bias=True)
  run = load(f'{EAT}pretrained={start},model=dense')
  assert run.model.name == 'model_lib.modern_bert:ModernBertClassifier'
  adaptive = {
    'model.name': 'eat.model:EatModernBert', 'model.norm_bias': True,
    'model.exit_layers': (4,), 'model.dropout': 0.0,
  }  # fmt: skip
  assert_fields(load(f'{EAT}pretrained={start}'), adaptive)
  teacher = checkpoint(tmp_path / 'run', **run.to_dict())
  (teacher / 'tokenizer.json').write_text(words.read_text())
  assert_fields(load(f'{EAT}teacher={teacher}'), adaptive)
  with pytest.raises(ValueError, match="parts: expected letters of 'pe'"):
    load(f'{EAT}pretrained={start},parts=pwe')


def test_sizes_of_a_teacher(tmp_path, load, words):
  runs = []
  for variant in ('mini', 'minilm'):
    dense = load(f'{EAT}variant={variant},model=dense').to_dict()
    runs.append(checkpoint(tmp_path / variant, **dense))
    (runs[-1] / 'tokenizer.json').write_text(words.read_text())
  small, large = map(str, runs)
  for arguments, expected in (
    (f'teacher={large},model=student', {'model.depth': 3, 'model.width': 384}),
    (f'teacher={large}', {
      'model.prune_layers': (2, 4), 'model.exit_layers': (4,),
      'loss.teacher': large, 'warm_start.skip': ('^exit_',),
    }),
    (f'pretrained={small},teacher={large},exits=1-2,prunes=2', {
      'model.depth': 4, 'warm_start.workdir': small, 'loss.teacher': large,
      'warm_start.skip': ('^head/', '^exit_'),
    }),
  ):  # fmt: skip
    assert_fields(load(EAT + arguments), expected)


def lines_of(name):
  """Lines of a list of overrides of AdaTape, split."""
  text = pathlib.Path(f'configs/adatape/{name}.txt').read_text()
  return [line.split() for line in text.splitlines() if line[0] != '#']


# Figures: the configuration whose field a list of overrides sweeps.
SWEEPS = {
  5: ('model=vit,variant=S/32', 'patch_size', (32, 28, 16, 14, 8)),
  6: ('model=input,variant=B/32,ablation=length', 'max_steps', (5, 10, 20, 40)),
  7: ('model=learn', 'bank_size', (100, 1000, 10_000, 100_000)),
  8: ('model=vit', 'patch_size', (32, 28, 16, 14, 32, 28, 16, 14)),
}


@pytest.mark.parametrize('figure', SWEEPS)
def test_sweeps_of_the_figures(figure, load):
  arguments, field, expected = SWEEPS[figure]
  flag = f'adatape/jft.py:data=/jft,{arguments}'
  configs = [load(flag, *line) for line in lines_of(f'figure{figure}')]
  assert tuple(config.model[field] for config in configs) == expected
  if figure == 8:
    rates = [config.optimizer.lr for config in configs]
    assert rates == [8e-4] * 4 + [6e-4] * 2 + [4e-4] * 2


@pytest.mark.parametrize(('table', 'file'), [(1, 'jft'), (6, 'imagenet')])
def test_the_lists_of_tables_have_every_row(table, file, load):
  rows = [row for row in cost.ROWS if row.table == table]
  lines = [line for [line] in lines_of(f'table{table}')]
  assert lines == [f':model={r.model},variant={r.variant}' for r in rows]
  data = 'data=/x,fewshot=none,' if table == 1 else ''
  for line in lines:
    model = load(f'adatape/{file}.py:{data}{line[1:]}').model
    assert model.variant == line.rpartition('=')[2]


def test_the_runs_on_photographs():
  models = ('vit', 'learn', 'input', 'ut', 'uvit', 'avit', 'ponder')
  ablated = ('input,ablation=length', 'input,ablation=content')
  names = [f':model={name}' for name in (*models, *ablated)]
  assert sorted(lines_of('photographs')) == sorted(
    [name, f'seed={seed}'] for name in names for seed in range(3)
  )


def test_the_size_of_images_is_that_of_a_checkpoint_or_given(tmp_path, load):
  np.savez(tmp_path / 'vit.npz', **public_vits.archive(grid=6))
  flag = 'images.py:data=/x,model=vit,pretrained='
  first = load(f'{flag}{tmp_path}/vit.npz')
  assert first.dataset.image_size == 24
  run = checkpoint(tmp_path / 'run', **first.to_dict())
  assert load(f'{flag}{run}').dataset.image_size == 24
  assert load(f'{flag}{run},size=32').dataset.image_size == 32
  (tmp_path / 'vit.npz').write_bytes(b'PK damaged')
  with pytest.raises(ValueError, match=r'from_checkpoint: .* published'):
    load(f'{flag}{tmp_path}/vit.npz')


def test_a_split_that_is_made_is_watched(tmp_path, load):
  (tmp_path / 'train' / 'cat').mkdir(parents=True)
  flag = f'images.py:data={tmp_path}'
  assert load(flag).evals.test.every_steps == 500
  evals = load(f'{flag}/train').evals
  assert evals.validation.every_steps == 0.2
  assert evals.test.every_steps == 0
  with pytest.raises(ValueError, match='certify: expected 0, or 1 with one'):
    load(f'{flag},certify=1')  # no rows of its own
