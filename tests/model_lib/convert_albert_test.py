"""Hugging Face ALBERT: files made by hand, refusals, what is written."""

import json
import struct

import jax
import numpy as np
import pytest

from model_lib import convert, convert_tables
from tests.model_lib.handmade import assert_trees_equal, random_tensors
from tests.model_lib.handmade_albert import (
  CLASSIFIER,
  CONFIG,
  ENCODER,
  FIELDS,
  LAYERS,
  PRETRAINING,
  TABLE,
  fresh_params,
  param_shapes,
  write,
)

SHAPES = {'classifier': CLASSIFIER, 'pretraining': PRETRAINING}
DECODER = 'predictions.decoder.weight'


def test_every_tensor_of_a_classifier_has_its_place(tmp_path):
  tensors = write(tmp_path)
  checkpoint = convert.load(tmp_path)
  params = checkpoint.params
  assert jax.tree.map(np.shape, params) == param_shapes()
  assert checkpoint.fields == FIELDS
  assert checkpoint.ignored == ()
  mapping = tensors['albert.encoder.embedding_hidden_mapping_in.weight']
  np.testing.assert_array_equal(params['projection']['kernel'], mapping.T)
  pooler = tensors['albert.pooler.weight']
  np.testing.assert_array_equal(params['pooler']['kernel'], pooler.T)
  # Block 2 is the first one of the second group.
  layer, block = LAYERS.format(1, 0), params['block_2']
  for ours, theirs in {
    ('attention', 'out', 'kernel'): 'attention.dense.weight',
    ('attention_norm', 'scale'): 'attention.LayerNorm.weight',
    ('mlp', 'hidden', 'kernel'): 'ffn.weight',
    ('mlp', 'out', 'kernel'): 'ffn_output.weight',
    ('mlp_norm', 'bias'): 'full_layer_layer_norm.bias',
  }.items():
    leaf = block
    for key in ours:
      leaf = leaf[key]
    np.testing.assert_array_equal(leaf, tensors[layer + theirs].T)
  # Every tensor once: none twice, none left out.
  got = [float(leaf.sum()) for leaf in jax.tree.leaves(params)]
  want = [float(tensor.sum()) for tensor in tensors.values()]
  assert sorted(got) == pytest.approx(sorted(want), abs=1e-5)


def test_heads_of_pretraining_are_kept_when_asked_for(tmp_path):
  tensors = write(tmp_path, shapes=PRETRAINING)
  checkpoint = convert.load(tmp_path, heads='pretraining')
  params = checkpoint.params
  assert jax.tree.map(np.shape, params) == param_shapes(heads='pretraining')
  assert checkpoint.ignored == ()
  for ours, theirs in {
    ('predictions', 'bias'): 'predictions.bias',
    ('predictions', 'hidden', 'kernel'): 'predictions.dense.weight',
    ('predictions', 'norm', 'scale'): 'predictions.LayerNorm.weight',
    ('sop', 'kernel'): 'sop_classifier.classifier.weight',
  }.items():
    leaf = params
    for key in ours:
      leaf = leaf[key]
    np.testing.assert_array_equal(leaf, tensors[theirs].T)
  assert set(convert.load_params(tmp_path, 'pretraining')) == set(params)


def test_heads_of_pretraining_are_else_ignored_and_named(tmp_path):
  # Also where the decoder is none that could be kept.
  decoder = {DECODER: np.ones((10, 6), np.float32)}
  write(tmp_path, random_tensors(PRETRAINING) | decoder)
  checkpoint = convert.load(tmp_path)
  others = set(PRETRAINING) - set(ENCODER) | {DECODER}
  assert set(checkpoint.ignored) == others
  assert {'predictions', 'sop', 'head'}.isdisjoint(checkpoint.params)


def test_a_classifier_is_no_head_of_pretraining(tmp_path):
  write(tmp_path, shapes=CLASSIFIER | PRETRAINING)
  checkpoint = convert.load(tmp_path, heads='pretraining')
  assert set(checkpoint.ignored) == {'classifier.weight', 'classifier.bias'}


