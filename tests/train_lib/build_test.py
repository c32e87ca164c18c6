"""Building a run, its layouts, compiled steps and start on one screen."""

import collections
import dataclasses
import io
import re
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from core import fields, registry
from core.errors import ConfigError
from dataset_lib import builder
from eval_lib import evaluator
from launch import command_line, train
from serve_lib import classifier
from tests.golden import adapter
from train_lib import compiled, config_schema, console, optimizers, sharding
from train_lib.build import Plan, Setup, build_dataset
from train_lib.classification import Classification
from train_lib.expected_loss import ExpectedLoss
from train_lib.phases import Planned
from train_lib.task import Task, build_task
from train_lib.train_step import TrainState

PHASE = Planned(stop=10)


def load(*overrides, model='adatape'):
  return command_line.load_config(
    f'configs/adatape/parity.py:n=4,model={model}',
    [
      'batch_size=8', 'mesh.data=2', 'loader.num_threads=1', 'model.depth=2',
      'model.width=16', 'model.mlp_dim=16', 'model.num_heads=2', *overrides,
    ],
  )  # fmt: skip


@pytest.fixture(scope='module')
def setup():
  return Setup(load())


FIRST_LOSS = RuntimeError('the first loss')


@pytest.mark.parametrize(
  ('file', 'kind'),
  [
    ('adatape/parity', 'ParityModel'),
    ('recurrent_act/graves', 'RecurrentModel'),
  ],
)
def test_all_is_checked_and_built_once_before_the_first_loss(
  file, kind, monkeypatch, tmp_path
):
  counts: collections.Counter[str] = collections.Counter()

  def count(place, function, key=lambda *_: ''):
    real = getattr(place, function)

    def call(*given, **more):
      counts[f'{place.__name__}.{function} {key(*given)}'] += 1
      return real(*given, **more)

    monkeypatch.setattr(place, function, call)

  count(fields, 'check', lambda cls, *_: cls.__qualname__)
  count(registry, 'build', lambda cls, *_: cls.__qualname__)
  count(registry, 'check_named')
  count(builder, 'validate')
  count(builder, 'build_source')
  count(evaluator, 'validate')
  count(config_schema, 'validate')
  count(optimizers, 'check_patterns')
  count(sharding, 'check_batch_size')

  def log_step(self, step, metrics):
    assert np.isfinite(metrics['loss'])
    raise FIRST_LOSS

  monkeypatch.setattr(console.Console, 'log_step', log_step)
  options = 'batch_size=8', 'log_every=1', 'mesh.data=1', 'tensorboard=false'
  with pytest.raises(RuntimeError, match=str(FIRST_LOSS)):
    train.main([
      f'--config=configs/{file}.py', f'--workdir={tmp_path}',
      *(f'--config.{option}' for option in options),
    ])  # fmt: skip
  # Rules check themselves; an evaluation opens its own split.
  allowed = {f'core.fields.check {rule}' for rule in ('ACT', 'Threshold')}
  allowed |= {f'core.registry.build {data}' for data in ('Parity', 'Graves')}
  often = {key for key, times in counts.items() if times > 1}
  assert often <= {*allowed, 'dataset_lib.builder.build_source '}
  assert counts[f'core.registry.build {kind}'] == 1


@pytest.mark.parametrize(
  ('overrides', 'message'),
  [
    (['phases.0.trainable=nomatch'],
     r"phases\.0\.trainable: .*got 'nomatch'"),
    (['mesh.data=3', 'num_micro=2'], 'batch_size: expected a multiple of 6'),
  ],
)  # fmt: skip
def test_what_does_not_fit_the_data_or_the_devices(overrides, message):
  with pytest.raises(ConfigError, match=message):
    Setup(load(*overrides))


