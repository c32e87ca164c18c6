"""Serves several tasks by one pass: each leaves at an exit of its own.

A task is an `ExitPolicy` that sees its columns of the logits, with its own
temperatures, certificate and drift check. Its answer is fixed at the head where
it leaves; a row leaves when all of its tasks have.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from core import fields, registry
from core.errors import ConfigError
from dataset_lib.source import tasks_of
from eat import chain
from eat.policy import ExitPolicy
from serve_lib.chain import Encoded, Row
from serve_lib.decisions import ClassifierPolicy, Prediction, source_of
from serve_lib.items import Count
from serve_lib.manifest import BUILT
from serve_lib.monitor import Monitor

# Fields of an `ExitPolicy` that all tasks have together; the others are a
# task's own.
SHARED = (*BUILT, 'lengths', 'warnings', 'about', 'several', 'certified',
          'heads', 'kept_tokens')  # fmt: skip
PARTS = 'parts'  # of `Encoded.context`: the row as each task sees it
LEFT = 'left'  # of the context of a part


@dataclasses.dataclass(frozen=True)
class Answers(Prediction):
  """The answers to one item: `label` and `probabilities` are by task."""

  tasks: Mapping[str, Prediction]

  def as_dict(self) -> dict[str, Any]:
    """Returns `{'tasks': {NAME: answer}, 'depth': ...}`, for JSON."""
    answers = {name: one.as_dict() for name, one in self.tasks.items()}
    return {'tasks': answers, **self.fields}


@dataclasses.dataclass(eq=False)
class SeveralPolicy(ClassifierPolicy):
  """One `ExitPolicy` for each task, over the same chain.

  `class_names` are those of all tasks, 'task=class'. Drift checks of `monitor`
  are by task, those of a source by 'task=source'. While one finds drift, its
  task runs to full depth.
  """

  _: dataclasses.KW_ONLY
  # Fields of the `ExitPolicy` of each task, but `SHARED`.
  tasks: dict[str, dict[str, Any]]
  heads: tuple[Count, ...] = ()
  kept_tokens: tuple[Count, ...] = ()
  FIELDS = ExitPolicy.FIELDS

  def __post_init__(self):
    self._columns = tasks_of(self.class_names)
    if [*self.tasks] != [*self._columns]:
      raise ConfigError('policy.tasks', [*self.tasks], f'{[*self._columns]}')
    shared = {n: getattr(self, n) for n in SHARED if n not in BUILT}
    self._policies: dict[str, ExitPolicy] = {}
    for name, own in self.tasks.items():
      place = f'policy.tasks.{name}'
      values = fields.check(ExitPolicy, own, place, SHARED)
      self._policies[name] = policy = registry.build(
        ExitPolicy, values, chain=self.chain, reader=self.reader,
        monitor=self._monitor(name), **shared,
      )  # fmt: skip
      columns, stages = self._columns[name], self.chain.num_stages
      for field, expected in (
        ('class_names', columns.stop - columns.start), ('temperatures', stages)
      ):  # fmt: skip
        if len(given := getattr(policy, field)) != expected:
          raise ConfigError(f'{place}.{field}', given, f'{expected} of them')
    self._first, *_ = self._policies.values()
    parts = {name: one.monitor for name, one in self._policies.items()}
    self.monitor.parts = parts
    self.heads, self.kept_tokens = self._first.heads, self._first.kept_tokens

  def _monitor(self, name: str) -> Monitor:
    """Returns a monitor with the drift checks of a task."""
    named = ((key.partition('='), x) for key, x in self.monitor.sources.items())
    own: dict[str, Any] = {key[2]: x for key, x in named if key[0] == name}
    return Monitor(drift=own.pop('', None), sources=own)

  def encode(self, item: Any) -> Encoded:
    """Reads an item; see `ExitPolicy`."""
    return self._first.encode(item)

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns which rows all tasks have left; see `ExitPolicy`."""
    parts, stays = [*map(self._parts, rows)], np.zeros(len(rows), bool)
    for name, policy in self._policies.items():
      numbers = [n for n, one in enumerate(parts) if not has_left(one[name])]
      inside = [parts[n][name] for n in numbers]
      leaves: Any = policy.decide(stage, inside, outputs) if inside else ()
      for number, part, is_leaving in zip(numbers, inside, leaves, strict=True):
        part.encoded.context[LEFT] = bool(is_leaving)
        stays[number] |= not is_leaving
    return ~stays

  def _parts(self, row: Row) -> dict[str, Row]:
    """Returns the row as each task sees it, until the task leaves."""
    encoded = row.encoded
    if PARTS not in encoded.context:
      encoded.context[PARTS] = {
        name: dataclasses.replace(
          row, outputs=[],
          encoded=dataclasses.replace(encoded, context={**encoded.context}),
        ) for name in self._policies
      }  # fmt: skip
    for name, part in encoded.context[PARTS].items():
      for out in () if has_left(part) else row.outputs[len(part.outputs) :]:
        logits = out['logits'][..., self._columns[name]]
        part.outputs.append({**out, 'logits': logits})
    return encoded.context[PARTS]

  def answer(self, row: Row) -> Answers:
    """Returns the answers of all tasks; records the exit of the row."""
    parts = self._parts(row)
    answers = {
      name: policy.answer(parts[name])
      for name, policy in self._policies.items()
    }
    deepest = max(answers.values(), key=lambda one: one.fields['depth'])
    depth, retention, about = self._first.describe(row)
    about['exit_reason'] = reason = deepest.fields['exit_reason']
    self.monitor.record_exit(
      depth, reason, None, retention, source_of(row.encoded), about['truncated']
    )
    labels = {name: one.label for name, one in answers.items()}
    shares = {name: one.probabilities for name, one in answers.items()}
    return Answers(labels, shares, about, answers)


