"""What all experiments share: the fields of a run with their defaults.

Every field has a typed value here, so that an override on the command line is
checked against its type and a mistyped name is answered with the nearest one.
"""

import difflib
from typing import Any

import ml_collections


def base() -> ml_collections.ConfigDict:
  """A run with every field the trainer knows; experiments fill it in."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.task = 'train_lib.classification:Classification'
  config.dtype = 'float32'  # compute; parameters are always float32
  config.batch_size = 128  # rows of the global batch
  config.num_micro = 1  # gradient accumulation: micro-batches per step
  config.ema_decay = 0.0  # 0: no average of the parameters
  config.max_nonfinite_steps = 0  # skipped in a row before the run stops
  config.log_every = 50
  config.tensorboard = True
  config.mesh = dict(data=-1, fsdp=1, tensor=1)
  config.model = dict()
  config.loss = dict(label_smoothing=0.0)
  config.dataset = dict()
  config.train_split = 'train'
  config.loader = dict(num_threads=-1, prefetch=4)  # -1: one per core
  config.optimizer = dict(
    name='adamw',
    lr=1e-3,
    schedule='cosine',
    warmup_steps=100.0,  # a share of all steps if below 1
    end_lr=0.0,
    weight_decay=0.0,
    clip_norm=1.0,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
  )
  config.stages = dict(stage1=stage())
  config.evals = dict()
  config.checkpoint = dict(
    every_steps=1000, keep=2, best_metric='', best_mode='max'
  )
  config.warm_start = dict(workdir='', renames=(), skip=())
  config.profile = dict(start_step=10, steps=0)
  return config


def stage(**fields: Any) -> dict[str, Any]:
  """A stage of the run; give `steps`, or `epochs` with steps 0."""
  return dict(steps=0, epochs=0.0, trainable='.*') | fields


def check_parity_length(length: int) -> None:
  """Raises ValueError unless parity of so many symbols makes sense."""
  if length < 4:
    raise ValueError(
      f'config argument n: expected an integer >= 4, got {length}'
    )


def parity_model(
  config: ml_collections.ConfigDict,
  model: str,
  length: int,
  size: dict[str, int],
) -> None:
  """Sets task, model and loss of a parity experiment.

  Args:
    config: changed in place.
    model: 'adatape', 'transformer' or 'ut'.
    length: symbols in a sequence, N; AdaTape reads K = 2 at a time, at most
      T = N / 2 times, with threshold tau = N / 4 (AdaTape, section 3.2).
    size: depth, width, mlp_dim and num_heads of the encoder.
  """
  if model == 'transformer':
    config.model = dict(name='model_lib.vit:TokenTransformer', **size)
  elif model == 'ut':
    config.task = 'adatape.task:PonderClassification'
    # One shared block instead of `depth`, applied at most so often.
    steps = max(6, size.pop('depth'))
    config.model = dict(
      name='adatape.universal:UniversalTransformer', max_steps=steps, **size
    )
    config.loss.ponder_weight = 0.01
  else:
    config.task = 'adatape.task:TapeClassification'
    config.model = dict(
      name='adatape.parity:ParityModel',
      tokens_per_step=2,
      max_steps=length // 2,
      threshold=length / 4,
      query_dim=16,
      norm_scale=0.5,
      **size,
    )
    config.loss.tape_weight = 0.01


def image_model(
  config: ml_collections.ConfigDict,
  model: str,
  size: dict[str, Any],
  bank_size: int,
  bank_patch_size: int,
) -> None:
  """Sets task, model and loss of an image experiment.

  Args:
    config: changed in place.
    model: 'learn' or 'input', the two banks of AdaTape, or 'vit'.
    size: the encoder, a variant such as 'Ti/16' or explicit sizes.
    bank_size: tokens of the learnable bank.
    bank_patch_size: side of the patches of the input bank.
  """
  if model == 'vit':
    config.model = dict(name='model_lib.vit:ViT', **size)
    return
  config.task = 'adatape.task:TapeClassification'
  config.model = dict(
    name='adatape.model:AdaTapeViT',
    max_steps=10,
    threshold=2.0,
    tokens_per_step=5,
    **size,
  )
  # Table 4: no tape loss is needed for a learnable bank; the tricks of A.7
  # are for that bank only.
  if model == 'learn':
    config.model.update(
      bank='learnable', bank_size=bank_size, query_noise=0.01, bank_drop=0.1
    )
    config.loss.tape_weight = 0.0
  else:
    config.model.update(
      bank='input',
      bank_patch_size=bank_patch_size,
      query_noise=0.0,
      bank_drop=0.0,
    )
    config.loss.tape_weight = 0.01


def parse_arg(arg: str, **defaults: Any) -> ml_collections.ConfigDict:
  """Reads the argument of a config, `config.py:n=32,model=transformer`.

  Args:
    arg: what follows the colon, or the empty string.
    **defaults: the legal names with their default values; a value is read
      with the type of its default. A tuple lists the legal values of a name,
      the first being the default.

  Raises:
    ValueError: for an unknown name or an illegal value, naming the legal ones.
  """
  values = {k: v[0] if isinstance(v, tuple) else v for k, v in defaults.items()}
  for item in filter(None, (arg or '').split(',')):
    name, separator, text = item.partition('=')
    if name not in defaults or not separator:
      near = difflib.get_close_matches(name, defaults, 1)
      hint = f'did you mean {near[0]!r}? ' if near else ''
      raise ValueError(
        f'config argument {item!r}: {hint}expected name=value with a name of '
        f'{sorted(defaults)}'
      )
    values[name] = _read(name, text, defaults[name])
  return ml_collections.ConfigDict(values)


def _read(name: str, text: str, default: Any) -> Any:
  kind = type(default[0] if isinstance(default, tuple) else default)
  try:
    value = text in ('1', 'true', 'True') if kind is bool else kind(text)
  except ValueError:
    raise ValueError(
      f'config argument {name}: expected {kind.__name__}, got {text!r}'
    ) from None
  if isinstance(default, tuple) and value not in default:
    raise ValueError(
      f'config argument {name}: expected one of {list(default)}, got {text!r}'
    )
  return value
