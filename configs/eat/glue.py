r"""EAT on GLUE: a dense model, then exits and pruning, or a student.

  python -m launch.train --workdir=/tmp/sst2 \
      --config=configs/eat/glue.py:task=sst2,model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/sst2_eat \
      --config=configs/eat/glue.py:task=sst2,teacher=/tmp/sst2,data=DIR

Arguments:

  task        sst2, cola, mrpc, qqp, stsb (a regression), mnli, qnli, rte, wnli
  model       eat (default), dense, or student (every second layer of the
              teacher, checkpoint or variant, as DistilBERT)
  data        folder of the TSV files (official or with named columns); empty
              for TFDS `glue/*` prepared on this machine
  pretrained  a Hugging Face directory to start from, of BERT, RoBERTa, ...
  teacher     a finished dense run, from which EAT and students are distilled;
              without pretrained they start from its parameters
  vocabulary  a tokenizer directory or vocab.txt, needed without a checkpoint
  variant     sizes without a checkpoint: tiny, mini, small, medium, distil,
              minilm, base, large
  epochs      3; pruning is annealed after the first, at once with epochs=1
  parts       of EAT, any of p (pruning), w (window), e (exits); by default pe,
              with recipe=paper pwe: a window saves no time up to 512 tokens and
              separates two texts
  submit      1: the training ends with answers to GLUE's test splits, as files
              in WORKDIR/submission
  exits       layers with a head besides the last one, such as 2-3-4
  recipe      how exits learn: paper, or default: they read [CLS] and the mean
              of the tokens, learn at ten times the rate, and from later heads
  prunes      layers after which 30 % of the tokens are removed, such as 2-4

The exit layer is 4 (paper), or the middle of a model of 4 or fewer layers;
tokens are pruned after it and after the layer at half its depth. Regressions
exit where two heads in a row agree, so they have exits at 3 and 4; `patience`
also needs two heads: exits=3-4. Phases and losses follow EAT, section 5.
Results, recipes and times: docs/eat_results.md.
"""

import ml_collections

from configs import common

# Rows of 128 tokens but for these tasks.
LENGTHS = {'sst2': 256, 'qqp': 256, 'mnli': 320, 'qnli': 256, 'rte': 256}
# Their rows share phrases, premises, questions or articles, so a held-out part
# of train is not independent: temperatures are fitted on half of the validation
# split instead.
SHARES_TEXTS = ('sst2', 'mnli', 'qqp', 'qnli', 'wnli')
DEPTHS = {
  'base': 12, 'tiny': 2, 'mini': 4, 'small': 4, 'medium': 8, 'distil': 6,
  'minilm': 6, 'large': 24,
}  # fmt: skip
# Classes, dense and adaptive; of another encoder than BERT by its model_type.
BERT = 'model_lib.bert:BertClassifier', 'eat.model:EatClassifier'
OTHERS = {
  'modernbert': (
    'model_lib.modern_bert:ModernBertClassifier', 'eat.model:EatModernBert'
  ),
}  # fmt: skip
ARGUMENTS = dict(
  model=('eat', 'dense', 'student'), data='', pretrained='', teacher='',
  vocabulary='', variant=tuple(DEPTHS), epochs=3, parts='', exits='',
  recipe=('default', 'paper'), prunes='',
)  # fmt: skip


def get_config(arg=''):
  a = common.parse_arg(arg, task=common.GLUE, submit=0, **ARGUMENTS)
  c = fine_tuning(a)
  split = common.glue_split(a.task)
  c.evals = dict(dev=dict(type='glue', split=split))
  if a.task != 'stsb':  # a regression has no confidence
    # Rows that the model was not trained on.
    if a.task in SHARES_TEXTS:
      unseen, judged = f'{split}[:50%]', f'{split}[50%:]'
    else:
      c.train_split, unseen, judged = 'train[:95%]', 'train[95%:]', split
    c.evals.update(of_confidence(judged, unseen))
  if a.submit:
    c.evals.update(common.submissions(a.task))
  return c


def of_confidence(split, calibration_split):
  """Returns evaluations of the confidence at exits."""
  splits = dict(split=split, calibration_split=calibration_split)
  calibration = dict(type='calibration', threshold=0.9, **splits)
  return dict(calibration=calibration, frontier=dict(type='frontier', **splits))


