r"""EAT on tags of words: parts of speech, named entities, chunks.

  python -m launch.train --workdir=/tmp/tags \
      --config=configs/eat/tags.py:data=DIR,column=upos,pretrained=DIR

Arguments:

  data        a folder of train, dev and test files, CoNLL-U or other CoNLL
              files, plain or gzip; or one file, with held_out
  column      the tags: upos, xpos, deprel or a key of MISC, of CoNLL-U; of
              other files a column's number from 0, or -1 (default) for the last
  held_out    percent of the train split to evaluate on; 0 (default) for the
              dev file
  pretrained  a Hugging Face directory to start from
  vocabulary  a tokenizer directory or vocab.txt, needed without a checkpoint
  variant     sizes without a checkpoint, as in configs/eat/glue.py
  epochs      3; pruning is annealed after the first, at once with epochs=1
  parts       any of p (pruning, default) and w (window); nothing for a BERT
  prunes      layers after which 30 % of the tokens are removed, such as 2-4

Pruned tokens are tagged by the state that they had when they were pruned.
"""

import ml_collections

from configs import common
from configs.eat import glue


def get_config(arg=''):
  a = common.parse_arg(
    arg, data='', column='-1', held_out=0, pretrained='', vocabulary='',
    variant=tuple(glue.DEPTHS), epochs=3, parts='p', prunes='',
  )  # fmt: skip
  common.expect(set(a.parts) <= set('pw'), 'parts', "letters of 'pw'", a.parts)
  depth = glue.DEPTHS[a.variant]
  c = ml_collections.ConfigDict()
  c.task = 'eat.tagging:Tagging'
  c.batch_size = 32
  c.dataset = dict(
    name='tags', directory=a.data, column=a.column, max_length=128,
    tokenizer=a.vocabulary or a.pretrained, length_buckets=(16, 32, 64),
  )  # fmt: skip
  c.model = dict(name='eat.tagging:EatTagger', dropout=0.1)
  if a.pretrained:
    depth = common.encoder_of(a.pretrained)[1]
    c.model.from_checkpoint = a.pretrained
    c.warm_start = dict(workdir=a.pretrained, skip=('^(head|pooler)/',))
  else:
    c.model.variant = a.variant
  c.optimizer = common.adamw(5e-5)
  c.phases = (dict(epochs=float(a.epochs)),)
  last = 4 if depth > 4 else depth // 2
  prunes = glue.prune(c, a, last) if 'p' in a.parts else ()
  c.model.update(
    prune_layers=prunes, prune_ratios=(0.3,) * len(prunes),
    window=32 if 'w' in a.parts else 0,
  )  # fmt: skip
  c.train_split, split = common.held_out(a.held_out)
  c.evals = dict(dev=dict(type='classification', split=split))
  c.checkpoint = dict(every_steps=500)
  return c
