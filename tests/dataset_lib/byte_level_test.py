"""Byte-level BPE as of ModernBERT and RoBERTa."""

import json

import tokenizers

from dataset_lib import tokenizer

SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']


def ids(given, text, *pair):
  return given.encode([text], [*pair] or None).tokens.tolist()


def byte_level_bpe(special):
  """A small one, with special tokens."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=special[1]))
  library.normalizer = tokenizers.normalizers.NFC()
  library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  library.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300, show_progress=False, special_tokens=special,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  library.train_from_iterator(['the cat sat', 'the cafe', 'a cat'] * 9, trainer)
  return library


def test_a_byte_level_bpe_like_that_of_modern_bert(tmp_path):
  library = byte_level_bpe(SPECIAL)
  library.save(str(tmp_path / 'tokenizer.json'))
  given = tokenizer.load(tmp_path)
  library.encode_special_tokens = True
  for text in ('the cat!', 'Café 北京', 'the [SEP] cat', ''):
    want = library.encode(text).ids
    assert ids(given, text) == [2, *want, 3]
    assert ids(given, text, 'a cat')[: len(want) + 2] == [2, *want, 3]
  found = ids(given, 'the cat')
  assert given.names(found) == ['[CLS]', 'the', 'Ġcat', '[SEP]']
  assert given.word_starts()[found].tolist() == [True, False, True, True]
  again = tokenizer.from_json(given.to_json().encode(), 'x')
  assert again.digest == given.digest


def test_a_pair_of_roberta_has_two_separators_and_one_type(tmp_path):
  roles = 'pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token'
  names = ['<pad>', '<unk>', '<s>', '</s>', '<mask>']
  config = json.dumps(dict(zip(roles, names, strict=True)))
  (tmp_path / 'tokenizer_config.json').write_text(config)
  library = byte_level_bpe(names)
  ends = ('</s>', 3), ('<s>', 2)
  library.post_processor = tokenizers.processors.RobertaProcessing(*ends)
  library.save(str(tmp_path / 'tokenizer.json'))
  given = tokenizer.load(tmp_path)
  again = tokenizer.from_json(given.to_json().encode(), 'x')
  assert again.digest == given.digest
  library.encode_special_tokens = True
  for text, pair in (('the cat!', 'a cafe'), ('a </s> cat', ''), ('', 'the')):
    for one in (given, again):
      encoded = one.encode([text], [pair], 64)
      assert encoded.tokens.tolist() == library.encode(text, pair).ids
      assert not encoded.token_types.any()
    assert ids(given, text) == library.encode(text).ids
  library.post_processor = tokenizers.processors.BertProcessing(*ends)
  library.save(str(tmp_path / 'tokenizer.json'))
  assert tokenizer.load(tmp_path).digest != given.digest
