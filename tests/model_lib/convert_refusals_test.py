"""Hugging Face checkpoints that are refused, each with the reason."""

import numpy as np
import pytest

from model_lib import convert
from tests.model_lib.checkpoints import (
  ALBERT,
  FIELDS,
  LAYERS,
  PRETRAINING,
  fresh_params,
  random_tensors,
  write,
)
from tests.model_lib.convert_test import shard

DECODER = 'predictions.decoder.weight'
TABLE = 'albert.embeddings.word_embeddings.weight'


@pytest.mark.parametrize(
  ('weight_map', 'message'),
  [
    ({'extra': 'model-00003.safetensors'}, '00003.safetensors is missing'),
    ({'extra': '../secret.safetensors'}, r"in its directory, got '\.\./secret"),
    ({'extra': '/etc/passwd'}, "directory, got '/etc/passwd'"),
    ({'extra': 'weights.bin'}, "directory, got 'weights.bin'"),
    ({'extra': 'model-00001-of-00002.safetensors'}, 'no file has:\n  extra'),
  ],
)
def test_a_wrong_index_is_explained(tmp_path, weight_map, message):
  shard(tmp_path, **weight_map)
  with pytest.raises(ValueError, match=message):
    convert.load(tmp_path)


@pytest.mark.parametrize('text', ['{', '[]', '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path, text):
  shard(tmp_path)
  (tmp_path / 'model.safetensors.index.json').write_text(text)
  with pytest.raises(ValueError, match=r'index\.json: expected a JSON object'):
    convert.load(tmp_path)


def test_no_weights(tmp_path):
  write(tmp_path)
  (tmp_path / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match=r'neither model\.safetensors nor'):
    convert.load(tmp_path)


def test_pickled_weights_are_refused_with_the_fix(tmp_path):
  write(tmp_path)
  (tmp_path / 'model.safetensors').rename(tmp_path / 'pytorch_model.bin')
  with pytest.raises(ValueError, match=r'pickled.*not read.*save_pretrained'):
    convert.load(tmp_path)


@pytest.mark.parametrize('length', [0, 4, 100, 2000, -1])
def test_a_truncated_file_is_named(tmp_path, length):
  write(tmp_path)
  path = tmp_path / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:length])
  with pytest.raises(ValueError, match=r'model\.safetensors is damaged'):
    convert.load(tmp_path)


def test_all_that_does_not_fit_is_listed(tmp_path):
  tensors = random_tensors()
  del tensors['bert.encoder.layer.0.output.dense.bias']
  del tensors['classifier.bias']
  tensors['bert.embeddings.word_embeddings.weight'] = np.zeros(
    (11, 8), np.float32
  )
  tensors['bert.encoder.layer.1.intermediate.dense.weight'] = np.zeros(
    (8, 12), np.float32
  )
  tensors['bert.encoder.layer.2.output.dense.bias'] = np.zeros(8, np.float32)
  write(tmp_path, tensors)
  with pytest.raises(ValueError, match='does not hold what') as error:
    convert.load(tmp_path)
  assert str(error.value).split('\n  ')[1:] == [
    'bert.embeddings.word_embeddings.weight: expected shape [10, 8], got shape '
    '[11, 8]',
    'bert.encoder.layer.0.output.dense.bias: expected shape [8], got nothing',
    'bert.encoder.layer.1.intermediate.dense.weight: expected shape [12, 8], '
    'got shape [8, 12]',
    'bert.encoder.layer.2.output.dense.bias: expected nothing, got shape [8]',
    'classifier.bias: expected shape [3], got nothing',
  ]


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path, value):
  tensors = random_tensors()
  tensors['classifier.bias'][1] = value
  write(tmp_path, tensors)
  message = r'is damaged:\n  classifier\.bias: expected finite'
  with pytest.raises(ValueError, match=message):
    convert.load(tmp_path)


def test_a_weight_of_integers_is_named(tmp_path):
  tensors = random_tensors()
  tensors['classifier.bias'] = np.arange(3)
  write(tmp_path, tensors)
  with pytest.raises(ValueError, match=r'classifier\.bias: expected finite'):
    convert.load(tmp_path)


def test_two_names_of_one_parameter(tmp_path):
  tensors = random_tensors()
  name = 'bert.embeddings.LayerNorm.'
  write(tmp_path, tensors | {name + 'gamma': tensors[name + 'weight']})
  with pytest.raises(ValueError, match='two tensors for one parameter'):
    convert.load(tmp_path)


@pytest.mark.parametrize(
  ('name', 'original'),
  [(DECODER, TABLE), ('predictions.decoder.bias', 'predictions.bias')],
)
def test_an_untied_decoder_is_refused(tmp_path, name, original):
  tensors = random_tensors(PRETRAINING)
  changed = tensors[original].copy()
  changed.flat[-1] += 1e-3
  for wrong in (changed, changed[:-1]):
    write(tmp_path, tensors | {name: wrong}, 'albert')
    message = rf'{name}: expected the values of .*, to which it is tied'
    with pytest.raises(ValueError, match=message):
      convert.load(tmp_path, heads='pretraining')