def test_a_model_whose_loss_reads_every_step_does_not_stop_early():
  config = command_line.load_config(
    'configs/adatape/parity.py:n=4,model=ut', ['model.dynamic=True']
  )
  assert Setup(config).task.model.dynamic
  with (
    mock.patch.object(Task, 'check_training', ExpectedLoss.check_training),
    pytest.raises(ConfigError, match=r'model\.dynamic: .*reads every step'),
  ):
    Setup(config)


def test_the_start_fits_on_one_screen(setup):
  file = io.StringIO()
  console.print_start(rich.console.Console(file=file, width=80), setup, 3)
  text = file.getvalue()
  assert len(text.splitlines()) <= 24
  for word in ('parameters', 'encoder', 'tokens [8, 4] int32', 'at step 3'):
    assert word in text


def test_a_dry_run_prints_the_largest_memory_of_the_phases(
  setup, monkeypatch, capsys
):
  def inspect(phase):
    return compiled.Program(phase << 20, (10 - phase) << 20, float(phase), ())

  monkeypatch.setattr(setup, 'phases', (2, 5, 3))
  monkeypatch.setattr(setup, 'step', lambda phase, batch: (phase, 0.0))
  monkeypatch.setattr(compiled, 'inspect', inspect)
  console.print_dry_run(setup)
  printed = capsys.readouterr().out
  for name, value in {
    'state and batch': '5.0 MiB', 'temporary': '8.0 MiB', 'compiler': '5',
  }.items():  # fmt: skip
    assert re.search(rf'{name} +{value}\s', printed)


@pytest.mark.parametrize('subject', [
  'eat rte', 'eat sst2', 'albert mnli', 'albert pretrain fixed',
])  # fmt: skip
def test_pairs_of_texts_need_two_token_types(subject, folders):
  config = adapter.load(*adapter.configs()[subject], folders)
  info = build_dataset(config).info
  for size in (0, 1, 2):
    changes = {'type_vocab_size': size}
    if size == 1 and 'sst2' not in subject:
      message = 'type_vocab_size: expected 0, or at least 2: .*pairs.*, got 1'
      with pytest.raises(ConfigError, match=message):
        build_task(config, info, changes)
      continue
    task = build_task(config, info, changes)
    if size == 1:  # served as what it was trained on
      assert classifier.text_reader(task, 16, 100).num_texts == 1


def test_rows_and_words_beyond_the_tables_of_a_model_are_named(folders):
  config = adapter.load(*adapter.configs()['eat rte'], folders)
  info = build_dataset(config).info
  for changes, message in (
    ({'max_positions': 16},
     r'dataset\.max_length: expected at most the 16 positions .*, got 32'),
    ({'vocab_size': 5}, r'model\.vocab_size: expected at least \d+, .*, got 5'),
  ):  # fmt: skip
    with pytest.raises(ConfigError, match=message):
      build_task(config, info, changes)


class WithoutOutputs(Classification):
  """A task that defines none."""

  outputs = Task.outputs


@pytest.mark.parametrize('kind', ['calibration', 'frontier', 'glue'])
def test_evaluators_of_outputs_need_a_task_that_has_them(kind):
  config = load(model='transformer').to_dict()
  config['task'] = 'tests.train_lib.build_test:WithoutOutputs'
  config['evals']['heads'] = {'type': kind, 'split': 'test'}
  if kind != 'glue':
    config['evals']['heads']['calibration_split'] = 'test'
  with pytest.raises(ConfigError, match='no `outputs`') as error:
    config_schema.validate(config)
  assert (error.value.field, error.value.given) == ('evals.heads.type', kind)


def test_numbered_modules_share_a_row():
  leaf = jax.ShapeDtypeStruct((2, 3), jnp.float32)
  params = {f'block_{i}': {'kernel': leaf, 'bias': leaf} for i in range(24)}
  counts = console.parameter_counts(params | {'head': leaf})
  assert counts == {'block_* (24)': 24 * 12, 'head': 6}


def batch(length, dtype=np.int32):
  tokens = np.zeros((4, length), np.int32)
  return {'tokens': tokens, 'length': np.ones(4, dtype)}


