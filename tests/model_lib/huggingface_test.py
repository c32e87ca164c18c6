"""Hugging Face checkpoints: files made by hand, and refusals."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_lib import bert, huggingface

FIELDS = bert.DEFAULTS | {
  'width': 8,
  'depth': 2,
  'mlp_dim': 12,
  'num_heads': 2,
  'vocab_size': 10,
  'max_positions': 7,
}
DISTIL = FIELDS | {'type_vocab_size': 0, 'pooler_activation': 'relu'}
CONFIG = {
  'model_type': 'bert',
  'hidden_size': 8,
  'num_hidden_layers': 2,
  'intermediate_size': 12,
  'num_attention_heads': 2,
  'vocab_size': 10,
  'max_position_embeddings': 7,
}
# Names of Hugging Face with the shapes that PyTorch gives them.
LAYER = {
  'attention.self.query.weight': (8, 8),
  'attention.self.query.bias': (8,),
  'attention.self.key.weight': (8, 8),
  'attention.self.key.bias': (8,),
  'attention.self.value.weight': (8, 8),
  'attention.self.value.bias': (8,),
  'attention.output.dense.weight': (8, 8),
  'attention.output.dense.bias': (8,),
  'attention.output.LayerNorm.weight': (8,),
  'attention.output.LayerNorm.bias': (8,),
  'intermediate.dense.weight': (12, 8),
  'intermediate.dense.bias': (12,),
  'output.dense.weight': (8, 12),
  'output.dense.bias': (8,),
  'output.LayerNorm.weight': (8,),
  'output.LayerNorm.bias': (8,),
}
SHAPES = {
  'bert.embeddings.word_embeddings.weight': (10, 8),
  'bert.embeddings.position_embeddings.weight': (7, 8),
  'bert.embeddings.token_type_embeddings.weight': (2, 8),
  'bert.embeddings.LayerNorm.weight': (8,),
  'bert.embeddings.LayerNorm.bias': (8,),
  **{f'bert.encoder.layer.0.{name}': shape for name, shape in LAYER.items()},
  **{f'bert.encoder.layer.1.{name}': shape for name, shape in LAYER.items()},
  'bert.pooler.dense.weight': (8, 8),
  'bert.pooler.dense.bias': (8,),
  'classifier.weight': (3, 8),
  'classifier.bias': (3,),
}
DISTIL_LAYER = {
  'attention.q_lin.weight': (8, 8),
  'attention.q_lin.bias': (8,),
  'attention.k_lin.weight': (8, 8),
  'attention.k_lin.bias': (8,),
  'attention.v_lin.weight': (8, 8),
  'attention.v_lin.bias': (8,),
  'attention.out_lin.weight': (8, 8),
  'attention.out_lin.bias': (8,),
  'sa_layer_norm.weight': (8,),
  'sa_layer_norm.bias': (8,),
  'ffn.lin1.weight': (12, 8),
  'ffn.lin1.bias': (12,),
  'ffn.lin2.weight': (8, 12),
  'ffn.lin2.bias': (8,),
  'output_layer_norm.weight': (8,),
  'output_layer_norm.bias': (8,),
}
DISTIL_SHAPES = {
  'distilbert.embeddings.word_embeddings.weight': (10, 8),
  'distilbert.embeddings.position_embeddings.weight': (7, 8),
  'distilbert.embeddings.LayerNorm.weight': (8,),
  'distilbert.embeddings.LayerNorm.bias': (8,),
  **{
    f'distilbert.transformer.layer.{index}.{name}': shape
    for index in (0, 1)
    for name, shape in DISTIL_LAYER.items()
  },
  'pre_classifier.weight': (8, 8),
  'pre_classifier.bias': (8,),
  'classifier.weight': (3, 8),
  'classifier.bias': (3,),
}
DTYPES = {
  'float64': 'F64', 'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16',
  'int64': 'I64',
}  # fmt: skip


def random_tensors(shapes=SHAPES):
  """Values that float16 and bfloat16 hold exactly."""
  generator = np.random.default_rng(0)
  return {
    name: (generator.integers(-128, 128, shape) / 128).astype(np.float32)
    for name, shape in shapes.items()
  }


def write_file(path, tensors):
  """A safetensors file by hand: length of the header, header, data."""
  header, data = {}, b''
  for name, array in tensors.items():
    raw = array.tobytes()
    header[name] = {
      'dtype': DTYPES[str(array.dtype)],
      'shape': list(array.shape),
      'data_offsets': [len(data), len(data) + len(raw)],
    }
    data += raw
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + data)


def write(directory, tensors=None, **config):
  """A checkpoint by hand."""
  tensors = random_tensors() if tensors is None else tensors
  write_file(directory / 'model.safetensors', tensors)
  (directory / 'config.json').write_text(json.dumps(CONFIG | config))
  return tensors


def flat(params):
  return {
    '/'.join(key.key for key in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def fresh_params(fields, num_classes=3):
  """Random parameters of our model with these fields."""
  model = bert.BertClassifier(num_classes=num_classes, **fields)
  row, length = jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4)
  shapes = jax.eval_shape(model.init, jax.random.key(0), row, row, length)
  generator = np.random.default_rng(1)
  return jax.tree.map(
    lambda leaf: generator.normal(size=leaf.shape).astype(np.float32),
    nn.unbox(shapes['params']),
  )


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_every_tensor_has_its_place(tmp_path):
  tensors = write(tmp_path)
  params = huggingface.load_params(tmp_path)
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
  checkpoint = huggingface.load(tmp_path)
  assert checkpoint.cast == (dtype,)
  leaves = flat(checkpoint.params)
  assert {leaf.dtype for leaf in leaves.values()} == {np.dtype('float32')}
  np.testing.assert_array_equal(
    leaves['head/kernel'], tensors['classifier.weight'].T
  )
  write(tmp_path, tensors)
  assert huggingface.load(tmp_path).cast == ()


def test_names_without_prefix_and_of_the_first_checkpoints(tmp_path):
  write(tmp_path)
  want = huggingface.load_params(tmp_path)
  renamed = {}
  for name, tensor in random_tensors().items():
    name = name.removeprefix('bert.')
    if 'LayerNorm' in name:
      name = name.replace('weight', 'gamma').replace('bias', 'beta')
    renamed[name] = tensor
  assert 'embeddings.LayerNorm.gamma' in renamed
  write(tmp_path, renamed)
  assert_trees_equal(huggingface.load_params(tmp_path), want)


@pytest.mark.parametrize('tops', [('pooler', 'head'), ('head',)])
def test_pooler_and_head_may_be_absent(tmp_path, tops):
  theirs = {'pooler': 'bert.pooler.', 'head': 'classifier.'}
  tensors = {
    name: tensor
    for name, tensor in random_tensors().items()
    if not name.startswith(tuple(theirs[top] for top in tops))
  }
  write(tmp_path, tensors)
  params = huggingface.load_params(tmp_path)
  assert set(fresh_params(FIELDS)) - set(params) == set(tops)


def test_tensors_of_other_tasks_are_ignored_and_listed(tmp_path):
  others = {
    'cls.predictions.bias': np.zeros(10, np.float32),
    'cls.seq_relationship.weight': np.zeros((2, 8), np.float32),
    'bert.embeddings.position_ids': np.arange(7)[None],
    'qa_outputs.bias': np.zeros(2, np.float32),
  }
  write(tmp_path, others | random_tensors())
  checkpoint = huggingface.load(tmp_path)
  assert set(checkpoint.ignored) == set(others)
  write(tmp_path)
  assert_trees_equal(checkpoint.params, huggingface.load_params(tmp_path))


def test_a_tagger_has_no_head_for_sentences(tmp_path):
  write(tmp_path, architectures=['BertForTokenClassification'])
  checkpoint = huggingface.load(tmp_path)
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
  want = huggingface.load_params(tmp_path)
  shard(tmp_path)
  assert_trees_equal(huggingface.load_params(tmp_path), want)


@pytest.mark.parametrize(
  ('weight_map', 'message'),
  [
    ({'extra': 'model-00003.safetensors'}, '00003.safetensors is missing'),
    ({'extra': '../secret.safetensors'}, r"beside it, got '\.\./secret"),
    ({'extra': '/etc/passwd'}, "beside it, got '/etc/passwd'"),
    ({'extra': 'weights.bin'}, "beside it, got 'weights.bin'"),
    ({'extra': 'model-00001-of-00002.safetensors'}, 'no file has:\n  extra'),
  ],
)
def test_a_wrong_index_is_explained(tmp_path, weight_map, message):
  shard(tmp_path, **weight_map)
  with pytest.raises(ValueError, match=message):
    huggingface.load(tmp_path)


@pytest.mark.parametrize('text', ['{', '[]', '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path, text):
  shard(tmp_path)
  (tmp_path / 'model.safetensors.index.json').write_text(text)
  with pytest.raises(ValueError, match=r'index\.json: expected a JSON object'):
    huggingface.load(tmp_path)


def test_no_weights(tmp_path):
  write(tmp_path)
  (tmp_path / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match=r'neither model\.safetensors nor'):
    huggingface.load(tmp_path)


def test_pickled_weights_are_refused_with_the_fix(tmp_path):
  write(tmp_path)
  (tmp_path / 'model.safetensors').rename(tmp_path / 'pytorch_model.bin')
  with pytest.raises(ValueError, match=r'pickled.*not read.*save_pretrained'):
    huggingface.load(tmp_path)


@pytest.mark.parametrize('length', [0, 4, 100, 2000, -1])
def test_a_truncated_file_is_named(tmp_path, length):
  write(tmp_path)
  path = tmp_path / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:length])
  with pytest.raises(ValueError, match=r'model\.safetensors is damaged'):
    huggingface.load(tmp_path)


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
    huggingface.load(tmp_path)
  assert str(error.value).split('\n  ')[1:] == [
    'classifier.bias: expected shape [3], got nothing',
    'embeddings.word_embeddings.weight: expected shape [10, 8], got shape '
    '[11, 8]',
    'encoder.layer.0.output.dense.bias: expected shape [8], got nothing',
    'encoder.layer.1.intermediate.dense.weight: expected shape [12, 8], got '
    'shape [8, 12]',
    'encoder.layer.2.output.dense.bias: expected nothing, got shape [8]',
  ]


def test_a_weight_of_integers_is_named(tmp_path):
  tensors = random_tensors()
  tensors['classifier.bias'] = np.arange(3)
  write(tmp_path, tensors)
  with pytest.raises(ValueError, match=r'classifier\.bias: expected one of'):
    huggingface.load(tmp_path)


def test_two_names_of_one_parameter(tmp_path):
  tensors = random_tensors()
  name = 'bert.embeddings.LayerNorm.'
  write(tmp_path, tensors | {name + 'gamma': tensors[name + 'weight']})
  with pytest.raises(ValueError, match='two tensors for one parameter'):
    huggingface.load(tmp_path)


def test_what_is_a_checkpoint(tmp_path):
  assert not huggingface.is_checkpoint(tmp_path / 'absent')
  assert not huggingface.is_checkpoint(tmp_path)
  path = tmp_path / 'config.json'
  for text, expected in {
    '{"model": {"width": 8}, "task": "eat"}': False,
    '{': False,
    '{"model_type": "bert"}': True,
    '{"architectures": ["BertModel"]}': True,
  }.items():
    path.write_text(text)
    assert huggingface.is_checkpoint(tmp_path) is expected
  path.unlink()
  (tmp_path / 'pytorch_model.bin').touch()
  assert huggingface.is_checkpoint(tmp_path)


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
  huggingface.save(directory, model_type, fields | rates, params, names)
  raw = (directory / 'model.safetensors').read_bytes()
  header = json.loads(raw[8 : 8 + struct.unpack('<Q', raw[:8])[0]])
  assert header.pop('__metadata__') == {'format': 'pt'}
  assert {name: tuple(entry['shape']) for name, entry in header.items()} == (
    shapes
  )
  assert_trees_equal(huggingface.load_params(directory), params)
  assert huggingface.read_sizes(directory) == fields
  config = json.loads((directory / 'config.json').read_text())
  assert config['id2label'] == {'0': 'no', '1': 'yes', '2': 'perhaps'}
  assert config['label2id'] == {'no': 0, 'yes': 1, 'perhaps': 2}
  rate = {'bert': 'hidden_dropout_prob', 'distilbert': 'dropout'}[model_type]
  assert config[rate] == 0.2


def test_classes_without_names_are_numbered(tmp_path):
  huggingface.save(tmp_path, 'bert', FIELDS, fresh_params(FIELDS))
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
    huggingface.save(
      tmp_path, params=fresh_params(FIELDS), **(arguments | changes)
    )
  assert not list(tmp_path.iterdir())


def test_parameters_that_have_no_place_are_not_saved(tmp_path):
  params = fresh_params(FIELDS)
  params['exit_1'] = {'kernel': np.zeros((8, 3), np.float32)}
  params['pooler']['bias'] = np.zeros(4, np.float32)
  del params['embeddings']['norm']
  with pytest.raises(ValueError, match='params are not those') as error:
    huggingface.save(tmp_path, 'bert', FIELDS, params)
  assert str(error.value).split('\n  ')[1:] == [
    'embeddings/norm/bias: expected shape [8], got nothing',
    'embeddings/norm/scale: expected shape [8], got nothing',
    'exit_1/kernel: expected nothing, got shape [8, 3]',
    'pooler/bias: expected shape [8], got shape [4]',
  ]


def test_a_missing_package_says_what_to_install(monkeypatch):
  monkeypatch.setattr(huggingface, 'MINILM', 'no_such_package')
  with pytest.raises(FileNotFoundError, match=r'no_such_package.*\[pretrained'):
    huggingface.packaged_minilm()


# Against transformers, on tiny random models.
