"""The tokenizer files that are written beside a checkpoint."""

import json

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from dataset_lib import tokenizer
from model_lib.convert_files import tokenizer_files

FIELDS = {'type_vocab_size': 2, 'max_positions': 20}
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
  files = tokenizer_files(path, FIELDS | fields)
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
    tokenizer_files(path, FIELDS)


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
