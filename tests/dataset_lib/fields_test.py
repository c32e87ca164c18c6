"""Field tables: legal values pass, others name the key and the range."""

import math

import ml_collections
import numpy as np
import pytest

from dataset_lib import fields
from dataset_lib.errors import ConfigError

FIELDS = {
  'size': fields.integer(1, 8),
  'share': fields.real(0.0, 1.0, default=0.5),
  'root': fields.text('a folder', default=''),
  'augment': fields.names(('crop', 'flip'), default=()),
}


def check(**config):
  return fields.check_fields(config, FIELDS, 'dataset')


def test_defaults_complete_the_configuration():
  assert check(size=3) == {
    'size': 3,
    'share': 0.5,
    'root': '',
    'augment': (),
  }


def test_a_list_becomes_a_tuple_and_numpy_integers_count():
  complete = check(size=np.int64(8), augment=['flip', 'crop'])
  assert complete['augment'] == ('flip', 'crop')
  assert complete['size'] == 8


def test_a_config_dict_is_a_configuration():
  config = ml_collections.ConfigDict({'size': 2, 'augment': ('flip',)})
  assert fields.check_fields(config, FIELDS, 'd')['augment'] == ('flip',)


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('size', 0),
    ('size', 9),
    ('size', -3),
    ('size', 3.0),
    ('size', '3'),
    ('size', True),
    ('size', None),
    ('share', -0.1),
    ('share', 1.1),
    ('share', math.nan),
    ('share', math.inf),
    ('share', 'half'),
    ('root', 3),
    ('root', None),
    ('augment', 'flip'),
    ('augment', ('flop',)),
    ('augment', ('(flip,)',)),
    ('augment', ('flip', 'flip')),
    ('augment', (3,)),
  ],
)
def test_an_illegal_value_names_key_value_and_range(name, value):
  with pytest.raises(ConfigError) as error:
    check(**{'size': 1, name: value})
  message = str(error.value)
  assert error.value.key == f'dataset.{name}'
  assert message.startswith(f'dataset.{name}: expected ')
  assert FIELDS[name].expected in message
  assert message.endswith(f'got {value!r}')


def test_the_message_reads_like_this():
  with pytest.raises(ConfigError) as error:
    check(size=-3)
  assert str(error.value) == (
    'dataset.size: expected an integer in [1, 8], got -3'
  )


def test_an_unknown_field_gets_a_suggestion():
  with pytest.raises(ConfigError, match=r'did you mean augment\?'):
    check(size=1, augmnet=())


def test_a_missing_field_is_named():
  with pytest.raises(ConfigError, match=r'dataset\.size: .* got .nothing'):
    check()
