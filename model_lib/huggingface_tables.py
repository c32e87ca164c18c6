"""How the table of a Hugging Face architecture is written down.

`huggingface_bert` and `huggingface_albert` hold the tables themselves: the
options of config.json, and the modules with their names here and there.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple


class Place(NamedTuple):
  """Where a tensor goes.

  Attributes:
    name: of the parameter here.
    shape: of the parameter here.
  """

  name: str
  shape: tuple[int, ...]

  @property
  def transposed(self) -> bool:
    """Whether the tensor is the transpose of the parameter."""
    return self.name.endswith('/kernel')

  @property
  def shape_there(self) -> tuple[int, ...]:
    """Shape of the tensor."""
    return self.shape[::-1] if self.transposed else self.shape


class Module(NamedTuple):
  """One module with its parameters.

  Attributes:
    ours: its name here; in a block what comes behind `block_<i>/`.
    theirs: its name there, in a block what comes behind that of the block.
    kind: 'embedding' [a, b], 'dense' [a, b] with a bias [b], 'norm' [a] with
      a bias [a], or 'bias' [a] alone.
    sizes: the names of a and b: fields of the model, or 'num_classes', or
      a number.
  """

  ours: str
  theirs: str
  kind: Literal['embedding', 'dense', 'norm', 'bias']
  sizes: tuple[str | int, ...]

  def places(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, Place]]:
    """(name there, place here) of each parameter of the module."""
    shape = tuple(
      sizes[size] if isinstance(size, str) else size for size in self.sizes
    )
    if self.kind == 'bias':
      yield f'{self.theirs}.bias', Place(f'{self.ours}/bias', shape)
      return
    leaf = {'embedding': 'embedding', 'dense': 'kernel', 'norm': 'scale'}
    weight = Place(f'{self.ours}/{leaf[self.kind]}', shape)
    yield f'{self.theirs}.weight', weight
    if self.kind != 'embedding':
      yield f'{self.theirs}.bias', Place(f'{self.ours}/bias', shape[-1:])


@dataclasses.dataclass(frozen=True)
class Architecture:
  """What a `model_type` means.

  Attributes:
    model_type: its name, and the prefix of the tensors of its encoder.
    options: our field for each option of config.json that has one.
    defaults: all fields, with the values of absent options.
    fixed: fields without an option: what the architecture always has.
    only: options that would change the computation, with their only legal
      values; besides those of every architecture.
    rates: the option of each dropout rate, which a configuration that is
      written may carry.
    base: modules outside the blocks; their tensors have the prefix.
    stack: name there of the block {outer}, {inner}; its tensors have the
      prefix.
    block: modules of a block.
    heads: modules behind the encoder, of a 'classifier' of sentences or those
      of 'pretraining'; their tensors have no prefix.
    classes: the class of transformers that has these heads.
    tied: tensors that must equal another one, which is the one to be read.
    tie_option: the option that says whether they do, '' if nothing does.
    outer: the field that counts the blocks.
    inner: the field that counts the blocks within each, '' for one.
  """

  model_type: str
  options: Mapping[str, str]
  defaults: Mapping[str, Any]
  fixed: Mapping[str, Any]
  only: Mapping[str, tuple[Any, ...]]
  rates: Mapping[str, str]
  base: tuple[Module, ...]
  stack: str
  block: tuple[Module, ...]
  heads: Mapping[str, tuple[Module, ...]]
  classes: Mapping[str, str]
  tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
  tie_option: str = ''
  outer: str = 'depth'
  inner: str = ''

  def modules(self, fields: Mapping[str, Any], heads: str) -> list[Module]:
    """All modules, with their whole names but for the prefix."""
    inner = fields[self.inner] if self.inner else 1
    modules = [*self.base, *self.heads[heads]]
    for index in range(fields[self.outer] * inner):
      outer, rest = divmod(index, inner)
      there = self.stack.format(outer=outer, inner=rest)
      modules += [
        module._replace(
          ours=f'block_{index}/{module.ours}', theirs=f'{there}.{module.theirs}'
        )
        for module in self.block
      ]
    return modules

  def check_heads(self, heads: str) -> None:
    """Raises ValueError unless the architecture has these heads."""
    if heads not in self.heads:
      raise ValueError(
        f'heads: expected one of {tuple(self.heads)} for {self.model_type}, '
        f'got {heads!r}'
      )

  def unprefixed(self, heads: str) -> tuple[str, ...]:
    """How the names of the tensors of these heads begin."""
    tops = {module.theirs.partition('.')[0] for module in self.heads[heads]}
    return tuple(f'{top}.' for top in sorted(tops))