def test_all_that_does_not_fit_albert_is_listed(tmp_path):
  tensors = random_tensors(PRETRAINING)
  del tensors['predictions.bias']
  del tensors[LAYERS.format(0, 1) + 'ffn.bias']
  tensors[LAYERS.format(2, 0) + 'ffn.bias'] = np.zeros(12, np.float32)
  tensors['albert.encoder.embedding_hidden_mapping_in.weight'] = np.zeros(
    (6, 8), np.float32
  )
  tensors['sop_classifier.classifier.bias'] = np.zeros(3, np.float32)
  write(tmp_path, tensors, 'albert')
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


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'model_type': 'roberta'}, r"model_type: expected one of \('bert', 'dist"),
    ({'position_embedding_type': 'relative_key'}, "type: expected 'absolute'"),
    ({'is_decoder': True}, 'is_decoder: expected False'),
    ({'add_cross_attention': True}, 'add_cross_attention: expected False'),
    ({'pruned_heads': {'0': [1]}}, 'pruned_heads: expected {}'),
    ({'quantization_config': {}}, 'quantization_config: expected None'),
    (
      {'hidden_size': '8'},
      "hidden_size: expected a value such as 768, got '8'",
    ),
    ({'vocab_size': True}, 'vocab_size: expected a value such as 30522'),
    ({'layer_norm_eps': 0}, 'layer_norm_eps: expected a value such as 1e-12'),
  ],
)
def test_options_that_are_not_supported_are_named(tmp_path, options, message):
  write(tmp_path, **options)
  with pytest.raises(ValueError, match=message):
    convert.read_sizes(tmp_path)
  (tmp_path / 'model.safetensors').touch()
  with pytest.raises(ValueError, match=message):
    convert.load(tmp_path)


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
def test_unsupported_options_of_albert_are_named(tmp_path, options, message):
  write(tmp_path, kind='albert', **options)
  with pytest.raises(ValueError, match=message):
    convert.read_sizes(tmp_path)
  with pytest.raises(ValueError, match=message):
    convert.load(tmp_path)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (None, r'config\.json is missing'),
    ('{"model_type": ', r'config\.json is not JSON'),
    ('[1]', 'expected a JSON object'),
    ('{}', 'model_type: expected one of .*, got None'),
  ],
)
def test_a_broken_config_is_explained(tmp_path, text, message):
  write(tmp_path)
  path = tmp_path / 'config.json'
  path.unlink()
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match=message):
    convert.read_sizes(tmp_path)
  (tmp_path / 'model.safetensors').touch()
  assert convert.is_checkpoint(tmp_path)


@pytest.mark.parametrize(
  ('kind', 'heads'),
  [('albert', 'masked'), ('albert', ''), ('bert', 'pretraining')],
)
def test_unknown_heads_are_named(tmp_path, kind, heads):
  write(tmp_path, kind=kind)
  with pytest.raises(ValueError, match=r"^heads: expected one of \('classifie"):
    convert.load(tmp_path, heads)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'roberta'}, r"model_type: expected one of .*'roberta'"),
    ({'model_type': 'distilbert'}, 'type_vocab_size: expected 0, which dist'),
    ({'fields': {**FIELDS, 'window': 32}}, r"fields: expected.*'window'"),
    ({'fields': {'width': 8}}, r"fields: expected.*got \['width'\]"),
    ({'fields': {**FIELDS, 'pooler_activation': 'relu'}}, "expected 'tanh'"),
    ({'class_names': ['a', 'b']}, r"class_names: expected 3 names, got \['a'"),
    ({'heads': 'pretraining'}, r"heads: expected one of \('classifier',\)"),
    (
      {'model_type': 'albert', 'fields': ALBERT},
      'not those of a AlbertForSequenceClassification',
    ),
  ],
)
def test_what_cannot_be_saved_leaves_no_file(tmp_path, changes, message):
  arguments = {'model_type': 'bert', 'fields': FIELDS}
  with pytest.raises(ValueError, match=message):
    convert.save(tmp_path, params=fresh_params(), **(arguments | changes))
  assert not list(tmp_path.iterdir())


def test_parameters_that_have_no_place_are_not_saved(tmp_path):
  params = fresh_params()
  params['exit_1'] = {'kernel': np.zeros((8, 3), np.float32)}
  params['pooler']['bias'] = np.zeros(4, np.float32)
  del params['embeddings']['norm']
  with pytest.raises(ValueError, match='params are not those') as error:
    convert.save(tmp_path, 'bert', FIELDS, params)
  assert str(error.value).split('\n  ')[1:] == [
    'embeddings/norm/bias: expected shape [8], got nothing',
    'embeddings/norm/scale: expected shape [8], got nothing',
    'exit_1/kernel: expected nothing, got shape [8, 3]',
    'pooler/bias: expected shape [8], got shape [4]',
  ]
