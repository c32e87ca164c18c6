"""Hugging Face checkpoints: files made by hand, and refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import convert
from tests.model_lib.handmade import (
  FIELDS,
  assert_trees_equal,
  fresh_params,
  random_tensors,
  write,
  write_file,
)


def flat(params):
  return {
    '/'.join(key.key for key in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def test_every_tensor_has_its_place(tmp_path):
  tensors = write(tmp_path)
  params = convert.load_params(tmp_path)
  assert jax.tree.map(np.shape, params) == jax.tree.map(
    np.shape, fresh_params(FIELDS)
  )
  got = flat(params)
  layer = 'bert.encoder.layer.1.'
  for ours, theirs in {
    'embeddings/word/embedding': 'bert.embeddings.word_embeddings.weight',
    'embeddings/norm/scale': 'bert.embeddings.LayerNorm.weight',
    'block_1/attention/query/bias': layer + 'attention.self.query.bias',
    'block_1/mlp_norm/bias': layer + 'output.LayerNorm.bias',
    'head/bias': 'classifier.bias',
  }.items():
    np.testing.assert_array_equal(got[ours], tensors[theirs])
  for ours, theirs in {
    'block_1/attention/value/kernel': layer + 'attention.self.value.weight',
    'block_1/attention/out/kernel': layer + 'attention.output.dense.weight',
    'block_1/mlp/hidden/kernel': layer + 'intermediate.dense.weight',
    'pooler/kernel': 'bert.pooler.dense.weight',
    'head/kernel': 'classifier.weight',
  }.items():
    np.testing.assert_array_equal(got[ours], tensors[theirs].T)
  # Every tensor once: none twice, none left out.
  assert sorted(float(leaf.sum()) for leaf in got.values()) == pytest.approx(
    sorted(float(tensor.sum()) for tensor in tensors.values()), abs=1e-5
  )


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float64'])
def test_other_floats_are_cast_and_reported(tmp_path, dtype):
  tensors = random_tensors()
  name = 'bert.embeddings.word_embeddings.weight'
  halved = {
    key: value.astype(jnp.dtype(dtype)) for key, value in tensors.items()
  }
  write(tmp_path, halved | {name: tensors[name]})
  checkpoint = convert.load(tmp_path)
  assert checkpoint.cast == (dtype,)
  leaves = flat(checkpoint.params)
  assert {leaf.dtype for leaf in leaves.values()} == {np.dtype('float32')}
  np.testing.assert_array_equal(
    leaves['head/kernel'], tensors['classifier.weight'].T
  )
  write(tmp_path, tensors)
  assert convert.load(tmp_path).cast == ()


def test_names_without_prefix_and_of_the_first_checkpoints(tmp_path):
  write(tmp_path)
  want = convert.load_params(tmp_path)
  renamed = {}
  for name, tensor in random_tensors().items():
    name = name.removeprefix('bert.')
    if 'LayerNorm' in name:
      name = name.replace('weight', 'gamma').replace('bias', 'beta')
    renamed[name] = tensor
  assert 'embeddings.LayerNorm.gamma' in renamed
  write(tmp_path, renamed)
  assert_trees_equal(convert.load_params(tmp_path), want)


@pytest.mark.parametrize('tops', [('pooler', 'head'), ('head',)])
def test_pooler_and_head_may_be_absent(tmp_path, tops):
  theirs = {'pooler': 'bert.pooler.', 'head': 'classifier.'}
  tensors = {
    name: tensor
    for name, tensor in random_tensors().items()
    if not name.startswith(tuple(theirs[top] for top in tops))
  }
  write(tmp_path, tensors)
  params = convert.load_params(tmp_path)
  assert set(fresh_params(FIELDS)) - set(params) == set(tops)


def test_tensors_of_other_tasks_are_ignored_and_listed(tmp_path):
  others = {
    'cls.predictions.bias': np.zeros(10, np.float32),
    'cls.seq_relationship.weight': np.zeros((2, 8), np.float32),
    'bert.embeddings.position_ids': np.arange(7)[None],
    'qa_outputs.bias': np.zeros(2, np.float32),
  }
  write(tmp_path, others | random_tensors())
  checkpoint = convert.load(tmp_path)
  assert set(checkpoint.ignored) == set(others)
  write(tmp_path)
  assert_trees_equal(checkpoint.params, convert.load_params(tmp_path))


def test_a_tagger_has_no_head_for_sentences(tmp_path):
  write(tmp_path, architectures=['BertForTokenClassification'])
  checkpoint = convert.load(tmp_path)
  assert set(checkpoint.ignored) == {'classifier.weight', 'classifier.bias'}
  assert 'head' not in checkpoint.params


def shard(directory, **weight_map):
  """The hand-made checkpoint in two files with an index."""
  tensors = write(directory)
  (directory / 'model.safetensors').unlink()
  names = list(tensors)
  files = {
    'model-00001-of-00002.safetensors': names[:9],
    'model-00002-of-00002.safetensors': names[9:],
  }
  for file, part in files.items():
    write_file(directory / file, {name: tensors[name] for name in part})
  index = {name: file for file, part in files.items() for name in part}
  text = json.dumps({'metadata': {}, 'weight_map': index | weight_map})
  (directory / 'model.safetensors.index.json').write_text(text)


def test_shards_are_one_checkpoint(tmp_path):
  write(tmp_path)
  want = convert.load_params(tmp_path)
  shard(tmp_path)
  assert_trees_equal(convert.load_params(tmp_path), want)


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


def test_what_is_a_checkpoint(tmp_path):
  assert not convert.is_checkpoint(tmp_path / 'absent')
  assert not convert.is_checkpoint(tmp_path)
  path = tmp_path / 'config.json'
  for text, expected in {
    '{"model": {"width": 8}, "task": "eat"}': False,
    '{': False,
    '{"model_type": "bert"}': True,
    '{"architectures": ["BertModel"]}': True,
  }.items():
    path.write_text(text)
    assert convert.is_checkpoint(tmp_path) is expected
  path.unlink()
  (tmp_path / 'pytorch_model.bin').touch()
  assert convert.is_checkpoint(tmp_path)


def test_a_missing_package_says_what_to_install(monkeypatch):
  monkeypatch.setattr(convert, 'MINILM', 'no_such_package')
  with pytest.raises(FileNotFoundError, match=r'no_such_package.*\[pretrained'):
    convert.packaged_minilm()
