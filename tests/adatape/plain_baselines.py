"""The adaptive-depth baselines in NumPy, in float64, one row at a time."""

import numpy as np

from tests.model_lib import plain


def sigmoid(x):
  return 1.0 / (1.0 + np.exp(-x))


def coordinates(count, width, step):
  """`[count, width]`: sines, then cosines, of the positions and the step."""
  half = width // 2
  rates = 10_000.0 ** (-np.arange(half) / (half - 1))

  def sines(number):
    return np.concatenate([np.sin(number * rates), np.cos(number * rates)])

  return np.stack([sines(place) for place in range(count)]) + sines(step)


def block(params, x, num_heads):
  """A pre-LN block on the tokens of one row, `[L, D]`."""
  normed = plain.layer_norm(params['attention_norm'], x)
  attention = params['attention']
  x = x + plain.attention_by_loop(attention, normed, num_heads)[0]
  normed = plain.layer_norm(params['mlp_norm'], x)
  return x + plain.mlp(params['mlp'], normed)


def image_tokens(params, image, size):
  """Patches with learned positions, row by row, after [CLS] if there is one."""
  corners = np.ndindex(image.shape[0] // size, image.shape[1] // size)
  patches = [
    image[y * size : (y + 1) * size, x * size : (x + 1) * size].reshape(-1)
    for y, x in corners
  ]
  x = plain.dense(params['patch_embed']['projection'], np.stack(patches))
  x = x + params['positions']['embedding'][0]
  return np.concatenate([params['cls'][0], x]) if 'cls' in params else x


def act(state, blocks, score, model, add=True):
  """ACT of the tokens of a row; `blocks` are the parameters of each step.

  Returns (output, steps N, remainders R), the last two for each token.
  """
  count, width = state.shape
  total, remainder = np.zeros(count), np.zeros(count)
  steps, output = np.zeros(count, int), np.zeros(state.shape)
  running = np.ones(count, bool)
  for n, params in enumerate(blocks):
    x = state + coordinates(count, width, n) if add else state
    p = sigmoid(plain.dense(score, x)[:, 0])
    if model.halting == 'example':
      p = np.full(count, p.mean())
    new = block(params, x, model.num_heads)
    state = np.where(running[:, None], new, state)
    for i in np.flatnonzero(running):
      steps[i] += 1
      weight = p[i]
      if total[i] + p[i] >= 1 - model.epsilon or n == len(blocks) - 1:
        weight = remainder[i] = 1 - total[i]
        running[i] = False
      keep = 1.0 if model.combination == 'accumulated' else 1 - weight
      output[i] = weight * new[i] + keep * output[i]
      total[i] += p[i]
  return output, steps, remainder


def ponder_net(params, image, model):
  """(p `[N]`, logits `[N, O]`) of a row by PonderNet's equation 1."""
  state = image_tokens(params['tokens'], image, model.patch_size)
  step = params['step']
  left, chances, logits = 1.0, [], []
  for n in range(model.max_steps):
    x = state + coordinates(*state.shape, n)
    state = block(step['block'], x, model.num_heads)
    pooled = plain.layer_norm(step['norm'], state)
    pooled = pooled.mean(0) if model.pool == 'gap' else pooled[0]
    chance = sigmoid(plain.dense(step['halt'], pooled)[0])
    chances.append(left * (chance if n < model.max_steps - 1 else 1.0))
    left *= 1.0 - chance
    logits.append(plain.dense(params['head'], pooled))
  return np.array(chances), np.array(logits)
