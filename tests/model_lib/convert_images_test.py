"""Mean and std of published ViTs, folded; against transformers and NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import convert_images, convert_vit
from model_lib.convert_images import Pixels
from model_lib.vit import ViT
from tests import peers
from tests.model_lib import public_vits

BYTES = np.random.default_rng(7).integers(0, 256, (3, 16, 16, 3), np.uint8)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STATED = {'mean': [*MEAN], 'std': [*STD]}
PROCESSOR = {f'image_{k}': v for k, v in STATED.items()}
HALF = ((0.5,) * 3, (0.5,) * 3, 1 / 255)
HUGGING_FACE = public_vits.CONFIG | {'image_size': 16}


def write(folder, config, processor, grid=4):
  """A checkpoint of small random arrays with what its files state."""
  arrays = public_vits.archive(grid=grid)
  arrays = {k: x if 'scale' in k else x / 2 for k, x in arrays.items()}
  is_timm = 'model_type' not in config
  named = public_vits.timm_tensors if is_timm else (
    public_vits.hugging_face_tensors
  )  # fmt: skip
  public_vits.write(folder, named(arrays), **config)
  names = convert_images.PREPROCESSOR, convert_images.PROCESSOR
  contents = processor if isinstance(processor, tuple) else (processor,)
  for name, content in zip(names, contents, strict=False):
    if content is not None:
      (folder / name).write_text(json.dumps(content))
  return arrays


def logits(path, images, pixels=convert_images.HALF, **fields):
  """Of our model, whose inputs are normalised by `pixels`."""
  found = convert_vit.load(path, pixels)
  model = ViT(**(public_vits.FIELDS | fields))
  params = jax.tree.map(jnp.asarray, found.params)
  inputs = (images * pixels.factor - np.array(pixels.mean)) / pixels.std
  return model.apply({'params': params}, jnp.asarray(inputs, jnp.float32))[0]


@pytest.mark.parametrize(
  ('config', 'processor', 'theirs'),
  [
    ({'architecture': 'vit', 'pretrained_cfg': STATED}, None, (MEAN, STD)),
    ({'architecture': 'vit', **STATED}, None, (MEAN, STD)),
    ({'architecture': 'vit', 'pretrained_cfg': {}}, None, HALF),
    ({'architecture': 'vit', 'pretrained_cfg': None, **STATED}, None,
     (MEAN, STD)),
    (HUGGING_FACE, {'image_processor': PROCESSOR}, (MEAN, STD)),
    ({'architecture': 'vit', 'pretrained_cfg': STATED}, {}, HALF),
    (HUGGING_FACE, None, HALF),
    (HUGGING_FACE, {}, HALF),
    (HUGGING_FACE, PROCESSOR, (MEAN, STD)),
    (HUGGING_FACE, {'image_mean': 0.4, 'image_std': [0.3]}, ([0.4], [0.3])),
    # The file of all processors comes first.
    (HUGGING_FACE, ({'image_mean': 0.1}, {'tokenizer': {}}), ([0.1], [0.5])),
    (HUGGING_FACE, ({'image_mean': 0.1}, {'image_processor': PROCESSOR}),
     (MEAN, STD)),
    (HUGGING_FACE, PROCESSOR | {'do_normalize': False}, ([0.0], [1.0])),
    (HUGGING_FACE, {'rescale_factor': 1 / 127.5}, ([0.5], [0.5], 1 / 127.5)),
    (HUGGING_FACE, PROCESSOR | {'image_processor_type': 'BitImageProcessor'},
     (MEAN, STD)),
    (HUGGING_FACE, {'feature_extractor_type': 'DeiTFeatureExtractor'}, HALF),
  ],
)  # fmt: skip
def test_pixels_are_those_of_the_files(config, processor, theirs, tmp_path):
  arrays = write(tmp_path, config, processor)
  mean, std, factor = (*theirs, 1 / 255)[:3]
  inputs = (BYTES * factor - np.array(mean)) / std
  want = public_vits.forward(arrays, inputs)
  for ours in (convert_images.HALF, Pixels((0.1, 0.2, 0.3), (0.4,))):
    for path in (tmp_path, tmp_path / 'model.safetensors'):
      got = logits(path, BYTES, ours)
      np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


CLIP = {'image_processor_type': 'CLIPImageProcessor'}


@pytest.mark.parametrize(
  ('config', 'processor', 'message'),
  [
    (HUGGING_FACE, {'do_rescale': False}, 'do_rescale: expected true'),
    (HUGGING_FACE, {'offset': True}, 'offset: expected false'),
    (HUGGING_FACE, {'do_flip_channel_order': True}, 'do_flip_channel_order'),
    (HUGGING_FACE, CLIP, 'image_mean: expected .*, got None'),
    (HUGGING_FACE, {'image_std': [0.2, 0.0, 0.2]}, r'image_std: .*\(0.0, 1'),
    (HUGGING_FACE, {'image_std': []}, r'image_std: .*got \[\]'),
    (HUGGING_FACE, {'image_mean': [float('nan')]}, 'is damaged .*finite'),
    (HUGGING_FACE, {'image_mean': [0.1] * 4}, 'mean: expected 1 number, or 3'),
    (HUGGING_FACE, {'rescale_factor': '1/255'}, 'rescale_factor: expected'),
    (HUGGING_FACE, [], 'expected an object, got list'),
    ({'architecture': 'vit', 'pretrained_cfg': {'mean': [*MEAN]}}, None,
     'pretrained_cfg: std: expected .*, got None'),
  ],
)  # fmt: skip
def test_what_cannot_be_folded_is_refused(config, processor, message, tmp_path):
  write(tmp_path, config, processor)
  with pytest.raises(ValueError, match=message):
    convert_vit.load(tmp_path)


@pytest.mark.peers
@pytest.mark.parametrize('kind', ['ViT', 'DeiT'])
@pytest.mark.parametrize(
  ('model', 'options'),
  [
    ({}, {}),
    ({'layer_norm_eps': 1e-6, 'num_attention_heads': 2}, PROCESSOR),
    ({'hidden_act': 'gelu_pytorch_tanh'}, {'do_normalize': False}),
    ({'hidden_act': 'gelu'}, {'rescale_factor': 1 / 100} | PROCESSOR),
  ],
)  # fmt: skip
def test_logits_of_transformers_with_its_image_processor(
  kind, model, options, tmp_path
):
  torch, transformers = peers.torch_and_transformers()
  sizes = dict(
    hidden_size=16, num_hidden_layers=2, intermediate_size=24, patch_size=4,
    num_labels=5, layer_norm_eps=1e-6,
  )  # fmt: skip
  config = HUGGING_FACE | sizes | model
  write(tmp_path, config, None)
  theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path)
  processor = getattr(transformers, f'{kind}ImageProcessor')(
    size={'height': 16, 'width': 16}, do_center_crop=False, **options
  )
  processor.save_pretrained(tmp_path)
  pixels = processor(list(BYTES), return_tensors='pt')['pixel_values']
  with torch.no_grad():
    want = theirs.eval().double()(pixels.double()).logits.numpy()
  got = logits(tmp_path, BYTES, **convert_vit.load(tmp_path).fields)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
