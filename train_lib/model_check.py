"""Checks a model and its task on a few rows, before a training.

A mistake is a line that says what to write instead. `check_module` and `pair`
also refuse a training; `check` runs what a training would find late, or never.
"""

import contextlib
import copy
import functools
import inspect
import pathlib
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from core import fields, registry
from core.errors import Mistakes, UserError
from dataset_lib.source import DatasetInfo
from train_lib import sharding
from train_lib.build import Plan
from train_lib.classification import Classification
from train_lib.optimizers import path_name
from train_lib.task import build_task

FIELDS = ('num_classes: int', 'dtype: Any = jnp.float32')
ROWS = 4
ROW = slice(1, 2)  # that is also run alone
NOT_FINITE = 'expected finite numbers; JAX_DEBUG_NANS=True finds what is not'
TOLERANCE = 1e-5  # of the largest magnitude
FACTOR = 2.0  # between a formula of FLOPs and the compiler's count


def check_module(module: type[nn.Module], takes_keys: bool = True) -> None:
  """Raises Mistakes for a class without the fields that a task sets.

  `takes_keys`: the task calls it with `row_keys`.
  """
  name, mistakes = registry.name_of(module), []
  for field in FIELDS:
    if field.partition(':')[0] not in fields.hints(module):
      expected = f'model: expected a field `{field}`, got none in {name}'
      mistakes.append(f'{expected}; add it')
  given = inspect.signature(module.__call__).parameters
  is_open = any(one.kind is one.VAR_KEYWORD for one in given.values())
  if takes_keys and not is_open and 'row_keys' not in given:
    shown = f'`__call__({", ".join(given)})` of {name}'
    expected = f'model: expected an argument `row_keys=None`, got {shown}'
    mistakes.append(f'{expected}; add it: a random key for each row, or None')
  if mistakes:
    raise Mistakes(mistakes)


def pair(result: Any) -> tuple[Any, Mapping[str, Any]]:
  """Returns what a model returned; raises Mistakes if it is no such pair."""
  expected = 'model: expected (logits, out), got'
  if not isinstance(result, tuple):
    raise Mistakes([f'{expected} {_kind(result)}; return `logits, {{}}`'])
  if len(result) != 2:
    fix = 'return all but the logits by name, in the dict `out`'
    raise Mistakes([f'{expected} a tuple of {len(result)}; {fix}'])
  if not isinstance(result[1], Mapping):
    fix = "return a dict, such as {'features': x}"
    raise Mistakes([f'{expected} (logits, {_kind(result[1])}); {fix}'])
  return result


def _kind(value: Any) -> str:
  is_array = isinstance(value, jax.Array)
  return 'an array' if is_array else type(value).__name__


def check(
  config: Any, info: DatasetInfo, batch: Mapping[str, Any]
) -> dict[str, str]:
  """Returns a table of the models of all phases, by what was checked.

  Args:
    config: in float32, on one device.
    info: of the data.
    batch: `ROWS` rows of the data.

  Raises:
    Mistakes: all that were found.
  """
  lines: list[str] = []
  table: dict[str, str] = {}
  kinds = (
    registry.locate(config.task, ''),
    registry.locate(config.model.name, ''),
  )
  noted = functools.partial(_noted, lines, {*map(inspect.getfile, kinds)})
  with noted():
    init = build_task(config, info).init
    jax.eval_shape(init, jax.random.key(0))
  if lines:
    raise Mistakes(lines)
  plan = Plan(config, info, 1, jax.devices()[:1])
  # Phases of equal models are checked once.
  phases = {str(one.model): one for one in plan.phases[::-1]}
  for phase in phases.values():
    probe = _Probe(plan, phase, batch)
    for find in (_logits, _out, _rows, _padding, _gradient, _flops):
      with noted(), jax.set_mesh(plan.mesh):
        table |= find(probe)
      if find is _logits and lines:  # the others would fail for this reason
        raise Mistakes(lines)
  if lines:
    raise Mistakes([*dict.fromkeys(lines)])
  return table


