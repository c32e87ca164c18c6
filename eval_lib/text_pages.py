"""Tokens as a page: one HTML file, and the same as PNG and PDF.

A page is a list of blocks, each with a title and rows of pieces of text:
`pruning_block` shows which tokens are pruned and the answer of each head,
`depths_block` the iterations of each token.
"""

import html
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from eval_lib.plots import COLOURS, GREY, check_data, save

WIDTH = 118  # letters of a line of tokens
MAX_CLASSES = 3  # of a head; the most probable ones
_BAR = 12  # letters of a full bar
_LETTER, _LINE = 8.0, 14.0  # points
_ADVANCE = 0.602  # width of a monospaced letter over its size
_MARK = '▁'  # SentencePiece's space
_SPECIAL = re.compile(r'\[.+\]|<.+>')
# From white to the sixth colour, light enough to read on.
_LIGHT, _DARK = np.array([1.0, 1.0, 1.0]), np.array([0.34, 0.66, 0.88])

# Colour, weight and whether struck out, by the name of a look.
LOOKS = {
  'title': ('#1A1A1A', 'bold', False),
  'head': (COLOURS[0], 'bold', False),
  'wrong': (COLOURS[1], 'bold', False),
  'name': (GREY, 'normal', False),
  'kept': ('#1A1A1A', 'normal', False),
  'removed': (COLOURS[1], 'normal', True),
  'gone': ('#B8B8B8', 'normal', True),
}
_STYLE = """\
body { font: 15px/1.55 system-ui, sans-serif; color: #1a1a1a;
  background: #fff; max-width: 66em; margin: 2em auto; padding: 0 1em }
h2 { font-size: 1em; margin: 2em 0 .4em }
.row { display: flex; gap: 1em; align-items: baseline;
  font: 13px/1.6 monospace; white-space: pre-wrap }
.row > .name { flex: 0 0 15ch }
.row > .name:empty { display: none }
.fill { padding: .1em .15em; border-radius: .2em; line-height: 1.9 }
""" + '\n'.join(
  f'.{name} {{ color: {colour}; font-weight: {weight}'
  f'{"; text-decoration: line-through" if struck else ""} }}'
  for name, (colour, weight, struck) in LOOKS.items()
)


class Piece(NamedTuple):
  """A piece of text.

  Attributes:
    text: what is written.
    look: a name in `LOOKS`.
    is_glued: continues the piece before it without a space.
    fill: colour of the background, '' for none.
    hint: shown by the HTML page when the piece is pointed at.
  """

  text: str
  look: str = 'kept'
  is_glued: bool = False
  fill: str = ''
  hint: str = ''


class Block(NamedTuple):
  """A title, its look, and rows of pieces by the name of the row."""

  title: str
  rows: Sequence[tuple[str, Sequence[Piece]]]
  look: str = 'title'


def pruning_block(
  names: Sequence[str],
  pruned: Mapping[int, Int[np.ndarray, ' K']],
  heads: Mapping[int, Float[np.ndarray, ' C']],
  class_names: Sequence[str],
  truth: str = '',
) -> Block:
  """Returns the tokens of a row after each pruning, and the heads between.

  Args:
    names: of the tokens, see `pieces`.
    pruned: places of the tokens that are left after each pruning that was
      reached, ascending, by layer.
    heads: probabilities `[C]` of each head that was reached, by layer; of a
      regression the predicted number `[1]`. The row exits at the last one.
    class_names: of the probabilities; () for a regression.
    truth: the right answer, or '' if it is not known.
  """
  exit_layer = max(heads)
  last = heads[exit_layer]
  answer = class_names[int(last.argmax())] if class_names else f'{last[0]:.2f}'
  is_wrong = bool(truth and class_names) and truth != answer
  title = f'{answer}, exit at layer {exit_layer}'
  if is_wrong or (truth and not class_names):
    title += f' (right: {truth})'
  texts = pieces(names)
  before = set(range(len(texts)))
  rows = [(0, 0, 'tokens', texts)]
  for layer in sorted(pruned):
    left = set(pruned[layer].tolist())
    looks = [
      'kept' if n in left else 'removed' if n in before else 'gone'
      for n in range(len(texts))
    ]
    row = [
      piece._replace(look=look)
      for piece, look in zip(texts, looks, strict=True)
    ]
    rows.append((layer, 1, f'after layer {layer}', row))
    before = left
  for layer, values in heads.items():
    look = 'head' if layer == exit_layer else 'name'
    rows.append((layer, 0, f'head {layer}', _bars(values, class_names, look)))
  # At one layer the head comes before the pruning.
  ordered = sorted(rows, key=lambda row: row[:2])
  look = 'wrong' if is_wrong else 'head'
  return Block(title, [row[2:] for row in ordered], look)


def _bars(
  values: Float[np.ndarray, ' C'], class_names: Sequence[str], look: str
) -> list[Piece]:
  """Returns the classes of a head with bars, or the number of a regression."""
  if not class_names:
    return [Piece(f'{values[0]:.2f}')]
  shown = range(len(values))
  if len(values) > MAX_CLASSES:
    shown = np.argsort(-values, kind='stable')[:MAX_CLASSES].tolist()
  room = max(map(len, class_names))
  result = []
  for n in shown:
    bar = '█' * round(_BAR * float(values[n]))
    text = f'{class_names[n]:<{room}} {100 * values[n]:5.1f} % '
    result.append(Piece(f'{text}{bar:<{_BAR}} ', look))
  return result


def depths_block(
  names: Sequence[str], iterations: Sequence[int], most: int, title: str
) -> Block:
  """Returns tokens on the colours of their iterations.

  Args:
    names: of the tokens, see `pieces`.
    iterations: of each token.
    most: iterations of the darkest colour.
    title: a line about the row.
  """
  tokens = zip(pieces(names), iterations, strict=True)
  row = [_filled(token, depth, most) for token, depth in tokens]
  return Block(title, [('', row)])


