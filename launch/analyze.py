"""Measures the iterations of each kind of token: the analysis of an ALBERT.

  python -m launch.analyze --workdir=/tmp/albert
  python -m launch.analyze --workdir=/tmp/tense --treebank=en_ewt-ud-dev.conllu

From a checkpoint of pretraining or fine-tuning, into --out:

  iterations.csv   mean iterations by kind of token (of pretraining: masked,
                   random, kept words too), and the depth of the rows
  similarity.csv   cosine of states before and after each iteration, by kind:
                   of all tokens, where a halted one counts as 1, of those that
                   still run, and their share; .png, .pdf
  labels.csv       iterations by dependency label, from a treebank in CoNLL-U,
                   and the depth of its sentences
  sentences.html   sentences coloured by iterations; sentences.png, .pdf

The tables are printed, too. A label is marked whose mean is above the mean of
all labels by more than their standard deviation. The cosine of all tokens goes
to 1 as they halt; only that of the running ones shows convergence. In a run of
a fixed depth all tokens take all iterations; compare its similarities.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from launch import command_line

ROWS, SENTENCES = 2000, 8
LABEL_WORDS = 20  # a mean over fewer words is noise


def parser() -> command_line.Parser:
  """Returns the command line."""
  result = command_line.Parser('python -m launch.analyze', __doc__)
  command_line.add_run_flags(result)
  add = result.add_argument
  add('--split', default='validation', metavar='NAME',
      help='of the data set of the run (default: validation)')  # fmt: skip
  add('--rows', type=command_line.positive, default=ROWS, metavar='ROWS',
      help=f'rows from all of the split (default: {ROWS})')  # fmt: skip
  add('--treebank', default='', metavar='FILE',
      help='sentences with dependency labels: CoNLL-U or .gz')  # fmt: skip
  add('--label_words', type=command_line.positive, default=LABEL_WORDS,
      metavar='WORDS', help='words that a label must have to be counted '
      f'(default: {LABEL_WORDS})')  # fmt: skip
  add('--sentences', type=command_line.count, default=SENTENCES, metavar='ROWS',
      help=f'number of rows as pictures (default: {SENTENCES})')  # fmt: skip
  add('--out', default='', metavar='DIRECTORY',
      help='default: analysis/ in the workdir')  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any, Any]:
  """Returns (arguments, the run's configuration); touches no device."""
  from albert_act.encoder import Albert
  from dataset_lib import builder
  from dataset_lib.errors import ConfigError
  from train_lib import loading
  from train_lib.task import construct

  arguments = command_line.parse_arguments(parser(), argv)
  config = loading.load_own_config(arguments.workdir)
  if not isinstance(construct(config, num_classes=2), Albert):
    raise command_line.UsageError(
      '--workdir: expected a run of an ALBERT of albert_act, got one of '
      f'{config.model.name}'
    )
  command_line.check_texts(arguments.workdir)
  try:
    builder.validate(config.dataset, arguments.split)
  except ConfigError as error:
    prefix = '--' if error.field == 'split' else ''
    raise command_line.UsageError(f'{prefix}{error}') from error
  if arguments.treebank and not os.path.isfile(arguments.treebank):
    raise command_line.UsageError(
      f'--treebank: expected a CoNLL-U file, got {arguments.treebank!r}'
    )
  arguments.out = arguments.out or os.path.join(arguments.workdir, 'analysis')
  command_line.check_place('--out', arguments.out)
  return arguments, config


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, run, argv)


def run(arguments: Any, config: Any) -> int:
  """Reads everything, then computes, then writes and prints."""
  from albert_act import analysis, analysis_report, treebank
  from dataset_lib import builder, tokenizer
  from eval_lib.report import print_table
  from train_lib import loading
  from train_lib.run_directory import TOKENIZER

  labelled = read_treebank(arguments.treebank)
  records = builder.build_source(config.dataset, arguments.split)
  words = tokenizer.load(pathlib.Path(arguments.workdir) / TOKENIZER)
  task = loading.load_task(arguments.workdir, config, arguments.step)
  loaded = loading.load_params_on_one_device(
    arguments.workdir, task, arguments.step
  )
  model = dataclasses.replace(task.model, dynamic=False, remat_chunk=0)
  variables = loaded.variables
  rows = analysis.batches(records, config.seed, arguments.rows)
  found = analysis.analyse(model, variables, rows)
  tables = analysis_report.tables(found)
  if labelled:
    length = records.info.input_shape[0]
    tables.append(
      treebank.table(
        model, variables, words, labelled, length, arguments.label_words
      )
    )
  rows = analysis.batches(records, config.seed, arguments.sentences)
  shown = analysis.token_iterations(model, variables, rows)
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

  if not file:
    return []
  sentences, bad = conllu.read(file)
  if bad:
    print(
      f'{len(bad)} faults in {file}, whose sentences are left out; the first: '
      f'{bad[0]}',
      file=sys.stderr,
    )
  return sentences


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
