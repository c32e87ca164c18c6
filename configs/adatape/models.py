"""Sizes that the configurations of AdaTape share: tapes, baselines, limits.

Tape tokens share the feed-forward networks of the others, as in Table 6, unless
a configuration says otherwise. Table 4 has no loss for a learnable bank; noise
and drop (A.7) are for that bank only, and with an input bank there is no [CLS]
token (Table 2 prints 59 = 49 + 10).
"""

from configs import common

_CLASSIFY = 'train_lib.classification:Classification'
_PONDER = 'adatape.task:PonderClassification'
_TAPE = 'adatape.task:TapeClassification'
_COST = dict(ponder_weight=0.01)  # of UT, U2T and UViT; not printed
_READ = dict(
  name='adatape.model:AdaTapeViT', max_steps=10, threshold=2.0,
  tokens_per_step=5,
)  # fmt: skip
TAPES = 'learn', 'input'
# Task, weights of the loss and fields of each model (section 3.1, Table 4).
MODELS: dict[str, tuple[str, dict, dict]] = {
  'learn': (_TAPE, dict(tape_weight=0.0), dict(
    _READ, bank='learnable', bank_size=10_000, query_noise=0.01, bank_drop=0.1,
  )),
  'input': (_TAPE, dict(tape_weight=0.01), dict(
    _READ, bank='input', bank_patch_size=8, query_noise=0.0, bank_drop=0.0,
    pool='gap',
  )),
  'vit': (_CLASSIFY, {}, dict(name='model_lib.vit:ViT')),
  'plainvit': (_CLASSIFY, {}, dict(
    name='model_lib.vit:ViT', pool='gap', positions='sincos2d'
  )),
  'deit': ('adatape.deit:Distillation', {}, dict(name='adatape.deit:DeiT')),
  'ut': (_PONDER, _COST, dict(name='adatape.universal:UniversalViT')),
  'u2t': (_PONDER, _COST, dict(name='adatape.universal:UnsharedViT')),
  'uvit': (_PONDER, _COST, dict(name='adatape.universal:UViT')),
  'avit': (
    'adatape.avit:AViTClassification', {}, dict(name='adatape.avit:AViT')
  ),
  'ponder': (
    'adatape.ponder_vit:PonderNetClassification', {},
    dict(name='adatape.ponder_vit:PonderViT'),
  ),
  '3ffn': (_CLASSIFY, {}, dict(name='adatape.vit_3ffn:ViT3FFN')),
}  # fmt: skip
NAMES = tuple(name for name in MODELS if name != '3ffn')
# Fields that fix the length of the tape, or length and content (Table 2). 'act'
# halts by ACT instead (A.4): its trained scores weight the tokens, which
# LayerNorm undoes, so there is no network between the two. None has a
# tape loss.
ABLATIONS = {
  'adaptive': {},
  'length': dict(fixed_length=True),
  'content': dict(bank='none'),
  'act': dict(fixed_length=True, act=True, read_mlp=''),
}


def build(c, model, **fields):
  """Sets task, model with further `fields`, and weights of the loss."""
  c.task, weights, base = MODELS[model]
  c.loss.update(weights)
  c.model = base | fields


def paper(c, model, variant):
  """Sets a model in the paper's sizes.

  U2T's follow from the parameters and FLOPs printed in Tables 1 and 6, A-ViT's
  are of the authors' code: 10 * x[0] - 30 (Ti) or - 75 (S).
  """
  is_large, is_tiny = variant.startswith('L/'), variant.startswith('Ti/')
  depth = 24 if is_large else 12
  limits: dict[str, dict] = {
    'ut': dict(max_steps=depth),
    'ponder': dict(max_steps=depth),
    'u2t': dict(max_steps=depth + (1 if variant[:2] in ('Ti', 'S/') else 3)),
    'uvit': dict(ut_steps=6 if is_large else 3),
    'avit': dict(beta=-30.0 if is_tiny else -75.0),
    'input': dict(threshold=1.0, tokens_per_step=10) if is_large else {},
  }
  build(c, model, variant=variant, **limits.get(model, {}))


def ablate(c, model, ablation):
  """Changes the tape as Table 2 does."""
  if ablation != 'adaptive':
    expected = 'adaptive unless the model is an AdaTape'
    common.expect(model in TAPES, 'ablation', expected, ablation)
    c.model.update(ABLATIONS[ablation])
    c.loss.tape_weight = 0.0
