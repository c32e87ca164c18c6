"""The arguments of the experiments; tests/configs trains with each file."""

import pytest

from dataset_lib import builder
from launch import command_line, config_flags

TASKS = ('parity', 'logic', 'addition', 'sort', 'sparse_parity')


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)


def load(task, arguments='', *overrides):
  flag = f'configs/recurrent_act/graves.py:task={task},{arguments}'
  return config_flags.load_config(flag, overrides)


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
def test_defaults(task, cell, width, batch, rule, tau):
  config = load(task)
  model = config.model
  assert (model.cell, model.width, model.rule) == (cell, width, rule)
  assert (config.batch_size, config.loss.ponder_weight) == (batch, tau)
  source = builder.build_source(config.dataset, 'train')
  assert model.num_targets == source.num_targets


@pytest.mark.parametrize('task', TASKS)
def test_rules_bring_their_settings(task):
  for rule, steps, mu in (('act', 10, 1), ('fixed', 2, 1), ('skip', 10, 5)):
    config = load(task, f'rule={rule},cell=lstm')
    steps = 2 if task == 'sparse_parity' else steps
    model = config.model
    assert (model.max_steps, model.mu, model.cell) == (steps, mu, 'lstm')


@pytest.mark.parametrize(
  ('length', 'digits', 'places'), [(5, 5, 6), (2, 1, 2), (9, 5, 6), (11, 2, 4)]
)
def test_places_of_a_sum(length, digits, places):
  sizes = f'dataset.length={length}', f'dataset.digits={digits}'
  config = load('addition', '', *sizes)
  assert config.model.num_targets == places
  source = builder.build_source(config.dataset, 'train')
  assert source.num_targets == places


@pytest.mark.parametrize('arguments', ['rule=never', 'cell=elman', 'gates=3'])
def test_an_illegal_argument_is_named(arguments):
  name = arguments.partition('=')[0]
  with pytest.raises(command_line.UsageError, match=f'argument .?{name}'):
    load('parity', arguments)
