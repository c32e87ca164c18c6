"""The recurrent model: a plain loop, invariances, one input by hand."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from halting.token_rules import ACT, Fixed, SkipACT, StraightThrough
from recurrent_act.model import CELLS, RecurrentModel, ponder_input
from tests.model_lib import plain

B, T, E = 4, 6, 3
INPUTS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
# With gaps: what is not valid is not only at the end.
VALID = np.array(
  [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0], [1] + [0] * 5]
)


RULES = {
  'act': ACT(), 'straight_through': StraightThrough(), 'skip': SkipACT(mu=3),
  'fixed': Fixed(),
}  # fmt: skip


def model_of(kind='rnn', rule='act', **given):
  defaults = dict(num_classes=3, num_targets=2, width=8, max_steps=3)
  return RecurrentModel(cell=kind, rule=RULES[rule], **(defaults | given))


@functools.cache
def variables_of(kind='rnn', rule='act', **fields):
  """Random parameters that spread the scores."""
  inputs = jnp.zeros((1, T, E), jnp.float32)
  params = plain.noise(
    model_of(kind, rule, **fields), inputs, scale=0.5, seed=3
  )
  score = params['repetition'].get('score')
  if score is not None:
    score['kernel'] *= 8
    score['bias'][:] = 0.0
  return {'params': params}


@functools.cache
def compiled(kind, rule, **fields):
  return jax.jit(model_of(kind, rule, **fields).apply)


def run(kind='rnn', rule='act', inputs=INPUTS, valid=VALID, **fields):
  return compiled(kind, rule, **fields)(
    variables_of(kind, rule), jnp.asarray(inputs), jnp.asarray(valid)
  )


PLAIN_CELLS = {'rnn': nn.SimpleCell, 'gru': nn.GRUCell, 'lstm': nn.LSTMCell}


@functools.partial(jax.jit, static_argnums=0)
def run_cell(kind, params, state, x):
  """(state, hidden output) of one row; an LSTM's state is `[2, D]`."""
  state = jnp.float32(state)
  cell = PLAIN_CELLS[kind](features=state.shape[-1])
  given = tuple(state) if kind == 'lstm' else state
  new, hidden = cell.apply({'params': params}, given, x)
  return jnp.stack(new) if kind == 'lstm' else new, hidden


def weights(rule, scores, carried, limit, epsilon):
  """(weights of the repetitions, R, h^0 of the next); `scores(n)` is p^n."""
  if rule == 'skip' and carried >= 1 - epsilon:
    return [], 0.0, carried - 1
  if rule == 'act':
    taken = []
    for n in range(1, limit + 1):
      taken.append(scores(n))
      if sum(taken) >= 1 - epsilon:
        break
    remainder = 1 - sum(taken[:-1])
    return [*taken[:-1], remainder], remainder, 0.0
  total, n = carried if rule == 'skip' else 0.0, 0
  while n < limit and (rule == 'fixed' or total < 1 - epsilon):
    n += 1
    total += scores(n)
  rest = total - 1 if total >= 1 - epsilon else 0.0
  return [*[0.0] * (n - 1), 1.0], 0.0, rest


def ponder(params, rule, model, inputs):
  """(outputs `[T, O]`, hidden, N, rho) of one row of valid inputs `[T, E]`."""
  p, head = params['repetition'], params['head']
  state = np.zeros((2, model.width) if model.cell == 'lstm' else model.width)
  output, carried, answers = None, 0.0, []
  for x in inputs:
    states, outputs = [], []

    def score(n, x=x, states=states, outputs=outputs, before=state):
      seen = np.append(x, np.float32(n == 1))
      given = states[-1] if states else before
      new, hidden = run_cell(model.cell, p['cell'], given, seen)
      states.append(np.float64(new))
      outputs.append(plain.dense(head, hidden))
      if 'score' not in p:
        return 0.0
      mu = model.rule.mu if rule == 'skip' else 1
      return mu * expit(plain.dense(p['score'], hidden)[0])

    w, remainder, carried = weights(rule, score, carried, model.max_steps, 0.01)
    if w:
      state = sum(a * s for a, s in zip(w, states, strict=True))
      output = sum(a * y for a, y in zip(w, outputs, strict=True))
    hidden = state[1] if model.cell == 'lstm' else state
    answers.append((output, hidden, len(w), len(w) + remainder))
  return [np.array(values) for values in zip(*answers, strict=True)]


