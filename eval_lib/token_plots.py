"""Which tokens of a sentence survive which pruning, and where it exits.

One block a sentence, to be read from the top: its tokens, after each pruning
those that are left (dark) and those that it removed (faded and struck), and
between them what each head that was reached says. As PNG and PDF; as a
page: `eval_lib.token_page`. Everything is drawn from arrays.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from eval_lib import figures
from eval_lib.figures import COLOURS, GREY
from eval_lib.token_texts import layout, pieces

KEPT, REMOVED, GONE = 'kept', 'removed', 'gone'
INK = {KEPT: '#1A1A1A', REMOVED: COLOURS[1], GONE: '#B8B8B8'}

# Heads of more classes show the most probable ones.
MAX_CLASSES = 3
_WIDTH, _MARGIN = 118, 17  # characters: of a line of tokens, before it
_FONT, _LINE = 8.0, 13.0  # points: size of the letters, height of a line
_CELL, _BAR = 38, 16  # characters: a class of a head, its bar


@dataclasses.dataclass(frozen=True)
class Sentence:
  """A sentence on its way through the layers.

  Attributes:
    names: its tokens; '##ing' continues the token before it.
    pruned: places of the tokens that are left after each pruning that was
      reached, ascending, by layer.
    heads: probabilities `[C]` of each head that was reached, by layer; of a
      regression the predicted number `[1]`. It exits at the last one.
    class_names: of the probabilities; () for a regression.
    truth: the right answer, or '' if it is not known.
  """

  names: Sequence[str]
  pruned: Mapping[int, Int[np.ndarray, ' K']]
  heads: Mapping[int, Float[np.ndarray, ' C']]
  class_names: Sequence[str]
  truth: str = ''

  def __post_init__(self):
    for layer, places in self.pruned.items():
      inside = not len(places) or 0 <= places.min() <= places.max()
      if not inside or places.max(initial=-1) >= len(self.names):
        raise ValueError(
          f'pruned[{layer}]: expected places in [0, {len(self.names)}), got '
          f'{places}'
        )
    for layer, values in self.heads.items():
      if len(values) != max(len(self.class_names), 1):
        raise ValueError(
          f'heads[{layer}]: expected {max(len(self.class_names), 1)} numbers, '
          f'got {len(values)}'
        )
    if not self.heads:
      raise ValueError('heads: expected at least the one it exits at, got none')

  @property
  def exit_layer(self) -> int:
    """The layer of the last head that was reached."""
    return max(self.heads)

  @property
  def answer(self) -> str:
    """What that head says."""
    values = self.heads[self.exit_layer]
    if not self.class_names:
      return f'{values[0]:.2f}'
    return self.class_names[int(values.argmax())]

  @property
  def is_wrong(self) -> bool:
    """Whether the answer is known to be wrong."""
    known = bool(self.truth and self.class_names)
    return known and self.truth != self.answer


class Row(NamedTuple):
  """Tokens, with what has become of each, or a head's probabilities."""

  label: str
  states: tuple[str, ...] = ()
  head: int | None = None


def rows_of(sentence: Sentence) -> list[Row]:
  """The rows of a sentence from the top; at one layer the head comes first."""
  everything = range(len(sentence.names))
  rows = [(0, 0, Row('tokens', tuple(KEPT for _ in everything)))]
  before = set(everything)
  for layer in sorted(sentence.pruned):
    left = set(sentence.pruned[layer].tolist())
    states = tuple(
      KEPT if place in left else REMOVED if place in before else GONE
      for place in everything
    )
    rows.append((layer, 1, Row(f'after layer {layer}', states)))
    before = left
  for layer in sentence.heads:
    rows.append((layer, 0, Row(f'head {layer}', head=layer)))
  return [row for *_, row in sorted(rows, key=lambda row: row[:2])]


def headline(sentence: Sentence) -> str:
  """Answer and exit, and the right answer where that was wrong."""
  text = f'{sentence.answer}, exit at layer {sentence.exit_layer}'
  if sentence.is_wrong or (sentence.truth and not sentence.class_names):
    text += f' (right: {sentence.truth})'
  return text


