"""Our checkpoints run by PyTorch with Hugging Face and by ONNX Runtime.

Needs the extra [peers]. Both get their best form: scaled dot-product attention
in PyTorch; in ONNX Runtime the graph with fused attention that its own
optimizer for transformers makes.
"""

import functools
import importlib.util
import itertools
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from eval_lib.hosts import Call, Case
from serve_lib.process import keep_freed_memory

# By the name of the library, the packages that it needs.
PACKAGES: Mapping[str, tuple[str, ...]] = {
  'torch': ('torch', 'transformers'),
  'onnx': ('torch', 'transformers', 'onnx', 'onnxruntime'),
}
TITLES = {'torch': 'PyTorch', 'onnx': 'ONNX Runtime'}
CHECKED_ROWS = 4  # rows whose logits are compared between candidates
VOCAB_SIZE = 30522

Ids = Int[np.ndarray, 'B L']
# (tokens, token types, mask, 1 at valid tokens) -> logits `[B, C]`.
Classifier = Callable[[Ids, Ids, Ids], Float[np.ndarray, 'B C']]


class Peer(NamedTuple):
  """A classifier that another library runs, with its device."""

  classify: Classifier
  device: str


def missing(library: str, dtype: str = 'float32') -> str:
  """Returns why a library cannot be timed; '' if it can."""
  absent = [
    package
    for package in PACKAGES[library]
    if importlib.util.find_spec(package) is None
  ]
  if absent:
    names = ', '.join(absent)
    return f"{names} not installed: pip install 'adaptive-computation[peers]'"
  if library == 'onnx' and dtype != 'float32':
    return f'runs float32 here, not {dtype}'
  return ''


def make_classifier(
  case: Case, library: str, weights: str, length: int, dtype: str
) -> Call:
  """Prepares a library for batches of random full rows."""
  keep_freed_memory()
  peer = load(library, weights, dtype)
  tokens = token_rows(case['batch'], length)
  types, mask = np.zeros_like(tokens), np.ones_like(tokens)
  run = functools.partial(peer.classify, tokens, types, mask)
  return Call(run, len(tokens), scores(run()), {'device': peer.device})


def make_rows(
  case: Case,
  library: str,
  weights: str,
  items: Sequence[Mapping[str, Any]],
  expected: Float[np.ndarray, 'N C'],
) -> Call:
  """Prepares a library for the rows of a task.

  At batch 1 a call classifies the next row. In larger batches rows are sorted
  by length and padded to the longest of the batch.

  Args:
    case: with `batch`.
    library: a key of `PACKAGES`.
    weights: see `load`.
    items: with 'tokens' and 'token_types'.
    expected: our logits of the rows.
  """
  keep_freed_memory()
  peer = load(library, weights)
  alone = [_padded([item]) for item in items]
  logits = np.concatenate([peer.classify(*arrays) for arrays in alone])
  columns = {
    'difference': float(np.abs(logits - expected).max()),
    'differing_rows': int((logits.argmax(1) != expected.argmax(1)).sum()),
  }
  if case['batch'] == 1:
    turns = itertools.cycle(alone)
    return Call(lambda: peer.classify(*next(turns)), columns=columns)
  ordered = sorted(items, key=lambda item: len(item['tokens']))
  batches = [
    _padded(ordered[start : start + case['batch']])
    for start in range(0, len(items), case['batch'])
  ]
  return Call(
    lambda: [peer.classify(*arrays) for arrays in batches],
    len(items),
    columns=columns,
  )


def _padded(items: Sequence[Mapping[str, Any]]) -> tuple[Ids, Ids, Ids]:
  shape = len(items), max(len(item['tokens']) for item in items)
  arrays = [np.zeros(shape, np.int64) for _ in range(3)]
  for row, item in enumerate(items):
    length = len(item['tokens'])
    arrays[0][row, :length] = item['tokens']
    arrays[1][row, :length] = item['token_types']
    arrays[2][row, :length] = 1
  return arrays[0], arrays[1], arrays[2]


def token_rows(count: int, length: int) -> Ids:
  """Returns random token ids; the first rows are the same for any count."""
  rng = np.random.default_rng(1)
  return rng.integers(VOCAB_SIZE, size=(count, length), dtype=np.int32)


def scores(logits: Float[np.ndarray, 'B C']) -> Float[np.ndarray, ' R']:
  """Returns how far the second class is ahead of the first, of some rows."""
  first = logits[:CHECKED_ROWS]
  return first[:, 1] - first[:, 0]


