"""What is particular to the shipped configurations.

`tests/contract_test.py` trains a step of each.
"""

import os

import pytest

from core import files
from dataset_lib import builder, tokenizer
from halting import older
from launch import command_line

GLUE = ('cola', 'sst2', 'mrpc', 'qqp', 'stsb', 'mnli', 'qnli', 'rte', 'wnli')


@pytest.fixture
def words(tmp_path):
  """The file of a tokenizer."""
  (tmp_path / 'vocab.txt').write_text('[PAD]\n[UNK]\n[CLS]\n[SEP]\na')
  path = tmp_path / 'tokenizer.json'
  tokenizer.load(tmp_path / 'vocab.txt').save(path)
  return path


@pytest.fixture
def load(words):
  """Loads `folder/file.py:arguments` with a tokenizer."""

  def loaded(flag, *overrides):
    names = 'glue', 'probing', 'tags', 'labels'
    is_text = any(name in flag for name in names)
    given = [f'dataset.tokenizer={words}'] * is_text
    return command_line.load_config(f'configs/{flag}', [*given, *overrides])

  return loaded


def eat(load, arguments, task='sst2', *overrides):
  return load(f'eat/glue.py:task={task},data=/glue,{arguments}', *overrides)


# Of AdaTape, Table 5; for its tape see adatape_tables_test.
@pytest.mark.parametrize(
  ('variant', 'weight_decay'),
  [('Ti/16', 1e-4), ('S/16', 8e-5), ('B/16', 8e-5), ('L/16', 1e-4)],
)
def test_the_optimizer_of_images(variant, weight_decay, load):
  config = load(f'adatape/images.py:root=/images,variant={variant}')
  optimizer = config.optimizer
  assert (optimizer.lr, optimizer.schedule) == (1e-3, 'cosine')
  assert (optimizer.b1, optimizer.b2) == (0.9, 0.999)
  assert optimizer.weight_decay == weight_decay / optimizer.lr


def test_adatape(load):
  dataset = load('adatape/images.py:tfds=cifar10,size=32').dataset
  assert (dataset.name, dataset.builder) == ('tfds', 'cifar10')
  assert dataset.image_size == 32
  paper = load('adatape/parity.py:size=paper,n=64')
  model, optimizer = paper.model, paper.optimizer
  assert paper.dataset.length == 64
  assert (model.max_steps, model.threshold) == (32, 16.0)
  assert (model.depth, model.width, model.num_heads) == (12, 192, 3)
  assert (optimizer.lr, optimizer.warmup_steps) == (3e-5, 1000)
  assert paper.phases[0].steps == 10_000
  quick = load('adatape/quick_start.py')
  # Its sums end at 0.30000000000000004, which is no other weight.
  knob = "phases.2.knobs={'tape_weight': ('linear', 0.03, 0.3)}"
  load('adatape/quick_start.py', knob, 'loss.tape_weight=0.3')
  model, dataset = quick.model, quick.dataset
  assert model.vocab_size == 3 + dataset.letters
  assert model.tokens_per_step * model.max_steps == dataset.length
  assert model.threshold == model.max_steps / model.tokens_per_step


@pytest.mark.parametrize('task', GLUE)
def test_tasks_of_glue(task, load):
  albert = load(f'albert_act/glue.py:task={task},data=/glue')
  # Sizes of ALBERT-base, as there is no checkpoint.
  assert (albert.model.width, albert.model.max_iterations) == (768, 12)
  assert (albert.model.activation, albert.dataset.task) == ('gelu_new', task)
  assert (albert.optimizer.lr, albert.loss.ponder_weight) == (3e-5, 0.0)
  config = eat(load, '', task)
  split = 'validation_matched' if task == 'mnli' else 'validation'
  for one in (albert, config):
    assert (one.dataset.task, one.evals.dev.split) == (task, split)
  shares = task in ('sst2', 'mnli', 'qqp', 'qnli', 'wnli')
  if task == 'stsb':
    assert 'calibration' not in config.evals
  else:
    assert config.train_split == ('train' if shares else 'train[:95%]')
    unseen = config.evals.frontier.calibration_split
    assert unseen == (f'{split}[:50%]' if shares else 'train[95%:]')
  tests = ['test_matched', 'test_mismatched', 'ax']
  for file in ('albert_act', 'eat'):
    given = load(f'{file}/glue.py:task={task},data=/glue,submit=1').evals
    kinds = [one for one in given.values() if one.type == 'submission']
    splits = {one.split for one in kinds}
    assert splits == ({*tests} if task == 'mnli' else {'test'})


