"""Few-shot evaluation: honest choice of L2, determinism, whole evaluator."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib import evaluator, fewshot

DIGITS = dict(name='digits', image_size=8)


def toy(per_class, classes=4, width=6, spread=0.01, seed=0):
  """Features of width `width` around a corner per class."""
  rng = np.random.default_rng(seed)
  labels = np.repeat(np.arange(classes), per_class)
  noise = spread * rng.normal(size=(len(labels), width))
  return np.eye(classes, width)[labels] + noise, labels


def random_features(per_class, classes=4, width=6, seed=0):
  rng = np.random.default_rng(seed)
  labels = np.repeat(np.arange(classes), per_class)
  return rng.normal(size=(len(labels), width)), labels


@pytest.mark.parametrize('shots', [1, 5, 10])
def test_separable_features_reach_all(shots):
  train, test = toy(20, width=4), toy(30, width=4, seed=1)
  draw = fewshot.run_draw(train, test, 4, shots, seed=0)
  assert draw.accuracy == 1.0
  assert draw.held_out == 4 * (20 - shots)
  assert draw.short_classes == 0


def test_random_features_are_at_chance():
  train, test = random_features(60), random_features(500, seed=1)
  for shots in (1, 10):
    draws = [fewshot.run_draw(train, test, 4, shots, s) for s in range(3)]
    # 6,000 guesses at 1/4: four standard deviations are 0.022, and the
    # guesses of one draw share their weights, hence twice that.
    assert abs(np.mean([d.accuracy for d in draws]) - 0.25) < 0.045


def test_same_seed_same_shots_other_seed_others():
  train, test = toy(10, spread=0.6), toy(100, spread=0.6, seed=1)
  first = fewshot.run_draw(train, test, 4, 2, seed=3)
  assert first == fewshot.run_draw(train, test, 4, 2, seed=3)
  others = {fewshot.run_draw(train, test, 4, 2, s).accuracy for s in range(6)}
  assert len(others) > 1


def test_shots_of_a_seed_are_nested(monkeypatch):
  seen = []
  real_fit = fewshot.fit

  def spy(features, labels, num_classes):
    seen.append({tuple(row) for row in features})
    return real_fit(features, labels, num_classes)

  monkeypatch.setattr(fewshot, 'fit', spy)
  for shots in (1, 3):
    fewshot.run_draw(toy(10), toy(2, seed=1), 4, shots, seed=0)
  assert len(seen[0]) == 4
  assert len(seen[1]) == 12
  assert seen[0] < seen[1]


def test_l2_never_depends_on_the_test_split():
  """Other test labels change the accuracy, not the choice."""
  train, test = toy(20, spread=1.0), toy(50, spread=1.0, seed=1)
  wrong = (test[0], (test[1] + 1) % 4)
  for seed in range(4):
    honest = fewshot.run_draw(train, test, 4, 5, seed)
    lied_to = fewshot.run_draw(train, wrong, 4, 5, seed)
    assert honest.l2 == lied_to.l2
    assert honest.accuracy != lied_to.accuracy


def test_l2_depends_on_images_outside_the_shots(monkeypatch):
  seen = {}
  real = fewshot.choose_l2

  def spy(regression, features, labels):
    seen['held_out'] = {tuple(row) for row in features}
    return real(regression, features, labels)

  monkeypatch.setattr(fewshot, 'choose_l2', spy)
  real_fit = fewshot.fit

  def spy_fit(features, labels, num_classes):
    seen['shots'] = {tuple(row) for row in features}
    return real_fit(features, labels, num_classes)

  monkeypatch.setattr(fewshot, 'fit', spy_fit)
  train, test = toy(10), toy(5, seed=1)
  fewshot.run_draw(train, test, 4, 3, seed=0)
  everything = {tuple(row) for row in train[0]}
  assert seen['shots'] | seen['held_out'] == everything
  assert not seen['shots'] & seen['held_out']
  assert not seen['held_out'] & {tuple(row) for row in test[0]}


def test_classes_with_fewer_images_are_reported():
  features, labels = toy(10)
  keep = np.concatenate([np.arange(3), np.arange(10, 40)])
  draw = fewshot.run_draw(
    (features[keep], labels[keep]), toy(10, seed=1), 4, 10, seed=0
  )
  assert draw.short_classes == 1
  assert draw.held_out == 0
  assert draw.l2 == 1024.0
  text = rendered({10: [draw]})
  assert '1 of 4 classes have fewer images' in text
  assert 'no training image left to choose' in text


def rendered(draws):
  console = rich.console.Console(file=io.StringIO(), width=200)
  console.print(fewshot.table(draws, 4, 'few-shot'))
  return console.file.getvalue()


def test_summary_and_table_by_hand():
  draws = [
    fewshot.Draw(accuracy=0.5, l2=4.0, held_out=7, short_classes=0),
    fewshot.Draw(accuracy=0.7, l2=16.0, held_out=7, short_classes=0),
  ]
  assert fewshot.summary({5: draws}) == pytest.approx(
    {
      '5shot': 0.6,
      '5shot_std': 0.1,
      '5shot_log2_l2': 3.0,
      '5shot_held_out': 7.0,
      '5shot_short_classes': 0.0,
    }
  )
  text = rendered({5: draws})
  assert '60.00 ± 10.00 %' in text
  assert '2, 4' in text
  assert 'L2 chosen on 7 training images' in text


def pixels(variables, batch):
  """Raw pixels: a poor representation, but a deterministic one."""
  image = batch['image'].astype(jnp.float32) * variables['scale']
  return image[..., 0].reshape(image.shape[0], -1)


def context(batch_size, devices=1, features=pixels):
  mesh = jax.make_mesh(
    (devices,),
    ('data',),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:devices],
  )
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  return evaluator.EvalContext(
    measure=lambda variables, batch: {},
    features=jax.jit(features),
    put=lambda batch: jax.device_put(batch, rows),
    seed=0,
    batch_size=batch_size,
    dataset=DIGITS,
    workdir='',
  )


def run(config, context, scale=1.0):
  built, every = evaluator.build(
    'fewshot', dict(type='fewshot', **config), context
  )
  assert every == 0
  return built.run({'scale': jnp.float32(scale)})


def test_digits_end_to_end_for_any_batch_size_and_device_count(capsys):
  config = dict(shots=(1, 10), seeds=2)
  first = run(config, context(batch_size=64))
  assert 0.3 < first['1shot'] < first['10shot'] < 1.0
  assert first['10shot'] > 0.8  # digits are easy even from pixels
  assert '10 draws' not in capsys.readouterr().out
  assert run(config, context(batch_size=200, devices=8)) == first


def test_result_ignores_the_scale_of_features():
  config = dict(shots=(5,), seeds=1)
  assert run(config, context(256)) == run(config, context(256), scale=2.0)


def test_diverged_features_are_an_error():
  with pytest.raises(FloatingPointError, match='finite'):
    run(dict(shots=(1,), seeds=1), context(256), scale=float('nan'))


def test_splits_with_other_classes_are_an_error(tmp_path):
  import cv2

  for path in ('train/cat', 'train/dog', 'test/cat', 'test/cow'):
    (tmp_path / path).mkdir(parents=True)
    cv2.imwrite(str(tmp_path / path / '0.png'), np.zeros((8, 8, 3), np.uint8))
  folder = dict(name='folder', root=str(tmp_path), image_size=8)
  with pytest.raises(ValueError, match=r'cow|classes'):
    run(dict(dataset=folder, shots=(1,)), context(8))


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('shots', ()),
    ('shots', (0,)),
    ('shots', (1, 1)),
    ('shots', 5),
    ('shots', (1.5,)),
    ('seeds', 0),
    ('train_split', ''),
    ('test_split', 'validation'),
    ('batch', 3),
    ('every_steps', -1),
  ],
)
def test_illegal_fields_are_named(field, value):
  entry = {'type': 'fewshot', field: value}
  with pytest.raises(ConfigError) as caught:
    evaluator.validate(dict(dataset=DIGITS, evals=dict(few=entry)))
  assert caught.value.field == f'evals.few.{field}'
  assert str(caught.value).startswith(f'evals.few.{field}: expected ')
  assert repr(value) in str(caught.value)


def test_empty_split_is_an_error():
  class Empty:
    def batches(self):
      return iter(())

  with pytest.raises(InvalidDataError, match='no example'):
    fewshot.extract_features(Empty(), context(8), {})
