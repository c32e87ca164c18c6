"""Published ViTs against their equations, timm and transformers."""

import io
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from adatape.deit import DeiT
from model_lib import convert_vit
from model_lib.vit import ViT
from tests import peers
from tests.model_lib import plain, public_vits
from tests.model_lib.public_vits import CONFIG, FIELDS, archive, write

TOLERANCE = 1e-4


def images(side=16, rows=3):
  shape = (rows, side, side, 3)
  return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def loaded(path, model, inputs):
  """The parameters of the model from a file, all of them."""
  fresh = flatten_dict(plain.noise(model, inputs), sep='/')
  params = flatten_dict(convert_vit.load(path).params, sep='/')
  assert not convert_vit.fit(params, fresh)
  shapes = [{name: x.shape for name, x in p.items()} for p in (params, fresh)]
  assert shapes[0] == shapes[1]
  assert {x.dtype for x in params.values()} == {np.dtype('float32')}
  return unflatten_dict(params, sep='/')


def check_logits(path, theirs, inputs, **fields):
  model, inputs = ViT(**(FIELDS | fields)), jnp.asarray(inputs)
  for name, value in convert_vit.load(path).fields.items():
    assert getattr(model, name) == value
  params = loaded(path, model, inputs)
  ours, out = jax.jit(model.apply)({'params': params}, inputs)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
  again = plain.dense(params['head'], np.asarray(out['features']))
  np.testing.assert_allclose(ours, again, atol=1e-5)
  assert np.ptp(theirs, axis=0).min() > 100 * TOLERANCE  # rows differ


@pytest.mark.parametrize('layout', ['vit_jax', 'big_vision', 'scanned'])
def test_an_archive_has_the_logits_of_its_equations(layout, tmp_path):
  file, inputs = tmp_path / 'vit.npz', images()
  names = 'vit_jax' if layout == 'vit_jax' else 'big_vision'
  arrays = archive(names)
  np.savez(
    file, **(public_vits.stacked(arrays) if layout == 'scanned' else arrays)
  )
  theirs = public_vits.forward(arrays, inputs, names)
  check_logits(file, theirs, inputs)
  exact = ViT(**(FIELDS | {'activation': 'gelu'}))
  inputs = jnp.asarray(inputs)
  other, _ = exact.apply({'params': loaded(file, exact, inputs)}, inputs)
  assert abs(other - theirs).max() > TOLERANCE  # why `activation` matters


def test_big_vision_without_class_token_and_with_fixed_positions(tmp_path):
  arrays, inputs = archive('big_vision'), images()
  grid = arrays.pop('pos_embedding')
  del arrays['cls']
  np.savez_compressed(tmp_path / 'vit.npz', **arrays)
  row, column = np.divmod(np.arange(16), 4)  # posemb_sincos_2d
  omega = 10_000.0 ** -(np.arange(4) / 3)
  x, y = column[:, None] * omega, row[:, None] * omega
  parts = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
  fixed = np.concatenate(parts, axis=1).reshape(grid.shape)
  arrays['pos_embedding'] = fixed
  theirs = public_vits.forward(arrays, inputs, 'big_vision', 'gap')
  fields = {'pool': 'gap', 'positions': 'sincos2d'}
  check_logits(tmp_path / 'vit.npz', theirs, inputs, **fields)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('kind', ['npz', 'timm', 'timm file', 'hugging_face'])
def test_all_layouts_hold_the_same_parameters(kind, dtype, tmp_path):
  arrays = {k: x.astype(jnp.dtype(dtype)) for k, x in archive().items()}
  exact = {name: x.astype(np.float32) for name, x in arrays.items()}
  if kind == 'npz':
    path = tmp_path / 'vit.npz'
    np.savez(path, **arrays)
  elif kind == 'hugging_face':
    tensors = public_vits.hugging_face_tensors(exact)
    tensors |= {f'vit.pooler.dense.{n}': np.ones(3) for n in ('weight', 'bias')}
    path = write(tmp_path, tensors, **CONFIG)
  else:
    tensors = public_vits.timm_tensors(exact)
    path = write(tmp_path, tensors, architecture='vit_tiny')
    path = path / 'model.safetensors' if kind == 'timm file' else path
  assert convert_vit.is_vit(path)
  np.savez(tmp_path / 'exact.npz', **exact)
  wanted = convert_vit.load(tmp_path / 'exact.npz').params
  found = convert_vit.load(path)
  assert found.image_size == 16
  jax.tree.map(np.testing.assert_array_equal, found.params, wanted)


