"""AdaTape in the engine: the masked form's logits, by bucket; its speed."""

import functools
import json

import flax.linen as nn
import jax
import numpy as np
import pytest

from adatape.chain import tape_lengths
from adatape.task import TapeClassification
from benchmarks import timing
from core.errors import ConfigError
from dataset_lib import builder
from eval_lib.calibration import fingerprint
from eval_lib.report import print_table
from serve_lib.chain import InputError
from serve_lib.engine import Engine
from train_lib.task import ServedRun

IMAGE = dict(
  name='adatape.model:AdaTapeViT', width=16, depth=2, mlp_dim=16, num_heads=2,
  patch_size=8, pool='gap', bank='input', bank_patch_size=4,
  tokens_per_step=2, max_steps=6, threshold=2.7, query_dim=8,
)  # fmt: skip
PARITY = dict(
  name='adatape.parity:ParityModel', width=16, depth=1, mlp_dim=16,
  num_heads=2, query_dim=8, max_steps=4, threshold=1.6,
  norm_scale=2.0,
)  # fmt: skip
DATA = {
  'image': dict(name='tests.fakes:FakeImages', image_size=16, num_classes=3),
  'tokens': dict(name='parity', length=8),
}


def build(model, dataset, noise=0.3):
  """(task, variables) with random weights, so that tape lengths differ."""
  config = dict(
    model=model, dataset=dataset, dtype='float32',
    loss=dict(label_smoothing=0.0, tape_weight=0.0),
  )  # fmt: skip
  info = builder.build_source(dataset, 'train').info
  task = TapeClassification(config, info)
  params, _ = jax.jit(task.init)(jax.random.key(1))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: leaf + noise * rng.standard_normal(leaf.shape).astype('f'),
    nn.unbox(params),
  )
  return task, {'params': params, 'model_state': {}}


def items_of(task, count):
  rng = np.random.default_rng(1)
  if task.info.input_key == 'image':
    return list(rng.integers(0, 256, (count, 16, 16, 3)).astype(np.uint8))
  return list(rng.integers(0, 3, (count, 8)).astype(np.int32))


@pytest.mark.parametrize(
  ('key', 'backend'),
  [
    pytest.param('tokens', 'xla', marks=pytest.mark.slow),
    pytest.param('image', 'xla', marks=pytest.mark.nightly),
    ('image', 'onnxruntime'),
  ],
)
def test_rows_are_batched_by_the_bucket_of_their_tape(key, backend):
  # Invariant 4, second half: static and cropped encoders agree.
  model = IMAGE if key == 'image' else PARITY
  if backend == 'onnxruntime':
    pytest.importorskip('onnxruntime', reason='needs onnx and onnxruntime')
    model = model | {'bank': 'learnable', 'bank_size': 30}
  task, variables = build(model, DATA[key])
  items = items_of(task, 24)
  batch = {key: np.stack(items)}
  masked, out = jax.jit(task.apply)(variables['params'], {}, batch)
  tapes = np.asarray(out['tape']['length'])
  assert len(set(tapes)) > 1
  run = ServedRun(lengths=tuple(range(1, task.model.max_steps + 1)))
  chain, policy = task.serve(variables, {}, run)
  buckets, answer = [], policy.answer

  def spy(row):
    buckets.append((row.length, int(row.outputs[0]['length'])))
    return row.outputs[-1]['logits'], answer(row)

  policy.answer = spy
  given = chain, policy, policy.lengths, (8,)
  with Engine(*given, backend=backend) as engine:
    logits, answers = zip(*engine.predict(items), strict=True)
    snapshot = engine.monitor.snapshot()
  np.testing.assert_allclose(np.stack(logits), masked, atol=1e-4)
  assert [one.fields['tape_length'] for one in answers] == tapes.tolist()
  for bucket, tape in buckets:  # ONNX Runtime pads to the longest of a batch
    assert bucket >= tape if backend == 'onnxruntime' else bucket == tape
  values, counts = np.unique(tapes, return_counts=True)
  assert snapshot['depth'] == dict(zip(values, counts, strict=True))


def test_a_certified_threshold_serves_until_drift(tmp_path):
  task, variables = build(IMAGE, DATA['image'])
  guaranteed, run = {'setting': 'guaranteed'}, ServedRun(str(tmp_path))
  with pytest.raises(ConfigError, match='--evals=certificate'):
    task.serve(variables, guaranteed, run)
  threshold = task.cheaper()[-1]['threshold']
  assert threshold == pytest.approx(0.3 * 2.7)
  drift = {'threshold': 0.9, 'confidences': [0.4] * 20}
  one = {'tau': 1.0, 'model': {'threshold': threshold}, 'drift': drift}
  report = {'parameters': fingerprint(variables), 'sources': {'': one}}
  (tmp_path / 'certificate.json').write_text(json.dumps(report))
  chain, policy = task.serve(variables, guaranteed, run)
  items = items_of(task, 8)
  with Engine(chain, policy, policy.lengths, (8,)) as engine:
    short = [answer.fields['tape_length'] for answer in engine.predict(items)]
    policy.monitor.drift.drifted = True
    long = [answer.fields['tape_length'] for answer in engine.predict(items)]
  plain = Engine(*task.serve(variables, {}), policy.lengths, (8,))
  with plain as engine:
    assert long == [
      answer.fields['tape_length'] for answer in engine.predict(items)
    ]
  assert sum(short) < sum(long)


