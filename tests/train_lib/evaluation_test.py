"""Evaluations in a training: names of their metrics, and one that fails."""

import json
import time

import pytest

from core.errors import ConfigError, InvalidDataError
from eval_lib import evaluator
from train_lib import checkpoint_io, config_schema, trainer
from train_lib.build import Setup


def load(others=(), **checkpoint):
  """A run of 4 steps on digits, evaluated twice."""
  return config_schema.validate(dict(
    model=dict(
      name='model_lib.vit:ViT', depth=1, width=8, mlp_dim=8, num_heads=2,
      patch_size=4,
    ),
    dataset=dict(name='digits', image_size=8),
    batch_size=8, log_every=1, tensorboard=False, mesh=dict(data=1),
    phases=(dict(steps=4),),
    evals=dict(
      test=dict(type='classification', every_steps=2), **dict(others)
    ),
    checkpoint=checkpoint,
  ))  # fmt: skip


@pytest.mark.parametrize(
  ('metric', 'hint'),
  [
    ('test/acuracy', r"did you mean 'accuracy'"),
    ('test/class_accuracy', 'no such metric'),
    ('classes/accuracy_10', 'no such metric'),
    ('shots/10shots', r"did you mean '10shot'"),
    ('shots/7shot_std', 'no such metric'),
  ],
)
def test_a_metric_that_no_evaluation_has_is_refused_at_once(metric, hint):
  others = dict(
    classes=dict(type='classification', per_class=True),
    shots=dict(type='fewshot', shots=(10,)),
  )
  with pytest.raises(ConfigError, match=rf'^checkpoint.best_metric: .*{hint}'):
    Setup(load(others, best_metric=metric))


def row(line):
  values = json.loads(line).items()
  return {k: v for k, v in values if not k.startswith('time/')}


@pytest.mark.slow
@pytest.mark.parametrize('checkpoint', [dict(every_steps=2), *(
  pytest.param(one, marks=pytest.mark.nightly)
  for one in ({}, dict(best_metric='test/top5_accuracy'))
)])  # fmt: skip
def test_an_evaluation_that_fails_loses_no_step(
  checkpoint, tmp_path, monkeypatch
):
  config, run = load(**checkpoint), str(tmp_path / 'run')
  init, clock = Setup.init, time.time

  def jump(setup):
    patch.setattr(time, 'time', lambda: clock() + 1e8)  # by three years
    return init(setup)

  with monkeypatch.context() as patch:
    patch.setattr(Setup, 'init', jump)
    whole = trainer.train(config, str(tmp_path / 'whole'))
  assert 0 < whole['seconds_to_first_step'] < whole['seconds'] < 1e8

  def fail(self, variables):
    raise InvalidDataError('a bad record')

  with monkeypatch.context() as patch:
    patch.setattr(evaluator.Classification, 'run', fail)
    for _ in range(2):  # the resumed run evaluates first
      with pytest.raises(InvalidDataError, match='a bad record'):
        trainer.train(config, run)
      saved = checkpoint_io.find(run)
      assert (saved.step, saved.extra['unmeasured']) == (2, True)
  again = trainer.train(config, run)
  for name in filter(lambda name: '/' in name, whole):
    assert again[name] == whole[name]
  logs = [tmp_path / name / 'metrics.jsonl' for name in ('run', 'whole')]
  ours, theirs = (path.read_text().splitlines() for path in logs)
  assert [*map(row, ours)] == [*map(row, theirs)]
  saved = checkpoint_io.find(run)
  assert not saved.extra['unmeasured']
  assert saved.metrics['test/accuracy'] == again['test/accuracy']
