"""Starts from the parameters of another run or of a Hugging Face model.

Every parameter of the model must be in the checkpoint, and every one of the
checkpoint must be used; exceptions are explicit. Names are paths such as
`encoder/block_0/mlp/kernel`. Nothing is cast, except a Hugging Face checkpoint
in half or double precision, which is logged.
"""

import collections
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dataset_lib.errors import ConfigError
from model_lib import convert
from train_lib import checkpoint_io as io
from train_lib.run_directory import Path


def start_from(state: Any, config: Any) -> Any:
  """Replaces parameters of a fresh state by those of `config.warm_start`."""
  if not config.workdir:
    return state
  try:
    params = warm_start(
      state.params, config.workdir, config.renames, config.skip
    )
  except (ValueError, io.CheckpointError) as error:
    expected = f'a checkpoint that fits the model: {error}'
    raise ConfigError('warm_start.workdir', config.workdir, expected) from error
  # A copy: the state is donated, and no buffer may be donated twice.
  average = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
  return state.replace(params=params, ema_params=average)


def warm_start(
  params: Any,
  directory: Path,
  renames: Sequence[str] = (),
  skip: Sequence[str] = (),
) -> Any:
  """Replaces fresh parameters by (averaged) ones of another run's checkpoint.

  Args:
    params: their structure and shardings are kept.
    directory: workdir of the other run, its folder of checkpoints, or a
      Hugging Face directory.
    renames: 'old->new', applied in turn to the names of the checkpoint by
      `re.sub`.
    skip: regular expressions searched in the names of both sides, after
      renaming: such parameters keep their fresh values, as with `^head/`.

  Raises:
    ValueError: a rename or a skip matches nothing, parameters are left over on
      either side or differ in shape or dtype; or the directory is unusable.
  """
  if convert.is_checkpoint(directory):
    heads = 'pretraining' if 'predictions' in params else 'classifier'
    source = convert.load(directory, heads).params
  else:
    source = io.find(directory).params()
  found, fresh = io.flatten(source), io.flatten(params)
  unmatched, skipped = [], set()
  for rename in renames:
    old, _, new = rename.partition('->')
    unmatched += [] if any(re.search(old, name) for name in found) else [rename]
    names = collections.Counter(re.sub(old, new, name) for name in found)
    name, count = names.most_common(1)[0] if names else ('', 0)
    if count > 1:
      raise ValueError(
        f'warm_start.renames: {count} parameters of the checkpoint become '
        f'{name!r}'
      )
    found = dict(zip(names, found.values(), strict=True))
  for pattern in skip:
    hits = {name for name in {*found, *fresh} if re.search(pattern, name)}
    unmatched += [] if hits else [pattern]
    skipped |= hits
  if unmatched:
    raise ValueError(
      f'warm_start: {unmatched} match no parameter of {directory}; it has\n  '
      + io.shortened(sorted(found))
    )
  found = {n: leaf for n, leaf in found.items() if n not in skipped}
  wanted = {n: leaf for n, leaf in fresh.items() if n not in skipped}
  io.check_layout(directory, io.layout(found), io.layout(wanted))
  for name, leaf in wanted.items():
    fresh[name] = jax.device_put(found[name], leaf.sharding)
  return jax.tree.unflatten(jax.tree.structure(params), list(fresh.values()))