@pytest.mark.parametrize('absent', [('sop',), ('sop', 'pooler')])
def test_the_order_of_sentences_may_be_absent(tmp_path, absent):
  theirs = {'sop': 'sop_classifier.', 'pooler': 'albert.pooler.'}
  begins = tuple(theirs[name] for name in absent)
  tensors = {
    name: tensor
    for name, tensor in random_tensors(PRETRAINING).items()
    if not name.startswith(begins)
  }
  write(tmp_path, tensors)
  params = convert.load_params(tmp_path, 'pretraining')
  assert set(param_shapes(heads='pretraining')) - set(params) == set(absent)


@pytest.mark.parametrize('left', ['both', 'predictions.', 'decoder.'])
def test_tied_tensors_may_have_one_name_or_both(tmp_path, left):
  tensors = write(tmp_path, shapes=PRETRAINING)
  want = convert.load_params(tmp_path, 'pretraining')
  again = {DECODER: tensors[TABLE]}
  again['predictions.decoder.bias'] = tensors['predictions.bias']
  if left == 'predictions.':
    again = {}
  elif left == 'decoder.':
    del tensors['predictions.bias'], tensors[TABLE]
  write(tmp_path, tensors | again)
  assert_trees_equal(convert.load_params(tmp_path, 'pretraining'), want)


@pytest.mark.parametrize(
  ('name', 'original'),
  [(DECODER, TABLE), ('predictions.decoder.bias', 'predictions.bias')],
)
def test_an_untied_decoder_is_refused(tmp_path, name, original):
  tensors = random_tensors(PRETRAINING)
  changed = tensors[original].copy()
  changed.flat[-1] += 1e-3
  for wrong in (changed, changed[:-1]):
    write(tmp_path, tensors | {name: wrong})
    message = rf'{name}: expected the values of .*, to which it is tied'
    with pytest.raises(ValueError, match=message):
      convert.load(tmp_path, heads='pretraining')


def test_all_that_does_not_fit_is_listed(tmp_path):
  tensors = random_tensors(PRETRAINING)
  del tensors['predictions.bias']
  del tensors[LAYERS.format(0, 1) + 'ffn.bias']
  tensors[LAYERS.format(2, 0) + 'ffn.bias'] = np.zeros(12, np.float32)
  tensors['albert.encoder.embedding_hidden_mapping_in.weight'] = np.zeros(
    (6, 8), np.float32
  )
  tensors['sop_classifier.classifier.bias'] = np.zeros(3, np.float32)
  write(tmp_path, tensors)
  with pytest.raises(ValueError, match='does not hold what') as error:
    convert.load(tmp_path, heads='pretraining')
  assert str(error.value).split('\n  ')[1:] == [
    'albert.encoder.albert_layer_groups.0.albert_layers.1.ffn.bias: expected '
    'shape [12], got nothing',
    'albert.encoder.albert_layer_groups.2.albert_layers.0.ffn.bias: expected '
    'nothing, got shape [12]',
    'albert.encoder.embedding_hidden_mapping_in.weight: expected shape [8, 6], '
    'got shape [6, 8]',
    'predictions.bias: expected shape [10], got nothing',
    'sop_classifier.classifier.bias: expected shape [2], got shape [3]',
  ]


def test_an_encoder_has_no_heads_of_pretraining(tmp_path):
  write(tmp_path, shapes=ENCODER)
  assert set(param_shapes()) - set(convert.load_params(tmp_path)) == {'head'}
  with pytest.raises(ValueError, match=r'predictions\.bias: expected shape'):
    convert.load(tmp_path, heads='pretraining')


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'embedding_size': 6.0}, 'embedding_size: expected a value such as 128'),
    ({'gap_size': 2}, 'gap_size: expected 0, the only supported value'),
    ({'net_structure_type': 1}, 'net_structure_type: expected 0'),
    ({'num_memory_blocks': 1}, 'num_memory_blocks: expected 0'),
    ({'down_scale_factor': 2}, 'down_scale_factor: expected 1'),
    ({'position_embedding_type': 'relative_key'}, "expected 'absolute'"),
  ],
)
def test_options_that_are_not_supported_are_named(tmp_path, options, message):
  write(tmp_path, **options)
  with pytest.raises(ValueError, match=message):
    convert.read_sizes(tmp_path)
  with pytest.raises(ValueError, match=message):
    convert.load(tmp_path)


