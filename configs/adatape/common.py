"""Models of AdaTape's experiments and the models they are compared with."""

from typing import Any

import ml_collections


def parity_model(
  c: ml_collections.ConfigDict, model: str, n: int, size: dict[str, int]
) -> None:
  """Sets task, model and loss of a parity experiment.

  Args:
    c: changed in place.
    model: 'adatape', 'transformer' or 'ut'.
    n: symbols in a sequence, N; AdaTape reads K = 2 tokens at a time, at most
      T = N / 2 times, with threshold tau = N / 4 (AdaTape, section 3.2).
    size: depth, width, mlp_dim and num_heads of the encoder.

  Raises:
    ValueError: fewer than 4 symbols.
  """
  if n < 4:
    raise ValueError(f'config argument n: expected an integer >= 4, got {n}')
  c.loss = dict(label_smoothing=0.0)
  if model == 'transformer':
    c.task = 'train_lib.classification:Classification'
    c.model = dict(name='model_lib.vit:TokenTransformer', **size)
  elif model == 'ut':
    # One shared block, applied at least 6 times at most.
    steps = max(6, size.pop('depth'))
    c.task = 'adatape.task:PonderClassification'
    c.model = dict(
      name='adatape.universal:UniversalTransformer', max_steps=steps, **size
    )
    c.loss.ponder_weight = 0.01
  else:
    c.task = 'adatape.task:TapeClassification'
    c.model = dict(
      name='adatape.parity:ParityModel',
      tokens_per_step=2,
      max_steps=n // 2,
      threshold=n / 4,
      query_dim=16,
      norm_scale=0.5,
      **size,
    )
    c.loss.tape_weight = 0.01


def image_model(
  c: ml_collections.ConfigDict,
  model: str,
  size: dict[str, Any],
  learn: dict[str, Any],
  finer: dict[str, Any],
) -> None:
  """Sets task and model of an image experiment, and the tape loss.

  Args:
    c: changed in place; has `loss`.
    model: 'learn' or 'input', the two banks of AdaTape, or 'vit'.
    size: the encoder, a variant such as 'Ti/16' or explicit sizes.
    learn: further fields with a learnable bank.
    finer: further fields with a bank of finer patches of the input.
  """
  if model == 'vit':
    c.task = 'train_lib.classification:Classification'
    c.model = dict(name='model_lib.vit:ViT', **size)
    return
  c.task = 'adatape.task:TapeClassification'
  c.model = dict(name='adatape.model:AdaTapeViT', **size)
  # Table 4: a learnable bank needs no tape loss. Noise and drop (A.7) are for
  # that bank only.
  if model == 'learn':
    c.model.update(bank='learnable', query_noise=0.01, bank_drop=0.1, **learn)
    c.loss.tape_weight = 0.0
  else:
    c.model.update(bank='input', query_noise=0.0, bank_drop=0.0, **finer)
    c.loss.tape_weight = 0.01
