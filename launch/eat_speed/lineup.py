"""Who takes part in `launch.benchmark eat_speed`, on which weights.

All BERTs run the same random weights, and so do all models of DistilBERT's
shape (half the layers); both are written once, in Hugging Face's layout, and
read by every process.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from launch import peers
from model_lib import sizes

# The published protocol (EAT, section 4), and where the paper exits.
PRUNE_LAYERS, PRUNE_RATIOS, EXIT_LAYER = (2, 4), (0.3, 0.3), 4
NUM_CLASSES = 2

DENSE_FORMS = ('unrolled', 'scanned', 'chunked', 'by layer', 'engine chain')
DISTIL_FORMS = ('scanned', 'chunked')
# What --contenders names.
GROUPS = ('dense', 'eat', 'distil', *peers.PACKAGES)
ENGINE, BARE_CHAIN = 'EAT engine', 'EAT 0 % without engine'
PYTORCH, PYTORCH_DISTIL = 'PyTorch BERT', 'PyTorch DistilBERT'
LENGTHS = 'length buckets'
VOCABULARY = 'vocab.txt'  # of the engine's policy, which gets token ids


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is timed, and how often.

  Attributes:
    variant: sizes by name, see `model_lib.sizes.BERT`.
    depth: layers; 0 for those of the variant.
    length: tokens of every row.
    batches: rows of a batch; a table for each.
    exit_rates: percent of the rows that leave at the first head.
    window: of the attention of EAT, 0 for none.
    dtype: compute dtype.
    rounds: that count.
    warmup: rounds before them.
    min_seconds: least duration of a turn.
    fill: batches that one call of the engine has to fill, about.
    groups: of contenders, see `GROUPS`.
    platform: of JAX, '' for its default.
    timeout: seconds within which a process must answer.
    length_buckets: of the table of lengths; () for no such table.
    row_lengths: tokens of the rows of that table.
  """

  variant: str = 'base'
  depth: int = 0
  length: int = 128
  batches: tuple[int, ...] = (1, 16, 32)
  exit_rates: tuple[int, ...] = (0, 50, 80, 95)
  window: int = 0
  dtype: str = 'float32'
  rounds: int = 7
  warmup: int = 2
  min_seconds: float = 0.5
  fill: int = 8
  groups: tuple[str, ...] = tuple(GROUPS)
  platform: str = ''
  timeout: float = 1800.0
  length_buckets: tuple[int, ...] = ()
  row_lengths: tuple[int, ...] = ()

  @property
  def capacity(self) -> int:
    """Largest batch of the table of lengths."""
    return min(16, max(self.batches))


@dataclasses.dataclass(frozen=True)
class Contender:
  """A line of the table.

  Attributes:
    name: as printed.
    group: a key of `GROUPS`.
    worker: the process that runs it; settings of one model share one.
    build: what that process builds, see `launch.eat_speed.worker`.
    weights: 'bert' or 'distil'.
    exit_rate: percent that leaves at the first head; None without heads.
    cls_only: whether the last block computes [CLS] alone.
  """

  name: str
  group: str
  worker: str
  build: str
  weights: str
  exit_rate: int | None = None
  cls_only: bool = False

  @property
  def is_dense(self) -> bool:
    """Whether it may be the best dense form."""
    return self.group == 'dense'

  def case(self, batch: int) -> str:
    """What its process is asked for."""
    return f'{batch}/{self.exit_rate}' if self.worker == ENGINE else str(batch)


def contenders(settings: Settings) -> list[Contender]:
  """Everybody who takes part, in the order of the table."""
  found = [*_ours(settings), *_peers()]
  return [one for one in found if one.group in settings.groups]


def _ours(settings: Settings) -> Iterator[Contender]:
  for form in DENSE_FORMS:
    name = f'dense {form}'
    cls_only = form == 'engine chain'
    yield Contender(
      name, 'dense', name, f'jax:{form}', 'bert', cls_only=cls_only
    )
  yield Contender(
    BARE_CHAIN, 'eat', BARE_CHAIN, 'jax:bare chain', 'bert', 0, True
  )
  for rate in settings.exit_rates:
    yield Contender(
      f'EAT {rate} %', 'eat', ENGINE, 'jax:engine', 'bert', rate, True
    )
  for form in DISTIL_FORMS:
    name = f'distil {form}'
    yield Contender(name, 'distil', name, f'jax:{form}', 'distil')


