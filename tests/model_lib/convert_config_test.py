"""Options of config.json: read, refused by name, and written."""

import json

import pytest

from model_lib import convert, convert_files, sizes
from tests.model_lib.handmade import CONFIG, FIELDS


def write(directory, **options):
  (directory / 'config.json').write_text(json.dumps(CONFIG | options))


def test_sizes_are_read(tmp_path):
  write(tmp_path, hidden_act='relu', layer_norm_eps=1e-6, type_vocab_size=1)
  assert convert.read_sizes(tmp_path) == FIELDS | {
    'activation': 'relu',
    'norm_epsilon': 1e-6,
    'type_vocab_size': 1,
  }


def test_absent_options_have_the_defaults(tmp_path):
  path = tmp_path / 'config.json'
  path.write_text('{"model_type": "bert"}')
  assert convert.read_sizes(tmp_path) == sizes.BERT.defaults
  path.write_text('{"model_type": "distilbert"}')
  expected = sizes.BERT.defaults | sizes.BERT.fields('distil')
  assert convert.read_sizes(tmp_path) == expected


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


def test_options_of_no_consequence_are_left_alone(tmp_path):
  write(
    tmp_path, position_embedding_type='absolute', is_decoder=False,
    pruned_heads={}, quantization_config=None, problem_type='regression',
    chunk_size_feed_forward=4, pad_token_id=3, torch_dtype='float16',
  )  # fmt: skip
  assert convert.read_sizes(tmp_path) == FIELDS


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (None, r'config\.json is missing'),
    ('{"model_type": ', r'config\.json is not JSON'),
    ('[1]', 'expected a JSON object'),
    ('{}', 'model_type: expected one of .*may lack it, got None'),
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
  ('changes', 'message'),
  [
    ({'model_type': 'roberta'}, r"model_type: expected one of .*'roberta'"),
    ({'model_type': 'distilbert'}, 'type_vocab_size: expected 0, which dist'),
    ({'fields': {**FIELDS, 'window': 32}}, r"fields: expected.*'window'"),
    ({'fields': {'width': 8}}, r"fields: expected.*got \['width'\]"),
    ({'fields': {**FIELDS, 'pooler_activation': 'relu'}}, "expected 'tanh'"),
  ],
)
def test_what_cannot_be_written_names_the_reason(changes, message):
  arguments = {'model_type': 'bert', 'fields': FIELDS, 'class_names': ['a']}
  with pytest.raises(ValueError, match=message):
    convert_files.from_fields(**(arguments | changes))


@pytest.mark.parametrize('model_type', ['bert', 'distilbert'])
def test_what_is_written_reads_back(model_type):
  fields = FIELDS | {'activation': 'gelu_new'}
  if model_type == 'distilbert':
    fields |= {'type_vocab_size': 0, 'pooler_activation': 'relu'}
  config = convert_files.from_fields(model_type, fields, ['a', 'b'])
  assert convert_files.to_fields(config, 'here') == fields
