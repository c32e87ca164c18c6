"""ViTs and their variants of adaptive depth in NumPy, one row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit

from dataset_lib.source import DatasetInfo
from tests.halting.plain import act as halted
from tests.model_lib import plain

SIZES = dict(
  num_classes=3, width=16, depth=4, mlp_dim=24, num_heads=2, patch_size=4
)
IMAGES = jax.random.normal(jax.random.key(1), (4, 16, 16, 3))
INFO = DatasetInfo('image', (16, 16, 3), 'uint8', 3, (), 4)
MASK = np.array([1, 1, 1, 0], np.float32)  # the last row is padding
BATCH = {
  'image': jax.random.randint(
    jax.random.key(2), (4, 16, 16, 3), 0, 256, 'uint8'
  ),
  'label': jnp.array([0, 2, 1, 1]),
  'mask': jnp.array(MASK),
}
PIXELS = np.asarray(BATCH['image']) / 127.5 - 1.0  # of a model


def patches(params, image, size):
  """Projections of the patches `[L, D]`, row by row of the image."""
  corners = np.ndindex(image.shape[0] // size, image.shape[1] // size)
  flat = [
    np.asarray(image)[y * size :, x * size :][:size, :size].reshape(-1)
    for y, x in corners
  ]
  return plain.dense(params['projection'], np.stack(flat))


def tokens(params, image, size, *before):
  """`[L, D]`: [CLS] if there is one, `before`, patches with positions."""
  x = patches(params['patch_embed'], image, size)
  x = x + params['positions']['embedding'][0]
  return np.concatenate([*params.get('cls', ()), *before, x])


def block(params, x, num_heads, networks=None):
  """A pre-LN block of a row `[L, D]`; `networks` are slices of it by name."""
  normed = plain.layer_norm(params['attention_norm'], x)
  x = x + plain.attention_by_loop(params['attention'], normed, num_heads)[0]
  normed = plain.layer_norm(params['mlp_norm'], x)
  parts = (networks or {'mlp': slice(None)}).items()
  out = [plain.mlp(params[name], normed[part]) for name, part in parts]
  return x + np.concatenate(out)


def spread(model, *inputs):
  """Variables at random, with a score that spreads the steps."""
  params = plain.noise(model, *inputs, scale=0.3, seed=3)
  halting = params.get('universal', params['encoder'])
  score = halting.get('step', halting)['score']
  score['kernel'] = score['kernel'] / 4
  score['bias'] = np.full((1,), -1.5, np.float32)
  return {'params': params}


def coordinates(count, width, step):
  """`[count, width]`: sines, then cosines, of the positions and the step."""
  half = width // 2
  rates = 10_000.0 ** (-np.arange(half) / (half - 1))

  def sines(number):
    return np.concatenate([np.sin(number * rates), np.cos(number * rates)])

  return np.stack([sines(place) for place in range(count)]) + sines(step)


def act(state, blocks, score, model, add=True):
  """(output, N, R) of the tokens; `blocks` are the parameters of each step."""

  def step(state, n, running):
    x = state + coordinates(*state.shape, n) if add else state
    scores = expit(plain.dense(score, x)[:, 0])
    if model.halting == 'example':
      scores[:] = scores.mean()
    return block(blocks[n], x, model.num_heads), scores

  limit, epsilon = len(blocks), model.rule.epsilon
  *found, _ = halted(step, state, limit, model.combination, epsilon=epsilon)
  return found


def ponder_net(params, image, model):
  """(p `[N]`, logits `[N, O]`) of a row by PonderNet's equation 1."""
  state = tokens(params['tokens'], image, model.patch_size)
  step = params['step']
  left, chances, logits = 1.0, [], []
  for n in range(model.max_steps):
    x = state + coordinates(*state.shape, n)
    state = block(step['block'], x, model.num_heads)
    pooled = plain.layer_norm(step['norm'], state)
    pooled = pooled.mean(0) if model.pool == 'gap' else pooled[0]
    chance = expit(plain.dense(step['halt'], pooled)[0])
    chances.append(left * (chance if n < model.max_steps - 1 else 1.0))
    left *= 1.0 - chance
    logits.append(plain.dense(params['head'], pooled))
  return np.array(chances), np.array(logits)
