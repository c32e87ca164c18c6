"""Candidates of `launch.benchmark eat_speed`: EAT, dense BERTs, DistilBERTs.

All run the same random weights and token ids, each in a process of its own.
"""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from dataset_lib import builder
from eat import cost
from eval_lib import benchmark
from eval_lib.hosts import Candidate, Hosts
from launch import eat_calls, export, peers
from launch.eat_calls import EXIT_LAYER, Shape
from model_lib.bert import BertClassifier
from model_lib.errors import FieldError

FORMS = ('unrolled', 'scanned', 'chunked', 'by layer', 'engine chain')
DISTIL_FORMS = ('scanned', 'chunked')
OVER = {'over_torch': 'PyTorch BERT', 'over_torch_distil': 'PyTorch DistilBERT'}
MAX_LENGTH = 512
NAMES = {'bert': 'BERT', 'distil': 'DistilBERT'}
# Tokens of the synthetic rows: about those of SST-2's sentences.
MEDIAN_LENGTH, LENGTH_SPREAD = 24, 0.5


def check(settings: Mapping[str, Any]) -> None:
  """Raises ValueError, naming the field, for sizes that cannot be timed."""
  depth = _shape(settings).fields()['depth']
  if depth <= EXIT_LAYER or depth % 2:
    expected = f'an even number above {EXIT_LAYER}, where rows exit'
    raise FieldError('depth', depth, expected)
  for name in ('length', 'length_buckets'):
    longest = max((0, *np.atleast_1d(settings[name])))
    if longest > MAX_LENGTH:
      raise FieldError(name, longest, f'at most {MAX_LENGTH}')


