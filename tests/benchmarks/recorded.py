"""Recorded logits of an EAT without a run."""

import numpy as np

from benchmarks import exit_settings, recorded_runs
from dataset_lib import builder
from eat.chain import EatChain
from eat.model import EatClassifier
from eat.policy import ExitPolicy
from tests.eat import small

# Confidences of 0.9, 0.6 and 0.9 at the first head; the last is always sure.
LOGITS = np.log(
  [
    [[0.9, 0.1], [0.4, 0.6], [0.1, 0.9]],
    [[0.99, 0.01], [0.99, 0.01], [0.99, 0.01]],
  ]
)
LABELS = np.array([0, 0, 1])


def fake(logits, labels, heads=(2, 4), variant='', fitted=None, task=''):
  """A model without a run: rows of 10 tokens, 7 of them left after layer 2.

  A row that leaves at a head costs 10 for each layer, 15 as it is served.
  """
  logits = np.asarray(logits, np.float32)
  rows, classes = logits.shape[1:]
  own = dict(prune_layers=(2,), prune_ratios=(0.4,), exit_layers=heads)
  fields = small.FIELDS | own | {'num_classes': classes}
  chain = EatChain(EatClassifier(**fields), {})
  names = tuple('abc'[:classes]) if classes > 1 else ()
  data = builder.build(
    {'name': 'parity', 'length': 10, 'test_examples': rows},
    split='test', train=False, seed=0, batch_size=1, num_threads=0,
  )  # fmt: skip
  model = recorded_runs.Model(
    name='EAT', facts={'workdir': '/run'}, task=task, data=data,
    policy=ExitPolicy(chain, chain.reader, names, (16,)),
    records={'label': np.asarray(labels), 'length': np.full(rows, 10)},
    fitted=np.zeros(rows, bool) if fitted is None else fitted,
    variant=variant, logits=logits,
    observed=np.resize([[7], [6], [8]], (rows, 1)),
  )  # fmt: skip
  depth = np.tile(heads, (rows, 1))
  model.cost['flops'] = 10.0 * depth
  return model


def measured(model, tau=0.9):
  """Settings by name; a row of the dense model costs 80."""
  full = np.full(model.logits.shape[1], 80.0)
  return exit_settings.measure(model, full, tau)
