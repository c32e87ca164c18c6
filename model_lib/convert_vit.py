"""Published Vision Transformers, read into our ViT and models that contain it.

NumPy archives of vit_jax (augreg) and big_vision; safetensors of timm and
Hugging Face, also of DeiT. Nothing is unpickled or downloaded. vit_jax and
big_vision compute GELU by tanh (`activation='gelu_new'`).
"""

import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from core import files
from core.errors import ConfigError, check_option
from model_lib import convert_files, convert_images, sizes
from model_lib.convert import Checkpoint, checkpoint, class_names
from model_lib.convert_files import Tensors
from model_lib.convert_images import HALF, SQUARE, Pixels, Sides, grid
from model_lib.convert_tables import places

CLASS, POSITIONS = 'tokens/cls', 'tokens/positions/embedding'
DISTILLATION = 'distillation'  # DeiT's second token
_ARRAYS = (CLASS, POSITIONS, DISTILLATION)
HEADS = ('head', 'distillation_head')
_PATCHES = [f'tokens/patch_embed/projection/{x}' for x in ('kernel', 'bias')]
# Our modules outside and inside a block: their names of Hugging Face, timm and
# JAX, '-' for none; `#0`, `#1`, `#2` are equal parts of one tensor.
_OUTER = {
  CLASS: 'embeddings.cls_token cls_token cls',
  POSITIONS: 'embeddings.position_embeddings pos_embed {positions}',
  DISTILLATION: 'embeddings.distillation_token dist_token -',
  'tokens/patch_embed/projection': 'embeddings.patch_embeddings.projection '
  'patch_embed.proj embedding',
  'encoder/norm': 'layernorm norm Transformer/encoder_norm',
  'head': 'classifier head head',
  'distillation_head': 'distillation_classifier head_dist -',
  'pre_logits': '- - pre_logits',
}
_BLOCK = 'encoder.layer.{}. blocks.{}. Transformer/encoderblock_{}/'
_INNER = {
  'attention_norm': 'layernorm_before norm1 LayerNorm_0',
  'attention/query': 'attention.attention.query attn.qkv#0 {attention}/query',
  'attention/key': 'attention.attention.key attn.qkv#1 {attention}/key',
  'attention/value': 'attention.attention.value attn.qkv#2 {attention}/value',
  'attention/out': 'attention.output.dense attn.proj {attention}/out',
  'mlp_norm': 'layernorm_after norm2 {norm}',
  'mlp/hidden': 'intermediate.dense mlp.fc1 {mlp}/Dense_0',
  'mlp/out': 'output.dense mlp.fc2 {mlp}/Dense_1',
}
_OPTIONAL = (*_ARRAYS, *HEADS, 'pre_logits')
_TYPES = ('vit', 'deit')  # Hugging Face's `model_type`
_STATED = {  # sizes in Hugging Face's config.json, and ours
  'hidden_size': 'width', 'num_hidden_layers': 'depth',
  'intermediate_size': 'mlp_dim', 'patch_size': 'patch_size',
}  # fmt: skip
# GELU by tanh: our name, and others of Hugging Face.
_TANH = 'gelu_new', 'gelu_pytorch_tanh', 'gelu_fast'
# Architectures of timm with the heads of `sizes.VIT` and the exact GELU.
_PLAIN = re.compile(
  r'(vit|deit)_(tiny|small|base|large)(_distilled)?_patch\d+_\d+'
  r'(_in21k)?(\.|$)'
)
_ROOTS = ('params/', 'opt/target/')  # big_vision also saves its optimizer
_SCANNED = 'Transformer/encoderblock/'  # big_vision: all blocks in one array


class _Layout(NamedTuple):
  """A public layout: a column of the tables, and names in it."""

  column: int
  names: Mapping[str, str] = {}

  @property
  def is_torch(self) -> bool:
    """True for PyTorch, False for JAX."""
    return self.column < 2

  def places(self, depth: int) -> dict[str, str]:
    """Returns our parameter of each tensor of a ViT with `depth` blocks."""
    columns = [(ours, '', theirs) for ours, theirs in _OUTER.items()]
    for i in range(depth):
      block = _BLOCK.split()[self.column].format(i)
      inner = _INNER.items()
      columns += [(f'encoder/block_{i}/{o}', block, line) for o, line in inner]
    modules = {
      ours: block + line.split()[self.column].format(**self.names)
      for ours, block, line in columns
    }
    arrays = {modules.pop(ours): ours for ours in _ARRAYS}
    named = arrays | places(modules, self.is_torch)
    return {name: ours for name, ours in named.items() if name[0] != '-'}