@pytest.mark.parametrize(
  ('lengths', 'buckets'),
  [(None, (2, 4, 6)), ((1, 3), (1, 3, 6)), ((6,), (6,)), ((0,), None),
   ((7,), None)],
)  # fmt: skip
def test_tape_buckets_end_at_the_longest_tape(lengths, buckets):
  task, variables = build(IMAGE, DATA['image'])
  run = ServedRun(lengths=lengths)
  if buckets:
    assert task.serve(variables, {}, run)[1].lengths == buckets
    return
  with pytest.raises(ConfigError, match='lengths: expected numbers of tape'):
    task.serve(variables, {}, run)
  with pytest.raises(ConfigError, match=r'serve\.tau: .* setting'):
    task.serve(variables, {'tau': 1.0})


@pytest.mark.parametrize(('steps', 'step'), [(10, 2), (21, 3), (100, 10)])
def test_there_are_at_most_ten_buckets_by_default(steps, step):
  assert tape_lengths(steps, None) == (*range(step, steps, step), steps)


BAD = {
  'image': [
    ('/nowhere.jpg', 'image: expected the path of a file'),
    (b'no image', 'image: undecodable'),
    (7, 'image: expected the path of a file, its bytes or an array, got int'),
    (np.zeros((4, 4, 2), np.uint8), 'image: wrong_shape'),
    ({'picture': b''}, "item: expected only the key 'image', got picture"),
    (InputError('line: not JSON'), 'line: not JSON'),
  ],
  'tokens': [
    ([0, 1], 'tokens: expected 8 ids, got 2'),
    (list('abcdefgh'), 'tokens: expected a row of integers'),
    ([[0]], 'tokens: expected a row of integers'),
    ([-1] * 8, r'tokens: expected a row of integers .*, got -1 to -1'),
    ({'text': 'x'}, "item: expected only the key 'tokens'"),
  ],
}


@pytest.mark.parametrize('data', BAD)
def test_a_bad_item_is_named(data):
  task, variables = build(IMAGE if data == 'image' else PARITY, DATA[data])
  _, policy = task.serve(variables, {})
  for item, message in BAD[data]:
    with pytest.raises(InputError, match=message):
      policy.encode(item)


def test_images_come_as_files_bytes_and_arrays(tmp_path):
  import cv2

  task, variables = build(IMAGE, DATA['image'])
  _, policy = task.serve(variables, {})
  image = items_of(task, 1)[0]
  path = str(tmp_path / 'image.png')
  cv2.imwrite(path, image[..., ::-1])
  with open(path, 'rb') as file:
    data = file.read()
  for item in (image, path, data, {'image': path}):
    encoded = policy.encode(item)
    np.testing.assert_array_equal(encoded.inputs['image'], image)
    assert encoded.length == 6


ROWS, BATCH, SIDE = 256, 8, 224
TINY = dict(
  name='adatape.model:AdaTapeViT', variant='Ti/16', pool='gap', bank='input',
  bank_patch_size=8, tokens_per_step=5, query_dim=64,
)  # fmt: skip
LARGE = dict(name='tests.fakes:FakeImages', image_size=SIDE, num_classes=1000)


def images():
  """Images of unlike brightness and contrast, whose tapes differ."""
  rng = np.random.default_rng(0)
  ramp = np.linspace(0, 1, SIDE)[:, None, None]
  for _ in range(ROWS):
    pixels = rng.random((SIDE, SIDE, 3)) ** rng.uniform(0.2, 6)
    yield (255 * pixels * ramp ** rng.uniform(0, 4)).astype(np.uint8)


@pytest.mark.nightly
@pytest.mark.parametrize(('steps', 'scale'), [(10, 3.0), (100, 12.0)])
def test_the_engine_is_no_slower_than_the_static_form(steps, scale):
  """With -s prints the rows. The paper's T = 10 saves at most 5 % of the FLOPs.

  With 196 input tokens, a tape of 100 is a third of the sequence.
  """
  model = dict(TINY, max_steps=steps, threshold=steps / 5)
  task, variables = build(model, LARGE, noise=0.0)
  encoder = variables['params']['encoder']
  encoder['tape_norm']['scale'] *= scale  # so that the mean length is T / 2
  items = list(images())
  static = jax.jit(lambda params, image: task.apply(params, {}, image)[0])

  def run_static():
    for start in range(0, ROWS, BATCH):
      batch = {'image': np.stack(items[start : start + BATCH])}
      jax.device_get(static(variables['params'], batch))

  chain, policy = task.serve(variables, {})
  with Engine(chain, policy, policy.lengths, (4, BATCH)) as engine:
    answers = timing.checked(engine.predict(items))
    lengths = np.array([answer.fields['tape_length'] for answer in answers])
    calls = [
      ('static', run_static, steps),
      ('engine', lambda: engine.predict(items), float(lengths.mean())),
    ]
    candidates = [
      timing.Candidate(
        name, functools.partial(timing.Call, run, ROWS),
        is_baseline=name == 'static',
        flops=task.model.flops(task.info.input_shape, length),
      )
      for name, run, length in calls
    ]  # fmt: skip
    case = {'T': steps, 'mean': round(float(lengths.mean()), 1)}
    with timing.Hosts() as hosts:
      rows, _ = timing.run(candidates, case, hosts, rounds=5)
  columns = 'candidate', 'seconds', 'speedup', 'limit', 'share'
  print_table(timing.label(case), rows, columns=columns)
  assert lengths.min() < lengths.max()
  assert 0.4 < lengths.mean() / steps < 0.6
  assert rows[-1]['speedup'].median > 0.8
