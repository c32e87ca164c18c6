"""Runs written as Hugging Face directories, and read by transformers."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib import tokenizer
from launch import command_line, config_flags, export
from model_lib import bert, convert
from tests.eat import small
from tests.launch.exported import encoded, exported, params_of
from tests.peers import torch_and_transformers
from train_lib import sharding, trainer

WORDS = ['good', 'bad', 'film', 'a', 'the', 'was', '##ly', 'un', '[', ']', '!']
TEXTS = ['Good film!', 'the bad was unGOODly', 'a [SEP] the', '', 'Été bad']
PAIRS = ['the', '', 'bad film was a', '[PAD]', 'un']
SMALL = [
  'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1',
  'model.width=16', 'model.mlp_dim=24', 'model.num_heads=2',
  'model.vocab_size=20', 'model.max_positions=24', 'optimizer.lr=0.1',
]  # fmt: skip


def train(directory, name, argument, *changes):
  """Four steps of a tiny model."""
  root = pathlib.Path(__file__).resolve().parents[2]
  config = config_flags.load_config(
    f'{root}/configs/eat/glue.py:data={directory},vocabulary={directory},'
    f'variant=tiny,{argument}',
    [*SMALL, 'batch_size=4', 'dataset.max_length=16', *changes],
  )
  with config.unlocked():
    config.dataset.length_buckets = ()
    config.stages = dict(stage1=dict(steps=4, epochs=0.0, trainable='.*'))
    config.evals = {}
    config.checkpoint.best_metric = ''
  trainer.train(config, str(directory / name))
  return directory / name


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  directory = tmp_path_factory.mktemp('runs')
  special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  (directory / 'vocab.txt').write_text('\n'.join([*special, *WORDS]) + '\n')
  rows = [f'{WORDS[n % 2]} film\t{n % 2}' for n in range(16)]
  for name in ('train', 'dev'):
    (directory / f'{name}.tsv').write_text(
      '\n'.join(['sentence\tlabel', *rows])
    )
  return {
    'dense': train(directory, 'dense', 'model=dense'),
    'eat': train(directory, 'eat', 'model=eat', 'model.window=4'),
  }


@pytest.fixture
def distil(runs):
  return train(
    runs['dense'].parent, 'distil', 'model=dense', 'model.type_vocab_size=0',
    'model.pooler_activation=relu',
  )  # fmt: skip


def logits_of(directory, rows):
  """By our model, from the written directory alone."""
  model = bert.BertClassifier(num_classes=2, **convert.read_sizes(directory))
  params = jax.tree.map(jnp.asarray, convert.load_params(directory))
  return model.apply({'params': params}, *rows)[0]


@pytest.mark.slow
def test_a_dense_run_is_written_as_it_is(runs, tmp_path, capsys):
  out = exported(runs['dense'], tmp_path / 'out')
  assert 'step 4, written' in capsys.readouterr().out
  jax.tree.map(
    np.testing.assert_array_equal,
    convert.load_params(out),
    jax.device_get(params_of(runs['dense'])),
  )
  config = json.loads((out / 'config.json').read_text())
  assert config['id2label'] == {'0': 'negative', '1': 'positive'}
  vocabulary = (out / 'vocab.txt').read_text().split('\n')
  assert vocabulary[:3] == ['[PAD]', '[UNK]', '[CLS]']
  own = tokenizer.load(runs['dense'] / 'tokenizer.json').encode(TEXTS, PAIRS)
  for path in (out, out / 'vocab.txt'):
    again = tokenizer.load(path).encode(TEXTS, PAIRS)
    np.testing.assert_array_equal(again.tokens, own.tokens)


@pytest.mark.nightly
def test_what_is_written_can_be_trained_from(runs, tmp_path):
  out = exported(runs['dense'], tmp_path / 'out')
  root = pathlib.Path(export.__file__).parents[1]
  config = config_flags.load_config(
    f'{root}/configs/eat/glue.py:pretrained={out},data={tmp_path}', []
  )
  assert (config.model.depth, config.model.width) == (2, 16)
  assert config.model.exit_layers == (1,)
  assert config.dataset.tokenizer == str(out)


@pytest.mark.slow
def test_an_eat_is_refused_unless_it_may_lose_its_parts(runs, tmp_path, capsys):
  with pytest.raises(SystemExit) as stop:
    export.main([f'--workdir={runs["eat"]}', f'--out={tmp_path}/out'])
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  for word in ('pruning after layers 1', 'exits at 1', 'window', '--dense'):
    assert word in error
  assert not (tmp_path / 'out').exists()

  out = exported(runs['eat'], tmp_path / 'out', '--dense')
  printed = capsys.readouterr().out
  assert printed.count('left out: ') == 3
  params = params_of(runs['eat'])
  assert 'exit_1' in params
  del params['exit_1']
  jax.tree.map(
    np.testing.assert_array_equal,
    convert.load_params(out),
    jax.device_get(params),
  )


def test_heads_and_scorers_of_an_eat_are_left_out():
  model, variables = small.build(prune_scores='learned')
  fields = export.encoder_fields(model)
  plain = bert.BertClassifier(num_classes=3, **fields)
  rows = small.batch(small.rows(2), 20)
  expected = jax.eval_shape(plain.init, jax.random.key(0), *rows)['params']
  params = export.dense_params(variables['params'])
  assert jax.tree.structure(params) == jax.tree.structure(
    sharding.unbox(expected)
  )


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--workdir=/nowhere', '--out={new}'], ['--workdir', 'config.json']),
    (['--workdir={dense}', '--out={dense}'], ['--out', 'new or empty']),
    (['--workdir={dense}', '--out={dense}/config.json'], ['--out', 'a file']),
    (['--workdir={dense}', '--out={new}', '--step=last'], ['--step', 'best']),
    (['--workdir={dense}'], ['--out', 'required']),
    (['--workdir={dense}', '--out={new}', '--dens'], ['--dens', '--dense']),
    (['--workdir={copy}', '--out={new}'], ['--workdir', 'tokenizer.json']),
  ],
)
def test_bad_command_lines_are_answered_in_one_line(
  flags, words, runs, tmp_path, capsys
):
  copy = tmp_path / 'copy'
  copy.mkdir()
  text = (runs['dense'] / 'config.json').read_text()
  (copy / 'config.json').write_text(text)
  places = {'dense': runs['dense'], 'new': tmp_path / 'new', 'copy': copy}
  with pytest.raises(SystemExit) as stop:
    export.main([flag.format(**places) for flag in flags])
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  for word in words:
    assert word in error
  assert not (tmp_path / 'new').exists()


@pytest.mark.nightly
def test_a_step_that_is_not_there_is_a_checkpoint_error(runs, tmp_path):
  flags = [f'--workdir={runs["dense"]}', f'--out={tmp_path}/new', '--step=3']
  with pytest.raises(SystemExit) as stop:
    export.main(flags)
  assert stop.value.code == command_line.CHECKPOINT
  assert not (tmp_path / 'new').exists()


@pytest.mark.peers
@pytest.mark.parametrize(
  'name',
  [
    pytest.param('dense', marks=pytest.mark.nightly),
    pytest.param('eat', marks=pytest.mark.slow),
  ],
)
def test_transformers_reads_the_same(runs, tmp_path, name):
  assert_read_by_transformers(runs[name], tmp_path / 'out')


@pytest.mark.peers
@pytest.mark.nightly
def test_transformers_reads_a_distilbert(distil, tmp_path):
  assert_read_by_transformers(distil, tmp_path / 'out')


def assert_read_by_transformers(run, out):
  torch, transformers = torch_and_transformers()
  exported(run, out, '--dense')
  auto = transformers.AutoModelForSequenceClassification
  model, report = auto.from_pretrained(out, output_loading_info=True)
  assert not any(report.values()), report
  assert model.config.id2label == {0: 'negative', 1: 'positive'}
  reader = transformers.AutoTokenizer.from_pretrained(out)
  batch = reader(TEXTS, PAIRS, padding=True, return_tensors='pt')
  rows = encoded(run, TEXTS, PAIRS)
  np.testing.assert_array_equal(batch['input_ids'], rows[0])
  if 'token_type_ids' in batch:
    np.testing.assert_array_equal(batch['token_type_ids'], rows[1])
  with torch.no_grad():
    want = model.eval()(**batch).logits.numpy()
  np.testing.assert_allclose(logits_of(out, rows), want, atol=1e-5)
  # A model that is the same for all texts would not show what it reads.
  assert np.abs(want).max() > 0.05
  assert np.ptp(want, axis=0).min() > 0.001


def test_a_broken_tokenizer_is_named_and_nothing_is_written(tmp_path):
  model, variables = small.build(prune_scores='learned')
  path = tmp_path / 'tokenizer.json'
  path.write_text('{"model": 3}')
  with pytest.raises(ValueError, match=r'expected a tokenizer\.json'):
    convert.save(
      tmp_path / 'out',
      'bert',
      export.encoder_fields(model),
      export.dense_params(variables['params']),
      tokenizer=path,
    )
  assert not (tmp_path / 'out').exists()
