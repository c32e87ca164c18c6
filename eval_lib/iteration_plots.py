"""Pictures of adaptive depth: states that converge, tokens by iterations.

As PNG and PDF, and sentences also as a page; everything is drawn from arrays.
"""

import dataclasses
import html
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from eval_lib import figures, html_page
from eval_lib.token_texts import layout, pieces

_WIDTH, _MARGIN = 110, 2  # letters: of a line of tokens, on both sides
_LETTER, _LINE = 8.5, 17.0  # points: size of the letters, height of a line
# From white to the sixth of Okabe and Ito's colours, light enough to read on.
_LIGHT, _DARK = np.array([1.0, 1.0, 1.0]), np.array([0.34, 0.66, 0.88])
_STYLE = """\
h2 { font-size: 1em; color: #5a5a5a; margin: 1.5em 0 0 }
p { line-height: 1.9 }
span { padding: .1em .15em; border-radius: .2em }
"""


@dataclasses.dataclass(frozen=True)
class Depths:
  """A sentence with the iterations of its tokens.

  Attributes:
    names: its tokens, see `token_texts.pieces`.
    iterations: of each token.
    title: a line about it, such as the answer.
  """

  names: Sequence[str]
  iterations: Sequence[int]
  title: str = ''

  def __post_init__(self):
    if len(self.names) != len(self.iterations) or not self.names:
      raise ValueError(
        f'iterations: expected one for each of the {len(self.names)} tokens, '
        f'at least one, got {len(self.iterations)}'
      )


def plot_curves(
  path: str | os.PathLike[str],
  curves: Mapping[str, Mapping[str, Float[np.ndarray, ' N']]],
  title: str,
) -> pathlib.Path:
  """Draws curves over the iterations, in panels one above the other.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    curves: by the name of a panel, which its axis is called by, and the name of
      a kind of token; the same kinds in each. NaN is a gap.
    title: of the picture.

  Returns:
    The path of the PNG.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    ValueError: there is no curve.
  """
  if not any(curves.values()):
    raise ValueError('curves: expected at least one, got none')

  def draw(figure):
    panels = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
    for axes, (label, panel) in zip(panels, curves.items(), strict=True):
      for number, (name, values) in enumerate(panel.items()):
        colour, marker = figures.look(number)
        places = np.arange(1, len(values) + 1)
        axes.plot(
          places, values, color=colour, marker=marker, markersize=4, label=name
        )
      axes.set_ylabel(label)
    panels[-1].set_xlabel('iteration')
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    figures.head(panels[0], title)

  return figures.save(path, draw, (6.4, 1.6 + 2.4 * len(curves)))


def plot_depths(
  path: str | os.PathLike[str],
  sentences: Sequence[Depths],
  most: int,
  *,
  title: str = 'Iterations of each token',
) -> pathlib.Path:
  """Draws sentences, each token on the colour of its iterations.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    sentences: at least one.
    most: iterations of the darkest colour.
    title: of the picture.

  Returns:
    The path of the PNG.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    ValueError: there is nothing to draw.
  """
  _check(sentences)
  words, lines = _laid_out(sentences, most, title)

  def draw(axes):
    for word in words:
      if word.depth:
        axes.barh(
          word.line, len(word.text) + 0.5, 0.8, left=word.column - 0.25,
          color=colour_of(word.depth, most),
        )  # fmt: skip
      axes.text(
        word.column, word.line, word.text, fontsize=_LETTER,
        family='monospace', parse_math=False, va='center_baseline',
        weight='bold' if word.is_title else 'normal',
      )  # fmt: skip

  return figures.save_text(
    path, draw, _WIDTH + 2 * _MARGIN, lines, letter=_LETTER, line=_LINE
  )


def write_depths(
  path: str | os.PathLike[str],
  sentences: Sequence[Depths],
  most: int,
  *,
  title: str = 'Iterations of each token',
) -> pathlib.Path:
  """Writes the same as one HTML page, with the numbers to be pointed at.

  Args:
    path: of the page; its suffix is replaced by .html.
    sentences: at least one; whatever is in them is text, never markup.
    most: iterations of the darkest colour.
    title: of the page.

  Returns:
    Its path.

  Raises:
    ValueError: there is nothing to write.
  """
  _check(sentences)
  scale = ' '.join(_span(str(n), n, most) for n in range(1, most + 1))
  blocks = '\n'.join(
    f'<h2>{html.escape(sentence.title)}</h2>\n<p>{_spans(sentence, most)}</p>'
    for sentence in sentences
  )
  body = f'<p>{scale} iterations</p>\n{blocks}'
  return html_page.write(path, title, _STYLE, body)


def colour_of(depth: int, most: int) -> str:
  """The colour of so many iterations, '#rrggbb'; darker for more."""
  share = min(max(depth / max(most, 1), 0.0), 1.0)
  red, green, blue = 255 * ((1 - share) * _LIGHT + share * _DARK)
  return f'#{round(red):02x}{round(green):02x}{round(blue):02x}'


def _spans(sentence: Depths, most: int) -> str:
  parts: list[str] = []
  tokens = zip(pieces(sentence.names), sentence.iterations, strict=True)
  for (text, glued), depth in tokens:
    if parts and not glued:
      parts.append(' ')
    parts.append(_span(text, int(depth), most))
  return ''.join(parts)


def _span(text: str, depth: int, most: int) -> str:
  return (
    f'<span style="background:{colour_of(depth, most)}" '
    f'title="{depth} of {most} iterations">{html.escape(text)}</span>'
  )


class _Word(NamedTuple):
  """A text in the picture; without a colour if its depth is 0."""

  column: float
  line: float
  text: str
  depth: int = 0
  is_title: bool = False


def _laid_out(
  sentences: Sequence[Depths], most: int, title: str
) -> tuple[list[_Word], float]:
  """(texts in their places, number of lines)."""
  words = [_Word(_MARGIN, 1, title, is_title=True)]
  scale = [str(n) for n in range(1, most + 1)]
  line = _place(words, [*scale, 'iterations'], [*range(1, most + 1), 0], 2.3)
  for sentence in sentences:
    words.append(_Word(_MARGIN, line, sentence.title, is_title=True))
    line = _place(words, sentence.names, sentence.iterations, line + 1)
  return words, line - 0.5


def _place(
  words: list[_Word], names: Sequence[str], depths: Sequence[int], line: float
) -> float:
  """Adds tokens from a line on; returns the line of what comes next."""
  texts = pieces(names)
  places, lines = layout(texts, _WIDTH)
  for (text, _), depth, (below, column) in zip(
    texts, depths, places, strict=True
  ):
    words.append(_Word(_MARGIN + column, line + below, text, int(depth)))
  return line + lines + 0.7


def _check(sentences: Sequence[Any]) -> None:
  if not len(sentences):
    raise ValueError('sentences: expected at least one, got none')