def scale(most: int) -> Block:
  """Returns the legend of the colours of `depths_block`."""
  row = [_filled(Piece(str(n)), n, most) for n in range(1, most + 1)]
  return Block('', [('', [*row, Piece('iterations')])])


def _filled(piece: Piece, depth: int, most: int) -> Piece:
  hint = f'{depth} of {most} iterations'
  return piece._replace(fill=colour_of(depth, most), hint=hint)


def colour_of(depth: int, most: int) -> str:
  """Returns the colour of `depth` iterations, '#rrggbb'; darker for more."""
  share = min(max(depth / max(most, 1), 0.0), 1.0)
  red, green, blue = 255 * ((1 - share) * _LIGHT + share * _DARK)
  return f'#{round(red):02x}{round(green):02x}{round(blue):02x}'


def pieces(names: Sequence[str]) -> list[Piece]:
  """Returns a piece for each token of a row.

  In WordPiece a token that continues a word begins with '##'; in SentencePiece
  one that begins a word has a '▁'.

  Args:
    names: of the tokens of a row, which tell the two apart.
  """
  result = []
  is_sentencepiece = any(name.startswith(_MARK) for name in names)
  for name in names:
    if is_sentencepiece:
      glued = not (name.startswith(_MARK) or _SPECIAL.fullmatch(name))
      text = ' ' if name == _MARK else name.removeprefix(_MARK)
    else:
      glued = name.startswith('##') and len(name) > 2
      text = name[2:] if glued else name
    result.append(Piece(text, is_glued=glued))
  return result


def layout(
  row: Sequence[Piece], width: int
) -> tuple[list[tuple[int, int]], int]:
  """Returns (line and column of each piece, number of lines).

  Args:
    row: of a block.
    width: letters of a line; a longer piece has a line of its own.
  """
  places, line, column = [], 0, 0
  for piece in row:
    size = len(piece.text)
    if column and not piece.is_glued:
      column += 1
    if column and column + size > width:
      line, column = line + 1, 0
    places.append((line, column))
    column += size
  return places, line + 1


def write_page(
  path: str | os.PathLike[str], blocks: Sequence[Block], *, title: str
) -> pathlib.Path:
  """Writes blocks as one HTML page without any other file.

  Args:
    path: of the page; its suffix is replaced by .html.
    blocks: at least one; the texts are escaped.
    title: of the page.

  Returns:
    Its path.

  Raises:
    ValueError: there is nothing to write.
  """
  check_data(path, blocks)
  lines = []
  for block in blocks:
    if block.title:
      lines.append(f'<h2 class="{block.look}">{html.escape(block.title)}</h2>')
    for name, row in block.rows:
      spans = ''.join(
        ('' if piece.is_glued or not n else ' ') + _span(piece)
        for n, piece in enumerate(row)
      )
      lines.append(
        f'<div class="row"><span class="name">{name}</span>'
        f'<span>{spans}</span></div>'
      )
  name, body = html.escape(title), '\n'.join(lines)
  path = pathlib.Path(path).with_suffix('.html')
  path.write_text(
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    f'<title>{name}</title>\n<style>\n{_STYLE}\n</style>\n'
    f'<h1>{name}</h1>\n{body}\n</html>\n',
    encoding='utf-8',
    # A lone surrogate in a token cannot be written.
    errors='xmlcharrefreplace',
  )
  return path


def _span(piece: Piece) -> str:
  text = html.escape(piece.text)
  if piece.fill:
    return (
      f'<span class="fill" style="background:{piece.fill}" '
      f'title="{html.escape(piece.hint)}">{text}</span>'
    )
  return f'<span class="{piece.look}">{text}</span>'


def plot_page(
  path: str | os.PathLike[str], blocks: Sequence[Block], *, title: str
) -> pathlib.Path:
  """Draws blocks below each other in monospaced text.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    blocks: at least one.
    title: of the picture.

  Returns:
    The path of the PNG.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    ValueError: there is nothing to draw.
  """
  check_data(path, blocks)
  margin = 3.0 + max(len(name) for block in blocks for name, _ in block.rows)
  texts, line = [(1.0, 1.0, Piece(title, 'title'))], 2.4
  for block in blocks:
    if block.title:
      texts.append((1.0, line, Piece(block.title, block.look)))
      line += 1.3
    for name, row in block.rows:
      texts.append((1.0, line, Piece(name, 'name')))
      places, lines = layout(row, WIDTH)
      texts += [
        (margin + column, line + below, piece)
        for piece, (below, column) in zip(row, places, strict=True)
      ]
      line += lines + 0.2
    line += 1

  def draw(figure):
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, columns)
    axes.set_ylim(line - 0.5, 0)
    for x, y, piece in texts:
      _draw_piece(axes, x, y, piece)

  columns = margin + WIDTH + 1
  size = columns * _ADVANCE * _LETTER / 72, (line - 0.5) * _LINE / 72
  return save(path, draw, size, layout=None)


def _draw_piece(axes: Any, x: float, y: float, piece: Piece) -> None:
  colour, weight, is_struck = LOOKS[piece.look]
  text = piece.text
  if piece.fill:
    axes.barh(y, len(text) + 0.5, 0.8, left=x - 0.25, color=piece.fill)
  if is_struck:
    axes.plot([x, x + len(text)], [y, y], color=colour, linewidth=0.8)
  axes.text(
    x, y, text.rstrip(), color=colour, weight=weight, fontsize=_LETTER,
    family='monospace', va='center_baseline', parse_math=False,
    alpha=0.75 if piece.look == 'removed' else 1,
  )  # fmt: skip
