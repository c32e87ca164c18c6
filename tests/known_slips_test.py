"""Slips of public code, put into a copy of ours: our tests have to fail.

Each is a change of the source text, so that a test that checks nothing, or a
line that moved, is seen.
"""

import os
import shutil
import subprocess
import sys

import pytest

HALTING = 'model_lib/halting.py'
COMPACTION = 'albert_act/compaction.py'
PRETRAIN = 'configs/albert_act/pretrain.py'
SHIPPED = 'tests/albert_act/pretraining_test.py::test_the_shipped_configuration'
COMPACTED = (
  'tests/albert_act/serving_test.py::test_compacted_form_equals_masked_form'
)
IN_HALTING = 'tests/model_lib/halting_test.py::test_'
IN_PRETRAINING = 'tests/dataset_lib/pretraining_test.py::test_'
COPIED = (
  'albert_act', 'configs', 'dataset_lib', 'eval_lib', 'launch', 'model_lib',
  'serve_lib', 'tests', 'train_lib', 'pyproject.toml',
)  # fmt: skip

# name: (file, what stands there, the slip, the test that sees it)
SLIPS = {
  # A public Universal Transformer writes `prev * 1 - w`.
  'precedence': (
    HALTING,
    'else 1.0 - weight\n  return keep * previous.astype(jnp.float32) + share',
    'else 1.0\n  return keep * previous.astype(jnp.float32) - weight + share',
    f'{IN_HALTING}combinations_against_hand_values',
  ),
  # Without it the weights need not sum to 1.
  'no_forced_halt': (
    HALTING,
    'halts = halting.running & (reached | is_last)',
    'halts = halting.running & reached',
    f'{IN_HALTING}equals_plain_loop_and_weights_sum_to_one',
  ),
  'remainder_after_the_last_score': (
    HALTING,
    'rest = 1.0 - halting.total\n',
    'rest = 1.0 - halting.total - score\n',
    f'{IN_HALTING}known_answers',
  ),
  'last_score_as_its_weight': (
    HALTING,
    'jnp.where(halts, rest, 0.0))\n',
    'jnp.where(halts, score, 0.0))\n',
    f'{IN_HALTING}known_answers',
  ),
  # Equation (16) as it is printed counts N - 1.
  'equation_16_as_printed': (
    HALTING,
    '    remainder=halting.remainder - slope,\n'
    '    steps=halting.steps + halting.running.astype(jnp.int32),',
    '    remainder=halting.remainder - slope,\n'
    '    steps=halting.steps + (halting.running & ~halts).astype(jnp.int32),',
    f'{IN_HALTING}straight_through_takes_one_state',
  ),
  'threshold_not_reached_by_equality': (
    HALTING,
    'reached = halting.total + score >= 1.0 - epsilon',
    'reached = halting.total + score > 1.0 - epsilon',
    f'{IN_HALTING}reaching_the_threshold_exactly_halts',
  ),
  'nothing_carried_over': (
    HALTING,
    'jnp.where(reached, halting.total - 1.0, 0.0)',
    'jnp.where(reached, 0.0, 0.0)',
    f'{IN_HALTING}skip_act_by_hand',
  ),
  'gradient_of_the_remainder_cut': (
    HALTING,
    'halting.steps.astype(jnp.float32) + halting.remainder\n',
    'halting.steps.astype(jnp.float32)'
    ' + jax.lax.stop_gradient(halting.remainder)\n',
    f'{IN_HALTING}gradient_of_the_cost',
  ),
  'padding_ponders': (
    HALTING,
    'return Halting(zeros, zeros, zeros.astype(jnp.int32), valid)',
    'return Halting(zeros, zeros, zeros.astype(jnp.int32), valid | True)',
    'tests/model_lib/pondering_test.py::test_padding_never_prolongs_the_loop',
  ),
  'no_last_step_of_pondernet': (
    'model_lib/pondernet.py',
    'lambdas.astype(jnp.float32).at[-1].set(1.0)',
    'lambdas.astype(jnp.float32)',
    'tests/model_lib/pondernet_test.py::test_distribution_by_hand',
  ),
  # Mixed by weights that are 0, a token stands still until it halts.
  'straight_through_stands_still': (
    'albert_act/encoder.py',
    "'straight_through': 'accumulated'",
    "'straight_through': 'fed_back'",
    'tests/albert_act/encoder_test.py::'
    'test_a_straight_through_halt_is_the_fixed_depth_of_its_step',
  ),
  # A token that halts changes once more after its keys were last read.
  'keys_of_the_state_before_the_mixture': (
    COMPACTION,
    'block, variables, state[None], num_queries=0',
    'block, variables, new, num_queries=0',
    COMPACTED,
  ),
  'keys_never_renewed': (
    COMPACTION,
    'keys=packed.unpack_heads(keys, tokens.keys),',
    'keys=tokens.keys,',
    COMPACTED,
  ),
  'a_weight_of_0_takes_out_nan': (
    COMPACTION,
    'values=jnp.where(valid[:, None, :, None], values, 0)',
    'values=values',
    'tests/albert_act/serving_test.py::test_contents_of_padding_are_never_read',
  ),
  'nobody_attends_to_halted_tokens': (
    COMPACTION,
    'tokens.keys, tokens.values, tokens.valid, least\n',
    'tokens.keys, tokens.values, tokens.halting.running, least\n',
    COMPACTED,
  ),
  # A data maker of BERT's masks tokens, ALBERT's n-grams of whole words.
  'masks_parts_of_words': (
    'dataset_lib/pretraining_rows.py',
    'Rows(tokens, is_text, begins_word | begins_segment, begins_segment)',
    'Rows(tokens, is_text, is_text, begins_segment)',
    f'{IN_PRETRAINING}whole_words_are_masked',
  ),
  'masks_single_words': (
    'dataset_lib/pretraining.py',
    "self._config['max_ngram']",
    '1',
    f'{IN_PRETRAINING}ngrams_are_masked',
  ),
  # The published data maker masks 15 %, the paper says 20 %.
  'masks_15_percent': (PRETRAIN, 'mask_share=0.2', 'mask_share=0.15', SHIPPED),
  # Its two ports have no ponder term in pretraining.
  'no_ponder_term': (
    PRETRAIN,
    'ponder_weight=tau if halts else 0.0',
    'ponder_weight=0.0',
    SHIPPED,
  ),
  # Its fine-tuning has one, which the paper's has not.
  'ponder_term_in_fine_tuning': (
    'configs/albert_act/common.py',
    'tau=0.0, lr=3e-5',
    'tau=5e-4, lr=3e-5',
    'tests/configs/configs_test.py::test_albert_configs_are_legal',
  ),
}  # fmt: skip


