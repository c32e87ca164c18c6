"""Classification and regression of sentences and pairs of sentences.

The model is called as `model(tokens, token_types, length, row_keys=...)` and
may return logits of several heads, `out['exits']` `[E, B, O]`.
"""

import functools
import pathlib
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from core import fields, files
from core.errors import ConfigError
from dataset_lib import tokenizer
from dataset_lib.text_tasks import num_texts
from dataset_lib.tokenizer import MIN_LENGTH
from eval_lib.metrics import Average
from model_lib import convert, sizes
from serve_lib.chain import NO_RUN, ServedRun
from serve_lib.items import TextOptions, TextReader
from train_lib.classification import Classification
from train_lib.run_directory import CONFIG, TOKENIZER
from train_lib.task import Batch, model_errors


class TextClassification(Classification):
  """Cross-entropy of the last head; squared error if there is one class.

  `model.from_checkpoint` is the directory of a run or of a Hugging Face model;
  its sizes become defaults of `model`.
  """

  OPTIONS: ClassVar[Any] = TextOptions  # of serving
  # Variants, and defaults of the fields that a checkpoint determines.
  SIZES: ClassVar[sizes.Sizes] = sizes.BERT

  @classmethod
  def validate_config(cls, config: dict[str, Any]) -> None:
    """Also takes sizes from the checkpoint or the variant."""
    model, known = dict(config['model']), {}
    directory = model.pop('from_checkpoint', '')
    if model.get('variant'):
      with model_errors(model):
        known = cls.SIZES.fields(model['variant'])
    if directory:
      known |= checkpoint_fields(directory, cls.SIZES.defaults)
    config['model'] = known | model
    super().validate_config(config)

  def build_model(self) -> Any:
    """Returns the module; raises if vocabulary or length exceed it."""
    model, longest = super().build_model(), self.info.input_shape[0]
    if longest > model.max_positions:
      expected = f'at most the {model.max_positions} positions of the model'
      raise ConfigError('dataset.max_length', longest, expected)
    return model

  def save_assets(self, directory: pathlib.Path) -> None:
    """Writes the tokenizer to the directory of the run."""
    if path := self.config['dataset'].get('tokenizer', ''):
      tokenizer.load(path).save(directory / TOKENIZER)

  @property
  def is_regression(self) -> bool:
    """True if the label is a number instead of a class."""
    return self.info.num_classes == 1

  def example(self) -> dict[str, Array]:
    """Returns one short row."""
    row = jnp.zeros((1, 8), jnp.int32)
    length = jnp.array([8], jnp.int32)
    return {'tokens': row, 'token_types': row, 'length': length}

  def arguments(self, batch: Batch) -> tuple[Array, ...]:
    """Returns the positional arguments of the model."""
    return batch['tokens'], batch['token_types'], batch['length']

  def cross_entropy(
    self, logits: Float[Array, '*B O'], batch: Batch
  ) -> Float[Array, '*B']:
    """Returns cross-entropy in nats, or squared errors of a regression."""
    if self.is_regression:
      return jnp.square(logits[:, 0].astype(jnp.float32) - batch['label'])
    return super().cross_entropy(logits, batch)

  def quality(self, logits, entropy, batch) -> dict[str, Any]:
    """Returns accuracy and cross-entropy, or the squared error."""
    if self.is_regression:
      return {'squared_error': Average.from_values(entropy, batch['mask'])}
    return super().quality(logits, entropy, batch)

  def prepare_serving(self, options, run=NO_RUN):
    """Serves the model as one stage; the options are `OPTIONS`."""
    given = self.OPTIONS(**fields.check(self.OPTIONS, options, 'serve'))
    lengths = self.served_lengths(run.lengths)
    reader = self.text_reader(lengths[-1], given.max_characters)
    return functools.partial(self.serve_texts, given, reader, lengths, run)

  def serve_texts(
    self,
    given: Any,
    reader: TextReader,
    lengths: Sequence[int],
    run: ServedRun,
    variables: Any,
  ) -> Any:
    """Returns chain and policy for the given options."""
    return self.one_stage(reader, lengths, run, variables)

  def served_lengths(self, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the requested buckets, or those of the training data, sorted."""
    longest = self.info.input_shape[0]
    if lengths is None:
      return self.info.length_buckets or (longest,)
    buckets = sorted({*lengths}) or [0]
    if buckets[0] < 1 or not MIN_LENGTH <= buckets[-1] <= longest:
      expected = (
        f'numbers of tokens from 1 to {longest}, the longest row that the run '
        f'was trained on (dataset.max_length), one of them >= {MIN_LENGTH}'
      )
      raise ConfigError('lengths', tuple(lengths), expected)
    return tuple(buckets)

  def text_reader(self, max_length: int, max_characters: int) -> TextReader:
    """Returns the reader of texts; of token ids if there is no tokenizer."""
    dataset = self.config['dataset']
    path = dataset.get('tokenizer', '')
    words = tokenizer.load(path) if path else None
    limits = max_length, max_characters
    # One token type has no place for a second text; a model without types
    # ignores those that a tokenizer gives.
    types = self.model.type_vocab_size or 2
    texts = 1 if types == 1 else num_texts(dataset)
    return TextReader(
      words, *limits, texts, self.model.vocab_size, num_types=types
    )


def checkpoint_fields(directory: str, names: Collection[str]) -> dict[str, Any]:
  """Reads the named fields of the model of Hugging Face or of a run."""
  field = 'model.from_checkpoint'
  expected = 'the directory of a run or of a Hugging Face model'
  try:
    if convert.is_checkpoint(directory):
      found = convert.read_sizes(directory)
    else:
      path = pathlib.Path(directory) / CONFIG
      model = files.read_object(path)['model']
      found = {name: model[name] for name in names if name in model}
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ConfigError(field, directory, f'{expected} ({error})') from error
  if set(found) != set(names):
    expected += f' with the fields {", ".join(names)}'
    raise ConfigError(field, f'{directory} with {", ".join(found)}', expected)
  return found
