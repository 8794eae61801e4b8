"""What layout changes does not change the tokens, and what the standard tokenizer sees is seen."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import sysconfig
import tokenize
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.safety.code_tokens import Token, line_words, logical_lines, num_words

STDLIB = Path(sysconfig.get_path("stdlib"))


def exact(text: str) -> list[list[str]]:
    return [line_words(line, blind=False) for line in logical_lines(text)]


def shape(text: str) -> list[list[str]]:
    return [line_words(line, blind=True) for line in logical_lines(text)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("x = [a, b]", "x = [\n    a,  # first\n    b,\n]"),
        ("f(x)", "f(\n    x,\n)"),
        ("x = 'a'", 'x = "a"'),
        ("x = 'it\\'s'", 'x = "it\'s"'),
        ("x = 'a\"b'", 'x = "a\\"b"'),
        ("x = r'a'", "x = R'a'"),
        ("x = '''a'''", 'x = "a"'),
        ("x = 0XFF + 1_000", "x = 0xff + 1000"),
        ("return (a or b)", "return a or b"),
        ("if (a): return b", "if a:\n    return b"),
        ("x = 1; y = 2", "x = 1\ny = 2\n"),
        ("x = a + \\\n    b", "x = a + b"),
        ("for (a, b) in c: pass", "for a, b in c:\n\n\n    pass"),
        ('"""Doc."""\nx = 1', "x = 1  # no doc"),
        ("'a' 'b'\nx = 1", "x = 1"),
        ("\ufeffx = 1\r\ny = 2\r", "x = 1\ny = 2"),
        ("async with a as b: pass", "async with (a) as b:\n    pass"),
    ],
)
def test_layout_does_not_count(ours: str, theirs: str) -> None:
    assert exact(ours) == exact(theirs)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("f(x)", "f x"),
        ("x = 'a'", "x = a"),
        ("x = '('", "x = ("),
        ("x = 1", "x = 1.0"),
        ("x = y", "x == y"),
        ("x: int = 1", "x = 1"),
        ("f = lambda: x", "f = x"),
    ],
)
def test_what_the_code_does_counts(ours: str, theirs: str) -> None:
    assert exact(ours) != exact(theirs)


def test_a_line_as_tokens() -> None:
    assert logical_lines("x[1] = f'a{b}'") == [
        [
            Token("name", "x"),
            Token("operator", "["),
            Token("number", "1"),
            Token("operator", "]"),
            Token("operator", "="),
            Token("string", "a{b}"),
        ]
    ]


def test_heads_of_blocks_are_lines_of_their_own() -> None:
    text = (
        "if x[1:2]: y = {1: 2}\nelse: z = lambda a: a\nwhile (lambda: x)(): pass\nx: int = 1\nclass A: b: int"
    )
    assert [" ".join(line) for line in exact(text)] == [
        "if x [ 1 : 2 ]",
        "y = { 1 : 2 }",
        "else",
        "z = lambda a : a",
        "while lambda : x : pass",  # a lambda in a head: its colons cannot be told apart
        "x : int = 1",
        "class A",
        "b : int",
    ]


def test_names_of_variables_and_constants_have_no_shape() -> None:
    line = "total = round(order.price * 1.5, digits=2) or 'none'"
    called = [
        "variable",
        "=",
        "round(",
        "variable",
        ".",
        "price",
        "*",
        "a number",
        ",",
        "digits",
        "=",
        "a number",
    ]
    assert shape(line) == [[*called, "or", "a string"]]
    assert shape("s = int(o.price * 7, digits=0) or ''") != shape(line)
    assert shape("s = round(o.price * 7, digits=0) or ''") == shape(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return self._x", 1),
        ("return cls.make()", 1),
        ("return None", 0),
        ("else:", 0),
        ("x += x * x", 1),
        ("return self.compare(other) <= 0", 3),
        ("raise Error('no ' + name)", 3),
        ("x = ''", 1),
        ("x = '1' + 1", 3),
    ],
)
def test_the_words_of_a_line(line: str, expected: int) -> None:
    assert num_words(logical_lines(line)[0]) == expected


def standard_tokens(text: str) -> list[str]:
    """Names, numbers and operators by the standard tokenizer; an f-string is one string there as here."""
    found, depth = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if kind in ("NAME", "NUMBER", "OP") and not depth:
            found.append(token.string)
    return found


@pytest.mark.parametrize("name", ["heapq.py", "re/_parser.py"])
def test_the_standard_tokenizer_sees_the_same_tokens(name: str) -> None:
    text = (STDLIB / name).read_text()
    ours = [token.text for line in logical_lines(text) for token in line if token.kind != "string"]
    dropped = {",", ":", ";"}  # before a bracket, after a head, between statements
    theirs = [token.lower() if token[0].isdigit() else token for token in standard_tokens(text)]
    assert [token for token in ours if token not in dropped] == [
        token for token in theirs if token not in dropped
    ]
    assert len(ours) > 200


def test_a_real_formatter_does_not_hide_a_body() -> None:
    text = (STDLIB / "heapq.py").read_text()
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "30", "-"]
    formatted = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    assert formatted != text
    ours, theirs = exact(text), exact(formatted)
    assert len(ours) > 250
    assert ours == theirs


def test_text_that_is_no_python_is_cut_by_the_same_rules() -> None:
    assert exact("x = 'open\n$ y ? ü) ]") == [["x", "=", "'", "open"], ["$", "y", "?", "ü", "]"]]
    assert exact("f(x\ny\n") == [["f(", "x", "y"]]
    assert exact("") == exact("# only\n\n'''text'''") == []


@pytest.mark.no_cover
@given(st.text(alphabet="ab1.'\"#\\\n\r ()[]{}:;,=é\ud800\ufeff\x0c", max_size=40))
def test_any_text_is_cut(text: str) -> None:
    for line in logical_lines(text):
        assert line
        assert len(line_words(line, blind=True)) == len(line_words(line, blind=False))
        assert num_words(line) <= len(line)


NAMES = st.sampled_from(["a", "b", "self", "total", "f", "key"])


@st.composite
def statements(draw: st.DrawFn) -> str:
    left, right, called = draw(NAMES), draw(NAMES), draw(NAMES)
    return draw(
        st.sampled_from(
            [
                f"{left} = {called}({right}, key={left}[1:2])",
                f"if {left} and ({right} or not {left}):\n    return {{'x': {right}, 'y': [{left}]}}",
                f"for {left}, {right} in {called}.items():\n    {called}.add(({left}, {right}))",
                f"{left}.{right} = 'text' + {called}('''more''')",
                f"raise {called}(f'{{{left}}}') from {right}",
            ]
        )
    )


@pytest.mark.no_cover
@given(st.lists(statements(), min_size=1, max_size=5).map("\n".join))
def test_writing_code_out_anew_changes_nothing(text: str) -> None:
    assert exact(text) == exact(ast.unparse(ast.parse(text)))
