"""Prepares text for pretraining, once: --config.dataset.directory reads it.

  python -m launch.prepare_corpus --input=texts/ --out=/tmp/corpus

Reads text files (.txt, .txt.gz), a folder of them with all its folders, or what
TFDS prepared on this machine (tfds:wikipedia/20230601.en). A line is a
paragraph, an empty line or the end of a file ends a document. --wrapped is for
text whose lines are broken to a width, as in books: there the lines up to an
empty one are a paragraph, and a file or a TFDS record is a document.

The text is cut into sentences and into rows of at most --max_length tokens.
Without --tokenizer a lower-case SentencePiece vocabulary is trained from the
training split, as ALBERT's. The validation split is the documents of
--validation (files of --input that it names are not trained on), or else one
document out of every 1 / --validation_share, the first of the corpus included.

The result is the same whatever the number of processes. Damaged text is
repaired or left out, counted, and shown at the end and in corpus.json; each
file that was left out is listed in faults.jsonl. The directory appears when it
is complete.
"""

import dataclasses
import os
import pathlib
import signal
import sys
from typing import Any

from dataset_lib import corpus
from dataset_lib.corpus import Options
from dataset_lib.errors import ConfigError, MissingDataError
from launch import command_line

NOT_WRITTEN = 6
EXIT_CODES = """\
exit codes:
  0   finished
  2   the command line is wrong; nothing was written
  4   the texts or the tokenizer are missing or damaged
  6   the corpus could not be written, or a process that encodes was killed
  130 interrupted (Ctrl-C, SIGTERM); nothing is left, start again
"""

# Flags, each with another that leaves it no meaning.
_EXCLUSIVE = {
  'validation_share': 'validation',
  'vocab_size': 'tokenizer',
  'vocab_texts': 'tokenizer',
}


def _check(flags: Options) -> None:
  for name, other in _EXCLUSIVE.items():
    value = getattr(flags, name)
    if getattr(flags, other) and value != getattr(Options, name):
      expected = f'nothing beside --{other} (leave one out)'
      raise ConfigError(f'--{name}', value, expected)
  if os.path.ismount(flags.out):
    expected = 'a directory to replace: a disk is mounted there'
    raise ConfigError('--out', flags.out, expected)
  command_line.check_place('--out', flags.out, is_new=True)
  # The directory is made under another name next to it, and then renamed.
  command_line.check_place('--out', os.path.dirname(flags.out))


def run(flags: Options) -> int:
  """Prepares the corpus and prints its counts."""
  out = os.path.realpath(os.path.expanduser(flags.out))
  flags = dataclasses.replace(flags, out=out)
  _check(flags)
  from concurrent.futures.process import BrokenProcessPool

  import rich.console
  from rich import progress

  for path in corpus.leftovers(pathlib.Path(out)):
    print(
      f'note: {path} is of a run that goes on, or was killed; then remove it',
      file=sys.stderr,
    )
  # Like Ctrl-C, which leaves no file.
  before = signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    with progress.Progress(
      *progress.Progress.get_default_columns(),
      progress.TimeElapsedColumn(),
      console=rich.console.Console(stderr=True),
    ) as bar:
      manifest = corpus.prepare(flags, bar)
  except MissingDataError:
    raise  # an OSError too
  except OSError as error:
    reason = error.strerror or error
    command_line.fail(f'{error.filename or out}: {reason}', NOT_WRITTEN)
  except BrokenProcessPool:
    command_line.fail(
      f'--processes={flags.processes}: one of them was killed, as it happens '
      'where memory is short; fewer take less',
      NOT_WRITTEN,
    )
  finally:
    signal.signal(signal.SIGTERM, before)
  report(manifest, out)
  return command_line.OK


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
  if os.path.exists(os.path.join(out, corpus.FAULTS_FILE)):
    print(f'All files that were left out: {out}/{corpus.FAULTS_FILE}')
  print(
    f'written: {out} (vocabulary of {manifest["vocab_size"]:,}, rows of at '
    f'most {manifest["max_length"]} tokens)'
  )


main = command_line.Command('prepare_corpus', __doc__, Options, run, EXIT_CODES)

if __name__ == '__main__':
  sys.exit(main())
