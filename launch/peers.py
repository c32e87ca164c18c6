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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from eval_lib.benchmark import Call
from serve_lib.items import padded
from serve_lib.process import keep_freed_memory

# By the name of the library, the packages that it needs.
PACKAGES: Mapping[str, tuple[str, ...]] = {
  'torch': ('torch', 'transformers'),
  'onnx': ('torch', 'transformers', 'onnx', 'onnxruntime'),
}
TITLES = {'torch': 'PyTorch', 'onnx': 'ONNX Runtime'}
CHECKED_ROWS = 4  # rows whose logits are compared between candidates


def usable(wanted: Collection[str], dtype: str = 'float32') -> Iterator[str]:
  """Yields the wanted libraries that can be timed; prints why others cannot."""
  for library, packages in PACKAGES.items():
    if library not in wanted:
      continue
    absent = [p for p in packages if importlib.util.find_spec(p) is None]
    if absent:
      print(
        f'left out: {TITLES[library]}: {", ".join(absent)} not installed: pip '
        "install 'adaptive-computation[peers]'"
      )
    elif library == 'onnx' and dtype != 'float32':
      print(f'left out: {TITLES[library]}: runs float32 here, not {dtype}')
    else:
      yield library


def make(
  library: str,
  weights: str,
  items: Sequence[Mapping[str, Any]],
  batch: int,
  dtype: str = 'float32',
  expected: Float[np.ndarray, 'N C'] | None = None,
) -> Call:
  """Prepares a library of `PACKAGES` for rows with 'tokens' and 'token_types'.

  At batch 1 a call classifies the next row. In larger batches a call classifies
  all rows, sorted by length and padded to the longest of their batch. ONNX
  Runtime computes in float32 only.

  `weights` is a directory in Hugging Face's layout; `expected` are our logits
  of the rows, for columns that compare with them.
  """
  keep_freed_memory()
  classify, device = _load(library, weights, dtype)
  lengths = [len(item['tokens']) for item in items]
  order = np.argsort(lengths, kind='stable') if batch > 1 else range(len(items))
  batches = [
    _padded([items[n] for n in order[start : start + batch]])
    for start in range(0, len(items), batch)
  ]
  logits = np.concatenate([classify(one) for one in batches])[np.argsort(order)]
  columns: dict[str, Any] = {'device': device}
  if expected is not None:
    differs = logits.argmax(1) != expected.argmax(1)
    columns['difference'] = float(np.abs(logits - expected).max())
    columns['differing_rows'] = int(differs.sum())
  turns = itertools.cycle(batches)

  def run() -> Any:
    if batch == 1:
      return classify(next(turns))
    return [classify(one) for one in batches]

  return Call(run, 1 if batch == 1 else len(items), scores(logits), columns)


def scores(logits: Float[np.ndarray, 'B C']) -> Float[np.ndarray, 'R 1']:
  """Returns how far the second class is ahead of the first, of some rows."""
  return np.diff(logits[:CHECKED_ROWS, :2])


def _padded(items: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Returns the inputs of a batch by Hugging Face's names."""
  longest = max(len(item['tokens']) for item in items)
  batch = padded(items, longest, len(items), pad_id=0)
  is_token = np.arange(longest) < batch['length'][:, None]
  return {
    'input_ids': batch['tokens'].astype(np.int64),
    'token_type_ids': batch['token_types'].astype(np.int64),
    'attention_mask': is_token.astype(np.int64),
  }


@functools.lru_cache(maxsize=1)
def _load(library: str, weights: str, dtype: str) -> tuple[Any, str]:
  """Returns (function of the inputs to logits, device)."""
  cores = os.cpu_count() or 1
  if hasattr(os, 'sched_getaffinity'):
    cores = len(os.sched_getaffinity(0))
  wants_gpu = os.environ.get('JAX_PLATFORMS') != 'cpu'
  if library == 'torch':
    return _load_torch(weights, dtype, cores, wants_gpu)
  return _load_onnx(weights, cores, wants_gpu)


def _load_torch(
  weights: str, dtype: str, cores: int, wants_gpu: bool
) -> tuple[Any, str]:
  import torch

  torch.set_num_threads(cores)
  cuda = torch.cuda.is_available() and wants_gpu
  device = torch.device('cuda' if cuda else 'cpu')
  if cuda:  # as jax computes float32 there by default
    torch.set_float32_matmul_precision('high')
  model = _pretrained(weights, dtype=getattr(torch, dtype)).to(device)
  names = _input_names(model)

  @torch.inference_mode()
  def classify(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    tensors = {n: torch.from_numpy(arrays[n]).to(device) for n in names}
    return model(**tensors).logits.float().cpu().numpy()

  return classify, torch.cuda.get_device_name() if cuda else 'cpu'


def _load_onnx(weights: str, cores: int, wants_gpu: bool) -> tuple[Any, str]:
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = cores
  cuda, wanted = 'CUDAExecutionProvider', ['CPUExecutionProvider']
  if cuda in onnxruntime.get_available_providers() and wants_gpu:
    wanted.insert(0, cuda)
  with tempfile.TemporaryDirectory() as folder:
    path = _export(weights, pathlib.Path(folder))
    session = onnxruntime.InferenceSession(path, options, providers=wanted)
  # The optimizer makes some inputs int32.
  dtypes = {
    one.name: np.int32 if 'int32' in one.type else np.int64
    for one in session.get_inputs()
  }

  def classify(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    feeds = {n: arrays[n].astype(dtype) for n, dtype in dtypes.items()}
    return session.run(None, feeds)[0]

  return classify, 'cuda' if session.get_providers()[0] == cuda else 'cpu'


def _export(weights: str, folder: pathlib.Path) -> str:
  """Writes the optimized graph for any batch and length; returns its path."""
  import torch
  from onnxruntime.transformers import optimizer

  # The optimizer fuses attention that is written out.
  model = _pretrained(weights, attn_implementation='eager', return_dict=False)
  names = _input_names(model)
  tokens = torch.ones((2, 8), dtype=torch.int64)
  plain, fused = str(folder / 'plain.onnx'), str(folder / 'fused.onnx')
  axes = {name: {0: 'batch', 1: 'length'} for name in names}
  with warnings.catch_warnings():
    # The newer exporter needs one more package and warns at every call.
    warnings.simplefilter('ignore')
    torch.onnx.export(
      model, (tokens,) * len(names), plain, input_names=names,
      output_names=['logits'], dynamic_axes=axes, opset_version=17,
      dynamo=False,
    )  # fmt: skip
  heads, width = model.config.num_attention_heads, model.config.hidden_size
  optimized = optimizer.optimize_model(
    plain, model_type='bert', num_heads=heads, hidden_size=width, opt_level=1
  )
  optimized.save_model_to_file(fused)
  return fused


def _input_names(model: Any) -> list[str]:
  """Returns the inputs of a model; DistilBERT has no token types."""
  names = ['input_ids', 'attention_mask']
  has_types = getattr(model.config, 'type_vocab_size', 0)
  return [*names, 'token_type_ids'] if has_types else names


def _pretrained(weights: str, **options: Any) -> Any:
  import transformers

  loader = transformers.AutoModelForSequenceClassification
  model = loader.from_pretrained(weights, local_files_only=True, **options)
  return model.eval()
