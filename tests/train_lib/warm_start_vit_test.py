"""Beginning from public ViTs: the trunk of ViT and AdaTape, heads, the log."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from dataset_lib.errors import ConfigError
from launch import command_line
from model_lib import convert_vit
from model_lib.vit import ViT
from tests.model_lib import plain, public_vits
from train_lib import build, checkpoint_io, loading, trainer

SIZES = {name: public_vits.FIELDS[name] for name in (
  'width', 'depth', 'num_heads', 'mlp_dim', 'activation',
)}  # fmt: skip


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  """A vit_jax archive of 10 classes on a grid of 3 x 3."""
  path = tmp_path_factory.mktemp('public') / 'vit.npz'
  np.savez(path, **public_vits.archive(grid=3, classes=10))
  return path


def load_config(file, *overrides, model='learn'):
  fields = [f'model.{name}={value}' for name, value in SIZES.items()]
  fields += ['model.query_dim=8'] * (model != 'vit')
  return command_line.load_config(
    f'configs/adatape/digits.py:model={model}',
    [
      *fields, 'batch_size=8', 'mesh.data=2', 'loader.num_threads=1',
      'tensorboard=false', 'log_every=1', 'stages.stage1.epochs=0',
      'stages.stage1.steps=1', f'warm_start.workdir={file}', *overrides,
    ],
  )  # fmt: skip


def begun(config):
  """(setup, parameters at step 0 by name, those without the file)."""
  setup = build.Setup(config)
  with jax.set_mesh(setup.mesh):
    fresh = setup.init()
    started = loading.start_from(fresh, config.warm_start, config.model)
  trees = started.params, fresh.params
  return setup, *(checkpoint_io.flatten(jax.device_get(x)) for x in trees)


@pytest.mark.slow
@pytest.mark.parametrize('model', ['learn', 'input'])
def test_adatape_starts_with_the_trunk_of_a_vit(model, file, caplog):
  config = load_config(file, 'model.tape_mlp=glu', model=model)
  with caplog.at_level(logging.WARNING):
    setup, started, fresh = begun(config)
  source = flatten_dict(convert_vit.load(file).params, sep='/')
  positions = source.pop('tokens/positions/embedding')
  resized = public_vits.resized(positions, 4)
  np.testing.assert_allclose(
    started['tokens/positions/embedding'], resized, atol=1e-6
  )
  for name, leaf in source.items():
    np.testing.assert_array_equal(started[name], leaf)
  own = set(fresh) - set(source) - {'tokens/positions/embedding'}
  assert {name.split('/')[0] for name in own} == {'tape_bank', 'encoder'}
  for name in own:
    assert any(word in name for word in ('tape_', 'read_network'))
    np.testing.assert_array_equal(started[name], fresh[name])
    assert name in caplog.text
  assert 'mlp_norm' not in caplog.text

  # With its tape masked, AdaTape is the ViT.
  shape = (3, 16, 16, 3)
  images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  params = {'params': jax.tree.map(jnp.asarray, checkpoint_io.nest(started))}

  def masked(adatape, images):
    x, tape, _ = adatape.read(images)
    return adatape.classify(x, tape.tokens, jnp.zeros_like(tape.mask))[0]

  ours = setup.task.model.apply(params, jnp.asarray(images), method=masked)
  arrays = public_vits.archive(grid=3, classes=10)
  name = public_vits.NAMES['vit_jax'][0]
  arrays[name] = np.concatenate([arrays[name][:, :1], resized], axis=1)
  theirs = public_vits.forward(arrays, images)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def fresh_params(**fields):
  model = ViT(**(public_vits.FIELDS | {'num_classes': 10} | fields))
  params = plain.noise(model, jnp.zeros((1, 16, 16, 3)))
  return jax.tree.map(jnp.asarray, params)


def test_a_head_of_other_classes_stays_fresh(file, caplog):
  params = fresh_params(num_classes=3)
  started = loading.warm_start(params, file)
  np.testing.assert_array_equal(
    started['head']['kernel'], params['head']['kernel']
  )
  assert "['head/bias', 'head/kernel']" in caplog.text
  other = loading.warm_start(fresh_params(), file)
  source = convert_vit.load(file).params
  np.testing.assert_array_equal(other['head']['bias'], source['head']['bias'])
  jax.tree.map(
    np.testing.assert_array_equal, started['encoder'], source['encoder']
  )


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'depth': 3}, 'encoder/block_2/attention/key/bias: expected float32'),
    ({'depth': 1}, r'encoder/block_1/mlp/out/bias: expected nothing'),
    ({'patch_size': 8}, r'projection/kernel: expected float32\[192, 16\]'),
    ({'positions': 'sincos2d'}, 'tokens/positions/embedding: expected nothing'),
    ({'pool': 'gap'}, 'tokens/cls: expected nothing, got float32'),
  ],
)
def test_another_trunk_is_named(fields, message, file):
  with pytest.raises(ValueError, match=message):
    loading.warm_start(fresh_params(**fields), file)


def test_a_skipped_class_token_is_dropped(file):
  skip = ('^tokens/cls$',)
  started = loading.warm_start(fresh_params(pool='gap'), file, skip=skip)
  assert 'cls' not in started['tokens']


def test_fields_that_the_file_fixes_are_checked(file):
  config = load_config(file, 'model.num_heads=2', model='vit')
  message = r'model\.num_heads: expected 4, as in .*vit\.npz, got 2'
  with pytest.raises(ConfigError, match=message) as error:
    trainer.train(config, '', dry_run=True)
  assert error.value.field == 'warm_start.workdir'
  with pytest.raises(ValueError, match=r"model\.activation: .*'gelu_new'"):
    loading.warm_start(fresh_params(), file, model={'activation': 'gelu'})


@pytest.mark.parametrize('name', ['vit.bin', 'missing.npz'])
def test_other_files_are_refused(name, tmp_path):
  (tmp_path / 'vit.bin').write_bytes(b'')
  with pytest.raises(
    ConfigError, match=r'\.npz or \.safetensors file'
  ) as error:
    load_config(tmp_path / name)
  assert error.value.field == 'warm_start.workdir'