def test_modules_of_other_models_and_unfit_heads_stay_fresh():
  shapes = {
    'tokens/cls': 1, 'tape_bank/embedding': 1, 'encoder/norm/scale': 1,
    'encoder/block_0/mlp/hidden/kernel': 1, 'head/kernel': 3, 'head/bias': 3,
    'encoder/block_0/tape_mlp/out/bias': 1, 'encoder/read_network/out/bias': 1,
  }  # fmt: skip
  fresh = {name: np.zeros(size) for name, size in shapes.items()}
  own = {n for n in fresh if 'tape' in n or 'read' in n}
  head = {'head/kernel', 'head/bias'}
  vit = {name: x for name, x in fresh.items() if name not in own}
  assert convert_vit.fit(vit, fresh) == own
  found = vit | {'head/kernel': np.zeros(9)}
  assert convert_vit.fit(found, fresh) == own | head
  found = {name: x for name, x in vit.items() if name not in head}
  assert convert_vit.fit(found, fresh) == own | head
  found = vit | {'pre_logits/kernel': np.zeros(9)}
  assert convert_vit.fit(found, fresh) == own | head | {'pre_logits/kernel'}


BLOCK = 'Transformer/encoderblock_1/'


@pytest.mark.parametrize(
  ('name', 'array', 'message'),
  [
    ('head/bias', None, 'head/bias: missing'),
    (f'{BLOCK}LayerNorm_2/scale', None, '_1/LayerNorm_2/scale: missing'),
    ('cls', np.full((1, 1, 16), np.nan), 'cls: expected finite numbers'),
    ('embedding/bias', np.ones(16, int), 'embedding/bias: expected finite'),
    ('embedding/kernel', np.ones((16, 3)), 'kernel: expected.*4 axes'),
    ('embedding/kernel', np.ones((2, 8, 3, 16)), 'kernel: .*square patches'),
    (f'{BLOCK}ls1/gamma', np.ones(16), '_1/ls1/gamma: not supported'),
    ('MAPHead_0/probe', np.ones(16), 'MAPHead_0/probe: not supported'),
    # Names of other layouts.
    *(
      (other, np.ones(16), f'{other}: not supported')
      for other in (
        'embedding/scale', 'head/weight', f'{BLOCK}LayerNorm_1/bias',
        'pos_embedding',
      )
    ),
    ('cls', np.array([None]), 'cls is damaged.*Object arrays'),
    ('cls', np.ones((1, 1, 9)), r'class token: expected \[1, 1, 16\]'),
  ],
)  # fmt: skip
def test_a_wrong_array_is_named(tmp_path, name, array, message):
  arrays = archive() | {name: array}
  arrays = {k: x for k, x in arrays.items() if x is not None}
  np.savez(tmp_path / 'vit.npz', **arrays)
  with pytest.raises(ValueError, match=message) as error:
    convert_vit.load(tmp_path / 'vit.npz')
  assert 'vit.npz' in str(error.value)


def test_what_our_vit_lacks_is_named(tmp_path):
  names = [
    'blocks.0.ls1.gamma', 'blocks.1.attn.q_norm.weight', 'reg_token',
    'attn_pool.latent', 'fc_norm.bias', 'norm_pre.weight', 'pre_logits.fc.bias',
  ]  # fmt: skip
  tensors = public_vits.timm_tensors(archive())
  tensors |= dict.fromkeys(names, np.ones(16))
  write(tmp_path, tensors, architecture='vit')
  with pytest.raises(ValueError, match='other parameters') as error:
    convert_vit.load(tmp_path)
  lines = str(error.value).split('\n  ')[1:]
  assert lines == [f'{name}: not supported' for name in sorted(names)]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'layer_norm_eps': 1e-3}, 'layer_norm_eps: expected one of'),
    ({'hidden_act': 'relu'}, "hidden_act: expected one of .*got 'relu'"),
    ({'hidden_size': 64}, 'hidden_size: expected .*, as the tensors .*got 64'),
    ({'patch_size': 2}, 'patch_size: expected .*, as the tensors .*got 2'),
    ({'model_type': 'beit'}, "model_type: expected one of .*got 'beit'"),
  ],
)
def test_an_option_that_changes_the_result_is_refused(
  tmp_path, change, message
):
  tensors = public_vits.hugging_face_tensors(archive())
  write(tmp_path, tensors, **(CONFIG | change))
  with pytest.raises(ValueError, match=f'config.json: {message}'):
    convert_vit.load(tmp_path / 'model.safetensors')


