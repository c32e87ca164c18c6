"""The contract of every task and every configuration of the checkout.

Both are found and not listed: a new family is checked as soon as its folder and
its configuration are there. A configuration that needs data, or is too large
for a test, has its small variant in `tests.golden.adapter`; all others run as
they are with 8 rows a batch.
"""

import contextlib
import functools
import itertools
import pathlib

import flax.linen as nn
import jax
import numpy as np
import pytest
import scipy.special

from core import fields
from core.errors import ConfigError
from halting.row_rules import softmax
from serve_lib.chain import Failure
from serve_lib.engine import Engine
from tests import packages, wrong_values
from tests.golden import adapter
from train_lib import checkpoint, sharding
from train_lib.build import Setup

ROOT = pathlib.Path(__file__).resolve().parents[1]
KNOWN = adapter.configs()
# One of each family runs in CI, the others at night.
DEFAULT = ('parity adatape', 'recurrent parity', 'looped sudoku4')
SLOW = ('eat sst2', 'albert mnli')


def variants():
  """(flag, overrides) by name: the known ones, and a file that has none."""
  known = {flag.partition(':')[0] for flag, _ in KNOWN.values()}
  files = packages.config_files(ROOT)
  return KNOWN | {file: (file, []) for file in files if file not in known}


def marks_of(name):
  if name in SLOW:
    return pytest.mark.slow
  return pytest.mark.nightly if name in KNOWN and name not in DEFAULT else ()


def with_layouts():
  """Each case on 8 devices: rows split; also parameters; also matrices."""
  for name in variants():
    mark = pytest.mark.slow if name in DEFAULT else pytest.mark.nightly
    yield pytest.param(name, (8, 1, 1), marks=marks_of(name))
    yield pytest.param(name, (2, 2, 2), marks=mark)
    yield pytest.param(name, (1, 8, 1), marks=pytest.mark.nightly)


CASES = [pytest.param(name, marks=marks_of(name)) for name in variants()]


def one_step(config, layout):
  """(state before, state after, loss, gradient norm) of the first batch."""
  with config.unlocked():
    config.mesh = dict(zip(sharding.AXES, layout, strict=True))
    config.evals = {}
  setup = Setup(config)
  stage = setup.phases[0]
  with (
    jax.set_mesh(setup.mesh),
    contextlib.closing(setup.dataset.batches()) as batches,
  ):
    batch, state = setup.put(next(batches)), setup.init()
    before = jax.device_get(state)
    step, _ = setup.step(stage, batch)
    after, metrics = step(
      state, setup.frozen, batch, stage.knob_values(0), setup.rates
    )
    values = (float(metrics[n].compute()) for n in ('loss', 'grad_norm'))
    return before, jax.device_get(after), *values


@functools.cache
def stepped(name, folders, *layout):
  config = adapter.load(*variants()[name], dict(folders))
  return one_step(config, layout)


def largest_difference(a, b):
  differences = jax.tree.map(
    lambda x, y: np.abs(np.float64(x) - np.float64(y)).max(initial=0.0), a, b
  )
  return max(jax.tree.leaves(differences))


@pytest.mark.parametrize('name', CASES)
def test_one_step_has_finite_gradients_and_trains(name, folders):
  before, after, loss, norm = stepped(name, tuple(folders.items()), 1, 1, 1)
  assert np.isfinite([loss, norm]).all()
  assert norm > 0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))
  assert int(after.step) == 1
  assert largest_difference(before.opt_state, after.opt_state) > 0


# Three classes, for example, are not split into two.
@pytest.mark.filterwarnings('ignore:.* of an activation are whole on every')
@pytest.mark.parametrize(('name', 'layout'), [*with_layouts()])
def test_8_devices_do_the_step_of_1(name, layout, folders):
  one = stepped(name, tuple(folders.items()), 1, 1, 1)
  eight = stepped(name, tuple(folders.items()), *layout)
  assert largest_difference(one[0].params, eight[0].params) == 0
  np.testing.assert_allclose(one[2], eight[2], atol=1e-5)
  np.testing.assert_allclose(one[3], eight[3], rtol=1e-4)


