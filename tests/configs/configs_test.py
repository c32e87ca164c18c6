"""Every shipped configuration is legal and trains: the real file, shrunk."""

import json
import subprocess
import sys

import numpy as np
import pytest

from dataset_lib import glue_tasks, tokenizer
from launch import command_line, config_flags, train
from train_lib import config_schema, trainer

FOLDER = 'configs/adatape/image_folder.py:root={root},size=32,variant=Ti/16'
CONFIGS = [
  'configs/adatape/parity.py',
  'configs/adatape/parity.py:n=8,model=transformer',
  'configs/adatape/parity.py:n=8,model=ut',
  'configs/adatape/parity_paper.py:n=8,depth=2,width=24,mlp_dim=32',
  'configs/adatape/parity_paper.py:n=8,depth=2,width=24,model=transformer',
  'configs/adatape/parity_paper.py:n=8,depth=2,width=24,model=ut',
  'configs/adatape/digits.py',
  'configs/adatape/digits.py:model=input',
  'configs/adatape/digits.py:model=vit',
  FOLDER,
  FOLDER + ',model=input,bank_patch=4',
  FOLDER + ',model=vit',
]
RECURRENT = [
  'configs/recurrent_act/parity.py:width=16',
  'configs/recurrent_act/logic.py:width=16,rule=straight_through',
  'configs/recurrent_act/addition.py:width=16,digits=2,rule=skip',
  'configs/recurrent_act/sort.py:width=16,length=3,rule=fixed,cell=gru',
  'configs/recurrent_act/sparse_parity.py:width=16,steps=2',
]
CONFIGS += RECURRENT
GLUE = ('cola', 'sst2', 'mrpc', 'qqp', 'stsb', 'mnli', 'qnli', 'rte', 'wnli')
# The default suite trains one, CI all of them.
SLOW = set(CONFIGS) - {CONFIGS[1]}
TWO_STEPS = 'stages.stage1.steps=2'
SHRUNK = [
  'batch_size=8',
  'mesh.data=1',
  'log_every=1',
  'tensorboard=false',
  'checkpoint.every_steps=0',
  'loader.num_threads=1',
]


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)


@pytest.fixture
def folder(tmp_path):
  import cv2

  pixels = np.random.default_rng(0)
  for split in ('train', 'test'):
    for name in ('cat', 'dog'):
      (tmp_path / split / name).mkdir(parents=True)
      for number in range(8):
        image = pixels.integers(0, 255, (40, 40, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / split / name / f'{number}.jpg'), image)
  return tmp_path


def shrunk(flag):
  """Two steps of a two-block model on 32 or fewer pixels."""
  if 'steps=' in flag:  # Of two stages.
    return [*SHRUNK, 'dataset.test_examples=16']
  if flag in RECURRENT:
    return [*SHRUNK, TWO_STEPS, 'dataset.test_examples=16']
  if 'image_folder' not in flag:
    return [*SHRUNK, TWO_STEPS]
  small = [*SHRUNK, TWO_STEPS, 'model.depth=2']
  return small if 'model=' in flag else [*small, 'model.bank_size=60']


