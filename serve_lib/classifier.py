"""Serves a trained classification; families share the parts.

`Task.SERVE` names a function of this module, or one of its form of a family:
`serve(task, options, run)` checks the options and returns a function from the
variables to (chain, policy). `run` is a `train_lib.task.ServedRun`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core import fields, files
from core.errors import ConfigError
from dataset_lib import tokenizer
from dataset_lib.text_tasks import num_texts
from serve_lib import certified
from serve_lib.decisions import ClassifierPolicy, OneStage
from serve_lib.items import (
  ImageReader,
  ItemReader,
  TextOptions,
  TextReader,
  TokenReader,
)

Serve = Callable[[Any], tuple[Any, Any]]  # from variables to (chain, policy)


def serve(task: Any, options: Mapping[str, Any], run: Any) -> Serve:
  """Serves a model of inputs of one size as one stage, without options."""
  for name, value in options.items():
    raise ConfigError(f'serve.{name}', value, 'no options for this model')
  if run.lengths is not None:
    raise ConfigError('lengths', run.lengths, 'none for inputs of one size')
  return functools.partial(one_stage, task, item_reader(task), (1,), run)


def serve_texts(task: Any, options: Mapping[str, Any], run: Any) -> Serve:
  """Serves a model of texts as one stage; options: `TextOptions`."""
  limit = read_options(TextOptions, options).max_characters
  lengths = text_lengths(task, run.lengths)
  reader = text_reader(task, lengths[-1], limit)
  return functools.partial(one_stage, task, reader, lengths, run)


def read_options(kind: Any, options: Mapping[str, Any]) -> Any:
  """Returns the checked options, an object of the dataclass `kind`."""
  return kind(**fields.check(kind, options, 'serve'))


def one_stage(
  task: Any, reader: Any, lengths: tuple[int, ...], run: Any, variables: Any
) -> tuple[OneStage, ClassifierPolicy]:
  """Returns chain and policy of a model without exits."""

  def apply(variables: Any, batch: Any) -> Any:
    model_state = variables.get('model_state', {})
    return task.apply(variables['params'], model_state, batch)[0]

  def chain(variables: Any, models: Any) -> OneStage:
    return OneStage(apply, variables, reader)

  return certified.serve(
    task, run, 'trained', '', lengths, chain, ClassifierPolicy
  )(variables)


def item_reader(task: Any, length: int = 1) -> ItemReader:
  """Returns the reader of items, images or token ids of one length bucket."""
  info = task.info
  if info.input_key == 'tokens':
    return TokenReader(length, info.input_shape[0], info.vocab_size)
  if info.input_key != 'image':
    raise ConfigError('task', info.input_key, 'images, tokens or texts')
  size = info.input_shape[0]
  # A data set that does not say has no central crop.
  settings = {'resize_small': size, 'max_pixels': files.MAX_PIXELS}
  settings |= {**task.config['dataset'], **info.preprocessing}
  return ImageReader(
    length, size, settings['resize_small'], settings['max_pixels']
  )


def text_lengths(task: Any, lengths: Sequence[int] | None) -> tuple[int, ...]:
  """Returns the requested buckets, or those of the training data, sorted."""
  longest, least = task.info.input_shape[0], tokenizer.MIN_LENGTH
  if lengths is None:
    return task.info.length_buckets or (longest,)
  buckets = sorted({*lengths}) or [0]
  if buckets[0] < 1 or not least <= buckets[-1] <= longest:
    rows = f'{longest}, the longest row of the run (dataset.max_length)'
    legal = f'numbers of tokens from 1 to {rows}, one of them >= {least}'
    raise ConfigError('lengths', tuple(lengths), legal)
  return tuple(buckets)


def text_reader(task: Any, max_length: int, max_characters: int) -> TextReader:
  """Returns the reader of texts; of token ids if there is no tokenizer."""
  dataset = task.config['dataset']
  path = dataset.get('tokenizer', '')
  # One token type has no place for a second text; a model without types
  # ignores those that a tokenizer gives.
  types = task.model.type_vocab_size or 2
  count: Any = 1 if types == 1 else num_texts(dataset)
  return TextReader(
    tokenizer.load(path) if path else None, max_length, max_characters,
    num_texts=count, vocab_size=task.model.vocab_size, num_types=types,
  )  # fmt: skip
