"""Answers HTTP requests with a trained model.

  python -m launch.serve --workdir=/tmp/sst2 --port=8000
  curl -d '{"text": "a gripping film"}' localhost:8000/predict

The server listens at once and answers 503 until the model is compiled. SIGTERM
and Ctrl-C end it after the answers to all accepted requests. docs/serving.md
lists requests, answers and metrics.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

from annotated_types import Interval

from core.errors import ConfigError
from core.fields import flag
from launch import command_line, serving
from launch.command_line import Count, Positive

SWITCH = 1e-3  # seconds that a thread may hold up the event loop; Python's 5e-3
MAX_FILES = 2**14  # open at a time
GRACE = 2.0  # seconds that threads have to end, after the last answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(serving.Flags):
  """Flags of the server."""

  host: str = flag('0.0.0.0: all networks', '127.0.0.1', 'ADDRESS')
  port: Annotated[int, Interval(ge=0, le=65535)] = flag('0: a free one', 8000)
  max_waiting: Count = flag('rows beyond max_pending', 1024, 'ROWS')
  max_body_bytes: Positive = flag('of a request', 2**22, 'BYTES')
  max_pixels: Positive = flag(
    'of the images of a request, and decoded at a time', 2**27, 'PIXELS'
  )
  max_seconds: Annotated[float, Interval(gt=0.0, le=3600.0)] = flag(
    'from a request to its answer', 30.0, 'SECONDS'
  )
  keep_alive: Annotated[float, Interval(gt=0.0, le=86400.0)] = flag(
    'from an answer to the next request; longer than a proxy keeps connections',
    75.0,
    'SECONDS',
  )


def run(flags: Flags) -> None:
  """Listens, loads the model, compiles it, serves until a signal."""
  try:
    import uvicorn

    from serve_lib import connection, http
  except ImportError as error:
    missing = "the server needs the extra [serve]: pip install -e '.[serve]'"
    raise command_line.UsageError(missing) from error
  from serve_lib.process import own_process

  own_process()
  sys.setswitchinterval(SWITCH)
  with listen(flags.host, flags.port) as listener:
    engine = serving.load_engine(flags)
    path = os.path.abspath(flags.bundle or flags.workdir)
    service = http.Service(engine, flags, os.path.basename(path))
    protocol: Any = functools.partial(
      connection.Connection, flags.max_seconds, most_connections(), {}
    )
    server = uvicorn.Server(uvicorn.Config(
      service.app, http=protocol, ws='none', lifespan='off', log_level='error',
      log_config=None, access_log=False, server_header=False,
      timeout_keep_alive=flags.keep_alive,  # type: ignore[arg-type]
      # Every request is answered by then; slow readers are cut off.
      timeout_graceful_shutdown=math.ceil(flags.max_seconds) + 1,
    ))  # fmt: skip

    def end_warm_up(future: concurrent.futures.Future) -> None:
      if future.exception():
        server.should_exit = True
      else:
        gc.freeze()  # a full collection of what is loaded takes 0.1 s
        service.is_ready = True
        serving.log('ready: the programs are compiled')

    # For the signal that uvicorn repeats at the end.
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, server.handle_exit)
    thread = concurrent.futures.ThreadPoolExecutor(1)
    warm_up = thread.submit(serving.warm_up, engine, flags)
    warm_up.add_done_callback(end_warm_up)
    serving.log('listening on {}:{}'.format(*listener.getsockname()[:2]))
    with serving.statistics(engine, flags.log_every):
      server.run(sockets=[listener])
      if not warm_up.done():
        # Nothing was accepted, and the compiler cannot be stopped.
        os._exit(command_line.OK)
      warm_up.result()
      has_ended = ends_within(GRACE, service.close)
      has_ended &= ends_within(GRACE, engine.close)
    if not has_ended:
      # All requests are answered, and a decoder cannot be stopped.
      os._exit(command_line.OK)


def most_connections() -> int:
  """Raises this process's limit of open files; returns half of it."""
  limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  if 0 <= limit < MAX_FILES:  # negative: without a limit
    with contextlib.suppress(OSError, ValueError):  # the system has one, too
      wanted = MAX_FILES if most < 0 else min(most, MAX_FILES)
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return (MAX_FILES if limit < 0 else limit) // 2


def ends_within(seconds: float, function: Callable[[], None]) -> bool:
  """Calls a function in a thread; returns whether it ends in time."""
  thread = threading.Thread(target=function, daemon=True)
  thread.start()
  thread.join(seconds)
  return not thread.is_alive()


def listen(host: str, port: int) -> socket.socket:
  """Returns a listening socket; raises ConfigError if the address is taken."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  try:
    host.encode('idna')
    return socket.create_server((host, port), family=family, backlog=2048)
  except (OSError, UnicodeError) as error:
    expected = f'a free address of this machine ({error})'
    raise ConfigError('--port', f'{host}:{port}', expected) from error


main = command_line.Command('serve', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
