"""What the GLUE experiments share: the paper's protocol and its arguments.

Arguments of every file beside this one:

  model       eat (default), dense, or student (every second layer of a
              teacher, as DistilBERT)
  data        folder of the TSV files (official or with named columns); empty
              for TFDS `glue/*` prepared on this machine
  pretrained  a Hugging Face directory (config.json, vocab.txt,
              model.safetensors) to start from
  teacher     the directory of a finished dense run: EAT and students start
              from its parameters and are distilled from it
  vocabulary  a tokenizer directory or vocab.txt, needed without a checkpoint
  variant     sizes without a checkpoint: tiny, mini, small, medium, distil,
              minilm, base, large
  layers      of the teacher, for model=student
  examples    train on so many rows only (0: all), the same for every seed
  epochs, batch, max_length, seed
  parts       of EAT, for the ablation: any of p (pruning), w (window),
              e (exits), default pwe

Stages and losses are those of EAT, section 5: one epoch without pruning, then
the ratios annealed; AdamW, weight decay 0.01, warm-up over 10 % of the steps,
then linear decay.
"""

import ml_collections

from configs import common


def fine_tuning(
  arg: str, task: str, lr: float = 2e-5, max_length: int = 128, **defaults
) -> ml_collections.ConfigDict:
  """Fine-tuning on a task of GLUE.

  Args:
    arg: the argument of the config file; see the module.
    task: its name in GLUE.
    lr: peak learning rate.
    max_length: in tokens.
    **defaults: of further arguments than those above.
  """
  arguments = dict(
    model=('eat', 'dense', 'student'), data='', pretrained='', teacher='',
    vocabulary='', variant='base', layers=12, examples=0, epochs=3, batch=32,
    max_length=max_length, seed=0, parts='pwe',
  )  # fmt: skip
  a = common.parse_arg(arg, **(arguments | defaults))
  c = common.base()
  c.seed = a.seed
  c.task = 'eat.task:FineTune'
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
  # variant where there is none.
  c.model = dict(
    variant='' if a.pretrained or a.teacher else a.variant,
    width=0, depth=0, mlp_dim=0, num_heads=0, vocab_size=0, max_positions=0,
    type_vocab_size=-1, activation='', norm_epsilon=0.0, pooler_activation='',
    dropout=0.1, attention_dropout=0.1, classifier_dropout=0.1,
  )  # fmt: skip
  c.loss.update(
    exit_weights=(1.0,), temperature=2.0, teacher=a.teacher,
    distill_weight=0.5, self_distill_weight=0.0,
  )  # fmt: skip
  c.optimizer.update(
    lr=lr, schedule='linear', warmup_steps=0.1, weight_decay=0.01, eps=1e-6
  )
  c.warm_start.workdir = a.teacher or a.pretrained
  c.stages = dict(stage1=common.stage(epochs=float(a.epochs)))
  split = 'validation_matched' if task == 'mnli' else 'validation'
  # Five percent of the training rows are kept for calibration: temperatures
  # and thresholds must not be fitted on rows that were trained on.
  c.train_split = 'train[:95%]'
  c.evals = dict(dev=dict(type='glue', split=split))
  if task != 'stsb':  # numbers have no confidence
    held_out = 'train[95%:]'
    c.evals.calibration = dict(
      type='calibration', split=split, calibration_split=held_out,
      threshold=0.9, epsilon=0.0, layers=(),
    )  # fmt: skip
    c.evals.frontier = dict(
      type='frontier', split=split, calibration_split=held_out, layers=()
    )
  c.checkpoint.update(every_steps=500, keep=1)
  if a.model == 'eat':
    _adaptive(c, a)
  else:
    _dense(c, a)
  return c.lock()


def _dense(c: ml_collections.ConfigDict, a: ml_collections.ConfigDict) -> None:
  c.model.name = 'model_lib.bert:BertClassifier'
  if a.model == 'student':
    c.model.depth = a.layers // 2
    c.warm_start.renames = every_second_layer(a.layers)
    c.warm_start.skip = ('^dropped_',)
  elif a.pretrained and not a.teacher:
    c.warm_start.skip = ('^head/',)


def _adaptive(
  c: ml_collections.ConfigDict, a: ml_collections.ConfigDict
) -> None:
  prunes, exits = 'p' in a.parts, 'e' in a.parts
  c.model.update(
    name='eat.model:EatClassifier',
    prune_layers=(2, 4) if prunes else (),
    prune_ratios=(0.3, 0.3) if prunes else (),
    prune_scores='norm',
    min_tokens=1,
    merge=False,
    window=32 if 'w' in a.parts else 0,
    exit_layers=(4,) if exits else (),
  )
  if exits:
    c.loss.exit_weights = (0.3, 1.0)
  skip = () if a.teacher else ('^head/',)
  c.warm_start.skip = (*skip, '^exit_') if exits else skip
  if prunes:
    # The last stage ends at the full ratios, and nothing recompiles.
    c.stages = dict(
      stage1_warm=common.stage(epochs=1.0, knobs=dict(prune_scale=0.0)),
      stage2_anneal=common.stage(
        epochs=float(max(a.epochs - 1, 1)),
        knobs=dict(prune_scale=('linear', 0.0, 1.0)),
      ),
    )


def every_second_layer(layers: int) -> tuple[str, ...]:
  """Renames that make layers 1, 3, 5, ... of a teacher a student's layers.

  As DistilBERT is initialised (Sanh et al. 2019, section 3).
  """
  renames = []
  for index in range(layers):
    new = f'dropped_{index}/' if index % 2 else f'block_{index // 2}/'
    renames.append(f'^block_{index}/->{new}')
  return tuple(renames)
