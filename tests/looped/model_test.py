"""The looped model: its parameters, iterations and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs.looped import trm
from looped.model import LoopedModel, least_sure

ROWS, CELLS, SYMBOLS = 3, 6, 5
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, CELLS), 1, SYMBOLS)
TRM = dict(latents=2, low_cycles=2, positions='rotary', prefix=2)
KINDS = {
  'solver': dict(
    feedback=True, blank=1, norm='pre', low_cycles=2, score_reads='answer'
  ),
  'trm': TRM | dict(high_cycles=2, gradient='last', scores=2),
  'cells': dict(latents=2, mix='cells', positions='none', norm='pre'),
}


def make(**fields):
  """(model, variables), all of which are random."""
  sizes = dict(num_classes=SYMBOLS, width=16, num_heads=2, max_steps=3)
  model = LoopedModel(**sizes | fields)
  shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS))
  rng = np.random.default_rng(0)
  return model, jax.tree.map(
    lambda x: jnp.float32(rng.normal(size=x.shape) / x.shape[0] ** 0.5), shapes
  )


def advanced(model, variables, steps, stop=lambda state: state):
  """The logits and scores of iterations, one after the other."""
  state, outputs = model.apply(variables, TOKENS, method='begin'), []
  advance = jax.jit(lambda *a: model.apply(*a, TOKENS, method='advance'))
  for _ in range(steps):
    state, score = advance(variables, stop(state))
    outputs.append((state['logits'], score))
  return [jnp.stack(values) for values in zip(*outputs, strict=True)]


@pytest.mark.parametrize(
  ('mix', 'count'), [('attention', 6_828_034), ('cells', 5_028_866)]
)
def test_parameters_of_trm(mix, count):
  fields = trm.get_config(f'data=D,mix={mix}').model.to_dict()
  del fields['name']
  model, row = LoopedModel(num_classes=11, **fields), jnp.zeros((1, 81), int)
  shapes = jax.eval_shape(model.init, jax.random.key(0), row)
  sizes = {k: sum(x.size for x in jax.tree.leaves(shapes[k])) for k in shapes}
  assert sizes == {'params': count, 'start': 2 * 512}


def test_values_at_first():
  model = LoopedModel(num_classes=SYMBOLS, width=512, depth=1, latents=2)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), TOKENS))
  start, params = variables['start'], variables['params']['iteration']
  assert np.std(start['high']) == pytest.approx(1, abs=0.1)
  assert abs(start['high'] - start['low']).max() > 1
  table = params['symbols']['embedding']
  assert np.std(table) * 512**0.5 == pytest.approx(1, abs=0.1)
  assert not params['score']['kernel'].any()
  assert params['score']['bias'] == -5


@pytest.mark.parametrize('kind', KINDS)
def test_iterations_equal_a_plain_loop(kind):
  model, variables = make(**KINDS[kind], limit=4)
  run = jax.jit(model.apply)
  logits, out = run(variables, TOKENS)
  expected = advanced(model, variables, 4)
  for name, values in zip(('logits', 'scores'), expected, strict=True):
    np.testing.assert_allclose(out[name], values, atol=1e-4)
  np.testing.assert_array_equal(logits, out['logits'][-1])
  assert abs(np.diff(out['scores'], axis=0)).min() > 1e-3
  # Only post-norm keeps the size of the state.
  size = np.square(out['features']).mean(-1)
  assert np.allclose(size, 1, atol=1e-3) == (model.norm == 'post')
  keys = jax.random.split(jax.random.key(0), ROWS)
  trained = run(variables, TOKENS, row_keys=keys)[1]
  np.testing.assert_allclose(trained['logits'], expected[0][:3], atol=1e-4)
  alone = [run(variables, row[None])[0][0] for row in TOKENS]
  np.testing.assert_allclose(alone, logits, atol=1e-4)


def test_clues_stay_and_only_blanks_are_filled():
  model, variables = make(blank=1)
  answers = advanced(model, variables, 2)[0].argmax(-1)
  free = advanced(make()[0], variables, 2)[0].argmax(-1)
  expected = np.where(TOKENS == 1, free, TOKENS[None])
  np.testing.assert_array_equal(answers, expected)
  assert (free != answers).any()


def test_the_score_reads_how_sure_the_least_sure_cell_is():
  model, variables = make(score_reads='answer')
  kernel = variables['params']['iteration']['score']['kernel']
  assert kernel.shape == (16 + 1, 1)
  variables['params']['iteration']['score']['kernel'] = kernel.at[:16].set(0.0)
  logits, scores = advanced(model, variables, 1)
  logits = np.asarray(logits[0], np.float64)
  likely = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  best = likely.max(-1).min(-1)
  bias = variables['params']['iteration']['score']['bias'][0]
  expected = np.log(best / (1 - best)) * kernel[16, 0] + bias
  np.testing.assert_allclose(scores[0], expected, atol=1e-5)
  # Clues are certain, and the logarithm of 0 is not taken.
  assert float(least_sure(jnp.float32([[[30.0, 0.0]]]))[0, 0]) > 13


def test_the_last_answer_is_read():
  model, variables = make(feedback=True)
  before = advanced(model, variables, 2)[0]
  answer = variables['params']['iteration']['answer']
  answer['kernel'] = 2 * answer['kernel']
  after = advanced(model, variables, 2)[0]
  np.testing.assert_array_equal(before[0], after[0])  # there was none
  assert abs(before[1] - after[1]).max() > 1e-2


@pytest.mark.parametrize(
  'latents', [pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_gradient_of_the_last_cycle_alone(latents):
  """3 cycles are 3 iterations of 1, with a gradient through the last."""
  fields = TRM | dict(
    latents=latents, score_gradient='trunk', high_cycles=3, depth=1
  )
  model, variables = make(**fields, gradient='last')
  single, everything = make(**fields | {'high_cycles': 1})[0], make(**fields)[0]

  def gradient(model, steps):
    def loss(params):
      values = dict(variables, params=params)
      stopped = advanced(model, values, steps, jax.lax.stop_gradient)
      return jnp.square(stopped[0][-1]).mean() + stopped[1][-1].sum()

    return jax.tree.leaves(jax.grad(loss)(variables['params']))

  last, expected = gradient(model, 1), gradient(single, 3)
  for values in zip(last, expected, strict=True):
    np.testing.assert_allclose(*values, atol=1e-4)
  assert abs(last[-1] - gradient(everything, 1)[-1]).max() > 1e-3


def test_feedback_has_no_gradient_of_the_iteration_before():
  fields = dict(feedback=True, gradient='last', latents=2)
  model, variables = make(**fields)

  def gradient(stop):
    def loss(params):
      values = dict(variables, params=params)
      return jnp.square(advanced(model, values, 2, stop)[0][-1]).mean()

    return jax.grad(loss)(variables['params'])

  given, expected = (
    gradient(lambda state: state),
    gradient(jax.lax.stop_gradient),
  )
  jax.tree.map(np.testing.assert_array_equal, given, expected)
  assert given['iteration']['answer']['kernel'].any()


@pytest.mark.parametrize('reads', ['prefix', 'answer'])
@pytest.mark.parametrize('where', ['head', 'trunk'])
def test_gradient_of_the_score(where, reads):
  model, variables = make(score_gradient=where, score_reads=reads)

  def score(params):
    return advanced(model, dict(variables, params=params), 1)[1].sum()

  gradient = jax.grad(score)(variables['params'])['iteration']
  assert gradient.pop('score')['kernel'].any()
  head = gradient.pop('head')  # of the symbols
  assert head['kernel'].any() == (where == 'trunk' and reads == 'answer')
  trained = {bool(x.any()) for x in jax.tree.leaves(gradient)}
  assert trained == {where == 'trunk'}


@pytest.mark.parametrize('kind', ['trm', 'cells'])
def test_flops_against_xla(kind):
  model, variables = make(**KINDS[kind] | dict(width=64, max_steps=1))
  compiled = jax.jit(model.apply).lower(variables, TOKENS[:1]).compile()
  counted = compiled.cost_analysis()['flops']
  assert model.flops((CELLS,)) == pytest.approx(counted, rel=0.2)
  assert model.flops((CELLS,), 7) == 7 * model.flops((CELLS,))
