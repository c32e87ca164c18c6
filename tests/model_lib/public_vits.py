"""Random ViTs in public layouts, and the equations of vit_jax in NumPy."""

import json
import re

import numpy as np

from tests.model_lib import checkpoints, plain

WIDTH, DEPTH, HEADS, MLP, PATCH, CLASSES = 16, 2, 4, 24, 4, 5
FIELDS = {
  'num_classes': CLASSES, 'width': WIDTH, 'depth': DEPTH, 'num_heads': HEADS,
  'mlp_dim': MLP, 'patch_size': PATCH, 'activation': 'gelu_new',
}  # fmt: skip
# Positions, attention, second norm, feed-forward network.
NAMES = {
  'vit_jax': (
    'Transformer/posembed_input/pos_embedding',
    'MultiHeadDotProductAttention_1', 'LayerNorm_2', 'MlpBlock_3',
  ),
  'big_vision': (
    'pos_embedding', 'MultiHeadDotProductAttention_0', 'LayerNorm_1',
    'MlpBlock_0',
  ),
}  # fmt: skip
PARTS = re.compile(
  r'(?:Transformer/encoderblock_(.)/)?(.*?)(?:/(kernel|bias|scale))?'
)
_ATTENTION = NAMES['vit_jax'][1]
ATTENTION = ('query', 'key', 'value', 'out')
# Names of Hugging Face and timm.
TORCH = {
  'cls': ('vit.embeddings.cls_token', 'cls_token'),
  NAMES['vit_jax'][0]: ('vit.embeddings.position_embeddings', 'pos_embed'),
  'embedding': (
    'vit.embeddings.patch_embeddings.projection', 'patch_embed.proj'
  ),
  'LayerNorm_0': ('layernorm_before', 'norm1'),
  f'{_ATTENTION}/query': ('attention.attention.query', 'attn.q'),
  f'{_ATTENTION}/key': ('attention.attention.key', 'attn.k'),
  f'{_ATTENTION}/value': ('attention.attention.value', 'attn.v'),
  f'{_ATTENTION}/out': ('attention.output.dense', 'attn.proj'),
  'LayerNorm_2': ('layernorm_after', 'norm2'),
  'MlpBlock_3/Dense_0': ('intermediate.dense', 'mlp.fc1'),
  'MlpBlock_3/Dense_1': ('output.dense', 'mlp.fc2'),
  'Transformer/encoder_norm': ('vit.layernorm', 'norm'),
  'head': ('classifier', 'head'),
}  # fmt: skip
CONFIG = {'model_type': 'vit', 'num_attention_heads': HEADS}


def layer(name, *shape, biases=1):
  return {f'{name}/kernel': shape, f'{name}/bias': shape[-biases:]}


def norm(name):
  return {f'{name}/scale': (WIDTH,), f'{name}/bias': (WIDTH,)}


