"""Hugging Face ALBERT against transformers, a plain loop and our own model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import model as albert
from model_lib import convert, convert_tables
from tests.model_lib import plain_albert
from tests.model_lib.checkpoints import assert_trees_equal, fresh_params
from tests.peers import torch_and_transformers

TINY = {
  'vocab_size': 40,
  'embedding_size': 10,
  'hidden_size': 24,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'intermediate_size': 36,
  'max_position_embeddings': 20,
}
OPTIONS = [
  {},
  {'inner_group_num': 2, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-5},
  {'num_hidden_groups': 2, 'hidden_act': 'relu', 'type_vocab_size': 1},
  {'num_hidden_groups': 2, 'inner_group_num': 2, 'hidden_act': 'silu'},
  {'num_hidden_groups': 3, 'layer_norm_eps': 1e-3, 'hidden_act': 'tanh'},
  {'embedding_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 1},
]


@pytest.fixture(scope='module')
def peers():
  """(torch, transformers), or a skip."""
  return torch_and_transformers()


def name_of(options):
  return '-'.join(f'{key}={value}' for key, value in options.items()) or 'tiny'


def text_batch(vocab_size=40, types=2, longest=9):
  """Ragged rows, one of them with a single token."""
  generator = np.random.default_rng(3)
  length = np.array([longest, 5, 1])
  tokens = generator.integers(1, vocab_size, (3, longest))
  token_types = generator.integers(0, types, (3, longest))
  valid = np.arange(longest)[None] < length[:, None]
  return tokens * valid, token_types * valid, length, valid


def random_model(peers, name, **options):
  """A model of transformers with all parameters drawn, norms too."""
  torch, transformers = peers
  torch.manual_seed(0)
  config = transformers.AlbertConfig(**(TINY | options))
  model = getattr(transformers, name)(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
  return model


def their_output(peers, model, batch):
  torch, _ = peers
  tokens, token_types, _, valid = (torch.as_tensor(array) for array in batch)
  with torch.no_grad():
    return model(
      input_ids=tokens,
      token_type_ids=token_types,
      attention_mask=valid.long(),
    )


def plain_rows(params, fields, batch):
  """States of each row without its padding, by the plain loop."""
  tokens, token_types, length, _ = batch
  return [
    plain_albert.states_by_loop(params, ids[:size], types[:size], fields)
    for ids, types, size in zip(tokens, token_types, length, strict=True)
  ]


def our_output(model, params, batch, *more):
  """What our module gives for the batch, at a fixed depth."""
  tokens, token_types, length = (jnp.asarray(x, jnp.int32) for x in batch[:3])
  variables = {'params': jax.tree.map(jnp.asarray, params)}
  return jax.jit(model.apply)(variables, tokens, token_types, length, *more)


@pytest.mark.peers
def test_absent_options_have_the_defaults_of_transformers(peers, tmp_path):
  defaults = peers[1].AlbertConfig().to_dict()
  options = convert_tables.ALBERT.options
  ours = {
    option: convert_tables.ALBERT.defaults[name]
    for option, name in options.items()
  }
  assert set(options.values()) == set(convert_tables.ALBERT.defaults)
  assert ours == {option: defaults[option] for option in options}
  assert set(convert_tables.ALBERT.rates.values()) < set(defaults)
  (tmp_path / 'config.json').write_text('{"model_type": "albert"}')
  assert convert.read_sizes(tmp_path) == convert_tables.ALBERT.defaults


@pytest.mark.peers
@pytest.mark.parametrize('options', OPTIONS, ids=name_of)
def test_a_classifier_has_the_logits_of_transformers(peers, tmp_path, options):
  theirs = random_model(
    peers, 'AlbertForSequenceClassification', num_labels=3, **options
  )
  theirs.save_pretrained(tmp_path)
  batch = text_batch(types=theirs.config.type_vocab_size)
  want = their_output(peers, theirs, batch).logits.numpy()
  assert np.abs(want).max() > 0.1
  params, fields, ignored, cast = convert.load(tmp_path)
  assert ignored == cast == ()
  plain = [
    plain_albert.class_logits_by_loop(params, states)
    for states in plain_rows(params, fields, batch)
  ]
  np.testing.assert_allclose(plain, want, atol=1e-5)
  model = albert.AlbertClassifier(num_classes=3, halting='', **fields)
  logits, _ = our_output(model, params, batch)
  np.testing.assert_allclose(logits, want, atol=1e-4)


@pytest.mark.peers
@pytest.mark.parametrize('options', OPTIONS[:4], ids=name_of)
def test_pretraining_has_the_logits_of_transformers(peers, tmp_path, options):
  theirs = random_model(peers, 'AlbertForPreTraining', **options)
  theirs.save_pretrained(tmp_path)
  batch = text_batch(types=theirs.config.type_vocab_size)
  valid = batch[3]
  output = their_output(peers, theirs, batch)
  words = output.prediction_logits.numpy()[valid]
  order = output.sop_logits.numpy()
  assert min(np.abs(words).max(), np.abs(order).max()) > 0.1
  params, fields, ignored, _ = convert.load(tmp_path, 'pretraining')
  assert ignored == ()
  rows = plain_rows(params, fields, batch)
  plain_words = [
    plain_albert.word_logits_by_loop(params, states, fields) for states in rows
  ]
  np.testing.assert_allclose(np.concatenate(plain_words), words, atol=1e-5)
  plain_order = [
    plain_albert.order_logits_by_loop(params, states) for states in rows
  ]
  np.testing.assert_allclose(plain_order, order, atol=1e-5)
  everywhere = jnp.broadcast_to(jnp.arange(valid.shape[1]), valid.shape)
  model = albert.AlbertPretraining(halting='', **fields)
  logits, _ = our_output(model, params, batch, everywhere)
  np.testing.assert_allclose(
    np.asarray(logits['words'])[valid], words, atol=1e-4
  )
  np.testing.assert_allclose(logits['order'], order, atol=1e-4)


@pytest.mark.peers
@pytest.mark.parametrize('pooler', [True, False])
def test_a_bare_encoder_has_their_states(peers, tmp_path, pooler):
  torch, transformers = peers
  torch.manual_seed(0)
  config = transformers.AlbertConfig(**TINY, num_hidden_groups=2)
  theirs = transformers.AlbertModel(config, add_pooling_layer=pooler).eval()
  theirs.save_pretrained(tmp_path)
  params, fields, ignored, _ = convert.load(tmp_path)
  assert ('pooler' in params) is pooler
  assert 'head' not in params
  assert ignored == ()
  batch = text_batch()
  output = their_output(peers, theirs, batch)
  want = output.last_hidden_state.numpy()[batch[3]]
  assert np.abs(want).max() > 1
  rows = plain_rows(params, fields, batch)
  np.testing.assert_allclose(np.concatenate(rows), want, atol=1e-5)
  if pooler:
    pooled = [plain_albert.pooled_by_loop(params, states) for states in rows]
    np.testing.assert_allclose(pooled, output.pooler_output, atol=1e-5)


@pytest.mark.peers
def test_a_masked_language_model_has_no_order(peers, tmp_path):
  theirs = random_model(peers, 'AlbertForMaskedLM')
  theirs.save_pretrained(tmp_path)
  params, fields, ignored, _ = convert.load(tmp_path, 'pretraining')
  assert ignored == ()
  assert {'pooler', 'sop', 'head'}.isdisjoint(params)
  batch = text_batch()
  want = their_output(peers, theirs, batch).logits.numpy()[batch[3]]
  rows = [
    plain_albert.word_logits_by_loop(params, states, fields)
    for states in plain_rows(params, fields, batch)
  ]
  np.testing.assert_allclose(np.concatenate(rows), want, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize(
  'name',
  [
    'AlbertForTokenClassification',
    'AlbertForQuestionAnswering',
    'AlbertForMultipleChoice',
    'AlbertForPreTraining',
  ],
)
def test_heads_of_other_tasks_are_ignored_and_named(peers, tmp_path, name):
  random_model(peers, name).save_pretrained(tmp_path)
  checkpoint = convert.load(tmp_path)
  assert 'head' not in checkpoint.params
  begins = ('classifier.', 'qa_outputs.', 'predictions.', 'sop_classifier.')
  assert checkpoint.ignored
  assert all(tensor.startswith(begins) for tensor in checkpoint.ignored)


@pytest.mark.peers
@pytest.mark.parametrize('num_classes', [1, 3])
def test_transformers_loads_a_saved_classifier(peers, tmp_path, num_classes):
  _, transformers = peers
  fields = small_fields(num_groups=2, inner_group=2, activation='gelu')
  params = fresh_params('albert', num_classes, fields)
  convert.save(tmp_path, 'albert', fields, params)
  auto = transformers.AutoModelForSequenceClassification
  theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
  assert not any(report.values()), report
  assert theirs.config.num_labels == num_classes
  batch = text_batch(fields['vocab_size'])
  want = their_output(peers, theirs.eval(), batch).logits.numpy()
  plain = [
    plain_albert.class_logits_by_loop(params, states)
    for states in plain_rows(params, fields, batch)
  ]
  np.testing.assert_allclose(plain, want, atol=1e-5)
  # And what transformers writes of it is the same again.
  theirs.save_pretrained(tmp_path / 'again')
  assert_trees_equal(convert.load_params(tmp_path / 'again'), params)


def small_fields(**others):
  sizes = {
    'width': 16, 'embedding_width': 6, 'max_iterations': 4, 'mlp_dim': 20,
    'num_heads': 2, 'vocab_size': 11, 'max_positions': 12,
  }  # fmt: skip
  return convert_tables.ALBERT.defaults | sizes | others


@pytest.mark.peers
def test_transformers_loads_a_saved_pretraining_model(peers, tmp_path):
  _, transformers = peers
  fields = small_fields(norm_epsilon=1e-6)
  params = fresh_params('pretraining', fields=fields)
  convert.save(tmp_path, 'albert', fields, params, heads='pretraining')
  auto = transformers.AutoModelForPreTraining
  theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
  assert isinstance(theirs, transformers.AlbertForPreTraining)
  assert not any(report.values()), report
  batch = text_batch(fields['vocab_size'])
  output = their_output(peers, theirs.eval(), batch)
  rows = plain_rows(params, fields, batch)
  words = [
    plain_albert.word_logits_by_loop(params, states, fields) for states in rows
  ]
  np.testing.assert_allclose(
    np.concatenate(words), output.prediction_logits.numpy()[batch[3]], atol=1e-5
  )
  order = [plain_albert.order_logits_by_loop(params, states) for states in rows]
  np.testing.assert_allclose(order, output.sop_logits, atol=1e-5)
  theirs.save_pretrained(tmp_path / 'again')
  again = convert.load_params(tmp_path / 'again', 'pretraining')
  assert_trees_equal(again, params)
  # A masked language model and a bare encoder can be had from it too.
  for auto in (transformers.AutoModelForMaskedLM, transformers.AutoModel):
    _, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not report['missing_keys'], report
