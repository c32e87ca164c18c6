"""A loop stage: rows at different iterations in one batch, equal answers."""

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError
from serve_lib import bundle
from serve_lib.chain import Grid, Resizable
from serve_lib.decisions import ClassifierPolicy
from serve_lib.engine import Engine
from serve_lib.items import TokenReader
from serve_lib.loops import Loop
from serve_lib.programs import Programs
from serve_lib.scheduler import TURNS
from tests.serve_lib import toy

LIMIT, WIDTH, ROWS = 6, 8, 40
rng = np.random.default_rng(0)
VARIABLES = {
  'table': rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
  # Larger ones would amplify rounding, which differs by CPU, in each step.
  'weights': rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 12,
  'out': rng.normal(size=(WIDTH, 3)).astype(np.float32),
  'steps': rng.integers(1, LIMIT + 1, ROWS, np.int32),
}


class Chain(Resizable):
  """Takes the steps of a row of a table; with `tail`, classifies at the end."""

  variants = ('full',)

  def __init__(self, iterations=1, tail=False, limit=LIMIT):
    self.variables, self.loop = VARIABLES, Loop(1, limit, iterations)
    self.num_stages = 2 + tail
    self.reader = TokenReader(1, 1, ROWS)
    self.pad = self.reader.pad

  def sized(self, index, variant, sizes, alone=False):
    return (self.begin, self.step, self.classify)[index]

  def begin(self, variables, inputs):
    place = inputs['tokens'][:, 0]
    x, left = variables['table'][place], variables['steps'][place]
    outputs = {'logits': x @ variables['out'], 'steps': 0 * left}
    return {'x': x, 'left': left, 'steps': 0 * left}, outputs

  def step(self, variables, carry):
    x, running = carry['x'], carry['left'] > 0
    new = jnp.tanh(x @ variables['weights'] + x)
    x = jnp.where(running[:, None], new, x)
    one = running.astype(jnp.int32)
    left, steps = carry['left'] - one, carry['steps'] + one
    outputs = {'running': left > 0, 'steps': steps}
    carry = {'x': x, 'left': left, 'steps': steps}
    return carry, outputs | {'logits': x @ variables['out']}

  def classify(self, variables, carry):
    logits = jnp.tanh(carry['x']) @ variables['out']
    return (), {'logits': logits, 'steps': carry['steps']}


@dataclasses.dataclass(eq=False)
class Policy(ClassifierPolicy):
  """Rows leave the loop when they have halted; waits, if told to."""

  def __post_init__(self):
    self.batches, self.open = [], threading.Event()
    self.reached, self.order = threading.Event(), []
    self.open.set()

  def decide(self, stage, rows, outputs):
    self.batches.append((stage, [len(row.outputs) for row in rows]))
    self.reached.set()
    assert self.open.wait(toy.WAIT)
    if stage == 0:
      return super().decide(stage, rows, outputs)
    return ~outputs['running']

  def describe(self, row):
    self.order.append(int(row.encoded.inputs['tokens'][0]))
    fields = {'logits': row.outputs[-1]['logits'], 'visits': len(row.outputs)}
    return 1, 1.0, fields | {'steps': int(row.outputs[-1]['steps'])}


def make(chain, batches=(1, 2, 4), policy=Policy, **settings):
  policy = policy(chain, chain.reader, ('a', 'b', 'c'), (1,))
  return Engine(chain, policy, (1,), batches, **settings)


def items(numbers=range(ROWS)):
  return [np.array([number], np.int32) for number in numbers]


def check(answers, tail=False):
  """Compares with a loop over all rows, in float64."""
  x = VARIABLES['table'].astype(np.float64)
  for number in range(LIMIT):
    new = np.tanh(x @ VARIABLES['weights'] + x)
    x = np.where((number < VARIABLES['steps'])[:, None], new, x)
  logits = (np.tanh(x) if tail else x) @ VARIABLES['out']
  assert [one.fields['steps'] for one in answers] == [*VARIABLES['steps']]
  found = [one.fields['logits'] for one in answers]
  np.testing.assert_allclose(found, logits, atol=1e-5)