def fine_tuning(a):
  """Returns a run of the arguments, without evaluations."""
  parts, checkpoint = parts_of(a), a.pretrained or a.teacher
  kind, depth = '', DEPTHS[a.variant]
  if checkpoint:
    kind, depth, _ = common.encoder_of(checkpoint)
  encoders = (them for key, them in OTHERS.items() if kind in (key, *them))
  dense, adaptive = next(encoders, BERT)
  c = ml_collections.ConfigDict()
  c.task = 'eat.task:FineTune'
  c.batch_size = 32
  c.dataset = common.glue(
    a, tokenizer=a.vocabulary or checkpoint,
    max_length=LENGTHS.get(a.task, 128), length_buckets=(16, 32, 64, 128, 256),
  )  # fmt: skip
  c.model = dict(name=dense)
  if checkpoint:
    c.model.from_checkpoint = checkpoint
  else:
    c.model.variant = a.variant
  c.loss = dict(
    temperature=2.0, teacher=a.teacher, distill_weight=0.5,
    self_distill_weight=0.0,
  )  # fmt: skip
  c.optimizer = common.adamw(3e-5 if a.task == 'mnli' else 2e-5)
  c.phases = (dict(epochs=float(a.epochs)),)
  # The head of a pretrained model is for another task.
  skip = ['^head/'] * bool(a.pretrained)
  c.warm_start = dict(workdir=checkpoint)
  if a.model == 'student':
    c.model.depth = (depth + 1) // 2
    if checkpoint:  # layers 1, 3, 5, ..., as DistilBERT begins
      skip += ['^dropped_'] * (depth > 1)
      c.warm_start.renames = tuple(
        f'^block_{i}/->' + (f'dropped_{i}/' if i % 2 else f'block_{i // 2}/')
        for i in range(depth)
      )
  if a.model == 'eat':
    last = 4 if depth > 4 else depth // 2  # the paper's exit, or the middle
    # A regression needs two heads: it exits where their predictions agree.
    first = max(1, last - (a.task == 'stsb'))
    exits = common.layers('exits', a.exits) or tuple(range(first, last + 1))
    exits = exits if 'e' in parts else ()
    skip += ['^exit_'] * bool(exits)
    prunes = prune(c, a, last) if 'p' in parts else ()
    if exits and a.recipe == 'default':
      c.model.exit_mean, c.optimizer.scales = True, ('^exit_->10',)
      c.loss.update(self_distill_weight=1.0, self_distill_from='later')
    c.model.update(
      name=adaptive, exit_layers=exits, prune_layers=prunes,
      prune_ratios=(0.3,) * len(prunes),
    )  # fmt: skip
    if dense == BERT[0]:
      c.model.window = 32 if 'w' in parts else 0
    expected = f"letters of 'pe', as the attention of {kind} is local already"
    is_legal = 'w' not in parts or dense == BERT[0]
    common.expect(is_legal, 'parts', expected, parts)
  c.warm_start.skip = tuple(skip)
  c.checkpoint = dict(every_steps=500)
  return c


def prune(c, a, last):
  """Sets the phases of pruning; returns the layers after which tokens go."""
  warm, knob = a.epochs > 1, dict(prune_scale=('linear', 0.0, 1.0))
  anneal = dict(name='anneal', epochs=float(a.epochs - warm), knobs=knob)
  first = dict(name='warm', epochs=1.0, knobs=dict(prune_scale=0.0))
  c.phases = (first, anneal) if warm else (anneal,)
  layers = common.layers('prunes', a.prunes)
  return layers or tuple(sorted({-(-last // 2), last} - {0}))


def parts_of(a):
  """Returns the parts of EAT; raises ValueError for contradictions."""
  parts = a.parts or ('pwe' if a.recipe == 'paper' else 'pe')
  legal = "letters of 'pwe', such as pw"
  common.expect(set(parts) <= set('pwe'), 'parts', legal, parts)
  is_eat = a.model == 'eat'
  expected = f'only with model=eat, which is {a.model}'
  common.expect(is_eat or not a.parts, 'parts', expected, a.parts)
  needs = {'exits': 'e', 'recipe': 'e', 'prunes': 'p'}
  for name, part in needs.items():
    is_default = a[name] in ('', 'default')
    is_legal = is_default or (is_eat and part in parts)
    expected = f'only with model=eat and {part!r} in parts'
    expected = f'{expected}, which are {a.model}, {parts}'
    common.expect(is_legal, name, expected, a[name])
  return parts