def tables(settings: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
  """Runs the benchmark; see `launch.benchmark`.

  Args:
    settings: the flags of the command.
  """
  environment = {
    'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',  # processes share a GPU
    'HF_HUB_OFFLINE': '1',
    'TF_CPP_MIN_LOG_LEVEL': '3',
  }
  if settings['platform']:
    environment['JAX_PLATFORMS'] = settings['platform']
  timing = {
    name: settings[name] for name in ('rounds', 'warmup', 'min_seconds')
  }
  result = {}
  with (
    tempfile.TemporaryDirectory() as directory,
    Hosts(print, settings['timeout'], environment) as hosts,
  ):
    result[''] = benchmark.run(
      candidates(settings, directory),
      [{'batch': batch} for batch in settings['batch']],
      hosts,
      over=OVER,
      **timing,
    )
    if settings['length_buckets']:
      compared = length_candidates(settings)
      result['lengths'] = benchmark.run(
        compared, [{'rows': settings['length_rows']}], hosts, **timing
      )
  return result


def candidates(settings: Mapping[str, Any], directory: str) -> list[Candidate]:
  """Returns the candidates of all groups, in the order of the table.

  Args:
    settings: the flags of the command.
    directory: where weights for other libraries are written.
  """
  shape, length = _shape(settings), settings['length']
  distil = shape._replace(weights='distil')
  groups = settings['candidates']
  found = []
  if 'dense' in groups:
    found += [_dense(form, shape, length) for form in FORMS]
  if 'eat' in groups:
    found += [_eat(rate, settings) for rate in settings['exit_rates']]
  if 'distil' in groups:
    found += [_dense(form, distil, length) for form in DISTIL_FORMS]
  for library in peers.PACKAGES:
    reason = peers.missing(library, settings['dtype'])
    if library in groups and reason:
      print(f'left out: {library}: {reason}')
    elif library in groups:
      found += [
        _peer(library, one, length, directory) for one in (shape, distil)
      ]
  return found


def _shape(settings: Mapping[str, Any]) -> Shape:
  return Shape(settings['variant'], settings['depth'], settings['dtype'])


def _dense(form: str, shape: Shape, length: int) -> Candidate:
  is_bert = shape.weights == 'bert'
  name = f'dense {form}' if is_bert else f'distil {form}'
  model = BertClassifier(**shape.fields())
  full = model.flops((length,))
  computed = model.clone(cls_only=form == 'engine chain').flops((length,))
  return Candidate(
    name, eat_calls.make_dense, dict(form=form, shape=shape, length=length),
    process=name, is_baseline=is_bert, flops=(full, computed),
    group=shape.weights,
  )  # fmt: skip


def _eat(rate: int, settings: Mapping[str, Any]) -> Candidate:
  shape, length = _shape(settings), settings['length']
  model = eat_calls.adaptive_model(shape, settings['window'])
  stay = (1.0, 1.0 - rate / 100)
  full, computed = (
    float(np.dot(cost.stage_flops(model, length, sizes, count_cls), stay))
    for sizes in [cost.static_sizes(model, length)]
    for count_cls in (False, True)
  )
  options = dict(
    rate=rate, rates=settings['exit_rates'], fill=settings['fill'],
    shape=shape, length=length, window=settings['window'],
  )  # fmt: skip
  return Candidate(
    f'EAT {rate} %', eat_calls.make_engine, options, process='EAT engine',
    flops=(full, computed), group='eat',
  )  # fmt: skip


def _peer(library: str, shape: Shape, length: int, directory: str) -> Candidate:
  weights = pathlib.Path(directory) / shape.weights
  if not weights.exists():
    model = BertClassifier(**shape.fields())
    export.save(str(weights), model, eat_calls.random_params(model))
  full = BertClassifier(**shape.fields()).flops((length,))
  name = f'{peers.TITLES[library]} {NAMES[shape.weights]}'
  options = dict(
    library=library, weights=str(weights), length=length, dtype=shape.dtype
  )
  return Candidate(
    name, peers.make_classifier, options, process=name,
    flops=(full, full), group=shape.weights,
  )  # fmt: skip


def length_candidates(settings: Mapping[str, Any]) -> list[Candidate]:
  """Returns the dense model with all rows padded, and in length buckets."""
  shape, buckets = _shape(settings), settings['length_buckets']
  model = BertClassifier(**shape.fields(), cls_only=True)
  lengths = row_lengths(settings)
  flops = np.array([model.flops((size,)) for size in buckets])
  served = flops[np.searchsorted(buckets, lengths)].mean()

  def candidate(name: str, sizes: Sequence[int], cost: float) -> Candidate:
    options = dict(
      shape=shape, buckets=sizes, lengths=lengths,
      capacity=min(16, max(settings['batch'])),
    )  # fmt: skip
    return Candidate(
      name, eat_calls.make_lengths, options, process='length buckets',
      is_baseline=name == 'padded', flops=(cost, cost),
    )  # fmt: skip

  return [
    candidate('padded', buckets[-1:], float(flops[-1])),
    candidate('buckets', buckets, float(served)),
  ]


def row_lengths(settings: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the tokens of `length_rows` rows, in random order.

  Of rows evenly spaced over the validation split of a GLUE task, or evenly
  spaced quantiles of a log-normal law.
  """
  count, longest = settings['length_rows'], settings['length_buckets'][-1]
  if settings['lengths_from']:
    directory = pathlib.Path(settings['lengths_from']).expanduser()
    source: Any = builder.build_source(
      dict(
        name='glue', task=settings['task'], directory=str(directory),
        tokenizer=settings['vocabulary'], max_length=longest,
      ),
      'validation',
    )  # fmt: skip
    picked = np.linspace(0, len(source) - 1, min(count, len(source)))
    lengths = source.records(picked.astype(int))['length']
  else:
    places = (np.arange(count) + 0.5) / count
    quantiles = scipy.stats.lognorm(LENGTH_SPREAD, scale=MEDIAN_LENGTH)
    lengths = np.clip(np.rint(quantiles.ppf(places)), 3, longest).astype(int)
  return tuple(map(int, np.random.default_rng(0).permutation(lengths)))