def test_labels_of_a_user(load):
  given = 'data=/x,vocabulary=/v,variant=mini'
  config = load(f'eat/labels.py:name=mail,{given}')
  data, model = config.dataset, config.model
  assert (data.name, data.task, data.directory) == ('probing', 'mail', '/x')
  assert (model.exit_layers, model.prune_layers) == ((2,), (1, 2))
  assert config.evals.dev.type == 'classification'
  split = config.evals.calibration
  halves = 'validation[:50%]', 'validation[50%:]'
  assert (split.calibration_split, split.split) == halves
  for wrong in (given, f'name=mail,task=sst2,{given}'):
    with pytest.raises(command_line.UsageError, match='config argument name'):
      load(f'eat/labels.py:{wrong}')
  with pytest.raises(command_line.UsageError, match='config argument submit'):
    load(f'eat/labels.py:name=mail,submit=1,{given}')


def test_probing_and_a_fixed_depth(load):
  config = load('albert_act/probing.py:task=tree_depth,data=/x,halting=fixed')
  assert config.optimizer.lr == 5e-5
  assert config.model.rule.name == 'halting.token_rules:Fixed'
  assert config.warm_start.skip == ('^(predictions|sop|head|score)/',)
  splits = config.train_split, config.evals.dev.split
  assert splits == ('train[:90%]', 'train[90%:]')
  config = load('albert_act/probing.py:task=tree_depth,data=/x,held_out=0')
  splits = config.train_split, config.evals.dev.split
  assert splits == ('train', 'validation')


def test_tags(load):
  config = load('eat/tags.py:data=/x,column=upos,held_out=10,parts=w')
  assert (config.dataset.column, config.train_split) == ('upos', 'train[:90%]')
  assert config.evals.dev.split == 'train[90%:]'
  assert (config.model.prune_layers, config.model.window) == ((), 32)
  config = load('eat/tags.py:data=/x,epochs=2,variant=minilm')
  assert (config.model.prune_layers, config.model.window) == ((2, 4), 0)
  assert config.phases[1].knobs['prune_scale'] == ('linear', 0.0, 1.0)
  assert config.evals.dev.split == 'validation'
  with pytest.raises(ValueError, match="parts: expected letters of 'pw'"):
    load('eat/tags.py:data=/x,parts=e')


# (arguments, layers pruned after, exits, exits of a regression)
PLACES = [
  ('variant=tiny', (1,), (1,), (1,)),  # 2 layers
  ('variant=mini', (1, 2), (2,), (1, 2)),  # 4
  ('variant=small', (1, 2), (2,), (1, 2)),
  ('variant=minilm', (2, 4), (4,), (3, 4)),  # 6
  ('variant=base', (2, 4), (4,), (3, 4)),  # 12
  ('variant=base,exits=2-3-6,prunes=5', (5,), (2, 3, 6), (2, 3, 6)),
  ('parts=p', (2, 4), (), ()),
  ('parts=we', (), (4,), (3, 4)),
]


@pytest.mark.parametrize(('arguments', 'prunes', 'exits', 'neighbours'), PLACES)
def test_layers_follow_the_depth(arguments, prunes, exits, neighbours, load):
  for task, expected in (('sst2', exits), ('stsb', neighbours)):
    config = eat(load, arguments, task)
    assert config.model.prune_layers == prunes
    assert config.model.prune_ratios == (0.3,) * len(prunes)
    assert config.model.exit_layers == expected
    assert config.loss.exit_weights == (*[0.3] * len(expected), 1.0)


def test_given_layers_and_weights_are_kept(load):
  config = eat(load, 'variant=mini', 'sst2', 'model.exit_layers=1,3')
  assert config.loss.exit_weights == (0.3, 0.3, 1.0)
  weights = 'loss.exit_weights=(0.1,2.0)'
  config = eat(load, 'variant=mini', 'sst2', weights)
  assert config.loss.exit_weights == (0.1, 2.0)


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
    load(f'eat/glue.py:data=/x,pretrained={tmp_path}')


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
  config = eat(load, f'pretrained={directory}')
  assert (config.model.depth, config.model.exit_layers) == (depth, exits)
  assert config.model.type_vocab_size == (2 if model_type == 'bert' else 0)
  assert config.warm_start.workdir == str(directory)
  assert 'from_checkpoint' not in config.model
  config = eat(load, f'pretrained={directory},model=student')
  assert config.model.depth == student
  assert config.warm_start.renames == tuple(
    f'^block_{n}/->{"dropped_" if n % 2 else "block_"}{n if n % 2 else n // 2}/'
    for n in range(depth)
  )
  assert config.warm_start.skip == ('^head/', '^dropped_')[: min(depth, 2)]


def test_sizes_of_a_teacher(tmp_path, load, words):
  dense = eat(load, 'variant=minilm,model=dense').to_dict()
  directory = checkpoint(tmp_path / 'run', **dense)
  (directory / 'tokenizer.json').write_text(words.read_text())
  config = eat(load, f'teacher={directory},model=student')
  assert (config.model.depth, config.model.width) == (3, 384)
  assert config.warm_start.renames[4] == '^block_4/->block_2/'
  alone = eat(load, 'model=student,variant=tiny')
  assert (alone.model.depth, alone.warm_start.renames) == (1, ())
  config = eat(load, f'teacher={directory}')
  assert (config.model.prune_layers, config.model.exit_layers) == ((2, 4), (4,))
  assert config.loss.teacher == str(directory)
  assert config.warm_start.skip == ('^exit_',)


