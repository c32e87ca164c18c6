"""How many iterations which tokens take: the analysis of an ALBERT.

  python -m launch.analyze --workdir=/tmp/albert
  python -m launch.analyze --workdir=/tmp/tense --treebank=en_ewt-ud-dev.conllu

From a checkpoint of pretraining or fine-tuning, into --out:

  iterations.csv   mean iterations by kind of token (of pretraining: masked,
                   random, kept words too), and the depth of the rows beside it
  similarity.csv   cosine of states before and after each iteration, by kind:
                   of all tokens, where a halted one counts as 1, and beside it
                   of those that still run, and their share; .png, .pdf
  labels.csv       iterations by dependency label, from a treebank in CoNLL-U,
                   and the depth of its sentences
  sentences.html   sentences coloured by iterations; sentences.png, .pdf

The tables are printed, too. A label is marked whose mean is above the mean of
all labels by more than their standard deviation. The cosine of all tokens goes
to 1 as they halt; only that of the running ones says whether they converge. In
a run of a fixed depth all tokens take all iterations; its similarities can be
compared.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from launch import command_line, flag_types, run_flags, tables

ROWS, SENTENCES = 2000, 8
SHOWN_LABELS = 20  # of the printed table; the file has all
LABEL_WORDS = 20  # a label of fewer words says nothing


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser(
    prog='python -m launch.analyze',
    description=__doc__,
    epilog=command_line.EXIT_CODES,
  )
  run_flags.add_arguments(result)
  add = result.add_argument
  add('--split', default='validation', metavar='NAME',
      help='of the data set of the run (default: validation)')  # fmt: skip
  add('--rows', type=flag_types.positive, default=ROWS, metavar='ROWS',
      help='so many rows, spread over the split (default: '
      f'{ROWS})')  # fmt: skip
  add('--treebank', default='', metavar='FILE',
      help='sentences with dependency labels: CoNLL-U or .gz')  # fmt: skip
  add('--label_words', type=flag_types.positive, default=LABEL_WORDS,
      metavar='WORDS', help='words that a label must have to be counted '
      f'(default: {LABEL_WORDS})')  # fmt: skip
  add('--sentences', type=flag_types.count, default=SENTENCES, metavar='ROWS',
      help=f'so many rows as pictures (default: {SENTENCES})')  # fmt: skip
  add('--out', default='', metavar='DIRECTORY',
      help='default: analysis/ in the workdir')  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any, Any]:
  """Returns (arguments, the run's configuration); touches no device."""
  arguments = command_line.parse_arguments(parser(), argv)
  from dataset_lib import builder
  from dataset_lib.errors import ConfigError
  from train_lib import loading

  config = loading.load_own_config(arguments.workdir)
  _check_run(arguments.workdir, config)
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


def _check_run(workdir: str, config: Any) -> None:
  """Raises `UsageError` unless the run is one of an ALBERT on texts."""
  from albert_act.encoder import Albert
  from train_lib.classification import construct

  if not isinstance(construct(config, num_classes=2), Albert):
    raise command_line.UsageError(
      '--workdir: expected a run of an ALBERT of albert_act, got one of '
      f'{config.model.name}'
    )
  run_flags.check_texts(workdir)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, run, argv)


def run(arguments: Any, config: Any) -> int:
  """Reads everything, then computes, then writes and prints."""
  from albert_act import analysis, analysis_files, analysis_rows, treebank
  from dataset_lib import builder, tokenizer
  from train_lib.run_directory import TOKENIZER

  labelled = read_treebank(arguments.treebank)
  records = builder.build_source(config.dataset, arguments.split)
  words = tokenizer.load(pathlib.Path(arguments.workdir) / TOKENIZER)
  model, variables, step = load(arguments.workdir, config, arguments.step)

  def rows(count):
    return analysis_rows.batches(records, config.seed, count)

  found = analysis.analyse(model, variables, rows(arguments.rows))
  labels = None
  if labelled:
    labels = treebank.analyse(
      model, variables, words, labelled, records.info.input_shape[0],
      arguments.label_words,
    )  # fmt: skip
  shown = analysis_files.sentences(
    analysis.token_iterations(model, variables, rows(arguments.sentences)),
    words,
  )
  out = pathlib.Path(arguments.out)
  missing = analysis_files.write(out, found, labels, shown)
  print_findings(found, labels)
  if missing:
    print(f'no pictures: {missing}', file=sys.stderr)
  print(f'step {step}, written: {out}')
  return command_line.OK


def read_treebank(file: str) -> list[Any]:
  """The sentences of a file, () of none; says what cannot be used."""
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


def load(workdir: str, config: Any, step: Any) -> tuple[Any, Any, int]:
  """(the model in its masked form, its variables, step) of a checkpoint."""
  import jax

  from train_lib import loading, sharding

  task = loading.load_task(workdir, config, step)
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    loaded = loading.load_params(workdir, task, mesh, step)
  model = dataclasses.replace(task.model, dynamic=False, remat_chunk=0)
  return model, loaded.variables, loaded.step


def print_findings(found: Any, labels: Any) -> None:
  """Prints the tables."""
  from albert_act import analysis_files

  limit = found.max_iterations
  share = float(found.iterations['all'].mean) / limit
  tables.print_rows(
    f'Iterations, at most {limit}',
    analysis_files.iteration_rows(found),
    f'tokens take {share:.0%} of the iterations, rows that wait for their '
    f'last token {float(found.depth.mean) / limit:.0%}',
  )
  tables.print_rows(
    'Cosine of states before and after',
    analysis_files.similarity_rows(found, 'all'),
    'a halted token counts as 1 in all, and not in running, the mean over the '
    'share that still runs',
  )
  if labels is None:
    return
  tables.print_rows(
    f'Iterations by dependency label, {int(labels.depth.count)} sentences',
    analysis_files.label_rows(labels, SHOWN_LABELS),
    '* above the mean of the labels by more than their standard deviation; '
    'labels of few words (--label_words) and words behind the longest row are '
    'left out',
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
