"""A run as the teacher of another one (Hinton et al. 2015)."""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from train_lib.classification import Classification

TEACHER = 'loss.teacher'
Teacher = Annotated[str, "the directory of a run, or ''"]


class Student(Classification):
  """Mixin of a Task whose `loss.teacher` is a `Teacher`."""

  _class_ids: Any = None  # the teacher's, by class

  @classmethod
  def validate_config(cls, config: dict[str, Any]) -> None:
    """Also checks that the teacher is a run."""
    super().validate_config(config)
    if config['loss']['teacher']:
      from train_lib import loading  # it imports build, which imports tasks

      loading.load_config(config['loss']['teacher'], key=TEACHER)

  @functools.cached_property
  def teacher(self) -> Any:
    """The teacher, or None; ConfigError if it has other classes or inputs."""
    directory, info = self.config['loss']['teacher'], self.info
    if not directory:
      return None
    from dataset_lib import contract
    from train_lib import loading

    config = loading.load_config(directory, key=TEACHER)
    teacher = loading.restore(directory, config)
    theirs, whose = teacher.task.info, f'{directory} has'
    contract.check_inputs(theirs, info, TEACHER, whose)
    same = *contract.SCALING, 'resize_small', 'crop', 'num_classes'
    contract.check(theirs, info, same, TEACHER, whose)
    self._class_ids = contract.class_ids(theirs, info, TEACHER, whose)
    return teacher

  def init_frozen(self) -> Any:
    """Returns the teacher's parameters, if there is one."""
    if self.teacher is None:
      return {}
    mesh = jax.sharding.get_mesh()
    return dataclasses.replace(self.teacher, mesh=mesh).variables

  def teacher_logits(self, frozen: Any, batch: Any) -> Float[Array, 'B O']:
    """Returns the teacher's logits of our classes, without noise, gradient."""
    params, state = frozen['params'], frozen['model_state']
    logits = self.teacher.task.apply(params, state, batch)[0]
    logits = jax.lax.stop_gradient(logits)
    return logits if self._class_ids is None else logits[:, self._class_ids]

  def divergence(
    self, target: Float[Array, 'B O'], logits: Float[Array, 'B O']
  ) -> Float[Array, ' B']:
    """Returns `T^2 KL(softmax(target / T) || softmax(logits / T))`, in nats.

    T is `loss.temperature`. Of one output: the squared difference, divided by
    the variance of the labels.
    """
    if logits.shape[-1] == 1:
      difference = target[:, 0] - logits[:, 0]
      return jnp.square(difference / self.info.label_scale[1])
    temperature = self.config['loss']['temperature']
    teacher, student = (
      jax.nn.log_softmax(x / temperature) for x in (target, logits)
    )
    kl = optax.losses.kl_divergence_with_log_targets(student, teacher)
    return temperature**2 * kl
