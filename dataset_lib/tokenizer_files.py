"""Reads the files of a tokenizer within limits; trains a spiece.model."""

import base64
import heapq
import io
import json
import math
import pathlib
import random
import re
import unicodedata
from collections.abc import Container, Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from core import files
from core.errors import ConfigError, InvalidDataError

JSON_FILE, MODEL_FILE = 'tokenizer.json', 'spiece.model'
NAMES = JSON_FILE, 'vocab.txt', MODEL_FILE  # in the order of search
SPACE = '▁'  # U+2581, SentencePiece's space before a word
WORD_PIECE, UNIGRAM, BYTES = 'WordPiece', 'Unigram', 'BPE'
SPECIAL = {
  WORD_PIECE: ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'),
  BYTES: ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'),  # of ModernBERT
  # ALBERT's, and the first ids of its vocabulary in this order.
  UNIGRAM: ('<pad>', '<unk>', '[CLS]', '[SEP]', '[MASK]'),
}
ROBERTA = ('<pad>', '<unk>', '<s>', '</s>', '<mask>')  # and of XLM-R
ROLES = ('pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token')
# Classes with a vocab.txt that do not tokenize as BERT's.
_OTHERS = re.compile('.*Japanese|RoFormer|Bertweet|Phobert|Herbert|CpmAnt')
MAX_STEPS = 128  # of normalizer, pre_tokenizer and decoder
MAX_GROWTH = 128.0  # of a text; the rules of SentencePiece give up to 33
# Matched in time linear in the text: only the end may be repeated, only a
# lookahead has parentheses. (Without escaped characters and sets.)
_LINEAR = re.compile(
  r'([^()*+?{]|\(\?[=!][^()*+?{|]*\))*([*+]|\{\d*,?\d*\})?', re.DOTALL
)
_ESCAPED_OR_SET = re.compile(r'\\.|\[(\\.|[^\]\\])*\]', re.DOTALL)
# Spaces around a character; characters for the bytes of one.
_GROWTH = {'BertNormalizer': 3.0, 'ByteLevel': 4.0}
# Always pieces of their own, as in ALBERT's vocabulary.
OWN_PIECES = ('(', ')', '"', '-', '.', '–', '£', '€')  # noqa: RUF001
# In characters; the trainer leaves out texts longer than 4,192 bytes, and takes
# about 20 bytes for each of all texts together.
MAX_TRAINING_TEXT, MAX_TRAINING_CHARACTERS = 1024, 10**8
# The rest of a text, or text up to a space, or a part of a longer word.
_TRAINING_TEXT = re.compile(
  rf'.{{1,{MAX_TRAINING_TEXT}}}\Z|.{{0,{MAX_TRAINING_TEXT - 1}}} |'
  rf'.{{1,{MAX_TRAINING_TEXT}}}',
  re.DOTALL,
)
_WITHOUT_SPACES = (
  'CJK', 'HIRAGANA', 'KATAKANA', 'KHMER', 'LAO', 'MYANMAR', 'THAI', 'TIBETAN'
)  # fmt: skip
_NUMBER_COMMA = re.compile(r'.*\d,', re.DOTALL)


def check(content: bytes) -> None:
  """Raises ValueError unless a `tokenizer.json` takes linear time and memory.

  That of its patterns, and a text grows `MAX_GROWTH` times at most.
  """
  files.parse(content)  # refuses values that are nested too deeply
  objects: list[dict[str, Any]] = []

  def keep(one: dict[str, Any]) -> dict[str, Any]:
    objects.append(one)
    return one

  json.loads(content, object_hook=keep)
  for one in objects:
    regex = one.get('Regex', '')
    if not _LINEAR.fullmatch(_ESCAPED_OR_SET.sub('x', str(regex))):
      expected = 'a regular expression that repeats its end at most'
      raise ValueError(f'expected {expected}, got {regex!r:.100}')
  steps = [one for one in objects if isinstance(one.get('type'), str)]
  if len(steps) > MAX_STEPS:
    raise ValueError(f'expected at most {MAX_STEPS} steps, got {len(steps)}')
  growth = math.prod(map(_growth, steps))
  if growth > MAX_GROWTH:
    expected = f'steps that make a text {MAX_GROWTH:.0f} times longer at most'
    raise ValueError(f'expected {expected}, got {growth:.1e} times')


def _growth(step: dict[str, Any]) -> float:
  """Returns how many times longer a step makes a text at most."""
  kind = step['type']
  if kind == 'Replace':
    size, new = len(step['pattern'].get('String', '')), len(step['content'])
    return max(1.0, new / size) if size else 1.0 + new
  if kind == 'Prepend':
    return 1.0 + len(step['prepend'])
  if kind == 'Precompiled':
    rules = base64.b64decode(step['precompiled_charsmap'] or '')
    end = 4 + int.from_bytes(rules[:4], 'little')  # of the trie
    return max(1.0, *(float(len(one)) for one in rules[end:].split(b'\0')))
  return _GROWTH.get(kind, 1.0)


