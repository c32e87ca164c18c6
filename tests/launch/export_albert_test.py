"""ALBERTs written as Hugging Face directories, and read by transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act.model import AlbertClassifier, AlbertPretraining
from dataset_lib import tokenizer
from launch import command_line, export
from model_lib import convert
from tests.albert_act import tiny_run
from tests.launch.exported import encoded, exported, params_of
from tests.peers import torch_and_transformers
from train_lib import config_schema

TEXTS = ['W1 w2ab w3.', 'w4', 'w5 [SEP] w6 w7 unknown', '', 'w8 w9 w10a w11']
PAIRS = ['w12', '', 'w13 w14 w15b', 'w16', '[MASK] w17']


def assert_equal(trees, others):
  jax.tree.map(np.testing.assert_array_equal, trees, jax.device_get(others))


@pytest.mark.nightly
def test_a_classifier_of_fixed_depth_is_written_as_it_is(
  tmp_path_factory, tmp_path, capsys
):
  run = tiny_run.made(tmp_path_factory, 'glue', 'fixed')
  out = exported(run, tmp_path / 'out')
  printed = capsys.readouterr().out
  assert f'step {tiny_run.STEP}, written' in printed
  assert 'left out' not in printed
  assert_equal(convert.load_params(out), params_of(run))
  config = json.loads((out / 'config.json').read_text())
  assert config['architectures'] == ['AlbertForSequenceClassification']
  assert config['id2label'] == {'0': 'negative', '1': 'positive'}
  assert config['num_hidden_layers'] == 6
  # It can be trained from, with its own words.
  config = tiny_run.load('glue', task='rte', data='D', checkpoint=out,
                         score='fresh')  # fmt: skip
  config_schema.validate(config)
  assert (config.model.width, config.model.max_iterations) == (16, 6)
  own = tokenizer.load(run / 'tokenizer.json').encode(TEXTS, PAIRS)
  again = tokenizer.load(config.dataset.tokenizer).encode(TEXTS, PAIRS)
  np.testing.assert_array_equal(again.tokens, own.tokens)


@pytest.mark.nightly
def test_pretraining_is_written_with_its_heads(tmp_path_factory, tmp_path):
  run = tiny_run.made(tmp_path_factory, 'pretrain', 'fixed')
  out = exported(run, tmp_path / 'out')
  params = convert.load_params(out, 'pretraining')
  assert {'predictions', 'sop'} < set(params)
  assert_equal(params, params_of(run))
  config = json.loads((out / 'config.json').read_text())
  assert config['architectures'] == ['AlbertForPreTraining']
  assert 'id2label' not in config
  assert (
    convert.read_sizes(out)['vocab_size']
    == params_of(run)['embeddings']['word']['embedding'].shape[0]
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'heads'), [('glue', 'classifier'), ('pretrain', 'pretraining')]
)
def test_one_that_halts_is_refused_unless_it_may_run_to_the_end(
  name, heads, tmp_path_factory, tmp_path, capsys
):
  run = tiny_run.made(tmp_path_factory, name)
  capsys.readouterr()
  with pytest.raises(SystemExit) as stop:
    export.main([f'--workdir={run}', f'--out={tmp_path}/out'])
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  for word in ('--workdir', 'halting by the rule act', "'score'", '--dense'):
    assert word in error
  assert not (tmp_path / 'out').exists()

  out = exported(run, tmp_path / 'out', '--dense')
  printed = capsys.readouterr().out
  assert 'left out: halting by the rule act' in printed
  assert 'runs all 6 iterations for every token' in printed
  params = params_of(run)
  assert 'score' in params
  del params['score']
  assert_equal(convert.load_params(out, heads), params)


def ours(kind, directory, rows, heads, **fields):
  """Logits by our model, from the written directory alone."""
  model = kind(halting='', **fields, **convert.read_sizes(directory))
  params = jax.tree.map(jnp.asarray, convert.load_params(directory, heads))
  return jax.jit(model.apply)({'params': params}, *rows)[0]


def theirs(directory, run, auto):
  """Outputs of transformers for the same texts, by its own tokenizer."""
  torch, transformers = torch_and_transformers()
  model, report = getattr(transformers, auto).from_pretrained(
    directory, output_loading_info=True
  )
  assert not any(report.values()), report
  reader = transformers.AutoTokenizer.from_pretrained(directory)
  batch = reader(TEXTS, PAIRS, padding=True, return_tensors='pt')
  rows = encoded(run, TEXTS, PAIRS)
  np.testing.assert_array_equal(batch['input_ids'], rows[0])
  np.testing.assert_array_equal(batch['token_type_ids'], rows[1])
  with torch.no_grad():
    return model.eval()(**batch), rows


def assert_close(found, want):
  np.testing.assert_allclose(found, want, atol=1e-5)
  # A model that is the same for all texts would not show what it reads.
  assert np.abs(want).max() > 0.05
  assert np.ptp(want, axis=0).min() > 0.005


@pytest.mark.peers
@pytest.mark.parametrize(
  'halting',
  [
    pytest.param('fixed', marks=pytest.mark.nightly),
    pytest.param('act', marks=pytest.mark.slow),
  ],
)
def test_transformers_reads_the_same_classifier(
  halting, tmp_path_factory, tmp_path
):
  run = tiny_run.made(tmp_path_factory, 'glue', halting)
  out = exported(run, tmp_path / 'out', '--dense')
  want, rows = theirs(out, run, 'AutoModelForSequenceClassification')
  logits = ours(AlbertClassifier, out, rows, 'classifier', num_classes=2)
  assert_close(logits, want.logits.numpy())


@pytest.mark.peers
@pytest.mark.nightly
def test_transformers_reads_the_same_pretraining(tmp_path_factory, tmp_path):
  run = tiny_run.made(tmp_path_factory, 'pretrain', 'fixed')
  out = exported(run, tmp_path / 'out')
  want, rows = theirs(out, run, 'AutoModelForPreTraining')
  places = jnp.arange(rows[0].shape[1])[None].repeat(len(TEXTS), 0)
  logits = ours(AlbertPretraining, out, [*rows, places], 'pretraining')
  assert_close(logits['order'], want.sop_logits.numpy())
  valid = np.asarray(places < rows[2][:, None])
  assert_close(
    np.asarray(logits['words'])[valid], want.prediction_logits.numpy()[valid]
  )
