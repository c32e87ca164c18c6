"""Hugging Face checkpoints made by hand: loaded, saved and loaded again."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers
from flax.traverse_util import flatten_dict
from tokenizers import models, normalizers, pre_tokenizers

from albert_act import published
from core.errors import ConfigError
from dataset_lib import tokenizer
from model_lib import convert, sizes
from model_lib.convert_files import tokenizer_files
from tests.model_lib import checkpoints
from tests.model_lib.checkpoints import KINDS, random_tensors, write


def without(tensors, *begins):
  return {k: v for k, v in tensors.items() if not k.startswith(begins)}


@pytest.mark.parametrize('kind', KINDS)
def test_saved_names_are_those_of_transformers(tmp_path, kind):
  _, heads, options, fields = KINDS[kind]
  params = checkpoints.fresh_params(kind)
  rates = {'dropout': 0.2, 'attention_dropout': 0.0, 'classifier_dropout': 0.3}
  fields = fields | {'activation': 'relu'}
  names = ['no', 'yes', 'perhaps'] if heads == 'classifier' else []
  directory = tmp_path / 'new' / 'model'
  model, _ = checkpoints.model_of(kind, 3, fields | rates)
  convert.save_model(
    directory, model, params, names, label_kind='class' if names else ''
  )
  modes = {path.name: path.stat().st_mode for path in directory.iterdir()}
  assert modes['model.safetensors'] == modes['config.json']
  with safetensors.safe_open(directory / 'model.safetensors', 'np') as file:
    assert file.metadata() == {'format': 'pt'}
    got = {name: [*file.get_tensor(name).shape] for name in file.keys()}  # noqa: SIM118
  assert got == checkpoints.SHAPES[kind]
  checkpoints.assert_trees_equal(convert.load(directory, heads).params, params)
  assert convert.read_sizes(directory) == fields
  config = json.loads((directory / 'config.json').read_text())
  assert options.items() <= config.items()
  rates = {'distilbert': 'dropout', 'modernbert': 'embedding_dropout'}
  assert config[rates.get(kind, 'hidden_dropout_prob')] == 0.2
  if not names:
    assert 'id2label' not in config
    return
  assert config['id2label'] == {'0': 'no', '1': 'yes', '2': 'perhaps'}
  assert config['label2id'] == {'no': 0, 'yes': 1, 'perhaps': 2}
  assert config['problem_type'] == 'single_label_classification'
  assert convert.load(directory).class_names == (*names,)
  convert.save_model(directory, model, params)
  config = json.loads((directory / 'config.json').read_text())
  assert list(config['label2id']) == ['LABEL_0', 'LABEL_1', 'LABEL_2']
  assert convert.load(directory).class_names == ()
  for own, theirs in ('number', 'regression'), ('classes', 'multi_label_'):
    convert.save_model(directory, model, params, label_kind=own)
    config = json.loads((directory / 'config.json').read_text())
    assert config['problem_type'].startswith(theirs)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float64'])
def test_other_floats_are_cast_and_reported(tmp_path, dtype):
  tensors = random_tensors()
  name = 'bert.embeddings.word_embeddings.weight'
  halved = {k: value.astype(jnp.dtype(dtype)) for k, value in tensors.items()}
  write(tmp_path, halved | {name: tensors[name]})
  checkpoint = convert.load(tmp_path)
  assert checkpoint.cast == (dtype,)
  leaves = flatten_dict(checkpoint.params, sep='/')
  assert {leaf.dtype for leaf in leaves.values()} == {np.dtype('float32')}
  np.testing.assert_array_equal(
    leaves['head/kernel'], tensors['classifier.weight'].T
  )


def test_shards_and_names_of_the_first_checkpoints(tmp_path):
  write(tmp_path)
  want = convert.load(tmp_path).params
  checkpoints.shard(tmp_path)
  checkpoints.assert_trees_equal(convert.load(tmp_path).params, want)
  renamed = {}
  for name, tensor in random_tensors().items():
    name = name.removeprefix('bert.')
    if 'LayerNorm' in name:
      name = name.replace('weight', 'gamma').replace('bias', 'beta')
    renamed[name] = tensor
  assert 'embeddings.LayerNorm.gamma' in renamed
  write(tmp_path, renamed)
  checkpoints.assert_trees_equal(convert.load(tmp_path).params, want)


@pytest.mark.parametrize(
  ('kind', 'begins', 'absent'),
  [
    ('bert', ('bert.pooler.', 'classifier.'), {'pooler', 'head'}),
    ('bert', ('classifier.',), {'head'}),
    ('albert', ('classifier.',), {'head'}),
    ('pretraining', ('predictions.', 'sop_'), {'predictions', 'sop'}),
    ('pretraining', ('sop_classifier.',), {'sop'}),
    ('pretraining', ('sop_classifier.', 'albert.pooler.'), {'sop', 'pooler'}),
  ],
)
def test_modules_of_a_task_may_be_absent(tmp_path, kind, begins, absent):
  write(tmp_path, without(random_tensors(kind), *begins), kind)
  params = convert.load(tmp_path, KINDS[kind][1]).params
  assert set(checkpoints.fresh_params(kind)) - set(params) == absent


def test_tensors_of_other_tasks_are_ignored_and_listed(tmp_path):
  others = {
    'cls.predictions.bias': np.zeros(10, np.float32),
    'cls.seq_relationship.weight': np.zeros((2, 8), np.float32),
    'bert.embeddings.position_ids': np.arange(7)[None],
    'qa_outputs.bias': np.zeros(2, np.float32),
  }
  write(tmp_path, others | random_tensors())
  checkpoint = convert.load(tmp_path)
  assert set(checkpoint.ignored) == set(others)
  write(tmp_path)
  checkpoints.assert_trees_equal(
    checkpoint.params, convert.load(tmp_path).params
  )


CLASSIFIER = {'classifier.weight', 'classifier.bias'}


def test_heads_of_another_task_are_ignored_and_named(tmp_path):
  write(tmp_path, architectures=['BertForTokenClassification'])
  checkpoint = convert.load(tmp_path)
  assert set(checkpoint.ignored) == CLASSIFIER
  assert 'head' not in checkpoint.params
  # Those of pretraining, also with a decoder that is not tied.
  pretraining = random_tensors('pretraining')
  decoder = {checkpoints.DECODER: np.ones((10, 6), np.float32)}
  write(tmp_path, pretraining | decoder, 'albert')
  checkpoint = convert.load(tmp_path)
  others = {name for name in pretraining if not name.startswith('albert.')}
  assert {*checkpoint.ignored} == others | {*decoder}
  assert {'predictions', 'sop', 'head'}.isdisjoint(checkpoint.params)
  write(tmp_path, pretraining | random_tensors('albert'), 'albert')
  checkpoint = convert.load(tmp_path, heads='pretraining')
  assert set(checkpoint.ignored) == CLASSIFIER


@pytest.mark.parametrize('left', ['both', 'predictions.', 'decoder.'])
def test_tied_tensors_may_have_one_name_or_both(tmp_path, left):
  tensors = write(tmp_path, kind='pretraining')
  want = convert.load(tmp_path, 'pretraining').params
  again = {checkpoints.DECODER: tensors[checkpoints.TABLE]}
  again['predictions.decoder.bias'] = tensors['predictions.bias']
  if left == 'predictions.':
    again = {}
  elif left == 'decoder.':
    del tensors['predictions.bias'], tensors[checkpoints.TABLE]
  write(tmp_path, tensors | again, 'albert')
  checkpoints.assert_trees_equal(
    convert.load(tmp_path, 'pretraining').params, want
  )


def test_a_checkpoint_is_recognised(tmp_path):
  assert not convert.is_checkpoint(tmp_path / 'absent')
  assert not convert.is_checkpoint(tmp_path)
  path = tmp_path / 'config.json'
  for text, expected in (
    ('{"model": {"width": 8}, "task": "eat"}', False), ('{', False),
    ('{"model_type": "bert"}', True),
    ('{"architectures": ["BertModel"]}', True),
  ):  # fmt: skip
    path.write_text(text)
    assert convert.is_checkpoint(tmp_path) is expected
  path.unlink()
  (tmp_path / 'pytorch_model.bin').touch()
  assert convert.is_checkpoint(tmp_path)


def test_a_missing_package_says_what_to_install(monkeypatch):
  monkeypatch.setattr(convert, 'MINILM', 'no_such_package')
  with pytest.raises(FileNotFoundError, match=r'no_such_package.*--no-deps'):
    convert.packaged_minilm()


# The published configuration of albert-base-v2.
ALBERT_BASE = {
  'model_type': 'albert', 'attention_probs_dropout_prob': 0,
  'classifier_dropout_prob': 0.1, 'down_scale_factor': 1,
  'embedding_size': 128, 'gap_size': 0, 'hidden_act': 'gelu_new',
  'hidden_dropout_prob': 0, 'hidden_size': 768, 'inner_group_num': 1,
  'intermediate_size': 3072, 'layer_norm_eps': 1e-12,
  'max_position_embeddings': 512, 'net_structure_type': 0,
  'num_attention_heads': 12, 'num_hidden_groups': 1, 'num_hidden_layers': 12,
  'num_memory_blocks': 0, 'type_vocab_size': 2, 'vocab_size': 30000,
}  # fmt: skip
# As transformers 4 wrote answerdotai/ModernBERT-base, and as 5 writes it.
MODERN = {'model_type': 'modernbert', 'classifier_pooling': 'mean'}
MODERN_4 = MODERN | {
  'global_attn_every_n_layers': 3, 'global_rope_theta': 160000.0,
  'local_rope_theta': 10000.0, 'position_embedding_type': 'absolute',
}  # fmt: skip
FULL, SLIDING = 'full_attention', 'sliding_attention'
MODERN_5 = MODERN | {
  'layer_types': ([FULL] + [SLIDING] * 2) * 7 + [FULL],
  'rope_parameters': {
    FULL: {'rope_type': 'default', 'rope_theta': 160000},
    SLIDING: {'rope_type': 'default', 'rope_theta': 10000.0},
  },
}
# Options without consequence.
ALLOWED = {
  'position_embedding_type': 'absolute', 'is_decoder': False,
  'pruned_heads': {}, 'quantization_config': None,
  'problem_type': 'regression', 'chunk_size_feed_forward': 4,
  'pad_token_id': 3, 'torch_dtype': 'float16',
}  # fmt: skip


@pytest.mark.parametrize(
  ('config', 'fields'),
  [
    (ALBERT_BASE, published.SIZES.defaults),
    ({'model_type': 'bert'} | ALLOWED, sizes.BERT.defaults),
    ({'model_type': 'distilbert'},
     sizes.BERT.defaults | sizes.BERT.fields('distil')),
    (MODERN_4, sizes.MODERN_BERT.defaults | {'pooling': 'mean'}),
    (MODERN_5, sizes.MODERN_BERT.defaults | {'pooling': 'mean'}),
  ],
)  # fmt: skip
def test_configurations_are_read(tmp_path, config, fields):
  (tmp_path / 'config.json').write_text(json.dumps(config))
  assert convert.read_sizes(tmp_path) == fields


@pytest.mark.parametrize(
  ('option', 'value'),
  [
    ('layer_types', [SLIDING, FULL]), ('layer_types', [FULL, FULL, SLIDING]),
    ('layer_types', []), ('layer_types', 3),
    ('rope_parameters', {FULL: {'rope_type': 'yarn', 'factor': 2.0}}),
    ('rope_parameters', [1]), ('rope_parameters', {SLIDING: 'default'}),
    ('rope_scaling', {'type': 'linear'}), ('global_rope_theta', '160000'),
  ],
)  # fmt: skip
def test_a_modern_bert_of_another_form_is_refused(tmp_path, option, value):
  config = json.dumps(MODERN | {option: value})
  (tmp_path / 'config.json').write_text(config)
  with pytest.raises(ConfigError, match=f'config.json: {option}: expected'):
    convert.read_sizes(tmp_path)


# -- the files of a tokenizer beside a checkpoint

SIZES = {'type_vocab_size': 2, 'max_positions': 20}
PIECES = ['<pad>', '<unk>', '[CLS]', '[SEP]', '[MASK]', '▁the', '▁', 'cat', 't']
WORDS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'the', 'cat', '##s']
TEXTS = ['The cat', 'the the [SEP] cat?', 'Thé  t']


def of_pieces(directory):
  """A unigram model as ALBERT has one."""
  scores = [(piece, -float(place)) for place, piece in enumerate(PIECES)]
  library = tokenizers.Tokenizer(models.Unigram(scores, unk_id=1))
  library.normalizer = normalizers.Sequence(
    [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
  )
  library.pre_tokenizer = pre_tokenizers.Metaspace()
  library.add_special_tokens(PIECES[:5])
  library.save(str(directory / 'tokenizer.json'))


def of_words(directory):
  (directory / 'vocab.txt').write_text('\n'.join(WORDS))


def files_of(build, directory, **fields):
  build(directory)
  path = directory / 'own.json'
  tokenizer.load(directory).save(path)
  files = tokenizer_files(path, SIZES | fields)
  assert files['tokenizer.json'] == path.read_text(encoding='utf-8')
  return files, json.loads(files['tokenizer_config.json'])


def test_pieces_have_no_list_of_words(tmp_path):
  files, config = files_of(of_pieces, tmp_path)
  assert set(files) == {'tokenizer.json', 'tokenizer_config.json'}
  assert config == {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': 20,
    'model_input_names': ['input_ids', 'token_type_ids', 'attention_mask'],
    'clean_up_tokenization_spaces': False,
    'split_special_tokens': True,
    'unk_token': '<unk>',
    'sep_token': '[SEP]',
    'pad_token': '<pad>',
    'cls_token': '[CLS]',
    'mask_token': '[MASK]',
  }


def test_words_have_their_list_and_normalizer(tmp_path):
  files, config = files_of(of_words, tmp_path, type_vocab_size=0)
  assert files['vocab.txt'].split('\n')[5:] == ['the', 'cat', '##s', '']
  assert config['unk_token'] == '[UNK]'
  assert config['pad_token'] == '[PAD]'
  assert config['do_lower_case'] is True
  assert config['strip_accents'] is None
  assert config['model_input_names'] == ['input_ids', 'attention_mask']


@pytest.mark.parametrize(
  'text',
  ['{', '[]', '{"model": {"vocab": [1]}, "added_tokens": []}'],
)
def test_something_else_is_refused(tmp_path, text):
  path = tmp_path / 'own.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=r'own\.json: expected a tokenizer'):
    tokenizer_files(path, SIZES)


@pytest.mark.peers
@pytest.mark.parametrize('build', [of_pieces, of_words])
def test_transformers_gives_the_same_ids(tmp_path, build):
  transformers = pytest.importorskip('transformers')
  files, _ = files_of(build, tmp_path)
  out = tmp_path / 'out'
  out.mkdir()
  for name, text in files.items():
    (out / name).write_text(text, encoding='utf-8')
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  library = tokenizers.Tokenizer.from_str(files['tokenizer.json'])
  library.encode_special_tokens = True
  for text in TEXTS:
    want = library.encode(text, 'the cat')
    got = theirs(text, 'the cat')
    assert got['input_ids'] == want.ids
    assert got['token_type_ids'] == want.type_ids
  assert theirs.pad_token_id == 0
  assert theirs.mask_token_id == 4