def word_piece(file: pathlib.Path, config: Mapping[str, Any]) -> Any:
  """Returns the library's tokenizer of a vocab.txt; InvalidDataError."""
  for name, is_legal in (
    ('do_basic_tokenize', config.get('do_basic_tokenize', True) is True),
    ('tokenizer_class', not _OTHERS.match(config.get('tokenizer_class') or '')),
  ):
    if not is_legal:
      problem = f'{name}={config[name]} is not supported'
      raise InvalidDataError(f'{file}: {problem}; save it as {JSON_FILE}')
  text = files.read_bytes(file).decode('utf-8-sig').replace('\r\n', '\n')
  # A line's number is the token's id; `splitlines` also splits elsewhere.
  lines = text.removesuffix('\n').split('\n')
  vocabulary = {line: row for row, line in enumerate(lines)}
  special = special_tokens(config, WORD_PIECE)
  model = models.WordPiece(vocabulary, unk_token=special[1])
  library = tokenizers.Tokenizer(model)
  library.normalizer = normalizers.BertNormalizer()
  library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  library.decoder = decoders.WordPiece()
  library.add_special_tokens([name for name in special if name in vocabulary])
  return library


def normalizer_of(
  lower: bool = True, keep_accents: bool = False, charsmap: bytes = b''
) -> Any:
  """Returns ALBERT's normalizer; `charsmap` has the model's rules, compiled."""
  steps: list[Any] = [normalizers.Replace(old, '"') for old in ('``', "''")]
  if not keep_accents:
    steps += [normalizers.NFKD(), normalizers.StripAccents()]
  if lower:
    steps.append(normalizers.Lowercase())
  if charsmap:
    steps.append(normalizers.Precompiled(charsmap))
  spaces = normalizers.Replace(tokenizers.Regex(' {2,}'), ' ')
  return normalizers.Sequence([*steps, spaces])


def unigram(file: pathlib.Path, config: Mapping[str, Any]) -> Any:
  """Returns the library's tokenizer of a spiece.model; InvalidDataError."""
  from sentencepiece import sentencepiece_model_pb2

  proto: Any = sentencepiece_model_pb2
  model = proto.ModelProto.FromString(files.read_record(file))
  trainer, pieces = model.trainer_spec, model.pieces
  # The specs follow the pieces: a file that was cut short lacks the specs.
  if not (model.HasField('trainer_spec') and model.HasField('normalizer_spec')):
    raise InvalidDataError(f'{file} is damaged: it ends early')
  kind = trainer.ModelType.Name(trainer.model_type)
  kind += ' with byte_fallback' * trainer.byte_fallback
  if kind != 'UNIGRAM' or not pieces:
    expected = 'a SentencePiece model of type UNIGRAM'
    got = f'{kind} with {len(pieces)} pieces'
    raise InvalidDataError(f'{file}: expected {expected}, got {got}')
  # ALBERT's tokenizer cuts the comma off a number: "9," becomes improbable.
  scores = [
    (one.piece, one.score - 100.0 * bool(_NUMBER_COMMA.fullmatch(one.piece)))
    for one in pieces
  ]
  library = tokenizers.Tokenizer(models.Unigram(scores, unk_id=trainer.unk_id))
  library.normalizer = normalizer_of(
    config.get('do_lower_case', True),
    config.get('keep_accents', False),
    model.normalizer_spec.precompiled_charsmap,
  )
  split_at_spaces = pre_tokenizers.WhitespaceSplit()
  spaces = pre_tokenizers.Metaspace(SPACE)
  library.pre_tokenizer = pre_tokenizers.Sequence([split_at_spaces, spaces])
  library.decoder = decoders.Metaspace(SPACE)
  kinds = proto.ModelProto.SentencePiece
  special = kinds.UNKNOWN, kinds.CONTROL
  library.add_special_tokens([p.piece for p in pieces if p.type in special])
  return library


def special_tokens(
  config: Mapping[str, Any], kind: str, vocabulary: Container[str] = ()
) -> list[str]:
  """Returns the names of the special tokens, in the order of `ROLES`.

  Where none is stated they may also be those of RoBERTa or XLM-R, if the
  `vocabulary` has them.
  """
  usual, is_open = SPECIAL[kind], not any(map(config.get, ROLES))
  is_open &= kind != WORD_PIECE
  if is_open and all(name in vocabulary for name in ROBERTA[:-1]):
    usual = ROBERTA
  defaults = zip(ROLES, usual, strict=True)
  stated = [config.get(role) or default for role, default in defaults]
  return [one['content'] if isinstance(one, Mapping) else one for one in stated]


