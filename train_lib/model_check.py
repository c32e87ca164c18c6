"""Checks a model and its task on a few rows, before a training.

Each mistake is a line with its fix. `check_module` and `pair` also refuse a
training; `check` runs what a training would find late, or never.
"""

import contextlib
import copy
import functools
import inspect
import pathlib
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core import fields, registry
from core.errors import Mistakes, UserError
from dataset_lib.source import DatasetInfo
from halting.rule import TokenRule, weigh
from train_lib import sharding
from train_lib.build import Plan
from train_lib.classification import Classification
from train_lib.optimizers import path_name
from train_lib.task import build_task

ROWS = 4
ROW = slice(1, 2)  # that is also run alone
TOLERANCE = 1e-5  # of the largest magnitude
SHOWN = 4  # names in a row of the table
FACTOR = 2.0  # between a formula of FLOPs and the compiler's count
NOT_FINITE = 'expected finite numbers; JAX_DEBUG_NANS=True finds what is not'


def check_module(module: Any, takes_keys: bool) -> None:
  """Raises Mistakes for a Linen class without what a task gives it.

  `takes_keys`: the task calls it with `row_keys`.
  """
  parameters = inspect.signature(module.__call__).parameters
  has = {*fields.hints(module), *parameters}
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  wanted = ['a field `num_classes: int`', 'a field `dtype: Any = jnp.float32`']
  if takes_keys and not takes_any:
    wanted.append('an argument `row_keys=None` of __call__, keys of the rows')
  lines = [
    f'model: expected {what}, got none in {registry.name_of(module)}; add it'
    for what in wanted
    if not has & {*re.findall(r'`(\w+)', what)}
  ]
  if lines:
    raise Mistakes(lines)


def pair(result: Any, classes: int | None) -> tuple[Any, Any]:
  """Returns what a model returned; raises Mistakes if it is no such pair.

  Logits that are one array have `classes`, if given, on their last axis.
  """
  if not isinstance(result, tuple):
    is_array = isinstance(result, jax.Array)
    got = 'an array' if is_array else type(result).__name__
    fix = '`logits, {}`'
  elif len(result) != 2:
    got, fix = f'a tuple of {len(result)}', 'the others in the dict `out`'
  elif not isinstance(result[1], Mapping):
    got = f'(logits, {type(result[1]).__name__})'
    fix = "a dict, such as {'features': x}"
  elif isinstance(result[0], jax.Array) and (
    classes is not None and result[0].shape[-1:] != (classes,)
  ):
    raise Mistakes([
      f'logits: expected [..., {classes}], got {_shown(result[0])}; '
      'end with `nn.Dense(self.num_classes)`'
    ])  # fmt: skip
  else:
    return result
  raise Mistakes([f'model: expected (logits, out), got {got}; return {fix}'])


