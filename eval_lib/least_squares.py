"""L2-regularised least squares in closed form, for every strength at once.

Targets are -1 and 1, features are standardised, and a large constant feature
is the bias, as in big_vision's few-shot evaluation. NumPy in float64: the
matrices are small, and the result is the same on every accelerator.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

L2_GRID = 2.0 ** np.arange(-10, 21)
# Kept if no training image is left to choose with; big_vision's constant.
L2_WITHOUT_HELD_OUT = 2.0**10
# A large constant feature: the bias is then almost free of regularisation.
BIAS = 100.0


@dataclasses.dataclass(frozen=True)
class Regression:
  """Least squares for every L2 strength, after one eigen-decomposition.

  With X `[M, D + 1]` (standardised features and the bias) and Y `[M, classes]`
  the weights are `X^T (X X^T + l2 I)^-1 Y = (X^T X + l2 I)^-1 X^T Y`; the
  smaller of the two matrices is decomposed as `Q diag(eigenvalues) Q^T`, and
  the weights are `left diag(1 / (eigenvalues + l2)) right`. All float64.

  Attributes:
    mean: of the features, `[D]`.
    deviation: standard deviation of the features, `[D]`.
    eigenvalues: `[R]`, R = min(M, D + 1).
    left: `[D + 1, R]`.
    right: `[R, classes]`.
  """

  mean: Float[np.ndarray, ' D']
  deviation: Float[np.ndarray, ' D']
  eigenvalues: Float[np.ndarray, ' R']
  left: Float[np.ndarray, 'D_1 R']
  right: Float[np.ndarray, 'R classes']

  def weights(self, l2: float) -> Float[np.ndarray, 'D_1 classes']:
    """The least-squares solution for one L2 strength > 0."""
    return (self.left / (self.eigenvalues + l2)) @ self.right

  def accuracies(
    self,
    features: Float[np.ndarray, 'B D'],
    labels: Int[np.ndarray, ' B'],
    strengths: Iterable[float],
  ) -> list[float]:
    """For each L2: the share of rows with the largest output at their label."""
    inputs = _with_bias((features - self.mean) / self.deviation)
    outputs = (inputs @ self.weights(l2) for l2 in strengths)
    return [float(np.mean(out.argmax(-1) == labels)) for out in outputs]


def fit(
  features: Float[np.ndarray, 'M D'],
  labels: Int[np.ndarray, ' M'],
  num_classes: int,
) -> Regression:
  """Prepares the regression of labels on features for any L2 strength.

  Args:
    features: of the shots, any float dtype; computed with in float64.
    labels: in [0, num_classes).
    num_classes: width of the output.
  """
  features = features.astype(np.float64)
  mean, deviation = features.mean(0), features.std(0)
  # A feature that is constant over the shots becomes zero, and its weight
  # too. A tiny divisor instead would blow up the feature on other images.
  deviation = np.where(deviation > 1e-9 * (1 + np.abs(mean)), deviation, np.inf)
  inputs = _with_bias((features - mean) / deviation)
  targets = 2.0 * np.eye(num_classes)[labels] - 1.0
  if len(inputs) < inputs.shape[1]:
    eigenvalues, vectors = np.linalg.eigh(inputs @ inputs.T)
    left, right = inputs.T @ vectors, vectors.T @ targets
  else:
    eigenvalues, vectors = np.linalg.eigh(inputs.T @ inputs)
    left, right = vectors, vectors.T @ (inputs.T @ targets)
  # Both matrices are positive semi-definite; rounding can say otherwise.
  return Regression(mean, deviation, eigenvalues.clip(0.0), left, right)


def choose_l2(
  regression: Regression,
  features: Float[np.ndarray, 'B D'],
  labels: Int[np.ndarray, ' B'],
) -> float:
  """The strength most accurate on held-out images; of equals the strongest.

  Without held-out images it is `L2_WITHOUT_HELD_OUT`.
  """
  if not len(labels):
    return L2_WITHOUT_HELD_OUT
  scores = regression.accuracies(features, labels, L2_GRID)
  best = max(range(len(L2_GRID)), key=lambda i: (scores[i], i))
  return float(L2_GRID[best])


def _with_bias(inputs: Float[np.ndarray, 'B D']) -> Float[np.ndarray, 'B D_1']:
  return np.pad(inputs, ((0, 0), (0, 1)), constant_values=BIAS)
