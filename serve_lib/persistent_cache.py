"""Compiled programs that outlive the process."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_OPTIONS = {
  # Copies between stages compile in milliseconds; a restart needs them too.
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}


@contextlib.contextmanager
def persistent_cache(directory: str) -> Iterator[None]:
  """Compiles through a cache on disk within the context.

  JAX's settings are process-wide; they are put back at the end. Programs are
  loaded from the directory and run, so whoever may write there may run code
  here: keep it as private as the program itself.

  Args:
    directory: where the programs are kept; '' for no cache.
  """
  if not directory:
    yield
    return
  options = {'jax_compilation_cache_dir': directory, **_OPTIONS}
  before = {name: getattr(jax.config, name) for name in options}
  _configure(options)
  try:
    yield
  finally:
    _configure(before)


def _configure(options: Mapping[str, Any]) -> None:
  for name, value in options.items():
    jax.config.update(name, value)
  # JAX opens its cache once in a process; this makes it look again.
  compilation_cache.reset_cache()
