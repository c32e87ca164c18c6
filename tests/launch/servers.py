"""`launch.serve` as a process of its own."""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import httpx2


class Server(NamedTuple):
  process: subprocess.Popen
  port: int
  log: pathlib.Path

  def get(self, path):
    return httpx2.get(f'http://127.0.0.1:{self.port}{path}')

  def resident(self):
    """Bytes of memory of the process."""
    text = pathlib.Path(f'/proc/{self.process.pid}/status').read_text()
    return 1024 * int(re.search(r'VmRSS:\s+(\d+) kB', text)[1])


def post(value):
  """Returns the bytes of a request to /predict."""
  body = value if isinstance(value, bytes) else json.dumps(value).encode()
  head = f'POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}'
  return head.encode() + b'\r\n\r\n' + body


@contextlib.contextmanager
def ended(process):
  """Kills a process at the end."""
  try:
    yield process
  finally:
    process.kill()
    process.wait()


@contextlib.contextmanager
def served(program, *flags, cwd='.'):
  """Yields a server that is ready, of Python code that begins it."""
  command = [sys.executable, '-c', program, '--port=0', '--log_every=0', *flags]
  command.append('--compilation_cache=none')
  with tempfile.NamedTemporaryFile() as file:
    log = pathlib.Path(file.name)
    process = subprocess.Popen(command, stderr=file, cwd=cwd)
    with ended(process):
      while not (found := re.search(r'listening on .*:(\d+)', log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
      server = Server(process, int(found[1]), log)
      assert server.get('/healthz').status_code == 200
      while server.get('/readyz').status_code == 503:
        time.sleep(0.1)
      yield server