@pytest.fixture(scope='module')
def copied(tmp_path_factory):
  """A copy of the checkout, as far as these tests need it."""
  root = tmp_path_factory.mktemp('slips') / 'checkout'
  root.mkdir()
  here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  for name in COPIED:
    path = os.path.join(here, name)
    copy = shutil.copytree if os.path.isdir(path) else shutil.copy
    copy(path, root / name)
  return root


def outcome(root, test):
  """The exit status of one test, as pytest gives it: 1 where it failed."""
  command = (
    sys.executable,
    '-m',
    'pytest',
    '-q',
    '-x',
    '-p',
    'no:cacheprovider',
  )
  ended = subprocess.run(
    [*command, test], cwd=root, capture_output=True, text=True, check=False
  )
  return ended.returncode, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize('test', sorted({slip[3] for slip in SLIPS.values()}))
def test_the_copy_passes_as_it_is(copied, test):
  status, printed = outcome(copied, test)
  assert status == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize('name', SLIPS)
def test_a_known_slip_is_seen(copied, name):
  file, right, wrong, test = SLIPS[name]
  path = copied / file
  source = path.read_text()
  assert source.count(right) == 1, f'{file} has changed: mend this test'
  path.write_text(source.replace(right, wrong))
  try:
    status, printed = outcome(copied, test)
  finally:
    path.write_text(source)
  assert status == 1, printed
  assert 'AssertionError' in printed or 'assert ' in printed
