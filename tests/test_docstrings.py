"""Every example of a docstring runs and prints what it says; so do the Python blocks of the README."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import favor_keras

README = pathlib.Path(__file__).parents[1] / "README.md"


def docstring_examples():
    names = [favor_keras.__name__]
    names += [module.name for module in pkgutil.walk_packages(favor_keras.__path__, "favor_keras.")]
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in names:
        module = importlib.import_module(name)
        yield from (test for test in finder.find(module, name) if test.examples)


EXAMPLES = {example.name: example for example in docstring_examples()}


def test_examples_are_found():
    assert {"favor_keras.ops.linear_attention.linear_attention", "favor_keras.ops.chunk_scan.scan_chunks"} <= set(
        EXAMPLES
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = EXAMPLES[name]
    example.globs = {}  # it must import what it uses
    report = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
    assert not report, "".join(report)


def python_blocks(text):
    """(number of the line before, source) of every fenced Python block."""
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)), match.group(1)


@pytest.mark.skipif(not README.exists(), reason="installed without the README")
def test_readme_blocks_run_one_after_another_I7(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = list(python_blocks(README.read_text(encoding="utf-8")))
    assert blocks
    namespace = {"__name__": "readme"}
    for line, source in blocks:
        exec(compile("\n" * line + source, str(README), "exec"), namespace)