@pytest.mark.parametrize('name', CASES)
def test_a_state_is_restored_as_it_was_saved(name, folders, tmp_path):
  state = stepped(name, tuple(folders.items()), 1, 1, 1)[1]
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state, {'phase': 0})
    checkpointer.wait()
    abstract = jax.eval_shape(lambda: state)
    restored, _ = checkpointer.restore(abstract)
  assert largest_difference(state, restored) == 0


def test_a_flipped_bit_loses_no_run(folders):
  """Every configuration keeps a checkpoint before the newest."""
  kept = {
    name: adapter.load(*one, folders).checkpoint.keep
    for name, one in variants().items()
  }
  assert min(kept.values()) >= 2, kept


def test_every_task_has_a_configuration(folders):
  used = {adapter.load(*one, folders).task for one in variants().values()}
  found = packages.tasks(ROOT)
  bases = {base for kind in found.values() for base in kind.__mro__[1:]}
  concrete = {name for name, kind in found.items() if kind not in bases}
  assert concrete <= used, 'no file of configs/ trains these'


@pytest.mark.parametrize('kind', packages.tasks(ROOT).values())
def test_illegal_losses_and_models_of_others_are_named(kind):
  for field, value in (*wrong_values.wrong_fields(kind.Loss), ('other', 1)):
    with pytest.raises(ConfigError, match=rf'^loss\.{field}: expected'):
      fields.check(kind.Loss, {field: value}, 'loss')
  if getattr(kind, 'MODEL', nn.Module) is not nn.Module:
    model = dict(name='tests.train_lib.mixup_test:Linear')
    model |= dict(num_targets=1, vocab_size=5)  # which data would give
    with pytest.raises(ConfigError, match=r'^model\.name: expected'):
      kind.validate_config({'loss': {}, 'model': model, 'dataset': {}})


@pytest.mark.parametrize('family', packages.families(ROOT))
def test_illegal_options_of_serving_are_named(family):
  policy = pytest.importorskip(f'{family}.policy', reason='no own policy')
  for field, value in wrong_values.wrong_fields(policy.Options):
    with pytest.raises(ConfigError, match=rf'^serve\.{field}: expected'):
      fields.check(policy.Options, {field: value}, 'serve')


@pytest.mark.parametrize('name', CASES)
def test_served_probabilities_are_those_of_the_masked_form(name, folders):
  config = adapter.load(*variants()[name], folders)
  task, batch = adapter.first_batch(config)
  params, state = adapter.initial_parameters(task)
  variables = jax.device_put(
    {'params': params, 'model_state': state}, jax.devices()[0]
  )
  options = {'rule': 'never'} if 'exit_layers' in config.model else {}
  options |= {'rule': 'all'} if 'low_cycles' in config.model else {}
  try:
    chain, policy = task.serve(variables, options)
  except ConfigError as error:
    if error.field not in ('task', 'model.rule', 'dataset'):
      raise
    pytest.skip(f'not served: {error}')
  rows = {key: value[:3] for key, value in batch.items()}
  with Engine(chain, policy, policy.lengths, (1, 2)) as engine:
    answers = engine.predict(adapter.items_of(rows, policy.reader))
  failures = [answer for answer in answers if isinstance(answer, Failure)]
  assert not failures, failures[0].details
  if 'image' in rows:  # framed as in evaluation
    encoded = map(policy.encode, rows['image'])
    rows['image'] = np.stack([row.inputs['image'] for row in encoded])
  logits = np.asarray(jax.jit(task.apply)(params, state, rows)[0], np.float64)
  if logits.ndim == 3:  # symbols of puzzles
    answered = logits.argmax(-1).astype(np.int32)
    expected = [*map(policy.reader.puzzle.write, answered)]
    assert [answer.label for answer in answers] == expected
    return
  if logits.shape[1] == 1:  # a regression
    given, expected = [answer.label for answer in answers], logits[:, 0]
  elif tasks := task.info.tasks:
    given = [
      [*itertools.chain(*(one.values() for one in by_task))]
      for by_task in (answer.probabilities.values() for answer in answers)
    ]
    parts = [softmax(logits[:, classes]) for classes in tasks.values()]
    expected = np.concatenate(parts, 1)
  else:
    given = [list(answer.probabilities.values()) for answer in answers]
    expected = (scipy.special.expit if task.MULTI_LABEL else softmax)(logits)
  np.testing.assert_allclose(given, expected, atol=1e-4)
