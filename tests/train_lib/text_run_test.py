"""A whole run on rows of different lengths: a compiled step for each bucket."""

import re

import pytest

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from launch import command_line
from tests.launch import toy_runs
from train_lib import checkpoint_io, loading, trainer


@pytest.mark.slow
def test_a_run_compiles_each_bucket_once(tmp_path, capsys, monkeypatch):
  toy_runs.write_data(tmp_path)
  workdir = toy_runs.train(tmp_path, 'run', 'model=dense')
  printed = capsys.readouterr().out
  # The 20 steps have batches of every bucket.
  assert len(re.findall('^compiled', printed, re.MULTILINE)) == 2
  for length in toy_runs.BUCKETS:
    assert f'tokens [16, {length}]' in printed
  info = loading.load_info(workdir)
  assert info.length_buckets == toy_runs.BUCKETS
  assert info.class_names == ('negative', 'positive')
  files = workdir / 'tokenizer.json', tmp_path / 'vocab.txt'
  saved, given = (
    tokenizer.load(file).encode(['w1 w2 [SEP] unknown W39']) for file in files
  )
  assert saved.tokens.tolist() == given.tokens.tolist()
  # Without the data the run is read back all the same.
  for name in ('train.tsv', 'dev.tsv', 'vocab.txt'):
    (tmp_path / name).unlink()
  trained = loading.restore(workdir, loading.load_config(workdir))
  assert trained.task.info == info
  # A wrong option is reported before the parameters are read.
  monkeypatch.setattr(checkpoint_io.Saved, 'read', None)
  for field, arguments in {
    'serve.tau': dict(options={'tau': 2.0}),
    'serve.max_characters': dict(options={'max_characters': 0}),
    'lengths': dict(lengths=(31,)),
  }.items():
    with pytest.raises(ConfigError) as error:
      loading.serve(workdir, **arguments)
    assert error.value.field == field


@pytest.mark.nightly
def test_a_dry_run_is_of_the_longest_rows(tmp_path, capsys):
  toy_runs.write_data(tmp_path)
  config = command_line.load_config(
    f'configs/eat/glue.py:data={tmp_path},vocabulary={tmp_path},'
    'variant=tiny,model=dense',
    [*toy_runs.SMALL, 'batch_size=8', 'dataset.max_length=30'],
  )
  with config.unlocked():
    config.dataset.length_buckets = (8, 16)
  trainer.train(config, '', dry_run=True)
  printed = capsys.readouterr().out
  assert 'tokens [8, 30] int32' in printed
  assert '8, 16, 30; FLOPs are those of the longest' in printed
  assert 'dry run: everything was built and compiled' in printed
