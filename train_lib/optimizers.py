"""Optimizers from the configuration, as one optax chain."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from core.errors import ConfigError
from train_lib.phases import Config, Phase

ADAFACTOR_DECAY = 0.8  # exponent, not b2 (Shazeer and Stern, 2018)


def rates(config: Config) -> dict[str, np.float32]:
  """Returns the numbers that are arguments of a step: no constants, not 0.

  Trials that differ only in them share a compiled step.
  """
  names = 'lr', 'end_lr', 'weight_decay'
  return {name: np.float32(config[name]) for name in names if config[name]}


def build_schedule(config: Config, total_steps: int) -> optax.Schedule:
  """Returns a linear warm-up to `lr`, then `config.schedule` to `end_lr`.

  `warmup_steps` below 1 is a share of `total_steps`, the steps of all phases.
  """
  peak, end = config['lr'], config['end_lr']
  warmup = config['warmup_steps']
  warmup = int(warmup * total_steps) if 0 < warmup < 1 else int(warmup)
  rest, start = max(total_steps - warmup, 1), max(warmup, 1)
  after = {
    'cosine': optax.cosine_decay_schedule(peak, rest, alpha=end / peak),
    'linear': optax.linear_schedule(peak, end, rest),
    'constant': optax.constant_schedule(peak),
    # During the warm-up the joined schedule evaluates this at step < 0.
    'rsqrt': lambda n: peak * (start / (jnp.maximum(n, 0) + start)) ** 0.5,
  }
  # Starts at peak / start, so the first step has a non-zero rate.
  before = optax.linear_schedule(peak / start, peak, start)
  return optax.join_schedules([before, after[config['schedule']]], [warmup])


def build_optimizer(
  config: Config,
  schedule: optax.Schedule,
  decayed: str,
  scales: Sequence[str] = (),
) -> optax.GradientTransformation:
  """Returns a chain that clips, preconditions, decays weights, and scales.

  Parameters that match `decayed` have weight decay, decoupled for every method,
  and LAMB's trust ratio (You et al., 2020): by it a step would only multiply a
  bias of one element by 1 +- lr. `scales` are sizes of parameters: their steps
  are larger by them, and their decay is not.
  """
  parts, decay = [], config['weight_decay']
  mask = functools.partial(trainable_mask, pattern=decayed)
  if config['clip_norm'] > 0:
    parts.append(optax.clip_by_global_norm(config['clip_norm']))
  parts.append(_preconditioner(config))
  if scales:
    parts.append(_scale_by_path(scales))
  if isinstance(decay, jax.Array) or decay > 0:  # an array is not 0
    parts.append(optax.add_decayed_weights(decay, mask=mask))
  if config['name'] == 'lamb':
    parts.append(optax.masked(optax.scale_by_trust_ratio(), mask))
  parts.append(optax.scale_by_learning_rate(schedule))
  if config['scales']:
    parts.append(_scale_by_path(config['scales']))
  return optax.chain(*parts)


def num_updates(opt_state: Any) -> Any:
  """Returns the applied updates, int32, which the schedule counts."""
  return optax.tree.get(opt_state, 'ScaleByScheduleState').count


def _scale_by_path(scales: Sequence[str]) -> optax.GradientTransformation:
  """Multiplies the updates by the factor of the first pattern that matches."""
  pairs = [scale.rpartition('->')[::2] for scale in scales]

  def scaled(path: Any, update: Any) -> Any:
    rates = (float(by) for old, by in pairs if re.search(old, path_name(path)))
    return next(rates, 1.0) * update

  return optax.stateless(
    lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates)
  )


def _preconditioner(config: Config) -> optax.GradientTransformation:
  name, b1, b2, eps = (config[key] for key in ('name', 'b1', 'b2', 'eps'))
  if name in ('adamw', 'adam', 'lamb'):
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
  if name == 'adam_atan2':
    return scale_by_adam_atan2(b1, b2)
  if name == 'sgd':
    return optax.trace(decay=b1) if b1 else optax.identity()
  return optax.chain(
    optax.scale_by_factored_rms(decay_rate=ADAFACTOR_DECAY, epsilon=1e-30),
    optax.clip_by_block_rms(1.0),
  )


def scale_by_adam_atan2(b1: float, b2: float) -> optax.GradientTransformation:
  """Adam with atan2 for the quotient of its moments: bounded, no epsilon.

  As in imoneoi/adam-atan2, the first moment is debiased outside of the atan2.
  """

  def update(gradients: Any, state: Any, params: Any = None) -> Any:
    count = optax.safe_increment(state.count)
    mu = optax.tree.update_moment(gradients, state.mu, b1, 1)
    nu = optax.tree.update_moment(gradients, state.nu, b2, 2)
    first, second = 1.0 - b1**count, jnp.sqrt(1.0 - b2**count)
    updates = jax.tree.map(
      lambda m, v: jnp.arctan2(m, jnp.sqrt(v) / second) / first, mu, nu
    )
    return updates, optax.ScaleByAdamState(count, mu, nu)

  return optax.GradientTransformation(optax.scale_by_adam().init, update)


def path_name(path: Any) -> str:
  """Returns a parameter's path as `'encoder/block_0/mlp/kernel'`."""
  # A box adds the attribute `value`; a parameter of this name has a DictKey.
  box = jax.tree_util.GetAttrKey('value')
  names = tuple(key for key in path if key != box)
  return jax.tree_util.keystr(names, simple=True, separator='/')


def trainable_mask(params: Any, pattern: str) -> Any:
  """Returns True where the path matches the regular expression of a phase."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: bool(re.search(pattern, path_name(path))), params
  )


def check_patterns(
  phases: Sequence[Phase], scales: Sequence[str], params: Any
) -> None:
  """Raises `ConfigError` if a phase or a scale names no parameter."""
  fields = [
    (f'phases.{index}.trainable', phase.trainable)
    for index, phase in enumerate(phases)
  ]
  fields += [('optimizer.scales', s.rpartition('->')[0]) for s in scales]
  for field, pattern in fields:
    if not any(jax.tree.leaves(trainable_mask(params, pattern))):
      expected = 'a regular expression that matches a parameter'
      raise ConfigError(field, pattern, expected)
