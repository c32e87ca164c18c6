"""The training step of TRM against a plain PyTorch form, in float64.

The PyTorch form is written from the paper and the published program (Jolicoeur-
Martineau 2025, commit e7b6871), with the weights by our names.
"""

import dataclasses
import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dataset_lib.source import DatasetInfo
from looped.task import Carried
from train_lib import config_schema, optimizers, train_step

torch = pytest.importorskip('torch')
pytestmark = pytest.mark.peers

ROWS, CELLS, SYMBOLS, PREFIX, WIDTH, HEADS = 8, 9, 6, 2, 32, 2
DEPTH, HIGH, LOW, MOST, STEPS = 2, 2, 3, 3, 4
RATE, DECAY, B1, B2 = 2.0**-9, 1.0, 0.9, 0.95
DATA = 'tokens', 'label'


def batches():
  """Half of the rows have one cell that counts, so that some are right."""
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    tokens, label = rng.integers(1, SYMBOLS, (2, ROWS, CELLS), np.int32)
    label[::2, 1:] = 0
    yield dict(tokens=tokens, label=label, mask=np.ones(ROWS, np.float32))


def rms(x):
  return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def swiglu(w, name, x):
  gate, up = (x @ w[f'{name}/gate_up/kernel']).chunk(2, -1)
  return (gate / (1 + torch.exp(-gate)) * up) @ w[f'{name}/down/kernel']


def turned(x):
  """Rotary positions of `[B, L, N, H]`, theta 10,000, halves rotated."""
  length, half = x.shape[1], x.shape[3] // 2
  position = torch.arange(length, dtype=x.dtype)[:, None, None]
  angle = position / 10_000 ** (torch.arange(half, dtype=x.dtype) / half)
  first, second = x[..., :half], x[..., half:]
  cos, sin = torch.cos(angle), torch.sin(angle)
  parts = first * cos - second * sin, second * cos + first * sin
  return torch.cat(parts, -1)


def attention(w, name, x):
  rows, length, _ = x.shape
  joined = (x @ w[f'{name}/qkv/kernel']).view(rows, length, 3, HEADS, -1)
  query, key, value = joined.unbind(2)
  query, key = turned(query), turned(key)
  scores = torch.einsum('bqnh,bknh->bnqk', query, key)
  weights = torch.softmax(scores / math.sqrt(WIDTH / HEADS), -1)
  mixed = torch.einsum('bnqk,bknh->bqnh', weights, value)
  return mixed.reshape(rows, length, WIDTH) @ w[f'{name}/out/kernel']


def net(w, mix, z, injected):
  x = z + injected
  for number in range(DEPTH):
    name = f'iteration/network/block_{number}'
    if mix == 'attention':
      x = rms(x + attention(w, f'{name}/mix', x))
    else:  # the norm, too, is over the cells
      x = x.transpose(1, 2)
      x = rms(x + swiglu(w, f'{name}/mix', x)).transpose(1, 2)
    x = rms(x + swiglu(w, f'{name}/mlp', x))
  return x


def supervision(w, mix, slots):
  """Returns (states without gradient, logits, q) of one step."""
  x = w['iteration/symbols/embedding'][slots['tokens'].long()]
  x = torch.cat([torch.zeros(ROWS, PREFIX, WIDTH), x], 1) * math.sqrt(WIDTH)
  high, low = slots['high'], slots['low']
  for cycle in range(HIGH):
    with torch.set_grad_enabled(cycle == HIGH - 1):
      for _ in range(LOW):
        low = net(w, mix, low, high + x)
      high = net(w, mix, high, low)
  logits = high[:, PREFIX:] @ w['iteration/head/kernel']
  score = high[:, 0] @ w['iteration/score/kernel'] + w['iteration/score/bias']
  return dict(high=high.detach(), low=low.detach()), logits, score[:, 0]


def loss_of(logits, score, label):
  s = torch.where(logits >= 0, logits + 1, 1 / (1 - logits.clamp(max=0)))
  log = torch.log(s / s.sum(-1, keepdim=True))
  losses = -log.gather(-1, label.long()[..., None])[..., 0]
  counts = label != 0
  losses = (losses * counts).sum(-1) / counts.sum(-1)
  right = ((logits.argmax(-1) == label) | ~counts).all(-1).double()
  halting = torch.nn.functional.binary_cross_entropy_with_logits(
    score, right, reduction='none'
  )
  return (losses + 0.5 * halting).sum() / ROWS


