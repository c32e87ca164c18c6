"""The analysis of an AdaTape as tables and pictures (Figures 4 and 10).

The files are listed in `benchmarks.analyze`; summary.csv has the sequence
lengths of Table 2. In pictures of symbols '-' is -1.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from adatape.model import TapeClassifier
from benchmarks import pictures
from core.errors import ConfigError
from core.fields import ConfigLike
from dataset_lib import builder
from dataset_lib.source import DatasetInfo
from dataset_lib.synthetic import NAMES
from eval_lib import plots, predictions
from eval_lib.plots import Line, Panel
from eval_lib.report import Table
from model_lib import flops

MODEL = TapeClassifier
SPLIT = ''  # that of the run's evaluation
BATCH = 64
READ_BY = 'rows that read it (%)'


@dataclasses.dataclass(frozen=True)
class Tapes:
  index: Int[np.ndarray, ' N']  # of each row in its split
  # Class of each row, or its classes padded with -1.
  label: Int[np.ndarray, 'N ...']
  correct: Bool[np.ndarray, ' N']  # True if the answer is a class of the row
  length: Int[np.ndarray, ' N']  # tape tokens of each row
  picks: Int[np.ndarray, 'N T K']  # bank tokens by tape token, -1 beyond it
  input_tokens: int  # of every row, with [CLS] if there is one
  bank_size: int  # tokens of the bank, C
  max_steps: int  # most tape tokens of a row, T

  @property
  def counts(self) -> Int[np.ndarray, ' C']:
    """The number of rows that read each bank token; a row reads it once."""
    read = self.picks[self.picks >= 0]
    return np.bincount(read, minlength=self.bank_size)


def read(task: Any, variables: Any, data: builder.Dataset) -> Tapes:
  """Reads and classifies every row of `data` without noise."""
  model, sizes = task.model, dict[str, Any]()
  if model.reading() is None:
    expected = 'a model with a bank; without one there is nothing to analyse'
    raise ConfigError('model.bank', model.bank, expected)

  @jax.jit
  def run(variables: Any, batch: Any) -> dict[str, Any]:
    tree = {'params': variables['params'], **variables['model_state']}
    x, tape, size = model.apply(tree, task.inputs(batch), method='read')
    sizes.update(input_tokens=x.shape[1], bank_size=size)
    logits, _ = model.apply(tree, x, tape.tokens, tape.mask, method='classify')
    picks = jnp.where(tape.mask[..., None] > 0, tape.indices, -1)
    return {'logits': logits, 'length': tape.length, 'picks': picks}

  rows: Any = predictions.collect(data, variables, run)
  correct = predictions.correct(rows.pop('logits'), rows['label'])
  return Tapes(correct=correct, max_steps=model.max_steps, **rows, **sizes)


def most_read(counts: Int[np.ndarray, ' C'], share: float) -> tuple[int, ...]:
  """Returns the most frequent bank tokens, ascending, at least one."""
  kept = max(1, round(share * len(counts)))
  order = np.argsort(-counts, kind='stable')
  return tuple(np.sort(order[:kept]).tolist())


def spread_rows(
  config: ConfigLike, split: str, rows: int, run: DatasetInfo | None = None
) -> builder.Dataset:
  """Opens at most `rows` records of a split; see `builder.spread`."""
  return builder.spread(builder.build_source(config, split, run), rows, BATCH)


def chosen_inputs(source: Any, records: Int[np.ndarray, ' N']) -> list[Any]:
  """Returns inputs of the model, one for each record, in this order."""
  data = builder.chosen(source, records, BATCH)
  return [
    row
    for batch in data.batches()
    for row in batch[data.info.input_key][batch['mask'] > 0]
  ]


def bank_grid(model: Any, input_shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns the shape of a bank of the input, (0, 0) of a learned one."""
  if len(input_shape) == 1:
    return 1, input_shape[0]
  if model.bank != 'input':
    return 0, 0
  across = input_shape[1] // model.bank_patch_size
  total = flops.num_patches(input_shape, model.bank_patch_size)
  return total // across, across


def write(
  flags: Any, config: Any, split: str, loaded: Any, out: pathlib.Path
) -> list[Table]:
  """Draws the tapes of a run; returns the tables."""
  task, names = loaded.task, loaded.task.label_names
  data = spread_rows(config.dataset, split, flags.rows, task.info)
  tapes = read(task, loaded.variables, data)
  grid = bank_grid(task.model, task.info.input_shape)
  rows, shown = examples(tapes, data.source, flags.images, names)
  with plots.if_installed():
    draw(out, tapes, grid, shown)
  return [*tables(tapes, grid, names), Table('examples', '', rows)]


