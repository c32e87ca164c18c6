"""Warm start of images of another size: trained positions are resized."""

import dataclasses
import re

import numpy as np
import pytest

from adatape.model import AdaTapeViT
from core import files
from model_lib.vit import ViT
from tests.model_lib import public_vits
from tests.train_lib.states import save_all
from tests.train_lib.warm_start_test import (
  assert_trees_equal,
  drawn,
  fresh_params,
  info_of,
)
from train_lib import checkpoint_io
from train_lib.warm_start import warm_start

IMAGE_MODELS = {
  'vit': ViT(**(public_vits.FIELDS | {'pool': 'cls'})),
  'gap': ViT(**(public_vits.FIELDS | {'pool': 'gap'})),
  'input': AdaTapeViT(
    num_classes=5, width=16, depth=2, mlp_dim=24, num_heads=4, patch_size=4,
    bank='input', bank_patch_size=2, tokens_per_step=2, max_steps=3,
    threshold=1.5, query_dim=8,
  ),
}  # fmt: skip


def save_run(folder, params, sides=(16, 16)):
  save_all(folder / 'checkpoints', [1], lambda _: {'params': params})
  record = files.dumps(dataclasses.asdict(info_of(sides)))
  (folder / 'dataset_info.json').write_text(record)


@pytest.mark.parametrize('model', IMAGE_MODELS)
@pytest.mark.parametrize(
  ('old', 'new', 'folder'),
  [
    ((16, 16), (24, 24), ''), ((16, 24), (24, 12), 'checkpoints'),
    ((8, 32), (16, 16), ''),  # as many patches, at other places
    ((16, 24), (8, 4), ''), ((16, 24), (16, 24), 'checkpoints'),
  ],
)  # fmt: skip
def test_positions_of_an_own_run_are_resized(
  model, old, new, folder, tmp_path, caplog
):
  model = IMAGE_MODELS[model]
  saved, fresh = drawn(model, old), drawn(model, new, seed=1)
  save_run(tmp_path, saved, old)
  started = warm_start(fresh, tmp_path / folder, info=info_of(new))
  started, saved = map(checkpoint_io.flatten, (started, saved))
  for name, leaf in saved.items():
    if name.endswith('positions/embedding'):
      patch = 2 if name.startswith('tape_bank') else 4
      grids = [[side // patch for side in sides] for sides in (old, new)]
      leaf = public_vits.resized(leaf, grids[1], grids[0])
      assert (name in caplog.text) == (old != new)
    np.testing.assert_allclose(started[name], leaf, rtol=0, atol=1e-5)


def test_adatape_starts_with_the_vit_of_an_own_run(tmp_path, caplog):
  saved = fresh_params(num_classes=5)
  save_run(tmp_path, saved)
  fresh = drawn(IMAGE_MODELS['input'].clone(pool='cls'))
  started = warm_start(fresh, tmp_path, info=info_of())
  assert_trees_equal(started['tape_bank'], fresh['tape_bank'])
  assert_trees_equal({n: started[n] for n in saved if n != 'encoder'} | {
    'encoder': {n: started['encoder'][n] for n in saved['encoder']}
  }, saved)  # fmt: skip
  assert re.search(r'new: encoder/read_network \(.*, tape_bank \(', caplog.text)
  # Its head of other classes is skipped explicitly.
  with pytest.raises(ValueError, match='head/bias: expected float32'):
    warm_start(fresh_params(num_classes=3), tmp_path, info=info_of())


def test_positions_that_are_no_grid_of_the_images_are_refused(tmp_path):
  saved, fresh = fresh_params(), fresh_params()
  embedding = saved['tokens']['positions']['embedding']
  saved['tokens']['positions']['embedding'] = embedding[:, :11]
  save_all(tmp_path, [1], lambda _: {'params': saved})
  message = r'positions/embedding: expected grids .*\(1, 1\) and \(16, 16\)'
  with pytest.raises(ValueError, match=message):
    warm_start(fresh, tmp_path, info=info_of())


def test_a_public_vit_of_images_that_are_no_squares(tmp_path):
  arrays = public_vits.archive()
  name = public_vits.NAMES['vit_jax'][0]
  draw = np.random.default_rng(0)
  arrays[name] = draw.normal(size=(1, 9, 16)).astype(np.float32)
  given = {'image_size': [8, 16]}  # 2 x 4 patches and the class token
  tensors = public_vits.hugging_face_tensors(arrays)
  public_vits.write(tmp_path, tensors, **(public_vits.CONFIG | given))
  fresh = fresh_params(num_classes=5)
  started = warm_start(fresh, tmp_path, info=info_of())
  want = public_vits.resized(arrays[name][:, 1:], (4, 4), (2, 4))
  got = started['tokens']['positions']['embedding']
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  token = arrays['cls'] + arrays[name][:, :1]
  np.testing.assert_allclose(started['tokens']['cls'], token, atol=1e-6)


def test_a_distillation_token_is_loaded_or_left_out_explicitly(tmp_path):
  tensors = public_vits.hugging_face_tensors(public_vits.archive())
  name, draw = 'vit.embeddings.position_embeddings', np.random.default_rng(5)
  second = draw.normal(size=(2, 1, 1, 16)).astype(np.float32)
  tensors['vit.embeddings.distillation_token'] = second[0]
  tensors[name] = np.insert(tensors[name], [1], second[1], axis=1)
  sizes = public_vits.CONFIG | {'model_type': 'deit', 'image_size': 16}
  public_vits.write(tmp_path, tensors, **sizes)
  vit = fresh_params(num_classes=5)
  for x in ('kernel', 'bias'):
    vit['head'][x] += 1
  skip = '^(distillation_)?head/', '^distillation$'
  with pytest.raises(ValueError, match='distillation: expected nothing'):
    warm_start(vit, tmp_path, skip=skip[:1])
  started = warm_start(vit, tmp_path, skip=skip)
  deit = vit | {
    'distillation': vit['tokens']['cls'],
    'distillation_head': vit['head'],
  }
  taught = warm_start(deit, tmp_path, skip=skip[:1])
  np.testing.assert_allclose(taught['distillation'], second.sum(0), atol=1e-6)
  assert_trees_equal({name: taught[name] for name in vit}, started)
  assert_trees_equal(taught['distillation_head'], vit['head'])
  public_vits.write(tmp_path, public_vits.hugging_face_tensors(
    public_vits.archive()), **public_vits.CONFIG)  # fmt: skip
  plain_vit = warm_start(vit, tmp_path, skip=skip[:1])
  assert_trees_equal(plain_vit, started)
