"""The configurations of AdaTape's tables have the values that it prints."""

import pathlib

import pytest

from benchmarks import cost
from launch import command_line

B32 = 'variant=B/32,model=input'


def load(file, arguments, *overrides):
  """The complete configuration of a table's row."""
  data = 'data=/jft,' if file == 'jft' else ''
  flag = f'configs/adatape/{file}.py:{data}{arguments}'
  return command_line.load_config(flag, overrides)


def values(mapping, names):
  """Values of some fields, separated by spaces."""
  return tuple(mapping[name] for name in names.split())


# Table 4, and K = T / tau (Algorithm 2, line 5):
# (model, size of the ViT): T, tau, K, lambda, C, noise, drop.
TABLE_4 = {
  ('learn', 'B'): (10, 2.0, 5, 0.0, 10_000, 0.01, 0.1),
  ('learn', 'L'): (10, 2.0, 5, 0.0, 10_000, 0.01, 0.1),
  ('input', 'B'): (10, 2.0, 5, 0.01, 784, 0.0, 0.0),
  ('input', 'L'): (10, 1.0, 10, 0.01, 784, 0.0, 0.0),
}


@pytest.mark.parametrize('patch', [16, 32])
@pytest.mark.parametrize(('model', 'vit'), TABLE_4)
def test_the_tape_of_table_4(model, vit, patch):
  config = load('jft', f'model={model},variant={vit}/{patch}')
  tape = config.model
  size = tape.bank_size
  if tape.bank == 'input':
    size = (config.dataset.image_size // tape.bank_patch_size) ** 2
  found = values(tape, 'max_steps threshold tokens_per_step')
  found += config.loss.tape_weight, size
  assert found + values(tape, 'query_noise bank_drop') == TABLE_4[model, vit]
  # A.6: after the first block. Sections 2 and 2.4: separate networks, a
  # smaller query, the mean of query and token, the loss 1 - sum w^2.
  assert values(tape, 'insert_after tape_mlp read_mlp') == (1, 'glu', 'glu')
  fields = 'query_dim query_update tape_loss fixed_length'
  assert values(tape, fields) == (64, 'average', 'entropy', False)
  # Table 2 prints 59 = 49 + 10 and 206 = 196 + 10 tokens.
  assert tape.pool == ('gap' if model == 'input' else 'cls')


# Dosovitskiy et al. (2021), appendix B, Table 3, JFT-300M: peak learning rate.
RATES = {'B/32': 8e-4, 'B/16': 8e-4, 'L/32': 6e-4, 'L/16': 4e-4}


@pytest.mark.parametrize('model', ['vit', 'u2t', 'uvit', 'learn', 'input'])
@pytest.mark.parametrize('variant', RATES)
def test_the_recipe_of_table_1(model, variant):
  config = load('jft', f'model={model},variant={variant}')
  assert values(config, 'batch_size train_split') == (4096, 'train')
  assert config.phases[0].epochs == 7
  fields = 'name lr schedule warmup_steps end_lr weight_decay b1 b2'
  assert values(config.optimizer, fields) == (
    'adamw', RATES[variant], 'linear', 10_000, 0.0, 0.1, 0.9, 0.999
  )  # fmt: skip
  assert config.optimizer.clip_norm == 0.0
  data = config.dataset
  assert values(data, 'name directory image_size') == ('records', '/jft', 224)
  assert data.num_classes == 18_291
  assert data.augment == ('inception_crop', 'flip')
  kind = {'vit': '', 'u2t': 'Ponder', 'uvit': 'Ponder'}.get(model, 'Tape')
  assert config.task.endswith(f':{kind}MultiLabel')
  # Widths and depths give the printed costs, see costs_test.
  assert config.model.num_heads == {'B': 12, 'L': 16}[variant[0]]


def test_few_shot_evaluations_of_table_1():
  evals = load('jft', B32).evals
  found = {
    name: (entry.dataset.builder, entry.train_split, entry.test_split)
    for name, entry in evals.items()
    if entry.type == 'fewshot'
  }
  assert found == {
    'imagenet': ('imagenet2012', 'train', 'validation'),
    'cifar100': ('cifar100', 'train', 'test'),
    'pets': ('oxford_iiit_pet', 'train', 'test'),
  }
  shots = {name: evals[name].shots for name in found}
  assert shots == {'imagenet': (10, 25), 'cifar100': (10,), 'pets': (10,)}
  assert values(evals.val, 'type split') == ('classification', 'validation')
  assert set(load('jft', f'{B32},fewshot=none').evals) == {'val'}


def test_ablations_of_table_2():
  fixed = load('jft', 'model=input,variant=B/32,ablation=length')
  assert values(fixed.model, 'fixed_length bank max_steps') == (
    True, 'input', 10
  )  # fmt: skip
  neither = load('jft', 'model=input,variant=B/32,ablation=content')
  assert values(neither.model, 'bank max_steps') == ('none', 10)
  act = load('jft', 'model=input,variant=B/32,ablation=act')
  assert values(act.model, 'act fixed_length read_mlp') == (True, True, '')
  for config in (fixed, neither, act):
    assert config.loss.tape_weight == 0.0
    assert config.model.tape_mlp == 'glu'


# Table 5, by size.
TABLE_5 = {
  'Ti/16': dict(decay=1e-4, mixup=0.2, smoothing=0.0, randaugment=(2, 10)),
  'S/16': dict(decay=8e-5, mixup=0.5, smoothing=0.1, randaugment=(2, 15)),
  'B/16': dict(decay=8e-5, mixup=0.5, smoothing=0.1, randaugment=(2, 15)),
}
# Models of Table 6, and the name and pooling of each.
TABLE_6 = {
  'input': ('AdaTapeViT', 'gap'), 'vit': ('ViT', 'cls'),
  'deit': ('DeiT', 'cls'), 'plainvit': ('ViT', 'gap'),
  'u2t': ('UnsharedViT', 'cls'), 'avit': ('AViT', 'cls'),
}  # fmt: skip


@pytest.mark.parametrize('model', TABLE_6)
@pytest.mark.parametrize('variant', TABLE_5)
def test_the_recipe_of_table_5(model, variant):
  config = load('imagenet', f'model={model},variant={variant}')
  expected, optimizer = TABLE_5[variant], config.optimizer
  fields = 'name lr schedule warmup_steps b1 b2'
  assert values(optimizer, fields) == (
    'adamw', 0.001, 'cosine', 10_000, 0.9, 0.999
  )  # fmt: skip
  # Of a step at the peak of the learning rate (Beyer et al., 2022).
  decay = optimizer.lr * optimizer.weight_decay
  assert decay == pytest.approx(expected['decay'], rel=1e-12)
  assert (config.phases[0].epochs, config.batch_size) == (300, 1024)
  assert config.loss.mixup == expected['mixup']
  assert config.loss.label_smoothing == expected['smoothing']
  data = config.dataset
  assert data.augment == ('inception_crop', 'flip', 'randaugment')
  assert data.randaugment == expected['randaugment']
  assert values(data, 'builder image_size') == ('imagenet2012', 224)
  assert values(config.evals.test, 'type split') == (
    'classification', 'validation'
  )  # fmt: skip
  name, pool = TABLE_6[model]
  assert config.model.name.endswith(f':{name}')
  assert config.model.pool == pool


@pytest.mark.parametrize('variant', TABLE_5)
def test_models_of_table_6(variant):
  tape = load('imagenet', f'model=input,variant={variant}')
  fields = 'max_steps threshold tokens_per_step insert_after'
  assert values(tape.model, fields) == (10, 2.0, 5, 1)
  # Printed parameters count a network that is applied to the tape once.
  assert values(tape.model, 'tape_mlp read_mlp') == ('', 'glu')
  assert tape.loss.tape_weight == 0.01
  plain = load('imagenet', f'model=plainvit,variant={variant}').model
  assert plain.positions == 'sincos2d'
  assert plain.num_heads == {'T': 3, 'S': 6, 'B': 12}[variant[0]]
  u2t = load('imagenet', f'model=u2t,variant={variant}').model
  assert u2t.max_steps == (15 if variant == 'B/16' else 13)


def test_a_folder_and_no_teacher():
  config = load('imagenet', 'model=deit,root=/imagenet')
  assert values(config.dataset, 'name root') == ('folder', '/imagenet')
  assert config.evals.test.split == 'val'
  assert config.loss.teacher == ''


def test_models_of_table_7():
  for variant, side in (('B/28', 28), ('B/14', 14)):
    config = load('jft', f'model=3ffn,variant={variant}')
    assert config.model.name == 'adatape.vit_3ffn:ViT3FFN'
    assert config.model.patch_size == side
    plain = load('jft', f'model=vit,variant={variant}')
    assert plain.optimizer.to_dict() == config.optimizer.to_dict()


# Figures: the configuration whose field a list of overrides sweeps.
SWEEPS = {
  5: ('model=vit,variant=S/32', 'patch_size', (32, 28, 16, 14, 8)),
  6: ('model=input,variant=B/32,ablation=length', 'max_steps', (5, 10, 20, 40)),
  7: ('model=learn', 'bank_size', (100, 1000, 10_000, 100_000)),
  8: ('model=vit', 'patch_size', (32, 28, 16, 14, 32, 28, 16, 14)),
}


@pytest.mark.parametrize('figure', SWEEPS)
def test_sweeps_of_the_figures(figure):
  arguments, field, expected = SWEEPS[figure]
  text = pathlib.Path(f'configs/adatape/figure{figure}.txt').read_text()
  lines = [line.split() for line in text.splitlines() if line[0] != '#']
  configs = [load('jft', arguments, *line) for line in lines]
  assert tuple(config.model[field] for config in configs) == expected
  if figure == 8:
    rates = [config.optimizer.lr for config in configs]
    assert rates == [8e-4] * 4 + [6e-4] * 2 + [4e-4] * 2


@pytest.mark.parametrize(('table', 'file'), [(1, 'jft'), (6, 'imagenet')])
def test_the_lists_of_tables_have_every_row(table, file):
  text = pathlib.Path(f'configs/adatape/table{table}.txt').read_text()
  lines = [line for line in text.splitlines() if line[0] != '#']
  rows = [row for group in cost.TABLES[table] for row in group]
  assert lines == [f':model={r.model},variant={r.variant}' for r in rows]
  data = 'data=/x,fewshot=none,' if table == 1 else ''
  for line in lines:
    model = load(file, data + line[1:]).model
    assert model.variant == line.rpartition('=')[2]


def test_the_runs_on_photographs():
  text = pathlib.Path('configs/adatape/photographs.txt').read_text()
  runs = [line.split() for line in text.splitlines() if line[0] != '#']
  models = ('vit', 'learn', 'input', 'ut', 'uvit', 'avit', 'ponder')
  ablated = ('input,ablation=length', 'input,ablation=content')
  names = [f':model={name}' for name in (*models, *ablated)]
  assert sorted(runs) == sorted(
    [name, f'seed={seed}'] for name in names for seed in range(3)
  )
  file = 'configs/adatape/photographs.py:root=/x,model='
  configs = {m: command_line.load_config(file + m, ()) for m in models}
  weights = {'ut': 0.01, 'uvit': 0.01, 'ponder': 0.01, 'avit': 5e-4}
  for name, config in configs.items():
    assert config.loss.get('ponder_weight') == weights.get(name), name
  assert configs['learn'].loss.tape_weight == 0.0
  assert configs['input'].loss.tape_weight == 0.01
  assert configs['input'].model.pool == 'gap'  # Table 2: no [CLS]
  fixed = command_line.load_config(file + ablated[0], ())
  assert (fixed.model.fixed_length, fixed.loss.tape_weight) == (True, 0.0)
  with pytest.raises(ValueError, match='config argument ablation: expected'):
    command_line.load_config(file + 'vit,ablation=length', ())
