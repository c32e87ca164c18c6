"""Warm start: renames, leftovers are listed; public ViTs and their heads."""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from adatape.deit import Distillation
from adatape.task import PonderClassification, TapeClassification
from core import files
from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from launch import command_line
from model_lib import bert, convert, convert_vit, sizes
from model_lib.vit import ViT
from tests.marks import first_is_slow
from tests.model_lib import plain, public_vits
from tests.train_lib.states import save_all
from train_lib import build, checkpoint_io, sharding, trainer
from train_lib.classification import Classification
from train_lib.warm_start import start_from, warm_start

KERNEL = jnp.arange(16.0).reshape(4, 4)
SAVED = {
  'encoder': {'kernel': KERNEL, 'bias': jnp.arange(4.0)},
  'head': {'kernel': jnp.ones((4, 10))},
}


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  directory = tmp_path_factory.mktemp('old_run')
  state = {'params': SAVED, 'opt_state': jnp.ones(3)}
  save_all(directory / 'checkpoints', [9], lambda _: state)
  return directory


def fresh(encoder='encoder', classes=10, dtype=jnp.float32, **more):
  return {
    encoder: {'kernel': jnp.zeros((4, 4), dtype), 'bias': jnp.zeros(4)},
    'head': {'kernel': jnp.full((4, classes), 7.0)},
    **more,
  }


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def placed(params, devices):
  where = sharding.replicated(sharding.make_mesh({'data': devices}))
  return jax.device_put(params, where), where


TAPE = fresh(classes=3, tape={'query': jnp.full((2,), 5.0)})


@pytest.mark.parametrize(
  ('params', 'renames', 'skip', 'expected'),
  [
    (fresh(), (), (), SAVED),
    # In turn, applied to the names of the checkpoint.
    (fresh('backbone'), (r'^enc(\w+)->trunk_\1', '^trunk_oder->backbone'), (),
     {'backbone': SAVED['encoder'], 'head': SAVED['head']}),
    (TAPE, (), ('^head/', '^tape/'), TAPE | {'encoder': SAVED['encoder']}),
  ],
)  # fmt: skip
def test_parameters_are_replaced_and_keep_their_sharding(
  workdir, params, renames, skip, expected
):
  params, where = placed(params, 4)
  started = warm_start(params, workdir, renames, skip)
  assert_trees_equal(started, expected)
  assert all(leaf.sharding == where for leaf in jax.tree.leaves(started))


