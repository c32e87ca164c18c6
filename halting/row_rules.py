"""Rules by which a row leaves at a head, read from the head's logits.

EAT, section 3.3 (`max_c P >= tau`, patience), with the entropy of DeeBERT and
the patience of PABEE. A rule sees the heads one after the other: its state
holds the last answer and how many heads in a row agree on it. Logits are
calibrated, `[*S, C]`; those that are not finite never let a row leave.

CONTRIBUTING.md shows a rule of your own: a subclass of `ClassRule` with `sure`.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.scipy.special
import numpy as np
import scipy.special
from annotated_types import Interval, Predicate
from jaxtyping import Bool, Float, Int

from halting.rule import Arrays, HaltingRule, State, namespace, weigh


def _is_threshold(value: Any) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return is_number and not math.isnan(value)


# A number or, outside of configurations, an array with one for each row.
Limit = Annotated[Any, Predicate(_is_threshold), 'a number']
Count = Annotated[int, Interval(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Interval(ge=1e-3, le=1e3)]  # of a head's logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads(State):
  """The state of a `RowRule`; its steps are heads."""

  answer: Any  # float32, of the last head: a class, or the number it predicts
  agreed: Any  # int32: heads in a row, the last among them, of this answer


@dataclasses.dataclass(frozen=True)
class RowRule(HaltingRule):
  """A condition for a row to leave at a head."""

  KNOB: ClassVar[str] = ''  # the field that a sweep varies
  SWEEP: ClassVar[Sequence[float]] = ()  # its values
  SYMBOL: ClassVar[str] = ''  # of the knob, for labels in plots
  IS_DRAWN: ClassVar[bool] = True  # in the picture of where rows leave

  @property
  def name(self) -> str:
    """The class in lower case, which is the reason of an exit."""
    return type(self).__name__.lower()

  def __str__(self) -> str:
    knob = self.KNOB and f'={getattr(self, self.KNOB):g}'
    return self.name + knob

  @classmethod
  def sweep(cls, classes: int, heads: int) -> Iterable[int | float]:
    """Returns values of `KNOB` to try with `heads` heads before the last."""
    return cls.SWEEP

  @property
  def heads_needed(self) -> int | None:
    """The number of heads before a row can leave; None for never."""
    return 1

  @abc.abstractmethod
  def leaves(
    self, logits: Float[Arrays, '*S C'], agreed: Int[Arrays, '*S']
  ) -> Bool[Arrays, '*S']:
    """Returns which rows leave at a head, on whose answer `agreed` agree."""

  def answer(self, logits: Float[Arrays, '*S C']) -> Float[Arrays, '*S']:
    """Returns what `agrees` compares: the most probable class."""
    return logits.argmax(-1).astype('float32')

  def agrees(
    self, answer: Float[Arrays, '*S'], before: Float[Arrays, '*S']
  ) -> Bool[Arrays, '*S']:
    """Returns where a head agrees with the one before."""
    return answer == before

  def start(self, valid: Bool[Arrays, '*S']) -> Heads:
    """See the base."""
    xp = namespace(valid)
    zeros = xp.zeros_like(valid, dtype=xp.int32)
    answer = zeros.astype('float32')
    return Heads(zeros, valid, answer=answer, agreed=zeros)

  def step(self, state, evidence, is_last):
    """See the base; the weight is 1 at the head where a row leaves."""
    answer = self.answer(evidence)
    same = self.agrees(answer, state.answer) & (state.steps > 0)
    agreed = namespace(evidence).where(same, state.agreed + 1, 1)
    left = state.running & (self.leaves(evidence, agreed) | is_last)
    steps = state.steps + state.running.astype('int32')
    after = Heads(steps, state.running & ~left, answer, agreed)
    return after, left.astype('float32')

  def leaves_at(self, heads: Float[np.ndarray, 'E B C']) -> Any:
    """Returns which rows may leave at the last of the heads so far, `[B]`."""
    agreed = np.ones(heads.shape[1], np.int32)
    with np.errstate(invalid='ignore'):
      for before, answer in itertools.pairwise(self.answer(heads)):
        agreed = np.where(self.agrees(answer, before), agreed + 1, 1)
      return self.leaves(heads[-1], agreed)

  def first(self, heads: Float[np.ndarray, 'E B C']) -> Int[np.ndarray, '*K B']:
    """Returns the index of the head at which each row leaves, of all heads.

    A knob of shape `[K, 1]` is K rules at once.
    """
    with np.errstate(invalid='ignore'):
      state, _ = weigh(self, heads, np.ones(heads.shape[1], bool))
    return state.steps - 1


@dataclasses.dataclass(frozen=True)
class ClassRule(RowRule):
  """A rule of a classification."""

  # Rows whose two largest probabilities differ by less never leave early.
  veto_margin: Limit = dataclasses.field(default=0.0, kw_only=True)

  @abc.abstractmethod
  def sure(
    self, probabilities: Float[Arrays, '*S C'], agreed: Int[Arrays, '*S']
  ) -> Bool[Arrays, '*S']:
    """Returns which rows leave, but for the veto."""

  def leaves(self, logits, agreed):
    """See the base."""
    probabilities = softmax(logits)
    # The comparison is False for NaN; equal classes would let NaN pass.
    certain = margin(probabilities) >= as_type(self.veto_margin, probabilities)
    return certain & self.sure(probabilities, agreed)


@dataclasses.dataclass(frozen=True)
class ThresholdRule(ClassRule):
  """A rule that compares a measure of certainty with tau."""

  KNOB: ClassVar[str] = 'tau'
  NEVER: ClassVar[float] = math.inf  # value of tau that lets no row leave
  tau: Limit

  @classmethod
  def legal(cls, classes: int) -> tuple[float, str]:
    """Returns the largest useful tau, and the legal ones in words."""
    least = f'the surest of {classes} >= {1 / classes:.4g}'
    return 1.0, f'a probability in [0, 1], of {least}'


@dataclasses.dataclass(frozen=True)
class Confidence(ThresholdRule):
  """`max_c P >= tau`."""

  SYMBOL: ClassVar[str] = 'P≥'
  SWEEP: ClassVar = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
  tau: Limit = 0.9

  def sure(self, probabilities, agreed):
    """See the base."""
    return probabilities.max(-1) >= as_type(self.tau, probabilities)


@dataclasses.dataclass(frozen=True)
class Entropy(ThresholdRule):
  """`-sum_c P log P <= tau`, in nats."""

  SYMBOL: ClassVar[str] = 'H≤'
  SWEEP: ClassVar = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
  IS_DRAWN: ClassVar[bool] = False
  NEVER: ClassVar[float] = -math.inf

  @classmethod
  def sweep(cls, classes, heads):
    """Returns the shares `SWEEP` of the entropy of equal classes."""
    return tuple(round(share * math.log(classes), 4) for share in cls.SWEEP)

  @classmethod
  def legal(cls, classes):
    """See the base."""
    most = f'{math.log(classes):.4f}), the entropy of {classes} equal classes'
    text = f'nats in [0, {most}, at which every row would leave'
    return math.nextafter(math.log(classes), 0), text

  def sure(self, probabilities, agreed):
    """See the base."""
    is_host = isinstance(probabilities, np.ndarray)
    special = scipy.special if is_host else jax.scipy.special
    entropy = special.entr(probabilities).sum(-1)
    return entropy <= as_type(self.tau, probabilities)


@dataclasses.dataclass(frozen=True)
class Margin(ThresholdRule):
  """The largest P minus the second is at least tau."""

  SYMBOL: ClassVar[str] = 'Δ≥'
  SWEEP: ClassVar = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98)
  IS_DRAWN: ClassVar[bool] = False

  @classmethod
  def legal(cls, classes):
    """See the base."""
    return 1.0, 'a difference of two probabilities, in [0, 1]'

  def sure(self, probabilities, agreed):
    """See the base."""
    return margin(probabilities) >= as_type(self.tau, probabilities)


@dataclasses.dataclass(frozen=True)
class Patience(ClassRule):
  """The last `patience` heads, up to this one, have the same argmax."""

  KNOB: ClassVar[str] = 'patience'
  patience: Count = 2

  @classmethod
  def sweep(cls, classes, heads):
    """See the base."""
    return range(1, heads + 1)

  @property
  def heads_needed(self):
    """See the base."""
    return self.patience

  def sure(self, probabilities, agreed):
    """See the base."""
    return agreed >= self.patience


@dataclasses.dataclass(frozen=True)
class Combined(ThresholdRule):
  """Both `Confidence` and `Patience`."""

  IS_DRAWN: ClassVar[bool] = False
  patience: Count = 2

  @property
  def heads_needed(self):
    """See the base."""
    return self.patience

  def sure(self, probabilities, agreed):
    """See the base."""
    confident = probabilities.max(-1) >= as_type(self.tau, probabilities)
    return confident & (agreed >= self.patience)


@dataclasses.dataclass(frozen=True)
class Tolerance(RowRule):
  """Of a regression: the last `max(2, patience)` predictions are alike.

  Each differs from the one before by less than `tolerance`, in the unit of the
  label.
  """

  KNOB: ClassVar[str] = 'tolerance'
  SYMBOL: ClassVar[str] = '±'
  SWEEP: ClassVar = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
  tolerance: Limit = 0.1
  patience: Count = 2

  @property
  def heads_needed(self):
    """See the base."""
    return max(2, self.patience)

  def answer(self, logits):
    """Returns the predictions."""
    return logits[..., 0]

  def agrees(self, answer, before):
    """See the base; False for NaN."""
    return abs(answer - before) < as_type(self.tolerance, answer)

  def leaves(self, logits, agreed):
    """See the base."""
    return agreed >= self.heads_needed


@dataclasses.dataclass(frozen=True)
class Never(RowRule):
  """All rows leave at the last head."""

  @property
  def heads_needed(self):
    """See the base."""
    return None

  def leaves(self, logits, agreed):
    """See the base."""
    return agreed < 0


def scale(
  logits: Float[np.ndarray, 'E *B C'],
  temperatures: Sequence[float] | np.ndarray,
) -> Float[np.ndarray, 'E *B C']:
  """Divides the logits of each head by its temperature (Guo et al. 2017)."""
  shape = (-1,) + (1,) * (logits.ndim - 1)
  return logits / np.asarray(temperatures, logits.dtype).reshape(shape)


def softmax(logits: Float[Arrays, '*S C']) -> Float[Any, '*S C']:
  """Computes class probabilities."""
  powers = namespace(logits).exp(logits - logits.max(-1, keepdims=True))
  return powers / powers.sum(-1, keepdims=True)


def margin(probabilities: Float[Arrays, '*S C']) -> Float[Any, '*S']:
  """Returns the difference of the two largest probabilities."""
  ordered = namespace(probabilities).sort(probabilities, axis=-1)
  return ordered[..., -1] - ordered[..., -2]


def as_type(limit: Any, like: Arrays) -> Any:
  """Returns a number, or an array with one for each row, with a dtype."""
  return namespace(like).asarray(limit, dtype=like.dtype)
