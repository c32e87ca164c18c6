"""Settings of a trained EAT timed in turns: rows alone, and full batches.

A turn is a few rows in a row, the same ones for every candidate. Ours run in
the engine in this process, PyTorch and ONNX Runtime in their own, with the
weights of the dense runs.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eat.policy import EatPolicy
from eat.serving import EatChain
from eval_lib import benchmark
from eval_lib.hosts import Call, Candidate, Case, Hosts
from launch import export, peers
from launch.eat_calls import check_answers
from launch.eat_runs import Model
from launch.eat_settings import Setting
from serve_lib.engine import Engine
from serve_lib.schedule import doubling

CHUNK = 25  # rows of a turn


@dataclasses.dataclass(frozen=True)
class Speed:
  """The measured times.

  Attributes:
    rows: the rows of the split that were timed, `[M]`.
    latency: seconds of each row alone, `[R, M]` for R rounds, by candidate.
    table: of `eval_lib.benchmark.rows`, for batch 1 and full batches; at batch
      1 with the mean and percentiles of the latency.
    peers: our settings that other libraries ran, by candidate.
  """

  rows: np.ndarray
  latency: Mapping[str, np.ndarray]
  table: Sequence[Mapping[str, Any]]
  peers: Mapping[str, Setting]


def measure(
  settings: Sequence[Setting],
  dense: Sequence[Setting],
  given: Mapping[str, Any],
) -> Speed:
  """Times settings on the same rows, against the first.

  Args:
    settings: of any models; each model is compiled once.
    dense: of dense models, which other libraries run too.
    given: the flags of the command.
  """
  total = len(settings[0].exits)
  count = min(given['rows'], total)
  rows = np.linspace(0, total - 1, count).round().astype(int)
  calls = min(CHUNK, count)
  turns, warmup = -(-count // calls), -(-given['warmup'] // calls)
  alone, full = {'batch': 1}, {'batch': given['batch_size']}
  with contextlib.ExitStack() as stack:
    hosts = stack.enter_context(Hosts(environment={'HF_HUB_OFFLINE': '1'}))
    ours = _candidates(settings, rows, given, stack)
    theirs = list(_peers(dense, rows, given, stack))
    candidates = [*ours, *(candidate for candidate, _ in theirs)]
    prepared, samples = benchmark.time_case(
      candidates, alone, hosts, rounds=given['rounds'] * turns, warmup=warmup,
      calls=calls,
    )  # fmt: skip
    table = benchmark.rows(alone, candidates, samples, prepared)
    table += benchmark.run(
      candidates, [full], hosts, rounds=given['rounds'], warmup=1
    )
  # `Host.prepare` calls once; then the rows follow each other.
  first = 1 + warmup * calls
  latency = {
    name: np.roll(
      seconds.ravel()[: given['rounds'] * count].reshape(-1, count),
      first % count,
      axis=1,
    )
    for name, seconds in samples.items()
  }
  for row in table[: len(latency)]:
    own = latency[row['candidate']]
    row['latency_mean'] = float(own.mean())
    for percent in (50, 95):
      row[f'latency_p{percent}'] = float(np.percentile(own, percent))
  of_peers = {candidate.name: one for candidate, one in theirs}
  return Speed(rows, latency, table, of_peers)


def _candidates(
  settings: Sequence[Setting],
  rows: np.ndarray,
  given: Mapping[str, Any],
  stack: contextlib.ExitStack,
) -> list[Candidate]:
  """Serves each model with an engine; settings of a model share it."""
  engines: dict[int, tuple[Engine, EatPolicy]] = {}
  found: list[Candidate] = []
  for setting in settings:
    model = setting.model
    if id(model) not in engines:
      engine, policy = _engine(model, given)
      engine.warm_up(progress=True)
      engines[id(model)] = stack.enter_context(engine), policy
    flops = float(setting.rows['flops_served'][rows].mean())
    found.append(
      Candidate(
        setting.name, _make, {'setting': setting, 'rows': rows,
        'served': engines[id(model)]}, is_baseline=not found,
        flops=(flops, flops),
      )
    )  # fmt: skip
  return found


def _engine(model: Model, given: Mapping[str, Any]) -> tuple[Engine, EatPolicy]:
  run = model.run
  chain = EatChain(
    model.module, run.chain.variables, run.chain.pad_id, with_full=False
  )
  policy = EatPolicy(
    chain, run.policy.reader, run.policy.class_names, run.policy.lengths,
    temperatures=run.policy.temperatures.tolist(),
  )  # fmt: skip
  # The length buckets up to that of the longest row.
  last = int(np.searchsorted(run.policy.lengths, model.length.max()))
  engine = Engine(
    chain,
    policy,
    run.policy.lengths[: last + 1],
    doubling(given['batch_size']),
    cache_directory=given['compilation_cache'],
  )
  return engine, policy


def _items(setting: Setting, rows: np.ndarray) -> list[dict[str, Any]]:
  source = setting.model.run.source
  records = [source.record(int(row)) for row in rows]
  return [{k: one[k] for k in ('tokens', 'token_types')} for one in records]


def _make(
  case: Case,
  setting: Setting,
  rows: np.ndarray,
  served: tuple[Engine, EatPolicy],
) -> Call:
  """Prepares a setting: the next row in each call, or all rows."""
  engine, policy = served
  items = _items(setting, rows)

  def predict(some: Sequence[Any]) -> Sequence[Any]:
    policy.rule = setting.rule  # settings of a model share the policy
    return check_answers(engine.predict(some))

  # The forms agree to rounding, so a row at a threshold may differ.
  differing = sum(
    answer.depth != setting.rows['depth'][row]
    or not _same(answer.label, setting.chosen[row], policy.class_names)
    for row, answer in zip(rows.tolist(), predict(items), strict=True)
  )
  columns = {'differing_rows': int(differing)}
  if case['batch'] > 1:
    return Call(lambda: predict(items), len(items), columns=columns)
  turns = itertools.cycle(items)
  return Call(lambda: predict([next(turns)]), columns=columns)


def _same(label: Any, logits: np.ndarray, names: Sequence[str]) -> bool:
  if names:
    return label == names[int(logits.argmax())]
  return bool(np.isclose(label, logits[0], rtol=1e-3, atol=1e-3))


def _peers(
  dense: Sequence[Setting],
  rows: np.ndarray,
  given: Mapping[str, Any],
  stack: contextlib.ExitStack,
) -> Iterator[tuple[Candidate, Setting]]:
  """Yields dense models of other libraries, as far as those are installed."""
  folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
  for library in given['peers'] if dense else ():
    if library == 'none':
      continue
    if reason := peers.missing(library):
      print(f'left out: {peers.TITLES[library]}: {reason}')
      continue
    for setting in dense:
      run = setting.model.run
      weights = folder / run.name
      if not weights.exists():
        params = run.chain.variables['params']
        export.save(str(weights), setting.model.module, params)
      name = f'{peers.TITLES[library]} {run.name}'
      make = functools.partial(
        peers.make_rows, library=library, weights=str(weights),
        items=_items(setting, rows), expected=setting.chosen[rows],
      )  # fmt: skip
      yield Candidate(name, make, process=name), setting