def _peers() -> Iterator[Contender]:
  for weights, name in (('bert', PYTORCH), ('distil', PYTORCH_DISTIL)):
    yield Contender(name, 'torch', name, 'torch', weights)
  for weights, name in (('bert', 'BERT'), ('distil', 'DistilBERT')):
    name = f'ONNX Runtime {name}'
    yield Contender(name, 'onnx', name, 'onnx', weights)


def missing(settings: Settings) -> dict[str, str]:
  """The groups that cannot take part, with the reason."""
  reasons = {}
  for group in settings.groups:
    reason = peers.missing(group) if group in peers.PACKAGES else ''
    if reason:
      reasons[group] = reason
    elif group == 'onnx' and settings.dtype != 'float32':
      reasons[group] = f'runs float32 here, not {settings.dtype}'
  return reasons


def fields(settings: Settings, weights: str) -> dict[str, Any]:
  """The fields of a model: all of `model_lib.sizes.BERT.defaults`.

  Args:
    settings: the variant, and its depth.
    weights: 'bert', or 'distil' for half the layers, no token types and the
      pooler of DistilBERT.

  Raises:
    ValueError: there is no such variant, or it is too shallow; names the flag.
  """
  known = sizes.BERT.defaults | sizes.BERT.fields(settings.variant)
  known['depth'] = settings.depth or known['depth']
  if known['depth'] <= EXIT_LAYER or known['depth'] % 2:
    raise ValueError(
      f'depth: expected an even number above {EXIT_LAYER}, where rows exit, '
      f'got {known["depth"]}'
    )
  if settings.length > known['max_positions']:
    raise ValueError(
      f'length: expected at most {known["max_positions"]}, got '
      f'{settings.length}'
    )
  if weights == 'distil':
    known['depth'] //= 2
    known |= {'type_vocab_size': 0, 'pooler_activation': 'relu'}
  return known


def write_weights(settings: Settings, directory: pathlib.Path) -> None:
  """Writes random weights as `directory/bert` and `directory/distil`."""
  from model_lib import convert, convert_tables

  words = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
  (directory / VOCABULARY).write_text('\n'.join(words), encoding='utf-8')

  for weights, kind in (('bert', 'bert'), ('distil', 'distilbert')):
    sizes = fields(settings, weights)
    places = convert_tables.find(kind).places(sizes, NUM_CLASSES, 'classifier')
    shapes = {place.name: place.shape for place in places.values()}
    params = random_params(shapes)
    convert.save(directory / weights, kind, sizes, params)


def random_params(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
  """Nested float32 parameters of the size that BERT begins with.

  Args:
    shapes: by path, `'block_0/mlp/out/kernel'`.
  """
  import numpy as np

  rng = np.random.default_rng(0)
  params: dict[str, Any] = {}
  for path in sorted(shapes):
    *parents, leaf = path.split('/')
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    noise = rng.standard_normal(shapes[path], np.float32)
    # Scales that are all 1 would give all tokens one norm, and rounding would
    # choose which of them are pruned.
    node[leaf] = noise * np.float32(0.02) + np.float32(leaf == 'scale')
  return params


def rows_per_call(batch: int, rates: tuple[int, ...], fill: int) -> int:
  """Rows of one call of the engine: every rate exact, whole batches.

  Args:
    batch: rows of a full batch.
    rates: percent, integers.
    fill: batches that the rows have to fill at least; at batch 1 requests
      come one by one and only the rates count.
  """
  periods = [100 // math.gcd(rate, 100) for rate in rates]
  unit = math.lcm(batch, *periods)
  return unit * math.ceil((fill if batch > 1 else 1) * batch / unit)


def specification(
  contender: Contender, settings: Settings, directory: pathlib.Path
) -> dict[str, Any]:
  """What the process of a contender is told first."""
  return dict(
    build=contender.build,
    weights=str(directory / contender.weights),
    length=settings.length,
    batches=settings.batches,
    rates=settings.exit_rates,
    rows={
      batch: rows_per_call(batch, settings.exit_rates, settings.fill)
      for batch in settings.batches
    },
    window=settings.window,
    dtype=settings.dtype,
    platform=settings.platform,
    directory=str(directory),
    length_buckets=settings.length_buckets,
    row_lengths=settings.row_lengths,
    capacity=settings.capacity,
  )
