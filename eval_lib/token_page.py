"""Which tokens survive and where a sentence exits, as one HTML page.

The same blocks as `eval_lib.token_plots` draws, without any other file.
"""

import html
import os
import pathlib
from collections.abc import Sequence

from eval_lib import html_page
from eval_lib.token_plots import (
  Sentence,
  check,
  classes_of,
  headline,
  rows_of,
)
from eval_lib.token_texts import pieces

_STYLE = """\
h2 { font-size: 1em; color: #0072b2; margin: 2em 0 .4em }
h2.wrong { color: #d55e00 }
.row { display: flex; gap: 1em; align-items: baseline }
.row > .name { flex: 0 0 7em; color: #5a5a5a; font-size: .85em }
.removed { color: #d55e00; opacity: .75; text-decoration: line-through }
.gone { color: #b8b8b8; text-decoration: line-through }
.class { display: inline-block; min-width: 15em; color: #5a5a5a }
.exit .class { color: #0072b2; font-weight: bold }
.bar { display: inline-block; height: .6em; background: currentColor }
"""


def write_html(
  path: str | os.PathLike[str],
  sentences: Sequence[Sentence],
  *,
  title: str = 'Tokens that survive',
) -> pathlib.Path:
  """Writes sentences as one HTML page; errors as in `plot_tokens`.

  Args:
    path: of the page; its suffix is replaced by .html.
    sentences: at least one; whatever is in them is text, never markup.
    title: of the page.

  Returns:
    Its path.
  """
  check(path, sentences)
  blocks = '\n'.join(_block(sentence) for sentence in sentences)
  return html_page.write(path, title, _STYLE, blocks)


def _block(sentence: Sentence) -> str:
  wrong = ' class="wrong"' if sentence.is_wrong else ''
  lines = [f'<h2{wrong}>{html.escape(headline(sentence))}</h2>']
  for row in rows_of(sentence):
    if row.head is None:
      content, kind = _token_spans(sentence.names, row.states), 'row'
    else:
      content = _class_spans(sentence, row.head)
      kind = 'row exit' if row.head == sentence.exit_layer else 'row'
    lines.append(
      f'<div class="{kind}"><span class="name">{row.label}</span>'
      f'<span>{content}</span></div>'
    )
  return '\n'.join(lines)


def _token_spans(names: Sequence[str], states: Sequence[str]) -> str:
  parts: list[str] = []
  for (text, glued), state in zip(pieces(names), states, strict=True):
    if parts and not glued:
      parts.append(' ')
    parts.append(f'<span class="{state}">{html.escape(text)}</span>')
  return ''.join(parts)


def _class_spans(sentence: Sentence, layer: int) -> str:
  if not sentence.class_names:
    return f'{sentence.heads[layer][0]:.2f}'
  return ''.join(
    f'<span class="class">{html.escape(name)} <span class="bar" '
    f'style="width:{7 * share:.2f}em"></span> {100 * share:.1f} %</span>'
    for name, share in classes_of(sentence, layer)
  )
