"""A policy of the engine that exits by a rule and answers with logits."""

import numpy as np

from eat import exits
from serve_lib.chain import Encoded


def types_of(row):
  types = np.zeros(len(row), np.int32)
  types[len(row) // 2 :] = 1
  return types


class RulePolicy:
  """Exits by a rule; the answer is (head, logits)."""

  def __init__(self, rule):
    self.rule = rule

  def encode(self, item):
    inputs = {'tokens': item, 'token_types': types_of(item)}
    return Encoded(inputs, len(item), 'pruned')

  def decide(self, stage, rows, outputs):
    logits = np.stack(
      [np.stack([row.outputs[e]['logits'] for row in rows])
       for e in range(stage + 1)]
    )  # fmt: skip
    return exits.should_exit(self.rule, logits)

  def answer(self, row):
    return len(row.outputs) - 1, row.outputs[-1]['logits']
