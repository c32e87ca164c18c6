"""From logits to answers: probabilities, `Prediction`, the usual policy."""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import scipy.special
from annotated_types import MinLen
from jaxtyping import Bool, Float

from halting.row_rules import Temperature, scale, softmax
from serve_lib.chain import Encoded, Resizable, Row, Stage
from serve_lib.items import Size
from serve_lib.monitor import Monitor

GUARANTEED = 'guaranteed'  # the serving option that reads a certificate
# The option of families without thresholds: which model serves.
Setting = Literal['trained', 'guaranteed']
LIKELY = 0.5  # probability of a class that an answer of several has
Sizes = Annotated[tuple[Size, ...], MinLen(1)]


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The answer to one item."""

  # Name of the most probable class, or the predicted number of a regression.
  label: Any
  # By class name; empty for a regression, of several tasks such by task.
  probabilities: Mapping[str, Any]
  fields: Mapping[str, Any]  # of the policy, such as the exit reason

  def as_dict(self) -> dict[str, Any]:
    """Returns all fields that are not None, for JSON."""
    own = {'label': self.label, 'probabilities': dict(self.probabilities)}
    return own | {k: v for k, v in self.fields.items() if v is not None}


@dataclasses.dataclass(eq=False)
class ClassifierPolicy:
  """`serve_lib.chain.Policy` of a classifier; by default no row leaves early.

  Families override `decide`, `logits`, `combine` and `describe`. A bundle
  stores a policy by its 'module:Class' and its fields but the first two and
  `monitor`, as JSON that is checked by their annotations.
  """

  chain: Any  # the last output of a row has 'logits' [O]
  reader: Any  # of items; see `serve_lib.items`
  class_names: tuple[str, ...]  # of the labels; () for a regression
  lengths: Sizes  # length buckets, ascending
  _: dataclasses.KW_ONLY
  monitor: Monitor = dataclasses.field(default_factory=Monitor)
  warnings: tuple[str, ...] = ()  # lines for the user
  # Model, task and step, by these names.
  about: dict[str, Any] = dataclasses.field(default_factory=dict)
  several: bool = False  # classes do not exclude each other: sigmoids
  # Certified variants of the chain by source; '' for the other sources.
  certified: dict[str, str] = dataclasses.field(default_factory=dict)
  temperatures: tuple[Temperature, ...] = ()  # of each head, () for 1
  # JSON types of `Prediction.fields`, by name.
  FIELDS: ClassVar[Mapping[str, str]] = types.MappingProxyType(
    {'exit_reason': 'string', 'truncated': 'boolean'}
  )

  def encode(self, item: Any) -> Encoded:
    """Reads an item; see `serve_lib.chain.Policy`.

    Its variant is the certified one, during drift the first.
    """
    encoded = self.reader.read(item, self.chain.variants[0])
    variant = self._serving(source_of(encoded))
    if variant == encoded.variant:
      return encoded
    return dataclasses.replace(encoded, variant=variant)

  def _serving(self, source: str) -> str:
    """Returns the variant that now serves a source."""
    first = self.chain.variants[0]
    if self.monitor.full_depth(source):
      return first
    return self.certified.get(source, self.certified.get('', first))

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns True for the rows that leave."""
    return np.zeros(len(rows), bool)

  def logits(self, row: Row) -> Float[np.ndarray, 'E O']:
    """Returns the calibrated logits of the heads that `combine` uses."""
    logits = np.asarray(row.outputs[-1]['logits'], np.float64)[None]
    last = self.temperatures[-1:]
    return scale(logits, last) if len(last) else logits

  def combine(self, heads: Float[np.ndarray, 'E C']) -> Float[np.ndarray, ' C']:
    """Returns the probabilities of the answer from those of the heads."""
    return heads[-1]

  def describe(self, row: Row) -> tuple[int, float, dict[str, Any]]:
    """Returns depth, share of the work, and `Prediction.fields`.

    Depth and share are for `monitor`, such as the iterations and their share of
    the limit. Fields may be `exit_reason`, and `truncated` of a text.
    """
    truncated = row.encoded.context.get('truncated')
    return 1, 1.0, {'exit_reason': 'whole model', 'truncated': truncated}

  def answer(self, row: Row) -> Prediction:
    """Returns the prediction for a row and records its exit in `monitor`."""
    logits = self.logits(row)
    if not np.isfinite(logits).all():
      raise FloatingPointError(
        f'logits: expected finite numbers, got {logits.tolist()} at the heads '
        'that the row passed; the parameters are not finite, or the model '
        'overflows in its compute dtype'
      )
    label: Any = float(logits[-1, 0])
    probabilities: dict[str, float] = {}
    source = source_of(row.encoded)
    first = None  # confidence of head 0, for the drift check
    if names := self.class_names:
      heads = (scipy.special.expit if self.several else softmax)(logits)
      shares = self.combine(heads)
      label = names[int(shares.argmax())]
      probabilities = dict(zip(names, shares.tolist(), strict=True))
      # Not of rows that were encoded before drift began or ended.
      if row.encoded.variant == self._serving(source):
        first = float(heads[0].max())
    depth, share, fields = self.describe(row)
    if self.several:
      order = sorted(probabilities, key=lambda one: -probabilities[one])
      likely = (one for one in order if probabilities[one] >= LIKELY)
      fields['labels'] = tuple(likely)
    reason = fields.setdefault('exit_reason', 'whole model')
    is_cut = bool(fields.get('truncated'))
    self.monitor.record_exit(depth, reason, first, share, source, is_cut)
    return Prediction(label, probabilities, fields)


def source_of(encoded: Encoded) -> str:
  """Returns the source that a text names, '' for none."""
  return (encoded.context or {}).get('source', '')


class OneStage(Resizable):
  """A `Chain` of one stage, for a model without exits.

  `apply` maps variables and a batch of the reader to logits `[B, O]`.
  """

  num_stages = 1
  variants: tuple[str, ...] = ('whole',)

  def __init__(
    self, apply: Callable[[Any, Any], Any], variables: Any, reader: Any
  ):
    self.variables, self.reader, self.pad = variables, reader, reader.pad
    self._stage = lambda *inputs: ((), {'logits': apply(*inputs)})

  def sized(
    self, index: int, variant: str, sizes: Any, alone: bool = False
  ) -> Stage:
    """Returns the whole model."""
    return self._stage
