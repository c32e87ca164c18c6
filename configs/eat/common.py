"""What the GLUE experiments share: the paper's protocol and its arguments.

Arguments of every file beside this one:

  model       eat (default), dense, or student (every second layer of the
              teacher, as DistilBERT, or of the checkpoint or variant)
  data        folder of the TSV files (official or with named columns); empty
              for TFDS `glue/*` prepared on this machine
  pretrained  a Hugging Face directory (config.json, vocab.txt,
              model.safetensors) to start from
  teacher     the directory of a finished dense run: EAT and students start
              from its parameters and are distilled from it; not together
              with pretrained
  vocabulary  a tokenizer directory or vocab.txt, needed without a checkpoint
  variant     sizes without a checkpoint: tiny, mini, small, medium, distil,
              minilm, base, large
  examples    take so many rows of the split train (0: all), the same for every
              seed; what is held out of it is cut to as many
  epochs, batch, max_length, seed
  parts       of EAT, for the ablation: any of p (pruning), w (window),
              e (exits), default pwe; pe is better for rows of fewer than 256
              tokens, where a window saves no time and cuts pairs apart
  exits       layers with a head besides the last one, such as 2-3-4
  prunes      layers after each of which 30 % of the tokens go, such as 2-4

Without exits and prunes the layers follow from the depth: the paper's, an exit
at 4 and pruning after 2 and 4, wherever they fit, and their like in a model of
4 layers or fewer (see `eat.heads`). Regressions have exits at 3 and 4, because
they exit where two consecutive heads agree; patience has the same need, ask
for it with exits=3-4. A head's loss weighs 0.3, that of the last one 1.

Stages and losses are those of EAT, section 5: one epoch without pruning, then
the ratios annealed, or annealed at once with epochs=1; AdamW, weight decay
0.01, warm-up over 10 % of the steps, then linear decay.
"""

import ml_collections

from configs import common


def fine_tuning(
  arg: str,
  task: str,
  lr: float = 2e-5,
  max_length: int = 128,
  num_exits: int = 1,
  shares_texts: bool = False,
) -> ml_collections.ConfigDict:
  """Fine-tuning on a task of GLUE.

  Args:
    arg: the argument of the config file; see the module.
    task: its name in GLUE.
    lr: peak learning rate.
    max_length: in tokens.
    num_exits: heads besides the last one, unless the argument `exits` says.
    shares_texts: whether rows of the split train share texts, or phrases.

  Raises:
    ValueError: for an illegal argument.
  """
  arguments = dict(
    model=('eat', 'dense', 'student'), data='', pretrained='', teacher='',
    vocabulary='', variant='base', examples=0, epochs=3, batch=32,
    max_length=max_length, seed=0, parts='pwe', exits='', prunes='',
  )  # fmt: skip
  a = common.parse_arg(arg, **arguments)
  _check(a)
  c = common.base()
  c.seed = a.seed
  c.task = (
    'eat.student:Student' if a.model == 'student' else 'eat.task:FineTune'
  )
  c.batch_size = a.batch
  c.dataset = dict(
    name='glue',
    task=task,
    directory=a.data,
    builder='' if a.data else f'glue/{task}',
    tokenizer=a.vocabulary,
    max_length=a.max_length,
    length_buckets=(16, 32, 64, 128, 256),
    max_examples=a.examples,
  )
  # Sizes of 0 and empty names are filled in from the checkpoint, or from the
  # variant where there is none; layers of 0 and empty weights from the depth.
  c.model = dict(
    variant='' if a.pretrained or a.teacher else a.variant,
    width=0, depth=0, mlp_dim=0, num_heads=0, vocab_size=0, max_positions=0,
    type_vocab_size=-1, activation='', norm_epsilon=0.0, pooler_activation='',
    dropout=0.1, attention_dropout=0.1, classifier_dropout=0.1,
  )  # fmt: skip
  c.loss.update(
    exit_weights=(), temperature=2.0, teacher=a.teacher,
    distill_weight=0.5, self_distill_weight=0.0,
  )  # fmt: skip
  c.optimizer.update(
    lr=lr, schedule='linear', warmup_steps=0.1, weight_decay=0.01, eps=1e-6
  )
  c.warm_start.workdir = a.teacher or a.pretrained
  c.stages = dict(stage1=common.stage(epochs=float(a.epochs)))
  split = 'validation_matched' if task == 'mnli' else 'validation'
  c.evals = dict(dev=dict(type='glue', split=split))
  if task != 'stsb':  # numbers have no confidence
    _calibrate(c, split, shares_texts)
  c.checkpoint.update(every_steps=500, keep=1)
  if a.model == 'eat':
    _adaptive(c, a, num_exits)
  else:
    _dense(c, a)
  return c.lock()


