"""A Transformer block with a network of its own for tape tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from core.errors import check_option
from model_lib import flops, row_random
from model_lib.layers import EncoderBlock, Mlp, build
from model_lib.row_random import RowKeys


class TapeBlock(EncoderBlock):
  """An `EncoderBlock` of input tokens followed by a tape.

  `tape_mlp` is the network of the tape: '' for that of the input tokens, 'mlp'
  for another one, 'glu' for a gated one (AdaTape, section 2).
  """

  tape_mlp: str = ''

  def feed_forward(
    self,
    x: Float[Array, 'B L D'],
    row_keys: RowKeys,
    num_input_tokens: int | None = None,
  ) -> Float[Array, 'B L D']:
    """Applies the networks; the first `num_input_tokens`, None for all, are
    input tokens.
    """
    check_option('tape_mlp', self.tape_mlp, ('', 'mlp', 'glu'))
    if not self.tape_mlp:
      return super().feed_forward(x, row_keys)
    count = x.shape[1] if num_input_tokens is None else num_input_tokens
    tape_keys = row_random.fold_rows(row_keys, 'tape')
    # Also runs on zero tape tokens, so that its parameters always exist.
    gated = self.tape_mlp == 'glu'
    mlp = build(Mlp, self, name='mlp')
    tape_mlp = build(Mlp, self, name='tape_mlp', gated=gated)
    parts = [mlp(x[:, :count], row_keys), tape_mlp(x[:, count:], tape_keys)]
    return jnp.concatenate(parts, axis=1)


def block_flops(
  tokens: int | float,
  width: int,
  mlp_dim: int,
  tape_tokens: int | float,
  tape_mlp: str,
) -> float:
  """Returns the FLOPs of a `TapeBlock`; `tokens` excludes the tape."""
  return (
    flops.attention(tokens + tape_tokens, width)
    + flops.mlp(tokens, width, mlp_dim)
    + flops.mlp(tape_tokens, width, mlp_dim, gated=tape_mlp == 'glu')
  )