def archive(layout='vit_jax', grid=4, classes=CLASSES, seed=0):
  """Arrays of a ViT with a class token, all drawn at random."""
  positions, attention, second, mlp = NAMES[layout]
  has_class = layout == 'vit_jax'
  shapes = {'cls': (1, 1, WIDTH), positions: (1, grid**2 + has_class, WIDTH)}
  shapes |= layer('embedding', PATCH, PATCH, 3, WIDTH)
  for i in range(DEPTH):
    block, head = f'Transformer/encoderblock_{i}', WIDTH // HEADS
    shapes |= norm(f'{block}/LayerNorm_0') | norm(f'{block}/{second}')
    for name in ('query', 'key', 'value'):
      name = f'{block}/{attention}/{name}'
      shapes |= layer(name, WIDTH, HEADS, head, biases=2)
    shapes |= layer(f'{block}/{attention}/out', HEADS, head, WIDTH)
    shapes |= layer(f'{block}/{mlp}/Dense_0', WIDTH, MLP)
    shapes |= layer(f'{block}/{mlp}/Dense_1', MLP, WIDTH)
  shapes |= norm('Transformer/encoder_norm') | layer('head', WIDTH, classes)
  generator = np.random.default_rng(seed)
  return {
    name: generator.normal(0, 0.4, shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def stacked(arrays):
  """All blocks in one array, beside the state of an optimizer."""
  scanned = {f'opt/{name}': x for name, x in arrays.items()}
  for name, x in arrays.items():
    if 'encoderblock_1' not in name:
      second = name.replace('encoderblock_0', 'encoderblock_1')
      x = x if second == name else np.stack([x, arrays[second]])
      scanned['params/' + name.replace('encoderblock_0', 'encoderblock')] = x
  return scanned


def inside(arrays, prefix):
  return {
    name.removeprefix(f'{prefix}/'): np.float64(x)
    for name, x in arrays.items()
    if name.startswith(f'{prefix}/')
  }


def flat(arrays, name):
  """A linear layer of `nn.MultiHeadDotProductAttention` with one matrix."""
  kernel, bias = (arrays[f'{name}/{leaf}'] for leaf in ('kernel', 'bias'))
  return {'kernel': kernel.reshape(WIDTH, WIDTH), 'bias': bias.reshape(-1)}


def forward(arrays, images, layout='vit_jax', pool='cls'):
  """Logits as vit_jax/models_vit.py and big_vision/models/vit.py define them.

  vit_jax adds positions after the class token is prepended, big_vision before.
  """
  positions, attended, second, mlp = NAMES[layout]
  rows, side = len(images), images.shape[1] // PATCH
  patch = inside(arrays, 'embedding')
  x = np.zeros((rows, side**2, WIDTH))
  for i, j in np.ndindex(side, side):
    top, left = i * PATCH, j * PATCH
    window = images[:, top : top + PATCH, left : left + PATCH]
    x[:, i * side + j] = np.einsum('bhwc,hwcd->bd', window, patch['kernel'])
  x += patch['bias']
  x += arrays[positions] if layout == 'big_vision' else 0
  if pool == 'cls':
    token = np.tile(arrays['cls'], (rows, 1, 1))
    x = np.concatenate([token, x], axis=1)
  x += arrays[positions] if layout == 'vit_jax' else 0
  for i in range(DEPTH):
    block = inside(arrays, f'Transformer/encoderblock_{i}')
    heads = {n: flat(block, f'{attended}/{n}') for n in ATTENTION}
    y = plain.layer_norm(inside(block, 'LayerNorm_0'), x)
    x = x + [plain.attention_by_loop(heads, row, HEADS)[0] for row in y]
    y = plain.layer_norm(inside(block, second), x)
    y = plain.gelu_new(plain.dense(inside(block, f'{mlp}/Dense_0'), y))
    x = x + plain.dense(inside(block, f'{mlp}/Dense_1'), y)
  x = plain.layer_norm(inside(arrays, 'Transformer/encoder_norm'), x)
  features = x.mean(1) if pool == 'gap' else x[:, 0]
  return plain.dense(inside(arrays, 'head'), features)


def resized(grid, new, old=None):
  """Positions `[1, L, D]`, interpolated along each axis to rows, columns."""
  old = old or [round(grid.shape[1] ** 0.5)] * 2
  new = [new, new] if isinstance(new, int) else new
  x = grid.reshape(*old, -1)
  for axis in (0, 1):
    at, known = np.linspace(0, old[axis] - 1, new[axis]), np.arange(old[axis])
    x = np.apply_along_axis(lambda y: np.interp(at, known, y), axis, x)  # noqa: B023
  return x.reshape(1, new[0] * new[1], -1).astype(np.float32)


def torch_tensors(arrays, column, block):
  """A vit_jax archive in PyTorch's shapes, with the names of `TORCH`."""
  tensors = {}
  for name, x in arrays.items():
    number, part, leaf = PARTS.fullmatch(name).groups()
    theirs = TORCH[part][column]
    theirs = block.format(number) + theirs if number else theirs
    if leaf == 'kernel' and part == 'embedding':
      x = x.transpose(3, 2, 0, 1)
    elif leaf == 'kernel':
      x = x.reshape(-1, arrays[name.replace('kernel', 'bias')].size).T
    elif leaf:
      x = x.reshape(-1)
    suffix = {None: '', 'bias': '.bias'}.get(leaf, '.weight')
    tensors[theirs + suffix] = x
  return tensors


def timm_tensors(arrays):
  """Those of timm, whose queries, keys and values are packed."""
  tensors = torch_tensors(arrays, 1, 'blocks.{}.')
  for i in range(DEPTH):
    for leaf in ('weight', 'bias'):
      parts = [tensors.pop(f'blocks.{i}.attn.{n}.{leaf}') for n in 'qkv']
      tensors[f'blocks.{i}.attn.qkv.{leaf}'] = np.concatenate(parts)
  return tensors


def hugging_face_tensors(arrays):
  """Those of `ViTForImageClassification.save_pretrained`."""
  return torch_tensors(arrays, 0, 'vit.encoder.layer.{}.')


def write(directory, tensors, **config):
  """A directory of safetensors and config.json."""
  checkpoints.write_file(directory / 'model.safetensors', tensors)
  (directory / 'config.json').write_text(json.dumps(config))
  return directory
