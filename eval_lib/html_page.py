"""One HTML page without any other file."""

import html
import os
import pathlib

_STYLE = """\
body { font: 15px/1.55 system-ui, sans-serif; color: #1a1a1a;
  background: #fff; max-width: 66em; margin: 2em auto; padding: 0 1em }
"""


def write(
  path: str | os.PathLike[str], title: str, style: str, body: str
) -> pathlib.Path:
  """Writes a page.

  Args:
    path: of the page; its suffix is replaced by .html.
    title: text, never markup.
    style: CSS besides that of every page.
    body: markup, in which all text is escaped.

  Returns:
    Its path.
  """
  path = pathlib.Path(path).with_suffix('.html')
  name = html.escape(title)
  path.write_text(
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    f'<title>{name}</title>\n<style>\n{_STYLE}{style}</style>\n'
    f'<h1>{name}</h1>\n{body}\n</html>\n',
    encoding='utf-8',
    # A lone surrogate cannot be written; nothing in a token may stop us.
    errors='xmlcharrefreplace',
  )
  return path
