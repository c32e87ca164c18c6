"""Programs that ONNX Runtime runs: the same stages, faster for a single row."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Two at a time would have more threads that spin than there are cores.
_uses_cores = threading.Lock()


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
    with _uses_cores:
      results = self.session.run(None, feed)
    return jax.tree.unflatten(self.structure, results)


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
  options.intra_op_num_threads = cores
  # Threads of a program that is not running take no time from the others.
  options.add_session_config_entry('session.force_spinning_stop', '1')
  options.log_severity_level = 3  # errors
  session = onnxruntime.InferenceSession(
    model.SerializeToString(), options, providers=['CPUExecutionProvider']
  )
  return OnnxProgram(session, jax.tree.structure(result), count)
