"""Shipped configurations at a small size, and the program as records use it.

Only this file depends on names of the program. Names that were others when the
records were made are translated here.
"""

import contextlib
import dataclasses
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
GLUE_TASKS = (
  'cola', 'sst2', 'mrpc', 'qqp', 'stsb', 'mnli', 'qnli', 'rte', 'wnli'
)  # fmt: skip

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
  'eat sst2 dense': {},
  'albert sst2': {'iterations': 2},
  'albert sst2 ponder_net': {'iterations': 6},
  'albert tree_depth': {'iterations': 3},
  'parity adatape': {},
  'parity ut': {},
  'digits learn': {},
  'digits input': {},
  'digits vit': {},
  'image_folder ponder': {},
  'table1 uvit': {},
  'table6 avit': {},
}  # fmt: skip
# Back ends and rows of a batch.
ENGINES = ('xla', 4), ('onnxruntime', 1), ('onnxruntime', 4)


def configs() -> dict[str, tuple[str, list[str]]]:
  """Flag and overrides of every shipped config, by the subject's name."""
  table: dict[str, tuple[str, list[str]]] = {}
  for model in ('adatape', 'transformer', 'ut'):
    flag = f'configs/adatape/parity.py:n=8,model={model}'
    lower = ['model.threshold=1.2'] * (model == 'adatape')
    table[f'parity {model}'] = flag, lower
    size = ['model.width=24', 'model.mlp_dim=32']
    size.append('model.max_steps=6' if model == 'ut' else 'model.depth=2')
    flag = f'configs/adatape/parity.py:size=paper,n=8,model={model}'
    table[f'parity_paper {model}'] = flag, size
  table['quick start'] = 'configs/adatape/quick_start.py', []
  folder = 'configs/adatape/images.py:root={images},size=32,variant=Ti/16'
  for model in ('learn', 'input', 'vit'):
    table[f'digits {model}'] = f'configs/adatape/digits.py:model={model}', []
    small = ['model.depth=2']
    small += ['model.bank_size=60'] * (model == 'learn')
    small += ['model.bank_patch_size=4'] * (model == 'input')
    table[f'image_folder {model}'] = f'{folder},model={model}', small
  table |= _tables(f'{folder},model=')
  for name, arguments, overrides in (
    ('parity', '', []), ('logic', 'rule=straight_through', []),
    ('addition', 'rule=skip', ['dataset.digits=2']),
    ('sort', 'rule=fixed,cell=gru', ['dataset.length=3']),
    ('sparse_parity', '', []),
    ('parity', 'cell=lstm', ['dataset.placement=scattered']),
  ):  # fmt: skip
    cell = ' lstm' if 'lstm' in arguments else ''
    flag = f'configs/recurrent_act/graves.py:task={name},{arguments}'
    small = ['dataset.test_examples=16', 'model.width=16', *overrides]
    table[f'recurrent {name}{cell}'] = flag, small
  common = (
    'configs/eat/glue.py:data={glue},vocabulary={vocabulary},variant=tiny,task='
  )
  eat = [*EAT, 'dataset.max_length=32']
  for task in GLUE_TASKS:
    paper = f'{common}{task},recipe=paper'
    table[f'eat {task}'] = paper, [*eat, 'model.window=4']
  for model in ('dense', 'student'):
    table[f'eat sst2 {model}'] = f'{common}sst2,model={model}', eat
  table['eat sst2 pe'] = f'{common}sst2,parts=pe,recipe=paper', eat
  table['eat sst2 mean'] = f'{common}sst2,parts=pe,exits=1-2', eat
  deep = common.replace('tiny', 'mini')
  for task, parts in (('sst2', 'pe'), ('stsb', 'pwe')):
    flag = f'{deep}{task},parts={parts},exits=1-2-3'
    table[f'eat {task} exits'] = flag, eat
  flag = 'configs/eat/tags.py:data={tags},vocabulary={vocabulary},variant=tiny'
  table['eat tags'] = flag, eat
  table['eat labels'] = (
    'configs/eat/labels.py:data={probing},vocabulary={vocabulary},variant=tiny,'
    'name=past_present,recipe=paper',
    [*eat, 'model.window=4'],
  )
  for task in GLUE_TASKS:
    flag = f'configs/albert_act/glue.py:task={task},data={{glue}}'
    table[f'albert {task}'] = flag, FINE_TUNED
  glue = 'configs/albert_act/glue.py:task=sst2,data={glue}'
  for halting in ('fixed', 'ponder_net'):
    longer = ['model.epsilon=0.01'] * (halting == 'ponder_net')
    flag = f'{glue},halting={halting}'
    table[f'albert sst2 {halting}'] = flag, [*FINE_TUNED, *longer]
  probing = 'configs/albert_act/probing.py:data={probing},task='
  table['albert past_present'] = probing + 'past_present', FINE_TUNED
  table['albert tree_depth'] = (
    probing + 'tree_depth,halting=straight_through',
    [*FINE_TUNED, 'loss.ponder_weight=0.1'],
  )
  pretrain = (
    'configs/albert_act/pretrain.py:corpus={corpus},variant=micro,length=32'
  )
  for halting in ('act', 'straight_through', 'fixed', 'bert'):
    tau = 0.0 if halting in ('fixed', 'bert') else 0.01
    table[f'albert pretrain {halting}'] = (
      f'{pretrain},halting={halting}', [*ALBERT, f'loss.ponder_weight={tau}']
    )  # fmt: skip
  return table


