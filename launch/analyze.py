"""Measures the iterations of each kind of token: the analysis of an ALBERT.

  python -m launch.analyze --workdir=/tmp/albert
  python -m launch.analyze --workdir=/tmp/tense --treebank=en_ewt-ud-dev.conllu

Reads a checkpoint of pretraining or fine-tuning, prints and writes into --out:
  iterations.csv  by kind of token
  similarity.csv  and a picture: cosine of the states before and after each
                  iteration, 1 for a halted token
  labels.csv      by dependency label; marked if mean > mean of labels + std
  sentences.html  tokens coloured by iterations
"""

import dataclasses
import functools
import os
import pathlib
import sys
from typing import Annotated, Any

from annotated_types import Predicate

from dataset_lib.errors import ConfigError
from dataset_lib.fields import flag
from launch import command_line
from launch.command_line import Count, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command_line.RunFlags):
  """Flags of an analysis."""

  split: str = flag('split of the data set of the run', 'validation')
  rows: Positive = flag('number of rows, spread evenly over the split', 2000)
  treebank: Annotated[
    str,
    Predicate(lambda path: not path or os.path.isfile(path)),
    'a CoNLL-U file',
  ] = flag('with dependency labels: CoNLL-U or .gz', '', 'FILE')
  # Labels with fewer words are left out.
  label_words: Positive = flag('least number of words of a label', 20, 'WORDS')
  sentences: Count = flag('rows of sentences.html', 8, 'ROWS')
  out: str = flag('default: analysis/ in the workdir', '', 'DIRECTORY')


def run(flags: Flags) -> int:
  """Reads everything, then computes, then writes and prints."""
  from albert_act import analysis, analysis_report
  from albert_act.encoder import Albert
  from dataset_lib import builder, tokenizer
  from eval_lib.report import print_table
  from train_lib import loading
  from train_lib.run_directory import TOKENIZER
  from train_lib.task import construct

  config = loading.load_config(flags.workdir)
  if not isinstance(construct(config, num_classes=2), Albert):
    expected = 'a run of an ALBERT of albert_act'
    raise ConfigError('--workdir', config.model.name, expected)
  command_line.check_texts(flags.workdir)
  try:
    builder.validate(config.dataset, flags.split)
  except ConfigError as error:
    raise ConfigError('--split', error.given, error.expected) from error
  out = pathlib.Path(flags.out or os.path.join(flags.workdir, 'analysis'))
  command_line.check_place('--out', str(out))
  labelled = read_treebank(flags.treebank)
  records = builder.build_source(config.dataset, flags.split)
  words = tokenizer.load(pathlib.Path(flags.workdir) / TOKENIZER)
  loaded = loading.restore(flags.workdir, config, flags.step)
  model = dataclasses.replace(loaded.task.model, dynamic=False, remat_chunk=0)
  sample = functools.partial(analysis.batches, records, config.seed)
  found = analysis.analyse(model, loaded.variables, sample(flags.rows))
  tables = analysis_report.tables(found)
  if labelled:
    given = words, labelled, records.info.input_shape[0], flags.label_words
    labels = analysis_report.label_table(model, loaded.variables, *given)
    tables.append(labels)
  page, most = '', model.max_iterations
  if flags.sentences:
    shown = analysis.traced(model, loaded.variables, sample(flags.sentences))
    page = analysis_report.page(shown, words.names, most)
  missing = analysis_report.write(out, found, tables, page)
  for table in tables:
    print_table(table.title, table.rows, table.note, table.columns)
  if missing:
    print(f'no pictures: {missing}', file=sys.stderr)
  print(f'step {loaded.saved.step}, written: {out}')
  return command_line.OK


def read_treebank(file: str) -> list[Any]:
  """Returns the sentences of a file, [] without one; prints its faults."""
  from albert_act import conllu

  sentences, bad = conllu.read(file) if file else ([], [])
  if bad:
    line = f'{len(bad)} faults in {file}, whose sentences are left out; the '
    print(f'{line}first: {bad[0]}', file=sys.stderr)
  return sentences


main = command_line.Command('analyze', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
