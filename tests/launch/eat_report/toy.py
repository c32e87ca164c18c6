"""Tiny trained runs, and a model without a run, for the tests of the report."""

import argparse
import csv
import random

import numpy as np
import scipy.stats

from dataset_lib import builder
from eval_lib import frontier, risk
from launch import config_flags
from launch.eat_report import sweeps
from launch.eat_report.models import Model
from train_lib import config_schema, trainer

WORDS = [f'w{number}' for number in range(40)]
SMALL = [
  'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1',
  'model.width=16', 'model.mlp_dim=16', 'model.num_heads=2',
  'model.vocab_size=44', 'model.max_positions=30', 'optimizer.lr=0.01',
  'optimizer.warmup_steps=0',
]  # fmt: skip
TEMPERATURES = (2.0, 1.0, 1.5)
BUCKETS = (8, 16)
# Six of the 24 rows.
FITTED = 'validation[:25%]'


def write_data(directory):
  (directory / 'vocab.txt').write_text(
    '\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS])
  )
  draw = random.Random(0)
  for name, count in (('train', 128), ('dev', 24)):
    rows = []
    for number in range(count):
      # Three quarters of the words tell the class.
      words = [
        draw.choice(WORDS[20 * (number % 2) :][:20])
        if draw.random() < 0.5
        else draw.choice(WORDS)
        for _ in range(draw.randrange(1, 15))
      ]
      rows.append(f'{" ".join(words)}\t{number % 2}')
    text = '\n'.join(['sentence\tlabel', *rows])
    (directory / f'{name}.tsv').write_text(text)


def train(directory, name, root, argument, *changes):
  """A few steps of a tiny model, so that its rows differ."""
  config = config_flags.load_config(
    f'{root}/configs/eat/glue.py:data={directory},vocabulary={directory},'
    f'variant=tiny,{argument}',
    [*SMALL, 'batch_size=16', 'dataset.max_length=16', *changes],
  )
  with config.unlocked():
    config.dataset.length_buckets = BUCKETS
    config.stages = dict(stage1=dict(steps=60, epochs=0.0, trainable='.*'))
    config.evals = dict(dev=config.evals['dev'])
    config.checkpoint.best_metric = ''
  config_schema.validate(config)
  workdir = directory / name
  trainer.train(config, str(workdir))
  return workdir


def read(path):
  with path.open(encoding='utf-8') as file:
    return list(csv.DictReader(file))


def confidences(direct):
  """Of each head and row, calibrated, `[E, N]`."""
  _, _, out = direct
  scaled = out['exits'] / np.array(TEMPERATURES)[:, None, None]
  powers = np.exp(scaled - scaled.max(-1, keepdims=True))
  return (powers / powers.sum(-1, keepdims=True)).max(-1)


class FakeModule:
  """As much of a classifier as the settings need."""

  prune_layers = (2,)

  def __init__(self, heads):
    self._heads = heads

  def heads(self):
    return self._heads


def fake(logits, name='', heads=(2, 4)):
  rows = logits.shape[1]
  cost = np.array(heads, np.float64) * 10.0
  return Model(
    run=argparse.Namespace(name='EAT', directory='/run', split='dev'),
    variant=name,
    module=FakeModule(heads),
    temperatures=np.ones(len(heads)),
    logits=logits.astype(np.float32),
    length=np.full(rows, 10),
    kept=np.full((rows, 1), 7),
    left=np.tile([10, 7, 7], (rows, 1))[:, : len(heads)],
    flops=np.tile(cost, (rows, 1)),
    flops_served=np.tile(1.5 * cost, (rows, 1)),
  )


# Confidences of 0.9 and 0.6 at the first head, the last one is always sure.
LOGITS = np.log(
  [
    [[0.9, 0.1], [0.4, 0.6], [0.1, 0.9]],
    [[0.99, 0.01], [0.99, 0.01], [0.99, 0.01]],
  ]
)
LABELS = np.array([0, 0, 1])


def measured(model, rules=None):
  return sweeps.measure(
    model, rules or sweeps.rules(model), LABELS,
    frontier.accuracy, frontier.same_class,
    np.full(3, 80.0),
  )  # fmt: skip


def judged(run):
  """True for the rows of a run that are not of the split `FITTED`, `[N]`."""
  fitted = builder.build_source(run.config.dataset, FITTED)
  places = {fitted.where(row) for row in range(len(fitted))}
  rows = range(len(run.records))
  result = np.array([run.records.where(row) not in places for row in rows])
  assert len(places) == (~result).sum() == 6
  return result


def exceeded_by_loop(confidence, lost, epsilon, delta, draws):
  """How often a guaranteed threshold fails, one draw and threshold at a time.

  Args:
    confidence: of the first head of two, or of each but the last, `[E, N]`.
    lost: whether a row that leaves there is lost, `[E, N]`.
    epsilon: bound on the risk.
    delta: how often it may fail.
    draws: how many; the same as those of the report.
  """
  rows = confidence.shape[1]

  def losses_at(tau):
    result = np.zeros(rows, bool)
    for row in range(rows):
      for head in range(len(confidence)):
        if confidence[head, row] >= np.float32(tau):
          result[row] = lost[head, row]
          break
    return result

  table = [losses_at(tau) for tau in risk.default_thresholds(2)]
  rng = np.random.default_rng(0)
  exceeded = 0
  for _ in range(draws):
    sample, last = rng.integers(rows, size=rows), None
    for losses in table:
      errors = losses[sample].sum()
      if scipy.stats.binom.cdf(errors, rows, epsilon) > delta:
        break
      last = losses
    exceeded += last is not None and last.mean() > epsilon
  return exceeded / draws
