"""Pondering as the papers write it: one row, Python loops and NumPy."""

import numpy as np


def sigmoid(x):
  return 1.0 / (1.0 + np.exp(-x))


def rnn(p, state, x):
  hidden = np.tanh(
    x @ p['i']['kernel'] + p['i']['bias'] + state @ p['h']['kernel']
  )
  return hidden, hidden


def gru(p, state, x):
  def dense(name, value):
    return value @ p[name]['kernel'] + p[name].get('bias', 0.0)

  reset = sigmoid(dense('ir', x) + dense('hr', state))
  update = sigmoid(dense('iz', x) + dense('hz', state))
  new = np.tanh(dense('in', x) + reset * dense('hn', state))
  hidden = (1 - update) * new + update * state
  return hidden, hidden


def lstm(p, state, x):
  cell, hidden = state

  def gate(name):
    of_hidden = hidden @ p[f'h{name}']['kernel'] + p[f'h{name}']['bias']
    return x @ p[f'i{name}']['kernel'] + of_hidden

  cell = sigmoid(gate('f')) * cell + sigmoid(gate('i')) * np.tanh(gate('g'))
  hidden = sigmoid(gate('o')) * np.tanh(cell)
  return np.stack([cell, hidden]), hidden


CELLS = {'rnn': rnn, 'gru': gru, 'lstm': lstm}


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


def ponder(params, model, inputs):
  """(outputs `[T, O]`, hidden, N, rho) of one row of valid inputs `[T, E]`."""
  p, head = params['repetition'], params['head']
  state = np.zeros((2, model.width) if model.cell == 'lstm' else model.width)
  output, carried, answers = None, 0.0, []
  for x in inputs:
    states, outputs = [], []

    def score(n, x=x, states=states, outputs=outputs, before=state):
      seen = np.concatenate([x, [1.0 if n == 1 else 0.0]])
      new, hidden = CELLS[model.cell](
        p['cell'], states[-1] if states else before, seen
      )
      states.append(new)
      outputs.append(hidden @ head['kernel'] + head['bias'])
      if 'score' not in p:
        return 0.0
      s = hidden @ p['score']['kernel'][:, 0] + p['score']['bias'][0]
      return model.mu * sigmoid(s)

    w, remainder, carried = weights(
      model.rule, score, carried, model.max_steps, model.epsilon
    )
    if w:
      state = sum(a * s for a, s in zip(w, states, strict=True))
      output = sum(a * y for a, y in zip(w, outputs, strict=True))
    hidden = state[1] if model.cell == 'lstm' else state
    answers.append((output, hidden, len(w), len(w) + remainder))
  return [np.array(values) for values in zip(*answers, strict=True)]
