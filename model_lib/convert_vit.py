"""Published Vision Transformers, read into our ViT and models that contain it.

NumPy archives of vit_jax (augreg) and big_vision; safetensors of timm and
Hugging Face. Nothing is unpickled or downloaded. vit_jax and big_vision compute
GELU by tanh (`activation='gelu_new'`).
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from core import files
from core.errors import ConfigError, check_option
from model_lib import convert_files, convert_pixels
from model_lib.convert import Checkpoint, Directory, checkpoint
from model_lib.convert_pixels import HALF, Pixels
from model_lib.convert_tables import places
from model_lib.position_grids import SQUARE, Sides, grid

CLASS, POSITIONS = 'tokens/cls', 'tokens/positions/embedding'
_PATCHES = [f'tokens/patch_embed/projection/{x}' for x in ('kernel', 'bias')]
# Names of our arrays and modules in vit_jax and big_vision, timm, Hugging Face.
_OUTER = {
  CLASS: r'cls|cls_token|embeddings\.cls_token',
  POSITIONS: r'(Transformer/posembed_input/)?pos_embedding|pos_embed'
  r'|embeddings\.position_embeddings',
  'tokens/patch_embed/projection': r'embedding|patch_embed\.proj'
  r'|embeddings\.patch_embeddings\.projection',
  'encoder/norm': 'Transformer/encoder_norm|norm|layernorm',
  'head': 'head|classifier',
  'pre_logits': 'pre_logits',
}
_HEADS = r'MultiHeadDotProductAttention_[01]/'
_INNER = {
  'attention_norm': 'LayerNorm_0|norm1|layernorm_before',
  **{
    f'attention/{x}': rf'{_HEADS}{x}|attn\.qkv\.{x}|attention\.attention\.{x}'
    for x in ('query', 'key', 'value')
  },
  'attention/out': _HEADS + r'out|attn\.proj|attention\.output\.dense',
  'mlp_norm': 'LayerNorm_[12]|norm2|layernorm_after',
  'mlp/hidden': r'MlpBlock_[03]/Dense_0|mlp\.fc1|intermediate\.dense',
  'mlp/out': r'MlpBlock_[03]/Dense_1|mlp\.fc2|output\.dense',
}
_NAME = re.compile(
  r'((Transformer/encoderblock_|blocks\.|encoder\.layer\.)(?P<block>[0-9]{1,9})[/.])?'
  r'(?P<module>.*?)([/.](?P<leaf>kernel|weight|scale|bias))?',
  re.DOTALL,
)
_OPTIONAL = (CLASS, POSITIONS, 'head', 'pre_logits')
# GELU by tanh: our name, and others of Hugging Face.
_TANH = 'gelu_new', 'gelu_pytorch_tanh', 'gelu_fast'
_ROOTS = ('params/', 'opt/target/')  # big_vision also saves its optimizer
_SCANNED = 'Transformer/encoderblock/'  # big_vision: all blocks in one array


def _ours(name: str) -> str:
  """Returns our parameter of a tensor; another name is unchanged."""
  parts: Any = _NAME.fullmatch(name)
  block, theirs, leaf = parts['block'], parts['module'], parts['leaf']
  for module, names in (_INNER if block else _OUTER).items():
    if re.fullmatch(names, theirs):
      first = 'scale' if module.endswith('norm') else 'kernel'
      last = f'/{leaf if leaf == "bias" else first}' if leaf else ''
      return (f'encoder/block_{int(block)}/' if block else '') + module + last
  return name


def _wanted(depth: int) -> set[str]:
  """Returns the parameters of a ViT with `depth` blocks, and `pre_logits`."""
  modules = [name for name in _OUTER if name not in (CLASS, POSITIONS)]
  for i in range(depth):
    modules += [f'encoder/block_{i}/{name}' for name in _INNER]
  same = dict(zip(modules, modules, strict=True))
  return {CLASS, POSITIONS, *places(same, is_torch=False)}


def is_vit(path: Directory) -> bool:
  """Returns True for a file, and by config.json for a directory of a ViT."""
  config = convert_files.peek_config(path)
  is_timm = 'architecture' in config and 'model_type' not in config
  is_vit = is_timm or config.get('model_type') == 'vit'
  return is_vit or pathlib.Path(path).is_file()


def load(path: Directory, pixels: Pixels = HALF) -> Checkpoint:
  """Reads and checks a published ViT, for inputs that `pixels` normalise.

  `path` is an .npz or .safetensors file, or a directory with config.json and
  safetensors; Hugging Face's config.json is needed beside a file too. What they
  state of their inputs is folded into the patch embedding, see
  `convert_pixels`; `.npz` files are of inputs in [-1, 1]. The position of the
  class token is added to the token, as ours has none.

  `fields` are 'num_heads' and 'activation', where the file tells them (timm's
  tells none). `head` is absent if the file has none; a `pre_logits` layer
  before it is kept for `fit`. Raises ValueError for a damaged file, an option
  that is not supported, and tensors that are missing, unknown or not finite.
  """
  path = pathlib.Path(path)
  found = _plain_names(convert_files.read_tensors(path))
  # The pooler of Hugging Face is unused by its classifier.
  ignored = tuple(name for name in found if name.startswith('pooler.'))
  tensors = {name: x for name, x in found.items() if name not in ignored}
  parameters = _parameters(path, tensors)
  is_torch = any(name.endswith('.weight') for name in tensors)
  is_hugging_face = any(name.startswith('encoder.layer.') for name in tensors)
  params, channels = {}, 0
  for name, x in tensors.items():
    ours = parameters[name]
    params[ours] = _converted(f'{path}: {name}', x, ours, is_torch)
    if ours == _PATCHES[0]:
      channels = x.shape[1 if is_torch else 2]
  file = (path if path.is_dir() else path.parent) / convert_files.CONFIG
  is_read = is_hugging_face or (is_torch and file.is_file())
  config = files.read_object(file) if is_read else {}
  theirs = convert_pixels.read(file.parent, config) if is_torch else HALF
  kernel, bias = (params[name] for name in _PATCHES)
  folded = convert_pixels.fold(
    file.parent, kernel, bias, channels, theirs, pixels
  )
  params |= zip(_PATCHES, folded, strict=True)
  image = _split_class_position(f'{path}: class token', params, _sides(config))
  if is_hugging_face:
    fields = _fields(file, config)
  elif is_torch:
    fields = {}
  else:
    heads = {x.shape[1] for n, x in tensors.items() if n.endswith('key/kernel')}
    fields = {'num_heads': max(heads), 'activation': _TANH[0]}
  return checkpoint(
    path, tensors, params, ignored, fields=fields, image=image,
    class_names=_class_names(config),
  )  # fmt: skip


def _parameters(
  path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> dict[str, str]:
  """Returns our parameter of each tensor; ValueError if a ViT has others."""
  parameters = {name: _ours(name) for name in tensors}
  names = ' '.join(parameters.values())
  depth = 1 + max(map(int, re.findall(r'/block_(\d+)/', names)), default=0)
  # A damaged name may hold any number.
  wanted = _wanted(min(depth, len(tensors)))
  legal = {n: ours for n, ours in parameters.items() if ours in wanted}
  if len({*legal.values()}) < len(legal):
    raise ValueError(f'{path}: two tensors for one parameter')
  missing = wanted - {*legal.values()}
  legal |= dict(zip(missing, missing, strict=True))
  convert_files.check_tensors(path, tensors, legal, _OPTIONAL)
  return parameters


def fit(found: Mapping[str, Any], fresh: Mapping[str, Any]) -> set[str]:
  """Returns the paths that keep fresh values in a model that contains a ViT.

  `found` are parameters of `load`, `fresh` those of the model, by path. Kept
  are modules that a ViT lacks, and the head, unless it has the model's shape
  and follows no `pre_logits`.
  """
  ours = _wanted(depth=1)
  first = {name: re.sub(r'block_\d+', 'block_0', name) for name in fresh}
  kept = {name for name in fresh if first[name] not in ours}
  head = 'head/kernel'
  shapes = [x[head].shape if head in x else () for x in (found, fresh)]
  if shapes[0] != shapes[1] or 'pre_logits/kernel' in found:
    heads = 'head/', 'pre_logits/'
    kept |= {name for name in {*found, *fresh} if name.startswith(heads)}
  return kept


def _class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the names in `id2label`; () without it, or for 'LABEL_0'."""
  given = config.get('id2label')
  given = given if isinstance(given, dict) else {}
  names = tuple(str(given.get(str(n))) for n in range(len(given)))
  is_numbered = any(re.fullmatch(r'LABEL_\d+', name) for name in names)
  return () if is_numbered else names


