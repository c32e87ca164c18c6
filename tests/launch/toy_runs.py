"""Tiny trained runs of EAT."""

import random

import numpy as np

from launch import command_line
from train_lib import config_schema, trainer
from train_lib.phases import Phase

SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]']
WORDS = [f'w{number}' for number in range(40)]
SMALL = [
  'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1',
  'model.width=16', 'model.mlp_dim=16', 'model.num_heads=2',
  'model.vocab_size=44', 'model.max_positions=30', 'optimizer.lr=0.01',
  'optimizer.warmup_steps=0',
]  # fmt: skip
TEMPERATURES = (2.0, 1.0, 1.5)
BUCKETS = (8, 16)
FITTED = 'validation[:25%]'  # six of the 24 rows


def write_data(directory):
  """Writes SST-2 of made-up words, three quarters of which tell the class."""
  (directory / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
  draw = random.Random(0)
  for name, count in (('train', 128), ('dev', 24)):
    rows = ['sentence\tlabel']
    for number in range(count):
      own = WORDS[20 * (number % 2) :][:20]
      words = [
        draw.choice(own if draw.random() < 0.5 else WORDS)
        for _ in range(draw.randrange(1, 15))
      ]
      rows.append(f'{" ".join(words)}\t{number % 2}')
    (directory / f'{name}.tsv').write_text('\n'.join(rows))


def train(directory, name, argument, *changes, steps=20):
  """Trains a tiny model for a few steps, so that its rows differ."""
  config = command_line.load_config(
    f'configs/eat/glue.py:data={directory},vocabulary={directory},'
    f'variant=tiny,{argument}',
    [*SMALL, 'batch_size=16', 'dataset.max_length=16', *changes],
  )
  with config.unlocked():
    config.dataset.length_buckets = BUCKETS
    config.phases = (Phase(steps=steps),)
    config.evals = {}
    config.checkpoint.best_metric = ''
  config_schema.validate(config)
  trainer.train(config, str(directory / name))
  return directory / name


def confidences(exits):
  """Confidence of each head and row, calibrated, `[E, N]`."""
  scaled = exits / np.array(TEMPERATURES)[:, None, None]
  powers = np.exp(scaled - scaled.max(-1, keepdims=True))
  return (powers / powers.sum(-1, keepdims=True)).max(-1)
