"""Flags of the commands that read a run: which one, and which checkpoint."""

import os

from launch import command_line, flag_types


def add_arguments(parser: command_line.Parser) -> None:
  """Adds --workdir and --step."""
  add = parser.add_argument
  add('--workdir', required=True, metavar='DIRECTORY',
      help='directory of the run')  # fmt: skip
  add('--step', type=flag_types.checkpoint, default='latest', metavar='STEP',
      help='latest (default), best, or a number')  # fmt: skip


def check_texts(workdir: str, why: str = '') -> None:
  """Raises `UsageError` unless a run is one on texts, with its tokenizer.

  Args:
    workdir: of the run.
    why: what a run on token ids cannot do, ends the message.
  """
  from train_lib.run_directory import TOKENIZER

  if not os.path.isfile(os.path.join(workdir, TOKENIZER)):
    raise command_line.UsageError(
      f'--workdir: expected a run with its {TOKENIZER}, there is none in '
      f'{workdir!r}{why and "; " + why}'
    )
