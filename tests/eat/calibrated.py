"""A run of a small EAT with a real calibration, and services of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from eat import service
from eval_lib import evaluator
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
  evaluator.build('calibration', entry, context)[0].run(variables)


def build(run, options=None, thresholds=None, minimum_retention=None, **rest):
  directory, task, variables = run
  return service.build(
    task, variables, str(directory), options or {}, thresholds or {},
    minimum_retention or {}, **rest,
  )  # fmt: skip


def change(directory, **fields):
  """Replaces fields of calibration.json; None removes one."""
  path = directory / 'calibration.json'
  report = json.loads(path.read_text()) | fields
  kept = {key: value for key, value in report.items() if value is not None}
  path.write_text(json.dumps(kept))
  return report
