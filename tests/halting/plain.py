"""ACT of the tokens of a row, one token at a time."""

import numpy as np


def act(step, state, limit, mix='accumulated', weighs=True, epsilon=0.01):
  """(output, N, R, states of all steps) in float64; `mix`: `loop.combine`.

  `step(state, n, running)` returns (next state, scores). Without `weighs` the
  output is state N, and R is 0.
  """
  count, history = len(state), []
  total, rest, steps = np.zeros(count), np.zeros(count), np.zeros(count, int)
  running, output = np.ones(count, bool), np.zeros(state.shape)
  for n in range(limit):
    go_on = running.any()
    new, scores = step(state, n, running) if go_on else (state, total)
    state = np.where(running[:, None] & (mix != 'fed_back'), new, state)
    for i in np.flatnonzero(running):
      steps[i] += 1
      weight, total[i] = scores[i], total[i] + scores[i]
      running[i] = total[i] < 1 - epsilon and n < limit - 1
      if not running[i]:
        weight = rest[i] = 1 - total[i] + scores[i]
      if not weighs:
        weight, rest[i] = 1.0, 0.0
      if mix == 'fed_back':
        output[i] = weight * new[i] + (1 - weight) * state[i]
        state[i] = output[i]
      else:
        keep = 1.0 if mix == 'accumulated' else 1 - weight
        output[i] = weight * new[i] + keep * output[i]
    history.append(state.copy())
  return output, steps, rest, history
