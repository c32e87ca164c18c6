"""Policies of a small EAT, and rows that have passed some of its heads."""

import concurrent.futures

import numpy as np

from eat.policy import EatPolicy, Options
from eat.serving import EatChain
from serve_lib.chain import Row
from serve_lib.items import TextReader
from tests.eat import small

WORDS = [f'w{number}' for number in range(40)]
CLASSES = ('no', 'maybe', 'yes')
SURE, UNSURE = [9.0, 0.0, 0.0], [0.1, 0.0, 0.0]


def make(words, classes=CLASSES, num_texts=None, options=None, **fields):
  model, variables = small.build(num_classes=max(len(classes), 1))
  reader = TextReader(words, 16, 100, num_texts)
  options = Options(**options or {})
  chain = EatChain(model, variables)
  return EatPolicy(chain, reader, classes, (16,), options=options, **fields)


def a_row(policy, item, logits):
  """A row that has passed as many heads as there are logits."""
  row = Row(policy.encode(item), 16, concurrent.futures.Future(), 0.0, 0.0)
  row.outputs = [
    {'logits': np.array(one, np.float32), 'kept': np.int32(3)} for one in logits
  ]
  return row


def decide(policy, rows):
  return policy.decide(len(rows[0].outputs) - 1, rows, {}).tolist()