def train(weights, starts, mix):
  """Yields the slots, the loss and the weights after each step."""
  w = {n: torch.tensor(x, requires_grad=True) for n, x in weights.items()}
  moments = {n: [torch.zeros_like(x) for _ in range(2)] for n, x in w.items()}
  starts = {n: torch.tensor(x)[None] for n, x in starts.items()}
  blank = {n: torch.zeros(ROWS, PREFIX + CELLS, WIDTH) for n in starts}
  slots = blank | dict.fromkeys(DATA, torch.zeros(ROWS, CELLS))
  steps, halted = torch.zeros(ROWS), torch.ones(ROWS) > 0
  for time, batch in enumerate(batches(), 1):
    new = {n: torch.tensor(batch[n]) for n in DATA} | starts
    slots = {
      n: torch.where(halted.view(ROWS, *[1] * (x.ndim - 1)), new[n], x)
      for n, x in slots.items()
    }
    state, logits, score = supervision(w, mix, slots)
    loss = loss_of(logits, score, slots['label'])
    gradients = torch.autograd.grad(loss, [*w.values()])
    with torch.no_grad():
      for (name, p), g in zip(w.items(), gradients, strict=True):
        m, v = moments[name]
        m.mul_(B1).add_((1 - B1) * g)
        v.mul_(B2).add_((1 - B2) * g * g)
        root = torch.sqrt(v) / math.sqrt(1 - B2**time)
        p.mul_(1 - RATE * DECAY)
        p.sub_(RATE / (1 - B1**time) * torch.atan2(m, root))
    steps = torch.where(halted, 0, steps) + 1
    halted = (steps >= MOST) | (score.detach() > 0)
    slots |= state
    record = {n: p.detach().numpy().copy() for n, p in w.items()}
    yield slots | dict(steps=steps, halted=halted), loss.item(), record


def ours(mix):
  """(train step, its first state) of our program."""
  model = dict(
    name='looped.model:LoopedModel', width=WIDTH, num_heads=HEADS, depth=DEPTH,
    mix=mix, positions='rotary' if mix == 'attention' else 'none',
    prefix=PREFIX, latents=2, high_cycles=HIGH, low_cycles=LOW,
    gradient='last', score_gradient='trunk', scores=2, max_steps=MOST,
  )  # fmt: skip
  loss = dict(halting_weight=0.5, exploration=0.0, probabilities='stablemax')
  info = DatasetInfo('tokens', (CELLS,), 'int32', SYMBOLS, (), 1, SYMBOLS)
  config = dict(model=model, loss=loss, dtype='float64', dataset={})
  task = Carried(config, info)
  settings = dataclasses.asdict(config_schema.Optimizer(
    name='adam_atan2', lr=RATE, b1=B1, b2=B2, weight_decay=DECAY,
    clip_norm=0.0, schedule='constant', warmup_steps=0.0,
  ))  # fmt: skip
  schedule = optimizers.build_schedule(settings, STEPS)
  optimizer = optimizers.build_optimizer(settings, schedule, task.DECAY)
  state = nn.unbox(train_step.init_state(task, optimizer, 0, 0.0, ROWS))
  rng = np.random.default_rng(1)

  def draw(x):
    return jnp.asarray(rng.normal(size=x.shape) / x.shape[0] ** 0.5)

  params, model_state = jax.tree.map(draw, (state.params, state.model_state))
  state = state.replace(
    params=params, model_state=model_state, opt_state=optimizer.init(params)
  )
  return train_step.make_train_step(task, optimizer, schedule), state


@pytest.fixture
def float64():
  torch.set_num_threads(1)
  torch.set_default_dtype(torch.float64)
  with jax.enable_x64(True):
    yield
  torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures('float64')
@pytest.mark.parametrize('mix', ['attention', 'cells'])
def test_training_equals_pytorch(mix):
  step, state = ours(mix)
  step = jax.jit(step)
  weights = flax.traverse_util.flatten_dict(state.params, sep='/')
  weights = {n: np.asarray(x) for n, x in weights.items()}
  starts = {n: np.asarray(x) for n, x in state.model_state['start'].items()}
  plain, reasons = train(weights, starts, mix), set()
  for batch, (slots, loss, expected) in zip(batches(), plain, strict=True):
    state, metrics = step(state, {}, batch, {})
    assert float(metrics['loss'].compute()) == pytest.approx(loss, rel=1e-6)
    carry = state.carry | state.carry['state']
    for name in ('steps', 'halted', *DATA):
      np.testing.assert_array_equal(carry[name], slots[name])
    for name in ('high', 'low'):
      np.testing.assert_allclose(carry[name], slots[name], atol=1e-12)
    trained = flax.traverse_util.flatten_dict(state.params, sep='/')
    for name, values in expected.items():
      np.testing.assert_allclose(trained[name], values, rtol=0, atol=1e-12)
    pairs = zip(slots['steps'].tolist(), slots['halted'].tolist(), strict=True)
    reasons |= {*pairs}
  # Some halt by their score, some at the end, and some go on.
  assert {(1.0, True), (1.0, False), (2.0, False), (3.0, True)} <= reasons
