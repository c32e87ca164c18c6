"""Writes docs/configuration.md: every field of a configuration.

  python -m benchmarks.reference

Types, ranges, defaults and comments are read from the classes that the
configurations of the checkout name.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import flax.linen as nn

from benchmarks.tables import ROOT, Flags
from core import fields, files, registry
from dataset_lib import builder
from eval_lib import evaluator
from launch import command_line
from train_lib import config_schema
from train_lib.phases import Phase
from train_lib.task import Task

PAGE = ROOT / 'docs' / 'configuration.md'
START = """\
# Configuration

Written by `python -m benchmarks.reference`; edit the fields of the classes.
`--config.GROUP.FIELD=VALUE` sets a field; `launch.train --print_config` prints
the fields of a run.

"""
_NAME = re.compile(r"'(\w+(?:\.\w+)*:\w+)'")
_FIELD = re.compile(r'  (\w+): [^#]*(?:# (.*))?$')
# That a task sets of a model, and a run of an evaluator or a data set.
_MODEL, _OTHERS = {'parent', 'name', 'num_classes', 'dtype'}, {'context'}


def comments(kind: type) -> dict[str, str]:
  """Returns the comments of a class at its fields, above or after them."""
  by_field: dict[str, str] = {}
  for base in kind.__mro__[::-1]:
    above: list[str] = []
    if base.__module__.partition('.')[0] in ('builtins', 'flax', 'abc'):
      continue
    for line in inspect.getsource(base).splitlines():
      if match := _FIELD.match(line):
        by_field[match[1]] = ' '.join([*above, match[2] or ''])
      is_comment = line.startswith('  # ')
      above = [*above, line[4:]] if is_comment else []
  return by_field


def table(title: str, kind: Any) -> Iterator[str]:
  """Yields the lines of a section about a class, and of groups in it."""
  notes, hints, groups = comments(kind), fields.hints(kind), []
  yield f'## {title}\n\n{inspect.getdoc(kind)}\n'
  hidden = _MODEL if issubclass(kind, nn.Module) else _OTHERS
  rows = ['| field | legal | default | |', '|---|---|---|---|']
  for field in dataclasses.fields(kind):
    hint, default = hints[field.name], field.default
    if field.name in hidden or not field.init:
      continue
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    if dataclasses.is_dataclass(hint) and not fields.is_open(hint):
      groups.append((field.name, hint))
      continue
    required = default is dataclasses.MISSING
    cells = fields.describe(hint), '' if required else f'`{default!r}`'
    row = f'`{field.name}`', *cells, notes.get(field.name, '').strip()
    rows.append(f'| {" | ".join(c.replace("|", chr(92) + "|") for c in row)} |')
  if rows[2:]:
    yield '\n'.join(rows) + '\n'
  for name, group in groups:
    yield from table(name, group)


def page() -> str:
  """Returns the page."""
  paths = sorted((ROOT / 'configs').rglob('*.py'))
  names = {name for path in paths for name in _NAME.findall(path.read_text())}
  named = [(f'`{name}`', registry.locate(name, '')) for name in sorted(names)]
  tasks = [(f'loss of {n}', k.Loss) for n, k in named if issubclass(k, Task)]
  sources, evaluators = builder.SOURCES, evaluator.EVALUATORS
  sections = [
    ('Run', config_schema.Run), ('phases', Phase), *tasks,
    *((f"dataset, name='{k}'", builder.source_class(k)) for k in sources),
    *((f"evals, type='{k}'", evaluator.locate(k, '')) for k in evaluators),
    *((name, k) for name, k in named if not issubclass(k, Task)),
  ]  # fmt: skip
  lines = (line for section in sections for line in table(*section))
  return START + '\n'.join(lines)


def run(flags: Any) -> None:
  """Writes the page."""
  files.write_text(PAGE, page())


main = command_line.Command('reference', __doc__, Flags, run, 'benchmarks')

if __name__ == '__main__':
  raise SystemExit(main())
