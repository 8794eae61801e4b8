"""Changes recorded calls a little, so that a table of the recorded ones does not answer.

Runs inside the sandbox; its text is sent along. Everything is drawn from one seeded
generator, in one order, so the same calls and seed give the same changes.
"""

import collections
from typing import Any

OTHER_VALUE_SHARE = 0.3
"""How often an argument is replaced by another recorded value of the same parameter."""
_TEXTS = ("é", "ß", "漢", " ", "_", "-", "A", "z", "0", ".", "'", "\n")


class CallPool:
    """Recorded calls, loaded afresh whenever one of their values is used."""

    def __init__(self, blobs, loads):
        self.blobs = blobs
        self.loads = loads
        self.places = collections.defaultdict(list)
        for number, blob in enumerate(blobs):
            args, kwargs = loads(blob)
            for place in [*range(len(args)), *kwargs]:
                self.places[place].append(number)

    def mutated(self, draw):
        """A recorded call with one or two arguments changed; None when nothing can be changed."""
        args, kwargs = self.loads(self.blobs[draw.randrange(len(self.blobs))])
        args, kwargs = list(args), dict(kwargs)
        places = [*range(len(args)), *kwargs]
        if not places:
            return None
        is_changed = False
        for place in draw.sample(places, min(len(places), draw.choice((1, 1, 2)))):
            holder = args if isinstance(place, int) else kwargs
            is_changed |= self._change(holder, place, draw)
        return (tuple(args), kwargs) if is_changed else None

    def _change(self, holder, place, draw):
        value = holder[place]
        if draw.random() < OTHER_VALUE_SHARE or type(value) not in _MUTATORS:  # objects are only exchanged
            numbers = self.places[place]
            if len(numbers) < 2:
                return False
            args, kwargs = self.loads(self.blobs[draw.choice(numbers)])
            holder[place] = args[place] if isinstance(place, int) else kwargs[place]
            return True
        holder[place] = mutate(value, draw)
        return True


def mutate(value, draw, depth=0):
    """A value of the same type that is a little different; others come back as they are."""
    mutator = _MUTATORS.get(type(value))
    return value if mutator is None or depth > 4 else mutator(value, draw, depth)


def _text(value, draw, _depth):
    if not value:
        return draw.choice(_TEXTS)
    cut, other = draw.randrange(len(value)), draw.randrange(len(value) + 1)
    low, high = min(cut, other), max(cut, other)
    return draw.choice(
        (
            value[:cut] + value[cut + 1 :],
            value[low:high],
            value[:other] + draw.choice(_TEXTS) + value[other:],
            value[::-1],
            value.swapcase(),
            value.title(),
            value[:other] + value[low:high] + value[other:],
            value[other:] + value[:other],
            value + value,
        )
    )


def _bytes(value, draw, _depth):
    cut = draw.randrange(len(value) + 1)
    changed = draw.choice((value[cut:], value[:cut], value[:cut] + b"a" + value[cut:], bytes(value[::-1])))
    return type(value)(changed)


def _list(value, draw, depth):
    items = list(value)
    if not items:
        return [draw.choice((0, 1, "a", None))]
    place = draw.randrange(len(items))
    way = draw.randrange(6)
    if way == 0:
        del items[place]
    elif way == 1:
        items.insert(draw.randrange(len(items) + 1), items[place])
    elif way == 2:
        items.reverse()
    elif way == 3:
        draw.shuffle(items)
    elif way == 4:
        items.insert(place, mutate(items[place], draw, depth + 1))
    else:
        items[place] = mutate(items[place], draw, depth + 1)
    return items


def _mapping(value, draw, depth):
    # Not type(value)(...): an empty one keeps a default factory, too.
    changed = value.copy()
    keys = list(changed)
    if not keys:
        changed[draw.choice((0, 1, "a"))] = draw.choice((0, 1, "a"))
        return changed
    key = draw.choice(keys)
    way = draw.randrange(4)
    if way == 0:
        del changed[key]
    elif way == 1:
        changed[mutate(key, draw, depth + 1)] = changed[key]
    elif way == 2:
        changed[draw.choice(keys)] = changed[key]
    else:
        changed[key] = mutate(changed[key], draw, depth + 1)
    return changed


def _set(value, draw, depth):
    # Sorted by type and text: the order of a set is not the same in every process.
    items = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    return type(value)(_list(items, draw, depth))


_MUTATORS: dict[type, Any] = {
    bool: lambda value, _draw, _depth: not value,
    int: lambda value, draw, _depth: draw.choice((value + 1, value - 1, 0, -value, 2 * value)),
    float: lambda value, draw, _depth: draw.choice(
        (value + 1.0, value - 0.5, 0.0, -value, 2.0 * value, value / 3.0)
    ),
    complex: lambda value, draw, _depth: draw.choice((value + 1, value * 2, -value, value.conjugate())),
    str: _text,
    **dict.fromkeys((bytes, bytearray), _bytes),
    list: _list,
    tuple: lambda value, draw, depth: tuple(_list(value, draw, depth)) if value else value,
    collections.deque: lambda value, draw, depth: collections.deque(_list(value, draw, depth), value.maxlen),
    **dict.fromkeys((dict, collections.OrderedDict, collections.defaultdict, collections.Counter), _mapping),
    **dict.fromkeys((set, frozenset), _set),
    type(iter([])): lambda value, draw, depth: iter(_list(value, draw, depth)),
    type(iter(())): lambda value, draw, depth: iter(_list(value, draw, depth)),
}
