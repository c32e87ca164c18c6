"""Shipped configurations at a small size, and the program as records use it.

Only this file and the overrides of `subjects.txt` depend on names of the
program.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import re
import zlib
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from flax import linen as nn

from core import registry
from core.errors import ConfigError
from launch import command_line
from serve_lib.engine import Engine
from train_lib import build, config_schema

STEPS = 20
SHRUNK = [
  'batch_size=8', 'mesh.data=1', 'log_every=1', 'tensorboard=false',
  'checkpoint.every_steps=0', 'loader.num_threads=1',
]  # fmt: skip
EAT = [
  'model.width=16', 'model.mlp_dim=24', 'model.num_heads=2',
  'model.vocab_size=47', 'model.max_positions=40',
  'dataset.length_buckets=8,16,32',
]  # fmt: skip
ALBERT = [
  'model.width=16', 'model.embedding_width=8', 'model.max_iterations=6',
  'model.mlp_dim=24', 'model.num_heads=4', 'model.vocab_size=47',
  'model.max_positions=64',
]  # fmt: skip
FINE_TUNED = [
  *ALBERT, 'dataset.max_length=32', 'dataset.length_buckets=16,32',
  'dataset.tokenizer={vocabulary}',
]  # fmt: skip
LOOPED = [
  'model.width=16', 'model.num_heads=2', 'model.max_steps=2', 'model.limit=3',
  'dataset.base=64', 'dataset.test_examples=16',
  'dataset.validation_examples=16',
]  # fmt: skip
GROUPS = {
  '@looped': LOOPED,
  '@eat': [*EAT, 'dataset.max_length=32'],
  '@albert': ALBERT,
  '@tuned': FINE_TUNED,
  '@vit': [
    'dataset.image_size=32', 'model.width=24', 'model.num_heads=3',
    'model.mlp_dim=32',
  ],
}  # fmt: skip
SUBJECTS = pathlib.Path(__file__).parent / 'subjects.txt'

# Options of serving by subject, each mechanism that is served: some of the rows
# leave early, and some do not.
SERVED: dict[str, dict[str, Any]] = {
  'eat sst2': {'tau': 0.9, 'minimum_retention': {'': 0.78}},
  'eat sst2 pe': {'rule': 'entropy', 'tau': 0.3},
  'eat sst2 mean': {'rule': 'margin', 'tau': 0.8, 'ensemble_margin': 0.9},
  'eat sst2 exits': {
    'rule': 'combined', 'tau': 0.66, 'patience': 2, 'veto_margin': 0.36
  },
  'eat stsb exits': {'tolerance': 0.6},
  'eat mnli': {'rule': 'margin', 'tau': 0.24},
  'eat labels': {'tau': 0.88},
  'albert sst2': {'iterations': 2},
  'albert sst2 ponder_net': {'iterations': 6},
  'albert tree_depth': {'iterations': 3},
  'eat sst2 dense': {}, 'parity adatape': {}, 'parity ut': {},
  'digits learn': {}, 'digits input': {}, 'digits vit': {},
  'image_folder ponder': {}, 'table1 uvit': {}, 'table6 avit': {},
}  # fmt: skip
# Back ends and rows of a batch.
ENGINES = ('xla', 4), ('onnxruntime', 1), ('onnxruntime', 4)


def configs() -> dict[str, tuple[str, list[str]]]:
  """Flag and overrides of every shipped config, by the subject's name."""
  table = {}
  for line in SUBJECTS.read_text().splitlines()[1:]:
    name, flag, *words = re.split('  +', line)
    items = (GROUPS.get(item, [item]) for item in ' '.join(words).split())
    table[name] = flag, [*itertools.chain(*items)]
  return table


