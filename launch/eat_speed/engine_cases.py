"""EAT and a dense model through the engine, as its users get them.

The engine's policy is the library's own, asked about every row as in service;
only its answer is replaced by a plan, so that a given share of the rows leaves
at the first head.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from eat.policy import EatPolicy
from eat.serving import EatChain
from launch.eat_speed import contender, forms
from serve_lib.chain import Encoded, Failure
from serve_lib.decisions import Prediction
from serve_lib.engine import Engine
from serve_lib.schedule import doubling
from serve_lib.text_items import TextReader

CLASS_NAMES = ('first', 'second')


class PlannedPolicy(EatPolicy):
  """Serves rows by number and lets out a planned share of them.

  Attributes:
    rate: percent of the rows that leave at the first head.
    first_exit: layer of the first head.

  Args:
    chain: the model.
    rows: token ids of each row.
  """

  def __init__(self, chain: EatChain, rows: Sequence[np.ndarray]):
    super().__init__(
      chain,
      TextReader(None, max(map(len, rows))),
      CLASS_NAMES,
      (max(map(len, rows)),),
    )
    self.rate = 0
    self.first_exit = chain.heads[0]
    self._rows, self._form = rows, chain.variants[0]

  def encode(self, item: int) -> Encoded:
    """The row of a number, again and again."""
    tokens = self._rows[item % len(self._rows)]
    return Encoded(
      inputs={'tokens': tokens, 'token_types': np.zeros_like(tokens)},
      length=len(tokens),
      variant=self._form,
      context={'source': '', 'truncated': False, 'number': item},
    )

  def decide(self, stage, rows, outputs) -> Bool[np.ndarray, ' b']:
    """What is planned; the rule is asked too, for its cost."""
    super().decide(stage, rows, outputs)
    numbers = np.array([row.encoded.context['number'] for row in rows])
    return leaves(numbers, self.rate)


def leaves(numbers: np.ndarray, rate: int) -> Bool[np.ndarray, '...']:
  """Which rows leave: `rate` percent of them, spread evenly.

  Exact for a number of rows of which `rate` percent is whole.
  """
  return (numbers + 1) * rate // 100 > numbers * rate // 100


def build(specification: Mapping[str, Any]) -> contender.Built:
  """EAT in the engine: a case for each batch size and exit rate.

  At batch 1 a request is sent when the one before has been answered.

  Args:
    specification: see `launch.eat_speed.lineup.specification`.
  """
  model, params = forms.load(specification)
  chain = forms.eat_chain(model, params, specification)
  tokens = contender.token_rows(specification, model.vocab_size)
  cases: dict[str, Callable[[], int]] = {}
  scores: Any = ()
  for batch in specification['batches']:
    policy = PlannedPolicy(chain, list(tokens))
    engine = Engine(chain, policy, (specification['length'],), doubling(batch))
    engine.warm_up()
    rows = specification['rows'][str(batch)]
    if not len(scores):
      first = engine.predict(range(contender.CHECKED_ROWS))
      scores = np.array([_score(answer) for answer in first])
    for rate in specification['rates']:
      cases[f'{batch}/{rate}'] = _case(engine, policy, rows, rate, batch == 1)
  return contender.Built(cases, scores, *forms.describe())


def _case(
  engine: Engine, policy: PlannedPolicy, rows: int, rate: int, alone: bool
) -> Callable[[], int]:
  def run() -> int:
    policy.rate = rate
    if alone:
      answers = [engine.submit(number).result() for number in range(rows)]
    else:
      answers = engine.predict(range(rows))
    left = sum(_depth(answer) == policy.first_exit for answer in answers)
    if left * 100 != rate * rows:
      raise RuntimeError(f'{left} of {rows} rows left early, expected {rate} %')
    return rows

  return run


def build_lengths(specification: Mapping[str, Any]) -> contender.Built:
  """The dense model in the engine: everything padded, and in length buckets.

  Args:
    specification: with 'length_buckets', 'row_lengths' and 'capacity', the
      largest batch.
  """
  model, params = forms.load(specification)
  chain = forms.dense_chain(model, params)
  buckets = tuple(specification['length_buckets'])
  longest = dict(specification, length=buckets[-1], batches=[1])
  tokens = contender.token_rows(longest, model.vocab_size)[0]
  rows = [tokens[:length] for length in specification['row_lengths']]
  cases: dict[str, Callable[[], int]] = {}
  for name, lengths in (('padded', buckets[-1:]), ('buckets', buckets)):
    policy = PlannedPolicy(chain, rows)
    # Fewer sizes of batches than in service: each is compiled at every length.
    batches = doubling(specification['capacity'])[::2]
    engine = Engine(
      chain, policy, lengths, sorted({*batches, specification['capacity']})
    )
    engine.warm_up()
    cases[name] = _all_answered(engine, len(rows))
  return contender.Built(cases, (), *forms.describe())


def _all_answered(engine: Engine, rows: int) -> Callable[[], int]:
  def run() -> int:
    for answer in engine.predict(range(rows)):
      _depth(answer)
    return rows

  return run


def _depth(answer: Prediction | Failure) -> int:
  if isinstance(answer, Failure):
    raise RuntimeError(f'no answer: {answer.during}') from answer.error
  return answer.depth


def _score(answer: Prediction) -> float:
  """See `contender.score`, of probabilities."""
  logits = np.log([answer.probabilities[name] for name in CLASS_NAMES])
  return float(logits[1] - logits[0])