@functools.lru_cache(maxsize=1)
def load(library: str, weights: str, dtype: str = 'float32') -> Peer:
  """Loads a directory in Hugging Face's layout; 'onnx' has float32 alone."""
  load_one = _load_torch if library == 'torch' else _load_onnx
  return load_one(weights, dtype)


def _cores() -> int:
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _wants_gpu() -> bool:
  return os.environ.get('JAX_PLATFORMS') != 'cpu'


def _load_torch(weights: str, dtype: str) -> Peer:
  import torch

  torch.set_num_threads(_cores())
  cuda = torch.cuda.is_available() and _wants_gpu()
  if cuda:
    # As jax computes float32 there by default.
    torch.set_float32_matmul_precision('high')
  device = torch.device('cuda' if cuda else 'cpu')
  model = _pretrained(weights, dtype=getattr(torch, dtype)).to(device)
  # DistilBERT has no token types.
  has_types = bool(getattr(model.config, 'type_vocab_size', 0))

  @torch.inference_mode()
  def classify(tokens: Ids, token_types: Ids, mask: Ids) -> Any:
    inputs = {'input_ids': tokens, 'attention_mask': mask}
    if has_types:
      inputs['token_type_ids'] = token_types
    tensors = {
      key: torch.from_numpy(array.astype(np.int64)).to(device)
      for key, array in inputs.items()
    }
    return model(**tensors).logits.float().cpu().numpy()

  return Peer(classify, torch.cuda.get_device_name() if cuda else 'cpu')


def _load_onnx(weights: str, dtype: str) -> Peer:
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = _cores()
  wanted = ['CPUExecutionProvider']
  cuda = 'CUDAExecutionProvider'
  if cuda in onnxruntime.get_available_providers() and _wants_gpu():
    wanted.insert(0, cuda)
  with tempfile.TemporaryDirectory() as folder:
    path = _export(weights, pathlib.Path(folder))
    session = onnxruntime.InferenceSession(path, options, providers=wanted)
  kinds = {one.name: one.type for one in session.get_inputs()}

  def classify(tokens: Ids, token_types: Ids, mask: Ids) -> Any:
    arrays = {'tokens': tokens, 'token_types': token_types, 'mask': mask}
    feeds = {
      key: arrays[key].astype(np.int32 if 'int32' in kind else np.int64)
      for key, kind in kinds.items()
    }
    return session.run(None, feeds)[0]

  on_gpu = session.get_providers()[0] == cuda
  return Peer(classify, 'cuda' if on_gpu else 'cpu')


def _export(weights: str, folder: pathlib.Path) -> str:
  """Writes the optimized graph for any batch and length; returns its path."""
  import torch
  from onnxruntime.transformers import optimizer

  # The optimizer fuses attention that is written out.
  model = _pretrained(weights, attn_implementation='eager')
  has_types = bool(getattr(model.config, 'type_vocab_size', 0))

  class Logits(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.model = model

    def forward(self, tokens, mask, *types):
      options = {'token_type_ids': types[0]} if types else {}
      return self.model(input_ids=tokens, attention_mask=mask, **options).logits

  names = ['tokens', 'mask', 'token_types'][: 3 if has_types else 2]
  tokens = torch.ones((2, 8), dtype=torch.int64)
  plain, fused = str(folder / 'plain.onnx'), str(folder / 'fused.onnx')
  with warnings.catch_warnings():
    # The newer exporter needs one more package and warns at every call.
    warnings.simplefilter('ignore')
    torch.onnx.export(
      Logits().eval(),
      (tokens,) * len(names),
      plain,
      input_names=names,
      output_names=['logits'],
      dynamic_axes={name: {0: 'batch', 1: 'length'} for name in names},
      opset_version=17,
      dynamo=False,
    )
  config = model.config
  optimized = optimizer.optimize_model(
    plain,
    model_type='bert',
    num_heads=config.num_attention_heads,
    hidden_size=config.hidden_size,
    opt_level=1,
  )
  optimized.save_model_to_file(fused)
  return fused


def _pretrained(weights: str, **options: Any) -> Any:
  import transformers

  loader = transformers.AutoModelForSequenceClassification
  model = loader.from_pretrained(weights, local_files_only=True, **options)
  return model.eval()