def test_a_published_configuration_is_read(tmp_path):
  """That of albert-base-v2, as it is published."""
  options = {
    'architectures': ['AlbertForMaskedLM'], 'model_type': 'albert',
    'attention_probs_dropout_prob': 0, 'bos_token_id': 2,
    'classifier_dropout_prob': 0.1, 'down_scale_factor': 1,
    'embedding_size': 128, 'eos_token_id': 3, 'gap_size': 0,
    'hidden_act': 'gelu_new', 'hidden_dropout_prob': 0, 'hidden_size': 768,
    'initializer_range': 0.02, 'inner_group_num': 1, 'intermediate_size': 3072,
    'layer_norm_eps': 1e-12, 'max_position_embeddings': 512,
    'net_structure_type': 0, 'num_attention_heads': 12, 'num_hidden_groups': 1,
    'num_hidden_layers': 12, 'num_memory_blocks': 0, 'pad_token_id': 0,
    'type_vocab_size': 2, 'vocab_size': 30000,
  }  # fmt: skip
  (tmp_path / 'config.json').write_text(json.dumps(options))
  base = {'width': 768, 'mlp_dim': 3072, 'num_heads': 12}
  assert convert.read_sizes(tmp_path) == convert_tables.ALBERT.defaults | base


@pytest.mark.parametrize('heads', ['masked', '', 'classifiers'])
def test_unknown_heads_are_named(tmp_path, heads):
  write(tmp_path)
  message = r"heads: expected one of \('classifier', 'pretraining'\)"
  with pytest.raises(ValueError, match=message):
    convert.load(tmp_path, heads)


def test_bert_has_no_heads_of_pretraining_here(tmp_path):
  (tmp_path / 'config.json').write_text('{"model_type": "bert"}')
  message = r"heads: expected one of \('classifier',\), got 'pretraining'"
  with pytest.raises(ValueError, match=message):
    convert.load(tmp_path, 'pretraining')


def header(directory):
  raw = (directory / 'model.safetensors').read_bytes()
  entries = json.loads(raw[8 : 8 + struct.unpack('<Q', raw[:8])[0]])
  assert entries.pop('__metadata__') == {'format': 'pt'}
  return {name: tuple(entry['shape']) for name, entry in entries.items()}


@pytest.mark.parametrize('heads', ['classifier', 'pretraining'])
def test_saved_names_are_those_of_transformers(tmp_path, heads):
  params = fresh_params(heads=heads)
  rates = {'dropout': 0.2, 'attention_dropout': 0.0, 'classifier_dropout': 0.3}
  fields = FIELDS | {'activation': 'relu', 'norm_epsilon': 1e-6}
  convert.save(tmp_path, 'albert', fields | rates, params, heads=heads)
  assert header(tmp_path) == SHAPES[heads]
  assert_trees_equal(convert.load_params(tmp_path, heads), params)
  assert convert.read_sizes(tmp_path) == fields
  config = json.loads((tmp_path / 'config.json').read_text())
  assert CONFIG.items() <= config.items()
  assert config['hidden_dropout_prob'] == 0.2
  assert config['attention_probs_dropout_prob'] == 0.0
  assert config['classifier_dropout_prob'] == 0.3
  classes = {
    'classifier': 'AlbertForSequenceClassification',
    'pretraining': 'AlbertForPreTraining',
  }
  assert config['architectures'] == [classes[heads]]
  assert ('id2label' in config) is (heads == 'classifier')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fields': FIELDS | {'depth': 3}}, r"fields: expected.*'depth'"),
    ({'class_names': ['a']}, r"class_names: expected 0 names, got \['a'\]"),
    ({'heads': 'classifier'}, 'not those of a AlbertForSequenceClassification'),
    ({'heads': 'nsp'}, "heads: expected one of .*, got 'nsp'"),
    ({'model_type': 'bert'}, r"heads: expected one of \('classifier',\)"),
  ],
)
def test_what_cannot_be_saved_leaves_no_file(tmp_path, changes, message):
  arguments = {
    'model_type': 'albert',
    'fields': FIELDS,
    'params': fresh_params(heads='pretraining'),
    'heads': 'pretraining',
  }
  with pytest.raises(ValueError, match=message):
    convert.save(tmp_path, **(arguments | changes))
  assert not list(tmp_path.iterdir())