_HUGGING_FACE, _TIMM = _Layout(0), _Layout(1)
_VIT_JAX = _Layout(2, {
  'positions': 'Transformer/posembed_input/pos_embedding', 'mlp': 'MlpBlock_3',
  'attention': 'MultiHeadDotProductAttention_1', 'norm': 'LayerNorm_2',
})  # fmt: skip
_BIG_VISION = _Layout(2, {
  'positions': 'pos_embedding', 'mlp': 'MlpBlock_0',
  'attention': 'MultiHeadDotProductAttention_0', 'norm': 'LayerNorm_1',
})  # fmt: skip


def is_vit(path: files.Path) -> bool:
  """Returns True for a file, and by config.json for a directory of a ViT."""
  config = convert_files.peek_config(path)
  is_timm = 'architecture' in config and 'model_type' not in config
  is_vit = is_timm or config.get('model_type') in _TYPES
  return is_vit or pathlib.Path(path).is_file()


def load(path: files.Path, pixels: Pixels = HALF) -> Checkpoint:
  """Reads and checks a published ViT, for inputs that `pixels` normalise.

  `path` is an .npz or .safetensors file, or a directory with config.json and
  safetensors; Hugging Face's config.json is needed for a file too. What they
  state of their inputs is folded into the patch embedding, see
  `convert_images`; `.npz` files are of inputs in [-1, 1]. The positions of the
  class and the distillation token are added to them, as ours have none.

  `fields` has the keys of `sizes.VIT.defaults`, 'num_heads' and 'activation'
  only where the files tell them (of timm: by the name of the architecture).
  `head` is absent if the file has none; a `pre_logits` layer before it is kept
  for `fit`. Raises ValueError for a damaged file, an option that is not
  supported, and tensors that are missing, unknown or not finite.
  """
  path = pathlib.Path(path)
  stored = _plain_names(convert_files.read_tensors(path))
  stored = convert_files.divided(stored, {'qkv': 3})
  # The pooler of Hugging Face is unused by its classifier.
  ignored = tuple(name for name in stored if name.startswith('pooler.'))
  tensors = {name: x for name, x in stored.items() if name not in ignored}
  layout, parameters = _layout(tensors)
  convert_files.check_tensors(path, tensors, parameters, _OPTIONAL)
  is_torch, is_hugging_face = layout.is_torch, layout is _HUGGING_FACE
  params, channels = {}, 0
  for name, x in tensors.items():
    ours = parameters[name]
    params[ours] = _converted(f'{path}: {name}', x, ours, is_torch)
    if ours == _PATCHES[0]:
      channels = x.shape[1 if is_torch else 2]
  file = (path if path.is_dir() else path.parent) / convert_files.CONFIG
  is_read = is_hugging_face or (is_torch and file.is_file())
  config = files.read_object(file) if is_read else {}
  theirs = convert_images.read(file.parent, config) if is_torch else HALF
  kernel, bias = (params[name] for name in _PATCHES)
  folded = convert_images.fold(
    file.parent, kernel, bias, channels, theirs, pixels
  )
  params |= zip(_PATCHES, folded, strict=True)
  image = _split_class_position(f'{path}: class token', params, _sides(config))
  fields = _sizes(params, channels)
  if is_hugging_face:
    fields |= _fields(file, config, fields)
  elif is_torch:
    fields |= _timm_fields(config, fields['width'])
  else:
    heads = {x.shape[1] for n, x in tensors.items() if n.endswith('key/kernel')}
    fields |= {'num_heads': max(heads), 'activation': _TANH[0]}
  count = params[POSITIONS].shape[1] if POSITIONS in params else 0
  return checkpoint(
    path, tensors, params, ignored, fields=fields, image=image,
    class_names=class_names(config),
    image_size=math.isqrt(count) * fields['patch_size'],
  )  # fmt: skip