def load(flag: str, overrides: list[str], folders: dict[str, str]) -> Any:
  """Returns a validated configuration of `STEPS` steps."""
  overrides = [item.format(**folders) for item in (*SHRUNK, *overrides)]
  config = command_line.load_config(flag.format(**folders), overrides)
  shrunk = {'steps': STEPS // len(config.phases), 'epochs': 0.0}
  with config.unlocked():
    config.phases = tuple(
      dataclasses.replace(phase, **shrunk) for phase in config.phases
    )
  config_schema.validate(config)
  return config


def fixed_parameters(config: Any) -> Any:
  """Returns a context in which the task begins with those of `filled`."""
  kind = registry.locate(config.task, 'task')
  original = kind.init

  def init(self, rng):
    return filled(lambda rng: original(self, rng), rng)

  return mock.patch.object(kind, 'init', init)


def filled(init: Any, rng: Any) -> tuple[Any, Any]:
  """(parameters drawn by NumPy, model state) of the `init` of a task."""

  def leaf(path, value):
    values = draw(parameter_name(path), value.shape)
    return jax.numpy.asarray(values, value.dtype)

  params, _ = jax.eval_shape(init, rng)
  state = jax.jit(lambda rng: init(rng)[1])(rng)
  return jax.tree_util.tree_map_with_path(leaf, params), state


def parameter_name(path: Any) -> str:
  """The path of a parameter, such as 'block_0/mlp/kernel'."""
  return '/'.join(str(key.key) for key in path if hasattr(key, 'key'))


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
  noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
  last = name.rpartition('/')[2]
  if 'score/' in name:  # of halting: steps differ between tokens
    return 3.0 * noise / shape[0] ** 0.5 if last == 'kernel' else noise - 1.0
  if last == 'scale':
    return 1.0 + 0.1 * noise
  if last == 'bias':
    return 0.05 * noise
  if last == 'kernel':
    return noise / np.sqrt(np.prod(shape[:-1]) or 1)
  return 0.5 * noise


def parameter_shapes(params: Any) -> dict[str, list[int]]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {parameter_name(path): list(leaf.shape) for path, leaf in leaves}


def first_batch(config: Any) -> tuple[Any, dict[str, np.ndarray]]:
  dataset = build.build_dataset(config)
  task = build.build_task(config, dataset.info)
  with contextlib.closing(dataset.batches()) as batches:
    return task, {k: np.asarray(v) for k, v in next(batches).items()}


def initial_parameters(task: Any) -> tuple[Any, Any]:
  """(params, model state) without boxes, as `filled` draws them."""
  return nn.unbox(filled(task.init, jax.random.key(0)))


def logits(task: Any, params: Any, state: Any, batch: Any) -> Any:
  if 'mlm_positions' in batch:
    return dict(task.apply(params, state, batch)[0])
  values, out = task.apply(params, state, batch)
  every = out.get('exits', out.get('step_logits'))  # of each head or step
  return {'logits': values} | ({} if every is None else {'exits': every})


def costs(task: Any, params: Any, state: Any, batch: Any) -> Any:
  """FLOPs of a row, and what each row of a batch takes: arrays by name."""
  counts = {'model': np.float64(task.flops())}
  try:
    rows = task.outputs(params, state, batch)
  except NotImplementedError:  # pretraining, tags
    return counts
  return counts | {
    k: v for k, v in rows.items() if k not in ('logits', 'label')
  }


def items_of(batch: dict[str, np.ndarray], reader: Any = None) -> list[Any]:
  """Items of the rows of a batch, as a caller of the engine has them."""
  if hasattr(reader, 'puzzle'):
    return [*map(reader.puzzle.write, batch['tokens'])]
  if 'image' in batch:
    return list(batch['image'])
  if 'token_types' not in batch:
    return [row.tolist() for row in batch['tokens']]
  names = 'tokens', 'token_types'
  return [
    {name: batch[name][row, :length].tolist() for name in names}
    for row, length in enumerate(batch['length'])
  ]


def answers(
  task: Any, params: Any, state: Any, subject: str, items: list[Any]
) -> dict[str, Any]:
  """Answers of the engine by back end and batch size: lists by field."""
  variables = jax.device_put(
    {'params': params, 'model_state': state}, jax.devices()[0]
  )
  table: dict[str, Any] = {}
  for backend, rows in ENGINES:
    chain, policy = task.serve(variables, SERVED[subject])
    name, sizes = f'{backend} {rows}', (policy.lengths, (rows,))
    try:
      engine = Engine(chain, policy, *sizes, lazy=True, backend=backend)
    except ConfigError:
      table[name] = 'refused'
      continue
    with engine:
      found = [answer.as_dict() for answer in engine.predict(items)]
    for answer in found:
      answer['probabilities'] = [*answer['probabilities'].values()]
    fields = sorted(set().union(*found))
    table[name] = {key: [one.get(key) for one in found] for key in fields}
  return table


def loss_and_gradient(task: Any, params: Any, state: Any, batch: Any) -> Any:
  """(loss, norm of its gradient) of a batch, dropout included."""
  keys = jax.random.split(jax.random.key(0), len(batch['mask']))
  frozen = task.init_frozen()

  @jax.jit
  @jax.value_and_grad
  def both(params):
    norm = task.normalizers(batch)
    return task.loss(params, state, frozen, batch, norm, keys, {})[0]

  loss, gradient = both(params)
  return float(loss), float(optax.tree.norm(gradient))