def _tables(folder: str) -> dict[str, tuple[str, list[str]]]:
  """Rows of AdaTape's tables on small images, and further models of them."""
  size = ['dataset.image_size=32', 'model.width=24', 'model.num_heads=3']
  size.append('model.mlp_dim=32')
  shared = [*size, 'model.max_steps=3']
  size.append('model.depth=2')
  records, narrow = [*size, 'dataset.num_classes=5'], 'model.query_dim=8'
  # Two rows that are mixed on each of 8 devices.
  images = [*size, 'batch_size=16', 'evals.test.split=test']
  table = {
    f'image_folder {model}': (folder + model, shared)
    for model in ('u2t', 'ponder')
  }
  for name, arguments, overrides in (
    ('table1 learn', 'model=learn', [*records, narrow, 'model.bank_size=60']),
    ('table1 uvit', 'model=uvit', records),
    ('table2 neither', 'model=input,ablation=content', records),
    ('table6 input', 'model=input', [
      *images, narrow, 'model.bank_patch_size=4'
    ]),
    ('table6 deit', 'model=deit', images),
    ('table6 avit', 'model=avit', images),
    ('table7 3ffn', 'model=3ffn', records),
  ):  # fmt: skip
    data = 'data={records},fewshot=none,variant=B/16'
    file = 'jft'
    if name.startswith('table6'):
      file, data = 'imagenet', 'root={images}'
    table[name] = f'configs/adatape/{file}.py:{data},{arguments}', overrides
  table['vit imagenet'] = (
    'configs/vit/imagenet.py:root={images},variant=Ti/16',
    [*images, 'dtype=float32'],
  )
  photographs = 'configs/adatape/photographs.py:root={images},model='
  for model in ('learn', 'uvit', 'avit'):
    table[f'photographs {model}'] = photographs + model, []
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
  """Returns a context in which the task begins with those of `fill`."""
  kind = registry.locate(config.task, 'task')
  original = kind.init

  def init(self, rng):
    return filled(lambda rng: original(self, rng), rng)

  return mock.patch.object(kind, 'init', init)


def filled(init: Any, rng: Any) -> tuple[Any, Any]:
  """(params of `fill`, model state) of the `init` of a task."""
  params, _ = jax.eval_shape(init, rng)
  return fill(params), jax.jit(lambda rng: init(rng)[1])(rng)


def fill(params: Any) -> Any:
  """Parameters drawn by NumPy from the path and shape of each."""

  def leaf(path, value):
    values = draw(parameter_name(path), value.shape)
    return jax.numpy.asarray(values, value.dtype)

  return jax.tree_util.tree_map_with_path(leaf, params)


def parameter_name(path: Any) -> str:
  """The path of a parameter, such as 'block_0/mlp/kernel'."""
  return '/'.join(str(key.key) for key in path if hasattr(key, 'key'))


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Values of one parameter."""
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
  """Shape of each parameter by its name."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {parameter_name(path): list(leaf.shape) for path, leaf in leaves}


def first_batch(config: Any) -> tuple[Any, dict[str, np.ndarray]]:
  """(task, first batch of training)."""
  dataset = build.build_dataset(config)
  task = build.build_task(config, dataset.info)
  with contextlib.closing(dataset.batches()) as batches:
    return task, {k: np.asarray(v) for k, v in next(batches).items()}


def initial_parameters(task: Any) -> tuple[Any, Any]:
  """(params, model state) without boxes, as `fill` draws them."""
  return nn.unbox(filled(task.init, jax.random.key(0)))


def logits(task: Any, params: Any, state: Any, batch: Any) -> Any:
  """Logits of a batch: arrays by name."""
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


def items_of(batch: dict[str, np.ndarray]) -> list[Any]:
  """Items of the rows of a batch, as a caller of the engine has them."""
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
