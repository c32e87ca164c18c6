"""Private directories, and freed memory that stays with the process."""

import os
import stat
import subprocess
import sys

import pytest

from serve_lib.process import private_directory

PROGRAM = """
import resource, sys
import numpy as np
from serve_lib.process import keep_freed_memory
if sys.argv[1] == 'keep' and not keep_freed_memory():
  print('unknown'); sys.exit()
def faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**23)
before = faults()
for _ in range(4):
  np.ones(2**23)
print(faults() - before)
"""


def faults(how):
  command = [sys.executable, '-c', PROGRAM, how]
  return subprocess.check_output(command, text=True).strip()


def test_pages_are_not_asked_for_again():
  kept = faults('keep')
  if kept == 'unknown':
    pytest.skip('the C library has no mallopt')
  # 64 MB are 16,384 pages of 4 kB, or 32 of 2 MB.
  assert int(kept) < 8 <= int(faults('give back'))


def test_it_is_made_for_its_owner_alone_and_taken_again(tmp_path):
  path = str(tmp_path / 'cache')
  assert private_directory(path) == path
  assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
  assert private_directory(path) == path


@pytest.mark.parametrize('mode', [0o770, 0o702, 0o777])
def test_a_directory_others_can_write_is_refused(tmp_path, mode):
  tmp_path.joinpath('cache').mkdir()
  tmp_path.joinpath('cache').chmod(mode)
  assert private_directory(str(tmp_path / 'cache')) == ''


def test_a_link_a_file_and_an_impossible_place_are_refused(tmp_path):
  tmp_path.joinpath('real').mkdir(0o700)
  tmp_path.joinpath('link').symlink_to(tmp_path / 'real')
  tmp_path.joinpath('file').touch()
  for name in ('link', 'file', 'file/cache'):
    assert private_directory(str(tmp_path / name)) == ''


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
  path = str(tmp_path / 'cache')
  assert private_directory(path) == path
  monkeypatch.setattr(os, 'getuid', lambda: os.geteuid() + 1)
  assert private_directory(path) == ''


def test_a_read_only_directory_is_refused(tmp_path, monkeypatch):
  """As on a read-only mount; root may write wherever permissions forbid it."""

  def refuse(*_, **__):
    raise OSError(30, 'Read-only file system')

  monkeypatch.setattr(os, 'mkdir', refuse)
  assert private_directory(str(tmp_path / 'cache')) == ''
  monkeypatch.undo()
  assert private_directory(str(tmp_path / 'cache')) != ''
  monkeypatch.setattr(os, 'access', lambda *_: False)
  assert private_directory(str(tmp_path / 'cache')) == ''
