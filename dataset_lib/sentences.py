"""Cuts text into sentences by rules, without losing a character.

A sentence ends behind ".", "!", "?" or "…" and the quotes and brackets that
close there, if white space follows and then a word that does not begin with a
small letter. No sentence ends behind an abbreviation ("Dr."), a single letter
("J."), letters with dots between ("e.g.") or a number's "No.". The full stop
of Chinese and Japanese needs no space behind it. Nothing else depends on the
language, and a mistake costs little: rows of training are cut elsewhere too.
"""

import re

_CLOSING = '"\'”’»)\\]}」』'  # noqa: RUF001
# Looked at from its first character only, and never again from the next ones:
# a line of a million dots takes linear time. The word may stand behind a few
# opening quotes, brackets or dashes.
_END = re.compile(
  rf'(?<![.!?…])([.!?…]++)([{_CLOSING}]*+)\s++(?=\W{{0,8}}(\w))'
  rf'|[。！？]++[{_CLOSING}]*+\s*+'  # noqa: RUF001
)
_WORD = re.compile(r'(?<!\w)[^\W\d_]+(?:\.[^\W\d_]+)*\Z')
_LOOK_BACK = 16  # characters before a full stop that may be an abbreviation


def _set(names: str) -> frozenset[str]:
  return frozenset(names.split())


# Before names, and where a sentence hardly ends.
ABBREVIATIONS = _set(
  'mr mrs ms messrs mme mlle dr drs prof rev revd hon sen rep gov gen col maj '
  'capt cpt lt sgt cmdr adm st ste sr jr esq bros co corp inc ltd mt ft '
  'vs viz cf eg ie al approx dept est univ assn ave blvd rd '
  'jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat '
  'sun hr hrn fr bzw usw ca evtl vgl nr str sig dott sra mm'
)
# Before numbers: "No. 5", but "No. He went."
NUMBERED = _set(
  'no nos nr num fig figs p pp vol vols ch chap art sec par op ver'
)


def split(text: str) -> list[str]:
  """The sentences of a paragraph; joined, they are the paragraph.

  Args:
    text: any text; the end of a line in it is white space like any other.

  Returns:
    Sentences with the white space behind them; [] for an empty text.
  """
  sentences, start = [], 0
  for match in _END.finditer(text):
    if match[1] is None or _ends_here(text, match):
      sentences.append(text[start : match.end()])
      start = match.end()
  if start < len(text):
    sentences.append(text[start:])
  return sentences


def _ends_here(text: str, match: re.Match[str]) -> bool:
  mark, closing, following = match.groups()
  if following.islower():
    return False
  if mark != '.' or closing:
    return True
  before = text[max(0, match.start() - _LOOK_BACK) : match.start()]
  word = _WORD.search(before)
  if not word:
    return True
  name = word[0]
  if len(name) == 1:
    return name == 'I'  # the initial of a name, or the pronoun
  if name.lower() in NUMBERED:
    return not following.isdigit()
  letters_with_dots = all(len(part) == 1 for part in name.split('.'))
  return not letters_with_dots and name.lower() not in ABBREVIATIONS
