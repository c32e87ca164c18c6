"""Hugging Face checkpoints that are refused, each with the reason."""

import os
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import MissingDataError
from model_lib import convert, convert_tables
from tests.model_lib import checkpoints
from train_lib.warm_start import warm_start

CONFIG, WEIGHTS = 'config.json', 'model.safetensors'
INDEX, SECOND = f'{WEIGHTS}.index.json', 'model-00001-of-00002.safetensors'


def pipe(path):
  path.unlink()
  os.mkfifo(path)


def link(path):
  path.unlink()
  path.symlink_to('/dev/zero')


def sparse(path, size=2**40):
  with path.open('wb') as file:
    file.truncate(size)


def renamed(name):
  return lambda path: path.rename(path.with_name(name))


@pytest.mark.parametrize(
  ('name', 'change', 'message'),
  [
    (CONFIG, os.unlink, r'config\.json is missing'),
    (CONFIG, '{"model_type": ', r'config\.json is damaged'),
    (CONFIG, '[1]', 'expected an object, got list'),
    (CONFIG, lambda path: path.write_text('[' * 10**6), 'json is damaged'),
    (CONFIG, '{}', 'model_type: expected one of .*, got None'),
    *[
      (WEIGHTS, length, r'model\.safetensors is damaged')
      for length in (0, 4, 100, 2000, -1)
    ],
    (WEIGHTS, renamed('other.bin'), r'neither model\.safetensors nor'),
    (WEIGHTS, renamed('pytorch_model.bin'),
     r'pickled.*not read.*save_pretrained'),
    *[
      (name, change, f'{name} is damaged.*{message}')
      for name in (CONFIG, WEIGHTS)
      for change, message in (
        (pipe, 'not a regular file'), (link, 'not a regular file'),
        (sparse, 'expected at most'),
      )
    ],
    (INDEX, '{', r'index\.json is damaged'),
    (INDEX, '[]', r'index\.json is damaged \(expected an object'),
    (INDEX, '{"weight_map": 3}', 'json: weight_map: expected an object'),
  ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, name, change, message):
  (checkpoints.shard if name == INDEX else checkpoints.write)(tmp_path)
  path = tmp_path / name
  if isinstance(change, int):
    path.write_bytes(path.read_bytes()[:change])
  elif isinstance(change, str):
    path.write_text(change)
  else:
    change(path)
  with pytest.raises((ValueError, MissingDataError), match=message):
    convert.load(tmp_path)


@pytest.mark.parametrize(
  ('file', 'message'),
  [
    ('model-00003.safetensors', '00003.safetensors is missing'),
    ('../secret.safetensors', r"in its directory, got '\.\./secret"),
    ('/etc/passwd', "directory, got '/etc/passwd'"),
    ('weights.bin', "directory, got 'weights.bin'"),
    (SECOND, 'no file has:\n  extra'),
  ],
)
def test_a_wrong_index_is_explained(tmp_path, file, message):
  checkpoints.shard(tmp_path, extra=file)
  with pytest.raises((ValueError, MissingDataError), match=message):
    convert.load(tmp_path)


def test_all_that_does_not_fit_is_listed(tmp_path):
  tensors = checkpoints.random_tensors()
  blocks = 'bert.encoder.layer.'
  tensors[blocks + '2.output.dense.bias'] = np.zeros(8, np.float32)
  del tensors[blocks + '0.output.dense.bias'], tensors['classifier.bias']
  checkpoints.write(tmp_path, tensors)
  with pytest.raises(ValueError, match='other parameters than') as error:
    convert.load(tmp_path)
  assert str(error.value).split('\n  ')[1:] == [
    f'{blocks}0.output.dense.bias: missing', 'classifier.bias: missing',
    f'{blocks}2.output.dense.bias: not supported',
  ]  # fmt: skip


def test_a_tensor_of_another_shape_starts_no_run(tmp_path):
  tensors, block = checkpoints.random_tensors(), 'bert.encoder.layer.0.'
  tensors[f'{block}output.dense.bias'] = np.zeros(9, np.float32)
  tensors[f'{block}intermediate.dense.weight'] = np.zeros((8, 12), np.float32)
  checkpoints.write(tmp_path, tensors)
  fresh = jax.tree.map(jnp.asarray, checkpoints.fresh_params())
  with pytest.raises(ValueError, match='warm_start') as error:
    warm_start(fresh, tmp_path)
  for line in (
    'block_0/mlp/out/bias: expected float32[8], got float32[9]',
    'block_0/mlp/hidden/kernel: expected float32[8, 12], got float32[12, 8]',
  ):
    assert line in str(error.value)


NORM = 'bert.embeddings.LayerNorm.'
TIED = '{}: expected the values of .*, to which it is tied'


def changed(tensor):
  tensor = tensor.copy()
  tensor.flat[-1] += 1e-3
  return tensor


@pytest.mark.parametrize(
  ('kind', 'name', 'of', 'change', 'message'),
  [
    *[
      ('bert', 'classifier.bias', 'classifier.bias',
       lambda bias, value=value: np.where([1, 0, 1], bias, np.float32(value)),
       r'is damaged:\n  classifier\.bias: expected finite')
      for value in (np.nan, np.inf)
    ],
    ('bert', 'classifier.bias', 'classifier.bias', lambda _: np.arange(3),
     r'classifier\.bias: expected finite'),
    ('bert', NORM + 'gamma', NORM + 'weight', np.copy,
     'two tensors for one parameter'),
    ('pretraining', checkpoints.DECODER, checkpoints.TABLE, changed, TIED),
    ('pretraining', checkpoints.DECODER, checkpoints.TABLE, lambda x: x[:-1],
     TIED),
    ('pretraining', 'predictions.decoder.bias', 'predictions.bias', changed,
     TIED),
  ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(tmp_path, kind, name, of, change, message):
  tensors = checkpoints.random_tensors(kind)
  checkpoints.write(tmp_path, tensors | {name: change(tensors[of])}, kind)
  with pytest.raises(ValueError, match=message.format(name)):
    convert.load(tmp_path, checkpoints.KINDS[kind][1])


ONLY = (
  'model_type position_embedding_type is_decoder is_encoder_decoder '
  'add_cross_attention quantization_config'
)
ALBERT = ' net_structure_type gap_size num_memory_blocks down_scale_factor'


@pytest.mark.parametrize(
  ('kind', 'names'),
  [('bert', ONLY), ('distilbert', ONLY), ('albert', ONLY + ALBERT)],
)
def test_unsupported_options_are_named(tmp_path, kind, names):
  for option in (*names.split(), *convert_tables.find(kind).options):
    checkpoints.write(tmp_path, kind=kind, **{option: [1]})
    message = rf'json: {option}: expected .*\[1\]'
    with pytest.raises(ValueError, match=message):
      convert.load(tmp_path)


def test_a_sparse_file_is_not_read(tmp_path):
  checkpoints.write(tmp_path)
  sparse(tmp_path / WEIGHTS, 2**33)
  tracemalloc.start()
  with pytest.raises(ValueError, match='damaged or no safetensors'):
    convert.load(tmp_path, 'classifier')
  assert tracemalloc.get_traced_memory()[1] < 2**27
  tracemalloc.stop()


def test_heads_that_are_not_there_are_named(tmp_path):
  for kind, heads in (
    ('albert', 'masked'), ('albert', ''), ('bert', 'pretraining'),
  ):  # fmt: skip
    checkpoints.write(tmp_path, kind=kind)
    with pytest.raises(ValueError, match=r"^heads: expected one of \('classi"):
      convert.load(tmp_path, heads)


@pytest.mark.parametrize(
  ('kind', 'fields', 'message', 'arguments'),
  [
    ('distilbert', {'pooler_activation': 'tanh'},
     "pooler_activation: expected 'relu', which distilbert", {}),
    ('bert', {'pooler_activation': 'relu'}, "expected 'tanh'", {}),
    ('bert', {}, r"class_names: expected 3 names, got \['a'",
     {'class_names': ['a', 'b']}),
    ('bert', {}, 'label_kind: expected one of', {'label_kind': 'tasks'}),
    ('bert', {}, '_test.py: expected a tokenizer.json',
     {'tokenizer': __file__}),
    ('bert', {'depth': 3}, 'block_2/mlp/out/bias: missing', {}),
    ('bert', {'vocab_size': 11},
     r'word/embedding: expected the shape of .*\[11, 8\], got \[10, 8\]', {}),
    ('albert', {}, 'AlbertForSequenceClassification has other', {}),
    ('bert', {}, 'neck/kernel: not supported',
     {'params': checkpoints.fresh_params() | {'neck': {'kernel': 1}}}),
  ],
)  # fmt: skip
def test_a_refused_save_leaves_no_file(
  tmp_path, kind, fields, message, arguments
):
  model, _ = checkpoints.model_of(kind, 3, checkpoints.KINDS[kind][3] | fields)
  arguments = {'params': checkpoints.fresh_params()} | arguments
  with pytest.raises(ValueError, match=message):
    convert.save_model(tmp_path, model, **arguments)
  assert not list(tmp_path.iterdir())
