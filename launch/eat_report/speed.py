"""Wall clock of an EAT report: settings take turns, through the engine.

All models are in one process and are timed in rounds: a few rows with every
setting, forwards and backwards, then the next few. So a machine that slows
down slows all of them, and ratios are taken between sums over the same rows
of the same repeat.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eat.policy import EatPolicy
from eat.serving import EatChain
from eval_lib import timing
from eval_lib.timing import Timings
from launch.eat_report import models
from launch.eat_report.models import Model
from launch.eat_report.rivals import Rival
from launch.eat_report.sweeps import Setting
from serve_lib.chain import Encoded, Failure
from serve_lib.engine import Engine
from serve_lib.schedule import doubling
from serve_lib.text_items import TextReader

CHUNK = 25  # rows that a setting is timed with before the next one's turn


class TokenPolicy(EatPolicy):
  """`EatPolicy` for rows that are tokens already: tokenising is not timed."""

  def encode(self, item: Any) -> Encoded:
    """Takes a record with 'tokens' and 'token_types'."""
    inputs = {name: item[name] for name in ('tokens', 'token_types')}
    return Encoded(
      inputs=inputs,
      length=len(item['tokens']),
      variant=self.chain.variants[0],
      context={'source': '', 'truncated': False},
    )


@dataclasses.dataclass(frozen=True)
class Speed:
  """What was measured.

  Attributes:
    rows: which rows of the split were timed, `[M]`.
    latency: seconds of each row alone, `[R, M]` for R repeats, by the name of
      the setting or rival.
    alone: seconds of a repeat over all rows, one by one.
    together: the same with the rows in full batches.
    differing: rows that were answered otherwise than was recorded.
    batch_size: rows of a full batch.
  """

  rows: np.ndarray
  latency: Mapping[str, np.ndarray]
  alone: Timings
  together: Timings
  differing: Mapping[str, int]
  batch_size: int


@dataclasses.dataclass(frozen=True)
class _Served:
  """A setting with the engine that serves its model."""

  setting: Setting
  engine: Engine
  policy: TokenPolicy
  items: Sequence[Any]

  @property
  def name(self) -> str:
    """Of the setting."""
    return self.setting.name

  def alone(self, place: int) -> float:
    """Seconds of the row at a place, on its own."""
    return self._seconds(self.items[place : place + 1])

  def together(self) -> float:
    """Seconds of all rows in full batches."""
    return self._seconds(self.items)

  def _seconds(self, items: Sequence[Any]) -> float:
    started = time.perf_counter()
    self.answers(items)
    return time.perf_counter() - started

  def answers(self, items: Sequence[Any]) -> list[Any]:
    """Answers of the setting; models that several settings share are set."""
    self.policy.rule = self.setting.rule
    answers = self.engine.predict(items)
    for answer in answers:
      if isinstance(answer, Failure):
        raise RuntimeError(
          f'{self.setting.name}: a row failed in {answer.during}'
        ) from answer.error
    return answers


def measure(
  settings: Sequence[Setting],
  rows: np.ndarray,
  rivals: Sequence[Rival] = (),
  *,
  warmup: int = 50,
  repeats: int = 3,
  batch_size: int = 32,
  cache_directory: str = '',
  progress: bool = True,
) -> Speed:
  """Times settings, whose runs have the same rows, against each other.

  Args:
    settings: of any models; each model is compiled once.
    rows: their places in the split, see `places`.
    rivals: in processes of their own; they take turns with the settings.
    warmup: calls of each setting before, one row each.
    repeats: how often each row is timed.
    batch_size: rows of a full batch; the smaller batches are powers of 2.
    cache_directory: keeps compiled programs for the next start.
    progress: tell on stderr what is compiled.
  """
  with contextlib.ExitStack() as stack:
    served = _serve(
      settings, rows, batch_size, cache_directory, progress, stack
    )
    differing = {
      one.name: _differing(one, one.answers(one.items), rows) for one in served
    } | {rival.name: rival.differing for rival in rivals}
    timed: list[Any] = [*served, *rivals]
    for one in timed:
      for place in range(min(warmup, len(rows))):
        one.alone(place)
    alone, latency = _one_by_one(timed, len(rows), repeats)
    together = timing.measure(
      {one.name: one.together for one in timed}, repeats=repeats, warmup=1
    )
  return Speed(rows, latency, alone, together, differing, batch_size)


def places(count: int, most: int) -> np.ndarray:
  """Which of `count` rows to time: at most `most`, spread over all."""
  return np.linspace(0, count - 1, min(most, count)).round().astype(int)


def _serve(
  settings: Sequence[Setting],
  rows: np.ndarray,
  batch_size: int,
  cache_directory: str,
  progress: bool,
  stack: contextlib.ExitStack,
) -> list[_Served]:
  """An engine for each model, closed with the stack."""
  engines: dict[int, tuple[Engine, TokenPolicy]] = {}
  items: dict[str, list[Any]] = {}
  result = []
  for setting in settings:
    model = setting.model
    if id(model) not in engines:
      engine, policy = _engine(model, batch_size, cache_directory)
      engine.warm_up(progress=progress)
      engines[id(model)] = stack.enter_context(engine), policy
    run = model.run
    if run.directory not in items:
      items[run.directory] = [run.records.record(int(row)) for row in rows]
    engine, policy = engines[id(model)]
    result.append(_Served(setting, engine, policy, items[run.directory]))
  return result


def _engine(
  model: Model, batch_size: int, cache_directory: str
) -> tuple[Engine, TokenPolicy]:
  # Nothing here asks for a minimum retention, so one form is enough.
  chain = EatChain(
    model.module, model.run.variables, model.run.words.pad_id, with_full=False
  )
  info = model.run.task.info
  policy = TokenPolicy(
    chain,
    TextReader(model.run.words, info.input_shape[0]),
    info.class_names,
    (info.input_shape[0],),
    temperatures=model.temperatures.tolist(),
  )
  engine = Engine(
    chain,
    policy,
    buckets(model),
    doubling(batch_size),
    cache_directory=cache_directory,
  )
  return engine, policy


def buckets(model: Model) -> tuple[int, ...]:
  """The run's length buckets up to the one of the longest row."""
  sizes, longest = models.length_buckets(model.run), int(model.length.max())
  last = min(size for size in sizes if size >= longest)
  return tuple(size for size in sizes if size <= last)


