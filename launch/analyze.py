"""Measures a trained model: the tapes of an AdaTape, an ALBERT's iterations.

  python -m launch.analyze --workdir=/tmp/digits
  python -m launch.analyze --workdir=/tmp/albert
  python -m launch.analyze --workdir=/tmp/tense --treebank=en_ewt-ud-dev.conllu

The run's model decides what is written into --out, and which flags are legal.
Of an AdaTape summary.csv, lengths.csv, bank.csv, classes.csv and examples.csv,
and pictures: a heatmap of the patches read, the selection distribution, tape
lengths, and the images of the shortest and the longest tapes.
Of an ALBERT, in pretraining or fine-tuning:
  iterations.csv  by kind of token
  similarity.csv  and a picture: cosine of the states before and after each
                  iteration, 1 for a halted token
  labels.csv      by dependency label; marked if mean > mean of labels + std
  sentences.html  tokens coloured by iterations
"""

import dataclasses
import importlib
import os
import sys
from typing import Annotated, Any, ClassVar

from annotated_types import Predicate

from core import files
from core.errors import ConfigError
from core.fields import flag
from launch import command_line
from launch.command_line import Count, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(command_line.RunFlags):
  module: ClassVar[str]  # has MODEL, the class analysed, SPLIT and `write`
  split: str = flag('ALBERT: validation; AdaTape: that of its evaluation', '')
  rows: Positive = flag('number of rows, spread evenly over the split', 2000)
  out: str = flag('default: analysis/ in the workdir', '', 'DIRECTORY')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Albert(_Run):
  """Flags of an ALBERT."""

  module = 'albert_act.analysis_report'
  treebank: Annotated[
    str,
    Predicate(lambda path: not path or os.path.isfile(path)),
    'a CoNLL-U file',
  ] = flag('ALBERT: with dependency labels, CoNLL-U or .gz', '', 'FILE')
  # Labels with fewer words are left out.
  label_words: Positive = flag('ALBERT: least words of a label', 20, 'WORDS')
  sentences: Count = flag('ALBERT: rows of sentences.html', 8, 'ROWS')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tape(_Run):
  """Flags of an AdaTape."""

  module = 'adatape.analysis_report'
  images: Positive = flag(
    'AdaTape: images shown of the shortest, and of the longest tapes', 5
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(Albert, Tape):
  """Flags of all models."""


def find(workdir: str) -> tuple[type[_Run], Any, Any]:
  """Returns flags and module of the analysis, and the run's configuration."""
  from train_lib import loading
  from train_lib.task import construct

  config = loading.load_config(workdir)
  model = construct(config, num_classes=2)
  for kind in (Albert, Tape):
    module = importlib.import_module(kind.module)
    if isinstance(model, module.MODEL):
      return kind, module, config
  expected = 'a run of an ALBERT of albert_act, or of an AdaTape'
  raise ConfigError('--workdir', config.model.name, expected)


def run(flags: Flags) -> None:
  """Reads everything, then computes, then writes and prints."""
  from eval_lib import report
  from train_lib import loading

  kind, module, config = find(flags.workdir)
  legal = {field.name for field in dataclasses.fields(kind)}
  others = [f.name for f in dataclasses.fields(Flags) if f.name not in legal]
  expected = f'nothing, not a flag for a run of {config.model.name}'
  command_line.refuse(flags, others, expected)
  if kind is Albert:
    command_line.check_texts(flags.workdir)
  split = loading.split_of(config, flags.split or module.SPLIT)
  out = report.folder_of(flags.out, flags.workdir, 'analysis')
  command_line.check_place('--out', str(out))
  loaded = loading.restore(flags.workdir, config, flags.step)
  with files.failing_late():
    for table in module.write(flags, config, split, loaded, out):
      report.print_table(table.title, table.rows, table.note, table.columns)
  print(f'step {loaded.saved.step}, written: {out}')


main = command_line.Command('analyze', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