@pytest.mark.parametrize(
  ('kind', 'rule'),
  [
    ('rnn', 'act'), ('lstm', 'act'), ('lstm', 'straight_through'),
    ('gru', 'skip'), ('rnn', 'fixed'),
  ],
)  # fmt: skip
def test_equals_plain_loop(kind, rule):
  model, variables = model_of(kind, rule), variables_of(kind, rule)
  logits, out = run(kind, rule)
  assert logits.shape == (B, T, 2, 3)
  seen = set()
  for row in range(B):
    here = VALID[row] > 0
    outputs, hidden, steps, cost = ponder(
      variables['params'], rule, model, INPUTS[row][here]
    )
    got = np.asarray(logits[row])[here].reshape(len(outputs), -1)
    np.testing.assert_allclose(got, outputs, atol=1e-5)
    np.testing.assert_allclose(out['features'][row], hidden[-1], atol=1e-5)
    spent = {name: np.asarray(x[row]) for name, x in out['ponder'].items()}
    np.testing.assert_array_equal(spent['steps'][here], steps)
    np.testing.assert_allclose(spent['cost'][here], cost, atol=1e-5)
    np.testing.assert_array_equal(spent['skipped'][here], steps == 0)
    for value in spent.values():
      assert not value[~here].any()
    seen |= set(steps.tolist())
  dynamic, looped = run(kind, rule, dynamic=True)
  np.testing.assert_allclose(logits, dynamic, atol=1e-6)
  for name, value in out['ponder'].items():
    np.testing.assert_allclose(value, looped['ponder'][name], atol=1e-6)
  # The case has early and forced halts, or it would prove little.
  assert seen >= {'fixed': {3}, 'skip': {0, 1, 3}}.get(rule, {2, 3})


@pytest.mark.parametrize('rule', ['act', 'skip'])
def test_what_is_not_valid_changes_nothing(rule):
  everything, _ = run('gru', rule, valid=np.ones((B, T)))
  default, _ = compiled('gru', rule)(variables_of('gru', rule), INPUTS)
  np.testing.assert_array_equal(default, everything)
  # The answer stays that of the input before.
  got, _ = run('gru', rule)
  np.testing.assert_array_equal(got[1, 3:], np.tile(got[1, 2], (3, 1, 1)))


@pytest.mark.parametrize('kind', ['rnn', 'lstm'])
def test_act_gradients_equal_finite_differences(kind):
  params = jax.tree.map(jnp.asarray, variables_of(kind)['params'])
  generator = np.random.default_rng(1)
  weights = generator.normal(size=(B, T, 2, 3)).astype(np.float32)
  direction = jax.tree.map(
    lambda x: generator.normal(size=x.shape).astype(np.float32), params
  )

  @jax.jit
  def moved(step):
    # N is constant under the gradient, so it must not change on the way.
    moved = jax.tree.map(lambda x, d: x + step * d, params, direction)
    logits, out = model_of(kind).apply(
      {'params': moved}, jnp.asarray(INPUTS), jnp.asarray(VALID)
    )
    return (logits * weights).sum() + 0.3 * out['ponder']['cost'].sum()

  step = 1e-3
  want = (moved(step) - moved(-step)) / (2 * step)
  np.testing.assert_allclose(jax.grad(moved)(0.0), want, rtol=0.01)
  assert abs(want) > 1.0


def test_two_classes_are_one_sigmoid():
  fields = dict(num_classes=2, num_targets=1)
  variables = variables_of(**fields)
  assert variables['params']['head']['kernel'].shape == (8, 1)
  logits, _ = compiled('rnn', 'act', **fields)(variables, jnp.asarray(INPUTS))
  assert logits.shape == (B, T, 1, 2)
  np.testing.assert_array_equal(logits[..., 0], 0.0)
  np.testing.assert_allclose(
    jax.nn.softmax(logits)[..., 1], jax.nn.sigmoid(logits[..., 1]), atol=1e-6
  )
  assert float(jnp.abs(logits[..., 1]).max()) > 0.1


def test_the_score_begins_at_its_bias():
  model = model_of(halting_bias=-1.5)
  params = model.init(jax.random.key(0), jnp.asarray(INPUTS))['params']
  assert nn.unbox(params)['repetition']['score']['bias'] == -1.5


