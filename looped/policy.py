"""Reader, policy and options of a served solver of puzzles."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Int

from core import registry
from looped.puzzle import Puzzle, Symmetry
from looped.rules import Share, sigmoid
from serve_lib.chain import Encoded, InputError, Row
from serve_lib.decisions import ClassifierPolicy, Prediction, Setting, source_of
from serve_lib.items import ItemReader, Size

_SEED = 0  # of the symmetries of attempts


@dataclasses.dataclass(frozen=True)
class PuzzleReader(ItemReader):
  """Reads a puzzle, typed as `Puzzle.read` says, or `{'puzzle': text}`.

  Each of `attempts` sees it in another form of its symmetry group, the first as
  it is; 'source' may name the origin of the row.
  """

  KIND, NAME = 'looped.policy:PuzzleReader', 'puzzle'
  puzzle: Puzzle
  attempts: Size = 1

  @property
  def recipe(self) -> dict[str, Any]:
    """See `Reader`."""
    return super().recipe | {'puzzle': registry.described(self.puzzle)}

  def read(self, item: Any, variant: str) -> Encoded:
    """Reads an item; see `ItemReader`."""
    source = ''
    if isinstance(item, Mapping) and isinstance(item.get('source'), str):
      source = item['source']
      item = {k: v for k, v in item.items() if k != 'source'}
    encoded = super().read(item, variant)
    return dataclasses.replace(encoded, context={'source': source})

  def convert(self, value: Any) -> Int[np.ndarray, 'K S']:
    """Returns the question in the form of each attempt."""
    if not isinstance(value, str):
      kind = type(value).__name__
      raise InputError(f'puzzle: expected a text, got {kind}')
    try:
      question = self.puzzle.read(value)
    except ValueError as error:
      raise InputError(f'puzzle: {error}') from error
    forms = (self.symmetry(number) for number in range(self.attempts))
    return np.stack([form.apply(question) for form in forms])

  def symmetry(self, attempt: int) -> Symmetry:
    """Returns the form that an attempt sees."""
    if not attempt:
      cells, symbols = self.puzzle.cells, len(self.puzzle.symbols)
      return Symmetry(np.arange(cells), np.arange(symbols))
    return self.puzzle.symmetry(np.random.default_rng((_SEED, attempt)))

  @property
  def example(self) -> Int[np.ndarray, 'K S']:
    """A question of padding."""
    return np.zeros((self.attempts, self.puzzle.cells), np.int32)


@dataclasses.dataclass(eq=False)
class LoopedPolicy(ClassifierPolicy):
  """Rows leave the loop when their rule, or one of their attempts, halts."""

  _: dataclasses.KW_ONLY
  limit: Size = 1  # iterations

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns the rows that have halted."""
    return ~np.asarray(outputs['running'])

  def answer(self, row: Row) -> Prediction:
    """Returns the filled board; its fields say why and when the row halted."""
    last, reader = row.outputs[-1], self.reader
    score = float(last['logits'][0])
    if not np.isfinite(score):
      raise FloatingPointError(f'score: expected a finite number, got {score}')
    steps, form = int(last['steps']), reader.symmetry(int(last['attempt']))
    filled = form.undo(last['answer'])
    question = row.encoded.inputs[reader.NAME][0]
    right = bool(reader.puzzle.solved(question[None], filled[None])[0])
    reason = 'halted' if steps < self.limit else 'last iteration'
    reason = 'given up' if last['hopeless'] else reason
    probability = float(sigmoid(np.float64(score)))
    fields = dict(
      iterations=steps, exit_reason=reason, verified=right, score=probability
    )
    first = float(sigmoid(np.float64(last['first'])))
    self.monitor.record_exit(
      steps, reason, max(first, 1 - first), steps / self.limit,
      source_of(row.encoded), False,
    )  # fmt: skip
    return Prediction(reader.puzzle.write(filled), {}, fields)


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of serving a solver; `tau`, `patience`, `give_up`: of the rule."""

  # The model's rule, or another class of `looped.rules`.
  rule: Literal['', 'score', 'unchanged', 'verified', 'all'] = ''
  tau: Share | None = None
  give_up: Share | None = None
  patience: Annotated[int, Interval(ge=1, le=10_000)] | None = None
  limit: Annotated[int, Interval(ge=1, le=1_000_000)] | None = None
  iterations: Size = 1  # in a visit of the loop
  # Forms of a puzzle that race; the first that halts is the answer.
  attempts: Annotated[int, Interval(ge=1, le=1024)] = 1
  setting: Setting = 'trained'  # 'guaranteed' is that of the certificate
