"""Our checkpoints run by others: PyTorch with Hugging Face, and ONNX Runtime.

Needs the extra [peers]. Both get what they are best at: scaled dot-product
attention in PyTorch; in ONNX Runtime the graph with fused attention that its
own optimizer for transformers makes.
"""

import importlib.util
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

# By the name of the peer, the packages that it needs.
PACKAGES: Mapping[str, tuple[str, ...]] = {
  'torch': ('torch', 'transformers'),
  'onnx': ('torch', 'transformers', 'onnx', 'onnxruntime'),
}
TITLES = {'torch': 'PyTorch', 'onnx': 'ONNX Runtime'}

Ids = Int[np.ndarray, 'B L']


class Peer(NamedTuple):
  """A classifier that somebody else runs.

  Attributes:
    classify: `(tokens, token_types, mask) -> logits`, NumPy arrays; the mask
      is 1 at valid tokens.
    vocab_size: number of token ids.
    device: where it runs.
    versions: of what it runs on, by package.
  """

  classify: Callable[[Ids, Ids, Ids], Float[np.ndarray, 'B C']]
  vocab_size: int
  device: str
  versions: Mapping[str, str]


def missing(name: str) -> str:
  """Why a peer cannot take part, '' if it can.

  Args:
    name: a key of `PACKAGES`.
  """
  absent = [
    package
    for package in PACKAGES[name]
    if importlib.util.find_spec(package) is None
  ]
  if not absent:
    return ''
  return (
    f'{", ".join(absent)} not installed: pip install '
    "'adaptive-computation[peers]'"
  )


def load(
  name: str, weights: str, *, dtype: str = 'float32', platform: str = ''
) -> Peer:
  """Loads a checkpoint.

  Args:
    name: 'torch' or 'onnx'.
    weights: a directory in Hugging Face's layout.
    dtype: compute dtype; 'onnx' has float32 alone.
    platform: 'cpu' keeps off a GPU.
  """
  if name == 'torch':
    return _load_torch(weights, dtype, platform)
  return _load_onnx(weights, platform)


def cores() -> int:
  """Cores that this process may use; restrict them with `taskset`."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _load_torch(weights: str, dtype: str, platform: str) -> Peer:
  import torch
  import transformers

  torch.set_num_threads(cores())
  cuda = torch.cuda.is_available() and platform != 'cpu'
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

  return Peer(
    classify,
    model.config.vocab_size,
    torch.cuda.get_device_name() if cuda else 'cpu',
    _versions(torch, transformers),
  )


def _load_onnx(weights: str, platform: str) -> Peer:
  import onnxruntime
  import torch
  import transformers

  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = cores()
  wanted = ['CPUExecutionProvider']
  cuda = 'CUDAExecutionProvider'
  if cuda in onnxruntime.get_available_providers() and platform != 'cpu':
    wanted.insert(0, cuda)
  with tempfile.TemporaryDirectory() as folder:
    path, vocab_size = _export(weights, pathlib.Path(folder))
    session = onnxruntime.InferenceSession(path, options, providers=wanted)
  kinds = {one.name: one.type for one in session.get_inputs()}

  def classify(tokens: Ids, token_types: Ids, mask: Ids) -> Any:
    arrays = {'tokens': tokens, 'token_types': token_types, 'mask': mask}
    feeds = {
      key: arrays[key].astype(np.int32 if 'int32' in kind else np.int64)
      for key, kind in kinds.items()
    }
    return session.run(None, feeds)[0]

  return Peer(
    classify,
    vocab_size,
    'cuda' if session.get_providers()[0] == cuda else 'cpu',
    _versions(onnxruntime, torch, transformers),
  )


def _export(weights: str, folder: pathlib.Path) -> tuple[str, int]:
  """Path of the optimized graph, for any batch and length; the vocabulary."""
  import torch
  from onnxruntime.transformers import optimizer

  # Of attention written out the optimizer knows how to make one operation.
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
    # The newer exporter needs one more package and says so at every call.
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
  return fused, config.vocab_size


def _pretrained(weights: str, **options: Any) -> Any:
  import transformers

  loader = transformers.AutoModelForSequenceClassification
  model = loader.from_pretrained(weights, local_files_only=True, **options)
  return model.eval()


def _versions(*modules: Any) -> dict[str, str]:
  return {module.__name__: module.__version__ for module in modules}