@pytest.mark.parametrize('kind', CELLS)
def test_flops_agree_with_the_compiler(kind):
  # One input and repetition.
  model = RecurrentModel(num_classes=7, cell=kind, width=256, max_steps=1)
  got = plain.counted_flops(model, jnp.zeros((1, 1, 64)))
  assert model.flops((1, 64)) == pytest.approx(got, rel=0.05)
  three = model.clone(max_steps=3)
  assert three.flops((1, 64)) == pytest.approx(3 * got, rel=0.05)
  assert three.flops((5, 64), steps=1.5) == pytest.approx(7.5 * got, rel=0.05)


def once(score, carried=0.0, state=0.0, **options):
  """One input of a cell that adds 1 to its state: s^n = s_{t-1} + n."""

  def step(state, inputs):
    return state + 1.0, jnp.broadcast_to(score, state.shape[:1])

  carried = jnp.broadcast_to(jnp.asarray(carried, jnp.float32), (1,))
  options = RecurrentModel(num_classes=2, **{'max_steps': 10} | options)
  state, inputs = jnp.full((1, 1), state), jnp.zeros((1, 1))
  return ponder_input(step, state, carried, inputs, jnp.array([True]), options)


def state_of(*args, **options):
  return once(*args, **options)[0][0, 0]


def carried_of(*args, **options):
  return once(*args, **options)[1][0]


def cost_of(*args, **options):
  return once(*args, **options)[2]['cost'][0]


ADAPTS, STRAIGHT = dict(rule=ACT()), dict(rule=StraightThrough())
SKIP = dict(rule=SkipACT(mu=2), state=5.0)
TWO = dict(max_steps=2)
# (function, options, (score, h^0), argument) -> derivative
GRADIENTS = [
  # s = p + 2 p + 3 (1 - 2 p); rho = 3 + 1 - 2 p.
  (state_of, ADAPTS, (0.4, 0.0), 0, -3.0),
  (cost_of, ADAPTS, (0.4, 0.0), 0, -2.0),
  # Forced at 2: s = p + 2 (1 - p); rho = 2 + 1 - p.
  (state_of, ADAPTS | TWO, (0.4, 0.0), 0, -1.0),
  (cost_of, ADAPTS | TWO, (0.4, 0.0), 0, -1.0),
  # h^n = n p, s^n = n: sum_n s^n dh^n/dp = 1 + 4 + 9; of the cost -(1 + 2 + 3).
  (state_of, STRAIGHT, (0.4, 0.0), 0, 14.0),
  (cost_of, STRAIGHT, (0.4, 0.0), 0, -6.0),
  (state_of, STRAIGHT | TWO, (0.4, 0.0), 0, 5.0),
  (cost_of, STRAIGHT | TWO, (0.4, 0.0), 0, -3.0),
  # h^n = c + 2 n p: N = 2, s = (1 - f(c)) (f(h^1) 6 + f(h^2) 7) + f(c) 5.
  (state_of, SKIP, (0.3, 0.2), 0, 40.0),
  (state_of, SKIP, (0.3, 0.2), 1, 5.0 - 7.0 + 6.0 + 7.0),
  # rho = 2 + (1 - f(c)) + ... in slope: -1 by each of h^0, h^1, h^2.
  (cost_of, SKIP, (0.3, 0.2), 0, -6.0),
  (cost_of, SKIP, (0.3, 0.2), 1, -3.0),
  # h^2 - 1
  (carried_of, SKIP, (0.3, 0.2), 0, 4.0),
  (carried_of, SKIP, (0.3, 0.2), 1, 1.0),
  # A skipped input: s = f(c) 5 + (1 - f(c)) 0, the sum over no steps.
  (state_of, SKIP, (0.3, 1.3), 1, 5.0),
  (cost_of, SKIP, (0.3, 1.3), 1, -1.0),
  (carried_of, SKIP, (0.3, 1.3), 1, 1.0),
]


@pytest.mark.parametrize(
  ('function', 'options', 'given', 'argument', 'want'), GRADIENTS
)
def test_gradients_by_hand(function, options, given, argument, want):
  slope = jax.grad(lambda *a: function(*a, **options), argument)(*given)
  assert float(slope) == pytest.approx(want, abs=1e-6)
