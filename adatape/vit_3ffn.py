"""ViT with three feed-forward networks per block (AdaTape, A.11, Table 7).

The baseline with as many parameters as AdaTape and the FLOPs of a ViT: one
network for [CLS], one for each half of the patch tokens.

Table 7 prints 200.1 M parameters for B/28 and 198.9 M for B/14, with a head of
18,291 classes: 99.2 M more than the ViT, which is 21.0 networks of 4.72 M. The
text adds two to each of 12 blocks, 24 networks (214.3 M and 213.1 M). The paper
does not say which blocks have fewer. `extra_networks=21` gives the printed
counts: three networks in the last ten blocks, two in the second, one in the
first, as AdaTape's first block has no tape.
"""

from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from annotated_types import Interval

from model_lib import row_random
from model_lib.errors import FieldError
from model_lib.layers import EncoderBlock, Mlp, build
from model_lib.vit import Encoder, ViT


class SplitBlock(EncoderBlock):
  """A block with 2 or 3 networks: for [CLS], and for the patches' halves."""

  networks: int = 3

  def _feed_forward(self, x: Any, row_keys: Any, num_input_tokens: Any) -> Any:
    half = 1 + x.shape[1] // 2  # the first half has the odd patch
    parts = jnp.split(x, [1, half][: self.networks - 1], axis=1)
    outputs = []
    for index, part in enumerate(parts):
      keys = row_random.fold_rows(row_keys, index)
      outputs.append(build(Mlp, self, name=f'mlp_{index}')(part, keys))
    return jnp.concatenate(outputs, axis=1)


class SplitEncoder(Encoder):
  """An encoder of `SplitBlock`s; the last blocks are split first."""

  extra_networks: int | None = None

  def block(self, index: int) -> EncoderBlock:
    """Returns block `index`, with up to two extra networks."""
    extra = 2
    if self.extra_networks is not None:
      later = 2 * (self.depth - 1 - index)  # networks of the blocks after it
      extra = min(max(self.extra_networks - later, 0), 2)
    if not extra:
      return super().block(index)
    name = f'block_{index}'
    return build(SplitBlock, self, name=name, networks=1 + extra)


class ViT3FFN(ViT):
  """A ViT with three feed-forward networks in its blocks."""

  ENCODER: ClassVar[type[Encoder]] = SplitEncoder

  pool: Literal['cls'] = 'cls'  # [CLS] has a network of its own
  # Networks beyond one per block, at most two each; None for all of them.
  extra_networks: Annotated[int, Interval(ge=0, le=2000)] | None = None

  def __post_init__(self):
    super().__post_init__()
    most = 2 * self.depth
    if self.extra_networks is not None and self.extra_networks > most:
      expected = f'at most 2 for each of {self.depth} blocks'
      raise FieldError('extra_networks', self.extra_networks, expected)
