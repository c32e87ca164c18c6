"""One contender of `launch.benchmark eat_speed`, asked by `launch.contest`.

Everybody takes NumPy token ids and gives NumPy logits, so that everybody pays
for the way to the device and back. Everything is compiled before the process
says that it is ready.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from launch import contest, peers
from launch.eat_speed.contender import Built, forward_cases, token_rows
from serve_lib.process import keep_freed_memory


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


if __name__ == '__main__':
  contest.serve(build)