def _differing(one: _Served, answers: Sequence[Any], rows: np.ndarray) -> int:
  """Rows whose depth or answer is not the recorded one.

  The two forms agree to rounding, so a row at a threshold may differ.
  """
  setting, names = one.setting, one.setting.model.run.task.info.class_names
  count = 0
  for row, answer in zip(rows.tolist(), answers, strict=True):
    logits = setting.chosen[row]
    if names:
      same = answer.label == names[int(logits.argmax())]
    else:
      same = bool(np.isclose(answer.label, logits[0], rtol=1e-3, atol=1e-3))
    count += not (same and answer.depth == setting.depth[row])
  return count


def _one_by_one(
  timed: Sequence[Any], total: int, repeats: int
) -> tuple[Timings, dict[str, np.ndarray]]:
  """(seconds of each repeat over all rows, seconds of each row)."""
  latency = {one.name: np.zeros((repeats, total)) for one in timed}
  for start in range(0, total, CHUNK):
    chunk = range(start, min(start + CHUNK, total))
    timing.measure(
      {one.name: _calls(one, chunk, latency[one.name]) for one in timed},
      repeats=repeats,
      warmup=0,
    )
  return Timings({k: v.sum(1) for k, v in latency.items()}), latency


def _calls(one: Any, chunk: range, into: np.ndarray) -> Any:
  """Times the rows of a chunk; each call is the next repeat."""
  repeats: Iterator[int] = iter(range(len(into)))

  def run() -> None:
    repeat = next(repeats)
    for place in chunk:
      into[repeat, place] = one.alone(place)

  return run
