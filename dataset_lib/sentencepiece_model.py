"""SentencePiece unigram models: trained from text, read by `tokenizers`."""

import heapq
import io
import json
import os
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from core import files
from core.errors import ConfigError, InvalidDataError

MODEL_FILE = 'spiece.model'
SPACE = '▁'  # U+2581, SentencePiece's space before a word
# ALBERT's names, and the first ids of its vocabulary in this order.
SPECIAL_TOKENS = ('<pad>', '<unk>', '[CLS]', '[SEP]', '[MASK]')
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
      sentence_iterator=iter(sample),
      model_writer=model,
      model_type='unigram',
      vocab_size=vocab_size,
      character_coverage=0.99995,
      pad_id=0,
      unk_id=1,
      bos_id=-1,
      eos_id=-1,
      control_symbols=list(SPECIAL_TOKENS[2:]),
      user_defined_symbols=list(OWN_PIECES),
      num_threads=16,  # the result depends on the number of threads
      minloglevel=2,  # errors only
    )
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


def read(path: str | os.PathLike[str], config: Mapping[str, Any]) -> Any:
  """Converts a model, and its tokenizer_config.json, for `tokenizers`."""
  from sentencepiece import sentencepiece_model_pb2

  proto: Any = sentencepiece_model_pb2
  model = proto.ModelProto.FromString(files.read_record(path))
  trainer, pieces = model.trainer_spec, model.pieces
  # The specs follow the pieces: a file that was cut short lacks the specs.
  if not (model.HasField('trainer_spec') and model.HasField('normalizer_spec')):
    raise InvalidDataError(f'{path} is damaged: it ends early')
  kind = trainer.ModelType.Name(trainer.model_type)
  kind += ' with byte_fallback' * trainer.byte_fallback
  if kind != 'UNIGRAM' or not pieces:
    expected = 'a SentencePiece model of type UNIGRAM'
    got = f'{kind} with {len(pieces)} pieces'
    raise InvalidDataError(f'{path}: expected {expected}, got {got}')
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


def begins_word(piece: str) -> bool:
  """Whether a piece begins a word, as in ALBERT's data generator.

  A piece with a space does, punctuation, and text of a script without spaces.
  """
  if piece.startswith(SPACE) or not any(map(str.isalnum, piece)):
    return True
  letters = (unicodedata.name(letter, '') for letter in piece)
  return any(letter.startswith(_WITHOUT_SPACES) for letter in letters)


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
