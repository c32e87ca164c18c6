"""A run of a small EAT with a real calibration, and services of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from eat import serving
from eat.task import FineTune
from eval_lib import evaluator
from serve_lib.chain import ServedRun
from tests.contexts import eval_context

WORDS = [f'w{number}' for number in range(40)]
LENGTH = 16
SIZES = dict(
  num_classes=2, vocab_size=44, max_positions=LENGTH, window=0,
  prune_layers=(1, 2), exit_layers=(3,),
)  # fmt: skip


def write_data(directory):
  """A vocabulary and SST-2 of random words; returns `config.dataset`."""
  vocabulary = directory / 'vocab.txt'
  vocabulary.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS]))
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


def outputs(model):
  def call(variables, batch):
    inputs = (batch[name] for name in ('tokens', 'token_types', 'length'))
    _, out = model.apply(variables, *inputs)
    return {'logits': jnp.swapaxes(out['exits'], 0, 1)}

  return jax.jit(call)


def calibrate(directory, dataset, model, variables, **entry):
  """Writes calibration.json as `launch.evaluate` does."""
  context = eval_context(dataset, outputs(model), 50, directory)
  entry = dict(
    type='calibration', split='validation', calibration_split='train',
    layers=model.heads(), threshold=0.55, **entry,
  )  # fmt: skip
  evaluator.build('calibration', entry, context).run(variables)


def task_of(model, info, dataset):
  """A task with a model of its own, as a run of it would be read."""
  heads = len(serving.as_adaptive(model).heads())
  config = dict(
    model={'name': 'eat.model:EatClassifier'}, dataset=dataset,
    dtype='float32', loss=dict(teacher='', exit_weights=(1.0,) * heads),
  )  # fmt: skip
  task = FineTune.__new__(FineTune)
  task.config, task.info, task.model = config, info, model
  return task


def build(run, options=None, lengths=None, **rest):
  """(chain, policy) of a run with options."""
  directory, task, variables = run
  context = ServedRun(str(directory), lengths=lengths, **rest)
  return task.serve(variables, options or {}, context)


def change(directory, **fields):
  """Replaces fields of calibration.json; None removes one."""
  path = directory / 'calibration.json'
  report = json.loads(path.read_text()) | fields
  kept = {key: value for key, value in report.items() if value is not None}
  path.write_text(json.dumps(kept))
  return report
