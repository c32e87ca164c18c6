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

import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from launch import command_line

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
  value = float(text)
  if not 0.0 <= value <= 0.5:  # False for NaN
    raise ValueError(text)
  return value


def _paths(text: str) -> tuple[str, ...]:
  names = tuple(os.path.expanduser(name) for name in text.split(',') if name)
  if not names:
    raise ValueError(text)
  return names


_share.__name__ = 'number from 0 to 0.5'
_paths.__name__ = 'list of files, folders and tfds:NAME'


# Flags: name, metavar, help, and arguments of `add_argument`.
_FLAGS: list[tuple[str, str, str, dict[str, Any]]] = [
  ('input', 'PATH,...', 'files, folders, tfds:NAME',
   dict(required=True, type=_paths)),
  ('out', 'DIRECTORY', 'where to write; new or empty',
   dict(required=True, type=os.path.expanduser)),
  ('validation', 'PATH,...', 'the texts of the validation split',
   dict(type=_paths, default=())),
  ('validation_share', 'SHARE', 'or the share of the documents that it takes, '
   '0 for none (default 0.01)', dict(type=_share)),
  ('tokenizer', 'PATH', 'spiece.model, tokenizer.json, vocab.txt, or a '
   'directory with one (default: train a vocabulary)',
   dict(default='', type=os.path.expanduser)),
  ('vocab_size', 'PIECES', 'of the trained vocabulary (default 30000)',
   dict(type=command_line.positive)),
  ('vocab_texts', 'TEXTS', 'train it from a random sample of at most this many '
   'texts of at most 1,024 characters, 100 million in all; a character takes '
   'about 20 bytes of memory (default 2000000)',
   dict(type=command_line.positive)),
  ('max_length', 'TOKENS', 'longest row, special tokens included (default 128)',
   dict(type=command_line.positive, default=128)),
  ('processes', 'N', 'that encode (default: one for each core)',
   dict(type=command_line.positive)),
  ('wrapped', '', 'lines are broken to a width, see above',
   dict(action='store_true')),
  ('data_dir', 'DIRECTORY', 'of TFDS (default ~/tensorflow_datasets)',
   dict(default='', type=os.path.expanduser)),
]  # fmt: skip


def parser() -> command_line.Parser:
  """Returns the command line."""
  result = command_line.Parser(
    'python -m launch.prepare_corpus', __doc__, EXIT_CODES
  )
  for name, metavar, text, options in _FLAGS:
    named: dict[str, Any] = {'metavar': metavar} if metavar else {}
    result.add_argument(f'--{name}', help=text, **named, **options)
  return result


def parse(argv: Sequence[str]) -> tuple[Any]:
  """Returns (arguments,); reads no text."""
  from dataset_lib import tfds

  given = command_line.parse_arguments(parser(), argv)
  named = [*given.input, *given.validation]
  out = os.path.realpath(given.out)
  texts, share = given.vocab_texts, given.validation_share
  problems: list[tuple[bool, str]] = []
  for flag in ('input', 'validation'):
    for name in getattr(given, flag):
      if name.startswith(TFDS):
        is_name = tfds.is_name(name.removeprefix(TFDS))
        expected = f'--{flag}: expected tfds:NAME, {tfds.NAME}, got {name!r}'
        problems.append((not is_name, expected))
        count = named.count(name)
        expected = f'--input, --validation: expected {name} once, got it'
        problems.append((count > 1, f'{expected} {count} times'))
      else:
        is_absent = not os.path.lexists(name)
        problems.append((is_absent, f'--{flag}: no file or folder {name!r}'))
  problems += [
    (os.path.ismount(out), '--out: expected a directory that can be replaced, '
     f'got {given.out!r}, where a disk is mounted; name one in it'),
    (not MIN_LENGTH <= given.max_length <= MAX_LENGTH, '--max_length: expected '
     f'an integer in [{MIN_LENGTH}, {MAX_LENGTH}], got {given.max_length}'),
    (texts is not None and texts < MIN_TEXTS,
     f'--vocab_texts: expected at least {MIN_TEXTS}, got {texts}'),
    (bool(given.validation) and share is not None, '--validation_share: '
     f'expected nothing beside --validation, got {share}; leave one out'),
    *((bool(given.tokenizer) and getattr(given, flag) is not None,
       f'--{flag}: expected nothing beside --tokenizer, whose vocabulary is '
       f'trained, got {getattr(given, flag)}; leave one out')
      for flag in ('vocab_size', 'vocab_texts')),
    (bool(given.tokenizer) and not os.path.exists(given.tokenizer),
     f'--tokenizer: no file or directory {given.tokenizer!r}'),
  ]  # fmt: skip
  for is_wrong, message in problems:
    if is_wrong:
      raise command_line.UsageError(message)
  command_line.check_new_directory('--out', out)
  # The directory is made under another name next to it, and then renamed.
  command_line.check_place('--out', os.path.dirname(out))
  return (given,)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, run, argv)


def _terminated(signum: int, frame: Any) -> NoReturn:
  """Handles SIGTERM like Ctrl-C, which leaves no file."""
  raise KeyboardInterrupt


def run(arguments: Any) -> int:
  """Prepares the corpus and prints its counts."""
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
    with _progress() as progress:
      manifest = corpus_building.prepare(out, given, progress)
  except ConfigError as error:
    is_size = error.field == 'vocab_size'
    command_line.fail(f'--{error}' if is_size else error)
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
  report(manifest, out)
  return command_line.OK


def options(arguments: Any) -> Any:
  """Returns the arguments as `corpus_building.Options`, with its defaults."""
  from dataset_lib import builder, corpus_building

  given = vars(arguments).copy()
  given['inputs'] = given.pop('input')
  given['processes'] = given['processes'] or builder.default_num_threads()
  del given['out']
  return corpus_building.Options(
    **{name: value for name, value in given.items() if value is not None}
  )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
  """Shows bars with the time left on stderr, one for each stage."""
  import rich.console
  import rich.progress

  columns = rich.progress.Progress.get_default_columns()
  with rich.progress.Progress(
    *columns,
    rich.progress.TimeElapsedColumn(),
    console=rich.console.Console(stderr=True),
  ) as bar:

    def start(stage: str, total: int) -> Callable[[int], None]:
      task = bar.add_task(stage, total=max(total, 1))
      return lambda done: bar.advance(task, done)

    yield start


def report(manifest: dict[str, Any], out: pathlib.Path) -> None:
  """Prints counts of each split, and a table of the faults of the texts."""
  from dataset_lib import corpus
  from eval_lib.report import print_table

  splits, faults = manifest['splits'], manifest['faults']
  print_table('', [
    {'': name.replace('_', ' ')}
    | {split: f'{counts[name]:,}' for split, counts in splits.items()}
    for name in next(iter(splits.values()))
  ])  # fmt: skip
  if not faults:
    print('no faults in the text')
  else:
    print_table('', [
      {'fault': kind.replace('_', ' '), 'times': f'{entry["count"]:,}',
       'action': entry['action']}
      for kind, entry in faults.items()
    ], 'The first of each:')  # fmt: skip
    for kind, entry in faults.items():
      place = ': '.join(filter(None, entry['first'][0].values()))
      print(f'  {kind.replace("_", " ")}: {place}')
    if (out / corpus.FAULTS_FILE).exists():
      print(f'All files that were left out: {out / corpus.FAULTS_FILE}')
  print(
    f'written: {out} (vocabulary of {manifest["vocab_size"]:,}, rows of at '
    f'most {manifest["max_length"]} tokens)'
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
