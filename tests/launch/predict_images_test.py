"""Lines with the paths of images, answered by a run of AdaTape."""

import io
import json

import cv2
import jax
import numpy as np
import pytest

from dataset_lib import builder
from launch import config_flags, predict
from train_lib import loading, trainer

CHANGES = [
  'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1',
  'model.width=16', 'model.depth=2', 'model.mlp_dim=16', 'model.num_heads=2',
  'model.query_dim=8',
]  # fmt: skip


@pytest.mark.slow
def test_a_run_on_images_answers_paths(tmp_path, repository):
  config = config_flags.load_config(
    f'{repository}/configs/adatape/digits.py:model=input', CHANGES
  )
  with config.unlocked():
    config.stages = dict(stage1=dict(steps=2, epochs=0.0, trainable='.*'))
    config.evals = {}
    config.batch_size = 8
  run = tmp_path / 'run'
  trainer.train(config, str(run))
  source = builder.build_source(config.dataset, 'test')
  images = [source.record(index)['image'] for index in range(6)]
  lines = []
  for number, image in enumerate(images):
    path = str(tmp_path / f'{number}.png')
    cv2.imwrite(path, np.repeat(image, 3, 2)[..., :3][..., ::-1])
    lines.append(path if number % 2 else {'id': f'no {number}', 'image': path})
  lines.append({'image': '/nowhere.png'})
  data = '\n'.join(map(json.dumps, lines)).encode()
  written = []
  flags = [f'--workdir={run}', '--batches=1,4', '--compilation_cache=none']
  with predict.build_engine(*predict.parse(flags)) as engine:
    predict.answer_all(
      engine, predict.read_lines(io.BytesIO(data)), written.append, 8
    )
  *answers, missing = map(json.loads, written)
  assert missing['id'] == 7
  assert missing['error'].startswith('image: expected a file')
  task = loading.load_task(run, loading.load_own_config(run))
  variables = loading.load_params_on_one_device(run, task).variables
  rows = builder.build(
    config.dataset, split='test', train=False, seed=0, batch_size=6
  )
  batch = {'image': next(rows.batches())['image']}
  logits, out = jax.jit(task.apply)(variables['params'], {}, batch)
  assert [one['id'] for one in answers] == ['no 0', 2, 'no 2', 4, 'no 4', 6]
  for index, answer in enumerate(answers):
    shares = list(answer['probabilities'].values())
    np.testing.assert_allclose(shares, jax.nn.softmax(logits[index]), atol=1e-4)
    assert answer['tape_length'] == out['tape']['length'][index]
    assert answer['exit_reason'] == 'tape read'
