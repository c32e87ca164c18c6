"""FLOPs of a forward pass: matrix products only, per example.

A multiply-add counts as 2. What is left out is a few percent at width 192.
"""

Count = int | float
Mean = Count | None  # of rows; None: the most
Shape = tuple[int, ...]  # of the input of a row


def dense(tokens: Count, inputs: int, outputs: int) -> float:
  """Returns the FLOPs of a dense layer."""
  return 2.0 * tokens * inputs * outputs


def attention(tokens: Count, width: int) -> float:
  """Returns the FLOPs of four projections, scores and weighted values."""
  return 4 * dense(tokens, width, width) + 4.0 * tokens * tokens * width


def mlp(tokens: Count, width: int, mlp_dim: int, gated: bool = False) -> float:
  """Returns the FLOPs of a feed-forward network; a gated one has 3 matrices."""
  return (3 if gated else 2) * dense(tokens, width, mlp_dim)


def block(
  tokens: Count, width: int, mlp_dim: int, gated: bool = False
) -> float:
  """Returns the FLOPs of an `EncoderBlock`."""
  return attention(tokens, width) + mlp(tokens, width, mlp_dim, gated)


def cls_block(
  tokens: Count, width: int, mlp_dim: int, gated: bool = False
) -> float:
  """Returns the FLOPs of a block that computes the output of one token."""
  return (
    2 * dense(tokens, width, width)
    + 2 * dense(1, width, width)
    + 4.0 * tokens * width
    + mlp(1, width, mlp_dim, gated)
  )


def patch_embed(
  image_shape: tuple[int, ...], patch_size: int, width: int
) -> float:
  """Returns the FLOPs of projecting the patches of an image `[H, W, E]`."""
  numbers = patch_size**2 * image_shape[2]
  return dense(num_patches(image_shape, patch_size), numbers, width)


def num_patches(image_shape: tuple[int, ...], patch_size: int) -> int:
  """Returns the number of patches of an image `[H, W, E]`."""
  return (image_shape[0] // patch_size) * (image_shape[1] // patch_size)
