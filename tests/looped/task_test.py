"""Tasks of looped models: losses, metrics, exploration.

Slots, halting and updates of `Carried`: tests/looped/trm_test.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import linen as nn

from configs.looped import puzzles
from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from looped.task import Carried, Unrolled, log_stable
from tests import losses
from train_lib import config_schema, loading, trainer
from train_lib.build import Setup
from train_lib.warm_start import start_from

ROWS, CELLS, SYMBOLS, COUNT = 8, 6, 5, 3
INFO = DatasetInfo('tokens', (CELLS,), 'int32', SYMBOLS, (), 1, SYMBOLS)
NAME = 'looped.model:LoopedModel'


def make(kind, loss=(), **fields):
  """(task, params, model state), all random."""
  model = dict(name=NAME, width=8, num_heads=2, max_steps=COUNT, score_bias=0.0)
  defaults = dict(halting_weight=0.25, exploration=0.1, probabilities='softmax')
  loss = defaults | dict(loss)
  config = dict(model=model | fields, loss=loss, dtype='float32', dataset={})
  task = kind(config, INFO)
  rng = np.random.default_rng(0)
  shapes = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
  return task, *jax.tree.map(
    lambda x: jnp.float32(rng.normal(size=x.shape)), shapes
  )


def make_batch(task, params, state):
  """Answers of the model are the labels of half of the rows; one is padding."""
  rng = np.random.default_rng(0)
  tokens, label = rng.integers(1, SYMBOLS, (2, ROWS, CELLS), np.int32)
  label[:, -1] = 0  # ignored
  mask = np.float32([1] * (ROWS - 1) + [0])
  batch = dict(tokens=jnp.asarray(tokens), label=label, mask=mask)
  logits = np.asarray(jax.jit(task.apply)(params, state, batch)[0])
  label[: ROWS // 2] = logits[: ROWS // 2].argmax(-1)
  return batch | dict(label=jnp.asarray(label), mask=jnp.asarray(mask))


def log_softmax(logits, probabilities):
  x = np.float64(logits)
  if probabilities == 'softmax':
    return scipy.special.log_softmax(x, -1)
  s = np.where(x < 0, 1 / (1 - np.minimum(x, 0)), x + 1)
  return np.log(s / s.sum(-1, keepdims=True))


def test_the_blank_is_that_of_the_puzzle():
  config = puzzles.get_config('puzzle=sudoku4')
  wrong = config_schema.validate(config, ['model.blank=2'])
  with pytest.raises(ConfigError, match=r'model\.blank: expected 1, the'):
    Setup(wrong)


def test_stablemax_by_hand():
  p = jax.nn.softmax(log_stable(jnp.float32([0, 1, -1])))
  np.testing.assert_allclose(p, np.array([2, 4, 1]) / 7, rtol=1e-6)


@pytest.mark.parametrize('blank', [0, 1])
@pytest.mark.parametrize('probabilities', ['softmax', 'stablemax'])
def test_loss_and_metrics_in_numpy(blank, probabilities):
  smoothing = 0.2 * (probabilities == 'softmax')
  loss = {'probabilities': probabilities, 'label_smoothing': smoothing}
  task, params, state = make(Unrolled, loss, blank=blank)
  batch = make_batch(task, params, state)
  _, out = jax.jit(task.apply)(params, state, batch)
  logits, q = np.asarray(out['logits']), np.float64(out['scores'])
  tokens, label, mask = (
    np.asarray(batch[n]) for n in ('tokens', 'label', 'mask')
  )
  counts = (label > 0) & ((tokens == 1) | (blank == 0))
  entropy, halting = np.zeros((2, COUNT, ROWS))
  for n, b in np.ndindex(COUNT, ROWS):
    log = log_softmax(logits[n, b], probabilities)
    cells = np.flatnonzero(counts[b])
    for c in cells:
      own = (1 - smoothing) * log[c, label[b, c]] + smoothing * log[c].mean()
      entropy[n, b] -= own / len(cells)
    right = all(logits[n, b, c].argmax() == label[b, c] for c in cells)
    halting[n, b] = np.log1p(np.exp(q[n, b])) - right * q[n, b]
  expected = ((entropy + 0.25 * halting) * mask).sum() / COUNT / mask.sum()
  keys = jax.random.split(jax.random.key(0), ROWS)
  loss, metrics = losses.of(task)(params, batch, keys=keys, state=state)
  assert float(loss) == pytest.approx(expected, rel=1e-5)
  wrong = ((logits[-1].argmax(-1) != label) & counts).any(-1)
  rows, halts = (mask > 0) & counts.any(-1), q[-1] > 0
  assert 0 < wrong[rows].mean() < 1
  same = (logits[-1].argmax(-1) == label)[counts & rows[:, None]]
  for name, values in {
    'accuracy': ~wrong[rows], 'symbol_accuracy': same,
    'halting_accuracy': (halts != wrong)[rows],
    'halts_right': halts[rows & ~wrong], 'halts_wrong': halts[rows & wrong],
  }.items():  # fmt: skip
    assert metrics[name].compute() == pytest.approx(values.mean(), abs=1e-6), (
      name
    )


@pytest.mark.parametrize(('before', 'share'), [(0, 0.3), (8, 0.14), (15, 0.0)])
def test_exploration_keeps_rows_from_halting(before, share):
  """Of scores > 0 a row goes on by .3 * P(the step < uniform of 2 to 16)."""
  task, params, state = make(Carried, {'exploration': 0.3}, max_steps=16)
  params['iteration']['score']['kernel'] *= 0.0
  params['iteration']['score']['bias'] += 9.0
  rows, ones = 4000, jnp.ones((4000, CELLS), jnp.int32)
  batch = dict(tokens=ones, label=ones, mask=jnp.ones(rows))
  carry = task.init_carry(rows) | dict(steps=jnp.full(rows, before))
  carry['halted'] = carry['steps'] == 0
  batch = task.carried(carry, batch)
  keys = jax.random.split(jax.random.key(0), rows)
  after = jax.jit(task.apply)(params, state, batch, keys)[1]['carry']
  assert (after['steps'] == before + 1).all()
  assert float((~after['halted']).mean()) == pytest.approx(share, abs=0.03)


def test_one_iteration_is_the_limit_of_an_exploring_row():
  task, params, state = make(Carried, {'exploration': 1.0}, max_steps=1)
  ones = jnp.ones((ROWS, CELLS), jnp.int32)
  batch = dict(tokens=ones, label=ones, mask=jnp.ones(ROWS))
  batch = task.carried(task.init_carry(ROWS), batch)
  keys = jax.random.split(jax.random.key(0), ROWS)
  carry = jax.jit(task.apply)(params, state, batch, keys)[1]['carry']
  assert carry['halted'].all()


@pytest.mark.slow
def test_a_warm_start_has_the_start_states_of_its_source(tmp_path):
  config = puzzles.get_config('puzzle=sudoku4')
  fields = [
    'model.width=16', 'dataset.base=64', 'dataset.test_examples=16',
    'batch_size=16', 'phases.0.steps=2', 'evals={}', 'mesh.data=1',
  ]  # fmt: skip
  trainer.train(config_schema.validate(config, fields), str(tmp_path))
  source = loading.restore(tmp_path, loading.load_config(tmp_path)).variables
  fields += ['seed=1', f'warm_start.workdir={tmp_path}']
  setup = Setup(config_schema.validate(config, fields))
  with jax.set_mesh(setup.mesh):
    fresh = setup.init()
    state = start_from(setup)
  for own, expected in (
    (state.params, source['params']),
    (state.model_state, source['model_state']),
  ):
    jax.tree.map(np.testing.assert_array_equal, own, expected)
  trees = fresh.model_state, source['model_state']
  own, start = (np.asarray(jax.tree.leaves(tree)[0]) for tree in trees)
  assert abs(own - start).max() > 0.1
