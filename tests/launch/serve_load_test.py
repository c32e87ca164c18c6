"""Attacks on `launch.serve`: what a well-behaved client beside them waits.

  python -m tests.launch.serve_load_test [CHECKOUT]

prints the numbers of docs/reliability.md for a checkout, by default this one.
"""

import base64
import concurrent.futures
import contextlib
import http.client
import json
import multiprocessing
import pathlib
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

import cv2
import numpy as np
import pytest

from eval_lib import report
from tests.launch import servers

SECONDS = 6.0  # of each attack
LATER = 0.5  # seconds; without turns it is 30
MEMORY = 3e8  # bytes that stay; without limits 3.2e9
IDLE = 3.0
PAUSE = 1.5  # seconds until the server has returned memory
LONG, LONGEST = '.' * 100_000, 64
# The command with an untrained model of texts or of photos.
PROGRAM = """
import sys
import jax.numpy as jnp
from dataset_lib import tokenizer
from benchmarks.eat_speed import random_params
from eat.model import EatClassifier
from eat.chain import EatChain
from launch import serve, serving
from serve_lib import items
from serve_lib.decisions import ClassifierPolicy, OneStage
from serve_lib.engine import Engine
from eat.policy import ExitPolicy

def build(flags):
  if flags.workdir == 'photos':
    reader = items.ImageReader(1, 64, 73)
    weights = {'w': jnp.ones((12288, 2)) * 1e-5}
    def apply(v, batch):
      return batch['image'].reshape(-1, 12288).astype('float32') @ v['w']
    chain, sizes = OneStage(apply, weights, reader), (1,)
    policy = ClassifierPolicy(chain, reader, ('a', 'b'), sizes)
  else:
    model = EatClassifier(
      num_classes=2, width=64, depth=4, mlp_dim=256, num_heads=2,
      vocab_size=200, max_positions=64, prune_layers=(), prune_ratios=(),
      exit_layers=(2,), window=0)
    words, sizes = tokenizer.load(flags.workdir), (64,)
    reader = items.TextReader(words, 64, vocab_size=200)
    chain = EatChain(model, {'params': random_params(model)}, reader)
    policy = ExitPolicy(chain, reader, ('a', 'b'), sizes)
  return Engine(chain, policy, sizes, max_pending=flags.max_pending)

serving.load_engine = build
sys.exit(serve.main(sys.argv[1:]))
"""


def photo(side):
  """A PNG of one colour in base64, small for its pixels."""
  image = np.zeros((side, side), np.uint8)
  return base64.b64encode(cv2.imencode('.png', image)[1].tobytes()).decode()


def batch(items):
  return json.dumps({'items': items}).encode()


def request(port, path, body):
  """Sends a request; returns the status, 0 if the connection fails."""
  with contextlib.suppress(OSError, http.client.HTTPException):
    one = http.client.HTTPConnection('127.0.0.1', port, timeout=60.0)
    with contextlib.closing(one):
      one.request('POST' if body else 'GET', path, body)
      with one.getresponse() as answer:
        return answer.status
  return 0


def post(port, body):
  request(port, '/predict', body)


def reset(port, sent, seconds):
  """Sends bytes, waits, and resets the connection."""
  with (
    contextlib.suppress(OSError),
    socket.create_connection(('127.0.0.1', port)) as one,
  ):
    one.sendall(sent)
    time.sleep(seconds)
    at_once = struct.pack('ii', 1, 0)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)


def leave(port, body):
  reset(port, servers.post(body), 0.03)


def slow_header(port, _):
  reset(port, b'POST /predict HTTP/1.1\r\n', SECONDS)


