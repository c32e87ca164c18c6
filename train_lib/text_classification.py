"""Classification and regression of sentences and pairs of sentences.

The model is called as `model(tokens, token_types, length, row_keys)` and may
return logits of several heads, `out['exits']` `[E, B, O]`. A data set with one
class is a regression: squared error instead of cross-entropy.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float

from dataset_lib import fields, tokenizer
from dataset_lib.errors import ConfigError
from dataset_lib.text_tasks import num_texts
from dataset_lib.tokenizer import MIN_LENGTH
from eval_lib.metrics import Average
from model_lib import convert, sizes
from serve_lib.chain import NO_RUN
from serve_lib.items import MAX_CHARACTERS, TextReader
from train_lib import strict_json
from train_lib.classification import Classification, one_stage
from train_lib.run_directory import TOKENIZER
from train_lib.task import Batch, model_errors

_INIT_LENGTH = 8


class TextClassification(Classification):
  """Cross-entropy or squared error of the last head.

  A data set with one class is a regression: squared error instead of
  cross-entropy. `model.from_checkpoint` is the directory of a run or of a
  Hugging Face model: the fields that it determines are those of its model
  unless they are given.

  Attributes:
    SIZES: variants and defaults of the fields that a checkpoint determines.
  """

  SIZES: ClassVar[sizes.Sizes] = sizes.BERT

  @classmethod
  def complete(cls, config: dict[str, Any]) -> None:
    """Also asks the checkpoint or variant; see `Classification.complete`."""
    model = dict(config['model'])
    directory = model.pop('from_checkpoint', '')
    known: dict[str, Any] = {}
    if model.get('variant'):
      with model_errors(model):
        known = cls.SIZES.fields(model['variant'])
    if directory:
      known |= checkpoint_fields(directory, cls.SIZES.defaults)
    config['model'] = known | model
    super().complete(config)

  def build_model(self) -> Any:
    """Returns the module, large enough for the data set.

    Raises:
      ConfigError: the tokenizer or the longest row does not fit the model.
    """
    model = super().build_model()
    if self.info.vocab_size > model.vocab_size:
      raise ConfigError(
        'model.vocab_size',
        model.vocab_size,
        f'at least the {self.info.vocab_size} ids of the tokenizer',
      )
    if self.info.input_shape[0] > model.max_positions:
      raise ConfigError(
        'dataset.max_length',
        self.info.input_shape[0],
        f'at most the {model.max_positions} positions of the model',
      )
    return model

  def save_assets(self, directory: pathlib.Path) -> None:
    """Writes the tokenizer to the directory of the run."""
    path = self.config['dataset'].get('tokenizer', '')
    if path:
      tokenizer.load(path).save(directory / TOKENIZER)

  @property
  def is_regression(self) -> bool:
    """True if the label is a number instead of a class."""
    return self.info.num_classes == 1

  def init(self, rng):
    """Initializes with one short row; see `Task.init`."""
    row = jnp.zeros((1, _INIT_LENGTH), jnp.int32)
    length = jnp.full((1,), _INIT_LENGTH, jnp.int32)
    variables = self.model.init(rng, row, row, length)
    model_state = {k: v for k, v in variables.items() if k != 'params'}
    return variables['params'], model_state

  def apply(
    self, params, model_state, batch, row_keys=None, **options
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Runs the model; `options` are its further keywords, such as knobs."""
    return self.model.apply(
      {'params': params, **model_state},
      batch['tokens'],
      batch['token_types'],
      batch['length'],
      row_keys,
      **options,
    )

  def cross_entropy(
    self, logits: Float[Array, 'B O'], batch: Batch
  ) -> Float[Array, ' B']:
    """Returns cross-entropy in nats, or squared errors of a regression."""
    if self.is_regression:
      return jnp.square(logits[:, 0].astype(jnp.float32) - batch['label'])
    return super().cross_entropy(logits, batch)

  def quality(self, logits, entropy, batch) -> dict[str, Any]:
    """Returns accuracy and cross-entropy, or the squared error."""
    if self.is_regression:
      return {'squared_error': Average.from_values(entropy, batch['mask'])}
    return super().quality(logits, entropy, batch)

  def outputs(self, params, model_state, batch):
    """Returns `'logits'` `[B, E, O]` of all heads, `'kept'` `[B, P]` if any."""
    logits, out = self.apply(params, model_state, batch)
    exits = out['exits'] if 'exits' in out else logits[None]
    result = {'logits': jnp.swapaxes(exits, 0, 1), 'length': batch['length']}
    if 'kept' in out:
      result['kept'] = jnp.swapaxes(out['kept'], 0, 1)
    return result

  def serve(self, variables, options, run=NO_RUN):
    """Serves the model as one stage; the option is 'max_characters'."""
    given = fields.check(TextOptions, options, 'serve')
    lengths = self.served_lengths(run.lengths)
    reader = self.text_reader(lengths[-1], given['max_characters'])
    return one_stage(self, variables, reader, lengths)

  def served_lengths(self, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the length buckets of a service, in tokens, ascending.

    Args:
      lengths: wanted buckets; None for those of the training data.

    Raises:
      ConfigError: one is longer than the rows that the model was trained on,
        or the longest has no room for a pair of texts.
    """
    longest = self.info.input_shape[0]
    if lengths is None:
      return self.info.length_buckets or (longest,)
    buckets = tuple(sorted({*lengths}))
    if not (
      buckets and buckets[0] >= 1 and MIN_LENGTH <= buckets[-1] <= longest
    ):
      raise ConfigError(
        'lengths',
        tuple(lengths),
        f'numbers of tokens from 1 to {longest}, the longest row that the run '
        f'was trained on (dataset.max_length), and the longest at least '
        f'{MIN_LENGTH}',
      )
    return buckets

  def text_reader(self, max_length: int, max_characters: int) -> TextReader:
    """Returns the reader of texts; of token ids if there is no tokenizer.

    Args:
      max_length: in tokens; longer texts are cut off.
      max_characters: longest legal text.
    """
    dataset = self.config['dataset']
    path = dataset.get('tokenizer', '')
    return TextReader(
      tokenizer.load(path) if path else None,
      max_length,
      max_characters,
      num_texts(dataset),
      self.model.vocab_size,
    )


def checkpoint_fields(directory: str, names: Collection[str]) -> dict[str, Any]:
  """Reads the fields of `model` that a checkpoint determines.

  Args:
    directory: of a Hugging Face model or of a run.
    names: the fields.

  Raises:
    ConfigError: the directory is neither, or has an unsupported option.
  """
  field = 'model.from_checkpoint'
  expected = 'the directory of a run or of a Hugging Face model'
  try:
    if convert.is_checkpoint(directory):
      found = convert.read_sizes(directory)
    else:
      found = strict_json.loads(
        (pathlib.Path(directory) / 'config.json').read_text()
      )['model']
      found = {name: found[name] for name in names if name in found}
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ConfigError(field, directory, f'{expected} ({error})') from error
  if set(found) != set(names):
    expected = f'{expected} with the fields {", ".join(names)}'
    given = f'{directory} with {", ".join(found)}'
    raise ConfigError(field, given, expected)
  return found


@dataclasses.dataclass(frozen=True)
class TextOptions:
  """Options of serving a model of texts without exits.

  Attributes:
    max_characters: of one text; a longer one is an error and not truncated.
  """

  max_characters: Annotated[int, Interval(ge=1, le=2**31 - 1)] = MAX_CHARACTERS
