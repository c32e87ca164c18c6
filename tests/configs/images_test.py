"""Sizes, splits and certificates of images of one's own, by arguments."""

import json

import numpy as np
import pytest

from configs import common
from launch import command_line
from tests.model_lib import public_vits


def load(flag):
  return command_line.load_config(f'configs/{flag}', [])


def test_the_size_of_images_is_that_of_a_checkpoint_or_given(tmp_path):
  run = {'dataset': {'image_size': 48}}
  (tmp_path / 'config.json').write_text(json.dumps(run))
  assert common.image_size_of(tmp_path) == 48
  np.savez(tmp_path / 'vit.npz', **public_vits.archive(grid=6))
  flag = f'images.py:data=/x,model=vit,pretrained={tmp_path}/vit.npz'
  assert load(flag).dataset.image_size == 24
  assert load(f'{flag},size=32').dataset.image_size == 32
  assert load('images.py:data=/x,variant=Ti/16').dataset.image_size == 224
  (tmp_path / 'vit.npz').write_bytes(b'PK damaged')
  with pytest.raises(ValueError, match='pretrained: expected a published ViT'):
    load(flag)


def test_a_certificate_needs_a_tape_and_rows_of_its_own(tmp_path):
  evals = load('images.py:data=/x,variant=Ti/16,certify=1').evals
  assert evals.certificate.split == 'validation[25%:]'
  assert evals.calibration.calibration_split == 'validation[:25%]'
  (tmp_path / 'train' / 'cat').mkdir(parents=True)
  for argument in (f'data={tmp_path}', 'data=/x,model=vit'):
    with pytest.raises(ValueError, match='certify: expected 0, or 1 with one'):
      load(f'images.py:{argument},certify=1')


def test_a_split_that_is_made_is_watched(tmp_path):
  (tmp_path / 'train' / 'cat').mkdir(parents=True)
  assert load(f'images.py:data={tmp_path}').evals.test.every_steps == 500
  evals = load(f'images.py:data={tmp_path}/train').evals
  assert evals.validation.every_steps == 0.2
  assert evals.test.every_steps == 0
