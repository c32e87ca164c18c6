"""Times of an EAT's settings and of dense models in other libraries."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eat.policy import EatPolicy
from eval_lib import benchmark
from eval_lib.benchmark import Call, Candidate, Hosts
from launch import export, peers
from launch.candidates_eat import checked
from launch.eat_runs import Setting
from serve_lib.engine import Engine
from serve_lib.grid import doubling

CHUNK = 25  # rows of a turn
DENSE = ('dense', 'student')  # runs that other libraries can run too


def time(
  settings: Sequence[Setting], given: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Setting]]:
  """Times settings on the same rows: alone, and in full batches.

  A turn is a few rows in a row, the same ones for every candidate. Ours run in
  the engine in this process, other libraries in their own.

  Args:
    settings: of any models; the first is the reference.
    given: the flags of the command.

  Returns:
    (rows of `eval_lib.benchmark`, at batch 1 with the mean and percentiles of
    the latency; mean seconds by row of the split, by candidate; the settings
    that other libraries ran, by candidate).
  """
  total, rounds = len(settings[0].exits), given['rounds']
  count = min(given['rows'], total)
  rows = np.linspace(0, total - 1, count).round().astype(int)
  calls = min(CHUNK, count)
  turns, warmup = -(-count // calls), -(-given['warmup'] // calls)
  dense = [one for one in settings if one.model.name in DENSE]
  theirs = {
    f'{peers.TITLES[library]} {one.model.name}': (library, one)
    for library in peers.usable(given['peers'] if dense else ())
    for one in dense
  }
  with contextlib.ExitStack() as stack:
    hosts = stack.enter_context(Hosts(environment={'HF_HUB_OFFLINE': '1'}))
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    engines = _engines(settings, given['batch_size'], stack)

    def run(batch: int, **timing: Any) -> Any:
      found = [_candidate(one, rows, batch, engines) for one in settings]
      found[0] = dataclasses.replace(found[0], is_baseline=True)
      for name, (library, one) in theirs.items():
        make = _make_peer(library, one, rows, batch, folder)
        found.append(Candidate(name, make, process=name))
      return benchmark.run(found, {'batch': batch}, hosts, **timing)

    table, samples = run(1, rounds=rounds * turns, warmup=warmup, calls=calls)
    in_batches, _ = run(given['batch_size'], rounds=rounds, warmup=1)
  # A call is made once when prepared; then the rows follow each other.
  first, latency = 1 + warmup * calls, {}
  for row in table:
    seconds = samples[row['candidate']].ravel()[: rounds * count]
    row['latency_mean'] = float(seconds.mean())
    for percent in (50, 95):
      row[f'latency_p{percent}'] = float(np.percentile(seconds, percent))
    means = np.roll(seconds.reshape(-1, count).mean(0), first % count).tolist()
    latency[row['candidate']] = dict(zip(rows.tolist(), means, strict=True))
  return table + in_batches, latency, {n: one for n, (_, one) in theirs.items()}


def _engines(
  settings: Sequence[Setting], batch: int, stack: contextlib.ExitStack
) -> dict[int, tuple[Engine, EatPolicy]]:
  """Returns a warm engine with its policy for each model."""
  engines: dict[int, tuple[Engine, EatPolicy]] = {}
  for model in (one.model for one in settings):
    if id(model) in engines:
      continue
    old, longest = model.policy, model.records['length'].max()
    policy = EatPolicy(
      model.chain, old.reader, old.class_names, old.lengths,
      temperatures=old.temperatures.tolist(),
    )  # fmt: skip
    lengths = old.lengths[: np.searchsorted(old.lengths, longest) + 1]
    engine = Engine(model.chain, policy, lengths, doubling(batch))
    engine.warm_up(progress=True)
    engines[id(model)] = stack.enter_context(engine), policy
  return engines


def _items(setting: Setting, rows: np.ndarray) -> list[dict[str, Any]]:
  records = [setting.model.source.record(int(row)) for row in rows]
  return [{k: one[k] for k in ('tokens', 'token_types')} for one in records]


def _candidate(
  setting: Setting, rows: np.ndarray, batch: int, engines: Mapping[int, Any]
) -> Candidate:
  """Returns a candidate that answers the next row, or all in full batches."""
  measures, (engine, policy) = setting.rows, engines[id(setting.model)]
  items = _items(setting, rows)
  turns = itertools.cycle(items)

  def predict(some: Sequence[Any]) -> Sequence[Any]:
    policy.rule = setting.rule  # settings of a model share the policy
    return checked(engine.predict(some))

  def differs(row: int, answer: Any) -> bool:
    # The forms agree to rounding, so a row at a threshold may differ.
    if answer.depth != measures['depth'][row]:
      return True
    if policy.class_names:
      return answer.label != policy.class_names[measures['answer'][row]]
    return not np.isclose(answer.label, measures['answer'][row], 1e-3, 1e-3)

  def make() -> Call:
    answers = predict(items)
    wrong = sum(map(differs, rows.tolist(), answers))
    columns = {'differing_rows': wrong}
    if batch == 1:
      return Call(lambda: predict([next(turns)]), columns=columns)
    return Call(lambda: predict(items), len(items), columns=columns)

  flops = float(measures['flops_served'][rows].mean())
  return Candidate(setting.name, make, flops=(flops, flops))


def _make_peer(
  library: str, setting: Setting, rows: np.ndarray, batch: int, folder: Any
) -> Any:
  """Returns the function that prepares a dense model in another library."""
  model, weights = setting.model, folder / setting.model.name
  if not weights.exists():
    params = model.chain.variables['params']
    export.save(str(weights), model.chain.model, params)
  given = library, str(weights), _items(setting, rows), batch
  return functools.partial(
    peers.make, *given, expected=setting.model.logits[-1, rows]
  )
