"""DeiT: a ViT with a distillation token and head (Touvron et al. 2021).

The distillation token is the second token; its head learns the teacher's
answer, the head of [CLS] the label. The logits are the mean of both heads', as
in the authors' code and timm (the paper's section 3 adds the softmaxes), the
features that of both tokens. The token has no position: it is a trained vector.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import optax
from annotated_types import Interval
from jaxtyping import Array, Float

from model_lib import flops
from model_lib.layers import build, classifier
from model_lib.logical import constrain
from model_lib.row_random import RowKeys
from model_lib.vit import Encoder, ImageTokens, ViT, class_token
from train_lib.distillation import Student, Teacher
from train_lib.terms import Term


class DeiT(ViT):
  """A ViT with a second class token and head, for distillation."""

  SHRINKS: ClassVar[bool] = False

  pool: Literal['cls'] = 'cls'

  @nn.compact
  def __call__(
    self, images: Float[Array, 'B H W E'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies images; `out['heads']` `[2, B, O]` has both heads' logits."""
    x = build(ImageTokens, self, name='tokens')(images)
    token = class_token(self, x.shape[0], self.width, 'distillation')
    x = jnp.concatenate([x[:, :1], token.astype(x.dtype), x[:, 1:]], axis=1)
    x = build(Encoder, self, name='encoder')(x, None, row_keys)
    pair, logits = x[:, :2].astype(jnp.float32), []
    for i, name in enumerate(('head', 'distillation_head')):
      head = classifier(self.num_classes, name)(pair[:, i])
      logits.append(constrain(head, 'batch', 'classes'))
    heads = jnp.stack(logits)
    return heads.mean(0), {'features': pair.mean(1), 'heads': heads}

  def image_tokens(self, input_shape: tuple[int, ...]) -> int:
    """Counts also the distillation token."""
    return super().image_tokens(input_shape) + 1

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Counts also the second head."""
    second = flops.dense(1, self.width, self.num_classes)
    return self.image_flops(input_shape, self.depth) + second


class Distillation(Student):
  """`(1 - w) CE(head, label) + w D(distillation head, teacher)`.

  Hard: D is the cross-entropy with the teacher's class (section 4, w = 1/2).
  Soft: the divergence at a temperature (w = 0.1, temperature 3). Without a
  teacher, as in evaluation, D is the cross-entropy with the label.
  """

  MODEL = DeiT

  @dataclasses.dataclass(frozen=True)
  class Loss(Student.Loss):
    """Legal fields of `loss`; labels are smoothed, teachers' classes not."""

    teacher: Teacher = ''
    distillation: Literal['hard', 'soft'] = 'hard'
    distill_weight: Annotated[float, Interval(ge=0.0, le=1.0)] = 0.5
    temperature: Annotated[float, Interval(ge=0.01, le=100.0)] = 3.0

  KNOBS = ('distill_weight',)

  def terms(self, forward):
    """Returns the losses of both heads; `teacher_agreement` is logged."""
    logits, taught = forward.out['heads']
    weight = forward.settings['distill_weight']
    first = Term(self.target_loss(forward, logits), 1 - weight)
    if not forward.frozen:
      return first, Term(self.target_loss(forward, taught), weight)
    target = self.teacher_logits(forward.frozen, forward.batch)
    second = Term(self._distance(target, taught), weight)
    same = taught.argmax(-1) == target.argmax(-1)
    return first, second, Term(same, 0.0, name='teacher_agreement')

  def _distance(self, target: Array, logits: Array) -> Array:
    if self.config['loss']['distillation'] == 'soft':
      return self.divergence(target, logits)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, target.argmax(-1))