def check(
  config: Any,
  info: DatasetInfo,
  batch: Mapping[str, Any],
  tell: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
  """Returns a table of what was checked in the models of all phases.

  `config` is in float32 and for one device, `batch` has `ROWS` rows; `tell`
  gets a line before each step, which may compile for minutes. Raises Mistakes
  with all that were found.
  """
  lines: list[str] = []
  table: dict[str, str] = {}
  names = config.task, config.model.get('name') or config.task
  sources = {inspect.getfile(registry.locate(name, '')) for name in names}
  noted = functools.partial(_noted, lines, sources)
  with noted():  # before the plan, whose errors have no place
    jax.eval_shape(build_task(config, info).init, jax.random.key(0))
  if lines:
    raise Mistakes(lines)
  plan = Plan(config, info, 1, jax.devices()[:1])
  # Phases of equal models are checked once.
  for phase in {str(p.model): p for p in plan.phases[::-1]}.values():
    tell(f'{phase.label}: initializing the parameters')
    probe = _Probe(plan, phase, batch)
    for find in (_logits, _out, _rule, _rows, _gradient, _flops):
      tell(f'{phase.label}: checking {find.__name__[1:]}')
      with noted(), jax.set_mesh(plan.mesh):
        table |= find(probe)
      if find is _logits and lines:  # the others would fail for this reason
        raise Mistakes(lines)
  if lines:
    raise Mistakes([*dict.fromkeys(lines)])
  return table


@contextlib.contextmanager
def _noted(lines: list[str], sources: Collection[str]) -> Iterator[None]:
  """Appends the lines of an error; `sources`: files that may have caused it."""
  try:
    yield
  except UserError as error:
    lines += error.lines if isinstance(error, Mistakes) else [str(error)]
  except Exception as error:  # of the user's code
    frames = traceback.extract_tb(error.__traceback__)
    place = ([f for f in frames if f.filename in sources] or frames)[-1]
    where = f'{pathlib.Path(place.filename).name}:{place.lineno}'
    lines.append(f'{where}: {type(error).__name__}: {error}')


class _Probe:
  """The task of a phase with parameters and a batch."""

  def __init__(self, plan: Plan, phase: Any, batch: Mapping[str, Any]):
    self.task, self.phase, self.batch = plan.tasks[phase.index], phase, batch
    self.alone = {name: values[ROW] for name, values in batch.items()}
    key = jax.random.key(plan.config.seed)
    self.keys = jax.random.split(key, ROWS)
    init = jax.jit(lambda key: sharding.unbox(self.task.init(key)))
    params, self.state = init(key)
    # A head of zeros would hide what its input depends on.
    draw = np.random.default_rng(plan.config.seed).normal
    self.params = jax.tree.map(
      lambda x: x + np.asarray(0.05 * draw(size=x.shape), x.dtype), params
    )

  def run(self, batch: Mapping[str, Any], keys: Any = None) -> Any:
    """Returns (logits, out)."""
    return jax.jit(self.task.apply)(self.params, self.state, batch, keys)

  def traced(self, batch: Mapping[str, Any], dtype: Any = jnp.float32) -> Any:
    """Returns shapes and dtypes of (logits, out)."""
    task = copy.copy(self.task)
    task.model = task.model.clone(dtype=dtype)
    return jax.eval_shape(task.apply, self.params, self.state, batch)


def _logits(probe: _Probe) -> dict[str, str]:
  """Checks shape and dtype of the logits of a classification."""
  task, shown = probe.task, ''
  for dtype in (jnp.bfloat16, jnp.float32):
    logits, _ = probe.traced(probe.batch, dtype)
    shown = _shown(logits)
    if isinstance(task, Classification) and not (
      logits.shape[:1] == (ROWS,) and logits.dtype == jnp.float32
    ):
      raise Mistakes([
        f'logits: expected float32 [{ROWS}, ...], got {shown} with '
        f'dtype={dtype.__name__}; end with `nn.Dense(self.num_classes)`'
      ])  # fmt: skip
  return {'model': registry.name_of(type(task.model)), 'logits': shown}


def _out(probe: _Probe) -> dict[str, str]:
  """Checks that entries of `out` have an axis of rows."""
  table, mistakes = {}, []
  (_, out), (_, alone) = probe.traced(probe.batch), probe.traced(probe.alone)
  items = jax.tree_util.tree_leaves_with_path(out)
  for (path, leaf), row in zip(items, jax.tree.leaves(alone), strict=True):
    name, shown = f'out.{path_name(path)}', _shown(leaf)
    # The second axis if heads or steps are stacked; integers may be constants.
    is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
    if is_real and leaf.shape[:2] == row.shape[:2]:
      wanted = f'{name}: expected an axis of rows [{ROWS}, ...], got {shown}'
      mistakes.append(f'{wanted}; return it of each row, terms average')
    table[name] = shown
  if mistakes:
    raise Mistakes(mistakes)
  return table


def _rule(probe: _Probe) -> dict[str, str]:
  """Checks a rule that reads scores: its last step halts, weights sum to 1."""
  rule = getattr(probe.task.model, 'rule', None)
  if not isinstance(rule, TokenRule):
    return {}
  valid = np.arange(ROWS) < ROWS - 1
  scores = np.outer([0.1, 0.2, 0.3], np.linspace(0.1, 1, ROWS))
  state, weights = weigh(rule, scores.astype(np.float32), valid)
  name, mistakes = registry.name_of(type(rule)), []
  if state.running.any():
    text = 'expected no running item after `is_last`, got some'
    mistakes.append(f'model.rule: {text}; `running & ~is_last` in {name}')
  sums = weights.sum(0)
  if rule.COMBINATION != 'last' and np.abs(sums - valid).max() > TOLERANCE:
    text = f'expected weights of sum 1, 0 for padding, got {sums.round(3)}'
    mistakes.append(f'model.rule: {text} in {name}')
  if mistakes:
    raise Mistakes(mistakes)
  return {'rule': f'{name}, halts at the last step'}


def _rows(probe: _Probe) -> dict[str, str]:
  """Checks that a row depends neither on others nor on its padding."""
  row, key = probe.alone, probe.task.info.input_key
  cases = [
    ('alone', (probe.batch, None), (row, None), 'no mean or BatchNorm of rows'),
    ('alone, with noise', (probe.batch, probe.keys), (row, probe.keys[ROW]),
     'draw the noise of a row from its key, as model_lib.row_random'),
  ]  # fmt: skip
  if 'length' in row:  # a text, of which the first half is kept
    width = row[key].shape[1]
    half = max(2, width // 2)
    padded = row | {'length': np.full_like(row['length'], half)}
    short = {k: v[:, :half] if v.shape[1:2] == (width,) else v
             for k, v in padded.items()}  # fmt: skip
    padded[key] = np.where(np.arange(width) < half, row[key], 0)
    fix = 'mask what is after `length`, in attention and means'
    cases.append(('padded', (padded, None), (short, None), fix))
  table: dict[str, str] = {}
  mistakes: list[str] = []
  for how, first, second, fix in cases:
    if mistakes and first[1] is not None:
      continue  # for the same reason
    far = _distance(probe.run(*first), probe.run(*second))
    table[f'difference of a row {how}'] = f'{far:.1g}'
    if far > TOLERANCE:
      got = f'expected equal results, got a difference of {far:.1g}'
      mistakes.append(f'rows {how}: {got} of their size; {fix}')
  if mistakes:
    raise Mistakes(mistakes)
  return table


def _distance(batched: Any, alone: Any) -> float:
  """Returns the largest difference of logits and features, of their size."""
  most = 0.0
  parts = ((logits, out.get('features')) for logits, out in (batched, alone))
  for x, other in zip(*parts, strict=True):
    if not isinstance(x, jax.Array):  # of a task with several kinds
      continue
    rows = ROW if len(x) > 1 else slice(None)
    same = np.asarray(x)[rows][tuple(map(slice, other.shape))]
    if not np.isfinite(same).all():
      raise Mistakes([f'logits, features: {NOT_FINITE}'])
    size = max(np.abs(same).max(), 1e-30)
    most = max(most, float(np.abs(same - other).max() / size))
  return most


def _gradient(probe: _Probe) -> dict[str, str]:
  """Checks the loss, its gradient and an evaluation."""
  task, parts = probe.task, (probe.params, probe.state)
  jax.eval_shape(task.evaluate, *parts, probe.batch)
  batch = task.carried(task.init_carry(ROWS), probe.batch)
  rest = task.init_frozen(), batch, task.normalizers(batch), probe.keys
  gradient = jax.jit(jax.grad(task.loss, has_aux=True))
  grads, _ = gradient(*parts, *rest, probe.phase.knob_values(0))
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
  more = f' and {len(without) - SHOWN} more' if len(without) > SHOWN else ''
  return {
    'parameters': f'{sum(sizes.values()):,}',
    'without a gradient': ', '.join(sorted(without)[:SHOWN]) + more or 'none',
    **{f'  {name}': f'{size:,}' for name, size in sizes.items()},
  }


def _flops(probe: _Probe) -> dict[str, str]:
  """Compares the formula of a model with the compiler's count."""
  counted, formula = probe.task.counted_flops(), probe.task.flops()
  if probe.task.has_formula and not isinstance(formula, (int, float)):
    raise Mistakes([f'flops: expected a number, got {formula!r:.80}'])
  table = {'FLOPs of a row, compiler': f'{counted:,.0f}, loops once'}
  if probe.task.has_formula:
    ratio = formula / counted
    note = f', {ratio:.2g} times: expected without loops or skipped tokens is '
    note = '' if 1 / FACTOR <= ratio <= FACTOR else f'{note}at most {FACTOR:g}'
    table['FLOPs of a row, model.flops'] = f'{formula:,.0f}{note}'
  return table


def _shown(tree: Any) -> str:
  """Returns names, dtypes and shapes of arrays."""
  items = jax.tree_util.tree_leaves_with_path(tree)
  return ', '.join(
    f'{path_name(path)} {x.dtype} {list(x.shape)}'.strip() for path, x in items
  )