WRONG = [{'tokens': [2, 5, 3], 'token_types': [0, 7, 0]}] * 64
LISTS = b'[' + b'[],' * 1_390_000 + b'[]]'
OBJECTS = b'{"items":[' + b'{},' * 1_390_000 + b'{}]}'
# Name: model, clients, what each does again and again, its body.
ATTACKS = {
  '20 texts of 100,000 characters': ('texts', 6, post, batch([LONG] * 20)),
  '256 texts': ('texts', 6, post, batch(['a long film ' * 20] * 256)),
  '64 illegal token types': ('texts', 8, post, batch(WRONG)),
  '64 texts, then the client leaves': (
    'texts', 2, leave, batch(['a long film ' * 20] * 64),
  ),
  '4 MiB of empty lists': ('texts', 4, post, LISTS),
  '4 MiB of empty objects': ('texts', 4, post, OBJECTS),
  'headers without end': ('texts', 50, slow_header, b''),
  '10 photos of 88 megapixels': ('photos', 12, post, 10),
  '1 photo of 88 megapixels': ('photos', 4, post, 1),
}  # fmt: skip


@contextlib.contextmanager
def attackable(kind, checkout):
  """Yields a server of texts or of photos."""
  with tempfile.TemporaryDirectory() as folder:
    words = '[PAD] [UNK] [CLS] [SEP] [MASK] . a film long gripping'
    path = pathlib.Path(folder) / 'vocab.txt'
    path.write_text('\n'.join(words.split()))
    workdir = folder if kind == 'texts' else kind
    flags = f'--workdir={workdir}'
    with servers.served(PROGRAM, flags, cwd=checkout) as server:
      yield server


def ask(port, seconds, path, body):
  """Sends requests, one after the other; returns latencies and statuses."""
  end, found = time.monotonic() + seconds, []
  while (start := time.monotonic()) < end:
    status = request(port, path, body)
    found.append((time.monotonic() - start, status))
    time.sleep(0.02)
  return found


def beside(port, seconds, body):
  """Returns seconds and statuses of small requests, and of /healthz."""
  sent = {'/predict': body, '/healthz': ''}
  own = multiprocessing.get_context('spawn')  # not beside attacking threads
  with concurrent.futures.ProcessPoolExecutor(2, own) as clients:
    jobs = {
      path: clients.submit(ask, port, seconds, path, one)
      for path, one in sent.items()
    }
    return {path: job.result() for path, job in jobs.items()}


def attacked(name, checkout='.'):
  """Returns what a small request and /healthz take, idle and attacked."""
  kind, clients, act, body = ATTACKS[name]
  small, done = '{"text": "a gripping film"}', threading.Event()
  if kind == 'photos':
    small = json.dumps({'image': photo(200)})
    body = batch([{'image': photo(9400)}] * body)
  with attackable(kind, checkout) as server:
    port = server.port
    beside(port, 1.0, small)
    idle, before = beside(port, IDLE, small), server.resident()
    endless = [sys.executable, '-c', 'while True: pass']  # as attackers are
    with servers.ended(subprocess.Popen(endless)):
      busy = beside(port, IDLE, small)

    def attack():
      while not done.is_set():
        act(port, body)

    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
      for _ in range(clients):
        threads.submit(attack)
      time.sleep(0.5)
      found = beside(port, SECONDS, small)
      done.set()
    time.sleep(PAUSE)
    after = server.resident()
  answered = np.mean([status == 200 for _, status in found['/predict']])
  times = {
    'idle': idle['/predict'], 'busy': busy['/predict'],
    'p95': found['/predict'], 'healthz': found['/healthz'],
  }  # fmt: skip
  p95 = {
    key: float(np.percentile([seconds for seconds, _ in measured], 95))
    for key, measured in times.items()
  }
  return p95 | {'answered': answered, 'memory': after - before}


def main(checkout='.'):
  rows = [
    {'attack': f'{clients} x {name}', **attacked(name, checkout)}
    for name, (_, clients, *_) in ATTACKS.items()
  ]
  report.print_table('p95 in s, memory in bytes', rows, columns=[*rows[0]])


@pytest.mark.nightly
@pytest.mark.parametrize('name', ATTACKS)
def test_a_well_behaved_client_is_served_under_attack(name):
  row = attacked(name)
  assert row['answered'] == 1.0
  assert row['healthz'] < 0.1
  # A batch of the others may be running, and the attackers use the cores too.
  assert row['p95'] < 2 * row['idle'] + LATER
  assert row['memory'] < MEMORY


if __name__ == '__main__':
  main(*sys.argv[1:])