def saved_roles(library: Any) -> dict[str, str]:
  """Returns the special tokens by role that `Tokenizer.save` has stated."""
  frame = library.post_processor
  stated = json.loads(frame.__getstate__()) if frame else {}
  tokens = stated.get('special_tokens', {})
  return {role: tokens[role]['tokens'][0] for role in ROLES if role in tokens}


def add_tokens(
  library: Any, file: pathlib.Path, config: Mapping[str, Any]
) -> None:
  """Adds `added_tokens_decoder`, {id: token}; InvalidDataError if it cannot.

  Older files, added_tokens.json, may state the same tokens.
  """
  entries = config.get('added_tokens_decoder', {})
  added = library.get_added_tokens_decoder()
  for number, entry in sorted((int(key), one) for key, one in entries.items()):
    content = str(entry['content'])
    if number not in added:
      library.add_tokens([tokenizers.AddedToken(**entry)])
    if library.token_to_id(content) != number:
      expected = f'expected {content!r:.40} to have the id {number}'
      raise InvalidDataError(f'{file}: added_tokens_decoder: {expected}')
  older = file.with_name('added_tokens.json')
  if file.suffix == '.json' or not older.is_file():
    return
  for content, number in files.read_object(older).items():
    if library.token_to_id(content) != number:
      expected = f'expected {content!r:.40} in added_tokens_decoder, too'
      raise InvalidDataError(f'{older}: {expected}')


def begins_word(piece: str) -> bool:
  """Whether a piece begins a word, as in ALBERT's data generator.

  A piece with a space does, punctuation, and text of a script without spaces.
  """
  if piece.startswith(SPACE) or not any(map(str.isalnum, piece)):
    return True
  letters = (unicodedata.name(letter, '') for letter in piece)
  return any(letter.startswith(_WITHOUT_SPACES) for letter in letters)


# Of a token's name; in a BPE 'Ġ' is the byte of a space.
BEGINS_WORD: dict[str, Any] = {
  WORD_PIECE: re.compile('(?!##)').match,
  BYTES: re.compile('Ġ').match,
  UNIGRAM: begins_word,
}


def keep_as_text(library: Any, names: Iterable[str]) -> None:
  """Makes `library` cut typed special tokens, as "<pad>", at their start."""
  pattern = '|'.join(
    f'{re.escape(name[0])}(?={re.escape(name[1:])})'
    for name in sorted(names)
    if len(name) > 1
  )
  # A tokenizer that was saved has it already.
  if json.dumps(pattern, ensure_ascii=False) not in library.to_str():
    steps = [library.pre_tokenizer] if library.pre_tokenizer else []
    cut = tokenizers.Regex(pattern)
    steps.append(pre_tokenizers.Split(cut, 'merged_with_previous'))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)


def train(texts: Iterable[str], vocab_size: int, max_texts: int) -> bytes:
  """Trains a lower-case unigram vocabulary; the same texts give the same bytes.

  It reads a random sample of at most `max_texts` texts; long ones are several.
  Raises ConfigError for a size that the texts do not give, InvalidDataError
  without text.
  """
  import sentencepiece

  # Normalised before they are cut: a character may become several.
  normalized = map(normalizer_of().normalize_str, texts)
  parts = (part for text in normalized for part in _TRAINING_TEXT.findall(text))
  # A list: the trainer turns an iterator's exceptions into RuntimeError.
  sample = _sample(filter(None, map(str.strip, parts)), max_texts)
  if not sample:
    reason = 'a corpus of one document needs --validation_share=0'
    raise InvalidDataError(f'no text to train a vocabulary from; {reason}')
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(sample), model_writer=model, model_type='unigram',
      vocab_size=vocab_size, character_coverage=0.99995,
      pad_id=0, unk_id=1, bos_id=-1, eos_id=-1,
      control_symbols=list(SPECIAL[UNIGRAM][2:]),
      user_defined_symbols=list(OWN_PIECES),
      num_threads=16,  # the result depends on the number of threads
      minloglevel=2,  # errors only
    )  # fmt: skip
  except RuntimeError as error:
    expected = f'a size that can be trained from the texts ({error})'
    raise ConfigError('vocab_size', vocab_size, expected) from error
  return model.getvalue()


def _sample(texts: Iterable[str], max_texts: int) -> list[str]:
  """Returns a random sample in the order of the texts, the same each time."""
  draws, limit, characters = random.Random(0), 1.0, 0
  kept: list[tuple[float, int, str]] = []  # a heap, the largest number first
  for place, text in enumerate(texts):
    draw = draws.random()
    if draw >= limit:
      continue
    heapq.heappush(kept, (-draw, place, text))
    characters += len(text)
    while len(kept) > max_texts or characters > MAX_TRAINING_CHARACTERS:
      largest, _, dropped = heapq.heappop(kept)
      limit, characters = -largest, characters - len(dropped)
  return [text for _, _, text in sorted(kept, key=lambda entry: entry[1])]
