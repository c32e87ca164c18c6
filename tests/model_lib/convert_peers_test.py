"""Hugging Face checkpoints against transformers."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import published
from model_lib import convert, sizes
from tests.model_lib import checkpoints, plain
from tests.peers import torch_and_transformers
from train_lib.warm_start import warm_start

pytestmark = pytest.mark.peers
_SIZES = {
  'vocab_size': 40, 'hidden_size': 24, 'num_attention_heads': 4,
  'intermediate_size': 36, 'max_position_embeddings': 20,
}  # fmt: skip
# Kind: (prefix of the classes of transformers, options of a tiny model).
TINY = {
  'bert': ('Bert', _SIZES | {'num_hidden_layers': 3}),
  'distilbert': ('DistilBert', {
    'vocab_size': 40, 'dim': 24, 'n_layers': 3, 'n_heads': 4, 'hidden_dim': 36,
    'max_position_embeddings': 20,
  }),
  'albert': ('Albert', _SIZES | {'embedding_size': 10, 'num_hidden_layers': 4}),
  'modernbert': ('ModernBert', _SIZES | {
    'num_hidden_layers': 5, 'local_attention': 6, 'pad_token_id': 0,
  }),
  'roberta': ('Roberta', _SIZES | {'num_hidden_layers': 3}),
  'xlm-roberta': ('XLMRoberta', _SIZES | {'num_hidden_layers': 2}),
}  # fmt: skip
ALBERT_OPTIONS = [
  {},
  {'inner_group_num': 2, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-5},
  {'num_hidden_groups': 2, 'hidden_act': 'relu', 'type_vocab_size': 1},
  {'num_hidden_groups': 2, 'inner_group_num': 2, 'hidden_act': 'silu'},
  {'num_hidden_groups': 3, 'layer_norm_eps': 1e-3, 'hidden_act': 'tanh'},
  {'embedding_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 1},
]
CLASSIFIERS = [
  ('bert', {}),
  ('bert', {'hidden_act': 'gelu_new', 'num_labels': 1}),
  ('bert', {'hidden_act': 'relu', 'layer_norm_eps': 1e-3, 'num_labels': 3}),
  ('bert', {'hidden_act': 'silu', 'type_vocab_size': 1, 'pad_token_id': 3}),
  ('bert', {'hidden_act': 'gelu_pytorch_tanh', 'num_attention_heads': 1}),
  ('bert', {'hidden_act': 'gelu_fast', 'chunk_size_feed_forward': 4}),
  ('bert', {'hidden_act': 'gelu_python',
            'problem_type': 'multi_label_classification'}),
  ('bert', {'hidden_act': 'swish', 'max_position_embeddings': 12}),
  ('bert', {'hidden_act': 'tanh', 'layer_norm_eps': 1e-5}),
  ('distilbert', {}),
  ('distilbert', {'activation': 'gelu_new', 'num_labels': 1}),
  ('distilbert', {'activation': 'relu', 'num_labels': 3,
                  'sinusoidal_pos_embds': True}),
  ('distilbert', {'activation': 'silu', 'pad_token_id': 3, 'n_heads': 2}),
  ('roberta', {}),
  ('roberta', {'hidden_act': 'relu', 'num_labels': 3, 'layer_norm_eps': 1e-3,
               'type_vocab_size': 1, 'max_position_embeddings': 14}),
  ('xlm-roberta', {'type_vocab_size': 1, 'num_labels': 1}),
  *[('albert', options | {'num_labels': 3}) for options in ALBERT_OPTIONS],
]  # fmt: skip

BIASES = dict.fromkeys(
  ('norm_bias', 'attention_bias', 'mlp_bias', 'classifier_bias'), True
)
MODERN = [
  {}, {'local_attention': 7}, {'num_hidden_layers': 1},
  {'num_attention_heads': 3, 'num_labels': 1},
  {'num_attention_heads': 1, 'local_attention': 1},
  {'classifier_pooling': 'mean'},
  BIASES | {'classifier_pooling': 'mean', 'num_labels': 3},
  {'local_attention': 128}, {'hidden_size': 40, 'num_attention_heads': 5},
  {'global_attn_every_n_layers': 2, 'hidden_activation': 'silu',
   'classifier_activation': 'relu', 'norm_eps': 1e-3},
  {'global_rope_theta': 500.0, 'local_rope_theta': 30.0,
   'num_attention_heads': 12, 'global_attn_every_n_layers': 1},
]  # fmt: skip


@pytest.fixture(scope='module')
def peers():
  """(torch, transformers), or a skip."""
  return torch_and_transformers()


def text_batch(vocab_size=40, types=2, longest=12):
  """Ragged rows, one of them with a single token."""
  generator = np.random.default_rng(3)
  length = np.array([longest, 5, 1, 9])
  # RoBERTa gives no position to a token 1.
  tokens = generator.integers(2, vocab_size, (4, longest))
  token_types = generator.integers(0, types, (4, longest))
  valid = np.arange(longest)[None] < length[:, None]
  return tokens * valid, token_types * valid, length, valid


def random_model(peers, kind, task, options=(), **arguments):
  """A model of transformers with all parameters drawn, norms too."""
  torch, transformers = peers
  prefix, tiny = TINY[kind]
  torch.manual_seed(0)
  config = getattr(transformers, f'{prefix}Config')(**(tiny | dict(options)))
  model = getattr(transformers, prefix + task)(config, **arguments).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
  return model


def their_output(peers, model, batch):
  torch, _ = peers
  tokens, token_types, _, valid = (torch.as_tensor(array) for array in batch)
  inputs = {'input_ids': tokens, 'attention_mask': valid.long()}
  if 'type_vocab_size' in model.config.to_dict():
    inputs['token_type_ids'] = token_types
  # In float64, as torch's own float32 is up to 1e-5 from it.
  with torch.no_grad():
    return copy.deepcopy(model).double()(**inputs)


def our_output(directory, kind, batch, num_classes=2, method=None):
  """(result of our module, parameters); absent parameters are zeros."""
  heads = 'pretraining' if kind == 'pretraining' else 'classifier'
  params, fields, *_ = convert.load(directory, heads)
  model, inputs = checkpoints.model_of(kind, num_classes, fields)
  zeros = plain.noise(model, *inputs, scale=0.0)
  arrays = [jnp.asarray(x, jnp.int32) for x in batch[:3]]
  if kind == 'pretraining':
    arrays.append(jnp.tile(jnp.arange(batch[0].shape[1])[None], (4, 1)))
  variables = {'params': jax.tree.map(jnp.asarray, zeros | params)}
  apply = jax.jit(lambda *args: model.apply(*args, method=method))
  return apply(variables, *arrays), params


@pytest.mark.parametrize(
  ('kind', 'options'), CLASSIFIERS, ids=lambda x: str(x).replace(' ', '')
)
def test_a_classifier_has_the_logits_of_transformers(
  peers, tmp_path, kind, options
):
  theirs = random_model(peers, kind, 'ForSequenceClassification', options)
  theirs.save_pretrained(tmp_path)
  batch = text_batch(types=getattr(theirs.config, 'type_vocab_size', 2))
  assert check_classifier(peers, tmp_path, kind, theirs, batch) > 0.1


def check_classifier(peers, directory, kind, theirs, batch):
  """Compares logits; returns the largest."""
  want = their_output(peers, theirs, batch).logits.numpy()
  (got, _), _ = our_output(directory, kind, batch, theirs.config.num_labels)
  np.testing.assert_allclose(got, want, atol=1e-5)
  return np.abs(want).max()


@pytest.mark.parametrize('options', ALBERT_OPTIONS[:4], ids=str)
def test_pretraining_has_the_logits_of_transformers(peers, tmp_path, options):
  theirs = random_model(peers, 'albert', 'ForPreTraining', options)
  theirs.save_pretrained(tmp_path)
  batch = text_batch(types=theirs.config.type_vocab_size)
  check_pretraining(peers, tmp_path, theirs, batch)
  assert convert.load(tmp_path, 'pretraining').ignored == ()


def check_pretraining(peers, directory, theirs, batch):
  valid = batch[3]
  output = their_output(peers, theirs, batch)
  (logits, _), params = our_output(directory, 'pretraining', batch)
  words = output.prediction_logits.numpy()[valid]
  assert min(np.abs(words).max(), output.sop_logits.abs().max()) > 0.1
  got = np.asarray(logits['words'])[valid]
  np.testing.assert_allclose(got, words, atol=1e-5)
  np.testing.assert_allclose(logits['order'], output.sop_logits, atol=1e-5)
  return params


def test_a_masked_language_model_has_no_order(peers, tmp_path):
  theirs = random_model(peers, 'albert', 'ForMaskedLM')
  theirs.save_pretrained(tmp_path)
  batch = text_batch()
  (logits, _), params = our_output(tmp_path, 'pretraining', batch)
  assert {'pooler', 'sop', 'head'}.isdisjoint(params)
  want = their_output(peers, theirs, batch).logits.numpy()[batch[3]]
  got = np.asarray(logits['words'])[batch[3]]
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize('kind', checkpoints.KINDS)
@pytest.mark.parametrize('num_classes', [1, 3])
def test_transformers_loads_what_is_saved(peers, tmp_path, kind, num_classes):
  _, heads, _, fields = checkpoints.KINDS[kind]
  fields = fields | {'max_positions': 12, 'activation': 'gelu_new'}
  params = checkpoints.fresh_params(kind, num_classes, fields)
  model, _ = checkpoints.model_of(kind, num_classes, fields)
  convert.save_model(tmp_path, model, params)

  def loaded(task, checked=None):
    auto = getattr(peers[1], f'AutoModelFor{task}')
    theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[name] for name in checked or report), report
    return theirs.eval()

  batch = text_batch(vocab_size=10)
  if kind == 'pretraining':
    theirs = loaded('PreTraining')
    check_pretraining(peers, tmp_path, theirs, batch)
    loaded('MaskedLM', ('missing_keys',))
  else:
    theirs = loaded('SequenceClassification')
    assert theirs.config.num_labels == num_classes
    check_classifier(peers, tmp_path, kind, theirs, batch)
  # And what transformers writes of it is the same again.
  theirs.save_pretrained(tmp_path / 'again')
  checkpoints.assert_trees_equal(
    convert.load(tmp_path / 'again', heads).params, params
  )


def test_absent_options_have_the_defaults_of_transformers(peers, tmp_path):
  defaults = peers[1].AlbertConfig().to_dict()
  table = published.ALBERT
  ours = {
    option: table.defaults[name] for option, name in table.options.items()
  }
  assert set(table.options.values()) == set(table.defaults)
  assert ours == {option: defaults[option] for option in table.options}
  assert set(table.rates.values()) < set(defaults)
  (tmp_path / 'config.json').write_text('{"model_type": "albert"}')
  assert convert.read_sizes(tmp_path) == table.defaults


def test_the_pretrained_minilm_has_the_states_of_transformers(peers):
  _, transformers = peers
  try:
    directory = convert.packaged_minilm()
  except FileNotFoundError as error:
    pytest.skip(str(error))
  expected = sizes.BERT.defaults | sizes.BERT.fields('minilm')
  assert convert.read_sizes(directory) == expected
  theirs = transformers.AutoModel.from_pretrained(directory).eval()
  encoded = transformers.AutoTokenizer.from_pretrained(directory)(
    ['a gripping, funny and deeply humane film .', 'Nope.',
     'How do I read a book and a map at the same time, in the rain?'],
    ['the plot is thin', '', 'Is it possible to read two things at once?'],
    padding=True, return_tensors='np',
  )  # fmt: skip
  valid = encoded['attention_mask'].astype(bool)
  batch = (
    encoded['input_ids'], encoded['token_type_ids'], valid.sum(1), valid
  )  # fmt: skip
  want = their_output(peers, theirs, batch)
  states, _ = our_output(directory, 'bert', batch, method='encode')
  last = want.last_hidden_state.numpy()[valid]
  assert np.abs(last).max() > 1
  np.testing.assert_allclose(np.asarray(states)[valid], last, atol=1e-4)
  (_, out), _ = our_output(directory, 'bert', batch)
  np.testing.assert_allclose(out['features'], want.pooler_output, atol=1e-4)


OTHER_HEADS = {
  'bert': 'Model MaskedLM PreTraining NextSentencePrediction MultipleChoice '
  'TokenClassification QuestionAnswering LMHeadModel',
  'distilbert': 'Model MaskedLM MultipleChoice TokenClassification '
  'QuestionAnswering',
  'albert': 'Model MaskedLM PreTraining MultipleChoice TokenClassification '
  'QuestionAnswering',
  'modernbert': 'Model MaskedLM MultipleChoice TokenClassification '
  'QuestionAnswering',
  'roberta': 'Model MaskedLM TokenClassification',
  'pretraining': 'Model MaskedLM SequenceClassification',
}


@pytest.mark.parametrize(
  ('kind', 'task'),
  [(kind, task) for kind, all_ in OTHER_HEADS.items() for task in all_.split()],
)
def test_the_encoder_of_any_head_starts_a_run(
  peers, tmp_path, kind, task, caplog, capsys
):
  family, heads = checkpoints.KINDS.get(kind, (kind, 'classifier'))[:2]
  name = task if 'Model' in task else f'For{task}'
  theirs = random_model(peers, family, name)
  theirs.save_pretrained(tmp_path)
  fields = convert.read_sizes(tmp_path)
  fresh = jax.tree.map(jnp.asarray, checkpoints.fresh_params(kind, 3, fields))
  started = warm_start(fresh, tmp_path)
  source = convert.load(tmp_path, heads)
  for module, leaves in fresh.items():
    want = source.params.get(module, leaves)
    checkpoints.assert_trees_equal(started[module], want)
  # A warning only where much is new.
  printed = capsys.readouterr().out.splitlines()
  lines = [x for x in (*caplog.messages, *printed) if 'loaded' in x]
  assert len(lines) == 1
  new = {*fresh} - {*source.params}
  assert new <= {'pooler', 'head', 'predictions', 'sop'}
  left_out = {*source.ignored, *({*source.params} - {*fresh})}
  assert all(name in lines[0] for name in new | left_out)


@pytest.mark.parametrize('options', MODERN, ids=str)
def test_modern_bert_equals_transformers_in_float64(peers, tmp_path, options):
  name = 'ForSequenceClassification'
  theirs = random_model(peers, 'modernbert', name, options)
  theirs.save_pretrained(tmp_path)
  batch = text_batch(types=1, longest=25)
  output = their_output(peers, theirs, batch)
  states = their_output(peers, theirs.model, batch).last_hidden_state
  with jax.enable_x64(True), jax.numpy_dtype_promotion('standard'):
    params, fields, *_ = convert.load(tmp_path)
    count = theirs.config.num_labels
    model, _ = checkpoints.model_of(
      'modernbert', count, fields | {'dtype': jnp.float64}
    )
    exact = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    inputs = {'params': exact}, *(jnp.asarray(x, 'int32') for x in batch[:3])
    logits, _ = jax.jit(model.apply)(*inputs)
    encode = jax.jit(lambda *args: model.apply(*args, method='encode'))
    ours = np.asarray(encode(*inputs))
  valid = batch[3]
  assert states.abs().max() > 1
  np.testing.assert_allclose(ours[valid], states.numpy()[valid], atol=1e-6)
  np.testing.assert_allclose(logits, output.logits.numpy(), atol=1e-6)
  single = model.clone(dtype=jnp.float32)
  convert.save_model(tmp_path / 'again', single, params)
  again = type(theirs).from_pretrained(tmp_path / 'again').eval()
  same = their_output(peers, again, batch).logits
  np.testing.assert_array_equal(same.numpy(), output.logits.numpy())
