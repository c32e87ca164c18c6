"""Prepares text for pretraining; pass the result as --config.dataset.directory.

  python -m launch.prepare_corpus --input=texts/ --out=/tmp/corpus

Reads text files (.txt, .txt.gz), folders of them, or what TFDS prepared on this
machine (tfds:wikipedia/20230601.en). A line is a paragraph, an empty line or
the end of a file ends a document; --wrapped is for lines broken to a width.

Without --tokenizer a lower-case SentencePiece vocabulary is trained from the
training split, as ALBERT's. The validation split is the documents of
--validation (files of --input that it names are not trained on), or else the
share --validation_share of all documents. Damaged text is repaired or left out
and counted in corpus.json; files that were left out are listed in faults.jsonl.
The directory is renamed into place when complete.
"""

import dataclasses
import os
import pathlib
import signal
import sys
from typing import Any

from core.errors import ConfigError, UserError
from dataset_lib.corpus import preparation
from dataset_lib.corpus.preparation import Options
from launch import command_line

NOT_WRITTEN = 6


def _check(flags: Options) -> None:
  beside = 'nothing beside --{} (leave one out)'
  if flags.validation:
    expected = beside.format('validation')
    command_line.refuse(flags, ['validation_share'], expected)
  if flags.tokenizer:
    expected = beside.format('tokenizer')
    command_line.refuse(flags, ['vocab_size', 'vocab_texts'], expected)
  if os.path.ismount(flags.out):
    expected = 'a directory to replace: a disk is mounted there'
    raise ConfigError('--out', flags.out, expected)
  command_line.check_place('--out', flags.out, is_new=True)
  # The corpus is written to a temporary directory next to it, then renamed.
  command_line.check_place('--out', os.path.dirname(flags.out))


def run(flags: Options) -> None:
  """Prepares the corpus and prints its counts."""
  out = os.path.realpath(os.path.expanduser(flags.out))
  flags = dataclasses.replace(flags, out=out)
  _check(flags)
  from concurrent.futures.process import BrokenProcessPool

  from rich.console import Console
  from rich.progress import Progress, TimeElapsedColumn

  for path in preparation.leftovers(pathlib.Path(out)):
    print(f'note: {path} belongs to another run', file=sys.stderr)
  # Handle SIGTERM like Ctrl-C, which leaves no file.
  before = signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
      manifest = preparation.prepare(flags, bar)
  except UserError:
    raise  # may be an OSError too
  except OSError as error:
    reason = error.strerror or error
    command_line.fail(f'{error.filename or out}: {reason}', NOT_WRITTEN)
  except BrokenProcessPool:
    reason = 'one of them was killed; fewer processes take less memory'
    command_line.fail(f'--processes={flags.processes}: {reason}', NOT_WRITTEN)
  finally:
    signal.signal(signal.SIGTERM, before)
  report(manifest, out)


def report(manifest: dict[str, Any], out: str) -> None:
  """Prints counts of each split, and the faults of the texts."""
  from eval_lib.report import print_table

  splits, faults = manifest['splits'], manifest['faults']
  print_table('', [
    {'': name.replace('_', ' ')}
    | {split: f'{counts[name]:,}' for split, counts in splits.items()}
    for name in splits['train']
  ])  # fmt: skip
  if faults:
    print_table('', [
      {'fault': kind.replace('_', ' '), 'count': f'{fault["count"]:,}',
       'action': fault['action'],
       'first': ': '.join(filter(None, fault['first'][0].values()))}
      for kind, fault in faults.items()
    ])  # fmt: skip
  else:
    print('no faults in the text')
  if os.path.exists(os.path.join(out, preparation.FAULTS_FILE)):
    print(f'All files that were left out: {out}/{preparation.FAULTS_FILE}')
  size, length = manifest['vocab_size'], manifest['max_length']
  print(f'written: {out} ({size:,} words, rows of at most {length} tokens)')


main = command_line.Command('prepare_corpus', __doc__, Options, run)

if __name__ == '__main__':
  sys.exit(main())