@pytest.mark.parametrize(
  'flag',
  [
    pytest.param(flag, marks=pytest.mark.slow if flag in SLOW else ())
    for flag in CONFIGS
  ],
)
def test_config_trains_two_steps(flag, folder, tmp_path):
  config = config_flags.load_config(flag.format(root=folder), shrunk(flag))
  config_schema.validate(config)
  workdir = tmp_path / 'run'
  result = trainer.train(config, str(workdir))
  assert result['steps'] == 2
  assert np.isfinite(result['test/cross_entropy'])
  rows = [
    json.loads(line)
    for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [row['step'] for row in rows] == [1, 2]
  assert all(np.isfinite(row['train/loss']) for row in rows)
  if 'Tape' in config.task:
    assert rows[0]['train/tape_length_max'] <= config.model.max_steps
  assert (workdir / 'run.png').exists()
  for name in ('config.json', 'versions.json', 'result.json'):
    assert json.loads((workdir / name).read_text())


def test_every_config_file_is_in_the_table(repository):
  files = {
    str(path.relative_to(repository))
    for path in (repository / 'configs').rglob('*.py')
    if path.name not in ('__init__.py', 'common.py')
  }
  trained = {flag.partition(':')[0] for flag in CONFIGS}
  albert = {f'configs/albert_act/{flag.partition(":")[0]}' for flag in ALBERT}
  glue = {f'configs/eat/{task}.py' for task in GLUE}
  assert files == trained | glue | albert


# Trained for real in tests/albert_act.
ALBERT = [
  'pretrain.py:corpus={root},variant=micro,length=32,batch=8',
  'pretrain.py:corpus={root},halting=fixed,batch=4096,micro=16',
  'pretrain.py:corpus={root},variant=mini,tau_from=0.5',
  *(f'glue.py:task={task},data={{root}}' for task in GLUE),
  'glue.py:task=sst2,halting=fixed,tau=0.1,examples=100',
  'probing.py:task=past_present,data={root}',
  'probing.py:task=tree_depth,data={root},halting=straight_through',
]


@pytest.mark.parametrize('flag', ALBERT)
def test_albert_configs_are_legal(flag, tmp_path):
  vocabulary = tmp_path / 'vocab.txt'
  vocabulary.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', 'a']))
  tokenizer.load(vocabulary).save(tmp_path / 'tokenizer.json')
  overrides = []
  if not flag.startswith('pretrain'):
    overrides = [f'dataset.tokenizer={tmp_path}']
  config = config_flags.load_config(
    f'configs/albert_act/{flag.format(root=tmp_path)}', overrides
  )
  config_schema.validate(config)
  assert (config.model.halting == '') == ('fixed' in flag)
  if flag.startswith('pretrain'):
    assert config.model.vocab_size == 5
  else:  # sizes of ALBERT-base, as there is no checkpoint
    assert (config.model.width, config.model.max_iterations) == (768, 12)
    probes = flag.startswith('probing')
    assert config.optimizer.lr == (5e-5 if probes else 3e-5)
    # The paper fine-tunes without a ponder term.
    assert config.loss.ponder_weight == (0.1 if 'tau=0.1' in flag else 0.0)


@pytest.mark.parametrize('task', GLUE)
@pytest.mark.parametrize(
  'arguments',
  [
    'model=eat',
    'model=dense',
    'model=student',
    'parts=p',
    'parts=we',
    'variant=minilm,epochs=1,max_length=64,examples=100',
    'variant=tiny',
  ],
)
def test_glue_configs_are_legal(task, arguments, tmp_path):
  # Trained for real in tests/launch/predict_test.py and text_run_test.py.
  flag = f'configs/eat/{task}.py:vocabulary={tmp_path},data={tmp_path},'
  config = config_flags.load_config(flag + arguments, [])
  config_schema.validate(config)
  assert config.model.width > 0
  assert config.dataset.task == task
  if 'student' in arguments:
    assert config.model.depth == 6
  if arguments == 'model=eat':
    assert config.evals.dev.split.startswith('validation')
    # Sizes of BERT-base; the heads are where the paper has them.
    exits = (3, 4) if task == 'stsb' else (4,)
    shares_texts = task in ('sst2', *glue_tasks.REPEATED_TEXTS)
    if task != 'stsb':
      assert config.train_split == ('train' if shares_texts else 'train[:95%]')
      held_out = config.evals.calibration.calibration_split
      assert held_out.startswith('validation') == shares_texts
    assert (config.model.depth, config.model.exit_layers) == (12, exits)


def glue(arguments, tmp_path, task='sst2', overrides=()):
  flag = f'configs/eat/{task}.py:vocabulary={tmp_path},data={tmp_path},'
  config = config_flags.load_config(flag + arguments, overrides)
  config_schema.validate(config)
  return config


# (arguments, layers pruned after, exits, exits of a regression)
PLACES = [
  ('variant=tiny', (1,), (1,), (1,)),  # 2 layers
  ('variant=mini', (1, 2), (2,), (1, 2)),  # 4
  ('variant=small', (1, 2), (2,), (1, 2)),
  ('variant=minilm', (2, 4), (4,), (3, 4)),  # 6
  ('variant=base', (2, 4), (4,), (3, 4)),  # 12
  ('variant=base,exits=2-3-6,prunes=5', (5,), (2, 3, 6), (2, 3, 6)),
  ('parts=p', (2, 4), (), ()),
]


@pytest.mark.parametrize('model', ['dense', 'student'])
def test_parts_of_an_eat_are_not_asked_of_another_model(model, tmp_path):
  with pytest.raises(command_line.UsageError, match='argument parts: expected'):
    glue(f'model={model},parts=p', tmp_path)


@pytest.mark.parametrize(('arguments', 'prunes', 'exits', 'neighbours'), PLACES)
def test_layers_follow_the_depth(
  arguments, prunes, exits, neighbours, tmp_path
):
  for task, expected in (('sst2', exits), ('stsb', neighbours)):
    config = glue(arguments, tmp_path, task)
    assert config.model.prune_layers == prunes
    assert config.model.prune_ratios == (0.3,) * len(prunes)
    assert config.model.exit_layers == expected
    assert config.loss.exit_weights == (*[0.3] * len(expected), 1.0)
    if task != 'stsb':
      assert config.evals.frontier.layers == (*expected, config.model.depth)


def checkpoint(directory, depth, **more):
  """A Hugging Face directory, as far as a configuration reads it."""
  directory.mkdir()
  content = {'model_type': 'bert', 'num_hidden_layers': depth} | more
  (directory / 'config.json').write_text(json.dumps(content))
  return directory


@pytest.mark.parametrize(
  ('depth', 'exits', 'student'), [(6, (4,), 3), (5, (4,), 3), (3, (1,), 2)]
)
def test_the_depth_is_that_of_the_checkpoint(depth, exits, student, tmp_path):
  directory = checkpoint(tmp_path / 'bert', depth)
  config = glue(f'pretrained={directory}', tmp_path)
  assert (config.model.depth, config.model.exit_layers) == (depth, exits)
  config = glue(f'pretrained={directory},model=student', tmp_path)
  assert config.model.depth == student
  assert config.evals.frontier.layers == (student,)
  assert len(config.warm_start.renames) == depth
  assert config.warm_start.skip == ('^head/', '^dropped_')


def test_the_depth_is_that_of_the_teacher(tmp_path):
  directory = checkpoint(tmp_path / 'run', 0)
  model = {'depth': 6, 'width': 384, 'num_heads': 12, 'mlp_dim': 1536}
  (directory / 'config.json').write_text(json.dumps({'model': model}))
  vocabulary = tmp_path / 'vocab.txt'
  vocabulary.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', 'a']))
  tokenizer.load(vocabulary).save(directory / 'tokenizer.json')
  config = glue(f'teacher={directory},model=student', tmp_path)
  assert (config.model.depth, config.model.width) == (3, 384)
  assert config.warm_start.renames[4] == '^block_4/->block_2/'
  config = glue(f'teacher={directory}', tmp_path)
  assert (config.model.prune_layers, config.model.exit_layers) == ((2, 4), (4,))


def test_a_student_of_nobody_has_half_the_layers(tmp_path):
  config = glue('model=student,variant=tiny', tmp_path)
  assert (config.model.depth, config.warm_start.renames) == (1, ())


def test_given_layers_and_weights_are_kept(tmp_path):
  overrides = ['model.exit_layers=(3,)', 'loss.exit_weights=(0.1,2.0)']
  config = glue('variant=mini', tmp_path, overrides=overrides)
  assert config.model.exit_layers == (3,)
  assert config.loss.exit_weights == (0.1, 2.0)
  config = glue('variant=mini', tmp_path, overrides=['model.exit_layers=1,3'])
  assert config.loss.exit_weights == (0.3, 0.3, 1.0)


@pytest.mark.parametrize(
  ('epochs', 'warm', 'annealed'), [(1, 0, 1), (2, 1, 1), (3, 1, 2), (5, 1, 4)]
)
def test_pruning_is_annealed_after_the_first_epoch(
  epochs, warm, annealed, tmp_path
):
  config = glue(f'epochs={epochs}', tmp_path)
  stages = [config.stages[name] for name in sorted(config.stages)]
  given = [(stage.epochs, stage.knobs.prune_scale) for stage in stages]
  expected = [(warm, 0.0), (annealed, ('linear', 0.0, 1.0))]
  assert given == expected[0 if warm else 1 :]


@pytest.mark.slow
def test_dry_run_prints_sizes_and_writes_nothing(
  capsys, tmp_path, monkeypatch, repository
):
  config = repository / CONFIGS[0]
  monkeypatch.chdir(tmp_path)
  shrunk = [f'--config.{item}' for item in [*SHRUNK, TWO_STEPS]]
  train.main([f'--config={config}', *shrunk, '--dry_run', '--workdir=run'])
  text = capsys.readouterr().out
  for word in ('parameters', 'FLOPs', 'memory', 'tokens [8, 16] int32'):
    assert word in text
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_with_tensorboard_imports_no_tensorflow(tmp_path):
  code = (
    'import sys\n'
    'from launch import train\n'
    'train.main(sys.argv[1:])\n'
    "assert 'tensorflow' not in sys.modules\n"
  )
  shrunk = [f'--config.{item}' for item in [*SHRUNK, TWO_STEPS]]
  arguments = [
    f'--config={CONFIGS[0]}', *shrunk, '--config.tensorboard=true',
    f'--workdir={tmp_path}',
  ]  # fmt: skip
  subprocess.run([sys.executable, '-c', code, *arguments], check=True)
  assert list((tmp_path / 'tensorboard').iterdir())