def classes_of(sentence: Sentence, layer: int) -> list[tuple[str, float]]:
  """The classes of a head to show, with their probabilities."""
  values = sentence.heads[layer]
  shown = range(len(values))
  if len(values) > MAX_CLASSES:
    shown = np.argsort(-values, kind='stable')[:MAX_CLASSES].tolist()
  return [
    (sentence.class_names[place], float(values[place])) for place in shown
  ]


def plot_tokens(
  path: str | os.PathLike[str],
  sentences: Sequence[Sentence],
  *,
  title: str = 'Tokens that survive',
) -> pathlib.Path:
  """Draws sentences below each other.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    sentences: at least one.
    title: of the picture.

  Returns:
    The path of the PNG.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    ValueError: there is nothing to draw.
  """
  check(path, sentences)
  canvas = _Canvas(title)
  for sentence in sentences:
    canvas.sentence(sentence)
  return figures.save_text(
    path, canvas.draw, _MARGIN + _WIDTH + 1, canvas.line + 0.5,
    letter=_FONT, line=_LINE,
  )  # fmt: skip


class _Canvas:
  """Collects texts, strokes and bars in characters and lines.

  Attributes:
    line: the next free line.
  """

  def __init__(self, title: str):
    self._texts: list[tuple[float, float, str, str, str]] = []
    self._strokes: list[tuple[float, float, float, str]] = []
    self._bars: list[tuple[float, float, float, str]] = []
    self._text(1, 1.0, title, '#1A1A1A', 'bold')
    self.line = 2.4

  def sentence(self, sentence: Sentence) -> None:
    """Adds a block."""
    colour = COLOURS[1] if sentence.is_wrong else COLOURS[0]
    self._text(1, self.line, headline(sentence), colour, 'bold')
    self.line += 1.3
    texts = pieces(sentence.names)
    places, lines = layout(texts, _WIDTH)
    for row in rows_of(sentence):
      self._text(1, self.line, row.label, GREY)
      if row.head is None:
        self._tokens(texts, row.states, places)
        self.line += lines + 0.2
      else:
        self._head(sentence, row.head)
        self.line += 1
    self.line += 1

  def _tokens(self, texts, states, places) -> None:
    for (text, _), state, (line, column) in zip(
      texts, states, places, strict=True
    ):
      x, y = _MARGIN + column, self.line + line
      self._text(x, y, text, INK[state])
      if state != KEPT:
        self._strokes.append((x, x + len(text), y, INK[state]))

  def _head(self, sentence: Sentence, layer: int) -> None:
    if not sentence.class_names:
      value = f'{sentence.heads[layer][0]:.2f}'
      self._text(_MARGIN, self.line, value, '#1A1A1A')
      return
    is_exit = layer == sentence.exit_layer
    for number, (name, share) in enumerate(classes_of(sentence, layer)):
      x = _MARGIN + number * _CELL
      room = _CELL - _BAR - 8
      name = name if len(name) <= room else name[: room - 1] + '…'
      colour = COLOURS[0] if is_exit else GREY
      self._text(x, self.line, name, colour, 'bold' if is_exit else 'normal')
      self._bars.append((x + room + 1, self.line, _BAR * share, colour))
      self._text(
        x + room + 2 + _BAR * share, self.line, f'{100 * share:.0f} %', colour
      )

  def _text(self, x, y, text, colour, weight='normal') -> None:
    self._texts.append((x, y, text, colour, weight))

  def draw(self, axes: Any) -> None:
    """Draws what was collected."""
    for x, y, width, colour in self._bars:
      axes.barh(y, width, height=0.55, left=x, color=colour, alpha=0.75)
    for start, stop, y, colour in self._strokes:
      axes.plot([start, stop], [y, y], color=colour, linewidth=0.8)
    for x, y, text, colour, weight in self._texts:
      axes.text(
        x, y, text, color=colour, weight=weight, fontsize=_FONT,
        family='monospace', va='center_baseline', parse_math=False,
        alpha=0.75 if colour == INK[REMOVED] and weight == 'normal' else 1,
      )  # fmt: skip


def check(path: str | os.PathLike[str], sentences: Sequence[Sentence]) -> None:
  """Raises ValueError unless there is something to draw."""
  if not len(sentences):
    raise ValueError(f'{path}: expected at least one sentence, got none')
