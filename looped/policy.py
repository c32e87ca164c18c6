"""Reader, policy and options of a served solver of puzzles."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import scipy.special
from annotated_types import Interval
from jaxtyping import Bool, Int

from core.errors import ConfigError
from looped.puzzle import Example, Puzzle, Symmetry
from looped.rules import Share
from serve_lib.chain import Encoded, InputError, Row, kind_of
from serve_lib.decisions import ClassifierPolicy, Prediction, Setting, source_of
from serve_lib.items import ItemReader, Size

SEED = 0  # of the symmetries of attempts
Attempts = Annotated[int, Interval(ge=1, le=1024)]


@functools.lru_cache(maxsize=64)
def forms_of(puzzle: Puzzle, count: int) -> tuple[Symmetry, ...]:
  """Returns different forms of a puzzle, the first as typed."""
  cells, symbols = np.arange(puzzle.cells), np.arange(len(puzzle.symbols))
  forms: dict[Any, Symmetry] = {}
  rng = np.random.default_rng(SEED)
  form = Symmetry(cells, symbols)
  while len(forms) < count:
    forms.setdefault((*form.cells.tolist(), *form.symbols.tolist()), form)
    form = puzzle.symmetry(rng)
  return (*forms.values(),)


@dataclasses.dataclass(frozen=True)
class PuzzleReader(ItemReader):
  """Reads a puzzle, typed as `Puzzle.examine` says, or `{'puzzle': text}`.

  Each of `attempts` sees it in another form of its symmetry group, the first as
  typed. The context of a row has its 'difficulty'.
  """

  NAME = 'puzzle'
  WORK = 2**14  # in bytes of text; a server reads so much in a turn
  puzzle: Puzzle
  attempts: Attempts = 1

  def __post_init__(self):
    if self.attempts > (most := self.puzzle.FORMS):
      expected = f'at most {most}, the forms of the puzzle'
      raise ConfigError('attempts', self.attempts, expected)

  def read(self, item: Any, variant: str) -> Encoded:
    """Reads an item; `{'text': text}` is how a string comes over HTTP."""
    context: dict[str, Any] = {'source': ''}
    if isinstance(item, Mapping):
      item = {**item}
      if 'text' in item and self.NAME not in item:
        item[self.NAME] = item.pop('text')
      if isinstance(item.get('source'), str):
        context['source'] = item.pop('source')
    encoded = super().read(item, variant)
    example: Example = encoded.inputs[self.NAME]
    forms = forms_of(self.puzzle, self.attempts)
    rows = np.stack([form.apply(example.question) for form in forms])
    context['difficulty'] = example.difficulty
    inputs = {self.NAME: rows}
    return dataclasses.replace(encoded, inputs=inputs, context=context)

  def convert(self, value: Any) -> Any:
    """Returns the `Example` of a text; see `ItemReader`."""
    if not isinstance(value, str):
      got = kind_of(type(value))
      raise InputError(f'puzzle: expected a text, got {got}')
    try:
      return self.puzzle.examine(value)
    except ValueError as error:
      raise InputError(f'puzzle: {error}') from error

  @property
  def example(self) -> Int[np.ndarray, 'K S']:
    """A question of padding."""
    return np.zeros((self.attempts, self.puzzle.cells), np.int32)


@dataclasses.dataclass(eq=False)
class LoopedPolicy(ClassifierPolicy):
  """Rows leave the loop when their rule, or one of their attempts, halts."""

  _: dataclasses.KW_ONLY
  limit: Size = 1  # iterations
  rule: str = ''  # for people; '': that of the certificate of a row
  FIELDS = {
    'depth': 'integer', 'iterations': 'integer', 'exit_reason': 'string',
    'verified': 'boolean', 'score': 'number', 'difficulty': 'integer',
  }  # fmt: skip

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns the rows that have halted."""
    if not stage:
      return np.zeros(len(rows), bool)
    for row in rows:  # the engine counts visits; only the last is read
      row.outputs[-2] = {}
    return ~np.asarray(outputs['running'])

  def answer(self, row: Row) -> Prediction:
    """Returns the filled board; its fields say why and when the row halted."""
    last, encoded, puzzle = row.outputs[-1], row.encoded, self.reader.puzzle
    scores = np.array([last['logits'][0], last['first']], np.float64)
    if not np.isfinite(scores).all():
      raise FloatingPointError(f'scores: expected finite numbers, got {scores}')
    probability, first = scipy.special.expit(scores).tolist()
    steps = int(last['steps'])
    forms = forms_of(puzzle, self.reader.attempts)
    filled = forms[int(last['attempt'])].undo(last['answer'])
    question = encoded.inputs[self.reader.NAME][0]
    reason = 'halted' if last['halted'] else 'last iteration'
    reason = 'given up' if last['hopeless'] else reason
    difficulty = encoded.context['difficulty']
    self.monitor.record_exit(
      steps, reason, max(first, 1 - first), steps / self.limit,
      source_of(encoded), difficulty=difficulty,
    )  # fmt: skip
    fields = {
      'depth': steps, 'iterations': steps, 'exit_reason': reason,
      'verified': bool(puzzle.solved(question, filled)),
      'score': probability, 'difficulty': difficulty,
    }  # fmt: skip
    return Prediction(puzzle.write(filled), {}, fields)


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of serving a solver; `tau`, `patience`, `give_up`: of the rule."""

  # 'score', 'unchanged', 'verified', 'all', 'package.module:Class', or '' for
  # the model's own.
  rule: str = ''
  tau: Share | None = None
  give_up: Share | None = None
  patience: Annotated[int, Interval(ge=1, le=10_000)] | None = None
  limit: Annotated[int, Interval(ge=1, le=1_000_000)] | None = None
  iterations: Size = 1  # in a visit of the loop
  # Forms of a puzzle that race; the first that halts is the answer.
  attempts: Attempts = 1
  setting: Setting = 'trained'  # 'guaranteed' is that of the certificate