@pytest.fixture
def plan():
  mesh = sharding.make_mesh({'data': 2})
  leaf = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh))
  state = TrainState(leaf, {}, {}, (), leaf, None, leaf)

  def make(phase):
    return lambda state, frozen, batch, *_: (state, batch['tokens'].sum())

  plan = Plan.__new__(Plan)
  plan.config, plan.mesh, plan.abstract = mock.Mock(blocks={}), mesh, state
  plan.tasks = [mock.Mock(spec=Task)] * 2
  plan._train_step, plan.frozen, plan.rates, plan._steps = make, {}, {}, {}
  return plan


@pytest.mark.parametrize(
  ('phase', 'other', 'shared'),
  [
    ({}, batch(8), True),
    ({'index': 1, 'start': 10}, batch(8), True),
    ({'trainable': '^head/'}, batch(8), False),
    ({'model': {'depth': 1}}, batch(8), False),
    ({'knobs': {'tau': 1.0}}, batch(8), False),
    ({}, batch(32), False),
    ({}, batch(8, np.float32), False),
  ],
)
def test_a_step_is_compiled_once_per_static_part_and_shape(
  plan, phase, other, shared
):
  first, seconds = plan.step(PHASE, batch(8))
  assert seconds > 0
  second, seconds = plan.step(dataclasses.replace(PHASE, **phase), other)
  assert (second is first, seconds == 0) == (shared, shared)
  assert plan.step(PHASE, batch(8)) == (first, 0)


@pytest.mark.parametrize(
  ('sizes', 'expected'),
  [
    (dict(data=-1), (8, 1, 1)),
    (dict(data=2, fsdp=2, tensor=2), (2, 2, 2)),
    (dict(data=2, fsdp=-1), (2, 4, 1)),
    (dict(data=3), (3, 1, 1)),
    (dict(data=16), None),
    (dict(data=-1, fsdp=-1), None),
    (dict(data=0), None),
    (dict(fsdp=-1, data=3), None),
  ],
)
def test_mesh_sizes(sizes, expected):
  if not expected:
    with pytest.raises(ConfigError, match='mesh'):
      sharding.make_mesh(sizes)
    return
  mesh = sharding.make_mesh(sizes)
  assert tuple(mesh.shape[axis] for axis in sharding.AXES) == expected


def placed(shape, names, sizes=None):
  """An array with these axes on a mesh."""
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  boxed = {'x': nn.LogicallyPartitioned(array, names)}
  mesh = sizes and sharding.make_mesh(sizes)
  return sharding.abstract(boxed, mesh)['x']


@pytest.mark.parametrize(
  ('sizes', 'shape', 'names', 'expected'),
  [
    (dict(data=2, fsdp=2, tensor=2), (4, 8), ('embed', 'mlp'),
     ('fsdp', 'tensor')),
    # A dimension that the mesh does not divide.
    (dict(fsdp=2, tensor=4), (6, 10), ('embed', 'classes'), ('fsdp', None)),
    # Factored statistics have another rank than their parameter.
    (dict(fsdp=8), (8,), ('embed', 'mlp'), ()),
  ],
)  # fmt: skip
def test_arrays_follow_their_logical_names(sizes, shape, names, expected):
  found = placed(shape, names, sizes)
  assert (found.shape, found.dtype) == (shape, jnp.float32)
  assert tuple(found.sharding.spec) == expected


def test_a_misspelt_axis_is_an_error_and_not_replicated():
  with pytest.raises(ValueError, match='embde'):
    placed((4,), ('embde',), dict(data=8))
  first = placed((4,), ('embed',)).sharding.device_set  # without a mesh
  assert first == {jax.devices()[0]}


def test_rows_keep_their_order_over_devices():
  mesh = sharding.make_mesh(dict(data=4, fsdp=2))
  batch = sharding.put_batch({'x': np.arange(16)}, mesh)
  assert len(batch['x'].addressable_shards) == 8
  np.testing.assert_array_equal(batch['x'], np.arange(16))
