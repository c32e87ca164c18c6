"""Hugging Face checkpoints against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import bert, convert, sizes
from tests.model_lib.checkpoints import (
  DISTIL,
  FIELDS,
  assert_trees_equal,
  fresh_params,
)
from tests.peers import torch_and_transformers

BERT = {
  'vocab_size': 40,
  'hidden_size': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'intermediate_size': 36,
  'max_position_embeddings': 20,
}
DISTILBERT = {
  'vocab_size': 40,
  'dim': 24,
  'n_layers': 3,
  'n_heads': 4,
  'hidden_dim': 36,
  'max_position_embeddings': 20,
}


@pytest.fixture(scope='module')
def peers():
  """(torch, transformers), or a skip."""
  return torch_and_transformers()


def text_batch(vocab_size=40, types=2, longest=12):
  """Ragged rows, one of them with a single token."""
  generator = np.random.default_rng(3)
  length = np.array([longest, 5, 1, 9])
  tokens = generator.integers(1, vocab_size, (4, longest))
  token_types = generator.integers(0, types, (4, longest))
  valid = np.arange(longest)[None] < length[:, None]
  return tokens * valid, token_types * valid, length, valid


def random_model(peers, name, config):
  """A model of transformers with all parameters drawn, norms too."""
  torch, transformers = peers
  torch.manual_seed(0)
  model = getattr(transformers, name)(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
  return model


def their_logits(peers, model, batch):
  torch, _ = peers
  tokens, token_types, _, valid = (torch.as_tensor(array) for array in batch)
  inputs = {'input_ids': tokens, 'attention_mask': valid.long()}
  if model.config.model_type == 'bert':
    inputs['token_type_ids'] = token_types
  with torch.no_grad():
    return model(**inputs).logits.numpy()


def our_logits(directory, batch, num_classes):
  model = bert.BertClassifier(
    num_classes=num_classes, **convert.read_sizes(directory)
  )
  tokens, token_types, length = (jnp.asarray(x, jnp.int32) for x in batch[:3])
  params = jax.tree.map(jnp.asarray, convert.load_params(directory))
  apply = jax.jit(model.apply)
  return apply({'params': params}, tokens, token_types, length)[0]


@pytest.mark.peers
@pytest.mark.parametrize(
  'options',
  [
    {},
    {'hidden_act': 'gelu_new', 'num_labels': 1},
    {'hidden_act': 'relu', 'layer_norm_eps': 1e-3, 'num_labels': 3},
    {'hidden_act': 'silu', 'type_vocab_size': 1, 'pad_token_id': 3},
    {'hidden_act': 'gelu_pytorch_tanh', 'num_attention_heads': 1},
    {'hidden_act': 'gelu_fast', 'chunk_size_feed_forward': 4},
    {'hidden_act': 'gelu_python', 'problem_type': 'multi_label_classification'},
    {'hidden_act': 'swish', 'max_position_embeddings': 12},
    {'hidden_act': 'tanh', 'layer_norm_eps': 1e-5},
  ],
  ids=lambda options: '-'.join(map(str, options.values())) or 'default',
)
def test_bert_has_the_logits_of_transformers(peers, tmp_path, options):
  config = peers[1].BertConfig(**(BERT | options))
  model = random_model(peers, 'BertForSequenceClassification', config)
  model.save_pretrained(tmp_path)
  batch = text_batch(types=config.type_vocab_size)
  want = their_logits(peers, model, batch)
  got = our_logits(tmp_path, batch, config.num_labels)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize(
  'options',
  [
    {},
    {'activation': 'gelu_new', 'num_labels': 1},
    {'activation': 'relu', 'num_labels': 3, 'sinusoidal_pos_embds': True},
    {'activation': 'silu', 'pad_token_id': 3, 'n_heads': 2},
  ],
  ids=lambda options: '-'.join(map(str, options.values())) or 'default',
)
def test_distilbert_has_the_logits_of_transformers(peers, tmp_path, options):
  config = peers[1].DistilBertConfig(**(DISTILBERT | options))
  model = random_model(peers, 'DistilBertForSequenceClassification', config)
  model.save_pretrained(tmp_path)
  batch = text_batch()
  want = their_logits(peers, model, batch)
  got = our_logits(tmp_path, batch, config.num_labels)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.peers
def test_shards_of_transformers(peers, tmp_path):
  config = peers[1].BertConfig(**BERT)
  model = random_model(peers, 'BertForSequenceClassification', config)
  model.save_pretrained(tmp_path, max_shard_size='20KB')
  assert len(list(tmp_path.glob('*.safetensors'))) > 2
  batch = text_batch()
  want = their_logits(peers, model, batch)
  np.testing.assert_allclose(our_logits(tmp_path, batch, 2), want, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize('pooler', [True, False])
def test_a_bare_encoder_has_their_states(peers, tmp_path, pooler):
  torch, transformers = peers
  config = transformers.BertConfig(**BERT)
  torch.manual_seed(0)
  theirs = transformers.BertModel(config, add_pooling_layer=pooler).eval()
  theirs.save_pretrained(tmp_path)
  params = convert.load_params(tmp_path)
  assert ('pooler' in params) is pooler
  assert 'head' not in params
  compare_encoders(peers, theirs, tmp_path, text_batch(), atol=1e-5)


def compare_encoders(peers, theirs, directory, batch, atol):
  """All states of valid tokens, and the pooled ones if there is a pooler."""
  torch, _ = peers
  tokens, token_types, length, valid = batch
  with torch.no_grad():
    want = theirs(
      input_ids=torch.as_tensor(tokens),
      token_type_ids=torch.as_tensor(token_types),
      attention_mask=torch.as_tensor(valid).long(),
    )
  fields = convert.read_sizes(directory)
  params = convert.load_params(directory)
  width = fields['width']
  head = {'kernel': np.zeros((width, 2)), 'bias': np.zeros(2)}
  absent = {'head': jax.tree.map(np.float32, head)}
  if 'pooler' not in params:
    square = {'kernel': np.zeros((width, width)), 'bias': np.zeros(width)}
    absent['pooler'] = jax.tree.map(np.float32, square)
  variables = {'params': jax.tree.map(jnp.asarray, params | absent)}
  model = bert.BertClassifier(num_classes=2, **fields)
  inputs = [jnp.asarray(x, jnp.int32) for x in (tokens, token_types, length)]
  states = jax.jit(lambda v, *x: model.apply(v, *x, method='encode'))
  got = np.asarray(states(variables, *inputs))
  assert np.abs(want.last_hidden_state.numpy()[valid]).max() > 1
  np.testing.assert_allclose(
    got[valid], want.last_hidden_state.numpy()[valid], atol=atol
  )
  if want.pooler_output is not None:
    features = jax.jit(model.apply)(variables, *inputs)[1]['features']
    np.testing.assert_allclose(features, want.pooler_output, atol=atol)


@pytest.mark.peers
@pytest.mark.parametrize('model_type', ['bert', 'distilbert'])
@pytest.mark.parametrize('num_classes', [1, 3])
def test_transformers_loads_what_is_saved(
  peers, tmp_path, model_type, num_classes
):
  _, transformers = peers
  fields = FIELDS if model_type == 'bert' else DISTIL
  fields = fields | {'max_positions': 12, 'activation': 'gelu_new'}
  params = fresh_params(model_type, num_classes, fields)
  convert.save(tmp_path, model_type, fields, params)
  model, report = (
    transformers.AutoModelForSequenceClassification.from_pretrained(
      tmp_path, output_loading_info=True
    )
  )
  assert not any(report.values()), report
  assert model.config.num_labels == num_classes
  batch = text_batch(vocab_size=10)
  want = their_logits(peers, model.eval(), batch)
  got = our_logits(tmp_path, batch, num_classes)
  np.testing.assert_allclose(got, want, atol=1e-5)
  # And what transformers writes of it is the same again.
  model.save_pretrained(tmp_path / 'again')
  assert_trees_equal(convert.load_params(tmp_path / 'again'), params)


@pytest.mark.peers
def test_the_pretrained_minilm_has_the_states_of_transformers(peers):
  _, transformers = peers
  try:
    directory = convert.packaged_minilm()
  except FileNotFoundError as error:
    pytest.skip(str(error))
  expected = sizes.BERT.defaults | sizes.BERT.fields('minilm')
  assert convert.read_sizes(directory) == expected
  theirs = transformers.AutoModel.from_pretrained(directory).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
  encoded = tokenizer(
    [
      'a gripping, funny and deeply humane film .',
      'Nope.',
      'How do I read a book and a map at the same time, in the rain?',
    ],
    ['the plot is thin', '', 'Is it possible to read two things at once?'],
    padding=True,
    return_tensors='np',
  )
  valid = encoded['attention_mask'].astype(bool)
  batch = (
    encoded['input_ids'], encoded['token_type_ids'], valid.sum(1), valid
  )  # fmt: skip
  compare_encoders(peers, theirs, directory, batch, atol=1e-4)