@pytest.mark.parametrize(
  ('params', 'renames', 'skip', 'messages'),
  [
    (
      fresh('backbone', classes=3), (), (),
      [
        'backbone/bias: expected float32[4], got nothing',
        'encoder/bias: expected nothing, got float32[4]',
        'head/kernel: expected float32[4, 3], got float32[4, 10]',
        'warm_start.skip=', 'warm_start.renames=', 'old_run',
      ],
    ),
    (
      fresh(dtype=jnp.bfloat16), (), (),
      ['expected bfloat16[4, 4], got float32[4, 4]'],
    ),
    (fresh(), ('encodr->x',), (), ['encodr->x', 'match no parameter']),
    (fresh(), (), ('haed',), ['haed', 'match no parameter']),
    (fresh(), ('kernel->bias',), (), ["become 'encoder/bias'"]),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_listed(workdir, params, renames, skip, messages):
  with pytest.raises(ValueError, match='warm_start') as error:
    warm_start(params, workdir, renames, skip)
  for message in messages:
    assert message in str(error.value)


BERT = sizes.BERT.defaults | dict(
  width=8, depth=1, mlp_dim=12, num_heads=2, vocab_size=10, max_positions=8
)


def test_a_hugging_face_model_without_the_head_of_another_task(tmp_path):
  row = jnp.zeros((1, 4), jnp.int32)
  models = [bert.BertClassifier(num_classes=n, **BERT) for n in (2, 3)]
  params, fresh = (
    jax.tree.map(jnp.asarray, plain.noise(m, row, row, row[0, :1], seed=n))
    for n, m in enumerate(models)
  )
  convert.save_model(tmp_path, models[0], params)
  begun, where = placed(fresh | {'exit_1': {'bias': jnp.ones(3)}}, 2)
  with pytest.raises(ValueError, match='exit_1/bias: expected float32'):
    warm_start(begun, tmp_path)
  begun['neck'] = begun.pop('pooler')
  skip, renames = ('^head/', '^exit_'), ('^pooler/->neck/',)
  started = warm_start(begun, tmp_path, renames, skip)
  assert all(leaf.sharding == where for leaf in jax.tree.leaves(started))
  started['pooler'] = started.pop('neck')
  same = {'head': fresh['head'], 'exit_1': begun['exit_1']}
  assert_trees_equal(started, params | same)
  with pytest.raises(ConfigError, match=r"model: expected {'num_heads': 2}"):
    warm_start(started, tmp_path, skip=skip, model=BERT | {'num_heads': 4})


SIZES = 'width', 'depth', 'num_heads', 'mlp_dim', 'activation'


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  """A vit_jax archive of 10 classes on a grid of 3 x 3."""
  path = tmp_path_factory.mktemp('public') / 'vit.npz'
  np.savez(path, **public_vits.archive(grid=3, classes=10))
  return path


def load_config(file, *overrides, model='learn'):
  fields = [f'model.{name}={public_vits.FIELDS[name]}' for name in SIZES]
  fields += ['model.query_dim=8'] * (model != 'vit')
  return command_line.load_config(
    f'configs/adatape/digits.py:model={model}',
    [
      *fields, 'batch_size=8', 'mesh.data=2', 'loader.num_threads=1',
      'tensorboard=false', 'log_every=1', 'phases.0.epochs=0',
      'phases.0.steps=1', f'warm_start.workdir={file}', *overrides,
    ],
  )  # fmt: skip


@pytest.mark.parametrize('model', first_is_slow(('learn',), ('input',)))
def test_adatape_starts_with_the_trunk_of_a_vit(model, file, caplog):
  # The file has a [CLS] token, which an input bank usually comes without.
  overrides = 'model.tape_mlp=glu', 'model.pool=cls'
  config = load_config(file, *overrides, model=model)
  setup = build.Setup(config)
  with jax.set_mesh(setup.mesh), caplog.at_level(logging.WARNING):
    fresh, started = setup.init(), start_from(setup)
  started, fresh = (
    checkpoint_io.flatten(jax.device_get(one.params))
    for one in (started, fresh)
  )
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
    np.testing.assert_array_equal(started[name], fresh[name])
  bank = sum(fresh[n].size for n in own if n.startswith('tape_bank'))
  assert f'tape_bank ({bank:,})' in caplog.text
  assert 'encoder/block_*/tape_mlp (' in caplog.text
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


def info_of(sides=(16, 16)):
  return DatasetInfo('image', (*sides, 3), 'uint8', 5, (), 4)


def drawn(model, sides=(16, 16), seed=0):
  params = plain.noise(model, jnp.zeros((1, *sides, 3)), seed=seed)
  return jax.tree.map(jnp.asarray, params)


def fresh_params(**fields):
  return drawn(ViT(**(public_vits.FIELDS | {'num_classes': 10} | fields)))


def test_a_head_of_other_classes_stays_fresh(file, caplog, capsys):
  params = fresh_params(num_classes=3)
  started = warm_start(params, file)
  np.testing.assert_array_equal(
    started['head']['kernel'], params['head']['kernel']
  )
  total = sum(leaf.size for leaf in jax.tree.leaves(params))
  words = f'loaded {total - 51:,} of {total:,} parameters; new: head (51)'
  assert f'{words}; not used: head (170)' in capsys.readouterr().out
  assert 'loaded' not in caplog.text  # no warning
  source = convert_vit.load(file).params
  other = warm_start(fresh_params(), file)
  assert_trees_equal(other['head'], source['head'])
  assert_trees_equal(started['encoder'], source['encoder'])


def test_a_published_head_is_in_the_order_of_our_classes(tmp_path):
  names = [*'jihgfedcba']
  arrays = public_vits.archive(classes=10)
  tensors = public_vits.hugging_face_tensors(arrays)
  given = {'id2label': dict(enumerate(names)), 'image_size': 16}
  public_vits.write(tmp_path, tensors, **(public_vits.CONFIG | given))
  info = dataclasses.replace(info_of(), class_names=(*names[::-1],))
  head = warm_start(fresh_params(), tmp_path, info=info)['head']
  source = convert_vit.load(tmp_path).params['head']
  for name in head:
    np.testing.assert_array_equal(head[name], source[name][..., ::-1])


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'depth': 3}, 'encoder/block_2/attention/key/bias: expected float32'),
    ({'patch_size': 8}, r'projection/kernel: expected float32\[192, 16\]'),
    ({'positions': 'sincos2d'}, 'tokens/positions/embedding: expected nothing'),
    ({'pool': 'gap'}, 'tokens/cls: expected nothing, got float32'),
  ],
)
def test_another_trunk_is_named(fields, message, file):
  with pytest.raises(ValueError, match=message):
    warm_start(fresh_params(**fields), file)


