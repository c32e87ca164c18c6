"""Our checkpoints run by PyTorch and by ONNX Runtime, the extra [peers].

Both get their best form: scaled dot-product attention in PyTorch; in ONNX
Runtime the graph with fused attention that its own optimizer makes.
"""

import functools
import importlib.util
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from benchmarks.timing import Call
from core import machine
from serve_lib.items import TOKEN_IDS

# By the name of the library, the packages that it needs.
PACKAGES: Mapping[str, tuple[str, ...]] = {
  'torch': ('torch', 'transformers'),
  'onnx': ('torch', 'transformers', 'onnx', 'onnxruntime'),
}
TITLES = {'torch': 'PyTorch', 'onnx': 'ONNX Runtime'}
INPUTS = ('input_ids', 'attention_mask', 'token_type_ids')
CHECKED_ROWS = 4  # rows whose logits are compared between candidates


def usable(wanted: Collection[str], dtype: str = 'float32') -> Iterator[str]:
  """Yields the wanted libraries that can be timed; prints why others cannot."""
  for library in [name for name in PACKAGES if name in wanted]:
    packages, title = PACKAGES[library], TITLES[library]
    absent = [p for p in packages if importlib.util.find_spec(p) is None]
    if absent:
      install = "pip install -e '.[peers]' -c constraints.txt"
      why = f'{", ".join(absent)} not installed: {install}'
      print(f'left out as a peer: {title}: {why}')
    elif library == 'onnx' and dtype != 'float32':
      print(f'left out as a peer: {title}: runs float32 here, not {dtype}')
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

  At batch 1 a call classifies the next row. Otherwise it classifies all rows,
  sorted by length and padded to the longest of their batch. `weights` is a
  directory in Hugging Face's layout, `expected` are our logits to compare with.
  """
  classify, device = _load(library, weights, dtype)
  lengths = [len(item['tokens']) for item in items]
  order = np.argsort(lengths, kind='stable') if batch > 1 else range(len(items))
  batches = [
    _padded([items[n] for n in order[start : start + batch]])
    for start in range(0, len(items), batch)
  ]
  logits = np.concatenate([classify(x) for x in batches])[np.argsort(order)]
  columns: dict[str, Any] = {'device': device}
  if expected is not None:
    columns['difference'] = float(np.abs(logits - expected).max())
  calls = [[x] for x in batches] if batch == 1 else [batches]
  turns, rows = itertools.cycle(calls), len(items) // len(calls)

  def run() -> Any:
    return [classify(x) for x in next(turns)]

  return Call(run, rows, scores(logits), columns)


def classifier(library: str, weights: str) -> Callable[[Any], np.ndarray]:
  """Returns a function of the items of a batch, see `make`, to their logits."""
  classify, _ = _load(library, weights, 'float32')
  return lambda items: classify(_padded(items))


def scores(logits: Float[np.ndarray, 'B C']) -> Float[np.ndarray, 'R 1']:
  """Returns the logit difference class 1 - class 0 of the first rows."""
  return np.diff(logits[:CHECKED_ROWS, :2])


def _padded(items: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Returns the inputs of a batch by Hugging Face's names."""
  longest = max(len(item['tokens']) for item in items)
  batch = TOKEN_IDS.pad(items, longest, len(items))
  is_token = np.arange(longest) < batch['length'][:, None]
  arrays = batch['tokens'], is_token, batch['token_types']
  return {n: a.astype(np.int64) for n, a in zip(INPUTS, arrays, strict=True)}


@functools.lru_cache(maxsize=1)
def _load(library: str, weights: str, dtype: str) -> tuple[Any, str]:
  """Returns (function of the inputs to logits, device)."""
  import torch
  import transformers

  # The optimizer of ONNX Runtime fuses only un-fused (eager) attention.
  eager: Any = {'attn_implementation': 'eager'}
  model = transformers.AutoModelForSequenceClassification.from_pretrained(
    weights, local_files_only=True, dtype=getattr(torch, dtype),
    **(eager if library == 'onnx' else {}),
  ).eval()  # fmt: skip
  # DistilBERT has no types.
  count = 3 if model.config.to_dict().get('type_vocab_size') else 2
  names = INPUTS[:count]
  cores = machine.cores()
  wants_gpu = os.environ.get('JAX_PLATFORMS') != 'cpu'
  if library == 'onnx':
    return _optimized(model, names, cores, wants_gpu)
  torch.set_num_threads(cores)
  cuda = torch.cuda.is_available() and wants_gpu
  if cuda:  # as jax computes float32 there by default
    torch.set_float32_matmul_precision('high')
    model = model.cuda()

  @torch.inference_mode()
  def classify(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    tensors = {n: torch.from_numpy(arrays[n]).to(model.device) for n in names}
    return model(**tensors).logits.float().cpu().numpy()

  return classify, torch.cuda.get_device_name() if cuda else 'cpu'


def _optimized(
  model: Any, names: Sequence[str], cores: int, wants_gpu: bool
) -> tuple[Any, str]:
  import onnxruntime
  import torch
  from onnxruntime.transformers import optimizer

  options, cuda = onnxruntime.SessionOptions(), 'CUDAExecutionProvider'
  options.intra_op_num_threads = cores
  tokens = torch.ones((2, 8), dtype=torch.int64)
  axes = {name: {0: 'batch', 1: 'length'} for name in names}
  with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    # The newer exporter needs one more package and warns at every call.
    warnings.simplefilter('ignore')
    torch.onnx.export(
      model, (tokens,) * len(names), f'{folder}/plain.onnx',
      input_names=[*names], output_names=['logits'], dynamic_axes=axes,
      opset_version=17, dynamo=False,
    )  # fmt: skip
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    optimizer.optimize_model(
      f'{folder}/plain.onnx', num_heads=heads, hidden_size=width
    ).save_model_to_file(f'{folder}/fused.onnx')
    # A provider that is not available is left out with a warning.
    session = onnxruntime.InferenceSession(
      f'{folder}/fused.onnx', options,
      providers=[cuda] * wants_gpu + ['CPUExecutionProvider'],
    )  # fmt: skip
  # The optimizer makes some inputs int32.
  dtypes = {
    entry.name: np.int32 if 'int32' in entry.type else np.int64
    for entry in session.get_inputs()
  }

  def classify(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    feeds = {n: arrays[n].astype(dtype) for n, dtype in dtypes.items()}
    return session.run(None, feeds)[0]

  return classify, 'cuda' if session.get_providers()[0] == cuda else 'cpu'