def _layout(tensors: Tensors) -> tuple[_Layout, dict[str, str]]:
  """Returns the layout with most of the tensors, and its places."""
  numbers = re.findall(
    r'(?:layer\.|blocks\.|block_)(\d{1,9})', ' '.join(tensors)
  )
  # A damaged name may hold any number.
  depth = min(1 + max(map(int, numbers), default=0), len(tensors))
  layouts = _HUGGING_FACE, _TIMM, _VIT_JAX, _BIG_VISION
  candidates = [(layout, layout.places(depth)) for layout in layouts]
  return max(candidates, key=lambda pair: len(pair[1].keys() & tensors.keys()))


def fit(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> set[str]:
  """Returns the paths that keep fresh values in a model that contains a ViT.

  `saved` are parameters of `load`, `fresh` the model's, by path. Kept are
  modules that a ViT and `saved` lack, and the heads, unless they have the
  model's shape and follow no `pre_logits`.
  """
  ours = {*_VIT_JAX.places(1).values()}
  first = {name: re.sub(r'block_\d+', 'block_0', name) for name in fresh}
  kept = {name for name in fresh if first[name] not in ours} - {*saved}
  head = 'head/kernel'
  shapes = [x[head].shape if head in x else () for x in (saved, fresh)]
  if shapes[0] != shapes[1] or 'pre_logits/kernel' in saved:
    heads = 'head/', 'distillation_head/', 'pre_logits/'
    kept |= {name for name in {*saved, *fresh} if name.startswith(heads)}
  return kept


def _plain_names(tensors: Tensors) -> Tensors:
  """Removes prefixes; splits stacked blocks."""
  root = next((r for r in _ROOTS if any(n.startswith(r) for n in tensors)), '')
  plain = {}
  for name, tensor in tensors.items():
    if not name.startswith(root):
      continue
    short = name.removeprefix(root)
    short = re.sub(r'^(vit\.|deit\.|cls_(?=classifier))', '', short)
    if short.startswith(_SCANNED):
      for i, part in enumerate(np.atleast_1d(tensor)):
        plain[short.replace('block/', f'block_{i}/', 1)] = part
    else:
      plain[short] = tensor
  return plain


def _sizes(params: Tensors, channels: int) -> dict[str, Any]:
  """Returns the fields of the model that the parameters show."""
  rows, width = params[_PATCHES[0]].shape
  blocks = {name.split('/')[1] for name in params if '/block_' in name}
  return {
    'width': width,
    'depth': len(blocks),
    'mlp_dim': len(params['encoder/block_0/mlp/hidden/bias']),
    'patch_size': math.isqrt(rows // channels),
    'pool': 'cls' if CLASS in params else 'gap',
    'positions': 'learned' if POSITIONS in params else 'sincos2d',
  }


def _timm_fields(config: Mapping[str, Any], width: int) -> dict[str, Any]:
  """Returns heads and activation by the name of an architecture of timm."""
  heads = {x['width']: x['num_heads'] for x in sizes.VIT.variants.values()}
  if width not in heads or not _PLAIN.match(str(config.get('architecture'))):
    return {}
  return {'num_heads': heads[width], 'activation': 'gelu'}


def _fields(
  file: pathlib.Path, config: Mapping[str, Any], shown: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the fields of the model that config.json states.

  Raises ConfigError for a size other than the tensors have, `shown`.
  """
  check_option(f'{file}: model_type', config.get('model_type'), _TYPES)
  for name, ours in _STATED.items():
    if config.get(name, shown[ours]) != shown[ours]:
      expected = f'{shown[ours]}, as the tensors beside it have'
      raise ConfigError(f'{file}: {name}', config[name], expected)
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
  rank = 3 if ours in _ARRAYS else 1 + is_kernel
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
  elif ours not in _ARRAYS:
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


def _split_class_position(where: str, params: Tensors, image: Sides) -> Sides:
  """Adds tokens' positions to them; returns sides that the grid fits."""
  count = params[POSITIONS].shape[1] if POSITIONS in params else 0
  tokens = [name for name in (CLASS, DISTILLATION) if name in params]
  before = max(1, len(tokens))
  for sides in (image, SQUARE):
    if grid(count, sides):
      return sides
    if grid(count - before, sides):
      break
  else:
    return SQUARE
  first, params[POSITIONS] = np.split(params[POSITIONS], [before], axis=1)
  for name, position in zip(tokens, np.split(first, before, 1), strict=False):
    if params[name].shape != position.shape:
      shape = list(params[name].shape)
      raise ConfigError(where, shape, str(list(position.shape)))
    params[name] = params[name] + position
  return sides