@pytest.mark.parametrize('backend', ['xla', 'onnxruntime'])
@pytest.mark.parametrize(
  ('iterations', 'tail'), [(1, False), (3, False), (1, True)]
)
def test_a_row_is_computed_as_if_it_were_alone(backend, iterations, tail):
  if backend == 'onnxruntime':
    pytest.importorskip('onnxruntime', reason='needs onnx and onnxruntime')
  chain = Chain(iterations, tail)
  engine = make(chain, max_pending=9, backend=backend)  # rows come one by one
  with engine:
    alone = [engine.predict([item])[0] for item in items()]
    answers = engine.predict(items() * 4)[-ROWS:]
  check(alone, tail)
  check(answers, tail)
  for one, other in zip(alone, answers, strict=True):
    steps = one.fields['steps']
    visits = 1 + -(-steps // iterations) + tail
    assert one.fields['visits'] == other.fields['visits'] == visits
    found = one.fields['logits'], other.fields['logits']
    np.testing.assert_allclose(*found, atol=1e-6)
  mixed = [len({*visits}) > 1 for _, visits in engine.policy.batches]
  assert any(mixed) or iterations > 1  # few visits, few mixed batches
  status = engine.status()
  assert status['pooled_rows'] == status['pool_bytes'] == 0
  assert {*engine.monitor.snapshot()['fill']} == {*range(2 + tail)}


@pytest.mark.parametrize('new', [False, True])
def test_the_limit_ends_a_loop(new):
  class Endless(Policy):
    def decide(self, stage, rows, outputs):
      return np.zeros(len(rows), bool)

  with make(Chain(tail=new), policy=Endless) as engine:
    answers = engine.predict(items())
  assert {one.fields['visits'] for one in answers} == {1 + LIMIT + new}
  check(answers, new)


class Long(Policy):
  """Rows 0 to 7 stay in the loop, others leave before."""

  def decide(self, stage, rows, outputs):
    super().decide(stage, rows, outputs)
    first = [int(row.encoded.inputs['tokens'][0]) >= 8 for row in rows]
    return np.array(first) & (stage == 0)


def serve_later(limit, first, later):
  """Rows that come while the first are computed; returns policy and stages."""
  with make(Chain(limit=limit), policy=Long, max_wait=0.0, ahead=0) as engine:
    policy = engine.policy
    policy.open.clear()
    futures = engine.submit_all(items(first))
    assert policy.reached.wait(toy.WAIT)
    futures += engine.submit_all(items(later))
    policy.open.set()
    for future in futures:
      future.result(toy.WAIT)
  return policy, ''.join(str(stage) for stage, _ in policy.batches)


def test_long_loops_do_not_hold_up_new_rows():
  policy, stages = serve_later(60, range(4), range(8, 16))  # full batches
  assert {*policy.order[:8]} == {*range(8, 16)}
  assert stages[1 : TURNS + 2] == '1' * TURNS + '0' or stages[1] == '0'


def test_new_rows_do_not_hold_up_a_loop():
  _, stages = serve_later(12, [0], [*range(8, ROWS)] * 8)
  assert '0' * (TURNS + 3) not in stages[: stages.rindex('1')]


@pytest.mark.parametrize('batches', [(1,), (1, 2, 4)])
def test_a_cancelled_row_leaves_a_loop(batches):
  limit = 10**6
  with make(Chain(limit=limit), batches, Long, ahead=0) as engine:
    futures = engine.submit_all(items(range(3)))
    while len(engine.policy.batches) < 8:
      assert engine.policy.reached.wait(toy.WAIT)
    assert all(future.cancel() for future in futures)
    later = engine.submit_all(items([8, 9]))
    assert [one.result(toy.WAIT).fields['visits'] for one in later] == [1, 1]
  assert engine.status()['pending'] == engine.status()['pooled_rows'] == 0


def test_a_loop_has_a_bundle(tmp_path):
  chain = Chain(iterations=3)
  policy = ClassifierPolicy(chain, chain.reader, ('a', 'b', 'c'), (1,))
  programs = Programs(chain, Grid((1,), (1, 4)))
  bundle.write(tmp_path / 'bundle', programs, policy, {})
  found, _, grid = bundle.read(tmp_path / 'bundle')
  assert found.loop == Loop(1, 2)
  found.reader = chain.reader
  with make(found, grid.batches, backend='xla') as engine:
    check(engine.predict(items()))


@pytest.mark.parametrize('stage', [0, 2])
def test_an_illegal_loop_is_named(stage):
  chain = Chain()
  chain.loop = Loop(stage, 3)
  with pytest.raises(ConfigError, match=r'loop\.stage: expected'):
    make(chain, backend='xla')
  with pytest.raises(ConfigError, match=r'loop\.limit: expected a multiple'):
    Loop(1, 4, 3)


def test_a_carry_that_changes_is_no_loop():
  class Growing(Chain):
    def step(self, variables, carry):
      carry, outputs = super().step(variables, carry)
      return carry | {'x': jnp.tile(carry['x'], 2)}, outputs

  with pytest.raises(ValueError, match='a loop: expected'):
    Programs(Growing(), Grid((1,), (1,))).compile(progress=False)
