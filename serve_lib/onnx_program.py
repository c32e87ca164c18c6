"""Programs that ONNX Runtime runs: the same stages, faster for a single row."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class OnnxProgram:
  """A compiled function of (variables, carry), with variables as constants."""

  session: Any
  structure: Any  # of the result
  bytes: int  # of the variables

  def __call__(self, variables: Any, carry: Any) -> Any:
    """Runs the program; returns NumPy arrays."""
    leaves = enumerate(jax.tree.leaves(carry))
    feed = {f'i{number}': np.asarray(leaf) for number, leaf in leaves}
    return jax.tree.unflatten(self.structure, self.session.run(None, feed))


def build(
  function: Callable[[Any, Any], Any], variables: Any, carry: Any, cores: int
) -> OnnxProgram | None:
  """Returns a program for carries of the shapes of `carry`.

  Returns None if ONNX Runtime is not installed, or if a primitive has no
  translation.
  """
  try:
    import onnxruntime

    from serve_lib import onnx_graph
  except ImportError:
    return None
  arrays = jax.tree.map(np.asarray, variables)
  count = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
  try:
    model, result = onnx_graph.translate(lambda x: function(arrays, x), [carry])
  except onnx_graph.NotTranslatedError:
    return None
  options = onnxruntime.SessionOptions()
  options.use_per_session_threads = not _share_threads(cores)
  options.intra_op_num_threads = cores
  options.log_severity_level = 3  # errors
  session = onnxruntime.InferenceSession(
    model.SerializeToString(), options, providers=['CPUExecutionProvider']
  )
  return OnnxProgram(session, jax.tree.structure(result), count)


@functools.cache
def _share_threads(cores: int) -> bool:
  """Lets all programs use one pool of threads; else idle ones would spin."""
  import onnxruntime

  if not hasattr(onnxruntime, 'set_global_thread_pool_sizes'):
    return False
  with contextlib.suppress(Exception):  # of its own, if they were made before
    onnxruntime.set_global_thread_pool_sizes(cores, 1)
  return True
