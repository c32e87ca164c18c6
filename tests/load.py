"""Texts and broken items sent to an engine from many threads at once."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from serve_lib.chain import Failure
from tests.compilations import compilations

BAD = ['', '  ', 'w' * 5000, b'\xff\xfe\xfd', b'\x00' * 50, '\ud800', None, 7]


@dataclasses.dataclass
class Load:
  """What every item should get, and what came back otherwise.

  Attributes:
    alone: the answer of each text when it was asked by itself.
    same: whether an answer equals that.
    bad_share: share of the items that are `BAD`.
    wrong: items whose answer was another, with the answer.
    depths: depths of the answers.
  """

  alone: dict[str, Any]
  same: Callable[[Any, Any], bool]
  bad_share: float
  wrong: list[Any] = dataclasses.field(default_factory=list)
  depths: set[Any] = dataclasses.field(default_factory=set)

  def ask(self, engine: Any, seed: int, requests: int) -> None:
    """Streams items that are drawn by the seed, and judges every answer."""
    draw, texts = np.random.default_rng(seed), list(self.alone)
    items = [
      BAD[draw.integers(len(BAD))] if draw.random() < self.bad_share
      else texts[draw.integers(len(texts))]
      for _ in range(requests)
    ]  # fmt: skip
    answers = list(engine.stream(items))
    if len(answers) != len(items):
      self.wrong.append(len(answers))
    for item, answer in zip(items, answers, strict=False):
      if isinstance(item, str) and item in self.alone:
        good = self.same(answer, self.alone[item])
        self.depths.add(getattr(answer, 'depth', None))
      else:
        good = isinstance(answer, Failure) and answer.during == 'encode'
      if not good:
        self.wrong.append((item, answer))


def put_under_load(
  engine: Any,
  texts: Sequence[str],
  same: Callable[[Any, Any], bool],
  *,
  threads: int,
  requests: int,
  bad_share: float,
) -> Load:
  """Asks for each text alone, then for many from many threads.

  Nothing may be lost, mixed up or compiled meanwhile, no bad item may take
  another down, and nothing may be left behind.
  """
  alone = {text: engine.submit(text).result() for text in texts}
  load = Load(alone, same, bad_share)
  with compilations() as compiled:
    asking = [
      threading.Thread(target=load.ask, args=(engine, seed, requests))
      for seed in range(threads)
    ]
    for thread in asking:
      thread.start()
    for thread in asking:
      thread.join()
  assert not load.wrong
  assert not compiled
  assert engine.status()['pending'] == 0
  return load


def same_prediction(answer: Any, other: Any, fields: Sequence[str]) -> bool:
  """Equal in the fields, and in the probabilities to 1e-4."""
  return (
    type(answer) is type(other)
    and all(getattr(answer, name) == getattr(other, name) for name in fields)
    and all(
      abs(answer.probabilities[name] - other.probabilities[name]) < 1e-4
      for name in answer.probabilities
    )
  )
