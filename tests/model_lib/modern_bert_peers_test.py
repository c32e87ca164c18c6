"""ModernBERT against transformers with random weights, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import convert
from model_lib.modern_bert import ModernBertClassifier
from tests.model_lib import convert_peers_test as peers_of
from tests.peers import torch_and_transformers

pytestmark = pytest.mark.peers
BIASES = dict.fromkeys(
  ('norm_bias', 'attention_bias', 'mlp_bias', 'classifier_bias'), True
)
ODD = [
  {}, {'local_attention': 7}, {'num_hidden_layers': 1},
  {'num_attention_heads': 3, 'num_labels': 1},
  {'num_attention_heads': 1, 'local_attention': 1},
  {'classifier_pooling': 'mean'},
  BIASES | {'classifier_pooling': 'mean', 'num_labels': 3},
  {'local_attention': 128}, {'hidden_size': 40, 'num_attention_heads': 5},
  {'global_attn_every_n_layers': 2, 'hidden_activation': 'silu',
   'classifier_activation': 'relu', 'norm_eps': 1e-3},
  {'global_rope_theta': 500.0, 'local_rope_theta': 30.0,
   'num_attention_heads': 12, 'global_attn_every_n_layers': 1},
]  # fmt: skip


@pytest.fixture(scope='module')
def peers():
  """(torch, transformers), or a skip."""
  return torch_and_transformers()


@pytest.mark.parametrize('options', ODD, ids=str)
def test_states_and_logits_are_equal(peers, tmp_path, options):
  name = 'ForSequenceClassification'
  theirs = peers_of.random_model(peers, 'modernbert', name, options)
  theirs.save_pretrained(tmp_path)
  batch = peers_of.text_batch(types=1, longest=25)
  output = peers_of.their_output(peers, theirs, batch)
  states = peers_of.their_output(peers, theirs.model, batch).last_hidden_state
  with jax.enable_x64(True), jax.numpy_dtype_promotion('standard'):
    params, fields, *_ = convert.load(tmp_path)
    count = theirs.config.num_labels
    model = ModernBertClassifier(
      num_classes=count, dtype=jnp.float64, **fields
    )  # fmt: skip
    exact = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    inputs = {'params': exact}, *(jnp.asarray(x, 'int32') for x in batch[:3])
    logits, _ = jax.jit(model.apply)(*inputs)
    encode = jax.jit(lambda *args: model.apply(*args, method='encode'))
    ours = np.asarray(encode(*inputs))
  valid = batch[3]
  assert states.abs().max() > 1
  np.testing.assert_allclose(ours[valid], states.numpy()[valid], atol=1e-6)
  np.testing.assert_allclose(logits, output.logits.numpy(), atol=1e-6)
  single = model.clone(dtype=jnp.float32)
  convert.save_model(tmp_path / 'again', single, params)
  again = type(theirs).from_pretrained(tmp_path / 'again').eval()
  same = peers_of.their_output(peers, again, batch).logits
  np.testing.assert_array_equal(same.numpy(), output.logits.numpy())
