"""Starting from the parameters of another run, with nothing left to chance.

Every parameter of the model must be found in the checkpoint, and every one
of the checkpoint must be used; what shall differ is said explicitly. The
checkpoint may also be a BERT, DistilBERT or ALBERT of Hugging Face: its
parameters come as `model_lib.huggingface` names them, and in float32.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from model_lib import huggingface
from train_lib import checkpoint_io as form
from train_lib.checkpoint import restore_params


def warm_start(
  params: Any,
  checkpoint_dir: str | os.PathLike[str],
  renames: Sequence[str] = (),
  skip: Sequence[str] = (),
) -> Any:
  """Replaces parameters by those of another run's newest good checkpoint.

  The average of the other run's parameters is taken if it kept one. Names
  are paths such as `encoder/block_0/mlp/kernel`. Nothing is cast, but for a
  Hugging Face checkpoint in half or double precision, which the log says; a
  head that it lacks, or has for another task, is skipped like any other:
  `skip=('^head/',)`.

  Args:
    params: parameters of a fresh model; their shardings are kept.
    checkpoint_dir: workdir of the other run, or its folder of checkpoints, or
      a Hugging Face directory.
    renames: 'old->new' with `old` a regular expression searched in the names
      of the checkpoint and `new` its replacement (`re.sub`), applied in turn.
    skip: regular expressions searched in the names of both sides (those of
      the checkpoint after renaming): such parameters keep their fresh values
      here, and are left unused there.

  Returns:
    The parameters, in the structure of `params`.

  Raises:
    ValueError: a rename is malformed, or matches nothing, as may a skip; or
      parameters are left over on either side or differ in shape or dtype,
      all of which are listed; or a Hugging Face directory is unusable.
  """
  wanted = form.flatten(params)
  if huggingface.is_checkpoint(checkpoint_dir):
    words = any(name.startswith('predictions/') for name in wanted)
    heads = 'pretraining' if words else 'classifier'
    source = huggingface.load_params(checkpoint_dir, heads=heads)
  else:
    source = restore_params(checkpoint_dir).params
  found = form.flatten(source)
  found, used = _rename(found, [_parse(rename) for rename in renames])
  unused = [
    rename for rename, hit in zip(renames, used, strict=True) if not hit
  ]
  unused += [
    pattern
    for pattern in skip
    if not any(re.search(pattern, name) for name in {*found, *wanted})
  ]
  if unused:
    raise ValueError(
      f'warm_start: {unused} match no parameter of {checkpoint_dir}; it has\n  '
      + form.shortened(sorted(found))
    )
  _check(checkpoint_dir, _kept(found, skip), _kept(wanted, skip))
  new = wanted | {
    name: jax.device_put(found[name], leaf.sharding)
    for name, leaf in _kept(wanted, skip).items()
  }
  return jax.tree.unflatten(jax.tree.structure(params), list(new.values()))


def _parse(rename: str) -> tuple[str, str]:
  old, arrow, new = rename.partition('->')
  if not arrow or not old:
    raise ValueError(f"warm_start.renames: expected 'old->new', got {rename!r}")
  return old, new


def _rename(
  found: dict[str, Any], renames: list[tuple[str, str]]
) -> tuple[dict[str, Any], list[bool]]:
  renamed: dict[str, Any] = {}
  used = [False] * len(renames)
  for name, leaf in found.items():
    new_name = name
    for index, (old, new) in enumerate(renames):
      new_name, count = re.subn(old, new, new_name)
      used[index] |= count > 0
    if new_name in renamed:
      raise ValueError(
        f'warm_start.renames: two parameters of the checkpoint become '
        f'{new_name!r}, one of them {name!r}'
      )
    renamed[new_name] = leaf
  return renamed, used


def _kept(flat: dict[str, Any], skip: Sequence[str]) -> dict[str, Any]:
  return {
    name: leaf
    for name, leaf in flat.items()
    if not any(re.search(pattern, name) for pattern in skip)
  }


def _check(
  where: object, found: dict[str, Any], wanted: dict[str, Any]
) -> None:
  try:
    form.check_layout(where, form.layout(found), form.layout(wanted))
  except form.CheckpointMismatchError as error:
    raise ValueError(
      f'warm_start: {error}\nRename with warm_start.renames=("old->new",), or '
      'keep the fresh values and leave the old ones with '
      'warm_start.skip=("regex",).'
    ) from None
