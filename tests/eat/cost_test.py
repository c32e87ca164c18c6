"""The FLOP formulas of EAT against the compiler's count and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from eat import serving
from eat.model import EatClassifier
from model_lib import flops
from tests.eat import small


def test_stage_flops_add_up():
  model, _ = small.build(window=0)
  sizes = model.static_sizes(24)
  whole = model.stage_flops(24, sizes, count_cls=False)
  assert np.isclose(sum(whole), model.flops((24,)))
  short = model.stage_flops(24, sizes, count_cls=True)
  assert short[0] < whole[0]
  # All that is done twice is [CLS] at two heads; at the last, others are not.
  last = flops.block(sizes[1], 16, 32) - flops.cls_block(sizes[1], 16, 32)
  twice = [flops.cls_block(n, 16, 32) - 4 * n * 16 * 16 for n in (24, 18)]
  assert np.isclose(sum(short), sum(whole) - last + sum(twice))


@pytest.mark.parametrize(
  ('tokens', 'changes'),
  [
    (24, dict(window=0)),
    *(
      pytest.param(tokens, changes, marks=pytest.mark.nightly)
      for tokens, changes in (
        (256, dict(window=0)),
        (256, dict(window=32)),
        (200, dict(window=32, prune_layers=(), prune_ratios=())),
        (256, dict(window=128, window_implementation='block')),
        (256, dict(window=32, window_implementation='dense')),
      )
    ),
  ],
)
def test_stages_cost_what_the_formula_says(tokens, changes):
  """By the compiler's count: no keys and values are computed twice."""
  wide = dict(width=384, mlp_dim=1536, num_heads=12, max_positions=256)
  model = EatClassifier(**(small.FIELDS | wide | changes))
  row, length = jnp.zeros((1, tokens), jnp.int32), jnp.full(1, tokens)
  variables = nn.unbox(
    jax.eval_shape(model.init, jax.random.key(0), row, row, length)
  )
  chain = serving.EatChain(model, variables)
  carry = chain.pad([], tokens, 1)
  sizes = chain.sizes('pruned', tokens)
  expected = model.stage_flops(tokens, sizes, True)
  for index in range(chain.num_stages):
    stage = jax.jit(chain.stage(index, 'pruned', tokens))
    lowered = stage.lower(variables, carry)
    got = lowered.cost_analysis()['flops']
    assert expected[index] == pytest.approx(got, rel=0.02), index
    carry = lowered.out_info[0]


def test_a_window_costs_less_where_it_is_in_blocks():
  def cost(length, window):
    fields = dict(window=window, prune_layers=(), prune_ratios=())
    model = EatClassifier(**(small.FIELDS | fields))
    return model.flops((length,))

  # Below `BLOCK_FROM` everything is computed and masked.
  assert cost(128, 32) == cost(128, 0)
  # 8 blocks of 32 queries, each reading [CLS], 16, 32 and 16 tokens; and
  # [CLS] reading all, in 4 layers of width 16.
  scores = 8 * 32 * (1 + 16 + 32 + 16) + 256
  saved = 4 * 4 * 16 * (256 * 256 - scores)
  assert cost(256, 0) - cost(256, 32) == saved
