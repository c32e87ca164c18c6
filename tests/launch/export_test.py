"""Runs written as Hugging Face directories, and read by transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act.model import AlbertClassifier, AlbertPretraining
from dataset_lib import tokenizer
from dataset_lib.source import pad_rows
from halting.token_rules import Fixed
from launch import command_line, export
from model_lib import bert, convert
from tests.albert_act import tiny_run
from tests.eat import small
from tests.launch import toy_runs
from tests.peers import torch_and_transformers
from train_lib import loading, sharding

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
  'model.mlp_dim=24', 'model.vocab_size=20', 'model.max_positions=24',
  'optimizer.lr=0.1', 'batch_size=4',
]  # fmt: skip
RUNS = {
  'dense': ('model=dense', []),
  'distil': (
    'model=dense', ['model.type_vocab_size=0', 'model.pooler_activation=relu']
  ),
  'eat': ('model=eat', ['model.window=4']),
}  # fmt: skip


@pytest.fixture(scope='module')
def run_of(tmp_path_factory):
  """Returns the directory of a run of four steps; other names are ALBERTs."""
  directory = tmp_path_factory.mktemp('runs')
  special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  (directory / 'vocab.txt').write_text('\n'.join([*special, *WORDS]) + '\n')
  rows = [f'{WORDS[n % 2]} film\t{n % 2}' for n in range(16)]
  for name in ('train', 'dev'):
    lines = ['sentence\tlabel', *rows]
    (directory / f'{name}.tsv').write_text('\n'.join(lines))

  def make(name):
    if name not in RUNS:
      return tiny_run.made(tmp_path_factory, *name.split())
    argument, changes = RUNS[name]
    if not (directory / name).exists():
      toy_runs.train(directory, name, argument, *SMALL, *changes, steps=4)
    return directory / name

  return make


def texts_of(name):
  return TEXTS['bert' if name in RUNS else 'albert']


def exported(run, out, *flags):
  assert export.main([f'--workdir={run}', f'--out={out}', *flags]) == 0
  return out


def params_of(run):
  return loading.restore(run, loading.load_config(run)).variables['params']


def encoded(run, texts, pairs):
  """Padded rows as the run reads them."""
  rows = tokenizer.load(run / 'tokenizer.json').encode(texts, pairs)
  cuts, shape = rows.offsets[1:-1], (len(texts), int(rows.lengths.max()))
  tokens, types = (
    pad_rows(np.split(flat, cuts), shape)
    for flat in (rows.tokens, rows.token_types)
  )
  return [jnp.asarray(x, jnp.int32) for x in (tokens, types, rows.lengths)]


def assert_equal(trees, others):
  jax.tree.map(np.testing.assert_array_equal, trees, jax.device_get(others))


def check_tokenizer(run, name, path):
  own, again = (
    tokenizer.load(one).encode(*texts_of(name))
    for one in (run / 'tokenizer.json', path)
  )
  np.testing.assert_array_equal(again.tokens, own.tokens)


@pytest.mark.parametrize(
  ('name', 'heads', 'architecture'),
  [
    pytest.param('dense', 'classifier', 'BertForSequenceClassification',
                 marks=pytest.mark.nightly),
    pytest.param('glue fixed', 'classifier', 'AlbertForSequenceClassification',
                 marks=pytest.mark.nightly),
    pytest.param('pretrain fixed', 'pretraining', 'AlbertForPreTraining',
                 marks=pytest.mark.nightly),
  ],
)  # fmt: skip
def test_a_run_of_fixed_depth_is_written_as_it_is(
  run_of, tmp_path, capsys, name, heads, architecture
):
  run = run_of(name)
  out = exported(run, tmp_path / 'out')
  printed = capsys.readouterr().out
  assert 'step 4, written' in printed
  assert 'left out' not in printed
  assert_equal(convert.load(out, heads).params, params_of(run))
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


HALTS = ['halting by the rule ACT', "'score'"]
PARTS = {
  'eat': ('exit_1', ['pruning after layers 1', 'exits at 1', 'window']),
  'glue': ('score', HALTS),
  'pretrain': ('score', HALTS),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PARTS)
def test_an_adaptive_run_is_refused_unless_it_may_lose_its_parts(
  run_of, tmp_path, capsys, refused, name
):
  run = run_of(name)
  part, words = PARTS[name]
  flags = [f'--workdir={run}', f'--out={tmp_path}/out']
  refused(export.main, flags, [*words, '--workdir', '--dense'])
  assert not (tmp_path / 'out').exists()
  out = exported(run, tmp_path / 'out', '--dense')
  printed = capsys.readouterr().out
  assert printed.count('left out: ') == (3 if name == 'eat' else 1)
  says = 'runs all 6 iterations for every token'
  assert (says in printed) == (name != 'eat')
  params = params_of(run)
  del params[part]
  heads = 'pretraining' if name == 'pretrain' else 'classifier'
  assert_equal(convert.load(out, heads).params, params)


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
    pytest.param(
      ['--workdir={dense}', '--out={new}', '--step=3'],
      ['step 3'], marks=pytest.mark.nightly,
    ),
  ],
)  # fmt: skip
def test_bad_command_lines_are_answered_in_one_line(
  flags, words, run_of, tmp_path, refused
):
  copy, dense = tmp_path / 'copy', run_of('dense')
  copy.mkdir()
  (copy / 'config.json').write_text((dense / 'config.json').read_text())
  places = {'dense': dense, 'new': tmp_path / 'new', 'copy': copy}
  code = command_line.CHECKPOINT if '--step=3' in flags else command_line.USAGE
  given = [flag.format(**places) for flag in flags]
  refused(export.main, given, words, code)
  assert not (tmp_path / 'new').exists()


def test_learned_scorers_are_left_out_and_a_broken_tokenizer_is_named(tmp_path):
  model, variables = small.build(prune_scores='learned')
  path, out = tmp_path / 'tokenizer.json', tmp_path / 'out'
  path.write_text('{"model": 3}')
  with pytest.raises(ValueError, match=r'expected a tokenizer\.json'):
    convert.save_model(str(out), model, variables['params'], tokenizer=path)
  assert not out.exists()
  convert.save_model(str(out), model, variables['params'])
  plain = bert.BertClassifier(num_classes=3, **convert.read_sizes(out))
  rows = small.batch(small.rows(2), 20)
  expected = jax.eval_shape(plain.init, jax.random.key(0), *rows)['params']
  assert jax.tree.structure(convert.load(out, 'classifier').params) == (
    jax.tree.structure(sharding.unbox(expected))
  )


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
  params = jax.tree.map(jnp.asarray, convert.load(directory, heads).params)
  return jax.jit(model.apply)({'params': params}, *rows)[0]


def assert_close(found, want):
  np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
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
def test_transformers_reads_the_same_classifier(run_of, tmp_path, name):
  run = run_of(name)
  out = exported(run, tmp_path / 'out', '--dense')
  want, rows = theirs(out, run, name, 'AutoModelForSequenceClassification')
  kind, halting = bert.BertClassifier, {}
  if 'glue' in name:
    kind, halting = AlbertClassifier, {'rule': Fixed()}
  logits = ours(kind, out, rows, num_classes=2, **halting)
  assert_close(logits, want.logits.numpy())


@pytest.mark.peers
@pytest.mark.nightly
def test_transformers_reads_the_same_pretraining(run_of, tmp_path):
  run = run_of('pretrain fixed')
  out = exported(run, tmp_path / 'out')
  want, rows = theirs(out, run, 'pretrain', 'AutoModelForPreTraining')
  places = jnp.arange(rows[0].shape[1])[None].repeat(len(rows[0]), 0)
  logits = ours(
    AlbertPretraining, out, [*rows, places], 'pretraining', rule=Fixed()
  )
  assert_close(logits['order'], want.sop_logits.numpy())
  valid = np.asarray(places < rows[2][:, None])
  assert_close(
    np.asarray(logits['words'])[valid], want.prediction_logits.numpy()[valid]
  )
