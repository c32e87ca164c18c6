"""Measures the iterations of each kind of token: the analysis of an ALBERT.

  python -m launch.analyze --workdir=/tmp/albert
  python -m launch.analyze --workdir=/tmp/tense --treebank=en_ewt-ud-dev.conllu

From a checkpoint of pretraining or fine-tuning, into --out and printed:

  iterations.csv   mean iterations by kind of token, and the depth of the rows
  similarity.csv   cosine of states before and after each iteration, by kind,
                   of all tokens and of the running ones; .png, .pdf
  labels.csv       iterations by dependency label, from a treebank in CoNLL-U
  sentences.html   sentences coloured by iterations; .png, .pdf

A label is marked whose mean is above the mean of all labels by more than their
standard deviation. The cosine of a halted token is 1; only that of the running
ones shows convergence.
"""

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from launch import command_line


def parser() -> command_line.Parser:
  """Returns the command line."""
  result = command_line.Parser('python -m launch.analyze', __doc__)
  command_line.add_run_flags(result)
  positive, count = command_line.positive, command_line.count
  for name, default, kind, metavar, words in (
    ('split', 'validation', str, 'NAME', 'of the data set of the run'),
    ('rows', 2000, positive, 'ROWS', 'rows from all of the split'),
    ('treebank', '', str, 'FILE', 'with dependency labels: CoNLL-U or .gz'),
    # A mean over fewer words is noise.
    ('label_words', 20, positive, 'WORDS', 'least words of a label'),
    ('sentences', 8, count, 'ROWS', 'number of rows as pictures'),
    ('out', '', str, 'DIRECTORY', 'default: analysis/ in the workdir'),
  ):
    words += f' (default: {default})' if default else ''
    result.add_argument(
      f'--{name}', default=default, type=kind, metavar=metavar, help=words
    )
  return result


def parse(argv: Sequence[str]) -> tuple[Any, Any]:
  """Returns (arguments, the run's configuration); touches no device."""
  from albert_act.encoder import Albert
  from dataset_lib import builder
  from dataset_lib.errors import ConfigError
  from train_lib import loading
  from train_lib.task import construct

  arguments = command_line.parse_arguments(parser(), argv)
  config = loading.load_config(arguments.workdir)
  if not isinstance(construct(config, num_classes=2), Albert):
    expected = 'a run of an ALBERT of albert_act'
    raise ConfigError('--workdir', config.model.name, expected)
  command_line.check_texts(arguments.workdir)
  try:
    builder.validate(config.dataset, arguments.split)
  except ConfigError as error:
    raise ConfigError('--split', error.given, error.expected) from error
  if arguments.treebank and not os.path.isfile(arguments.treebank):
    raise ConfigError('--treebank', arguments.treebank, 'a CoNLL-U file')
  arguments.out = arguments.out or os.path.join(arguments.workdir, 'analysis')
  command_line.check_place('--out', arguments.out)
  return arguments, config


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, run, argv)


def run(arguments: Any, config: Any) -> int:
  """Reads everything, then computes, then writes and prints."""
  from albert_act import analysis, analysis_report
  from dataset_lib import builder, tokenizer
  from eval_lib.report import print_table
  from train_lib import loading
  from train_lib.run_directory import TOKENIZER

  workdir, step = arguments.workdir, arguments.step
  labelled = read_treebank(arguments.treebank)
  records = builder.build_source(config.dataset, arguments.split)
  words = tokenizer.load(pathlib.Path(workdir) / TOKENIZER)
  loaded = loading.restore(workdir, config, step)
  model = dataclasses.replace(loaded.task.model, dynamic=False, remat_chunk=0)
  sample = functools.partial(analysis.batches, records, config.seed)
  found = analysis.analyse(model, loaded.variables, sample(arguments.rows))
  tables = analysis_report.tables(found)
  if labelled:
    length, least = records.info.input_shape[0], arguments.label_words
    tables.append(
      analysis_report.label_table(
        model, loaded.variables, words, labelled, length, least
      )
    )
  shown = analysis.token_iterations(
    model, loaded.variables, sample(arguments.sentences)
  )
  page = analysis_report.blocks(shown, words, found.max_iterations)
  out = pathlib.Path(arguments.out)
  missing = analysis_report.write(out, found, tables, page)
  for table in tables:
    print_table(table.title, table.shown, table.note)
  if missing:
    print(f'no pictures: {missing}', file=sys.stderr)
  print(f'step {loaded.step}, written: {out}')
  return command_line.OK


def read_treebank(file: str) -> list[Any]:
  """Returns the sentences of a file, [] of none; prints the faults in it."""
  from dataset_lib import conllu

  sentences, bad = conllu.read(file) if file else ([], [])
  if bad:
    print(
      f'{len(bad)} faults in {file}, whose sentences are left out; the first: '
      f'{bad[0]}',
      file=sys.stderr,
    )
  return sentences


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