def has_left(part: Row) -> bool:
  """Returns True where a task has left a row."""
  return bool(part.encoded.context.get(LEFT))


def serve(task: Any, options: Mapping[str, Any], run: Any) -> Any:
  """Serves with exits of each task; options, for all: `eat.policy.Options`.

  A task has the files that its evaluators write: `calibration.<task>.json` and,
  with tau=guaranteed, `certificate.<task>.json`.
  """
  served = {
    name: chain.serve(_alone(task, name), options, run, name)
    for name in task.info.tasks
  }

  def serve_variables(variables: Any) -> tuple[chain.EatChain, SeveralPolicy]:
    built = {name: one(variables) for name, one in served.items()}
    policies = {name: policy for name, (_, policy) in built.items()}
    stages, first = next(iter(built.values()))
    own = {f.name for f in dataclasses.fields(ExitPolicy)} - {*SHARED}
    tasks = {
      name: {field: getattr(policy, field) for field in sorted(own)}
      for name, policy in policies.items()
    }
    checks = dict[str, Any]()
    for name, policy in policies.items():
      found = {'': policy.monitor.drift, **policy.monitor.sources}
      for source, check in found.items():
        if check is not None:
          check.source = f'{name}={source}' if source else name
          checks[check.source] = check
    about = dict(first.about)
    if 'certificates' in about:  # of each task
      about['certificates'] = tuple(
        one for policy in policies.values()
        for one in policy.about['certificates']
      )  # fmt: skip
    policy = SeveralPolicy(
      stages, first.reader, task.label_names, first.lengths, tasks=tasks,
      monitor=Monitor(sources=checks), about=about,
      certified=first.certified,
      warnings=tuple(
        f'{name}: {line}' for name, one in policies.items()
        for line in one.warnings
      ),
    )  # fmt: skip
    return stages, policy

  return serve_variables


def _alone(task: Any, name: str) -> Any:
  """Returns the task with the classes of one of its tasks."""
  alone, classes = copy.copy(task), task.info.tasks[name]
  names = [one.partition('=')[2] for one in task.info.class_names[classes]]
  alone.info = dataclasses.replace(
    task.info, class_names=tuple(names), num_classes=len(names)
  )
  return alone