def test_an_archive_is_a_file_with_a_limit(tmp_path, monkeypatch):
  path, limit = tmp_path / 'vit.npz', 10**6
  monkeypatch.setattr(convert_vit.files, 'MAX_WEIGHTS', limit)
  np.savez_compressed(path, x=np.zeros(limit // 8))
  assert path.stat().st_size < limit / 100
  os.mkfifo(tmp_path / 'pipe.npz')
  for name, words in (
    ('vit.npz', '1000000 bytes, unpacked, got 1000'),
    ('pipe.npz', 'not a regular file'),
  ):
    with pytest.raises(ValueError, match=words):
      convert_vit.load(tmp_path / name)


def test_a_damaged_archive_is_refused(tmp_path):
  path = tmp_path / 'vit.npz'
  np.savez_compressed(path, **archive())
  good = path.read_bytes()
  pickled, single = pickle.dumps([1]), io.BytesIO()
  np.save(single, np.ones(3))
  flipped = bytearray(good)
  flipped[len(good) // 2] ^= 255
  cut = [good[:length] for length in (0, 10, len(good) // 2, -1)]
  for content in (*cut, pickled, single.getvalue(), bytes(flipped)):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'vit\.npz: .* is damaged'):
      convert_vit.load(path)


@pytest.mark.parametrize(
  ('name', 'heads'),
  [
    ('vit_base_patch16_224.augreg_in21k', 12), ('deit_base_patch16_384', 12),
    ('vit_base_patch16_224_in21k', 12), ('vit_base_patch16_siglip_gap_224', 0),
    ('vit_base_patch16_clip_224', 0), ('eva02_base_patch14_224', 0),
  ],
)  # fmt: skip
def test_an_architecture_of_timm_tells_the_heads(name, heads):
  known = {'num_heads': heads, 'activation': 'gelu'} if heads else {}
  assert convert_vit._timm_fields({'architecture': name}, 768) == known


@pytest.mark.peers
@pytest.mark.parametrize(
  ('kind', 'name', 'options'),
  [
    (ViT, 'ViTForImageClassification', {}),
    (ViT, 'ViTForImageClassification', {
      'hidden_act': 'gelu_pytorch_tanh', 'patch_size': 8, 'hidden_size': 24,
      'num_attention_heads': 2, 'num_hidden_layers': 3, 'intermediate_size': 20,
    }),
    (DeiT, 'DeiTForImageClassificationWithTeacher', {}),
    (DeiT, 'DeiTForImageClassificationWithTeacher', {'hidden_act': 'gelu_new'}),
  ],
)  # fmt: skip
def test_logits_of_transformers_with_the_sizes_of_its_files(
  kind, name, options, tmp_path
):
  torch, transformers = peers.torch_and_transformers()
  torch.manual_seed(0)
  tiny = {
    'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 4,
    'intermediate_size': 24, 'image_size': 16, 'patch_size': 4, 'num_labels': 5,
  } | options  # fmt: skip
  config = getattr(transformers, f'{kind.__name__}Config')(**tiny)
  model = getattr(transformers, name)(config)
  theirs = torch_logits(torch, model, images()).logits
  model.float().save_pretrained(tmp_path)
  found, inputs = convert_vit.load(tmp_path), jnp.asarray(images())
  ours = kind(num_classes=5, **found.fields)
  fresh = flatten_dict(plain.noise(ours, inputs), sep='/')
  assert not convert_vit.fit(flatten_dict(found.params, sep='/'), fresh)
  params = jax.tree.map(jnp.asarray, found.params)
  logits, _ = ours.apply({'params': params}, inputs)
  np.testing.assert_allclose(logits, theirs, rtol=0, atol=TOLERANCE)
  assert np.ptp(logits, axis=0).min() > 100 * TOLERANCE


@pytest.mark.peers
@pytest.mark.parametrize(
  'options',
  [
    {},
    {'no_embed_class': True},
    {'class_token': False, 'global_pool': 'avg', 'fc_norm': False},
  ],
)
def test_logits_of_timm(options, tmp_path):
  torch, _ = peers.torch_and_transformers()
  timm = peers.timm()
  torch.manual_seed(0)
  model = timm.VisionTransformer(
    img_size=16, patch_size=4, num_classes=5, embed_dim=16, depth=2,
    num_heads=4, mlp_ratio=1.5, **options,
  )  # fmt: skip
  theirs = torch_logits(torch, model, images())
  tensors = {n: x.float().numpy() for n, x in model.state_dict().items()}
  write(tmp_path, tensors, architecture='vit_tiny_patch4')
  fields = {'pool': 'gap'} if 'global_pool' in options else {}
  check_logits(tmp_path, theirs.numpy(), images(), activation='gelu', **fields)


def torch_logits(torch, model, inputs):
  """In float64, of a model whose parameters are all drawn at random."""
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
    channels_first = torch.as_tensor(inputs).permute(0, 3, 1, 2).double()
    return model.eval().double()(channels_first)
