"""Terms by hand: masks, weights, knobs, accumulation, the example."""

import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from eval_lib.metrics import compute
from tests.train_lib import mixup_test
from train_lib import terms
from train_lib.task import Task
from train_lib.terms import Forward, Term
from train_lib.train_step import init_state, make_train_step

ROWS, WORDS = 8, 4
WEIGHTS = {'second': 0.5, 'cost': 0.25}


class Words(Task):
  """A value of each word and one of each row; a cost of words, per row."""

  KNOBS = ('second',)

  def build_model(self):
    return nn.Dense(1)

  def example(self):
    return {'x': jnp.zeros((1, WORDS, 3))}

  def arguments(self, batch):
    return (batch['x'],)

  def apply(self, params, model_state, batch, row_keys=None):
    return self.model.apply({'params': params}, batch['x'])[..., 0], {}

  def masks(self, batch):
    words = batch['words'] * batch['mask'][:, None]
    return super().masks(batch) | {'words': words}

  def terms(self, forward):
    y = forward.logits
    return (
      Term(jnp.square(y - 1.0), over='words', name='words'),
      Term(jnp.square(y.sum(1)), 'second', share='second_share'),
      Term(jnp.abs(y), 'cost', over='words', per='rows', name='cost'),
      Term(y[:, 0] > 0, 0.0, name='positive'),
    )

  def metrics(self, forward):
    return {}


def batch_of():
  rng = np.random.default_rng(0)
  mask = np.array([1, 1, 0, 1, 1, 1, 1, 0], np.float32)
  x = rng.normal(size=(ROWS, WORDS, 3)).astype(np.float32)
  x[mask == 0] = 1e3  # padding, which counts nothing
  words = (rng.uniform(size=(ROWS, WORDS)) < 0.6).astype(np.float32)
  return {'x': x, 'words': words, 'mask': mask}


def task_of():
  info = DatasetInfo('x', (WORDS, 3), 'float32', 2, (), ROWS)
  return Words({'loss': WEIGHTS}, info)


def by_loop(params, batch, second):
  """The loss, and the metrics that terms name."""
  kernel = np.asarray(params['kernel'], np.float64)[:, 0]
  words, rows, costs, positive = [], [], 0.0, []
  for row in np.flatnonzero(batch['mask']):
    y = batch['x'][row] @ kernel + float(params['bias'][0])
    here = y[batch['words'][row] > 0]
    words += [*(here - 1) ** 2]
    costs += np.abs(here).sum()
    rows.append(y.sum() ** 2)
    positive.append(y[0] > 0)
  part, cost = second * np.mean(rows), 0.25 * costs / len(rows)
  loss = np.mean(words) + part + cost
  return loss, {
    'words': np.mean(words), 'positive': np.mean(positive),
    'second_share': part / loss, 'cost': costs / len(words), 'loss': loss,
  }  # fmt: skip


def step_of(num_micro, knobs):
  """(parameters before, after a step, metrics)."""
  schedule = optax.constant_schedule(0.1)
  task, optimizer = task_of(), optax.sgd(schedule)
  state = nn.unbox(init_state(task, optimizer, 0, 0.0))
  step = jax.jit(make_train_step(task, optimizer, schedule, num_micro))
  after, metrics = step(state, {}, batch_of(), knobs)
  return state.params, after.params, compute(metrics)


@pytest.mark.parametrize('knobs', [{}, {'second': jnp.float32(2.0)}])
def test_terms_over_different_counts_by_a_loop_and_in_micro_batches(knobs):
  before, after, metrics = step_of(1, knobs)
  second = float(knobs.get('second', WEIGHTS['second']))
  _, want = by_loop(before, batch_of(), second)
  for name, value in want.items():
    assert metrics[name] == pytest.approx(value, rel=1e-5), name

  def shifted(by):
    bias = np.float64(before['bias']) + by
    return by_loop(before | {'bias': bias}, batch_of(), second)[0]

  slope = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
  moved = float(after['bias'][0] - before['bias'][0])
  assert moved == pytest.approx(-0.1 * slope, rel=1e-4)
  for num_micro in (2, 8):
    _, others, parts = step_of(num_micro, knobs)
    assert parts == pytest.approx(metrics, rel=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      after, others,
    )  # fmt: skip


def test_padding_may_be_nan_and_shapes_are_those_of_masks():
  masks = {'rows': jnp.array([1.0, 1.0, 0.0])}
  forward = Forward(
    logits=None, out={}, batch={}, targets=(), masks=masks, settings={}
  )
  term = Term(jnp.array([1.0, 3.0, np.nan]), 2.0, name='cost')
  loss, metrics = terms.total([term], forward, {'rows': 2.0})
  assert (loss, metrics['cost'].compute()) == (4.0, 2.0)
  wrong = Term(jnp.ones((3, 3)), name='cost')
  with pytest.raises(ConfigError, match=r'terms\.cost: .*\(3,\) as .*rows'):
    terms.total([wrong], forward, {'rows': 1.0})


def test_the_example_of_the_docstring_is_an_objective():
  text = terms.__doc__.partition('has:\n')[2].partition('\nDenominators')[0]
  names = dict(entr=jax.scipy.special.entr, Classification=mixup_test.Softmax)
  exec(
    'import dataclasses\nimport jax\nfrom train_lib.terms import Term, Weight\n'
    + textwrap.dedent(text),
    names,
  )
  sure, info = names['Sure'], mixup_test.task_of().info
  assert sure.Loss().entropy_weight == 0.1
  loss = dict(mixup=0.5, label_smoothing=0.1, entropy_weight=0.1)
  task, plain = sure({'loss': loss}, info), mixup_test.task_of()
  params, _ = plain.init(jax.random.key(0))
  batch = jax.tree.map(jnp.asarray, mixup_test.batch_of())
  keys, norm = mixup_test.keys_of(mixup_test.ROWS), task.normalizers(batch)
  given = params, {}, {}, batch, norm
  base = float(plain.loss(*given, keys, {})[0])
  for knobs, weight in (({}, 0.1), ({'entropy_weight': 3.0}, 3.0)):
    loss, (metrics, *_) = task.loss(*given, keys, knobs)
    entropy = metrics['entropy'].compute()
    assert entropy > 0
    assert loss == pytest.approx(base + weight * entropy, rel=1e-5)
