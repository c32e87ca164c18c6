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
from tests.eat import small
from tests.marks import first_is_slow
from tests.peers import torch_and_transformers
from train_lib import sharding

TEXTS = ['W1 w2a w3.', 'w4', 'w5 [SEP] w6 w7 unknown', '', 'w8 É w10a w11']
PAIRS = ['w12', '', 'w13 w14 w15a', '[PAD]', '[MASK] w17']
DENSE = 'eat sst2 dense'
DISTIL = ['model.type_vocab_size=0', 'model.pooler_activation=relu']


def exported(run, out, *flags):
  assert export.main([f'--workdir={run.folder}', f'--out={out}', *flags]) == 0
  return out


def assert_equal(trees, others):
  jax.tree.map(np.testing.assert_array_equal, trees, jax.device_get(others))


def tokens(path):
  return tokenizer.load(path).encode(TEXTS, PAIRS)


HALTS = ['halting by the rule ACT', "'score'"]
PRUNES = ['pruning after layers 1', 'exits at 1', 'window']
HEADS = {'Classification': 'classifier', 'PreTraining': 'pretraining'}


@pytest.mark.parametrize(
  ('name', 'part', 'words', 'architecture'),
  first_is_slow(
    ('eat sst2', 'exit_1', PRUNES, 'BertForSequenceClassification'),
    ('albert sst2', 'score', HALTS, 'AlbertForSequenceClassification'),
    ('albert pretrain act', 'score', HALTS, 'AlbertForPreTraining'),
    (DENSE, '', [], 'BertForSequenceClassification'),
    ('albert sst2 fixed', '', [], 'AlbertForSequenceClassification'),
    ('albert pretrain fixed', '', [], 'AlbertForPreTraining'),
  ),
)  # fmt: skip
def test_a_run_is_written_and_refused_if_it_loses_parts(
  runs, tmp_path, capsys, refused, name, part, words, architecture
):
  run, out = runs(name), tmp_path / 'out'
  if words:
    flags = [f'--workdir={run.folder}', f'--out={out}']
    refused(export.main, flags, [*words, '--workdir', '--dense'])
    assert not out.exists()
  exported(run, out, *['--dense'] * bool(words))
  printed = capsys.readouterr().out
  assert 'step 1, written' in printed
  # Halting is one part.
  assert printed.count('left out: ') == len(
    words[: 1 if part == 'score' else 3]
  )
  says = 'runs all 6 iterations for every token'
  assert (says in printed) == (words is HALTS)
  (heads,) = (HEADS[end] for end in HEADS if architecture.endswith(end))
  params = {k: v for k, v in run.variables['params'].items() if k != part}
  assert_equal(convert.load(out, heads).params, params)
  config = json.loads((out / 'config.json').read_text())
  assert config['architectures'] == [architecture]
  labels = {'0': 'negative', '1': 'positive'}
  assert config.get('id2label') == (labels if heads == 'classifier' else None)
  own = tokens(run.folder / 'tokenizer.json').tokens
  for file in [out, out / 'vocab.txt'][: 2 if name == DENSE else 1]:
    np.testing.assert_array_equal(tokens(file).tokens, own)


def test_a_run_without_tokenizer_or_step_is_refused(runs, tmp_path, refused):
  folder, copy = runs(DENSE).folder, tmp_path / 'copy'
  copy.mkdir()
  (copy / 'config.json').write_text((folder / 'config.json').read_text())
  out = f'--out={tmp_path}/new'
  words = ['--workdir', 'tokenizer.json']
  refused(export.main, [f'--workdir={copy}', out], words)
  given = [f'--workdir={folder}', out, '--step=3']
  refused(export.main, given, ['step 3'], command_line.CHECKPOINT)
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


def theirs(directory, run, auto):
  """Float64 outputs of transformers for the texts by its tokenizer, rows."""
  torch, transformers = torch_and_transformers()
  model, report = getattr(transformers, auto).from_pretrained(
    directory, output_loading_info=True
  )
  assert not any(report.values()), report
  if 'Sequence' in auto:
    assert model.config.id2label == {0: 'negative', 1: 'positive'}
  reader = transformers.AutoTokenizer.from_pretrained(directory)
  batch = reader(TEXTS, PAIRS, padding=True, return_tensors='pt')
  # Padded rows as the run reads them.
  own = tokens(run.folder / 'tokenizer.json')
  cuts, shape = own.offsets[1:-1], (len(TEXTS), int(own.lengths.max()))
  rows = [
    pad_rows(np.split(x, cuts), shape) for x in (own.tokens, own.token_types)
  ]
  rows = [jnp.asarray(x, jnp.int32) for x in (*rows, own.lengths)]
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
  ('name', 'changes'),
  first_is_slow(
    ('eat sst2', []), ('albert sst2', []), (DENSE, []), (DENSE, DISTIL),
    ('albert sst2 fixed', []),
  ),
)  # fmt: skip
def test_transformers_reads_the_same_classifier(runs, tmp_path, name, changes):
  run = runs(name, *changes)
  out = exported(run, tmp_path / 'out', '--dense')
  want, rows = theirs(out, run, 'AutoModelForSequenceClassification')
  kind, halting = bert.BertClassifier, {}
  if 'albert' in name:
    kind, halting = AlbertClassifier, {'rule': Fixed()}
  logits = ours(kind, out, rows, num_classes=2, **halting)
  assert_close(logits, want.logits.numpy())


@pytest.mark.peers
@pytest.mark.nightly
def test_transformers_reads_the_same_pretraining(runs, tmp_path):
  run = runs('albert pretrain fixed')
  out = exported(run, tmp_path / 'out')
  want, rows = theirs(out, run, 'AutoModelForPreTraining')
  places = jnp.arange(rows[0].shape[1])[None].repeat(len(rows[0]), 0)
  logits = ours(
    AlbertPretraining, out, [*rows, places], 'pretraining', rule=Fixed()
  )
  assert_close(logits['order'], want.sop_logits.numpy())
  valid = np.asarray(places < rows[2][:, None])
  assert_close(
    np.asarray(logits['words'])[valid], want.prediction_logits.numpy()[valid]
  )