@pytest.mark.parametrize(
  ('theirs', 'ours'),
  [
    ({'num_heads': 4}, {'num_heads': 2}),
    ({'activation': 'gelu_new'}, {'activation': 'gelu'}),
    ({'depth': 2, 'mlp_dim': 24, 'pool': 'cls'},
     {'depth': 3, 'mlp_dim': 20, 'pool': 'gap'}),
  ],
)  # fmt: skip
def test_all_fields_that_differ_are_named_before_compiling(
  theirs, ours, file, monkeypatch
):
  monkeypatch.setattr(build.Setup, 'init', lambda self: pytest.fail('compiled'))
  overrides = (f'model.{name}={value}' for name, value in ours.items())
  config = load_config(file, *overrides, model='vit')
  message = f'model: expected {theirs}, as in {file}, got {ours}'
  with pytest.raises(ConfigError, match=re.escape(message)) as error:
    trainer.train(config, '', dry_run=True)
  assert error.value.field == 'warm_start.workdir'


def model_of(kind, name, **model):
  """The checked fields of a model."""
  config = {'loss': {}, 'model': {'name': name} | model}
  config['dataset'] = {'image_size': 16}
  kind.validate_config(config)
  return config['model']


@pytest.mark.parametrize(
  ('kind', 'name', 'others'),
  [
    (Classification, 'model_lib.vit:ViT', {}),
    (TapeClassification, 'adatape.model:AdaTapeViT', {'query_dim': 8}),
    (Distillation, 'adatape.deit:DeiT', {}),
    (PonderClassification, 'adatape.universal:UnsharedViT', {'max_steps': 2}),
  ],
)
def test_sizes_of_a_checkpoint(kind, name, others, file, tmp_path):
  given = {'from_checkpoint': str(file)} | others
  model = model_of(kind, name, **given)
  assert 'from_checkpoint' not in model
  for field in convert_vit.load(file).fields.keys() & {*model}:
    assert model[field] == public_vits.FIELDS.get(field, model[field])
  assert (model.pool, model.positions) == ('cls', 'learned')
  stated = {'mlp_dim': 20, 'variant': 'B/16'}
  assert model_of(kind, name, **given, **stated).mlp_dim == 20
  assert model_of(kind, name, **given, **stated).width == model.width
  (tmp_path / 'config.json').write_text(files.dumps({'model': dict(model)}))
  given['from_checkpoint'] = str(tmp_path)
  if 'depth' in model:
    assert dict(model_of(kind, name, **given)) == dict(model)
    return
  with pytest.raises(ConfigError, match=r'model\.from_checkpoint: .* depth'):
    model_of(kind, name, **given)


def test_the_heads_that_a_checkpoint_does_not_tell_are_asked_for(tmp_path):
  tensors = public_vits.timm_tensors(public_vits.archive())
  public_vits.write(tmp_path, tensors, architecture='vit_own')
  given = Classification, 'model_lib.vit:ViT'
  own = {'from_checkpoint': str(tmp_path)}
  with pytest.raises(ConfigError, match=f'{tmp_path} .*config.model.num_heads'):
    model_of(*given, **own)
  assert model_of(*given, **own, num_heads=4).num_heads == 4
