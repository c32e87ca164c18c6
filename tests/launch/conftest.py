"""Fixtures of all commands."""

import pytest

from launch import command_line


@pytest.fixture
def refused(capsys):
  """Runs a command that ends with one line of words; returns the line."""

  def run(main, arguments, words=(), code=command_line.USAGE):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
      main([*arguments])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == code
    assert line.startswith('error: ')
    assert all(word in line for word in words), line
    return line

  return run
