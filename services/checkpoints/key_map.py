"""How the tensors of one layout become the parameters of the published diffusers and transformers classes.

A layout is a table of rules, one per stored tensor. Loading, checking, inspecting and converting all read the same
table; what a rule does to rows is in `services/common/weights.py`.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

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

    shapes: of the parameters that must come out.  dtypes_of: the dtypes that a parameter may be stored in.
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
        if info.shape != (expected := stored_shape(rule, shapes)):
            wrong[f"of shape {list(info.shape)}, expected {list(expected)}"].append(key)
        if info.dtype not in (allowed := dtypes_of(rule.targets[0])):
            wrong[f"{info.dtype}, expected {' or '.join(allowed)}"].append(key)
    faults += (f"{len(keys)} {what}: {summary(keys)}" for what, keys in wrong.items())
    return faults


_NUMBER = re.compile(r"(\d+)")


def summary(keys: Iterable[str]) -> str:
    """Every key, those that differ in numbers alone told together: `blocks.{0-49}.norm1.weight`."""
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    for key in keys:
        pieces = _NUMBER.split(key[:200])
        groups[tuple(pieces[::2])].append(tuple(int(number) for number in pieces[1::2]))
    return ", ".join(_told(words, numbers) for words, numbers in sorted(groups.items()))


def _told(words: tuple[str, ...], numbers: list[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    # Only a full grid can be told by its columns: {0-49} x {1, 2} names a hundred keys.
    if len(set(numbers)) != _product(columns):
        return ", ".join("".join(_woven(words, map(str, row))) for row in sorted(set(numbers)))
    return "".join(_woven(words, (_ranges(column) for column in columns)))


def _product(columns: list[list[int]]) -> int:
    count = 1
    for column in columns:
        count *= len(column)
    return count


def _woven(words: tuple[str, ...], numbers: Iterable[str]) -> Iterable[str]:
    return (piece for pair in itertools.zip_longest(words, numbers, fillvalue="") for piece in pair)


def _ranges(values: list[int]) -> str:
    """`7` for one value, `{0-3,7}` for more."""
    if len(values) == 1:
        return str(values[0])
    told = []
    for _, run in itertools.groupby(enumerate(values), key=lambda pair: pair[1] - pair[0]):
        members = [value for _, value in run]
        told.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return "{" + ",".join(told) + "}"