def test_a_smaller_model_of_a_larger_teacher(tmp_path, load, words):
  runs = []
  for variant in ('mini', 'minilm'):
    dense = eat(load, f'variant={variant},model=dense').to_dict()
    runs.append(checkpoint(tmp_path / variant, **dense))
    (runs[-1] / 'tokenizer.json').write_text(words.read_text())
  small, large = map(str, runs)
  config = eat(load, f'pretrained={small},teacher={large},exits=1-2,prunes=2')
  assert (config.model.depth, config.warm_start.workdir) == (4, small)
  assert config.loss.teacher == large
  assert config.warm_start.skip == ('^head/', '^exit_')


def test_exits_learn_by_the_best_recipe_or_by_the_paper(load):
  for arguments, mean, scales, weight, window in (
    ('exits=2', True, ('^exit_->10',), 1.0, 0),
    ('exits=2,recipe=paper', False, (), 0.0, 32),
    ('parts=pe,recipe=paper', False, (), 0.0, 0),
    ('parts=p', False, (), 0.0, 0),
  ):
    config = eat(load, f'variant=minilm,{arguments}')
    assert config.model.window == window
    assert config.model.exit_mean == mean
    assert config.optimizer.scales == scales
    assert config.loss.self_distill_weight == weight
  for arguments in ('model=dense', 'parts=p'):
    with pytest.raises(ValueError, match='recipe: expected paper only with'):
      eat(load, f'variant=tiny,{arguments},recipe=paper')


@pytest.mark.parametrize(
  ('epochs', 'warm', 'annealed'), [(1, 0, 1), (2, 1, 1), (3, 1, 2), (5, 1, 4)]
)
def test_pruning_is_annealed_after_one_epoch(epochs, warm, annealed, load):
  phases = eat(load, f'epochs={epochs}').phases
  given = [(phase.epochs, phase.knobs['prune_scale']) for phase in phases]
  expected = [(warm, 0.0), (annealed, ('linear', 0.0, 1.0))]
  assert given == expected[0 if warm else 1 :]


def graves(load, task, arguments='', *overrides):
  return load(f'recurrent_act/graves.py:task={task},{arguments}', *overrides)


@pytest.mark.parametrize(
  ('task', 'cell', 'width', 'batch', 'rule', 'tau'),
  [
    # Graves (2016), sections 3.1 to 3.4.
    ('parity', 'rnn', 128, 128, 'act', 1e-3),
    ('logic', 'lstm', 128, 16, 'act', 1e-3),
    ('addition', 'lstm', 512, 32, 'act', 1e-3),
    ('sort', 'lstm', 512, 16, 'act', 1e-3),
    ('sparse_parity', 'gru', 64, 32, 'skip', 1e-2),
  ],
)
def test_tasks_of_graves(task, cell, width, batch, rule, tau, load):
  config = graves(load, task)
  model = config.model
  assert (model.cell, model.width) == (cell, width)
  assert model.rule.name == older.NAMES[rule]
  assert (config.batch_size, config.loss.ponder_weight) == (batch, tau)
  source = builder.build_source(config.dataset, 'train')
  assert model.num_targets == source.num_targets
  for rule, steps, mu in (('act', 10, 0), ('fixed', 2, 0), ('skip', 10, 5)):
    model = graves(load, task, f'rule={rule},cell=lstm').model
    steps = 2 if task == 'sparse_parity' else steps
    assert (model.max_steps, model.cell) == (steps, 'lstm')
    assert model.rule.get('mu', 0) == mu


def test_places_of_a_sum(load):
  for length, digits, places in ((2, 1, 2), (9, 5, 6), (11, 2, 4)):
    sizes = f'dataset.length={length}', f'dataset.digits={digits}'
    config = graves(load, 'addition', '', *sizes)
    assert config.model.num_targets == places


def test_an_illegal_argument_is_named(load):
  for name in ('rule', 'cell', 'gates'):
    with pytest.raises(command_line.UsageError, match=f'argument .?{name}'):
      graves(load, 'parity', f'{name}=never')


# Beyer et al. (2022), appendix A: big_vision's vit_s16_i1k.py.
def test_the_recipe_of_a_plain_vit(load):
  config = load('vit/imagenet.py:root=/images')
  assert config.model.name == 'model_lib.vit:ViT'
  fields = config.model.pool, config.model.positions, config.model.width
  assert fields == ('gap', 'sincos2d', 384)
  rate = config.optimizer
  assert (rate.lr, rate.warmup_steps, rate.b2) == (1e-3, 10_000, 0.999)
  assert rate.lr * rate.weight_decay == pytest.approx(1e-4)
  assert (config.batch_size, config.phases[0].epochs) == (1024, 90)
  assert config.dataset.randaugment == (2, 10)
  assert config.loss.mixup == 0.2
