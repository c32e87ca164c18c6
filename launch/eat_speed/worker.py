"""One contender of `launch.benchmark eat_speed`, asked by `launch.contest`.

Everybody takes NumPy token ids and gives NumPy logits, so that everybody pays
for the way to the device and back. Everything is compiled before the process
says that it is ready.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from launch import contest, peers
from serve_lib.host_memory import keep_freed_memory

# Rows whose logits are compared between contenders.
CHECKED_ROWS = 4


class Built(NamedTuple):
  """A contender, ready to run.

  Attributes:
    cases: what can be asked for; a call returns the number of examples.
    scores: difference of the logits of the first rows, to compare contenders
      that should compute the same; () if it computes nothing comparable.
    device: where it runs.
    versions: of what it runs on, by package.
  """

  cases: Mapping[str, Callable[[], int]]
  scores: Float[np.ndarray, ' R'] | tuple[()]
  device: str
  versions: Mapping[str, str]


def build(
  specification: dict[str, Any],
) -> tuple[dict[str, Any], Mapping[str, Callable[[], int]]]:
  """The first answer and the cases; see `contest.serve`.

  Args:
    specification: see `launch.eat_speed.lineup.specification`.
  """
  keep_freed_memory()  # for everybody
  kind, _, form = specification['build'].partition(':')
  started = time.perf_counter()
  # Only what this contender needs is imported: some are not installed.
  if kind == 'jax':
    from launch.eat_speed import engine_cases, forms

    if form == 'engine':
      built = engine_cases.build(specification)
    elif form == 'lengths':
      built = engine_cases.build_lengths(specification)
    else:
      built = forms.build(form, specification)
  else:
    built = _build_peer(kind, specification)
  answer = dict(
    device=built.device,
    versions=dict(built.versions),
    scores=[float(score) for score in built.scores],
    prepare_seconds=time.perf_counter() - started,
    threads=peers.cores(),
  )
  return answer, built.cases


def _build_peer(name: str, specification: Mapping[str, Any]) -> Built:
  peer = peers.load(
    name,
    specification['weights'],
    dtype=specification['dtype'],
    platform=specification['platform'],
  )
  tokens = token_rows(specification, peer.vocab_size)

  def forward(batch: int) -> Callable[[], Any]:
    rows = tokens[:batch]
    types, mask = np.zeros_like(rows), np.ones_like(rows)
    return lambda: peer.classify(rows, types, mask)

  cases, scores = forward_cases(forward, specification)
  return Built(cases, scores, peer.device, peer.versions)


def token_rows(
  specification: Mapping[str, Any], vocab_size: int
) -> Int[np.ndarray, 'N L']:
  """Random token ids, the same ones in every process."""
  shape = (
    max(*specification['batches'], CHECKED_ROWS),
    specification['length'],
  )
  rng = np.random.default_rng(1)
  return rng.integers(vocab_size, size=shape, dtype=np.int32)


def forward_cases(
  forward: Callable[[int], Callable[[], Any]], specification: Mapping[str, Any]
) -> tuple[dict[str, Callable[[], int]], Float[np.ndarray, ' R']]:
  """Cases and scores of a contender that classifies one batch in a call.

  Args:
    forward: of a batch size, the function that gives NumPy logits `[B, C]` of
      the first rows of `token_rows`.
    specification: of the batches.
  """
  functions = {batch: forward(batch) for batch in specification['batches']}

  def case(function: Callable[[], Any]) -> Callable[[], int]:
    return lambda: len(function())

  largest = functions[max(functions)]
  scores = score(largest()[:CHECKED_ROWS])
  return {str(b): case(function) for b, function in functions.items()}, scores


def score(logits: Float[np.ndarray, 'R C']) -> Float[np.ndarray, ' R']:
  """What is compared: how much the second class is ahead of the first."""
  return logits[:, 1] - logits[:, 0]


if __name__ == '__main__':
  contest.serve(build)
