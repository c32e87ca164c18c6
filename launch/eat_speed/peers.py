"""PyTorch with Hugging Face, and ONNX Runtime, as contenders.

Needs the extra [peers]. Both get what they are best at: scaled dot-product
attention in PyTorch; in ONNX Runtime the graph with fused attention that its
own optimizer for transformers makes.
"""

import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from launch.eat_speed import worker


def build_torch(specification: Mapping[str, Any]) -> worker.Built:
  """Hugging Face's model in `torch.inference_mode`, on a GPU if there is one.

  Args:
    specification: see `launch.eat_speed.lineup.specification`.
  """
  torch.set_num_threads(worker.cores())
  cuda = torch.cuda.is_available() and specification['platform'] != 'cpu'
  if cuda:
    # As jax computes float32 there by default.
    torch.set_float32_matmul_precision('high')
  device = torch.device('cuda' if cuda else 'cpu')
  dtype = getattr(torch, specification['dtype'])
  model = _load(specification, dtype=dtype).to(device)
  tokens = worker.token_rows(specification, model.config.vocab_size)

  def forward(batch: int) -> Callable[[], Any]:
    rows = np.asarray(tokens[:batch], np.int64)
    mask = np.ones_like(rows)

    @torch.inference_mode()
    def run():
      logits = model(
        input_ids=torch.from_numpy(rows).to(device),
        attention_mask=torch.from_numpy(mask).to(device),
      ).logits
      return logits.float().cpu().numpy()

    return run

  cases, scores = worker.forward_cases(forward, specification)
  return worker.Built(
    cases,
    scores,
    torch.cuda.get_device_name() if cuda else 'cpu',
    _versions(torch, transformers),
  )


def build_onnx(specification: Mapping[str, Any]) -> worker.Built:
  """The same model exported, optimized and run by ONNX Runtime.

  Args:
    specification: see `launch.eat_speed.lineup.specification`.
  """
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = worker.cores()
  wanted = ['CPUExecutionProvider']
  available = onnxruntime.get_available_providers()
  cuda = 'CUDAExecutionProvider'
  if cuda in available and specification['platform'] != 'cpu':
    wanted.insert(0, cuda)
  with tempfile.TemporaryDirectory(dir=specification['directory']) as folder:
    path, vocab_size = _export(specification, pathlib.Path(folder))
    session = onnxruntime.InferenceSession(path, options, providers=wanted)
  tokens = worker.token_rows(specification, vocab_size)
  kinds = {one.name: one.type for one in session.get_inputs()}

  def forward(batch: int) -> Callable[[], Any]:
    rows = tokens[:batch]
    feeds = {
      name: array.astype(np.int32 if 'int32' in kinds[name] else np.int64)
      for name, array in (('tokens', rows), ('mask', np.ones_like(rows)))
    }
    return lambda: session.run(None, feeds)[0]

  cases, scores = worker.forward_cases(forward, specification)
  return worker.Built(
    cases,
    scores,
    'cuda' if session.get_providers()[0] == cuda else 'cpu',
    _versions(onnxruntime, torch, transformers),
  )


def _export(
  specification: Mapping[str, Any], folder: pathlib.Path
) -> tuple[str, int]:
  """Path of the optimized graph, for any batch size, and the vocabulary."""
  from onnxruntime.transformers import optimizer

  # Of attention written out the optimizer knows how to make one operation.
  model = _load(specification, attn_implementation='eager')

  class Logits(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.model = model

    def forward(self, tokens, mask):
      return self.model(input_ids=tokens, attention_mask=mask).logits

  tokens = torch.ones((2, specification['length']), dtype=torch.int64)
  plain, fused = str(folder / 'plain.onnx'), str(folder / 'fused.onnx')
  with warnings.catch_warnings():
    # The newer exporter needs one more package and says so at every call.
    warnings.simplefilter('ignore')
    torch.onnx.export(
      Logits().eval(),
      (tokens, torch.ones_like(tokens)),
      plain,
      input_names=['tokens', 'mask'],
      output_names=['logits'],
      dynamic_axes={'tokens': {0: 'batch'}, 'mask': {0: 'batch'}},
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


def _load(specification: Mapping[str, Any], **options: Any) -> Any:
  loader = transformers.AutoModelForSequenceClassification
  return loader.from_pretrained(
    specification['weights'], local_files_only=True, **options
  ).eval()


def _versions(*modules: Any) -> dict[str, str]:
  return {module.__name__: module.__version__ for module in modules}