def _plain_names(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Removes prefixes; splits stacked blocks and packed queries and keys."""
  root = next((r for r in _ROOTS if any(n.startswith(r) for n in found)), '')
  plain = {}
  for name, tensor in found.items():
    if not name.startswith(root):
      continue
    short = name.removeprefix(root).removeprefix('vit.')
    rows = np.atleast_1d(tensor)
    if short.startswith(_SCANNED):
      for i, part in enumerate(rows):
        plain[short.replace('block/', f'block_{i}/', 1)] = part
    elif '.attn.qkv.' in short:
      names = ('query', 'key', 'value')
      for part, kind in zip(np.array_split(rows, 3), names, strict=True):
        plain[short.replace('.qkv.', f'.qkv.{kind}.')] = part
    else:
      plain[short] = tensor
  return plain


def _fields(file: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of the model that config.json states."""
  check_option(f'{file}: model_type', config.get('model_type'), ('vit',))
  # Ours is 1e-6, with which Google's models were trained, whatever theirs says.
  epsilon = config.get('layer_norm_eps', 1e-12)
  check_option(f'{file}: layer_norm_eps', epsilon, (1e-12, 1e-6))
  activation = config.get('hidden_act', 'gelu')
  check_option(f'{file}: hidden_act', activation, ('gelu', *_TANH))
  return {
    'num_heads': config.get('num_attention_heads', 12),
    'activation': _TANH[0] if activation in _TANH else 'gelu',
  }


def _converted(
  where: str, tensor: np.ndarray, ours: str, is_torch: bool
) -> np.ndarray:
  """Returns a float32 parameter in our shape."""
  is_kernel, is_patch = ours.endswith('/kernel'), 'patch_embed' in ours
  rank = 3 if ours in (CLASS, POSITIONS) else 1 + is_kernel
  if is_kernel and is_patch:
    rank = 4
  elif '/attention/' in ours and not is_torch and 'out/bias' not in ours:
    rank += 1  # [D, heads, D / heads], and the transpose of `out`
  if tensor.ndim != rank or not tensor.size:
    raise ConfigError(where, list(tensor.shape), f'an array of {rank} axes')
  if is_patch and is_kernel and len({*tensor.shape[2 * is_torch :][:2]}) > 1:
    raise ConfigError(where, list(tensor.shape), 'square patches')
  if is_torch and is_kernel:
    tensor = tensor.transpose(2, 3, 1, 0) if is_patch else tensor.T
  if is_kernel:
    is_input = re.search('/attention/(query|key|value)/', ours)
    rows = len(tensor) if is_input else tensor.size // tensor.shape[-1]
    tensor = tensor.reshape(rows, -1)
  elif ours not in (CLASS, POSITIONS):
    tensor = tensor.reshape(-1)
  return np.ascontiguousarray(tensor, np.float32)


def _sides(config: Mapping[str, Any]) -> Sides:
  """Returns height and width of images as config.json states them."""
  timm = config.get('pretrained_cfg')
  stated = timm if isinstance(timm, dict) else config
  size = config.get('image_size', stated.get('input_size'))
  sides = size[-2:] if isinstance(size, list) else [size, size]
  is_legal = len(sides) == 2 and all(type(x) is int and x > 0 for x in sides)
  return (sides[0], sides[1]) if is_legal else SQUARE


def _split_class_position(
  where: str, params: dict[str, np.ndarray], image: Sides
) -> Sides:
  """Adds the class token's position to it; returns sides that the grid fits."""
  count = params[POSITIONS].shape[1] if POSITIONS in params else 0
  for sides in (image, SQUARE):
    if grid(count, sides):
      return sides
    if grid(count - 1, sides):
      break
  else:
    return SQUARE
  first, params[POSITIONS] = np.split(params[POSITIONS], [1], axis=1)
  if CLASS in params:
    if params[CLASS].shape != first.shape:
      given = list(params[CLASS].shape)
      raise ConfigError(where, given, str(list(first.shape)))
    params[CLASS] = params[CLASS] + first
  return sides
