"""A whole run on rows of different lengths: a compiled step for each bucket."""

import json
import random

import pytest

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from launch import config_flags
from train_lib import checkpoint_io, config_schema, loading, trainer

WORDS = [f'w{number}' for number in range(40)]


@pytest.fixture
def config(tmp_path, repository, monkeypatch):
  """A tiny BERT on a made file of 64 rows, 2 to 30 tokens long."""
  monkeypatch.chdir(repository)
  (tmp_path / 'vocab.txt').write_text(
    '\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS])
  )
  draw = random.Random(0)
  rows = [
    ' '.join(draw.choices(WORDS, k=draw.randrange(1, 29))) + f'\t{n % 2}'
    for n in range(64)
  ]
  for name in ('train', 'dev'):
    text = '\n'.join(['sentence\tlabel', *rows])
    (tmp_path / f'{name}.tsv').write_text(text)
  config = config_flags.load_config(
    f'configs/eat/glue.py:model=dense,data={tmp_path},vocabulary={tmp_path},'
    'variant=tiny',
    [
      'batch_size=8', 'dataset.max_length=30',
      'mesh.data=2', 'tensorboard=false', 'loader.num_threads=1',
      'model.depth=1', 'model.width=16', 'model.mlp_dim=16',
      'model.num_heads=2', 'model.vocab_size=44', 'model.max_positions=30',
    ],
  )  # fmt: skip
  with config.unlocked():
    config.dataset.length_buckets = (8, 16)
    config.stages = dict(stage1=dict(steps=8, epochs=0.0, trainable='.*'))
    config.evals = dict(
      dev=dict(type='classification', split='validation', every_steps=0)
    )
    config.checkpoint.best_metric = ''
  config_schema.validate(config)
  return config


@pytest.mark.slow
def test_a_run_compiles_each_bucket_once(config, tmp_path, capsys, monkeypatch):
  workdir = tmp_path / 'run'
  trainer.train(config, str(workdir))
  printed = capsys.readouterr().out
  compiled = [
    line for line in printed.splitlines() if line.startswith('compiled')
  ]
  # An epoch of 8 steps has batches of every bucket.
  assert len(compiled) == 3
  for length in (8, 16, 30):
    assert f'tokens [8, {length}]' in printed
  result = json.loads((workdir / 'result.json').read_text())
  assert 0.0 <= result['dev/accuracy'] <= 1.0

  info = loading.load_info(workdir)
  assert info.length_buckets == (8, 16, 30)
  assert info.class_names == ('negative', 'positive')
  saved = tokenizer.load(workdir / 'tokenizer.json')
  given = tokenizer.load(tmp_path / 'vocab.txt')
  text = 'w1 w2 [SEP] unknown W39'
  assert (
    saved.encode([text]).tokens.tolist() == given.encode([text]).tokens.tolist()
  )
  # Without the data the run is read back all the same.
  for name in ('train.tsv', 'dev.tsv', 'vocab.txt'):
    (tmp_path / name).unlink()
  trained = loading.restore(workdir, loading.load_config(workdir))
  assert trained.task.info == info
  # A wrong option is reported before the parameters are read.
  monkeypatch.setattr(checkpoint_io, 'read_arrays', None)
  for arguments, field in (
    (dict(options={'tau': 2.0}), 'serve.tau'),
    (dict(options={'max_characters': 0}), 'serve.max_characters'),
    (dict(lengths=(31,)), 'lengths'),
  ):
    with pytest.raises(ConfigError) as error:
      loading.serve(workdir, **arguments)
    assert error.value.field == field


@pytest.mark.nightly
def test_a_dry_run_is_of_the_longest_rows(config, capsys):
  trainer.train(config, '', dry_run=True)
  printed = capsys.readouterr().out
  assert 'tokens [8, 30] int32' in printed
  assert '8, 16, 30; FLOPs are those of the longest' in printed
  assert 'dry run: everything was built and compiled' in printed
