"""Tokens as a page: one HTML file, and the same as PNG and PDF.

A page is a list of blocks, each with a title and rows of pieces of text.
"""

import html
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from eval_lib.plots import COLOURS, GREY, Path, check_data, figure

WIDTH = 118  # letters of a line of tokens
MAX_CLASSES = 3  # of a head; the most probable ones
_BAR = 12  # letters of a full bar
_LETTER, _LINE = 8.0, 14.0  # points
_ADVANCE = 0.602  # width of a monospaced letter over its size
_MARK = '▁'  # SentencePiece's space
_SPECIAL = re.compile(r'\[.+\]|<.+>')
# Blue at most iterations, light enough to read on; white at none.
_DARK = np.array([0.34, 0.66, 0.88])

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
body { color: #1a1a1a; background: #fff; margin: 2em }
pre { font: 13px/1.7 monospace }
.fill { border-radius: .2em; padding: .15em 0 }
""" + '\n'.join(
  f'.{name} {{ color: {colour}; font-weight: {weight}'
  f'{"; text-decoration: line-through" if struck else ""} }}'
  for name, (colour, weight, struck) in LOOKS.items()
)

# Columns and pieces of a line of a page.
_Placed = Sequence[tuple[int, 'Piece']]


class Piece(NamedTuple):
  """A piece of text with its look."""

  text: str
  look: str = 'kept'  # a name in `LOOKS`
  is_glued: bool = False  # continues the piece before it without a space
  fill: str = ''  # colour of the background
  hint: str = ''  # shown by the HTML page when the piece is pointed at


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
  rows, before = [('tokens', texts)], set(range(len(texts)))
  for layer in sorted({*heads, *pruned}):
    # At one layer the head comes before the pruning.
    if layer in heads:
      look = 'head' if layer == exit_layer else 'name'
      rows.append((f'head {layer}', _bars(heads[layer], class_names, look)))
    if layer in pruned:
      left = set(pruned[layer].tolist())
      row = [
        piece._replace(look='removed' if n in before else 'gone')
        if n not in left
        else piece
        for n, piece in enumerate(texts)
      ]
      rows.append((f'after layer {layer}', row))
      before = left
  return Block(title, rows, 'wrong' if is_wrong else 'head')


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
  """Returns tokens on the colours of their iterations, darkest at `most`."""
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
  channels = 255 * (1 - share + share * _DARK)
  return '#' + ''.join(f'{round(channel):02x}' for channel in channels)


def pieces(names: Sequence[str]) -> list[Piece]:
  """Returns a piece for each token of a row.

  In WordPiece a token that continues a word begins with '##'; in SentencePiece
  one that begins a word has a '▁', which tells the two apart.
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


def layout(blocks: Sequence[Block], title: str) -> list[_Placed]:
  """Returns the lines of a page; rows break where a piece does not fit."""
  margin = 3 + max(
    (len(name) for block in blocks for name, _ in block.rows), default=0
  )
  lines: list[_Placed] = [[(0, Piece(title, 'title'))], []]
  for block in blocks:
    if block.title:
      lines.append([(0, Piece(block.title, block.look))])
    for name, row in block.rows:
      line, column = [(0, Piece(name, 'name'))], 0
      for piece in row:
        column += bool(column and not piece.is_glued)
        if column and column + len(piece.text) > WIDTH:
          lines.append(line)
          line, column = [], 0
        line.append((margin + column, piece))
        column += len(piece.text)
      lines.append(line)
    lines.append([])
  return lines


def write_page(path: Path, blocks: Sequence[Block], *, title: str) -> None:
  """Writes blocks as one HTML page; the suffix of `path` becomes .html.

  Raises:
    ValueError: there is no block.
  """
  check_data(path, blocks)
  body = '\n'.join(map(_html, layout(blocks, title)))
  pathlib.Path(path).with_suffix('.html').write_text(
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    f'<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n'
    f'<pre>\n{body}\n</pre>\n</html>\n',
    encoding='utf-8',
    # A lone surrogate in a token cannot be written.
    errors='xmlcharrefreplace',
  )


def _html(line: _Placed) -> str:
  text, end = '', 0
  for column, piece in line:
    look = f'class="{piece.look}"'
    if piece.fill:
      hint = html.escape(piece.hint)
      look = f'class="fill" style="background:{piece.fill}" title="{hint}"'
    text += ' ' * (column - end)
    text += f'<span {look}>{html.escape(piece.text)}</span>'
    end = column + len(piece.text)
  return text


def plot_page(path: Path, blocks: Sequence[Block], *, title: str) -> None:
  """Draws blocks as `write_page` does; see `plots.figure`."""
  lines = layout(blocks, title)
  columns = 2 + max(
    column + len(piece.text) for line in lines for column, piece in line
  )
  size = columns * _ADVANCE * _LETTER / 72, (len(lines) + 1) * _LINE / 72
  with figure(path, blocks, size, layout=None) as drawn:
    axes = drawn.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-1, columns - 1)
    axes.set_ylim(len(lines), -1)
    for y, line in enumerate(lines):
      for x, piece in line:
        _draw_piece(axes, x, y, piece)


def _draw_piece(axes: Any, x: int, y: int, piece: Piece) -> None:
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
