"""What a run leaves, read back without its data; rows of unlike lengths."""

import dataclasses
import json
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from core import files
from core.errors import ConfigError, InvalidDataError, MissingDataError
from dataset_lib import tokenizer
from dataset_lib.source import DatasetInfo
from launch import command_line
from tests.launch import toy_runs
from tests.train_lib import build_test
from train_lib import checkpoint_io, config_schema, loading, sharding, trainer
from train_lib.build import build_dataset
from train_lib.checkpoint import Checkpointer
from train_lib.phases import Phase
from train_lib.run_directory import RunDirectory
from train_lib.task import Task

INFO = DatasetInfo('tokens', (64,), 'int32', 1, (), 10, 30, 'float32', (32, 64))


@pytest.mark.parametrize(
  ('file', 'load', 'contents'),
  [
    ('dataset_info.json', loading.load_info,
     (None, '{"a": 1}',
      *(json.dumps(dataclasses.asdict(INFO) | {k: value}) for k, value in (
        ('num_classes', '2'), ('mean', []), ('std', [0.0]), ('input_dtype', ''),
        ('mean', [0.5, 0.5]), ('label_dtype', 'object'), ('input_shape', []))
      ))),
    ('config.json', loading.load_config,
     ('{"task": "x"}', '{"warm_start": {}, "loss": {}, "dataset": 1}')),
  ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, file, load, contents):
  for content in contents:
    if content is not None:
      (tmp_path / file).write_text(content, errors='surrogateescape')
    error = MissingDataError if content is None else InvalidDataError
    with pytest.raises(error, match=rf'{file} is (damaged|missing)'):
      load(tmp_path)


@pytest.mark.parametrize('key', ['--workdir', 'loss.teacher'])
def test_a_missing_run_names_the_field_that_has_it(tmp_path, key):
  with pytest.raises(ConfigError) as error:
    loading.load_config(tmp_path, key)
  assert error.value.field == key


@pytest.mark.parametrize('devices', [0, 2])
def test_all_variables_are_on_the_devices(tmp_path, devices):
  tree = {'params': {'w': jnp.ones(4)}, 'model_state': {'mean': jnp.ones(2)}}
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, tree)
  mesh = sharding.make_mesh({'data': devices}) if devices else None
  task = mock.Mock(spec=Task)
  task.init = lambda rng: (tree['params'], tree['model_state'])
  trained = loading.Trained(checkpoint_io.find(tmp_path), task, mesh)
  for leaf in jax.tree.leaves(trained.variables):
    assert isinstance(leaf, jax.Array)
    assert len(leaf.sharding.device_set) == max(devices, 1)


def test_a_run_needs_its_own_directory_only(tmp_path):
  data = dict(
    name='glue', task='sst2', tokenizer='/gone', length_buckets=[8, 16]
  )
  model = dict(name='model_lib.bert:BertClassifier', variant='tiny')
  saved = dict(
    task='eat.task:FineTune', model=model, warm_start=dict(workdir='/gone'),
    loss=dict(teacher='/gone'), dataset=data, phases=[dict(steps=1)],
  )  # fmt: skip
  files.write_json(tmp_path / 'config.json', saved)
  (tmp_path / 'tokenizer.json').write_text('')
  config = loading.load_config(tmp_path)
  assert (config.warm_start.workdir, config.loss.teacher) == ('', '')
  assert config.dataset.tokenizer == str(tmp_path / 'tokenizer.json')
  assert config.dataset.length_buckets == (8, 16)


def test_a_run_of_an_older_version_is_refused(tmp_path):
  older = dict(loss={}, dataset={}, warm_start={}, stages={'one': {}})
  files.write_json(tmp_path / 'config.json', older)
  with pytest.raises(ConfigError, match=r'stages: .*; .* by commit 87a76c19:'):
    loading.load_config(tmp_path)


def test_a_checkpoint_names_its_phase(tmp_path):
  config = build_test.load()
  phases = Phase(steps=2), Phase(steps=3, model={'mlp_dim': 24})
  config = config_schema.validate(config.to_dict() | {'phases': phases})
  info = build_dataset(config).info
  with RunDirectory(tmp_path, config.to_dict(), info=info):
    pass
  with Checkpointer(tmp_path / 'checkpoints', keep=3) as checkpointer:
    for step, phase in ((1, 0), (4, 1), (5, 2)):
      extra = {'phase': phase, 'contract': dataclasses.asdict(info)}
      checkpointer.save(step, {'params': {'w': jnp.ones(4)}}, extra)
  read = loading.load_config(tmp_path)
  for step, size in ((1, 16), (4, 24)):
    assert loading.restore(tmp_path, read, step).task.model.mlp_dim == size
  with pytest.raises(ConfigError, match='phases: expected that of the check'):
    loading.restore(tmp_path, read, 5)


@pytest.mark.nightly
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
