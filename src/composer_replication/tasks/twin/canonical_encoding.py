"""One canonical form for what a call returned, so that equal behaviour gives equal text.

Runs inside the sandbox (its text is sent along) and is imported outside by tests alone.
Nothing here asks a value whether it equals another one: an ``__eq__`` that always says
yes is worth nothing.

scalars              exact type name and ``repr``; floats to 12 digits, -0.0 as 0.0
list, tuple          type name, items in order
dict, set            type name, entries sorted by their own encoding
OrderedDict          entries in order
iterators            the first 300 items, without the type: a generator equals a list iterator
exceptions           the type's name alone, never the message
classes, modules     their names
functions            and callable objects in a result: ``OpaqueValue``; in arguments: their names
other objects        type name and what ``__reduce_ex__(2)`` gives
"""

import collections
import copyreg
import hashlib
import itertools
import types

MAX_ITERATED = 300
"""Items taken from an iterator: an endless one is compared by its beginning."""
MAX_NODES = 50_000
"""Parts of one value; a larger one is opaque, for comparing it would cost more than it tells."""
MAX_DEPTH = 120
NUM_DIGITS = 12

_SCALARS = (type(None), bool, str, bytes, bytearray, type(Ellipsis), type(NotImplemented), range)
_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.WrapperDescriptorType,
    types.MethodDescriptorType,
)  # fmt: skip
_ORDERED = (list, tuple, collections.deque)
_UNORDERED: tuple[type, ...] = (set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_MAPPINGS = (dict, collections.Counter, collections.OrderedDict, types.MappingProxyType)


class OpaqueValue(Exception):
    """The value has no canonical form: a function, a lock, or too large."""


class Work:
    """How much this process has encoded: a measure of time that is the same on every machine."""

    num_nodes = 0


def type_name(kind):
    """Module and qualified name of a type; of a built-in one the name alone."""
    module = type.__getattribute__(kind, "__module__")
    name = type.__getattribute__(kind, "__qualname__")
    return str(name) if module == "builtins" else f"{module}.{name}"


def encode_float(value):
    """Twelve significant digits; the two zeros are one."""
    return format(value + 0.0 if value else 0.0, ".12g")


def node(name, *parts):
    """The text of a nested tuple: a name, then texts of what is inside."""
    return f"({', '.join([repr(name), *parts])})" if parts else f"({name!r},)"


def encode(value, *, is_result=True, pickled=None):
    """The canonical form: nested tuples of texts, as Python prints them.

    Iterators are used up to ``MAX_ITERATED`` items. In a result a function makes the whole value opaque; otherwise it is
    encoded by its name and told apart by what ``pickled`` makes of it, as two lambdas are. Raises
    ``OpaqueValue`` where there is no canonical form, and whatever an iterator, ``__reduce_ex__`` or ``pickled`` raises.
    """
    return _Encoder(is_result=is_result, pickled=pickled).encode(value)


def digest(encoded):
    """48 bits, as hexadecimal digits, for a canonical form.

    Two thirds of a twin were digests of 128 bits. Nobody can look for a collision: what a digest has to
    be is never where a candidate runs.
    """
    return hashlib.sha256(encoded.encode("utf-8", "backslashreplace")).hexdigest()[:NUM_DIGITS]


class _Encoder:
    def __init__(self, *, is_result, pickled):
        self.is_result = is_result
        self.pickled = pickled
        self.path = []
        self.most = Work.num_nodes + MAX_NODES

    def encode(self, value):
        Work.num_nodes += 1
        if Work.num_nodes > self.most or len(self.path) > MAX_DEPTH:
            raise OpaqueValue("too large")
        kind = type(value)
        if kind in _SCALARS or kind is memoryview:
            plain = value.tobytes() if kind is memoryview else value
            return node(type_name(kind), repr(repr(plain)))
        if kind is int:
            return node("int", repr(repr(value) if value.bit_length() < 4000 else hex(value)))
        if kind is float:
            return node("float", repr(encode_float(value)))
        if kind is complex:
            return node("complex", repr(encode_float(value.real)), repr(encode_float(value.imag)))
        if id(value) in self.path:
            return node("cycle", repr(str(len(self.path) - self.path.index(id(value)))))
        self.path.append(id(value))
        try:
            return self._encode_nested(value, kind)
        finally:
            self.path.pop()

    def _encode_nested(self, value, kind):
        if kind in _ORDERED or kind in _UNORDERED:
            items = [self.encode(item) for item in list(value)]
            return node(type_name(kind), *(sorted(items) if kind in _UNORDERED else items))
        if kind in _MAPPINGS:
            return node(type_name(kind), *self._pairs(value.items(), kind))
        if isinstance(value, types.ModuleType):
            return node("module", repr(str(value.__name__)))
        if issubclass(kind, type):
            return node("class", repr(type_name(value)))
        if kind in _FUNCTIONS:
            return self._encode_function(value)
        if issubclass(kind, BaseException):
            return node("exception", repr(kind.__name__))
        if hasattr(kind, "__next__"):
            items = [self.encode(item) for item in itertools.islice(value, MAX_ITERATED)]
            return node("iterator", *items, *([repr("...")] if len(items) == MAX_ITERATED else []))
        return self._encode_object(value, kind)

    def _pairs(self, pairs, kind):
        """Entries of a mapping; only in an ``OrderedDict`` their order counts."""
        texts = [_tuple([self.encode(key), self.encode(value)]) for key, value in list(pairs)]
        return texts if issubclass(kind, collections.OrderedDict) else sorted(texts)

    def _encode_function(self, value):
        if self.is_result:
            raise OpaqueValue("a function")
        name = repr(f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', '')}")
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            return node("method", name, self.encode(owner))
        if self.pickled is None or not isinstance(value, types.FunctionType):
            return node("function", name)
        return node("function", name, repr(hashlib.sha256(self.pickled(value)).hexdigest()))

    def _encode_object(self, value, kind):
        if self.is_result and callable(value):
            raise OpaqueValue(type_name(kind))  # a partial and a lambda may do the same
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(2)
        except Exception as error:
            if self.is_result:
                raise OpaqueValue(type_name(kind)) from error
            return node("unknown", repr(type_name(kind)))
        if isinstance(reduced, str):
            return node("global", repr(type_name(kind)), repr(reduced))
        maker, arguments, state, items, pairs = [*reduced, None, None, None][:5]
        entries = self._pairs(pairs or (), kind)
        return node(
            type_name(kind),
            repr(str(getattr(maker, "__qualname__", ""))),
            # The class itself is already named, and a class made by a test has no better name.
            _tuple([self.encode(item) for item in arguments if item is not kind]),
            self.encode(state),
            _tuple([self.encode(item) for item in list(items or ())]),
            _tuple(entries),
        )


def _tuple(texts):
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
