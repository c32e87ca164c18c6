"""When a row of a looped model stops: by its score, its answer, or a proof.

A rule reads the `Evidence` of an iteration. The same code runs in evaluation
(`replay`) and on the device of a server.
"""

import abc
import dataclasses
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float, Int

from halting.rule import Arrays, HaltingRule, State, namespace
from looped.puzzle import Puzzle

Share = Annotated[float, Interval(ge=0.0, le=1.0)]
Count = Annotated[int, Interval(ge=1, le=2**31 - 1)]


class Evidence(NamedTuple):
  """What an iteration says of each row; arrays of JAX or NumPy."""

  score: Any  # float32 `[B]`: logit of "the answer is right"
  answer: Any  # int `[B, S]`, the most probable symbols
  before: Any  # the same of the iteration before; 0 before the first
  question: Any  # int32 `[B, S]`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Iterations(State):
  """The state of an `AnswerRule`."""

  same: Any  # int32 `[B]`: iterations in a row that have this answer


@dataclasses.dataclass(frozen=True)
class AnswerRule(HaltingRule):
  """Base of the rules, which say in `stops` what halts a row."""

  def start(self, valid: Bool[Arrays, ' B']) -> Iterations:
    """See the base."""
    zeros = namespace(valid).zeros_like(valid, dtype='int32')
    return Iterations(zeros, valid, same=zeros)

  def step(self, state, evidence, is_last):
    """See the base; the weight is 1 in the iteration that halts."""
    xp = namespace(evidence.score)
    unchanged = (evidence.answer == evidence.before).all(-1)
    same = xp.where(unchanged, state.same + 1, 1)
    steps = state.steps + state.running.astype('int32')
    stops = state.running & (self.stops(steps, same, evidence) | is_last)
    after = Iterations(steps, state.running & ~stops, same=same)
    return after, stops.astype('float32')

  @abc.abstractmethod
  def stops(
    self, steps: Int[Arrays, ' B'], same: Int[Arrays, ' B'], evidence: Evidence
  ) -> Bool[Arrays, ' B']:
    """Returns the rows that stop after `steps`; see `Iterations.same`."""

  def gives_up(
    self, steps: Int[Arrays, ' B'], evidence: Evidence
  ) -> Bool[Arrays, ' B']:
    """Returns the rows that are to stop without a solution."""
    return steps < 0


@dataclasses.dataclass(frozen=True)
class AllIterations(AnswerRule):
  """A fixed number of iterations for every row, as in published evaluations."""

  KEEPS_STATE: ClassVar[bool] = False

  def stops(self, steps, same, evidence):
    """See the base."""
    return steps < 0


@dataclasses.dataclass(frozen=True)
class Score(AnswerRule):
  """The model's own opinion: probability of a right answer >= tau.

  With tau = 1/2 the rule of TRM's training (`q > 0`), which stops too early.
  After `patience` iterations a row also stops where the probability is below
  `give_up`.
  """

  tau: Share = 0.9
  give_up: Share = 0.0
  patience: Count = 1

  def stops(self, steps, same, evidence):
    """See the base."""
    # A device may round a logistic function in its own way, but no comparison.
    return (evidence.score >= logit(self.tau)) | self.gives_up(steps, evidence)

  def gives_up(self, steps, evidence):
    """See the base."""
    unlikely = evidence.score < logit(min(self.tau, self.give_up))
    return unlikely & (steps >= self.patience)


@dataclasses.dataclass(frozen=True)
class Unchanged(AnswerRule):
  """The last `patience` iterations, up to this one, have the same answer."""

  patience: Annotated[int, Interval(ge=2, le=10_000)] = 2

  def stops(self, steps, same, evidence):
    """See the base."""
    return same >= self.patience


@dataclasses.dataclass(frozen=True)
class Verified(AnswerRule):
  """The answer is proved right: no puzzle is lost by stopping."""

  puzzle: Puzzle

  def stops(self, steps, same, evidence):
    """See the base."""
    return self.puzzle.solved(evidence.question, evidence.answer)


def logit(share: float) -> float:
  """Returns the float32 whose logistic function is a share, or infinity."""
  with np.errstate(divide='ignore'):
    return float(np.float32(np.log(share) - np.log1p(-share)))


def replay(
  rule: AnswerRule,
  scores: Float[np.ndarray, 'B N'],
  answers: Int[np.ndarray, 'B N S'],
  question: Int[np.ndarray, 'B S'],
) -> Int[np.ndarray, ' B']:
  """Returns the iterations that rows would take, from a record of N."""
  state, before = rule.start(np.ones(len(scores), bool)), 0 * question
  for n in range(scores.shape[1]):
    evidence = Evidence(scores[:, n], answers[:, n], before, question)
    state, _ = rule.step(state, evidence, n == scores.shape[1] - 1)
    before = answers[:, n]
  return state.steps
