"""How the tensors of one layout become the parameters of the published diffusers and transformers classes.

A layout is a table of rules, one per stored tensor. Loading, checking, inspecting and converting all read the same
table; what a rule does to rows is in `services/common/weights.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from services.checkpoints.printable import printable
from services.checkpoints.source import StoredTensor


class Rows(Enum):
    """How the rows of a stored tensor relate to those of the parameters it becomes."""

    SAME = "the same rows"
    STACKED = "one parameter's rows after the other's"
    PER_HEAD = "for each head, the head's rows of every parameter"
    SWAPPED_HALVES = "the second half first"


@dataclass(frozen=True)
class Rule:
    """What one stored tensor becomes."""

    targets: tuple[str, ...]
    """Parameters of the published class, in order; empty for a tensor that is known and not needed."""
    rows: Rows = Rows.SAME
    """How its rows are cut and ordered."""
    num_heads: int = 1
    """Attention heads, for `Rows.PER_HEAD`."""


KeyMap = Mapping[str, Rule]
"""Rules by the stored tensor's key; every key of the layout has one."""
Shape = tuple[int, ...]


def identity(keys: Iterable[str]) -> dict[str, Rule]:
    """The map of a layout whose keys are the class's own."""
    return {key: Rule((key,)) for key in keys}


def stored_shape(rule: Rule, shapes: Mapping[str, Shape]) -> Shape:
    """Shape of the stored tensor of a rule with targets. shapes: of the parameters."""
    first, *rest = (shapes[target] for target in rule.targets)
    return first if not rest else (first[0] + sum(shape[0] for shape in rest), *first[1:])


def problems(
    found: Mapping[str, StoredTensor],
    key_map: KeyMap,
    shapes: Mapping[str, Shape],
    dtypes_of: Callable[[str], tuple[str, ...]],
    is_unread: Callable[[str], bool] = lambda key: False,
) -> list[str]:
    """Everything that is wrong with the tensors of a checkpoint, one sentence for each kind of fault.

    shapes: of the parameters that must come out, as far as they are known.
    dtypes_of: the dtypes that a parameter may be stored in.
    is_unread: whether a key without a rule belongs to a part of the model that is left in the file.
    """
    faults = []
    unknown = [key for key in found if key not in key_map and not is_unread(key)]
    if unknown:
        faults.append(f"{len(unknown)} unknown: {summary(unknown)}")
    missing = [key for key, rule in key_map.items() if rule.targets and key not in found]
    if missing:
        faults.append(f"{len(missing)} missing: {summary(missing)}")
    wrong: dict[str, list[str]] = defaultdict(list)
    for key, rule in key_map.items():
        if not rule.targets or key not in found:
            continue
        info = found[key].info
        if shapes.keys() >= set(rule.targets) and info.shape != (expected := stored_shape(rule, shapes)):
            wrong[f"of shape {list(info.shape)}, expected {list(expected)}"].append(key)
        if info.dtype not in (allowed := dtypes_of(rule.targets[0])):
            wrong[f"{info.dtype}, expected {' or '.join(allowed)}"].append(key)
    faults += (f"{len(keys)} {what}: {summary(keys)}" for what, keys in wrong.items())
    return faults


_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]*)(?![0-9])")
"""Numbers that are counted; one with leading zeros is a word, for it would be told like the one without."""
_MAX_TOLD = 200
"""Most names in a message. A published layout with every key wrong is told in 60."""

_MAX_RANGES = 64
"""Most ranges in a name; no published layout has so many numbers in one place."""


def summary(keys: Iterable[str]) -> str:
    """Every key, those that differ in numbers alone told together: `blocks.{0-49}.norm1.weight`.

    Of keys that have nothing in common only some are told, as many as anybody would read.
    """
    groups: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
    for key in keys:
        pieces = _NUMBER.split(printable(key))
        groups[tuple(pieces[::2])].add(tuple(int(number) for number in pieces[1::2]))
    told = list(itertools.islice(_told(groups), _MAX_TOLD + 1))
    return ", ".join(told[:_MAX_TOLD]) + (", and others" if len(told) > _MAX_TOLD else "")


def _told(groups: Mapping[tuple[str, ...], set[tuple[int, ...]]]) -> Iterator[str]:
    for words, numbers in sorted(groups.items()):
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        # Only a full grid can be told by its columns: {0-49} x {1, 2} names a hundred keys.
        if len(numbers) == math.prod(map(len, columns)):
            yield _woven(words, (_ranges(column) for column in columns))
        else:
            yield from (_woven(words, map(str, row)) for row in sorted(numbers))


def _woven(words: tuple[str, ...], numbers: Iterable[str]) -> str:
    return "".join(piece for pair in itertools.zip_longest(words, numbers, fillvalue="") for piece in pair)


def _ranges(values: list[int]) -> str:
    """`7` for one value, `{0-3,7}` for more."""
    if len(values) == 1:
        return str(values[0])
    told = []
    for _, run in itertools.groupby(enumerate(values), key=lambda pair: pair[1] - pair[0]):
        members = [value for _, value in run]
        told.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return "{" + ",".join(told[:_MAX_RANGES]) + (",…}" if len(told) > _MAX_RANGES else "}")
