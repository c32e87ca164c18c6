"""Files of the GLUE server: a line for each row of a test set, with its answer.

The format is that of gluebenchmark.com: `SST-2.tsv` has the header
`index<TAB>prediction`, and answers are words for MNLI, QNLI, RTE and AX, the
number of a class for the others, a number from 0 to 5 for STS-B.
"""

import dataclasses
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Num

from core import files
from core.errors import BadRecord, ConfigError, InvalidDataError
from dataset_lib import tables
from dataset_lib.text_rows import MAX_SCORE
from dataset_lib.text_tasks import GLUE as TASKS
from eval_lib import evaluator, glue

# Rows of the official test sets, by the name of the file.
ROWS = {
  'CoLA': 1063, 'SST-2': 1821, 'MRPC': 1725, 'QQP': 390965, 'STS-B': 1379,
  'MNLI-m': 9796, 'MNLI-mm': 9847, 'QNLI': 5463, 'RTE': 3000, 'WNLI': 146,
  'AX': 1104,
}  # fmt: skip
HEADER = 'index\tprediction'
FOLDER = 'submission'  # in a workdir
_TASKS = {kind.folder: task for task, kind in TASKS.items()} | dict.fromkeys(
  ('MNLI-m', 'MNLI-mm', 'AX'), 'mnli'
)
_IN_WORDS = 'mnli', 'qnli', 'rte'


def unlabelled(dataset: Any) -> dict[str, Any]:
  """Returns the configuration of GLUE's test sets, which have no labels."""
  settings = dict(dataset.items())
  if settings.get('name') != 'glue':
    raise ConfigError('dataset.name', settings.get('name'), "'glue'")
  return settings | {'name': 'dataset_lib.text_tasks:GlueTexts'}


def write(
  folder: files.Path, name: str, answers: Num[np.ndarray, ' N']
) -> Path:
  """Writes class ids, or numbers of STS-B, as the file of a `glue.name_of`."""
  labels = _words(name)
  if labels:
    cells = [labels[answer] for answer in answers]
  else:
    cells = [f'{x:.3f}' for x in np.clip(answers, 0.0, MAX_SCORE)]
  lines = [HEADER, *(f'{index}\t{cell}' for index, cell in enumerate(cells))]
  path = Path(folder) / f'{name}.tsv'
  files.write_text(path, '\n'.join(lines) + '\n')
  return path


def read(path: files.Path, rows: int | None = None) -> Num[np.ndarray, ' N']:
  """Reads the answers of a file, of `rows` rows; checks every line.

  Raises InvalidDataError with the line, MissingDataError without the file.
  """
  path = Path(path)
  labels = _words(path.stem, str(path))
  (_, header), *lines = tables.read_lines(path)
  if header != HEADER.encode():
    raise _wrong(path, 1, repr(HEADER), header)
  answers = []
  for index, (number, line) in enumerate(lines):
    place, _, cell = line.decode(errors='replace').partition('\t')
    if place != str(index):
      raise _wrong(path, number, f'index {index}', place)
    if labels and cell not in labels:
      raise _wrong(path, number, f'one of {", ".join(labels)}', cell)
    try:
      number_of = labels.index if labels else TASKS['stsb'].read_label
      answers.append(number_of(cell))
    except BadRecord as error:
      legal = f'a number in [0, {MAX_SCORE}]'
      raise _wrong(path, number, legal, cell) from error
  if rows not in (None, len(answers)):
    raise _wrong(path, len(lines) + 1, f'{rows} rows', len(answers))
  return np.array(answers, np.int64 if labels else np.float64)


def zip_files(folder: files.Path, path: files.Path) -> None:
  """Writes the archive that the server takes: all files, of all rows."""
  content = io.BytesIO()
  with zipfile.ZipFile(content, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, rows in ROWS.items():
      file = Path(folder) / f'{name}.tsv'
      read(file, rows)
      archive.write(file, file.name)
  files.write_bytes(path, content.getvalue())


def _words(name: str, where: str = 'name') -> Sequence[str]:
  """Returns the answers of class ids; () for STS-B."""
  if name not in ROWS:
    expected = f'a file of {", ".join(ROWS)}'
    raise InvalidDataError(f'{where}: expected {expected}, got {name!r}')
  kind = TASKS[_TASKS[name]]
  if _TASKS[name] in _IN_WORDS:
    return kind.class_names
  return [str(number) for number in range(len(kind.class_names))]


def _wrong(
  path: Path, line: int, expected: str, value: object
) -> InvalidDataError:
  return InvalidDataError(
    f'{path}, line {line}: expected {expected}, got {value!r:.40}'
  )


@dataclasses.dataclass(kw_only=True)
class Evaluator(glue.Evaluator):
  """Writes the answers of the last head into `submission/` of the workdir."""

  LABELLED, METRICS = False, ('rows',)
  split: evaluator.Split = 'test'

  @property
  def data(self) -> dict[str, Any]:
    """See `unlabelled`."""
    return unlabelled(super().data)

  def run(self, variables: Any) -> dict[str, float]:
    """Returns the number of rows."""
    answers, _ = self.answers(variables)
    if folder := self.file(FOLDER):
      write(folder, glue.name_of(self._task, self.split), answers)
    return {'rows': float(len(answers))}


@dataclasses.dataclass(kw_only=True)
class Submitted(glue.Evaluator):
  """The official metrics of a file of answers, whatever model wrote it."""

  path: str  # of GLUE's name of the task, as SST-2.tsv

  def __post_init__(self):
    super().__post_init__()
    name = glue.name_of(self._task, self.split)
    if Path(self.path).stem != name:
      raise ConfigError('path', self.path, f'{name}.tsv, of {self.split}')

  def run(self, variables: Any) -> dict[str, float]:
    """Compares with the labels of `split`; does not use the variables."""
    source = self.splits['split'].source
    labels = [source.record(row)['label'] for row in range(len(source))]
    answers = read(self.path, len(labels))
    return glue.score(self._task, answers, np.array(labels))