def _calibrate(
  c: ml_collections.ConfigDict, split: str, shares_texts: bool
) -> None:
  """Temperatures and thresholds, on rows that the model has not seen.

  Five percent of the rows of train, where they have nothing to do with the
  others. Nine in ten rows of SST-2 are phrases of another one, and rows of
  MNLI, QQP, QNLI and WNLI share a premise, a question or an article: what a
  model is sure of there says nothing of new texts. Their calibration takes half
  of the validation split, and leaves the other half to be judged on.
  """
  if shares_texts:
    c.train_split = 'train'
    held_out, judged = f'{split}[:50%]', f'{split}[50%:]'
  else:
    c.train_split = 'train[:95%]'
    held_out, judged = 'train[95%:]', split
  c.evals.calibration = dict(
    type='calibration', split=judged, calibration_split=held_out,
    threshold=0.9, epsilon=0.0, layers=(),
  )  # fmt: skip
  c.evals.frontier = dict(
    type='frontier', split=judged, calibration_split=held_out, layers=()
  )


def _check(a: ml_collections.ConfigDict) -> None:
  """Raises ValueError for arguments that do not go together."""
  if a.pretrained and a.teacher:
    raise ValueError(
      'config argument pretrained: expected nothing beside teacher, from whose '
      f'parameters the run starts, got {a.pretrained!r} and teacher='
      f'{a.teacher!r}; leave one of them out'
    )
  if not set(a.parts) <= set('pwe'):
    raise ValueError(
      "config argument parts: expected letters of 'pwe', such as pw, got "
      f'{a.parts!r}'
    )
  if a.parts != 'pwe' and a.model != 'eat':
    raise ValueError(
      f'config argument parts: expected only with model=eat, got {a.parts!r} '
      f'and model={a.model}; leave one of them out'
    )
  for name, part in (('exits', 'e'), ('prunes', 'p')):
    if a[name] and (a.model != 'eat' or part not in a.parts):
      raise ValueError(
        f'config argument {name}: expected only with model=eat and {part!r} '
        f'in parts, got model={a.model} and parts={a.parts}'
      )


def _layers(name: str, text: str, default: tuple[int, ...]) -> tuple[int, ...]:
  """Reads '2-3-4'; the default if it is empty."""
  items = text.split('-') if text else []
  if not all(item.isdecimal() for item in items):
    raise ValueError(
      f'config argument {name}: expected layers such as 2-3-4, got {text!r}'
    )
  return tuple(map(int, items)) or default


def _dense(c: ml_collections.ConfigDict, a: ml_collections.ConfigDict) -> None:
  c.model.name = 'model_lib.bert:BertClassifier'
  if a.pretrained:
    c.warm_start.skip = ('^head/',)


def _adaptive(
  c: ml_collections.ConfigDict, a: ml_collections.ConfigDict, num_exits: int
) -> None:
  exits = _layers('exits', a.exits, (0,) * num_exits) if 'e' in a.parts else ()
  prunes = _layers('prunes', a.prunes, (0, 0)) if 'p' in a.parts else ()
  c.model.update(
    name='eat.model:EatClassifier',
    prune_layers=prunes,
    prune_ratios=(0.3,) * len(prunes),
    prune_scores='norm',
    min_tokens=1,
    merge=False,
    window=32 if 'w' in a.parts else 0,
    exit_layers=exits,
  )
  skip = () if a.teacher else ('^head/',)
  c.warm_start.skip = (*skip, '^exit_') if exits else skip
  if prunes:
    # The last stage ends at the full ratios, and nothing recompiles.
    warm = a.epochs > 1
    c.stages = dict(
      stage2_anneal=common.stage(
        epochs=float(a.epochs - warm),
        knobs=dict(prune_scale=('linear', 0.0, 1.0)),
      )
    )
    if warm:
      c.stages.stage1_warm = common.stage(
        epochs=1.0, knobs=dict(prune_scale=0.0)
      )
