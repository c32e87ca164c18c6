"""Certified solving: how early may rows stop, and how early may they give up?

Of the puzzles that full depth solves at most a share epsilon is lost, with
confidence 1 - delta. The loss is 0 or 1, so the test is exact (binomial), on
the rows that full depth solves; `eval_lib.risk` states the conditions.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float, Int

from core import registry
from eval_lib import bounds, calibration, certificate, frontier
from looped.rules import AllIterations, AnswerRule, Evidence, Score

# The safest first.
TAUS = (1.0 - np.append(0.0, np.geomspace(1e-6, 0.9, 99))).tolist()
GIVE_UPS = np.append(0.0, np.geomspace(1e-6, 0.5, 39)).tolist()


class Record(NamedTuple):
  """What N iterations of R rows were like."""

  scores: Float[np.ndarray, 'R N']  # logits of "the answer is right"
  right: Bool[np.ndarray, 'R N']


class Chosen(NamedTuple):
  """The cheapest certified rule; all iterations if none is certified."""

  rule: AnswerRule
  bound: float | None = None  # of the share of lost puzzles


def certify(
  rows: Record, method: str, epsilon: float, delta: float, patience: int
) -> Chosen:
  """Returns thresholds that save most iterations.

  'sequence' tests values of tau from the safest on, without giving up;
  'pareto' values of both, see `eval_lib.risk.choose`.
  """
  half = np.arange(len(rows.right)) % 2 > 0
  if method == 'sequence':
    tried, tested = [Score(tau) for tau in TAUS], rows
  else:
    pairs = itertools.product(TAUS, GIVE_UPS)
    tried = [Score(*pair, patience) for pair in pairs]
    first, tested = take(rows, half), take(rows, ~half)
    stops = stops_of(first, tried)
    p_values = bounds.binomial(lost_of(first, stops), epsilon, delta)
    on_front = frontier.pareto(stops.mean(1), -p_values)
    order = np.argsort(p_values, kind='stable')
    tried = [tried[n] for n in order[on_front[order]]]
  stops = stops_of(tested, tried)
  lost = lost_of(tested, stops)
  passes = bounds.binomial(lost, epsilon, delta) <= delta
  certified = np.flatnonzero(np.logical_and.accumulate(passes))
  if not len(certified):
    return Chosen(AllIterations())
  best = certified[stops[certified].mean(1).argmin()]
  chosen = lost[:, best]
  bound = bounds.upper(bounds.binomial, lambda _: chosen, delta)
  return Chosen(tried[best], bound)


def take(rows: Record, which: Any) -> Record:
  """Returns some of the rows."""
  return Record(*(values[which] for values in rows))


def stops_of(
  rows: Record, tried: Sequence[AnswerRule]
) -> Int[np.ndarray, 'K R']:
  """Returns the index of the iteration in which each rule stops each row."""
  last = rows.right.shape[1] - 1
  steps = np.arange(1, last + 2)[None]
  evidence: Any = Evidence(rows.scores, None, None, None)
  result = np.full((len(tried), len(rows.right)), last, np.int32)
  for indices, rule in zip(result, tried, strict=True):
    stops = np.broadcast_to(
      rule.stops(steps, steps, evidence), rows.right.shape
    )
    indices[:] = np.where(stops.any(1), stops.argmax(1), last)
  return result


def lost_of(
  rows: Record, stops: Int[np.ndarray, 'K R']
) -> Bool[np.ndarray, 'S K']:
  """Returns which of the S rows that full depth solves are lost."""
  solved = np.flatnonzero(rows.right[:, -1])
  return ~rows.right[solved, stops[:, solved]].T


@dataclasses.dataclass(kw_only=True)
class Evaluator(certificate.Evaluator):
  """Certifies thresholds of the score; writes certificate.json.

  The rows may be neither of training nor those that are reported.
  """

  METRICS: ClassVar[Any] = (
    'saved', 'lost', 'bound', 'tau', 'give_up', 'rows_needed'
  )  # fmt: skip
  risk: Literal['lost'] = 'lost'  # type: ignore[assignment]
  method: Literal['sequence', 'pareto'] = 'sequence'
  epsilon: Annotated[float | int, Interval(gt=0.0, le=0.5)] = 0.01
  delta: Annotated[float | int, Interval(ge=1e-6, le=0.5)] = 0.05
  cheaper: Literal[False] = False
  patience: Annotated[int, Interval(ge=1, le=10_000)] = 4  # before giving up

  def run(self, variables: Any) -> dict[str, float]:
    """Returns `saved` (share of the iterations), `lost` (share, on the rows).

    If thresholds were certified also `bound`, `tau` and `give_up`, else
    `rows_needed`, the fewest solved rows.
    """
    parameters = calibration.fingerprint(variables)
    rows = self.collect('split', variables, self.context.outputs)
    record = record_of(rows)
    epsilon, delta = float(self.epsilon), float(self.delta)
    chosen = certify(record, self.method, epsilon, delta, self.patience)
    entry = self._entry_of(record, chosen, epsilon, delta)
    if chosen.bound is None:
      needed = bounds.least_rows(bounds.binomial, epsilon, delta)
      entry['rows_needed'] = needed * (1 + (self.method == 'pareto'))
      self.note = certificate.emptiness(entry) + certificate.about_rows(entry)
    self.store(entry, parameters, ())
    return {n: entry[n] for n in self.METRICS if entry.get(n) is not None}

  def _entry_of(
    self, record: Record, chosen: Chosen, epsilon: float, delta: float
  ) -> dict[str, Any]:
    """Returns the content of the file; see `serve_lib.classifier`."""
    described = registry.described(chosen.rule)
    stops = stops_of(record, [chosen.rule])
    lost, first = lost_of(record, stops), record.scores[:, 0]
    logits = np.stack([0 * first, first], -1)[None]
    drift = calibration.drift_statistics(logits, calibration.DRIFT_THRESHOLD)
    return {
      'tau': described.get('tau'),
      'give_up': described.get('give_up'),
      'model': {'rule': described, 'limit': record.right.shape[1]},
      'risk': self.risk,
      'method': self.method,
      'test': bounds.binomial.__name__,
      'epsilon': epsilon,
      'delta': delta,
      'rows': len(record.right),
      **self.rows_left(),
      'solved': len(lost),
      'bound': chosen.bound,
      'lost': float(lost.sum() / max(len(lost), 1)),
      'saved': float(1.0 - (stops + 1).mean() / record.right.shape[1]),
      'dataset': self.data,
      'split': self.split,
      # The model as trained, which serves during drift, has the same scores.
      'drift': drift | {'during': drift['confidences']},
    }


def record_of(rows: Mapping[str, np.ndarray]) -> Record:
  """Returns the record of collected `Unrolled.outputs`."""
  label = rows['label'][:, None]
  right = ((rows['answers'] == label) | (label == 0)).all(-1)
  return Record(rows['logits'][..., 1], right)