class _Probe:
  """A task with parameters and a batch."""

  def __init__(self, plan: Any, phase: Any, batch: Mapping[str, Any]):
    self.plan, self.phase, self.batch = plan, phase, batch
    self.task = plan.tasks[phase.index]
    key = jax.random.key(plan.config.seed)
    self.keys = jax.random.split(key, ROWS)
    init = jax.jit(lambda key: sharding.unbox(self.task.init(key)))
    params, self.state = init(key)
    # A head of zeros would hide what its input depends on.
    draw = np.random.default_rng(plan.config.seed).normal
    self.params = jax.tree.map(
      lambda x: x + np.asarray(0.05 * draw(size=x.shape), x.dtype), params
    )

    self.alone = {name: values[ROW] for name, values in batch.items()}

  def run(self, batch: Mapping[str, Any], keys: Any = None) -> Any:
    """Returns (logits, out)."""
    return jax.jit(self.task.apply)(self.params, self.state, batch, keys)

  def traced(self, batch: Mapping[str, Any], dtype: Any) -> Any:
    """Returns shapes and dtypes of (logits, out)."""
    task = copy.copy(self.task)
    task.model = task.model.clone(dtype=dtype)
    return jax.eval_shape(task.apply, self.params, self.state, batch)


@contextlib.contextmanager
def _noted(lines: list[str], files: Collection[str]) -> Iterator[None]:
  """Appends the lines of an error; `files`: of the user, for its place."""
  try:
    yield
  except UserError as error:
    lines += error.lines if isinstance(error, Mistakes) else [str(error)]
  except Exception as error:  # of the user's code
    frames = traceback.extract_tb(error.__traceback__)
    place = ([f for f in frames if f.filename in files] or frames)[-1]
    where = f'{pathlib.Path(place.filename).name}:{place.lineno}'
    lines.append(f'{where}: {type(error).__name__}: {error}')


def _logits(probe: _Probe) -> dict[str, str]:
  """Checks shape and dtype of the logits, also of bfloat16."""
  task, found = probe.task, ''
  classes = getattr(task.model, 'num_classes', 0)
  for dtype in (jnp.bfloat16, jnp.float32):
    logits, _ = probe.traced(probe.batch, dtype)
    found = _shown(logits)
    if not isinstance(task, Classification):
      continue
    fits = logits.shape[:1] == (ROWS,) and logits.shape[-1] == classes
    if not fits or logits.dtype != jnp.float32:
      expected = f'logits: expected float32 [{ROWS}, {classes}], got {found}'
      fix = 'end with `nn.Dense(self.num_classes)`'
      raise Mistakes([f'{expected} with dtype={dtype.__name__}; {fix}'])
  return {'model': registry.name_of(type(task.model)), 'logits': found}


def _out(probe: _Probe) -> dict[str, str]:
  """Checks that entries of `out` have an axis of rows."""
  (_, out), (_, alone) = (
    probe.traced(batch, jnp.float32) for batch in (probe.batch, probe.alone)
  )
  mistakes, ones = [], jax.tree.leaves(alone)
  items = jax.tree_util.tree_leaves_with_path(out)
  for (path, leaf), one in zip(items, ones, strict=True):
    # The second axis if heads or steps are stacked. Integers may be constants.
    is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
    if is_real and leaf.shape[:2] == one.shape[:2]:
      mistakes.append(
        f'out.{path_name(path)}: expected an axis of rows [{ROWS}, ...], got '
        f'{_shown(leaf)}; return it of each row, the task takes the mean'
      )
  if mistakes:
    raise Mistakes(mistakes)
  return {f'out.{path_name(path)}': _shown(leaf) for path, leaf in items}


def _rows(probe: _Probe) -> dict[str, str]:
  """Checks that a row depends on no other row, without noise and with it."""
  found = {}
  for how, keys, fix in (
    ('alone', None, 'take no mean or maximum over rows, as BatchNorm does'),
    ('alone, with noise', probe.keys,
     "draw a row's noise from its key, as model_lib.row_random does"),
  ):  # fmt: skip
    whole = probe.run(probe.batch, keys)
    alone = probe.run(probe.alone, None if keys is None else keys[ROW])
    found |= _compared(whole, alone, ROW, how, fix)
  return found


