"""Saved checkpoints have the names of Hugging Face; refusals write nothing."""

import json
import struct

import numpy as np
import pytest

from model_lib import convert
from tests.model_lib.handmade import (
  DISTIL,
  DISTIL_SHAPES,
  FIELDS,
  SHAPES,
  assert_trees_equal,
  fresh_params,
)


@pytest.mark.parametrize(
  ('model_type', 'fields', 'shapes'),
  [('bert', FIELDS, SHAPES), ('distilbert', DISTIL, DISTIL_SHAPES)],
)
def test_saved_names_are_those_of_transformers(
  tmp_path, model_type, fields, shapes
):
  params = fresh_params(fields)
  names = ['no', 'yes', 'perhaps']
  rates = {'dropout': 0.2, 'attention_dropout': 0.0, 'classifier_dropout': 0.3}
  directory = tmp_path / 'new' / 'model'
  convert.save(directory, model_type, fields | rates, params, names)
  modes = {path.name: path.stat().st_mode for path in directory.iterdir()}
  assert modes['model.safetensors'] == modes['config.json']
  raw = (directory / 'model.safetensors').read_bytes()
  header = json.loads(raw[8 : 8 + struct.unpack('<Q', raw[:8])[0]])
  assert header.pop('__metadata__') == {'format': 'pt'}
  assert {name: tuple(entry['shape']) for name, entry in header.items()} == (
    shapes
  )
  assert_trees_equal(convert.load_params(directory), params)
  assert convert.read_sizes(directory) == fields
  config = json.loads((directory / 'config.json').read_text())
  assert config['id2label'] == {'0': 'no', '1': 'yes', '2': 'perhaps'}
  assert config['label2id'] == {'no': 0, 'yes': 1, 'perhaps': 2}
  rate = {'bert': 'hidden_dropout_prob', 'distilbert': 'dropout'}[model_type]
  assert config[rate] == 0.2


def test_classes_without_names_are_numbered(tmp_path):
  convert.save(tmp_path, 'bert', FIELDS, fresh_params(FIELDS))
  config = json.loads((tmp_path / 'config.json').read_text())
  assert list(config['label2id']) == ['LABEL_0', 'LABEL_1', 'LABEL_2']


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fields': {**FIELDS, 'window': 32}}, r"fields: expected.*'window'"),
    ({'class_names': ['a', 'b']}, r"class_names: expected 3 names, got \['a'"),
  ],
)
def test_what_cannot_be_saved_leaves_no_file(tmp_path, changes, message):
  arguments = {'model_type': 'bert', 'fields': FIELDS, 'class_names': ()}
  with pytest.raises(ValueError, match=message):
    convert.save(tmp_path, params=fresh_params(FIELDS), **(arguments | changes))
  assert not list(tmp_path.iterdir())


def test_parameters_that_have_no_place_are_not_saved(tmp_path):
  params = fresh_params(FIELDS)
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
