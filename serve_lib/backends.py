"""Chooses what runs the stages of a chain: XLA or ONNX Runtime."""

from typing import Any, Literal

import jax

from core.errors import ConfigError
from serve_lib.chain import Chain, Grid, Resizable
from serve_lib.programs import Programs

Backend = Literal['auto', 'xla', 'onnxruntime']


def build(
  chain: Chain, grid: Grid, backend: Backend, *, lazy: bool, **options: Any
) -> Any:
  """Returns `Programs`, or `OnnxStages`; see `Engine` for the arguments.

  On a CPU 'auto' is ONNX Runtime where it is installed and can run the chain.
  Raises ConfigError if it cannot, and has to.
  """
  if backend != 'xla':
    stages, why = _onnx_stages(chain, grid, lazy)
    if stages:
      return stages
  if backend == 'onnxruntime':
    expected = f"'auto' or 'xla', as {why}"
    raise ConfigError('engine.backend', backend, expected)
  return Programs(chain, grid, lazy=lazy, **options)


def _onnx_stages(chain: Chain, grid: Grid, lazy: bool) -> tuple[Any, str]:
  """Returns the chain in ONNX Runtime, or None and the reason."""
  if not isinstance(chain, Resizable):
    return None, 'the stages of the model are of fixed lengths'
  if jax.default_backend() != 'cpu':
    return None, 'the model is not on a CPU'
  try:
    from serve_lib import onnx_graph, onnx_stages
  except ImportError:
    return None, "onnx and onnxruntime are missing (pip install '.[serve]')"
  try:
    return onnx_stages.OnnxStages(chain, grid, lazy), ''
  except onnx_graph.NotTranslatedError as error:
    return None, f'there is no translation for {error}'