def _padding(probe: _Probe) -> dict[str, str]:
  """Checks that the results of a text do not depend on its padding."""
  row, key = probe.alone, probe.task.info.input_key
  if 'length' not in row:
    return {}
  width = row[key].shape[1]
  half = max(2, width // 2)
  short = {
    k: v[:, :half] if v.shape[1:2] == (width,) else v for k, v in row.items()
  } | {'length': np.full_like(row['length'], half)}
  padding = np.zeros_like(row[key][:, half:])
  padded = row | {
    'length': short['length'], key: np.append(short[key], padding, 1)
  }  # fmt: skip
  fix = 'mask what is after `length`, in attention and in means'
  both = probe.run(padded), probe.run(short)
  return _compared(*both, slice(None), 'padded', fix)


def _compared(
  whole: Any, other: Any, rows: slice, how: str, fix: str
) -> dict[str, str]:
  """Returns the largest difference of logits and features; Mistakes if large.

  `rows` of the first are compared, and as many tokens as the second has.
  """
  most = 0.0
  for name in ('logits', 'features'):
    first, second = (
      logits if name == 'logits' else out.get(name)
      for logits, out in (whole, other)
    )
    if not isinstance(first, jax.Array):  # of a task with several kinds
      continue
    given = np.asarray(first)[rows][tuple(map(slice, second.shape))]
    size = max(np.abs(given).max(), 1e-30)
    most = max(most, np.abs(given - second).max() / size)
    if not np.isfinite(given).all():
      raise Mistakes([f'{name}: {NOT_FINITE}'])
  if most > TOLERANCE:
    got = f'expected equal results, got {most:.1g} of their size'
    raise Mistakes([f'rows {how}: {got}; {fix}'])
  return {f'difference of a row {how}': f'{most:.1g}'}


def _gradient(probe: _Probe) -> dict[str, str]:
  """Checks the loss, its gradient and an evaluation."""
  task, state = probe.task, probe.state
  jax.eval_shape(task.evaluate, probe.params, state, probe.batch)
  batch = task.carried(task.init_carry(ROWS), probe.batch)
  rest = task.init_frozen(), batch, task.normalizers(batch), probe.keys
  knobs = probe.phase.knob_values(0)
  gradient = jax.jit(jax.grad(task.loss, has_aux=True))
  grads, _ = gradient(probe.params, state, *rest, knobs)
  sizes: dict[str, int] = {}
  wrong, without = set(), set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    # Numbered layers share a line.
    name = re.sub(r'_\d+(?=/)', '_*', path_name(path))
    sizes[name] = sizes.get(name, 0) + leaf.size
    wrong |= set() if np.isfinite(leaf).all() else {name}
    without |= set() if np.any(leaf) else {name}
  if wrong:
    raise Mistakes([f'gradient of {", ".join(sorted(wrong))}: {NOT_FINITE}'])
  return {
    'parameters': f'{sum(sizes.values()):,}',
    'without a gradient': ', '.join(sorted(without)) or 'none',
    **{f'  {name}': f'{size:,}' for name, size in sizes.items()},
  }


def _flops(probe: _Probe) -> dict[str, str]:
  """Compares the formula of a model with the compiler's count."""
  task = probe.task
  counted = task.counted_flops()
  found = {'FLOPs of a row, compiler': f'{counted:,.0f}, loops once'}
  if task.has_formula:
    given = task.flops()
    ratio = given / counted
    far = (
      f': {ratio:.2g} times; {FACTOR:g} at most if nothing loops or is skipped'
    )
    is_near = 1 / FACTOR <= ratio <= FACTOR
    found['FLOPs of a row, model.flops'] = (
      f'{given:,.0f}{"" if is_near else far}'
    )
  return found


def _shown(tree: Any) -> str:
  """Returns names, shapes and dtypes of arrays."""
  items = jax.tree_util.tree_leaves_with_path(tree)
  named = ((path_name(path), x) for path, x in items)
  texts = (f'{name} {x.dtype} {list(x.shape)}'.strip() for name, x in named)
  return ', '.join(texts)
