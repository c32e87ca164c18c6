"""Runs written as Hugging Face directories, and read by transformers."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act.model import AlbertClassifier, AlbertPretraining
from dataset_lib import tokenizer
from launch import command_line, config_flags, export
from model_lib import bert, convert
from tests.albert_act import tiny_run
from tests.eat import small
from tests.peers import torch_and_transformers
from train_lib import config_schema, loading, sharding, trainer

WORDS = ['good', 'bad', 'film', 'a', 'the', 'was', '##ly', 'un', '[', ']', '!']
TEXTS = {
  'bert': (
    ['Good film!', 'the bad was unGOODly', 'a [SEP] the', '', 'Été bad'],
    ['the', '', 'bad film was a', '[PAD]', 'un'],
  ),
  'albert': (
    ['W1 w2ab w3.', 'w4', 'w5 [SEP] w6 w7 unknown', '', 'w8 w9 w10a w11'],
    ['w12', '', 'w13 w14 w15b', 'w16', '[MASK] w17'],
  ),
}
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


def run_of(name, runs, tmp_path_factory):
  """The directory of a run; 'glue' and 'pretrain' are ALBERTs."""
  if name == 'distil':
    return train(
      runs['dense'].parent, 'distil', 'model=dense', 'model.type_vocab_size=0',
      'model.pooler_activation=relu',
    )  # fmt: skip
  if name in runs:
    return runs[name]
  return tiny_run.made(tmp_path_factory, *name.split())


def texts_of(name):
  is_albert = name.split()[0] in ('glue', 'pretrain')
  return TEXTS['albert' if is_albert else 'bert']


def exported(run, out, *flags):
  assert export.main([f'--workdir={run}', f'--out={out}', *flags]) == 0
  return out


def params_of(run):
  task = loading.load_task(run, loading.load_own_config(run))
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    return loading.load_params(run, task, mesh).variables['params']


def encoded(run, texts, pairs):
  """Padded rows as the run reads them."""
  rows = tokenizer.load(run / 'tokenizer.json').encode(texts, pairs)
  lengths = np.diff(rows.offsets)
  shape = (len(texts), lengths.max())
  tokens, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  valid = np.arange(shape[1])[None] < lengths[:, None]
  tokens[valid], types[valid] = rows.tokens, rows.token_types
  return [jnp.asarray(x, jnp.int32) for x in (tokens, types, lengths)]


def assert_equal(trees, others):
  jax.tree.map(np.testing.assert_array_equal, trees, jax.device_get(others))


def check_tokenizer(run, name, *paths):
  texts, pairs = texts_of(name)
  own = tokenizer.load(run / 'tokenizer.json').encode(texts, pairs)
  for path in paths:
    again = tokenizer.load(path).encode(texts, pairs)
    np.testing.assert_array_equal(again.tokens, own.tokens)


@pytest.mark.parametrize(
  ('name', 'heads', 'architecture'),
  [
    pytest.param('dense', 'classifier', 'BertForSequenceClassification',
                 marks=pytest.mark.slow),
    pytest.param('glue fixed', 'classifier', 'AlbertForSequenceClassification',
                 marks=pytest.mark.nightly),
    pytest.param('pretrain fixed', 'pretraining', 'AlbertForPreTraining',
                 marks=pytest.mark.nightly),
  ],
)  # fmt: skip
def test_a_run_of_fixed_depth_is_written_as_it_is(
  runs, tmp_path_factory, tmp_path, capsys, name, heads, architecture
):
  run = run_of(name, runs, tmp_path_factory)
  out = exported(run, tmp_path / 'out')
  printed = capsys.readouterr().out
  assert 'step 4, written' in printed
  assert 'left out' not in printed
  assert_equal(convert.load_params(out, heads), params_of(run))
  config = json.loads((out / 'config.json').read_text())
  assert config['architectures'] == [architecture]
  labels = {'0': 'negative', '1': 'positive'}
  assert config.get('id2label', labels) == labels
  assert ('id2label' in config) == (heads == 'classifier')
  check_tokenizer(run, name, out)
  if name == 'dense':
    vocabulary = (out / 'vocab.txt').read_text().split('\n')
    assert vocabulary[:3] == ['[PAD]', '[UNK]', '[CLS]']
    check_tokenizer(run, name, out / 'vocab.txt')


@pytest.mark.nightly
def test_what_is_written_can_be_trained_from(runs, tmp_path_factory, tmp_path):
  out = exported(runs['dense'], tmp_path / 'bert')
  root = pathlib.Path(export.__file__).parents[1]
  config = config_flags.load_config(
    f'{root}/configs/eat/glue.py:pretrained={out},data={tmp_path}', []
  )
  assert (config.model.depth, config.model.width) == (2, 16)
  assert config.model.exit_layers == (1,)
  assert config.dataset.tokenizer == str(out)
  run = run_of('glue fixed', runs, tmp_path_factory)
  out = exported(run, tmp_path / 'albert')
  config = tiny_run.load('glue', task='rte', data='D', checkpoint=out,
                         score='fresh')  # fmt: skip
  config_schema.validate(config)
  assert (config.model.width, config.model.max_iterations) == (16, 6)
  check_tokenizer(run, 'glue', config.dataset.tokenizer)


PARTS = {
  'eat': ('exit_1', ['pruning after layers 1', 'exits at 1', 'window']),
  'glue': ('score', ['halting by the rule act', "'score'"]),
  'pretrain': ('score', ['halting by the rule act', "'score'"]),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PARTS)
def test_an_adaptive_run_is_refused_unless_it_may_lose_its_parts(
  runs, tmp_path_factory, tmp_path, capsys, name
):
  run = run_of(name, runs, tmp_path_factory)
  part, words = PARTS[name]
  capsys.readouterr()
  with pytest.raises(SystemExit) as stop:
    export.main([f'--workdir={run}', f'--out={tmp_path}/out'])
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  for word in (*words, '--workdir', '--dense'):
    assert word in error
  assert not (tmp_path / 'out').exists()

  out = exported(run, tmp_path / 'out', '--dense')
  printed = capsys.readouterr().out
  assert printed.count('left out: ') == (3 if name == 'eat' else 1)
  says = 'runs all 6 iterations for every token'
  assert (says in printed) == (name != 'eat')
  params = params_of(run)
  del params[part]
  heads = 'pretraining' if name == 'pretrain' else 'classifier'
  assert_equal(convert.load_params(out, heads), params)


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


@pytest.mark.slow
def test_a_step_that_is_not_there_is_a_checkpoint_error(runs, tmp_path):
  flags = [f'--workdir={runs["dense"]}', f'--out={tmp_path}/new', '--step=3']
  with pytest.raises(SystemExit) as stop:
    export.main(flags)
  assert stop.value.code == command_line.CHECKPOINT
  assert not (tmp_path / 'new').exists()


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


# -- read by transformers


def theirs(directory, run, name, auto):
  """Float64 outputs of transformers for the texts by its tokenizer, rows."""
  torch, transformers = torch_and_transformers()
  model, report = getattr(transformers, auto).from_pretrained(
    directory, output_loading_info=True
  )
  assert not any(report.values()), report
  if 'Sequence' in auto:
    assert model.config.id2label == {0: 'negative', 1: 'positive'}
  reader = transformers.AutoTokenizer.from_pretrained(directory)
  texts, pairs = texts_of(name)
  batch = reader(texts, pairs, padding=True, return_tensors='pt')
  rows = encoded(run, texts, pairs)
  np.testing.assert_array_equal(batch['input_ids'], rows[0])
  if 'token_type_ids' in batch:
    np.testing.assert_array_equal(batch['token_type_ids'], rows[1])
  # In float32 torch itself is up to 1e-5 from its float64: this ALBERT's six
  # iterations amplify the rounding of short rows. Ours is within 1e-6 of it.
  with torch.no_grad():
    return model.double().eval()(**batch), rows


def ours(kind, directory, rows, heads='classifier', **fields):
  """Logits by our model, from the written directory alone."""
  model = kind(**fields, **convert.read_sizes(directory))
  params = jax.tree.map(jnp.asarray, convert.load_params(directory, heads))
  return jax.jit(model.apply)({'params': params}, *rows)[0]


def assert_close(found, want):
  np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)
  # A model that is the same for all texts would not show what it reads.
  assert np.abs(want).max() > 0.05
  assert np.ptp(want, axis=0).min() > 0.001


@pytest.mark.peers
@pytest.mark.parametrize(
  'name',
  [
    pytest.param('dense', marks=pytest.mark.nightly),
    pytest.param('eat', marks=pytest.mark.slow),
    pytest.param('distil', marks=pytest.mark.nightly),
    pytest.param('glue fixed', marks=pytest.mark.nightly),
    pytest.param('glue', marks=pytest.mark.slow),
  ],
)
def test_transformers_reads_the_same_classifier(
  runs, tmp_path_factory, tmp_path, name
):
  run = run_of(name, runs, tmp_path_factory)
  out = exported(run, tmp_path / 'out', '--dense')
  want, rows = theirs(out, run, name, 'AutoModelForSequenceClassification')
  if 'glue' in name:
    logits = ours(AlbertClassifier, out, rows, num_classes=2, halting='')
  else:
    logits = ours(bert.BertClassifier, out, rows, num_classes=2)
  assert_close(logits, want.logits.numpy())


@pytest.mark.peers
@pytest.mark.nightly
def test_transformers_reads_the_same_pretraining(tmp_path_factory, tmp_path):
  run = tiny_run.made(tmp_path_factory, 'pretrain', 'fixed')
  out = exported(run, tmp_path / 'out')
  want, rows = theirs(out, run, 'pretrain', 'AutoModelForPreTraining')
  places = jnp.arange(rows[0].shape[1])[None].repeat(len(rows[0]), 0)
  logits = ours(
    AlbertPretraining, out, [*rows, places], 'pretraining', halting=''
  )
  assert_close(logits['order'], want.sop_logits.numpy())
  valid = np.asarray(places < rows[2][:, None])
  assert_close(
    np.asarray(logits['words'])[valid], want.prediction_logits.numpy()[valid]
  )