def tables(tapes: Tapes, grid: Any, names: Sequence[str]) -> list[Table]:
  """Returns summary, lengths, classes and bank, with places on a `grid`."""
  both = {'tape tokens': 0, 'sequence length': tapes.input_tokens}
  summary = [
    {'of a row': name, **_moments(tapes.length + more)}
    | {'limit': tapes.max_steps + more}
    for name, more in both.items()
  ]
  lengths = [
    {'tape length': length, **_part(tapes, tapes.length == length)}
    for length in np.unique(tapes.length).tolist()
  ]
  classes: list[dict[str, Any]] = []
  labels = tapes.label.reshape(len(tapes.label), -1)
  for label in np.unique(labels[labels >= 0]).tolist():
    here = (labels == label).any(1)
    numbers = _part(tapes, here) | _moments(tapes.length[here])
    classes.append({'class': names[label], **numbers})
  classes.sort(key=lambda row: row['mean'])
  counts, bank = tapes.counts, []
  order = np.argsort(-counts, kind='stable').tolist()
  for rank, token in enumerate(order, 1):
    place = divmod(token, grid[1]) if grid[1] else ()
    row = {'rank': rank, 'token': token, **dict(zip('yx', place, strict=False))}
    share = round(int(counts[token]) / len(tapes.label), 6)
    bank.append(row | {'rows': int(counts[token]), 'share': share})
  tenth = -(-len(counts) // 10)
  note = (
    f'{(counts > 0).sum()} of {len(counts)} bank tokens are read; the most '
    f'frequent {tenth} take {counts[order[:tenth]].sum() / counts.sum():.0%} '
    f'of the picks; a sequence is {tapes.input_tokens} input tokens and a tape'
  )
  title = f'{len(tapes.label)} rows, accuracy {tapes.correct.mean():.2%}'
  return [
    Table('summary', title, summary, note),
    Table('lengths', 'Tape lengths', lengths),
    Table('classes', '', classes),
    Table('bank', '', bank),
  ]


def _moments(values: Int[np.ndarray, ' N']) -> dict[str, Any]:
  return {
    'mean': round(float(values.mean()), 4),
    'minimum': int(values.min()),
    'maximum': int(values.max()),
    'variance': round(float(values.var()), 4),
  }


def _part(tapes: Tapes, here: Bool[np.ndarray, ' N']) -> dict[str, Any]:
  return {
    'rows': int(here.sum()),
    'share': round(float(here.mean()), 6),
    'accuracy': round(float(tapes.correct[here].mean()), 6),
  }


def examples(tapes: Tapes, source: Any, count: int, names: Any) -> Any:
  """Returns rows, and pictures by kind, of the shortest and longest tapes."""
  order = np.argsort(tapes.length, kind='stable')
  count = min(count, max(1, len(order) // 2))
  groups = {'shortest': order[:count], 'longest': order[::-1][:count]}
  rows: list[dict[str, Any]] = []
  shown: dict[str, list[Any]] = {}
  for kind, places in groups.items():
    inputs = chosen_inputs(source, tapes.index[places])
    for place, value in zip(places, inputs, strict=True):
      name = predictions.label_text(tapes.label[place], names)
      length = int(tapes.length[place])
      rows.append({
        'tape': kind, 'index': int(tapes.index[place]), 'class': name,
        'tape length': length, 'correct': bool(tapes.correct[place]),
      })  # fmt: skip
      example = _lines(value), f'{name[:16]}\ntape {length}'
      shown.setdefault(f'{kind} tapes', []).append(example)
  return rows, shown


def _lines(value: Any) -> Any:
  """Returns an image as it is, symbols as lines of text."""
  if value.ndim > 1:
    return value
  across = max(4, math.ceil(len(value) ** 0.5))
  signs = ['-' if NAMES[symbol] == '-1' else NAMES[symbol] for symbol in value]
  starts = range(0, len(signs), across)
  return '\n'.join(' '.join(signs[n : n + across]) for n in starts)


def draw(out: pathlib.Path, tapes: Tapes, grid: Any, shown: Any) -> None:
  """Draws counts, lengths and examples, with patches of an input as tape."""
  percent = 100 * tapes.counts / len(tapes.label)
  ranks, uniform = np.arange(1, len(percent) + 1), np.full(2, percent.mean())
  ordered, dashed = np.sort(percent)[::-1], pictures.DASHED
  # An empty place at both ends.
  places = np.arange(tapes.length.min() - 1, tapes.length.max() + 2)
  lengths = (tapes.length == places[:, None]).mean(1)
  mean, bars = tapes.length.mean(), {'marker': '', 'drawstyle': 'steps-mid'}
  panels = {
    'distribution': Panel(
      'Selection distribution', READ_BY, 'bank token, by frequency',
      [Line('by frequency', ranks, ordered, 0, style={'marker': ''}),
       Line('if all were equal', ranks[[0, -1]], uniform, 1, style=dashed)],
    ),
    'lengths': Panel(
      f'Tape length, mean {mean:.2f}', 'rows (%)', 'tape tokens of a row',
      [Line('', places, 100 * lengths, 0, style=bars)],
    ),
  }  # fmt: skip
  for name, panel in panels.items():
    panel = panel._replace(y_limits=(0, None), ticks=5)
    plots.draw_panels(out / name, [panel], (3.9, 2.9))
  pictures.plot_examples(out / 'examples', shown)
  if not grid[0]:
    print(
      "no tape.png: bank='learnable' reads trained vectors, not patches; a run "
      "with model.bank='input' reads patches"
    )
    return
  cells, title = percent.reshape(grid), 'Input read as tape'
  pictures.plot_heatmap(out / 'heatmap', cells, READ_BY, title)
  if grid[0] > 1:  # of images: the shortest and the longest tape
    ends = np.argsort(tapes.length, kind='stable')[[0, -1]]
    drawn = [
      (image, tapes.picks[row], title.replace('\n', ', ') + ' tokens')
      for row, ((image, title), *_) in zip(ends, shown.values(), strict=True)
    ]
    pictures.plot_tapes(out / 'tape', drawn, grid)
