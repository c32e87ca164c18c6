"""The synthetic sequences of Graves (2016): a source computed on demand.

Parity, logic, addition and sort of "Adaptive Computation Time for Recurrent
Neural Networks" (arXiv:1603.08983, sections 3.1 to 3.4), and `sparse_parity`,
in which inputs can be skipped; `dataset_lib.graves_tasks` describes each.
Sequences are padded to the longest of the task. A batch holds, beside `mask`
and `index`,

  inputs       float32 [B, T, E]
  valid        float32 [B, T], 1 where an input stands
  targets      int32 [B, T, G], classes of the G targets of a step
  target_mask  float32 [B, T], 1 where a step has targets

and of sparse_parity `marked` float32 [B, T]. A record is a pure function of
(data_seed, split, index) and of the fields of the task.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from dataset_lib import fields, source
from dataset_lib.errors import ConfigError
from dataset_lib.graves_draws import SyntheticTask
from dataset_lib.graves_tasks import TASKS
from dataset_lib.parity import splitmix64

SPLITS = ('train', 'test')
PLACEMENTS = ('scattered', 'leading')

# What each task can be made harder or easier by, with the paper's values.
DIFFICULTIES: dict[str, dict[str, Any]] = {
  'parity': {'length': 64, 'placement': 'scattered'},
  'logic': {'length': 10, 'gates': 10},
  'addition': {'length': 5, 'digits': 5},
  'sort': {'length': 15},
  'sparse_parity': {'length': 20, 'max_gap': 3},
}
_SHORTEST = {'sort': 2}

FIELDS = {
  'task': fields.Field(
    f'one of {", ".join(TASKS)}',
    lambda value: isinstance(value, str) and value in TASKS,
    fields.REQUIRED,
  ),
  # 0 and '': as in the paper. Of a task that has no such field they must stay.
  'length': fields.integer(0, 4096, default=0),
  'gates': fields.integer(0, 100, default=0),
  'digits': fields.integer(0, 15, default=0),  # sums fit in 64 bits
  'max_gap': fields.integer(0, 100, default=0),
  'placement': fields.Field(
    f"one of {', '.join(PLACEMENTS)}, or ''",
    lambda value: isinstance(value, str) and value in ('', *PLACEMENTS),
    '',
  ),
  'data_seed': fields.integer(0, source.MAX_SEED, default=0),
  'train_examples': fields.integer(1, source.MAX_EXAMPLES, default=2**20),
  'test_examples': fields.integer(1, source.MAX_EXAMPLES, default=2048),
}


class GravesSource:
  """Sequences of one task and split.

  Args:
    name: of the task, in `TASKS`.
    task: makes records of random bits.
    data_seed: selects the streams; independent of the run's seed, so that runs
      with different seeds share one test set.
    split: 'train' or 'test'.
    num_examples: records in the split.
  """

  def __init__(
    self,
    name: str,
    task: SyntheticTask,
    data_seed: int,
    split: str,
    num_examples: int,
  ):
    self.info = source.DatasetInfo(
      input_key='inputs',
      input_shape=task.input_shape,
      input_dtype='float32',
      num_classes=task.num_classes,
      class_names=(),
      num_examples=num_examples,
    )
    self._name, self._split, self._task = name, split, task
    seeds = np.random.SeedSequence(
      [data_seed, SPLITS.index(split), *name.encode()]
    )
    self._first_counter = seeds.generate_state(1, np.uint64)[0]

  @property
  def num_targets(self) -> int:
    """Targets at one step, G."""
    return self._task.num_targets

  def __len__(self) -> int:
    return self.info.num_examples

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """The arrays of the given records; see the module."""
    draws = np.uint64(self._task.num_draws)
    starts = self._first_counter + indices.astype(np.uint64) * draws
    counters = starts[:, None] + np.arange(draws, dtype=np.uint64)
    return self._task.records(splitmix64(counters))

  def record(self, index: int) -> dict[str, Any]:
    """The arrays of record `index`, without the batch axis."""
    batch = self.records(np.array([index]))
    return {key: values[0] for key, values in batch.items()}

  def where(self, index: int) -> str:
    """Generated records lie in no file; the name of the stream stands in."""
    return f'{self._name}/{self._split}'


def check_split(split: str) -> None:
  """Raises ConfigError unless the split is 'train' or 'test'."""
  fields.check_one_of('split', split, SPLITS)


def build(config: Mapping[str, Any], split: str) -> GravesSource:
  """The source of one split; `config` has every field of FIELDS.

  Raises:
    ConfigError: a difficulty is given that the task does not have, or that is
      too small for it.
  """
  name = config['task']
  return GravesSource(
    name,
    TASKS[name](**difficulty(config)),
    data_seed=config['data_seed'],
    split=split,
    num_examples=config[f'{split}_examples'],
  )


def difficulty(config: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of the task, those that are not given as in the paper.

  Raises:
    ConfigError: see `build`.
  """
  name = config['task']
  chosen = {
    field: config[field] or default
    for field, default in DIFFICULTIES[name].items()
  }
  for field in ('length', 'gates', 'digits', 'max_gap', 'placement'):
    if config[field] and field not in chosen:
      raise ConfigError(
        f'dataset.{field}',
        config[field],
        f'nothing ({FIELDS[field].default!r}): task {name} has only '
        f'{", ".join(chosen)}',
      )
  shortest = _SHORTEST.get(name, 1)
  if chosen['length'] < shortest:
    expected = f'at least {shortest} for task {name}'
    raise ConfigError('dataset.length', chosen['length'], expected)
  return chosen
