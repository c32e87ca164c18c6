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

The result is the same whatever the number of processes. What is no good text
is repaired or left out, counted, and shown at the end; it also stands in
corpus.json, and each file that was left out in faults.jsonl. The directory is
there when all of it is.
"""

import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from launch import command_line, corpus_report, flag_types

MIN_LENGTH = 8  # [CLS] a [SEP] b [SEP], and some text
MAX_LENGTH = 65536
MIN_TEXTS = 1000  # to train a vocabulary from
TFDS = 'tfds:'
NOT_WRITTEN = 6
EXIT_CODES = """\
exit codes:
  0   finished
  2   the command line is wrong; nothing was written
  4   the texts or the tokenizer are missing or damaged
  6   the corpus could not be written, or a process that encodes was killed
  130 interrupted (Ctrl-C, SIGTERM); nothing is left, start again
"""


def _share(text: str) -> float:
  """A flag: a share below a half."""
  value = float(text)
  if not 0.0 <= value <= 0.5:  # False for NaN
    raise ValueError(text)
  return value


def _paths(text: str) -> tuple[str, ...]:
  """A flag: names separated by commas."""
  names = tuple(os.path.expanduser(name) for name in text.split(',') if name)
  if not names:
    raise ValueError(text)
  return names


_share.__name__ = 'number from 0 to 0.5'
_paths.__name__ = 'list of files, folders and tfds:NAME'


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser(
    prog='python -m launch.prepare_corpus',
    description=__doc__,
    epilog=EXIT_CODES,
  )
  add = result.add_argument
  add('--input', required=True, type=_paths, metavar='PATH,...',
      help='files, folders, tfds:NAME')  # fmt: skip
  path = os.path.expanduser
  add('--out', required=True, type=path, metavar='DIRECTORY',
      help='where to write; new or empty')  # fmt: skip
  add('--validation', type=_paths, default=(), metavar='PATH,...',
      help='the texts of the validation split')  # fmt: skip
  add('--validation_share', type=_share, metavar='SHARE',
      help='or the share of the documents that it takes, 0 for none '
      '(default 0.01)')  # fmt: skip
  add('--tokenizer', default='', type=path, metavar='PATH',
      help='spiece.model, tokenizer.json, vocab.txt, or a directory with one '
      '(default: train a vocabulary)')  # fmt: skip
  add('--vocab_size', type=flag_types.positive, metavar='PIECES',
      help='of the trained vocabulary (default 30000)')  # fmt: skip
  add('--vocab_texts', type=flag_types.positive, metavar='TEXTS',
      help='train it from a random sample of so many texts of at most 1,024 '
      'characters, 100 million in all; a character takes about 20 bytes of '
      'memory (default 2000000)')  # fmt: skip
  add('--max_length', type=flag_types.positive, default=128, metavar='TOKENS',
      help='longest row, special tokens included (default 128)')  # fmt: skip
  add('--processes', type=flag_types.positive, metavar='N',
      help='that encode (default: one for each core)')  # fmt: skip
  add('--wrapped', action='store_true',
      help='lines are broken to a width, see above')  # fmt: skip
  add('--data_dir', default='', type=path, metavar='DIRECTORY',
      help='of TFDS (default ~/tensorflow_datasets)')  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any]:
  """Returns (arguments,); reads no text."""
  arguments = command_line.parse_arguments(parser(), argv)
  for flag in ('input', 'validation'):
    _check_paths(flag, getattr(arguments, flag))
  _check_out(arguments.out)
  if not MIN_LENGTH <= arguments.max_length <= MAX_LENGTH:
    raise command_line.UsageError(
      f'--max_length: expected an integer in [{MIN_LENGTH}, {MAX_LENGTH}], got '
      f'{arguments.max_length}'
    )
  if arguments.vocab_texts is not None and arguments.vocab_texts < MIN_TEXTS:
    raise command_line.UsageError(
      f'--vocab_texts: expected at least {MIN_TEXTS}, got '
      f'{arguments.vocab_texts}'
    )
  _check_together(arguments)
  if arguments.tokenizer and not os.path.exists(arguments.tokenizer):
    raise command_line.UsageError(
      f'--tokenizer: no file or directory {arguments.tokenizer!r}'
    )
  return (arguments,)


def _check_together(arguments: Any) -> None:
  """Refuses flags that say two different things, and texts named twice."""
  named = [*arguments.input, *arguments.validation]
  for name in named:
    if name.startswith(TFDS) and named.count(name) > 1:
      raise command_line.UsageError(
        f'--input, --validation: expected {name} once, got it '
        f'{named.count(name)} times'
      )
  if arguments.validation and arguments.validation_share is not None:
    raise command_line.UsageError(
      '--validation_share: expected nothing beside --validation, got '
      f'{arguments.validation_share}; leave one out'
    )
  for flag in ('vocab_size', 'vocab_texts'):
    if arguments.tokenizer and getattr(arguments, flag) is not None:
      raise command_line.UsageError(
        f'--{flag}: expected nothing beside --tokenizer, whose vocabulary is '
        f'trained, got {getattr(arguments, flag)}; leave one out'
      )


def _check_paths(flag: str, names: Sequence[str]) -> None:
  for name in names:
    if not name.startswith(TFDS) and not os.path.lexists(name):
      raise command_line.UsageError(f'--{flag}: no file or folder {name!r}')


def _check_out(out: str) -> None:
  path = os.path.realpath(out)
  if os.path.ismount(path):
    raise command_line.UsageError(
      f'--out: expected a directory that can be replaced, got {out!r}, where '
      'a disk is mounted; name one in it'
    )
  command_line.check_new_directory('--out', path)
  # The new directory is made beside its place and then renamed.
  command_line.check_place('--out', os.path.dirname(path))


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, run, argv)


def _terminated(signum: int, frame: Any) -> NoReturn:
  """SIGTERM, like Ctrl-C, leaves nothing behind."""
  raise KeyboardInterrupt


def run(arguments: Any) -> int:
  """Prepares the corpus and says what is in it."""
  from concurrent.futures.process import BrokenProcessPool

  from dataset_lib import corpus_building
  from dataset_lib.errors import ConfigError, MissingDataError

  out, given = pathlib.Path(arguments.out), options(arguments)
  for path in corpus_building.leftovers(out):
    print(
      f'note: {path} is of a run that goes on, or was killed; then remove it',
      file=sys.stderr,
    )
  before = signal.signal(signal.SIGTERM, _terminated)
  try:
    with corpus_report.Progress() as progress:
      manifest = corpus_building.prepare(out, given, progress)
  except ConfigError as error:
    command_line.fail(f'--{error}' if error.field == 'vocab_size' else error)
  except MissingDataError:
    raise  # an OSError too
  except OSError as error:
    reason = error.strerror or error
    command_line.fail(f'{error.filename or out}: {reason}', NOT_WRITTEN)
  except BrokenProcessPool:
    command_line.fail(
      f'--processes={given.processes}: one of them was killed, as it happens '
      'where memory is short; fewer take less',
      NOT_WRITTEN,
    )
  finally:
    signal.signal(signal.SIGTERM, before)
  corpus_report.report(manifest, arguments.out)
  return command_line.OK


def options(arguments: Any) -> Any:
  """The arguments as `corpus_texts.Options`, which has the defaults."""
  from dataset_lib import builder, corpus_texts

  given = {
    'inputs': arguments.input,
    'validation': arguments.validation,
    'validation_share': arguments.validation_share,
    'tokenizer': arguments.tokenizer,
    'vocab_size': arguments.vocab_size,
    'vocab_texts': arguments.vocab_texts,
    'max_length': arguments.max_length,
    'processes': arguments.processes or builder.default_num_threads(),
    'data_dir': arguments.data_dir,
    'wrapped': arguments.wrapped,
  }
  return corpus_texts.Options(
    **{name: value for name, value in given.items() if value is not None}
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
