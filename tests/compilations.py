"""Counts what XLA compiles while a test runs."""

import contextlib

import jax


@contextlib.contextmanager
def compilations():
  """Yields a list with an item for every program that is compiled meanwhile."""
  events = []

  def listen(event, seconds, **_):
    if event == '/jax/core/compile/backend_compile_duration':
      events.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield events
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
