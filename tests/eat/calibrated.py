"""A run of a small EAT with a real calibration, and policies of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError
from dataset_lib import builder, tokenizer
from eat import chain
from eat.task import FineTune
from eval_lib import evaluator
from serve_lib import bundle
from serve_lib.chain import Grid
from serve_lib.programs import Programs
from tests.contexts import eval_context
from tests.eat import small
from train_lib.task import ServedRun

WORDS = [f'w{number}' for number in range(40)]
VOCABULARY = '\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS])
LENGTH = 16
SIZES = dict(
  num_classes=2, vocab_size=44, max_positions=LENGTH, window=0,
  prune_layers=(1, 2), exit_layers=(3,),
)  # fmt: skip


def write_data(directory):
  """Writes SST-2 of random words; returns `config.dataset`."""
  vocabulary = directory / 'vocab.txt'
  vocabulary.write_text(VOCABULARY)
  rng = np.random.default_rng(0)
  for name, count in (('train', 200), ('dev', 150)):
    rows = [
      f'{" ".join(rng.choice(WORDS, rng.integers(2, 12)))}\t{rng.integers(2)}'
      for _ in range(count)
    ]
    lines = ['sentence\tlabel', *rows]
    (directory / f'{name}.tsv').write_text('\n'.join(lines))
  return dict(
    name='glue', task='sst2', directory=str(directory),
    tokenizer=str(vocabulary), max_length=LENGTH, length_buckets=(LENGTH,),
  )  # fmt: skip


def make(directory):
  """(directory, task, variables) of a run with a calibration."""
  dataset = write_data(directory)
  tokenizer.load(dataset['tokenizer']).save(directory / 'tokenizer.json')
  model, variables = small.build(**SIZES)

  @jax.jit
  def outputs(variables, batch):
    inputs = (batch[name] for name in ('tokens', 'token_types', 'length'))
    _, out = model.apply(variables, *inputs)
    return {'logits': jnp.swapaxes(out['exits'], 0, 1)}

  context = eval_context(dataset, outputs, 50, directory)
  entry = dict(
    type='calibration', split='validation', calibration_split='train',
    layers=model.heads(), threshold=0.55,
  )  # fmt: skip
  evaluator.build('calibration', entry, context).run(variables)
  certificate = dict(
    type='certificate', split='validation', layers=model.heads(),
    risk='disagreement', epsilon=0.2,
  )  # fmt: skip
  evaluator.build('certificate', certificate, context).run(variables)
  info = builder.build_source(dataset, 'train').info
  return directory, task_of(model, info, dataset), variables


def task_of(model, info, dataset):
  """A task with a model of its own, as a run of it would be read."""
  heads = len(chain.as_adaptive(model).heads())
  loss = dict(teacher='', exit_weights=(1.0,) * heads)
  return small.task(
    FineTune, model, info, model={'name': 'eat.model:EatClassifier'},
    dataset=dataset, dtype='float32', loss=loss,
  )  # fmt: skip


def build(run, options=None, lengths=None, **rest):
  """(chain, policy) of a run with options."""
  directory, task, variables = run
  context = ServedRun(str(directory), lengths=lengths, **rest)
  return task.serve(variables, options or {}, context)


def refused(run, options, field, expected, lengths=None):
  """Checks the error of options that cannot be served."""
  with pytest.raises(ConfigError) as error:
    build(run, options, lengths)
  assert error.value.field == field
  assert expected in error.value.expected


def bundled(path, chain, policy, on_drift=None):
  """The chain and the policy as read from a bundle."""
  programs = Programs(chain, Grid((LENGTH,), (1,)))
  bundle.write(path, programs, policy, {})
  again, found, grid = bundle.read(path, on_drift)
  assert grid == programs.grid
  assert again.variants == chain.variants
  assert found.reader.recipe == policy.reader.recipe
  stored = vars(policy).keys() - {'chain', 'reader', 'monitor'}
  for name in stored:
    assert getattr(found, name) == getattr(policy, name), name
  assert {'rule', 'heads', 'thresholds', 'temperatures', 'certified'} <= stored
  return again, found


def regression(run):
  """The run with a task of numbers."""
  task = run[1]
  info = dataclasses.replace(task.info, class_names=(), num_classes=1)
  return run[0], task_of(task.model, info, task.config['dataset']), run[2]
