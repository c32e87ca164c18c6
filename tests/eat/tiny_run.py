"""A run of a tiny EAT, trained for two steps; once in a process of tests."""

import pathlib

from launch import command_line
from train_lib import trainer

WORDS = ['good', 'bad', 'film', 'a', 'the', 'was']
CHANGES = [
  'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1',
  'model.width=16', 'model.mlp_dim=24', 'model.num_heads=2',
  'model.vocab_size=11', 'model.max_positions=24', 'model.window=4',
  'dataset.length_buckets=8,16', 'dataset.max_length=16', 'batch_size=4',
]  # fmt: skip


def train(tmp_path_factory):
  """Returns the run's directory; texts are of `WORDS`."""
  directory = tmp_path_factory.getbasetemp() / 'tiny_run'
  if directory.exists():
    return directory / 'run'
  directory.mkdir()
  special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  (directory / 'vocab.txt').write_text('\n'.join([*special, *WORDS]) + '\n')
  rows = [f'{WORDS[n % 2]} film\t{n % 2}' for n in range(16)]
  for name in ('train', 'dev'):
    lines = ['sentence\tlabel', *rows]
    (directory / f'{name}.tsv').write_text('\n'.join(lines))
  root = pathlib.Path(__file__).resolve().parents[2]
  config = command_line.load_config(
    f'{root}/configs/eat/glue.py:data={directory},vocabulary={directory},'
    'variant=tiny',
    CHANGES,
  )
  with config.unlocked():
    config.stages = dict(stage1=dict(steps=2, epochs=0.0, trainable='.*'))
    config.evals = {}
    config.checkpoint.best_metric = ''
  trainer.train(config, str(directory / 'run'))
  return directory / 'run'
