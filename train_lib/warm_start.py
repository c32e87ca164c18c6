"""Starts from the parameters of another run.

Every parameter of the model must be in the checkpoint, and every one of the
checkpoint must be used; exceptions are explicit. The average of the other
run's parameters is taken if it kept one. The checkpoint may also be a BERT,
DistilBERT or ALBERT of Hugging Face. Names are paths such as
`encoder/block_0/mlp/kernel`. Nothing is cast, except a Hugging Face checkpoint
in half or double precision, which is logged. A head that the checkpoint lacks,
or has for another task, is skipped explicitly: `skip=('^head/',)`.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dataset_lib.errors import ConfigError
from model_lib import convert
from train_lib import checkpoint_io as io
from train_lib.checkpoint import restore_params


def start_from(state: Any, config: Any) -> Any:
  """Returns a fresh state with the parameters of `config.warm_start`, if any.

  Args:
    state: a fresh `TrainState`.
    config: `workdir`, '' for none, `renames` and `skip`; see `warm_start`.

  Raises:
    ConfigError: if the other run does not fit.
  """
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
  checkpoint_dir: str | os.PathLike[str],
  renames: Sequence[str] = (),
  skip: Sequence[str] = (),
) -> Any:
  """Replaces parameters by those of another run's newest good checkpoint.

  Args:
    params: parameters of a fresh model; their shardings are kept.
    checkpoint_dir: workdir of the other run, or its folder of checkpoints, or
      a Hugging Face directory.
    renames: 'old->new' with `old` a regular expression searched in the names
      of the checkpoint and `new` its replacement (`re.sub`), applied in turn.
    skip: regular expressions searched in the names of both sides (those of
      the checkpoint after renaming): such parameters keep their fresh values,
      and are not read.

  Returns:
    The parameters, in the structure of `params`.

  Raises:
    ValueError: a rename is malformed, a rename or a skip matches nothing,
      parameters are left over on either side or differ in shape or dtype,
      all of which are listed; or a Hugging Face directory is unusable.
  """
  source = _read(checkpoint_dir, params)
  found, wanted = io.flatten(source), io.flatten(params)
  unmatched = dict.fromkeys((*renames, *skip))
  for rename in renames:
    found = _renamed(found, rename, unmatched)
  skipped = set()
  for pattern in skip:
    hits = {n for n in {*found, *wanted} if re.search(pattern, n)}
    skipped |= hits
    if hits:
      unmatched.pop(pattern, None)
  if unmatched:
    raise ValueError(
      f'warm_start: {list(unmatched)} match no parameter of '
      f'{checkpoint_dir}; it has\n  ' + io.shortened(sorted(found))
    )
  used = {n: leaf for n, leaf in wanted.items() if n not in skipped}
  found = {n: leaf for n, leaf in found.items() if n not in skipped}
  try:
    io.check_layout(checkpoint_dir, io.layout(found), io.layout(used))
  except io.CheckpointMismatchError as error:
    raise ValueError(
      f'warm_start: {error}\nRename with warm_start.renames=("old->new",), or '
      'keep fresh values with warm_start.skip=("regex",).'
    ) from None
  placed = (jax.device_put(found[n], leaf.sharding) for n, leaf in used.items())
  merged = wanted | dict(zip(used, placed, strict=True))
  return jax.tree.unflatten(jax.tree.structure(params), list(merged.values()))


def _read(checkpoint_dir: str | os.PathLike[str], params: Any) -> Any:
  """Reads the parameters of a run or of a Hugging Face directory."""
  if convert.is_checkpoint(checkpoint_dir):
    heads = 'pretraining' if 'predictions' in params else 'classifier'
    return convert.load_params(checkpoint_dir, heads=heads)
  return restore_params(checkpoint_dir).params


def _renamed(
  found: Mapping[str, Any], rename: str, unmatched: dict[str, None]
) -> dict[str, Any]:
  """Applies a rename to all names; removes it from `unmatched` on a match."""
  old, arrow, new = rename.partition('->')
  if not arrow or not old:
    raise ValueError(f"warm_start.renames: expected 'old->new', got {rename!r}")
  renamed: dict[str, Any] = {}
  for name, leaf in found.items():
    new_name, count = re.subn(old, new, name)
    if count:
      unmatched.pop(rename, None)
    if new_name in renamed:
      raise ValueError(
        'warm_start.renames: two parameters of the checkpoint become '
        f'{new_name!r}, one of them {name!r}'
      )
    renamed[new_name] = leaf
  return renamed
