"""What a compiled program does: memory, FLOPs, collectives and their cause.

Only XLA's text has all collectives, with shapes and Python lines. A loop's body
counts as often as its condition says; bytes are of results on one device.
"""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from model_lib import logical

COLLECTIVE = re.compile(
  r'((?:ragged-)?all-(?:reduce|gather|to-all)|reduce-scatter|'
  r'collective-(?:permute|broadcast))(?:-start)?'
)
_COMPUTATION = re.compile(r'^(?:ENTRY )?%([\w.-]+) .*\{$')
# `%name = (shapes) kind(operands), attributes`; a shape may have a layout.
_OPERATION = re.compile(
  r'^ +(?:ROOT )?%[\w.-]+ = (.*?)(?<![\w])([a-z][\w-]*)\((.*)$'
)
_SHAPE = re.compile(r'\b(pred|[a-z]+(\d+)(?:e\dm\d\w*)?)\[([\d,]*)\]')
_CALLED = re.compile(
  r'(?:calls|to_apply|body|branch_computations)=\{?(%[\w.%, -]+)'
)
_LIMIT = re.compile(r's32\[\]\S* constant\((\d+)\)')
_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# All products are computed there; their callers are the cause.
_SHARED = pathlib.Path(logical.__file__).resolve()


class Collective(NamedTuple):
  """A collective operation of a program."""

  kind: str  # such as 'all-reduce'
  sizes: tuple[int, ...]  # elements of each result
  bytes: int  # of all results
  times: int  # in a run of the program
  where: str  # 'file:line' of ours that causes it, else a name of XLA


@dataclasses.dataclass(frozen=True)
class Program:
  """Numbers of a compiled program, for one device."""

  arguments: int  # bytes, e.g. of a state and a batch
  temporary: int  # bytes
  flops: float  # by the compiler, which counts a loop's body once
  collectives: tuple[Collective, ...]

  def traffic(self, key: str = 'kind') -> dict[str, tuple[int, int]]:
    """Returns (count, bytes) of the collectives by 'kind' or 'where'."""
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for collective in self.collectives:
      counts[getattr(collective, key)] += collective.times
      sizes[getattr(collective, key)] += collective.times * collective.bytes
    return {name: (counts[name], size) for name, size in sizes.most_common()}


def inspect(compiled: Any) -> Program:
  """Reads a compiled program (`jax.stages.Compiled`)."""
  memory = compiled.memory_analysis()
  return Program(
    arguments=memory.argument_size_in_bytes,
    temporary=memory.temp_size_in_bytes
    # A donated state's memory is reused by the results.
    + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    flops=float((compiled.cost_analysis() or {}).get('flops', math.nan)),
    collectives=tuple(collectives(compiled.as_text())),
  )  # fmt: skip


def collectives(text: str) -> Iterator[Collective]:
  """Yields the collectives of XLA's text of a program, in its order."""
  frames, computations = _frames(text), _computations(text)
  times, seen = _times(computations), set()
  for name, lines in computations.items():
    for line in lines:
      match = _OPERATION.match(line)
      kind = COLLECTIVE.fullmatch(match[2]) if match else None
      if match is None or kind is None or name not in times:
        continue
      # Parts of one that runs beside other work share its channel.
      channel = re.search(r'channel_id=(\d+)', line)
      if channel and channel[1] in seen:
        continue
      seen.add(channel and channel[1])
      shapes = [_size(*parts) for parts in _SHAPE.findall(match[1])]
      if match[2] == 'collective-permute-start':
        shapes = shapes[1:2]  # operand, result, two counters
      elif match[2] == 'all-gather-start':
        shapes = shapes[len(shapes) // 2 :]  # operands come first
      yield Collective(
        kind=kind[1],
        sizes=tuple(size for size, _ in shapes),
        bytes=sum(size for _, size in shapes),
        times=times[name],
        where=_where(line, frames),
      )


def _size(dtype: str, bits: str, shape: str) -> tuple[int, int]:
  """Returns the elements and bytes of an array."""
  count = math.prod(int(number) for number in shape.split(',') if number)
  return count, -(-count * int(bits or 8) // 8)


def _computations(text: str) -> dict[str, list[str]]:
  """Returns the lines of each computation; the program itself is ''."""
  computations: dict[str, list[str]] = {}
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      lines = computations['' if line.startswith('ENTRY') else match[1]] = []
    elif computations and line.startswith(' '):
      lines.append(line)
  return computations


def _times(computations: Mapping[str, list[str]]) -> dict[str, int]:
  """Returns how often each computation runs; branches count as taken."""
  times: dict[str, int] = {}

  def visit(name: str, count: int) -> None:
    times[name] = times.get(name, 0) + count
    for line in computations.get(name, ()):
      repeats = 1
      if ' while(' in line:
        condition = re.search(r'condition=%([\w.-]+)', line)
        lines = computations.get(condition[1], ()) if condition else ()
        limits = [int(n) for n in _LIMIT.findall('\n'.join(lines))]
        repeats = max(limits, default=1)
      for names in _CALLED.findall(line):
        for called in re.findall(r'%([\w.-]+)', names):
          visit(called, count * repeats)

  visit('', 1)
  return times


def _frames(text: str) -> dict[str, dict[int, str]]:
  """Returns the tables before the program: rows by number, by table."""
  tables: dict[str, dict[int, str]] = {}
  for line in text.splitlines():
    if line in ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames'):
      rows = tables[line] = {}
    elif tables and (match := _ROW.match(line)):
      rows[int(match[1])] = match[2] or match[3]
    elif line.startswith(('%', 'ENTRY')):
      break
  return tables


def _where(line: str, tables: Mapping[str, Mapping[int, str]]) -> str:
  """Returns the innermost line of this checkout that led to an operation."""
  frames = tables.get('StackFrames', {})
  match = re.search(r'stack_frame_id=(\d+)', line)
  number = int(match[1]) if match else 0
  while number in frames:
    place, parent = map(int, re.findall(r'=(\d+)', frames[number]))
    fields = dict(re.findall(r'(\w+)=(\d+)', tables['FileLocations'][place]))
    file = pathlib.Path(tables['FileNames'][int(fields['file_name_id'])])
    is_ours = file.is_relative_to(_ROOT) and 'site-packages' not in file.parts
    if is_ours and file != _SHARED:
      return f'{file.relative_to(_ROOT)}:{fields["line"]}'
    number = parent - 1  # XLA prints the parent's number plus 1
  name = re.search(r'op_name="([^"]*)"', line)
  return name[1] if name else 'unknown'
